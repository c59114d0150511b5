"""The lowest layer: a root file system of Debian's packages, and what the layers above it have to know of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from oci_image.errors import CannotBuild
from oci_image.layers import Layer, LayerWriter

__all__ = ["Base", "DebianPackage", "make_root_file_system", "read_base", "write_base_layer"]

NOT_KEPT: Final = ("/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/doc/*")
KEPT: Final = "/usr/share/doc/*/copyright"
# Of the installation, and other ones on every machine and day; a container has its own /dev, /proc and /sys.
LEFT_OUT: Final = re.compile(
    r"(dev|proc|sys|run|tmp|var/(cache|log|tmp|lib/apt|lib/dpkg/[^/]*-old|backups))/.+|etc/(hostname|resolv\.conf|machine-id)"
)
GLIBC: Final = "libc6"


@dataclass(frozen=True, slots=True)
class DebianPackage:
    """An installed package."""

    name: str
    version: str
    architecture: str
    source: str


@dataclass(frozen=True)
class Base:
    """What a root file system holds."""

    packages: tuple[DebianPackage, ...]
    release: str  # the text of /etc/os-release
    users: str  # /etc/passwd
    groups: str  # /etc/group
    python: tuple[int, int] | None
    epoch: int  # the newest time of a file that packages brought, as those that the installation made have the day's

    @property
    def glibc(self) -> tuple[int, int]:
        """The version of the C library. Raises CannotBuild where there is none."""
        version = next((each.version for each in self.packages if each.name == GLIBC), "")
        found = re.match(r"(\d+)\.(\d+)", version)
        if found is None:
            raise CannotBuild(f"the root file system has no {GLIBC}; is it one of Debian?")
        return int(found[1]), int(found[2])


def make_root_file_system(suite: str, packages: tuple[str, ...], target: Path) -> None:
    """Have mmdebstrap write the tar file of a root file system. Raises CannotBuild with the end of its log."""
    if shutil.which("mmdebstrap") is None:
        raise CannotBuild(
            "mmdebstrap is missing: `apt-get install mmdebstrap`, or name a root file system with --base FILE.tar"
        )
    options = [f"--dpkgopt=path-exclude={each}" for each in NOT_KEPT] + [f"--dpkgopt=path-include={KEPT}"]
    command = ["mmdebstrap", "--variant=essential", f"--include={','.join(packages)}", *options]
    partial = target.with_suffix(".part")
    target.parent.mkdir(parents=True, exist_ok=True)
    argv = [*command, '--aptopt=Apt::Install-Recommends "false"', "--format=tar", suite, str(partial)]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        partial.unlink(missing_ok=True)
        raise CannotBuild(f"{' '.join(argv)} ended with status {done.returncode}:\n{done.stdout[-2000:]}")
    partial.rename(target)


def read_base(archive: Path) -> Base:
    """Return what the tar file of a root file system holds."""
    texts: dict[str, str] = {}
    python: tuple[int, int] | None = None
    newest = 0
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.removeprefix("./")
            if name in {"var/lib/dpkg/status", "etc/passwd", "etc/group", "usr/lib/os-release"}:
                file = tar.extractfile(member)
                assert file is not None
                texts[name] = file.read().decode()
            elif name.endswith((".py", "/copyright")):
                # A Python file must keep its time: what was compiled from it counts as old otherwise.
                newest = max(newest, int(member.mtime))
            elif (found := re.fullmatch(r"usr/bin/python(\d+)\.(\d+)", name)) is not None:
                python = int(found[1]), int(found[2])
    missing = {"var/lib/dpkg/status", "etc/passwd", "etc/group"} - set(texts)
    if missing:
        raise CannotBuild(f"{archive} is not a root file system of Debian: it has no {', '.join(sorted(missing))}")
    packages = tuple(sorted(_packages(texts["var/lib/dpkg/status"]), key=lambda each: (each.name, each.architecture)))
    release = texts.get("usr/lib/os-release", "")
    return Base(packages, release, texts["etc/passwd"], texts["etc/group"], python, newest)


def write_base_layer(archive: Path, base: Base, target: Path) -> Layer:
    """Write the root file system as a layer: sorted, without what an installation leaves behind."""
    writer = LayerWriter(target, base.epoch)
    with tarfile.open(archive) as tar, writer:
        # A second name of a file comes after the first, wherever the alphabet has it.
        for member in sorted(tar.getmembers(), key=lambda each: (each.islnk(), each.name.removeprefix("./"))):
            if LEFT_OUT.fullmatch(member.name.removeprefix("./")) or member.isdev():
                continue
            if member.islnk():
                member.linkname = member.linkname.removeprefix("./")
            writer.add(member, tar.extractfile(member) if member.isreg() else None)
    assert writer.layer is not None
    return writer.layer


def _packages(status: str) -> Iterator[DebianPackage]:
    for paragraph in status.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version|Architecture|Source|Status): (.+)$", paragraph, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            source = str(fields.get("Source", fields["Package"])).partition(" ")[0]
            yield DebianPackage(fields["Package"], fields["Version"], fields["Architecture"], source)
