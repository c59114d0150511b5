"""What models have made and clients may fetch later: files of one directory, each with its facts beside it.

Several processes may use one directory: nothing is remembered but what is on the disk. What is older than it may be is
removed, and where there is no room, the oldest of the owner that has most.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import msgspec
from msgspec import Struct

from dynamo.errors import InvalidArgument
from dynamo.frontend.base.shares import largest_owner
from dynamo.runtime.base.steady_wall import steady_wall

logger = logging.getLogger(__name__)

MEDIA_PATH: Final = "/v1/media"
MAX_KEPT: Final = 10_000  # more than a page of a list can be scanned in some ten milliseconds
_KEY_FILE: Final = "signing.key"
_KEY_BYTES: Final = 32
_FACTS: Final = ".json"
_DATA: Final = ".data"


class KeepLimits(Struct, frozen=True):
    """How much is kept, and for how long."""

    total_bytes: int
    seconds: float


class KeptMedia(Struct):
    """The facts of one kept file."""

    id: str
    owner: str  # the project that made it; "" where there are no keys
    kind: str  # "video" or "image"
    content_type: str
    size: int
    created_at: float
    expires_at: float
    details: dict[str, Any] = {}  # what its API shows of it


class MediaStore:
    """The kept media of one directory. Its methods do file work: call them in a thread."""

    def __init__(self, directory: Path, limits: KeepLimits, *, now: Callable[[], float] = steady_wall) -> None:
        """Raises InvalidArgument for a directory that cannot be used."""
        self._directory, self._limits, self._now = directory, limits, now
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._key = self._signing_key()
        except OSError as error:
            raise InvalidArgument(f"the media store {directory} cannot be used: {error}") from error

    def keep(
        self,
        data: bytes,
        content_type: str,
        *,
        owner: str,
        kind: str,
        id: str = "",
        details: dict[str, object] | None = None,
    ) -> KeptMedia:
        """Keep a content and return its facts. Raises OSError, and nothing of it is left then."""
        now = self._now()
        self._make_room(len(data))
        name = id or f"{kind}_{uuid.uuid4().hex}"
        kept = KeptMedia(name, owner, kind, content_type, len(data), now, now + self._limits.seconds, details or {})
        self._write(name + _DATA, data)
        try:
            self._write(name + _FACTS, msgspec.json.encode(kept))
        except OSError:
            (self._directory / (name + _DATA)).unlink(missing_ok=True)
            raise
        return kept

    def find(self, id: str, owner: str | None) -> KeptMedia | None:
        """Return the facts of a file; None where there is none, or it is another owner's. `owner` None: any owner's."""
        if not id.isascii() or not id.replace("_", "").isalnum():
            return None
        kept = self._facts(self._directory / (id + _FACTS))
        if kept is None or kept.expires_at <= self._now() or (owner is not None and kept.owner != owner):
            return None
        return kept

    def open(self, kept: KeptMedia) -> int | None:
        """Open the content; return its descriptor, which the caller closes, None where it has just gone."""
        try:
            return os.open(self._directory / (kept.id + _DATA), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None

    def listed(self, kind: str, owner: str) -> list[KeptMedia]:
        """Return the files of an owner, the oldest first."""
        now = self._now()
        found = [each for each in self._all() if (each.kind, each.owner) == (kind, owner) and each.expires_at > now]
        return sorted(found, key=lambda each: (each.created_at, each.id))

    def owners(self) -> dict[str, int]:
        """Return the bytes of each owner."""
        found: dict[str, int] = {}
        for each in self._all():
            found[each.owner] = found.get(each.owner, 0) + each.size
        return found

    def remove(self, id: str) -> None:
        """Forget a file; idempotent."""
        (self._directory / (id + _FACTS)).unlink(missing_ok=True)
        (self._directory / (id + _DATA)).unlink(missing_ok=True)

    # -- links -------------------------------------------------------------------------------------------------------

    def link(self, kept: KeptMedia) -> str:
        """Return the path of a file with all that is needed to fetch it until it expires."""
        expires = int(kept.expires_at)
        return f"{MEDIA_PATH}?" + urlencode(
            {"id": kept.id, "expires": expires, "signature": self._signature(kept.id, expires)}
        )

    def linked(self, id: str, expires: str, signature: str) -> KeptMedia | None:
        """Return the file that a link names; None for a link that we did not make, or that has expired."""
        if not expires.isdecimal() or len(expires) > 12 or not signature.isascii():
            return None
        if not hmac.compare_digest(self._signature(id, int(expires)), signature) or int(expires) <= self._now():
            return None
        return self.find(id, None)

    def _signature(self, id: str, expires: int) -> str:
        return hmac.new(self._key, f"{id}/{expires}".encode(), hashlib.sha256).hexdigest()

    def _signing_key(self) -> bytes:
        """Return the key of this directory, made by the first process that uses it."""
        path = self._directory / _KEY_FILE
        if not path.exists():
            fresh = self._directory / f"{_KEY_FILE}.{uuid.uuid4().hex}"
            self._create(fresh, secrets.token_bytes(_KEY_BYTES))
            try:
                os.link(fresh, path)
            except FileExistsError:
                logger.debug("another process has made the key of %s", self._directory)
            finally:
                fresh.unlink()
        return path.read_bytes()

    # -- the disk ----------------------------------------------------------------------------------------------------

    def _write(self, name: str, data: bytes) -> None:
        """Write a file that is there whole or not at all."""
        fresh = self._directory / f".{name}.{os.getpid()}"
        try:
            self._create(fresh, data)
            fresh.rename(self._directory / name)
        finally:
            fresh.unlink(missing_ok=True)

    @staticmethod
    def _create(path: Path, data: bytes) -> None:
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags | os.O_CLOEXEC, 0o600)) as file:
            file.write(data)

    def _facts(self, path: Path) -> KeptMedia | None:
        try:
            return msgspec.json.decode(path.read_bytes(), type=KeptMedia)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("%s in the media store cannot be read: %s", path.name, error)
            return None

    def _all(self) -> list[KeptMedia]:
        paths = [path for path in self._directory.iterdir() if path.suffix == _FACTS and path.name[0] != "."]
        return [each for each in map(self._facts, paths) if each is not None]

    def _make_room(self, size: int) -> None:
        """Remove what has expired, and then the oldest of the owner that has most, until so many bytes more may be kept."""
        now = self._now()
        by_owner: dict[str, deque[KeptMedia]] = {}
        for each in sorted(self._all(), key=lambda each: each.created_at):
            if each.expires_at <= now:
                self._drop(each, "has expired")
            else:
                by_owner.setdefault(each.owner, deque()).append(each)
        sizes = {owner: sum(each.size for each in found) for owner, found in by_owner.items()}
        counts = {owner: len(found) for owner, found in by_owner.items()}
        while counts and (
            (is_large := sum(sizes.values()) + size > self._limits.total_bytes) or sum(counts.values()) >= MAX_KEPT
        ):
            most = largest_owner(sizes if is_large else counts)
            oldest = by_owner[most].popleft()
            sizes[most] -= oldest.size
            counts[most] -= 1
            if not counts[most]:
                del sizes[most], counts[most]
            self._drop(oldest, "makes room for newer media")

    def _drop(self, kept: KeptMedia, reason: str) -> None:
        self.remove(kept.id)
        logger.info("%s was removed from the media store: it %s", kept.id, reason)
