"""The tables that pictures are made from."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import os
import re
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from dynamo.frontend.base.failures import FailureGroup, FailureRing
from dynamo.frontend.base.redaction import Redact, load_redaction
from dynamo.frontend.http.settings import HttpSettings
from dynamo.frontend.models.busy_threshold import LoadFollower
from dynamo.frontend.models.directory import ModelDirectory
from dynamo.frontend.parts.inspector.caches import CacheTable
from dynamo.frontend.parts.inspector.clock import InspectorClock
from dynamo.frontend.parts.inspector.recent import RecentRequests
from dynamo.frontend.parts.inspector.routing import RoutingLog
from dynamo.frontend.parts.inspector.stream_rows import key_name, worker_name
from dynamo.frontend.parts.inspector.streams import StreamTable
from dynamo.frontend.parts.inspector.workers import ClusterTable
from dynamo.frontend.pipeline.exchange import Exchange
from dynamo.frontend.pipeline.inference import Pipeline
from dynamo.frontend.pipeline.text_generation import TextPlan
from dynamo.protocol.inspector.views import ErrorGroup, EventView, SettingView
from dynamo.protocol.openai.shapes import JsonMapping, JsonObject
from dynamo.settings.table import Setting, settings_of, without_secrets
from dynamo.text.tokenizer import Tokenizer

# What happened: workers that came and went, requests that moved, actions of operators. The last thousand of it.

MAX_EVENTS: Final = 1000


class EventLog:
    """A bounded list of events, the newest last. Used on the event loop only."""

    def __init__(self, clock: InspectorClock, frontend_id: str) -> None:
        self._clock, self._frontend_id = clock, frontend_id
        self._events: deque[EventView] = deque(maxlen=MAX_EVENTS)
        self._number = 0

    def add(
        self,
        kind: str,
        text: str,
        *,
        worker: str | None = None,
        model: str | None = None,
        request_id: str | None = None,
        by: str | None = None,
    ) -> EventView:
        """Note an event that happens now."""
        self._number += 1
        event = EventView(
            id=f"{self._frontend_id}/{self._number}",
            at_ms=self._clock.now_ms(),
            kind=kind,
            text=text,
            worker=worker,
            model=model,
            request_id=request_id,
            by=by,
        )
        self._events.append(event)
        return event

    def last(self, limit: int) -> list[EventView]:
        """Return the last events, the newest first."""
        found = list(self._events)
        return found[::-1][:limit]

    def of_request(self, id: str) -> list[EventView]:
        """Return the events of one request, in order."""
        return [event for event in self._events if event.request_id == id]

    def __len__(self) -> int:
        return len(self._events)


# The settings in force, and where each is from. A secret is never shown.

_LINK: Final = re.compile(r"\[([^\]]+)\]\([^)]*\)")  # of the page that this text is written for


def setting_rows(settings: HttpSettings, environment: Mapping[str, str] = os.environ) -> list[SettingView]:
    """Return every setting of a frontend.

    A value that differs from the default is from its variable where that is set to it, else from a flag.
    """
    shown = dict(_values(settings, without_secrets(settings)))
    rows = []
    for name, made in settings_of(type(settings)):
        if name not in shown:
            continue
        value = shown[name]
        rows.append(
            SettingView(
                name=_name_of(name, made),
                value=_plain(value),
                origin=_origin(made, value, environment),
                help=_LINK.sub(r"\1", made.meaning).replace("\\|", "|"),
            )
        )
    return rows


def _values(table: Any, shown: JsonMapping) -> Iterator[tuple[str, Any]]:
    for entry in dataclasses.fields(table):
        value = getattr(table, entry.name)
        if dataclasses.is_dataclass(value) and isinstance(shown[entry.name], Mapping):
            yield from _values(value, shown[entry.name])
        else:
            yield entry.name, shown[entry.name]


def _name_of(name: str, made: Setting) -> str:
    return made.flags[0] if made.flags else made.variable or name


def _origin(made: Setting, value: object, environment: Mapping[str, str]) -> str:
    if value == made.default or (value is None and made.default is None):
        return "default"
    if made.variable and environment.get(made.variable, "").strip():
        return "environment"
    return "flag" if made.flags else "default"


def _plain(value: object) -> object:
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value)


# Failures by kind, as rows.

HIDDEN: Final = "(not shown: it may repeat what the client wrote)"


def error_rows(ring: FailureRing | None, limit: int) -> list[ErrorGroup]:
    """Return the kinds of failures, the one that failed last first."""
    return [] if ring is None else [_row(group) for group in ring.grouped(limit)]


def without_texts(rows: list[ErrorGroup]) -> list[ErrorGroup]:
    """Return the rows as viewers may see them that see no content: what is wrong with a request may repeat all of it."""
    return [msgspec.structs.replace(row, message=HIDDEN) if row.status in (400, 422) else row for row in rows]


def _row(group: FailureGroup) -> ErrorGroup:
    kind = (str(group.status), group.code, group.model, group.worker, group.template)
    return ErrorGroup(
        id=hashlib.blake2b("\0".join(kind).encode(), digest_size=8).hexdigest(),
        status=group.status,
        code=group.code or None,
        model=group.model or None,
        worker=group.worker or None,
        message=group.template,
        count=group.count,
        per_minute=group.rate_per_minute,
        first_ms=group.first_ms,
        last_ms=group.last_ms,
        example=group.example_id or "",
    )


# Follows the workers of the cluster as they come and go, for the events and the ages that the inspector shows.


class WorkerLifecycle:
    """Checks the workers whenever they have changed, and at no other time."""

    def __init__(self, models: ModelDirectory, events: EventLog, clock: InspectorClock) -> None:
        self._models, self._events, self._clock = models, events, clock
        self.first_seen: dict[str, float] = {}
        """When each worker that is there came, by id: loop times."""
        self._served: dict[int, str] = {}  # by worker, what it serves
        self._conflicts: set[str] = set()  # keys of cards that differ from the one in service
        self._circuits: dict[str, float] = {}  # workers in quarantine

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            self.look()
            await self._models.change()

    def look(self) -> None:
        """Compare the workers with those of the last check."""
        now = self._clock.now()
        served: dict[int, str] = {}
        conflicts: dict[str, tuple[str, str]] = {}
        for group in self._models.groups():
            pool = self._models.pool_of(group.key)
            there = group.instance_ids if pool is None else group.instance_ids & pool.listed_ids
            served |= dict.fromkeys(there - served.keys(), group.key.model)
            for entry in group.rejected:
                conflicts[entry.key] = worker_name(entry.instance_id), group.key.model
        for id in served.keys() - self._served.keys():
            name, model = worker_name(id), served[id]
            self.first_seen[name] = now
            self._events.add("worker joined", f"worker {name} serves {model}", worker=name, model=model)
        for id in self._served.keys() - served.keys():
            name, model = worker_name(id), self._served[id]
            self.first_seen.pop(name, None)
            self._events.add("worker left", f"worker {name} of {model} has left", worker=name, model=model)
        for key in conflicts.keys() - self._conflicts:
            name, model = conflicts[key]
            text = f"worker {name} gets no requests: its card of {model} differs from the one in service"
            self._events.add("card conflict", text, worker=name, model=model)
        self._served, self._conflicts = served, set(conflicts)

    def look_at_circuits(self) -> None:
        """Note the workers that were quarantined, or answer again, since the last check. Called at each end of a failed request,
        and while a viewer watches."""
        found: dict[str, float] = {}
        for group in self._models.groups():
            if (pool := self._models.pool_of(group.key)) is not None:
                found |= {worker_name(id): until for id, until in pool.circuits().items()}
        for name in found.keys() - self._circuits.keys():
            seconds = max(0.0, found[name] - asyncio.get_running_loop().time())
            text = f"worker {name} is quarantined: a request to it failed; it is tried again in {seconds:.0f} s"
            self._events.add("worker quarantined", text, worker=name)
        for name in self._circuits.keys() - found.keys():
            if name in self.first_seen:
                self._events.add("worker answers", f"worker {name} answers again", worker=name)
        self._circuits = found


# The content of a request in flight and of its answer, for viewers with the permission. Nothing is kept for it: the ids are there anyway.

logger = logging.getLogger(__name__)

CONTENT_SCHEMA: Final = "dynamo.inspect.content.v1"
MAX_CONTENT_BYTES: Final = 64 * 1024  # of the prompts, and again of the answers
MAX_TOKENS: Final = 16_384  # of the prompts, and again of the answers: about as many bytes, and 10 ms of the event loop
MAX_SHOWN: Final = 16  # prompts, and answers


class ContentReader:
    """Makes text of the token ids that a request holds while it runs. Used on the event loop only."""

    def __init__(self, models: ModelDirectory, redact: Redact | None) -> None:
        """`redact`: the operator's function; what it makes of a record is shown in its place, and nothing for None."""
        self._models, self._redact = models, redact

    def read(self, exchange: Exchange) -> JsonObject | None:
        """Return the prompts from their beginning, and the ends of the answers; None: nothing is known, or may be shown."""
        work, name = exchange.work, exchange.model
        model = None if name is None else self._models.lookup(name)
        if work is None or model is None:
            return None
        plan = work.plan
        if isinstance(plan, TextPlan):  # its worker makes the text, and its answer passes through
            prompts = [_said(body) for body in plan.bodies[:MAX_SHOWN]]
            answers: list[str] | None = None
        else:
            tokenizer = model.text.tokenizer
            shown = plan.prompts[:MAX_SHOWN]
            prompts = [_text(tokenizer, ids[: MAX_TOKENS // len(shown)]) for ids in shown]
            running = work.running[:MAX_SHOWN]
            answers = [
                _text(tokenizer, stream.request.answer.generated[-(MAX_TOKENS // len(running)) :]) for stream in running
            ]
        record: JsonObject = {
            "schema": CONTENT_SCHEMA,
            "id": exchange.response_id,
            "key": key_name(exchange.identity),
            "model": name,
            "prompt_tokens": work.tally.prompt_tokens,
            "prompts": _bounded(prompts),
            "output_tokens": sum(stream.tokens for stream in work.running),
            "answers": None if answers is None else _bounded(answers, keeps_end=True),
        }
        return self._redacted(record)

    def _redacted(self, record: dict[str, object]) -> dict[str, object] | None:
        if self._redact is None:
            return record
        try:
            return self._redact(record)
        except Exception as error:
            # Whatever it meant to take out is still in there, and may be in the error's text, too.
            logger.error("content is not shown, because the redaction failed for it with %s", type(error).__name__)
            return None


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def _said(body: dict[str, object]) -> str:
    """Return the content of a body of a model that takes text: its prompt, or its messages as JSON."""
    prompt = body.get("prompt")
    return prompt if isinstance(prompt, str) else msgspec.json.encode(body.get("messages")).decode()


def _bounded(texts: Sequence[str], *, keeps_end: bool = False) -> list[str]:
    """Return texts that are together no longer than they may be, each with its beginning, or with its end."""
    limit = MAX_CONTENT_BYTES // max(1, len(texts))
    found = []
    for text in texts:
        raw = text[-limit:].encode(errors="replace") if keeps_end else text[:limit].encode(errors="replace")
        found.append((raw[-limit:] if keeps_end else raw[:limit]).decode(errors="ignore"))
    return found


class Tables:
    """One table for each kind of row, over the parts of one frontend."""

    def __init__(
        self,
        pipeline: Pipeline,
        settings: HttpSettings,
        loads: LoadFollower,
        clock: InspectorClock,
        frontend_id: str,
        failures: FailureRing | None,
    ) -> None:
        """`failures`: those of this process; None: they are not kept."""
        self.failures, self.settings = failures, settings
        self.frontend_id = frontend_id
        self.events = EventLog(clock, frontend_id)
        self.streams = StreamTable(pipeline.register, clock, frontend_id)
        self.recent = RecentRequests(clock, frontend_id)
        self.lifecycle = WorkerLifecycle(pipeline.models, self.events, clock)
        self.routing = RoutingLog(pipeline.models.holds, clock, frontend_id)
        self.token_rates = TokenRates()
        self.contents = ContentReader(pipeline.models, load_redaction(settings.request_trace.redact))
        self.caches = CacheTable(pipeline.models, clock)
        self.cluster = ClusterTable(
            pipeline.models,
            settings,
            clock,
            loads,
            self.lifecycle.first_seen,
            self.caches.hit_share,
        )


KEPT_SECONDS: Final = 60
MAX_REQUESTS: Final = 32  # the one that was looked at longest ago goes first
SPAN_SECONDS: Final = 0.9  # a viewer looks each second, not quite


class _Seen:
    """How far a request had come at each look."""

    __slots__ = ("at", "rates", "tokens")

    def __init__(self, tokens: int, at: float) -> None:
        self.tokens, self.at = tokens, at
        self.rates: deque[float] = deque(maxlen=KEPT_SECONDS)


class TokenRates:
    """The rates of some requests by id. Bounded; used on the event loop only."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, _Seen] = OrderedDict()

    def look(self, id: str, tokens: int, now: float) -> list[float]:
        """Take how many tokens a request has made; return its tokens per second since the first look, an entry each second."""
        seen = self._seen.get(id)
        if seen is None:
            seen = self._seen[id] = _Seen(tokens, now)
            if len(self._seen) > MAX_REQUESTS:
                self._seen.popitem(last=False)
        self._seen.move_to_end(id)
        if now - seen.at >= SPAN_SECONDS:
            self._note(seen, tokens, now)
        return list(seen.rates)

    def of(self, id: str) -> list[float]:
        """Return what is known of a request that has ended."""
        seen = self._seen.get(id)
        return [] if seen is None else list(seen.rates)

    def _note(self, seen: _Seen, tokens: int, now: float) -> None:
        """Note the rate since the last look, once for each second: nobody may have looked for some of them."""
        seconds = now - seen.at
        rate = round(max(0, tokens - seen.tokens) / seconds, 2)
        seen.rates.extend([rate] * min(KEPT_SECONDS, max(1, round(seconds))))
        seen.tokens, seen.at = tokens, now
