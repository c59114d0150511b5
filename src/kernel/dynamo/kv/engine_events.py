"""The KV events that engines publish on their own ZMQ sockets, read into plain values. No I/O.

A payload is msgpack `[time, [event, ...], dp_rank?]`. An event is a map with `type`, or an array that begins with it. What
an engine's newer version adds is ignored; what is not about this worker's own main cache is left out and counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

import msgspec

from dynamo.kv.changes import MediaInfo, MediaObject
from dynamo.kv.hashing import to_unsigned

_STORED_FIELDS: Final = (
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "block_mm_infos",
    "group_idx",
    "kv_cache_spec_kind",
    "sliding_window",
)
_REMOVED_FIELDS: Final = ("type", "block_hashes", "medium", "group_idx", "kv_cache_spec_kind")
_TIERS: Final = {
    "": "device",
    "GPU": "device",
    "DEVICE": "device",
    "CPU": "host_pinned",
    "CPU_PINNED": "host_pinned",
    "CPU_TIER1": "host_pinned",
    "CPU_TIER2": "disk",
    "DISK": "disk",
    "NVME": "disk",
    "STORAGE": "disk",
    "EXTERNAL": "external",
    "NETWORK": "external",
    "REMOTE": "external",
    "SHARED": "external",
}
_MAIN_KINDS: Final = frozenset({None, "", "full_attention", "mla_attention", "sink_full_attention"})
_SALT: Final = "dynamo-cache-salt:"
_MM_HASH_DIGITS: Final = 64
MAX_GROUPS: Final = 1024  # of layers in one engine


class BadPayload(ValueError):
    """A payload, or one of its events, that cannot be read; holds the reason."""


class Stored(msgspec.Struct, frozen=True):
    """The engine holds these blocks, which follow each other and `parent`."""

    block_hashes: list[int]
    parent: int | None
    token_ids: list[int]
    block_size: int
    tier: str = "device"
    lora_name: str | None = None
    cache_salt: str | None = None
    mm_infos: Sequence[MediaInfo | None] | None = None
    is_eagle: bool = False  # one more token than the blocks hold


class Removed(msgspec.Struct, frozen=True):
    """The engine no longer holds these blocks."""

    block_hashes: list[int]
    tier: str = "device"


class Cleared(msgspec.Struct, frozen=True):
    """The engine holds nothing any more."""


EngineEvent = Stored | Removed | Cleared


@dataclass(slots=True)
class EngineBatch:
    """One payload: its events, and what of it was left out."""

    events: list[EngineEvent] = field(default_factory=list)
    dp_rank: int | None = None
    filtered: int = 0  # not about this worker's main cache
    suspicious: int = 0  # blocks that name themselves as their parent, or come twice in one event
    issues: list[str] = field(default_factory=list)  # events that cannot be read, each with the reason


def read_payload(payload: bytes, side_groups: set[int] | None = None) -> EngineBatch:
    """Read one message of an engine.

    `side_groups`: kept from message to message, the groups of layers whose blocks are not those of the main cache. Where
    an engine has several, a removal names only the group, and blocks of two groups may have the same hash.

    Raises BadPayload for what is no payload at all; an event that cannot be read is an entry of `issues`."""
    try:
        found = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadPayload(f"not msgpack: {error}") from error
    if not isinstance(found, list) or len(found) < 2 or not isinstance(found[1], list):
        raise BadPayload("expected [time, [events], dp_rank]")
    rank = found[2] if len(found) > 2 else None
    batch = EngineBatch(dp_rank=rank if type(rank) is int and rank >= 0 else None)
    groups = set() if side_groups is None else side_groups
    for number, raw in enumerate(found[1]):
        try:
            _read_event(raw, batch, groups)
        except (BadPayload, TypeError, ValueError) as error:
            batch.issues.append(f"events[{number}]: {error}")
    return batch


def _read_event(raw: object, batch: EngineBatch, side_groups: set[int]) -> None:
    members = _members(raw)
    kind = members["type"]
    if kind == "AllBlocksCleared":
        batch.events.append(Cleared())
        return
    if kind not in ("BlockStored", "BlockRemoved"):
        raise BadPayload(f"unknown event {kind!r}")
    tier = _tier(members.get("medium"))
    if tier is None or _is_beside(kind, members, side_groups):
        batch.filtered += 1
        return
    if members.get("locality") not in (None, "", "LOCAL"):
        batch.filtered += 1
        return
    hashes = [_hash(value) for value in _list(members, "block_hashes")]
    if kind == "BlockRemoved":
        batch.events.append(Removed(hashes, tier))
        return
    parent = members.get("parent_block_hash")
    parent = None if parent is None else _hash(parent)
    if parent in hashes or len(set(hashes)) < len(hashes):
        batch.suspicious += 1
        batch.events.append(Removed([], tier))
        return
    batch.events.append(_stored(members, hashes, parent, tier))


def _is_beside(kind: str, members: Mapping[str, object], side_groups: set[int]) -> bool:
    """Return whether an event is of a group of layers beside the main one; remember the group by what it stores."""
    layers, group = members.get("kv_cache_spec_kind"), members.get("group_idx")
    is_beside = layers not in _MAIN_KINDS
    if type(group) is not int:
        return is_beside
    if kind == "BlockStored" and not is_beside:
        side_groups.discard(group)
    elif kind == "BlockStored" and len(side_groups) < MAX_GROUPS:
        side_groups.add(group)
    elif layers in (None, ""):
        return group in side_groups
    return is_beside


def _stored(members: Mapping[str, object], hashes: list[int], parent: int | None, tier: str) -> Stored:
    size = members.get("block_size")
    if type(size) is not int or size < 1:
        raise BadPayload(f"block_size must be a positive integer, got {size!r}")
    tokens, is_eagle = _tokens(_list(members, "token_ids"))
    salt, mm_infos = _extra(members.get("extra_keys"), len(hashes))
    own_salt = members.get("cache_salt")  # SGLang has a member for it
    if isinstance(own_salt, str) and own_salt:
        salt = own_salt.removeprefix(_SALT)
    given = members.get("block_mm_infos")
    if isinstance(given, list) and any(given):
        mm_infos = [_mm_info(info) for info in given]
    lora = members.get("lora_name")
    if lora is None and members.get("lora_id") is not None:
        lora = str(members["lora_id"])
    if lora is not None and not isinstance(lora, str):
        raise BadPayload(f"lora_name must be a text, got {type(lora).__name__}")
    return Stored(hashes, parent, tokens, size, tier, lora, salt, mm_infos, is_eagle)


def _members(raw: object) -> Mapping[str, object]:
    if isinstance(raw, dict):
        if not isinstance(raw.get("type"), str):
            raise BadPayload("an event needs a type")
        return raw
    if not isinstance(raw, list) or not raw or not isinstance(raw[0], str):
        raise BadPayload(f"an event is a map or an array that begins with its type, got {type(raw).__name__}")
    names = _STORED_FIELDS if raw[0] == "BlockStored" else _REMOVED_FIELDS
    return dict(zip(names, raw, strict=False))


def _tier(medium: object) -> str | None:
    """Return the storage tier; None for an unknown medium. Media are in capitals; `gpu` is unknown."""
    return "device" if medium is None else _TIERS.get(medium) if isinstance(medium, str) else None


def _list(members: Mapping[str, object], name: str) -> list[object]:
    found = members.get(name)
    if not isinstance(found, list):
        raise BadPayload(f"{name} must be a list, got {type(found).__name__}")
    return found


def _hash(value: object) -> int:
    if isinstance(value, bytes):  # a digest: its last 8 bytes name the block
        return int.from_bytes(value[-8:], "big")
    if type(value) is not int:
        raise BadPayload(f"a block hash must be an integer, got {type(value).__name__}")
    return to_unsigned(value)


def _tokens(values: Sequence[object]) -> tuple[list[int], bool]:
    """Token ids, plain or as pairs (each token and the one after it)."""
    if values and isinstance(values[0], list | tuple):
        pairs = [pair for pair in values if isinstance(pair, list | tuple) and len(pair) == 2]
        if len(pairs) < len(values):
            raise BadPayload("token_ids mix plain ids and pairs")
        return [_token(pair[0]) for pair in pairs] + [_token(pairs[-1][1])], True
    return _tokens_of(values), False


def _tokens_of(values: Sequence[object]) -> list[int]:
    if set(map(type, values)) == {int}:
        tokens = cast("list[int]", values)
        if min(tokens) >= 0 and max(tokens) < 2**32:
            return tokens
    return [_token(value) for value in values]  # its error names the wrong one


def _token(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**32:
        raise BadPayload(f"a token id must be an unsigned 32-bit integer, got {value!r}")
    return value


def _extra(keys: object, blocks: int) -> tuple[str | None, list[MediaInfo | None] | None]:
    """Return (cache salt, media by block) of `extra_keys`: one list of keys for each block, or None."""
    if not isinstance(keys, list):
        return None, None
    salt = None
    infos: list[MediaInfo | None] = [None] * blocks
    for number, entry in enumerate(keys[:blocks]):
        objects: list[MediaObject] = []
        for key in entry if isinstance(entry, list | tuple) else (entry,):
            text = key[0] if isinstance(key, list | tuple) and key else key
            if not isinstance(text, str):
                continue
            if text.startswith(_SALT):
                salt = text.removeprefix(_SALT) or salt
            elif (mm_hash := _mm_hash(text)) is not None:
                objects.append({"mm_hash": mm_hash, "offsets": []})
        if objects:
            infos[number] = {"mm_objects": objects}
    return salt, infos if any(infos) else None


def _mm_hash(text: str) -> int | None:
    """Return the first 16 digits of a 64-digit hexadecimal id; None for any other text."""
    if len(text) != _MM_HASH_DIGITS:
        return None
    try:
        return int(text[:16], 16)
    except ValueError:
        return None


def _mm_info(info: object) -> MediaInfo | None:
    if not isinstance(info, dict) or not isinstance(info.get("mm_objects"), list):
        return None
    objects: list[MediaObject] = []
    for entry in info["mm_objects"]:
        mm_hash = entry.get("mm_hash") if isinstance(entry, dict) else None
        mm_hash = _mm_hash(mm_hash) if isinstance(mm_hash, str) else mm_hash
        if type(mm_hash) is int:
            objects.append({"mm_hash": to_unsigned(mm_hash), "offsets": entry.get("offsets") or []})
    return {"mm_objects": objects} if objects else None
