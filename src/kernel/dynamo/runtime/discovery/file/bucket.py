"""One bucket of the file store as last seen: its scans, what they found changed, and which process counts as gone."""

from __future__ import annotations

import logging
import math
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamo.runtime.discovery.base import Change, Delete, Put, matches
from dynamo.runtime.discovery.file.clocks import LeaseClocks
from dynamo.runtime.discovery.file.directory import LockedDirectory, open_directory
from dynamo.runtime.discovery.keys import TEMPORARY_PREFIX, decode_name, encode_name, split_key

logger = logging.getLogger(__name__)

CONFIRM_SECONDS: Final = 0.1
"""A directory's time has the resolution of a kernel tick (up to 10 ms), so a change in the tick of the one before it does
not show. One more scan this long after a new time was first seen finds it, whatever the clocks show."""

COARSE_CONFIRM_SECONDS: Final = 2.1  # for file systems that keep whole (FAT: even) seconds


@dataclass(slots=True)
class _Entry:
    """One file as last seen."""

    key: str
    value: bytes
    signature: tuple[int, int, int]  # inode, mtime_ns, size: the value is read again only when it changed


class FileBucket:
    """One directory as last seen, and when to scan again although it seems unchanged (monotonic seconds).

    `own` are the records of this process in all buckets, as they are now: what of them is missing is written again.
    """

    def __init__(self, name: str, root: Path, *, own: Mapping[str, bytes], clocks: LeaseClocks) -> None:
        self.directory = LockedDirectory(root / name, monotonic=clocks.monotonic)
        self._name = name
        self._own = own
        self._clocks = clocks
        self._entries: dict[str, _Entry] = {}  # by file name
        self._stamp: tuple[int, int] | None = None  # inode, mtime_ns of the directory
        self._handle: int | None = None  # holds the directory, or its inode might be that of the one made after it
        self._confirm_at = math.inf
        self._restore_at = -math.inf  # when a record of ours that was overwritten may be written again at once
        self._scan_at = -math.inf
        self._keep_until = -math.inf  # after a loss of the store: until then nothing that is missing counts as gone

    def read(self, prefix: str) -> dict[str, bytes]:
        """Return what counts as there, sorted by key."""
        found = {entry.key: entry.value for entry in self._entries.values() if matches(prefix, entry.key)}
        return dict(sorted(found.items()))

    def poll(self, changes: list[Change], *, look: bool = False) -> None:
        """Append to `changes` what happened in the directory, so that a failure half-way loses none of it. `look`: scan
        it although it seems unchanged.
        """
        path, now = self.directory.path, self._clocks.monotonic()
        try:
            found = os.stat(path)
        except FileNotFoundError:
            self._rebuild(now)
            found = os.stat(path)
        stamp = (found.st_ino, found.st_mtime_ns)
        if stamp != self._stamp:
            if self._stamp is None or stamp[0] != self._stamp[0]:
                if self._stamp is not None:
                    self._keep_until = now + self._clocks.ttl_seconds  # another process recreated the directory
                self._hold()
            self._stamp = stamp
            coarse = found.st_mtime_ns % 1_000_000_000 == 0
            self._confirm_at = now + (COARSE_CONFIRM_SECONDS if coarse else CONFIRM_SECONDS)
        elif now >= self._confirm_at:
            self._confirm_at = math.inf
        elif now < self._scan_at and not look:
            return
        self._scan_at = -math.inf  # until the scan has succeeded
        self._scan(now, changes)

    def restore(self, name: str, value: bytes, why: str = "was removed by another process") -> None:
        """Write a record of ours again: another process overwrote it, or expired it while this one was frozen."""
        path = self.directory.path / name
        logger.warning("file discovery store: %s %s; writing it again", path, why)
        with self.directory.locked():
            self.directory.write(name, value)

    def close(self) -> None:
        """Let go of the directory."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    # -- scanning ------------------------------------------------------------------------------------------------

    def _scan(self, now: float, changes: list[Change]) -> None:
        """Update the entries by a scan."""
        wall = self._clocks.wall()
        missing = dict.fromkeys(self._entries)
        dead: list[str] = []
        oldest = wall
        with os.scandir(self.directory.path) as files:
            for file in files:
                try:
                    found = file.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # renamed or removed during the scan; `missing` decides
                if not stat.S_ISREG(found.st_mode):
                    continue
                if file.name.startswith(TEMPORARY_PREFIX):
                    if self._clocks.is_dead(found):
                        dead.append(file.name)  # its writer died between write and rename
                    continue
                inside = decode_name(file.name)
                if inside is None:
                    continue
                key = f"{self._name}/{inside}"
                missing.pop(file.name, None)
                if key not in self._own:
                    if self._clocks.is_dead(found):
                        dead.append(file.name)
                        continue
                    oldest = min(oldest, found.st_mtime)
                self._look(file.name, key, found, changes)
        for name in missing:
            self._missed(name, now, changes)
        if dead:
            self._bury(dead, changes)
        # Nothing can expire before its TTL is over, so that is when to scan next. The floor bounds the work while a
        # file is past its time but not trusted to be dead.
        ttl = self._clocks.ttl_seconds
        self._scan_at = now + max(oldest + ttl - wall + 0.05, ttl / 10)
        if now < self._keep_until:
            self._scan_at = min(self._scan_at, self._keep_until)

    def _look(self, name: str, key: str, found: os.stat_result, changes: list[Change]) -> None:
        own, now = self._own.get(key), self._clocks.monotonic()
        signature = (found.st_ino, found.st_mtime_ns, found.st_size)
        known = self._entries.get(name)
        if known is not None and known.signature == signature:
            return
        try:
            value = (self.directory.path / name).read_bytes()
        except FileNotFoundError:
            return  # gone again: the directory's time has changed, and the next scan finds it
        if own is not None and own != value and now >= self._restore_at:
            self._restore_at = now + self._clocks.renew_seconds  # two owners of one key must not fight at every poll
            self.restore(name, own, "was overwritten by another process")
            return  # the next scan finds it
        self._entries[name] = _Entry(key, value, signature)
        if known is None or known.value != value:  # else only its time was renewed
            changes.append(Put(key, value))

    def _missed(self, name: str, now: float, changes: list[Change]) -> None:
        """Handle a file that the scan did not find: gone, or overlooked while renamed, or ours and taken from us."""
        entry = self._entries[name]
        if (value := self._own.get(entry.key)) is not None:
            self.restore(name, value)
        elif now >= self._keep_until and not (self.directory.path / name).exists() and self._is_whole(now):
            del self._entries[name]
            changes.append(Delete(entry.key))

    def _bury(self, names: list[str], changes: list[Change]) -> None:
        with self.directory.locked():
            for name in names:
                path = self.directory.path / name
                with suppress(FileNotFoundError):
                    if not self._clocks.is_dead(path.stat()):
                        continue  # its owner came back meanwhile; the next scan sees it
                    path.unlink()
                entry = self._entries.pop(name, None)
                if entry is not None:
                    changes.append(Delete(entry.key))

    # -- the directory, lost and made again ------------------------------------------------------------------------

    def _hold(self) -> None:
        self.close()
        self._handle = open_directory(self.directory.path)

    def _is_whole(self, now: float) -> bool:
        """Return whether the directory is the one that was scanned before: it may be recreated in the middle of a
        scan.
        """
        try:
            is_same = self._stamp is not None and os.stat(self.directory.path).st_ino == self._stamp[0]
        except FileNotFoundError:
            is_same = False
        if not is_same:
            self._keep_until = now + self._clocks.ttl_seconds
        return is_same

    def _rebuild(self, now: float) -> None:
        """Recreate the directory, put our own records, and give the other processes a TTL to do the same."""
        path = self.directory.path
        if self._stamp is not None:
            logger.warning("file discovery store: %s vanished; making it again", path)
            self._keep_until = now + self._clocks.ttl_seconds
        path.mkdir(parents=True, exist_ok=True)
        for key, value in self._own.items():
            name, inside = split_key(key)
            if name == self._name:
                self.directory.write(encode_name(inside), value)
