"""The layers of Python packages: what pip installs, compiled, in an environment of its own."""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path
from typing import Final

from oci_image.base import Base
from oci_image.errors import CannotBuild
from oci_image.layers import LayerWriter

__all__ = ["HOME", "Environment", "PythonPackage"]

HOME: Final = "opt/dynamo"
OLD_NAMES: Final = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}  # of PEP 600's manylinux_2_N
LONGEST_LICENSE: Final = 100  # some packages have the whole text in that field


@dataclass(frozen=True, slots=True)
class PythonPackage:
    """An installed distribution."""

    name: str
    version: str
    license: str  # empty: it names none
    is_expression: bool  # of SPDX, and not the words of its author


class Environment:
    """A folder that becomes a virtual environment of the image's Python."""

    def __init__(self, folder: Path, base: Base, machine: str) -> None:
        if base.python is None:
            raise CannotBuild("the root file system has no Python")
        if base.python != sys.version_info[:2]:
            # pip reads the markers of requirements by the interpreter that runs it, and compiled files fit one version.
            here, there = (".".join(map(str, each)) for each in (sys.version_info[:2], base.python))
            raise CannotBuild(
                f"the root file system has Python {there}, and this is Python {here}: both must be the same. Debian 12 "
                "(--suite bookworm) has 3.11, Debian 13 (--suite trixie) 3.13; with others use deploy/Containerfile"
            )
        self._base, self._machine = base, machine
        self._packages = folder / "site-packages"
        self._programs = folder / "bin"
        self.site = f"{HOME}/lib/python{base.python[0]}.{base.python[1]}/site-packages"

    def install(self, requirements: Sequence[str], *, with_dependencies: bool = True) -> None:
        """Install wheels for the image's machine and C library. Raises CannotBuild with pip's own words."""
        platforms = [f"--platform={each}" for each in _platforms(self._base.glibc[1], self._machine)]
        options = ["--target", str(self._packages), "--no-compile", "--only-binary=:all:", "--upgrade", *platforms]
        if not with_dependencies:
            options.append("--no-deps")
        argv = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            *options,
            *requirements,
        ]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotBuild(f"pip install {' '.join(requirements)} failed:\n{done.stderr.strip()}")
        self._take_programs()
        for path in self._packages.glob("*.dist-info/direct_url.json"):
            _forget(path)  # where the wheel was on the machine that built the image

    def compile(self) -> None:
        """Compile what was installed. The image's root may be read-only, and then it would be compiled at every start."""
        argv = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"]
        argv += ["-s", str(self._packages), "-p", f"/{self.site}", str(self._packages)]
        # Files of templates are no valid Python, and the result says only that there was one; the start shows the rest.
        subprocess.run(argv, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONHASHSEED": "0"}, check=False)

    def packages(self) -> list[PythonPackage]:
        """Return what is installed, by name."""
        found = [_package(path) for path in self._packages.glob("*.dist-info/METADATA")]
        return sorted(found, key=lambda each: each.name)

    def commands_of(self, wheels: Sequence[Path]) -> list[str]:
        """Return the commands that these wheels brought."""
        stems = {re.sub(r"[-_.]+", "_", path.name.split("-")[0]).lower() for path in wheels}
        found: list[str] = []
        for path in sorted(self._packages.glob("*.dist-info/entry_points.txt")):
            if re.sub(r"[-_.]+", "_", path.parent.name.split("-")[0]).lower() in stems:
                section = re.search(r"^\[console_scripts\]\n((?:(?!\[).*\n?)*)", path.read_text(), re.MULTILINE)
                found += re.findall(r"^\s*([\w.-]+)\s*=", section[1], re.MULTILINE) if section else []
        return found

    def write_environment(self, writer: LayerWriter) -> None:
        """Write what makes a folder a virtual environment: its file of settings and its interpreter."""
        assert self._base.python is not None
        version = ".".join(map(str, self._base.python))
        writer.add_bytes(
            f"{HOME}/pyvenv.cfg",
            f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {version}\n".encode(),
        )
        for name in ("python", "python3", f"python{version}"):
            writer.add_link(f"{HOME}/bin/{name}", f"/usr/bin/python{version}")

    def write(self, writer: LayerWriter, pattern: str = ".*") -> None:
        """Write what in `site-packages` has a name that fits the pattern."""
        for path in sorted(self._packages.iterdir()):
            if re.fullmatch(pattern, path.name) is None:
                continue
            name = f"{self.site}/{path.name}"
            if path.is_dir():
                writer.add_tree(path, name)
            else:
                writer.add_bytes(name, path.read_bytes())

    def write_programs(self, writer: LayerWriter) -> None:
        """Write the commands of all packages."""
        if self._programs.exists():
            writer.add_tree(self._programs, f"{HOME}/bin")

    def _take_programs(self) -> None:
        """Move the programs that pip put beside the packages, and have them run by the image's interpreter."""
        source = self._packages / "bin"
        self._programs.mkdir(parents=True, exist_ok=True)
        for path in sorted(source.iterdir()) if source.exists() else []:
            content = path.read_bytes()
            target = self._programs / path.name
            target.write_bytes(re.sub(rb"\A#!.*python.*", f"#!/{HOME}/bin/python".encode(), content))
            target.chmod(0o755)
        shutil.rmtree(source, ignore_errors=True)


def _platforms(glibc_minor: int, machine: str) -> list[str]:
    """Return the tags of wheels that run on a C library 2.N, the newest first."""
    found = []
    for minor in range(glibc_minor, 4, -1):
        found.append(f"manylinux_2_{minor}_{machine}")
        if minor in OLD_NAMES:
            found.append(f"{OLD_NAMES[minor]}_{machine}")
    return found


def _package(path: Path) -> PythonPackage:
    fields = Parser().parsestr(path.read_text(), headersonly=True)
    expression, words = fields.get("License-Expression", ""), fields.get("License", "").strip()
    if "\n" in words or len(words) > LONGEST_LICENSE:
        words = ""
    return PythonPackage(fields["Name"], fields["Version"], expression or words, bool(expression))


def _forget(path: Path) -> None:
    """Remove a file of a distribution, and its line from the list of files."""
    record = path.with_name("RECORD")
    kept = [row for row in csv.reader(record.read_text().splitlines()) if not row[0].endswith(f"/{path.name}")]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(kept)
    record.write_text(text.getvalue())
    path.unlink()
