"""One picture of the system: what is requested, what one process gives, and how those of several become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from dynamo.frontend.parts.inspector.caches import merged_caches
from dynamo.frontend.parts.inspector.figures import Slot, add_slots
from dynamo.protocol.inspector.views import (
    VIEWS,
    CacheView,
    ErrorGroup,
    EventView,
    FrontendView,
    ModelsInMemory,
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
from dynamo.protocol.openai.shapes import JsonObject

DEFAULT_LIMIT: Final = 200
MAX_LIMIT: Final = 1000


class PictureQuery(Struct, frozen=True):
    """What a picture is to show."""

    views: tuple[str, ...] = ("fleet", "workers", "streams")
    limit: int = DEFAULT_LIMIT  # of the entries of each view
    filter: str = ""  # of streams and recent requests; of workers where neither of those is requested
    sort: str = "age"  # of streams


class MemberPicture(Struct, kw_only=True):
    """What one process shows. Its lists are limited; `totals` holds how many there are."""

    frontend: FrontendView
    slots: list[Slot] = []
    totals: dict[str, int] = {}
    models: list[ModelView] = []
    residents: list[ResidentView] = []
    workers: list[WorkerView] = []
    streams: list[StreamView] = []
    recent: list[RecentView] = []
    routing: list[RoutingView] = []
    caches: list[CacheView] = []
    prefixes: list[PrefixView] = []
    errors: list[ErrorGroup] = []
    events: list[EventView] = []


def add_residents(picture: MemberPicture, memory: ModelsInMemory) -> None:
    """Add the models that are loaded on demand, each with an id that no other frontend's has."""
    picture.residents = [msgspec.structs.replace(row, id=f"{picture.frontend.id}/{row.name}") for row in memory.models]
    picture.totals |= {"residents": len(memory.models), "fleet/resident_bytes": memory.used_bytes}
    if memory.budget_bytes is not None:
        picture.totals["fleet/budget_bytes"] = memory.budget_bytes


def merge(
    members: Sequence[MemberPicture], query: PictureQuery, stream_key: Callable[[StreamView], Any], *, reverse: bool
) -> tuple[MemberPicture, list[FrontendView]]:
    """Return the pictures of several processes as that of one, and the processes.

    Workers and models are the same for all processes, each of which has its own share of the requests there.
    """
    frontends = [member.frontend for member in members]
    if len(members) == 1:
        own = msgspec.structs.replace(members[0], workers=list(map(_with_queue, members[0].workers)))
        return own, frontends
    limit = query.limit
    streams = [row for member in members for row in member.streams]
    streams.sort(key=stream_key, reverse=reverse)
    recent = [row for member in members for row in member.recent]
    recent.sort(key=lambda row: -row.ended_ms)
    routing = [row for member in members for row in member.routing]
    routing.sort(key=lambda row: -row.at_ms)
    totals: dict[str, int] = {}
    for member in members:
        for view, count in member.totals.items():
            totals[view] = totals.get(view, 0) + count
    workers, models = _merged_workers(members), _merged_models(members)
    for view, rows in (("workers", workers), ("models", models)):
        if view in totals:
            totals[view] = len(rows)
    merged = MemberPicture(
        frontend=frontends[0],
        slots=add_slots([member.slots for member in members]),
        totals=totals,
        models=models[:limit],
        residents=[row for member in members for row in member.residents][:limit],
        workers=workers[:limit],
        streams=streams[:limit],
        recent=recent[:limit],
        routing=routing[:limit],
        caches=merged_caches([member.caches for member in members])[:limit],
        prefixes=max((member.prefixes for member in members), key=len),
        errors=_merged_errors(members)[:limit],
        events=_merged_events(members)[:limit],
    )
    return merged, frontends


_STATES: Final = ("gone", "starting", "ready", "refused", "quarantined", "draining")  # the last one of several counts


def _merged_workers(members: Sequence[MemberPicture]) -> list[WorkerView]:
    found: dict[str, WorkerView] = {}
    for member in members:
        for row in member.workers:
            before = found.get(row.id)
            if before is None:
                found[row.id] = row
                continue
            worse, other = (row, before) if _rank(row) > _rank(before) else (before, row)
            merged = msgspec.structs.replace(worse, running=row.running + before.running)
            rates = [one.output_tokens_per_second for one in (row, before) if one.output_tokens_per_second is not None]
            merged.output_tokens_per_second = sum(rates) if rates else None
            merged.silent_ms = _least(row.silent_ms, before.silent_ms)
            merged.since_ms = _least(row.since_ms, before.since_ms)
            merged.kv_blocks_used = worse.kv_blocks_used if worse.kv_blocks_used is not None else other.kv_blocks_used
            found[row.id] = merged
    return sorted(map(_with_queue, found.values()), key=lambda row: (row.role, row.id))


def _with_queue(row: WorkerView) -> WorkerView:
    """Return a worker's row in which the requests above its limit are queued: the worker runs no more than that at once."""
    if row.limit is None or row.queued is not None:
        return row
    return msgspec.structs.replace(row, running=min(row.running, row.limit), queued=max(0, row.running - row.limit))


def _rank(row: WorkerView) -> int:
    return _STATES.index(row.state) if row.state in _STATES else 0


def _least(one: int | None, other: int | None) -> int | None:
    return min([each for each in (one, other) if each is not None], default=None)


def _merged_models(members: Sequence[MemberPicture]) -> list[ModelView]:
    found: dict[str, ModelView] = {}
    for member in members:
        for row in member.models:
            before = found.get(row.id)
            if before is None:
                found[row.id] = row
                continue
            found[row.id] = msgspec.structs.replace(
                before if not before.is_ready else row,
                in_flight=before.in_flight + row.in_flight,
                waiting=before.waiting + row.waiting,
                limit=None if before.limit is None or row.limit is None else before.limit + row.limit,
            )
    return sorted(found.values(), key=lambda row: row.id)


def _merged_errors(members: Sequence[MemberPicture]) -> list[ErrorGroup]:
    """Return the failures of all processes by kind, the one that failed last first."""
    found: dict[str, ErrorGroup] = {}
    for member in members:
        for row in member.errors:
            before = found.get(row.id)
            if before is None:
                found[row.id] = row
                continue
            newer = row if row.last_ms >= before.last_ms else before
            found[row.id] = msgspec.structs.replace(
                newer,
                count=row.count + before.count,
                per_minute=round(row.per_minute + before.per_minute, 3),
                first_ms=min(row.first_ms, before.first_ms),
                example=newer.example or row.example or before.example,
            )
    return sorted(found.values(), key=lambda row: -row.last_ms)


def _merged_events(members: Sequence[MemberPicture]) -> list[EventView]:
    """Return the events of all, the newest first. What all processes saw at about the same time is one event."""
    rows = sorted((row for member in members for row in member.events), key=lambda row: -row.at_ms)
    seen: dict[tuple[str, str], int] = {}
    kept: list[EventView] = []
    for row in rows:
        # Each process measures the load a moment later than the others: the figures behind the colon are its own.
        what = row.kind, row.text.partition(": ")[0] if row.kind == "scale" else row.text
        last = seen.get(what)
        seen[what] = row.at_ms
        if last is None or row.request_id is not None or last - row.at_ms > SAME_EVENT_MS:
            kept.append(row)
    return kept


SAME_EVENT_MS: Final = 2000


Entries = dict[str, JsonObject]
"""What a picture shows: by view and id. A view that has one entry only has it under the empty id."""


def entries_of(picture: Picture) -> Entries:
    """Return what a picture shows."""
    found: Entries = {} if picture.fleet is None else {"fleet": {"": picture.fleet}}
    for view in VIEWS[1:]:
        rows = getattr(picture, view)
        if rows is not None:
            found[view] = {row.id: row for row in rows}
    return found


def patch_between(before: Entries, after: Entries, picture: Picture) -> Patch:
    """Return what leads from some entries to those of a picture of the same views."""
    patch = Patch(seq=picture.seq, taken_ms=picture.taken_ms, partial=picture.partial, totals=picture.totals)
    for view, entries in after.items():
        old = before[view]
        for id, entry in entries.items():
            known = old.get(id)
            if known is entry or known == entry:  # rows that stay as they are stay the same object
                continue
            if view == "streams" and known is not None and _only_progressed(known, entry):
                patch.progress[id] = StreamProgress(
                    output_tokens=entry.output_tokens,
                    tokens_per_second=entry.tokens_per_second,
                    last_token_ms=entry.last_token_ms,
                )
            else:
                patch.set[f"{view}/{id}" if id else view] = entry
        if not old.keys() <= entries.keys():
            patch.gone += [f"{view}/{id}" for id in old if id not in entries]
    return patch


def _only_progressed(known: StreamView, entry: StreamView) -> bool:
    """Return whether two rows of one request differ in nothing but what each token changes."""
    progressed = msgspec.structs.replace(
        known,
        output_tokens=entry.output_tokens,
        tokens_per_second=entry.tokens_per_second,
        last_token_ms=entry.last_token_ms,
    )
    return progressed == entry
