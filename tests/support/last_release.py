"""The last release beside this tree: its packages as its wheel has them, in an environment of its own. Needs git, and no network."""

from __future__ import annotations

import re
import shutil
import site
import subprocess
import tarfile
import tomllib
import venv
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

__all__ = ["Release", "install", "last_release"]

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Release:
    """A version that the changelog names, and the commit that made it."""

    version: str
    commit: str


def last_release() -> Release | str:
    """Find the newest version of the changelog that has a date, or say in a sentence why there is none here."""
    heading = re.search(r"^## \[([\d.]+)\] - ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if heading is None:
        return "CHANGELOG.md names no release"
    try:
        if _git("rev-parse", "--is-shallow-repository").strip() != b"false":
            return "this clone is shallow, and the release is in its history"
        tags = _git("rev-parse", "--verify", "--quiet", f"v{heading[1]}^{{commit}}", may_fail=True).split()
        found = tags or _git("log", "--reverse", "--format=%H", f"-S## [{heading[1]}]", "--", "CHANGELOG.md").split()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"the history of git is needed for the last release: {error}"
    return Release(heading[1], found[0].decode()) if found else f"no commit of git is version {heading[1]}"


def install(release: Release, folder: Path) -> Path:
    """Make an environment with that release and the libraries of this one. Return its Python."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    asked = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True, capture_output=True
    )
    packages = Path(asked.stdout.decode().strip())
    with tarfile.open(fileobj=BytesIO(_git("archive", release.commit, "pyproject.toml", "src"))) as archive:
        archive.extractall(folder / "source", filter="data")
    project = tomllib.loads((folder / "source" / "pyproject.toml").read_text())
    for each in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        shutil.copytree(folder / "source" / each, packages / Path(each).name, dirs_exist_ok=True)
    # The libraries of this environment, but not its editable install: a path in a .pth file reads no .pth files there.
    (packages / "libraries.pth").write_text("".join(f"{each}\n" for each in _libraries()))
    asked = subprocess.run([python, "-c", "import dynamo; print(*dynamo.__path__)"], check=True, capture_output=True)
    assert asked.stdout.decode().split() == [str(packages / "dynamo")], "another dynamo is beside that of the release"
    return python


def _libraries() -> list[str]:
    import msgspec  # a requirement of both: where it is, the others are

    return [str(Path(msgspec.__file__).parents[1]), *site.getsitepackages()]


def _git(*words: str, may_fail: bool = False) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=not may_fail, capture_output=True).stdout
