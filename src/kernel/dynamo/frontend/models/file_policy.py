"""Which places a model card may name its files at: rules, without I/O.

A process that can write to discovery can write a card. A card must not make the frontend fetch from addresses that are no worker's,
nor write outside its cache, nor wait or store without end.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from dynamo.errors import InvalidArgument
from dynamo.settings.readers import mebibytes, names
from dynamo.settings.readers import seconds as file_seconds
from dynamo.settings.table import setting

ANY_HOST: Final = "*"
MIB: Final = 1024 * 1024
MAX_PART_CHARACTERS: Final = 100
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")

Resolve = Callable[[str], Collection[str]]
"""From a host name to its addresses; empty where there are none."""


@dataclass(frozen=True, slots=True)
class FilePolicy:
    """Bounds on what one card may make a frontend fetch."""

    # fmt: off
    schemes: frozenset[str] = setting(frozenset({"file", "http", "https"}), "DYN_MODEL_FILE_SCHEMES", names,
        "Where a card's files may lie, with commas between them. Without `file` no local path is read")
    hosts: frozenset[str] = setting(frozenset(), "DYN_MODEL_FILE_HOSTS", names,
        "Hosts that files are fetched from beside the worker's own, with commas; `*`: any")
    # The largest tokenizer known is 40 MB; a card must not fill the disk.
    file_bytes: int = setting(512 * MIB, "DYN_MODEL_FILE_LIMIT_MB", mebibytes, "Size of one file")
    card_bytes: int = setting(1024 * MIB, "DYN_MODEL_CARD_LIMIT_MB", mebibytes,
        "Size of all files of a card together, where they are fetched")
    seconds: float = setting(300.0, "DYN_MODEL_FILE_TIMEOUT_SECS", file_seconds(0.1),
        "Time for all files of a card together; then another attempt")
    # fmt: on


def path_part(name: str) -> str:
    """Return `name` as one part of a path: the name itself where it is safe, else a readable rest and a hash.

    Two names never become one part.
    """
    if 0 < len(name) <= MAX_PART_CHARACTERS and _UNSAFE.search(name) is None and not name.startswith("."):
        return name
    readable = _UNSAFE.sub("-", name).strip(".-")[: MAX_PART_CHARACTERS - 20]
    return f"{readable or 'model'}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def host_of_instance(record: Mapping[str, object]) -> str | None:
    """Return the host that an instance record advertises, or None where its transport has no address."""
    transport = record.get("transport")
    address = transport.get("tcp") if isinstance(transport, Mapping) else None
    if not isinstance(address, str):
        return None
    try:
        return urlsplit(f"//{address}").hostname
    except ValueError:
        return None


def check_url(url: str, policy: FilePolicy, worker_hosts: Collection[str], resolve: Resolve) -> None:
    """Refuse an http URL that does not lead to the worker whose card has it.

    `worker_hosts`: what the instance records of the card's workers advertise. Raises InvalidArgument.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidArgument(f"model file {url[:200]!r} is not a valid URL: {error}") from error
    if not host or parts.username is not None:
        raise InvalidArgument(f"model file {url[:200]!r} must name a host and no user")
    if ANY_HOST in policy.hosts or host in policy.hosts:
        return
    own = {known.lower() for known in worker_hosts}
    if host in own:
        return
    addresses = set(resolve(host))
    if any(addresses & set(resolve(known)) for known in own):
        return
    raise InvalidArgument(
        f"model file {url[:200]!r} is not at the address of the worker that registered it "
        f"({', '.join(sorted(own)) or 'its record has none'}); if it is to be fetched from there, add {host} to "
        "DYN_MODEL_FILE_HOSTS"
    )
