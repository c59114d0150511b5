"""`make mutants`: break the source on purpose, one place at a time, and see whether the tests notice.

Each mutant of `tools/mutants.toml` replaces one text of one file by another and names the tests that must fail. A mutant
that survives is a promise that no test holds. The working tree is not touched: the tests run over a copy of `src`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from wings import ROOT, WINGS, located

TABLE: Final = Path(__file__).with_suffix(".toml")
TEST_SECONDS: Final = 300  # a mutant may make a test hang; that counts as caught, and pytest-timeout is usually faster
ALLOWED_SURVIVORS: Final = 1  # of the whole table


class StaleMutant(ValueError):
    """The text to replace is not in its file exactly once."""


@dataclass(frozen=True)
class Mutant:
    """One deliberate break."""

    name: str  # what is broken, as a sentence
    file: str  # below the package
    old: str
    new: str
    tests: tuple[str, ...]  # what pytest is given

    def apply(self, source: Path) -> None:
        """Break the copy of the package in `source`. Raises StaleMutant."""
        path = located(self.file)
        text = path.read_text() if path is not None else ""
        if path is None or text.count(self.old) != 1:
            raise StaleMutant(f"{self.name}: {self.file} has the text {text.count(self.old)} times: {self.old!r}")
        (source / path.relative_to(ROOT / "src")).write_text(text.replace(self.old, self.new))


def read_table(path: Path = TABLE) -> list[Mutant]:
    """Read all mutants."""
    entries = tomllib.loads(path.read_text())["mutant"]
    return [Mutant(one["name"], one["file"], one["old"], one["new"], tuple(one["tests"])) for one in entries]


def check(mutants: Sequence[Mutant]) -> list[str]:
    """Return what is wrong with the table: stale texts, tests that are not there, a name that comes twice."""
    problems = [
        f"two mutants are called {name!r}"
        for name in {m.name for m in mutants}
        if [m.name for m in mutants].count(name) > 1
    ]
    for mutant in mutants:
        source = located(mutant.file)
        text = source.read_text() if source is not None else ""
        if text.count(mutant.old) != 1:
            problems.append(f"{mutant.name}: {mutant.file} has the text {text.count(mutant.old)} times: {mutant.old!r}")
        paths = [test.partition("::")[0] for test in mutant.tests if test.startswith("tests/")]
        problems += [f"{mutant.name}: there is no {path}" for path in paths if not (ROOT / path).exists()]
    return problems


def is_caught(mutant: Mutant) -> tuple[bool, float, str]:
    """Run the mutant's tests over a broken copy; return whether one failed, the seconds, and the last line of output."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        source = Path(directory) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        mutant.apply(source)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(source / wing) for wing in WINGS),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        try:
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TEST_SECONDS)
        except subprocess.TimeoutExpired:
            return True, time.monotonic() - began, "the tests hung"
    last = (done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]])[-1]
    if done.returncode not in (0, 1):  # nothing ran: that would count as caught
        raise RuntimeError(
            f"{mutant.name}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.returncode == 1, time.monotonic() - began, last


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "make mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="run the mutants whose name contains it")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    parser.add_argument("--check", action="store_true", help="only check the table against the source")
    options = parser.parse_args(argv)
    mutants = [mutant for mutant in read_table() if options.only in mutant.name]
    problems = check(mutants)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems or options.check:
        return 1 if problems else 0
    survivors = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, (caught, seconds, last) in zip(mutants, pool.map(is_caught, mutants), strict=True):
            print(f"{'caught' if caught else 'SURVIVED':9} {seconds:5.0f} s  {mutant.name}  ({last})", flush=True)
            if not caught:
                survivors.append(mutant)
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} caught")
    return 1 if len(survivors) > ALLOWED_SURVIVORS else 0


if __name__ == "__main__":
    raise SystemExit(main())
