"""Layers: compressed tar files whose bytes depend on nothing but what is in them."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

__all__ = ["Layer", "LayerWriter", "Owner"]

ROOT_MODE: Final = 0o755
COMPRESSION: Final = 6  # 9 takes three times as long for 1 % less


@dataclass(frozen=True, slots=True)
class Owner:
    """The numbers of a user and its group."""

    uid: int = 0
    gid: int = 0


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that was written: the name of its blob, and that of its content before compression."""

    path: Path
    digest: str
    diff_id: str
    size: int


class _Hashed(io.RawIOBase):
    """A writer that counts and hashes what goes through it."""

    def __init__(self, below: IO[bytes] | gzip.GzipFile) -> None:
        self._below, self.hash, self.size = below, hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: object, /) -> int:
        piece = bytes(data)  # type: ignore[call-overload]
        self._below.write(piece)
        self.hash.update(piece)
        self.size += len(piece)
        return len(piece)


@dataclass
class _Stack:
    """The file, the compressor over it, and the tar writer over that; two of them hash what they get."""

    file: IO[bytes]
    packed: _Hashed
    zipped: gzip.GzipFile
    plain: _Hashed
    tar: tarfile.TarFile = field(init=False)

    def __post_init__(self) -> None:
        # The writer closes it, with the others.
        self.tar = tarfile.open(fileobj=self.plain, mode="w|", format=tarfile.PAX_FORMAT)  # noqa: SIM115


class LayerWriter:
    """Writes one layer. No member is newer than `epoch`; owners are numbers without names.

    Parents are written before what lies in them; the caller gives members in the order that the layer shall have.
    """

    def __init__(self, path: Path, epoch: int) -> None:
        self._path, self._epoch = path, epoch
        self._written: set[str] = set()
        self._stack: _Stack | None = None
        self.layer: Layer | None = None  # set when the block ends without an error

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("wb")
        packed = _Hashed(file)
        zipped = gzip.GzipFile(filename="", mode="wb", compresslevel=COMPRESSION, fileobj=packed, mtime=0)
        self._stack = _Stack(file, packed, zipped, _Hashed(zipped))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        stack, self._stack = self._stack, None
        assert stack is not None
        try:
            stack.tar.close()
            stack.zipped.close()
        finally:
            stack.file.close()
        if kind is not None:
            self._path.unlink()
            return
        digest, diff_id = (f"sha256:{each.hash.hexdigest()}" for each in (stack.packed, stack.plain))
        self.layer = Layer(self._path, digest, diff_id, stack.packed.size)

    def add(self, member: tarfile.TarInfo, content: IO[bytes] | None = None) -> None:
        """Add a member of another archive as it is, but for a later time and the names of its owner."""
        assert self._stack is not None
        name = member.name.removeprefix("./").strip("/")
        if name in {"", "."}:
            return
        member.name, member.mtime = name, min(int(member.mtime), self._epoch)
        member.uname, member.gname, member.pax_headers = "", "", {}
        self._written.add(name)
        self._stack.tar.addfile(member, content)

    def add_folder(self, name: str, *, mode: int = ROOT_MODE, owner: Owner = Owner()) -> None:
        """Add a folder; one that this layer has already stays as it is."""
        if name not in self._written:
            self._add_parents(name)
            member = self._member(name, tarfile.DIRTYPE, mode)
            member.uid, member.gid = owner.uid, owner.gid
            self.add(member)

    def add_bytes(self, name: str, content: bytes, *, mode: int = 0o644) -> None:
        """Add a file of root's."""
        self._add_parents(name)
        member = self._member(name, tarfile.REGTYPE, mode)
        member.size = len(content)
        self.add(member, io.BytesIO(content))

    def add_link(self, name: str, target: str) -> None:
        """Add a symbolic link."""
        self._add_parents(name)
        member = self._member(name, tarfile.SYMTYPE, 0o777)
        member.linkname = target
        self.add(member)

    def add_tree(self, folder: Path, name: str) -> None:
        """Add a folder of this machine below `name`, sorted: root's files, readable by all, programs where the owner's bit says so."""
        self.add_folder(name)
        for path in sorted(folder.iterdir()):
            inside = f"{name}/{path.name}"
            if path.is_symlink():
                self.add_link(inside, os.readlink(path))
            elif path.is_dir():
                self.add_tree(path, inside)
            else:
                self.add_bytes(inside, path.read_bytes(), mode=0o755 if path.stat().st_mode & 0o100 else 0o644)

    def _member(self, name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
        member = tarfile.TarInfo(name)
        member.type, member.mode, member.mtime = kind, mode, self._epoch
        return member

    def _add_parents(self, name: str) -> None:
        parent = name.rpartition("/")[0]
        if parent:
            self.add_folder(parent)
