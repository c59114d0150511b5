"""The keys in service: read from their files, read again when a file changes, found by the hash of what a client sends.

A file that cannot be read, or that vanishes, keeps the keys that it had, and is an error in the log that names the line.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import hmac
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from dynamo.errors import InvalidArgument
from dynamo.frontend.base.access import Caller
from dynamo.frontend.base.settings.keys import KeySources
from dynamo.frontend.parts.keys.identity import ENVIRONMENT_ID, Identity
from dynamo.frontend.parts.keys.rules.key_file import KeyFileError, read_key_ring
from dynamo.frontend.parts.keys.rules.key_text import HASH_PREFIX, check_imported, hash_of
from dynamo.frontend.parts.keys.rules.records import KeyRecord, KeyRing, Revocation
from dynamo.runtime.base.tasks import Background

__all__ = ["KeySources", "KeyStore", "check_sources", "load_key_file"]

logger = logging.getLogger(__name__)

OWN_MODE: Final = 0o600  # of a new file: it holds no key, but the names of all

LOOK_SECONDS: Final = 1.0  # a key that was removed is refused after so long, and the time to read the file
MAX_FILE_BYTES: Final = 64 * 1024 * 1024
Version = tuple[int, int, int, int]
"""What distinguishes two states of a file: device, inode, size and time of change."""
_NOBODY: Final[tuple[bytes, Identity | None]] = (b"\0" * 32, None)
_Hashed = tuple[bytes, Identity, bool]
"""A hash, the key that it stands for, and whether it is the one of its last rotation."""


def change_key_file(path: str, change: Callable[[str], str], *, may_create: bool = False) -> None:
    """Replace what a file holds with what `change` makes of it.

    Two commands at once wait for each other. Raises InvalidArgument that names the file, which is as it was then.
    """
    target = Path(os.path.realpath(path))  # a link stays one, and its target is changed
    try:
        with _locked(target):
            try:
                before = target.read_text(encoding="utf-8")
                mode = stat.S_IMODE(target.stat().st_mode)
            except FileNotFoundError:
                if not may_create:
                    raise InvalidArgument(f"there is no key file {path}; dynamo keys create makes one") from None
                before, mode = "", OWN_MODE
            _replace(target, change(before).encode(), mode)
    except (KeyFileError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path}: {error}") from error
    except OSError as error:
        raise InvalidArgument(f"the key file {path} cannot be changed: {error.strerror or error}") from error


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    # A file of its own: the key file is replaced, and a lock on the old one would lock nothing. It stays, since a process that
    # removed it would take it from under a command that waits.
    descriptor = os.open(target.with_name(target.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWN_MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(target: Path, data: bytes, mode: int) -> None:
    beside = target.with_name(f".{target.name}.{os.getpid()}.new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, OWN_MODE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    except BaseException:
        with suppress(FileNotFoundError):
            beside.unlink()
        raise
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load_key_file(path: str) -> KeyRing:
    """Read a key file: JSON where its name ends in .json, else TOML. Raises InvalidArgument that names it."""
    return _load(path)[1]


def check_sources(sources: KeySources) -> None:
    """Read the files, and check the key in the environment. Raises InvalidArgument or ValueError that names what is wrong."""
    for path in (sources.file, sources.admin_file):
        if path is not None:
            load_key_file(path)
    if sources.key is not None:
        try:
            check_imported(sources.key)
        except ValueError as error:
            raise ValueError(f"DYN_API_KEY: {error}") from None


def _load(path: str) -> tuple[Version, KeyRing]:
    try:
        with Path(path).open("rb") as file:
            version = _version_of(os.fstat(file.fileno()))
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise KeyFileError(f"it has more than {MAX_FILE_BYTES // 2**20} MiB")
        return version, read_key_ring(data.decode(), is_json=path.endswith(".json"))
    except OSError as error:
        raise InvalidArgument(f"the key file {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # KeyFileError is one, and so is an error of UTF-8
        raise InvalidArgument(f"the key file {path} cannot be used: {error}") from error


def _version_of(status: os.stat_result) -> Version:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class _KeyFile:
    """One file, and what it held when it was last read well."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._version: Version | None
        self._version, self.ring = _load(path)
        self._trouble: str | None = None

    def look(self) -> bool:
        """Read the file again if it has changed; return whether its keys are others now. Blocks: call it in a thread."""
        try:
            version = _version_of(Path(self.path).stat())
        except OSError as error:
            self._version = None
            self._report(f"the key file {self.path} cannot be read: {error.strerror or error}")
            return False
        if version == self._version:
            return False
        try:
            self._version, ring = _load(self.path)
        except InvalidArgument as error:
            self._version = version
            self._report(str(error))
            return False
        is_other, self.ring, self._trouble = ring != self.ring, ring, None
        logger.info("the key file %s was read again: %d key(s)", self.path, len(ring.keys))
        return is_other

    def _report(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            logger.error("%s; the keys that were read before stay in service", trouble)


class _InService(NamedTuple):
    """What the files hold at one moment."""

    by_hash: Mapping[bytes, tuple[bytes, Identity]]
    by_id: Mapping[str, Identity]
    cuts: bool
    """Whether any key, now or a moment ago, takes its running requests with it."""
    owners: int


class KeyStore:
    """The keys of one frontend process. Used on the event loop only, but for the reading of files."""

    def __init__(self, sources: KeySources, *, wall_clock: Callable[[], float] = time.time) -> None:
        """Raises InvalidArgument for a file or key that cannot be used."""
        self.sources = sources
        self._wall_clock = wall_clock
        self._clients = None if sources.file is None else _KeyFile(sources.file)
        self._admins = None if sources.admin_file is None else _KeyFile(sources.admin_file)
        self._fixed: Sequence[Identity] = () if sources.key is None else (_environment_identity(sources.key),)
        self._keys = _InService({}, {}, cuts=False, owners=1)
        self._work = Background()
        self.protects_admin = sources.admin_file is not None
        """Whether an admin key exists, or existed: then the admin routes need one, on every port."""
        self.on_look: list[Callable[[], None]] = []
        """Called after each check of the files, whether they have changed or not."""
        self._take_over()

    @property
    def ring(self) -> KeyRing:
        """What the key file of the clients holds; its prices and projects, too."""
        return KeyRing() if self._clients is None else self._clients.ring

    @property
    def identities(self) -> Iterable[Identity]:
        """Every key in service, each once."""
        return self._keys.by_id.values()

    @property
    def owners(self) -> int:
        """How many owners the requests of clients may have; keys of operators are not counted."""
        return self._keys.owners

    def identity(self, id: str) -> Identity | None:
        """Return the key with this id: for work that runs for a key without a connection. None once it was removed."""
        return self._keys.by_id.get(id)

    def authenticate(self, presented: bytes) -> Identity | None:
        """Return the key that a client sent; None for one that is not known. It takes as long for either."""
        digest = hashlib.sha256(presented).digest()
        stored, identity = self._keys.by_hash.get(digest, _NOBODY)
        return identity if hmac.compare_digest(digest, stored) else None

    def is_revoked(self, key_id: str) -> bool:
        """Return whether a key is gone, disabled or expired, so that what was begun with it is not gone on with."""
        identity = self.identity(key_id)
        return identity is None or not identity.record.enabled or identity.is_expired(self.now())

    def is_gone(self, identity: Caller) -> bool:
        """Return whether a key may not be used any more, by what is known now, and its running requests are to be cut."""
        if not isinstance(identity, Identity):
            return False
        now = self._keys.by_id.get(identity.id)
        records = (
            (identity.record,) if now is None else (identity.record, now.record)
        )  # `dynamo keys revoke` changes it
        if all(record.revoke is not Revocation.NOW for record in records):
            return False
        return now is None or not now.record.enabled or now.is_expired(self._wall_clock())

    @property
    def cuts_requests(self) -> bool:
        """Whether any key, now or a moment ago, takes its running requests with it."""
        return self._keys.cuts

    def now(self) -> float:
        """Return the time that keys expire by, in seconds since the epoch."""
        return self._wall_clock()

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Check the files from now on."""
        if self._clients is not None or self._admins is not None:
            self._work.keep(self._follow, "frontend: key files")

    async def aclose(self) -> None:
        await self._work.close()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.refresh()

    async def refresh(self) -> None:
        """Check the files once, in a thread, and take over what has changed."""
        loop = asyncio.get_running_loop()
        changes = [
            await loop.run_in_executor(None, file.look) for file in (self._clients, self._admins) if file is not None
        ]
        if any(changes):
            self._take_over()
        for looked in self.on_look:
            looked()

    def _take_over(self) -> None:
        clients = () if self._clients is None else tuple(_identities(self._clients.ring.keys, is_admin=False))
        admins = () if self._admins is None else tuple(_identities(self._admins.ring.keys, is_admin=True))
        found: dict[bytes, tuple[bytes, Identity]] = {}
        by_id: dict[str, Identity] = {}
        # Admins last: a key that stands in both files is an admin's, with its record in the file of admins.
        for digest, identity, is_current in (*_hashed(self._fixed), *clients, *admins):
            found[digest] = digest, identity
            if is_current:
                by_id[identity.id] = identity
        known = (*by_id.values(), *self.identities)
        cuts = any(identity.record.revoke is Revocation.NOW for identity in known)
        owners = {key.owner for key in by_id.values() if key.inspector_role is None}
        self._keys = _InService(found, by_id, cuts, len(owners) if self.sources.protect_clients else 1)
        self.protects_admin = self.protects_admin or any(identity.is_admin for identity in by_id.values())
        if not found:
            logger.warning("there are no API keys: every request is refused until one is created (dynamo keys create)")


def _identities(records: Iterable[KeyRecord], *, is_admin: bool) -> Iterator[_Hashed]:
    for record in records:
        yield _digest(record.hash), Identity(record, is_admin=is_admin), True
        if record.previous_hash is not None and record.previous_expires is not None:
            until = record.previous_expires.timestamp()
            yield _digest(record.previous_hash), Identity(record, is_admin=is_admin, expires_at=until), False


def _hashed(identities: Iterable[Identity]) -> Iterator[_Hashed]:
    for identity in identities:
        yield _digest(identity.record.hash), identity, True


def _digest(written: str) -> bytes:
    return bytes.fromhex(written.removeprefix(HASH_PREFIX))


def _environment_identity(key: str) -> Identity:
    try:
        check_imported(key)
    except ValueError as error:
        raise InvalidArgument(f"DYN_API_KEY: {error}") from None
    return Identity(KeyRecord(id=ENVIRONMENT_ID, hash=hash_of(key.encode()), name="DYN_API_KEY"))
