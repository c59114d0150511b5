"""The inspector of one frontend process: it takes pictures of the parts that are there anyway, when somebody looks.

While nobody does, it counts the ends of requests, and samples the counters of the process every five seconds.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Final, NamedTuple, assert_never

from msgspec import Struct

from dynamo.frontend.admission.process import Admission
from dynamo.frontend.base.failures import FailureRing
from dynamo.frontend.base.peers import TOKEN_KEY
from dynamo.frontend.http.settings import HttpSettings
from dynamo.frontend.models.busy_threshold import LoadFollower
from dynamo.frontend.models.cards import GroupKey
from dynamo.frontend.parts.inspector.clock import InspectorClock
from dynamo.frontend.parts.inspector.details import explain_request, request_detail
from dynamo.frontend.parts.inspector.figures import SLOT_SECONDS, FigureRing, Slot, history_of, now_of
from dynamo.frontend.parts.inspector.operating import (
    MAX_SHOWN_IDS,
    Actions,
    AskAbort,
    AskAbortMatching,
    AskBundle,
    AskDetail,
    AskHold,
    AskPicture,
    GroupPeer,
    Members,
    Question,
    WorkerOperator,
)
from dynamo.frontend.parts.inspector.other_frontends import OtherFrontends, PeerAnswers
from dynamo.frontend.parts.inspector.pictures import MemberPicture, PictureQuery, add_residents, merge
from dynamo.frontend.parts.inspector.streams import sort_of
from dynamo.frontend.parts.inspector.tables import Tables, error_rows, setting_rows, without_texts
from dynamo.frontend.parts.inspector.visitors import Visitor
from dynamo.frontend.parts.inspector.watching import Watching
from dynamo.frontend.pipeline.exchange import Exchange
from dynamo.frontend.pipeline.inference import Pipeline
from dynamo.frontend.pipeline.outcome import Outcome, Reached, RequestListener
from dynamo.protocol.inspector.actions import AbortResult, BulkAbortRequest, BulkAbortResult, ExplainRequest
from dynamo.protocol.inspector.filters import Filter, parse_filter
from dynamo.protocol.inspector.views import (
    FleetView,
    FrontendView,
    Picture,
    RequestDetail,
    RoutingView,
    SettingView,
    StreamView,
    WorkerView,
)
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.shapes import JsonObject
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.http.inspector_token import new_token
from dynamo.scaling.decide import Decision

_NO_FILTER: Final = Filter("")
_Totals = Mapping[str, int | None]
_FLEET_TOTALS: Final = ("workers", "models", "resident_bytes", "budget_bytes")  # sums over all processes


class _MaybeAborted(Struct):
    """The answer of a process to an abort."""

    value: AbortResult | None


class _MaybeBundle(Struct):
    """What a process has of a failure."""

    value: JsonObject | None
    is_hidden: bool = False  # it has content, and is not for this viewer


class _MaybeDetail(Struct):
    """The answer of a process about a request."""

    value: RequestDetail | None


class _CpuSample(NamedTuple):
    at: float | None  # None: before the first one
    seconds: float  # of CPU time, of the process so far
    share: float | None  # of one core, since the sample before


class _Process:
    """What is known of this very process."""

    def __init__(self, clock: InspectorClock, admission: Admission, lag: Callable[[], float]) -> None:
        host = socket.gethostname()
        self.id = f"{host}:{os.getpid()}"
        self._host, self._clock, self._admission, self._lag = host, clock, admission, lag
        self.version = _version()
        self.started_ms = int(time.time() * 1000)
        self._cpu = _CpuSample(None, time.process_time(), None)

    def sample(self) -> None:
        """Measure the CPU time since the last sample."""
        now, cpu, last = self._clock.now(), time.process_time(), self._cpu
        share = last.share
        if last.at is not None and now > last.at:
            share = round((cpu - last.seconds) / (now - last.at), 3)
        self._cpu = _CpuSample(now, cpu, share)

    def row(self, in_flight: int) -> FrontendView:
        return FrontendView(
            id=self.id,
            host=self._host,
            pid=os.getpid(),
            started_ms=self.started_ms,
            stage=self._admission.stage.value,
            in_flight=in_flight,
            cpu_share=self._cpu.share,
            rss_bytes=_resident_bytes(),
            loop_lag_seconds=round(self._lag(), 4),
            version=self.version,
        )


class Inspector(RequestListener):
    """The state of one process as the records of the API. Used on the event loop only."""

    def __init__(
        self,
        pipeline: Pipeline,
        settings: HttpSettings,
        loads: LoadFollower,
        peers: GroupPeer | None = None,
        *,
        failures: FailureRing | None = None,
    ) -> None:
        """`peers`: the other processes of the port. `failures`: those of this process; None: they are not kept."""
        self.settings = settings.inspector
        self.token = new_token()
        """Lets in a viewer that presents it where no key protects the admin routes."""
        self.clock = InspectorClock()
        metrics = pipeline.metrics
        self.process = _Process(self.clock, pipeline.admission, lambda: metrics.event_loop.lag.value)
        self.tables = Tables(pipeline, settings, loads, self.clock, self.process.id, failures)
        self._pipeline = pipeline
        self._figures = _Figures(pipeline)
        self._background = Background()
        self.watching = Watching(self.take)
        self.actions = Actions(self.tables, self.clock.now)
        self._members = Members(peers, self._answer)
        self.operator = WorkerOperator(pipeline.models, self._members, self.clock)
        if peers is not None:
            peers.on_shared(self._take_shared)

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Sample the figures from now on, and follow the workers."""
        self.clock.settle()
        self._background.keep(self._sample, "inspector: figures")
        self._background.keep(self.tables.lifecycle.run, "inspector: workers")

    def join(self, others: OtherFrontends) -> None:
        """Include the other frontends of the cluster from now on."""
        self._members.others = others

    def note_scaling(self, found: tuple[GroupKey, int, Decision]) -> None:
        """Add the event of a load that needs another number of workers. The scaler may have other bounds."""
        key, before, decision = found
        workers = f"{decision.target} {key.role} worker{'' if decision.target == 1 else 's'}"
        text = f"the load of {key.model} asks for {workers}, not {before} ({decision.reason}): {decision.text}"
        self.tables.events.add("scale", text, model=key.model)

    @property
    def others(self) -> OtherFrontends | None:
        """The other frontends of the cluster; None where these are not included."""
        return self._members.others

    def stopping(self) -> None:
        """End every watch: the listener is about to close."""
        self.watching.close()

    async def aclose(self) -> None:
        """Stop. Idempotent."""
        self.stopping()
        self.operator.close()
        await self._background.close()

    async def _sample(self) -> None:
        while True:
            now = self.clock.settle()
            self.process.sample()
            self.tables.caches.sample()
            self._figures.sample(now, self.clock.ms(now), self.tables.cluster.kv_use())
            await asyncio.sleep(SLOT_SECONDS)

    def ended(self, exchange: Exchange, outcome: Outcome) -> None:
        """Keep what came of a request that was let in."""
        if outcome.reached is Reached.DOOR:
            return
        self.tables.streams.forget(exchange)
        ended = self.tables.recent.add(exchange, outcome)
        if (tally := exchange.tally) is not None:
            self.tables.routing.ended(ended.exchange_id, exchange.model, tally, outcome.at)
            self.tables.caches.ended(tally)
        if ended.moves or ended.outcome == "failed":
            self._note_trouble(ended.exchange_id, ended.model, ended.moves, ended.status)

    def _note_trouble(self, id: str, model: str | None, moves: int, status: int) -> None:
        if moves:
            self.tables.events.add(
                "request migrated",
                f"request {id} moved to another worker {'once' if moves == 1 else f'{moves} times'}, and ended with {status}",
                model=model,
                request_id=id,
            )
        self.tables.lifecycle.look_at_circuits()

    def _take_shared(self, key: str, value: bytes) -> None:
        if key == TOKEN_KEY:
            self.token = value.decode()

    def _answer(self, question: Question) -> object:
        """Answer another process of the group."""
        match question:
            case AskPicture(query, hides_texts):
                picture = self.member_picture(query)
                picture.errors = without_texts(picture.errors) if hides_texts else picture.errors
                return picture
            case AskDetail(id, with_content):
                return _MaybeDetail(request_detail(self.tables, self.clock, id, with_content=with_content))
            case AskBundle(id, with_content):
                return self._own_bundle(id, with_content)
            case AskAbort(id, reason):
                return _MaybeAborted(self.actions.abort(id, reason))
            case AskAbortMatching(filter, reason, dry_run):
                return self.actions.abort_matching(filter, reason, dry_run=dry_run)
            case AskHold():  # no process of a group requests one: its holds are shared
                raise LookupError("a hold is asked for by another frontend")
            case _:
                assert_never(question)

    async def answer_frontend(self, question: Question) -> PeerAnswers:
        """Answer another frontend of the cluster, as far as the settings of this one allow it."""
        shows = self.settings.shows_content
        match question:
            case AskPicture(query, _):
                question = AskPicture(query, hides_texts=not shows)
            case AskDetail(id, with_content):
                question = AskDetail(id, with_content and shows)
            case AskBundle(id, with_content):
                question = AskBundle(id, with_content and shows)
            case _ if self.settings.is_read_only:
                return PeerAnswers([], [f"{self.process.id} (read-only)"])
            case AskHold():
                refusal = await self.operator.take(question)
                if refusal is not None:
                    return PeerAnswers([], [f"{self.process.id} ({refusal})"])
                what = f"{question.kind or 'undrain'} of worker {question.worker}"
                told = f"taken over from another frontend, reason {question.reason!r}"
                self.actions.note(what, question.by, told, worker=question.worker)
                return PeerAnswers([], [])
        return await self._members.answer_for_all(question)

    # -- actions -----------------------------------------------------------------------------------------------------

    async def abort(self, id: str, reason: str) -> tuple[AbortResult | None, list[str]]:
        """End the request with this id, whichever process has it; None: none has. Also return the names of those that gave no answer."""
        own = self.actions.abort(id, reason)
        if own is not None:
            return own, []
        found, silent = await self._members.ask(AskAbort(id, reason), _MaybeAborted)
        return next((each.value for each in found if each.value is not None), None), silent

    async def abort_matching(self, asked: BulkAbortRequest) -> BulkAbortResult:
        """End, or count, the requests of all processes that a filter holds for. Raises FilterError."""
        result = self.actions.abort_matching(asked.filter, asked.reason, dry_run=asked.dry_run)
        question = AskAbortMatching(asked.filter, asked.reason, asked.dry_run)
        others, result.partial = await self._members.ask(question, BulkAbortResult)
        for each in others:
            result.matched += each.matched
            result.aborted += each.aborted
            result.ids = [*result.ids, *each.ids][:MAX_SHOWN_IDS]
        return result

    async def explain(self, asked: ExplainRequest) -> list[RoutingView]:
        """Return where a request would go now. Raises RequestRejected."""
        return await explain_request(self._pipeline, asked, self.clock.now_ms())

    # -- looking -----------------------------------------------------------------------------------------------------

    async def detail(self, id: str, visitor: Visitor) -> RequestDetail | None:
        """Return what is still known of a request, in any process of the group; None: nothing is."""
        with_content = visitor.sees_content(is_shown=self.settings.shows_content)
        own = request_detail(self.tables, self.clock, id, with_content=with_content)
        if own is not None:
            return own
        found, _ = await self._members.ask(AskDetail(id, with_content), _MaybeDetail)
        return next((each.value for each in found if each.value is not None), None)

    async def bundle(self, id: str, visitor: Visitor) -> dict[str, object] | None:
        """Return everything that is known of a failure, in any process of the group; None: it has no bundle, or has one no longer.

        Raises the 403 of one with content.
        """
        with_content = visitor.sees_content(is_shown=self.settings.shows_content)
        found = self._own_bundle(id, with_content)
        if found.value is None and not found.is_hidden:
            others, _ = await self._members.ask(AskBundle(id, with_content), _MaybeBundle)
            found = next((each for each in others if each.value is not None or each.is_hidden), found)
        if found.is_hidden:
            text = "This bundle has content, which needs DYN_INSPECT_CONTENT=1 and a key with the role content or admin"
            raise RequestRejected(403, text, code="insufficient_permissions")
        return found.value

    def _own_bundle(self, id: str, with_content: bool) -> _MaybeBundle:
        found = None if self.tables.failures is None else self.tables.failures.bundle(id)
        is_hidden = found is not None and self.tables.settings.recording.keep_failed_content and not with_content
        return _MaybeBundle(None if is_hidden else found, is_hidden)

    def setting_rows(self) -> list[SettingView]:
        """Return the settings in force."""
        return setting_rows(self.tables.settings)

    async def take(self, query: PictureQuery, visitor: Visitor, seq: int) -> Picture:
        """Take a picture of all processes of the group. Raises FilterError."""
        with self.watching.meter.running():
            own = self.member_picture(query)
        others, silent = await self._members.ask(AskPicture(query), MemberPicture)
        with self.watching.meter.running():
            return self.picture([own, *others], silent, query, visitor, seq)

    def member_picture(self, query: PictureQuery) -> MemberPicture:
        """Return what this process shows. Raises FilterError."""
        wanted = parse_filter(query.filter)
        views = set(query.views)
        self.tables.streams.look()
        picture = MemberPicture(frontend=self.process.row(len(self.tables.streams)))
        totals = picture.totals
        if views & {"fleet", "workers"}:
            self.tables.cluster.look()
        if "fleet" in views:
            picture.slots = self._figures.slots(self.clock.now(), self.clock.now_ms(), self.tables.cluster.kv_use())
            totals["fleet/workers"], totals["fleet/models"] = self.tables.cluster.count()
        if "streams" in views:
            picture.streams, totals["streams"] = self.tables.streams.rows(wanted, query.sort, query.limit)
        if "recent" in views:
            picture.recent, totals["recent"] = self.tables.recent.rows(wanted, query.limit)
        if "workers" in views:
            pulses = self.tables.streams.pulses()
            filtered = _NO_FILTER if views & {"streams", "recent"} else wanted
            rows = [row for row in self.tables.cluster.workers(pulses) if filtered.matches(row, self.clock.now_ms())]
            picture.workers, totals["workers"] = rows[: query.limit], len(rows)
        if "models" in views:
            rows_of_models = self.tables.cluster.models()
            picture.models, totals["models"] = rows_of_models[: query.limit], len(rows_of_models)
        if views & {"fleet", "residents"} and (read := self._pipeline.hooks.residents) is not None:
            add_residents(picture, read(self.clock.ms))
        if "routing" in views:
            routing = self.tables.routing
            routing.looked()
            for exchange in self._pipeline.register:
                if exchange.tally is not None:
                    routing.name(exchange.response_id, exchange.tally)
            picture.routing, totals["routing"] = routing.rows(query.limit), len(routing)
        if "caches" in views:
            rows_of_caches = self.tables.caches.rows()
            picture.caches, totals["caches"] = rows_of_caches[: query.limit], len(rows_of_caches)
        if "prefixes" in views:
            choices = self.tables.routing.choices()
            picture.prefixes, totals["prefixes"] = self.tables.caches.prefixes(choices, query.limit)
        if "errors" in views:
            picture.errors = error_rows(self.tables.failures, query.limit)
        if "events" in views:
            picture.events, totals["events"] = self.tables.events.last(query.limit), len(self.tables.events)
        return picture

    def workers(self) -> list[WorkerView]:
        """Return all workers."""
        self.tables.streams.look()
        return self.tables.cluster.workers(self.tables.streams.pulses())

    def picture(
        self, members: Sequence[MemberPicture], partial_: Sequence[str], query: PictureQuery, visitor: Visitor, seq: int
    ) -> Picture:
        """Return the pictures of all processes as one, as a visitor may see it."""
        key, is_reversed = sort_of(query.sort)
        merged, frontends = merge(members, query, key or _started, reverse=is_reversed)
        totals = merged.totals
        of_fleet = {name: totals.pop(f"fleet/{name}", None) for name in _FLEET_TOTALS}
        picture = Picture(
            seq=seq, taken_ms=self.clock.now_ms(), partial=list(partial_), totals=totals if totals else {}
        )
        for view in query.views:
            if view == "fleet":
                picture.fleet = self._fleet(merged, frontends, visitor, of_fleet)
            elif view == "frontends":
                picture.frontends = frontends
            elif view == "errors" and not visitor.sees_content(is_shown=self.settings.shows_content):
                picture.errors = without_texts(merged.errors)
            else:
                setattr(picture, view, getattr(merged, view))
        return picture

    def _fleet(
        self, merged: MemberPicture, frontends: Sequence[FrontendView], visitor: Visitor, totals: _Totals
    ) -> FleetView:
        settings, bounds = self.tables.settings, self._figures.bounds
        return FleetView(
            cluster=settings.namespace or settings.namespace_prefix or "all namespaces",
            started_ms=self.process.started_ms,
            frontends=len(frontends),
            workers=(totals["workers"] or 0) // len(frontends),
            models=(totals["models"] or 0) // len(frontends),
            resident_bytes=totals["resident_bytes"],
            budget_bytes=totals["budget_bytes"],
            now=now_of(merged.slots, bounds),
            history=self._figures.history(merged.slots),
            history_seconds=SLOT_SECONDS,
            read_only=self.settings.is_read_only,
            shows_content=visitor.sees_content(is_shown=self.settings.shows_content),
            role=str(visitor.role),
            version=self.process.version,
        )


def _started(row: StreamView) -> int:
    return row.started_ms


class _Figures:
    """The figures of the process, from the counters of its metrics."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._requests = pipeline.metrics.requests
        self._ring = FigureRing()
        self.bounds = self._requests.bounds
        self._history: tuple[tuple[int, int], dict[str, list[float | None]]] = ((0, 0), {})

    def sample(self, now: float, now_ms: int, kv: tuple[int, int]) -> None:
        self._ring.sample(self._requests.totals(), now, _number(now_ms), kv)

    def slots(self, now: float, now_ms: int, kv: tuple[int, int]) -> list[Slot]:
        return self._ring.with_open(self._requests.totals(), now, _number(now_ms), kv)

    def history(self, slots: Sequence[Slot]) -> dict[str, list[float | None]]:
        """Return the history; it is made anew when another slot has ended."""
        known = (slots[-2].number, len(slots)) if len(slots) > 1 else (0, 0)
        if self._history[0] != known:
            self._history = known, history_of(slots, self.bounds)
        return self._history[1]


def _resident_bytes() -> int | None:
    """Return the resident memory; None where the system does not report it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def _number(now_ms: int) -> int:
    return now_ms // int(SLOT_SECONDS * 1000)


@functools.cache
def _version() -> str:
    try:
        return version("dynamo-unified")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"
