"""`make dist`: the sdist, the wheel built from it, and whether everything is in them.

    python tools/distribution.py [--out dist]

The wheel is built from the unpacked sdist, so a file that the sdist lacks is missing in the wheel, too, and the comparison with
what git tracks below `src` finds it. The build tools of pyproject.toml are installed into a folder that is removed afterwards.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

__all__ = ["CannotPack", "build", "main", "missing_from", "revision"]

ROOT: Final = Path(__file__).parents[1]


class CannotPack(Exception):
    """No distribution can be built; the text says why."""


def build(out: Path) -> tuple[Path, Path]:
    """Build the sdist and the wheel into a folder. Return their paths."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="distribution-") as folder:
        place = Path(folder)
        tools = place / "tools"
        requires = project["build-system"]["requires"]
        print(f"fetching the build tools ({', '.join(requires)}) ...", file=sys.stderr)
        _run(
            [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                "--target",
                str(tools),
                *requires,
            ]
        )
        print("building the sdist ...", file=sys.stderr)
        sdist = _build("sdist", _copy(place / "source"), place, tools)
        with tarfile.open(sdist) as archive:
            archive.extractall(place / "unpacked", filter="data")
        (unpacked,) = (place / "unpacked").iterdir()
        print("building the wheel from it ...", file=sys.stderr)
        wheel = _build("wheel", unpacked, place, tools)
        lost = missing_from(wheel)
        if lost:
            raise CannotPack(f"{wheel.name} lacks what git tracks below src: {', '.join(lost[:10])}")
        return _move(sdist, out), _move(wheel, out)


def _copy(place: Path) -> Path:
    """Copy what git would take of this tree. The builder reads a whole tree, and that of a developer has many gigabytes."""
    listed = _run(["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"])
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    return place


def missing_from(wheel: Path) -> list[str]:
    """Return the files that git tracks below the roots of the package and that the wheel lacks or has with other bytes."""
    listed = _run(["git", "-C", str(ROOT), "ls-files", "-z", "src"]).split("\0")
    lost = []
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
        for name in filter(None, listed):
            inside = "/".join(name.split("/")[2:])  # src/WING/dynamo/...
            if not inside.startswith("dynamo/") or not (ROOT / name).is_file():
                continue
            if inside not in packed or archive.read(inside) != (ROOT / name).read_bytes():
                lost.append(name)
    return lost


def revision() -> tuple[str, int]:
    """Return the commit, with `-dirty` where tracked files differ from it, and its time in seconds since 1970."""
    commit, time = _run(["git", "-C", str(ROOT), "log", "-1", "--format=%H %ct"]).split()
    changed = _run(["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"]).strip()
    return f"{commit}-dirty" if changed else commit, int(time)


def main(argv: Sequence[str] | None = None) -> int:
    """Build both and print their paths, one a line."""
    first, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "distribution.py", description=first, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder of the results (%(default)s)")
    options = parser.parse_args(argv)
    try:
        for path in build(options.out):
            print(path)
    except CannotPack as error:
        print(f"distribution.py: {error}", file=sys.stderr)
        return 2
    return 0


def _build(kind: str, source: Path, place: Path, tools: Path) -> Path:
    out = place / kind
    # The time of the last commit: the same commit gives the same bytes.
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or str(revision()[1])
    env = {**os.environ, "PYTHONPATH": str(tools), "SOURCE_DATE_EPOCH": epoch}
    _run([sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(out)], cwd=source, env=env)
    (found,) = out.iterdir()
    return found


def _run(argv: Sequence[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotPack(
            f"{' '.join(argv)} ended with status {done.returncode}:\n{(done.stdout + done.stderr).strip()}"
        )
    return done.stdout


def _move(path: Path, out: Path) -> Path:
    return Path(shutil.copyfile(path, out / path.name))


if __name__ == "__main__":
    sys.exit(main())
