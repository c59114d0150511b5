"""What a viewer knows: a picture, and the picture after a patch. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeVar

import msgspec
from msgspec import structs

from dynamo.protocol.inspector.views import (
    CacheView,
    Entry,
    ErrorGroup,
    EventView,
    FleetView,
    FrontendView,
    ModelView,
    Patch,
    Picture,
    PrefixView,
    RecentView,
    ResidentView,
    RoutingView,
    StreamProgress,
    StreamView,
    WorkerView,
)

LISTS: Final[Mapping[str, type[Entry]]] = MappingProxyType(
    {
        "frontends": FrontendView,
        "models": ModelView,
        "residents": ResidentView,
        "workers": WorkerView,
        "streams": StreamView,
        "recent": RecentView,
        "routing": RoutingView,
        "caches": CacheView,
        "prefixes": PrefixView,
        "errors": ErrorGroup,
        "events": EventView,
    }
)
"""The views that are lists, each with the type of its entries."""


V = TypeVar("V")


class PatchMismatch(ValueError):
    """A patch that this picture cannot take; the way out is a new picture."""


def patched(picture: Picture, patch: Patch) -> Picture:
    """Return the picture with the patch in it; an old patch changes nothing. Entries that are new come last in their view.

    A view that this version does not know is left out. Raises PatchMismatch for an entry that is none.
    """
    if patch.seq <= picture.seq:
        return picture
    changes: dict[str, object] = {}
    fleet = patch.set.get("fleet")
    if fleet is not None:
        changes["fleet"] = _entry("fleet", fleet, FleetView)
    for view, (set_entries, gone) in _by_view(patch).items():
        changes[view] = _merged(getattr(picture, view) or (), view, set_entries, gone)
    changes |= {"seq": patch.seq, "taken_ms": patch.taken_ms, "partial": patch.partial, "totals": patch.totals}
    after = structs.replace(picture, **changes)
    if patch.progress and after.streams is not None:
        after.streams = _progressed(after.streams, patch.progress)
    return after


def _by_view(patch: Patch) -> dict[str, tuple[dict[str, object], set[str]]]:
    """Sort a patch by view: the entries to set, and the ids of those that have gone."""
    found: dict[str, tuple[dict[str, object], set[str]]] = {}
    for key, value in patch.set.items():
        view, slash, id = key.partition("/")
        if slash and view in LISTS:
            found.setdefault(view, ({}, set()))[0][id] = value
    for key in patch.gone:
        view, slash, id = key.partition("/")
        if slash and view in LISTS:
            found.setdefault(view, ({}, set()))[1].add(id)
    return found


def _merged(entries: Sequence[Entry], view: str, set_entries: Mapping[str, object], gone: set[str]) -> list[Entry]:
    kind = LISTS[view]
    new = {id: _entry(f"{view}/{id}", value, kind) for id, value in set_entries.items()}
    kept = [new.pop(entry.id, entry) for entry in entries if entry.id not in gone or entry.id in new]
    return [*kept, *new.values()]


def _progressed(streams: Sequence[StreamView], progress: Mapping[str, StreamProgress]) -> list[StreamView]:
    return [stream if (news := progress.get(stream.id)) is None else _after(stream, news) for stream in streams]


def _after(stream: StreamView, news: StreamProgress) -> StreamView:
    return structs.replace(
        stream,
        output_tokens=news.output_tokens,
        tokens_per_second=news.tokens_per_second,
        last_token_ms=news.last_token_ms,
    )


def _entry(key: str, value: object, kind: type[V]) -> V:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise PatchMismatch(f"{key}: {error}") from None
