"""Disaggregated serving, seen from the caller: have a prompt computed by a prefill worker, then pass its result to the decode worker
where to fetch the result.

Two ways, by the prefill worker's card. Where that advertises a bootstrap address, both requests get the same
room number and run at once; the workers meet there. Otherwise the prefill request is awaited, and `disaggregated_params`
of its last chunk go into the decode request verbatim: the transfer is the engines' own business.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Final, NamedTuple, Protocol

from dynamo.errors import (
    DynamoException,
    InvalidArgument,
    Overloaded,
    ResponseTimeout,
    Unknown,
    WorkerUnavailable,
    rule_of,
)
from dynamo.placement import Placement, PlacementRequest, WorkerKey
from dynamo.placement.kv_query import KvQuery
from dynamo.placement.kv_transfer import TransferRule, transfer_rule
from dynamo.protocol.finish import LENGTH
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.protocol.worker_request import BootstrapInfo, RoutingHints, WorkerRequest
from dynamo.router.dispatch.course import Choose, Chosen, Course, CourseRules, Event, Lost, NoWorker, Tick, may_be_taken
from dynamo.router.dispatch.drive import CANCELLED, ITEMS, OPENED, drive
from dynamo.router.dispatch.fallback_log import FallbackLog
from dynamo.router.dispatch.handoff import (
    Handoff,
    PrefillAnswer,
    Renew,
    decode_request,
    prefill_request,
    read_reply,
)
from dynamo.router.dispatch.query_of_death import Suspect
from dynamo.router.dispatch.record import DispatchRecord
from dynamo.router.kv.sessions import SessionHold
from dynamo.router.workers.pool import ChosenWorker, ModelPool
from dynamo.runtime.base.tasks import Background, Work
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseStream

logger = logging.getLogger(__name__)

MAX_ROOM: Final = 2**63 - 1

CanReceive = Callable[[TransferRule], bool]
"""Whether a decode worker is there to which blocks can be sent by this rule."""

HAND_OVER_SECONDS: Final = 5.0
"""How long a decode worker gets to fetch, and thereby free, the blocks of a request whose client has left. Longer than
a transfer takes; a prefill worker whose blocks are never fetched frees them by itself a while later."""

NOT_NAMED: Final = (
    "Prefill worker ID required in Direct routing mode but none found in request. Expected prefill_worker_id to be set "
    "via x-dynamo-prefill-instance-id header by external router (e.g., EPP)."
)


class DispatchTimer(Protocol):
    """Where a request's time is noted."""

    def routed(self) -> None: ...

    def dispatched(self) -> None: ...

    def arrived(self, *, failed: bool = False) -> None: ...


class PrefillJob(NamedTuple):
    """A request whose prompt is to be computed."""

    body: WorkerRequest
    context: Context
    timer: DispatchTimer
    record: DispatchRecord  # gets the placement of the worker that has taken it
    limit_seconds: float | None = None  # what one worker may take, where its answer is awaited
    suspect: Suspect | None = None
    can_receive: CanReceive | None = None  # a worker whose blocks no decode worker can receive is passed over
    renew: Renew | None = None  # makes the request anew for another worker, where only one can take what it holds

    @property
    def pinned(self) -> int | None:
        """The prefill worker that the request names; None: any may compute its prompt."""
        return (self.body.get("routing") or {}).get("prefill_worker_id")

    def course(self, retries: int = 0) -> Course:
        """Return the course of the request through prefill workers: it may try up to `retries` others."""
        course = Course(CourseRules("prefill", retries, is_pinned=self.pinned is not None, readmits_full=False))
        self.record.courses.append(course)
        return course


class PrefillRouter:
    """The prefill workers of one model in one namespace."""

    def __init__(
        self,
        workers: ModelPool,
        *,
        enforced: bool = False,
        is_conditional: bool = False,
        rng: random.Random | None = None,
    ) -> None:
        """`enforced`: a prompt that no prefill worker can take fails, instead of being computed where it is decoded.
        `is_conditional`: some prompts are computed there anyway, so that what decode workers have cached counts."""
        self.workers = workers
        self.is_enforced, self._is_conditional = enforced, is_conditional
        self._rng = rng or random.Random()
        self._configs: Mapping[int, ModelRuntimeConfig] = {}
        self._rules: Mapping[WorkerKey, TransferRule] = {}  # of the workers whose blocks cannot be sent anywhere
        self._running = Background()  # at most one per request in flight, and the moment after
        self.fallback_log = FallbackLog(
            workers.name,
            away="no prefill worker can take a prompt, decode workers compute it themselves",
            back="prompts go to prefill workers again",
        )

    def set_members(self, members: Mapping[tuple[str, int], ModelRuntimeConfig]) -> None:
        """Take over the prefill workers: (endpoint, instance id) with what each registered about itself."""
        self.workers.set_members(members)
        self._configs = {instance_id: config for (_, instance_id), config in members.items()}
        self._rules = {key: rule for key, config in members.items() if (rule := transfer_rule(config)) is not None}

    @property
    def ranks(self) -> frozenset[range]:
        """The data-parallel ranks of the prefill workers."""
        return frozenset(config.ranks for config in self._configs.values())

    async def aclose(self) -> None:
        """End the prefills that still run in the background."""
        await self._running.close()

    async def prefill(self, job: PrefillJob, course: Course) -> Handoff | PrefillAnswer:
        """Request the prefill of `job`, trying other workers after failures that depend on the worker.

        `course`: of the request so far; the same one for every prefill of a request.

        Raises:
            InvalidArgument: the request names a prefill worker that is not there, or the worker refused the request.
            Unknown: the worker did not hand anything over.
            DynamoException: why the last worker failed; `can_fall_back_to_decode` is whether decoding alone makes sense.
        """
        body, workers, pinned = job.body, self.workers, job.pinned
        kv = workers.kv
        query = None if kv is None else await kv.query(body, job.record, pinned=pinned, is_prefill=True)
        rank = (body.get("routing") or {}).get("prefill_dp_rank")
        session = await workers.hold_session(body, job.context, worker_id=pinned, dp_rank=rank)
        try:
            leg = _PrefillLeg(self, job, course, query, session)
            await drive(course, leg)
            return leg.answer
        finally:
            if session is not None:
                session.release()

    async def peek(self, body: WorkerRequest, record: DispatchRecord, can_receive: CanReceive | None) -> ChosenWorker:
        """Return the worker that would get the prefill of `body` now. Raises what the choice of a worker raises."""
        kv = self.workers.kv
        pinned = (body.get("routing") or {}).get("prefill_worker_id")
        query = None if kv is None else await kv.query(body, record, pinned=pinned, is_prefill=True)
        return self.choose(body, pinned, self.cut_off(can_receive), query)

    async def advise(
        self, body: WorkerRequest, record: DispatchRecord, can_receive: CanReceive | None = None
    ) -> Handoff:
        """Note in `record` which worker would get the prefill of `body` now, and return what it would hand over.

        Raises what the choice of a worker raises.
        """
        worker = await self.peek(body, record, can_receive)
        record.prefill_placement = placement = worker.placement
        record.prefill_instance_id = instance_id = placement.candidate.instance_id
        rule = self._rules.get(worker.key)
        return Handoff(worker.instance, self._onward(_with_rank(body, placement), instance_id, {}, rule), transfer=rule)

    def release_blocks(self, handoff: Handoff, workers: Decoders, context: Context) -> None:
        """Let a decode worker fetch the blocks of a request whose client left between the two halves, to have them freed.

        That happens in the background and takes at most `HAND_OVER_SECONDS`; failures are logged.
        """
        if not self._running.is_closed:  # else the workers are gone, or free the blocks when their time is up
            self._start(_release_blocks(handoff, workers, context), f"hand over {context.id()}")

    def cut_off(self, can_receive: CanReceive | None) -> list[WorkerKey]:
        """Return the workers whose blocks can be sent to no decode worker."""
        if can_receive is None or not self._rules:
            return []
        verdicts = {rule: can_receive(rule) for rule in self._rules.values() if rule.is_required}
        return [key for key, rule in self._rules.items() if not verdicts.get(rule, True)]

    def choose(
        self,
        body: WorkerRequest,
        pinned: int | None,
        excluded: Collection[WorkerKey],
        query: KvQuery | None,
        session: SessionHold | None = None,
    ) -> ChosenWorker:
        """Choose a prefill worker. Raises what `ModelPool.choose` raises."""
        request = PlacementRequest(
            token_ids=body.get("token_ids") or (),
            pinned_instance_id=pinned,
            bound=None if session is None else session.rank,
            excluded=excluded,
            # Where all circuits are open the decode workers compute the prompt, if they may.
            healthy_only=not self.is_enforced,
            kv=query,
        )
        try:
            return self.workers.choose(request)
        except InvalidArgument as error:
            if pinned is None:  # the direct mode, which chooses nothing
                raise InvalidArgument(NOT_NAMED) from error
            raise

    async def compute(
        self, worker: ChosenWorker, body: WorkerRequest, job: PrefillJob, course: Course
    ) -> Handoff | PrefillAnswer:
        """Send the prompt of `body` to a worker that computes it. Raises why that failed."""
        context, timer, suspect = job.context, job.timer, job.suspect
        instance, rule = worker.instance, self._rules.get(worker.key)
        request = prefill_request(body, instance.instance_id)
        bootstrap = self._bootstrap(instance.instance_id, body)
        if bootstrap is not None:
            request["bootstrap_info"] = bootstrap
        stream = await worker.open(request, context)
        course.step(OPENED)
        timer.dispatched()
        if bootstrap is not None and self._running.is_closed:
            stream.close()
            raise WorkerUnavailable("the model is being removed")
        if bootstrap is not None:
            # Awaited also where the decode's first items are read.
            task = self._start(self._drain(stream, worker, suspect), f"prefill {context.id()}")
            onward = self._onward(body, instance.instance_id, {"bootstrap_info": bootstrap}, rule)
            return Handoff(instance, onward, task, transfer=rule)
        reply = await read_reply(stream, context, "prefill")
        timer.arrived(failed=True)  # what was awaited is only the first half: the answer is still to come
        if suspect is not None:
            suspect.passed(self.workers)
        if reply.reason != LENGTH:
            return PrefillAnswer(instance, reply.items)
        if reply.params is None and context.is_stopped():
            # It ended before the cancellation arrived, and freed the blocks.
            return PrefillAnswer(instance, reply.items)
        if reply.params is None:
            raise Unknown("No disaggregated params in prefill response")
        onward = self._onward(body, instance.instance_id, reply.handed_over(), rule)
        return Handoff(instance, onward, transfer=rule)

    def _onward(
        self, body: WorkerRequest, instance_id: int, members: WorkerRequest, rule: TransferRule | None
    ) -> WorkerRequest:
        return decode_request(body, instance_id, members, rule, counts_cached=self._is_conditional)

    async def _drain(self, stream: ResponseStream, worker: ChosenWorker, suspect: Suspect | None) -> None:
        sent_at, has_begun = _now(), False
        try:
            while await stream.next_batch():
                has_begun = True
        except DynamoException as error:
            worker.record_failure(error)
            if suspect is not None and not has_begun:
                suspect.count_failure(self.workers, worker, error, sent_at=sent_at, now=_now())
            raise
        finally:
            stream.close()

    def _start(self, work: Work[None], name: str) -> asyncio.Task[None]:
        task = self._running.start(work, name, is_awaited=True)
        task.add_done_callback(self._log_failure)
        return task

    @staticmethod
    def _log_failure(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.info("%s failed: %s: %s", task.get_name(), type(error).__name__, error)

    def _bootstrap(self, instance_id: int, body: WorkerRequest) -> BootstrapInfo | None:
        """Return where the two workers of this request meet; None where this worker advertises no such place."""
        config = self._configs.get(instance_id)
        endpoint = (config.disaggregated_endpoint if config is not None else None) or {}
        host, port = endpoint.get("bootstrap_host"), endpoint.get("bootstrap_port")
        if config is None or not host or not port:
            return None
        room = self._rng.getrandbits(63)
        rank, ranks = (body.get("routing") or {}).get("prefill_dp_rank"), config.data_parallel_size
        if rank is not None and ranks:
            room += rank - room % ranks
            if room > MAX_ROOM:
                room -= ranks
        return {
            "bootstrap_host": host,
            "bootstrap_port": port,
            "bootstrap_room": room,
            # Not as text: each plane has its own form of it.
            "handoff_id": uuid.UUID(int=self._rng.getrandbits(128), version=4),
        }


class _PrefillLeg:
    """The attempts of one request at prefill workers (`drive.Leg`)."""

    __slots__ = ("_answer", "_body", "_course", "_job", "_query", "_router", "_session", "_worker")

    def __init__(
        self, router: PrefillRouter, job: PrefillJob, course: Course, query: KvQuery | None, session: SessionHold | None
    ) -> None:
        self._router, self._job, self._course, self._query, self._session = router, job, course, query, session
        self._body = job.body
        self._worker: ChosenWorker | None = None
        self._answer: Handoff | PrefillAnswer | None = None

    @property
    def worker(self) -> ChosenWorker:
        """The last one that was chosen."""
        assert self._worker is not None, "no worker was chosen"
        return self._worker

    @property
    def answer(self) -> Handoff | PrefillAnswer:
        """What the worker hands over; an empty answer where the request was cancelled."""
        return PrefillAnswer(self.worker.instance, []) if self._answer is None else self._answer

    async def choose(self, order: Choose) -> Event:
        """Choose a worker; before the first attempt, wait for a turn where all have too much to compute."""
        workers, session, context = self._router.workers, self._session, self._job.context
        self._worker = worker = self._place(order)
        wait = None if self._course.count else workers.wait_for_turn(worker, context)
        if wait is not None and session is not None and session.may_go_elsewhere:
            wait.close()  # a session that only prefers its worker goes elsewhere before it waits
            session.go_elsewhere()
            self._worker = worker = self._place(order)
            wait = workers.wait_for_turn(worker, context)
        if wait is not None:
            began = _now()
            is_turn = await wait
            self._job.record.queued_seconds += _now() - began
            if not is_turn:
                return CANCELLED
            self._worker = worker = self._place(order)
        return Chosen(worker.key)

    def _place(self, order: Choose) -> ChosenWorker:
        job = self._job
        excluded = [*order.excluded, *self._router.cut_off(job.can_receive)]
        return self._router.choose(self._body, job.pinned, excluded, self._query, self._session)

    def no_worker(self, error: WorkerUnavailable) -> NoWorker:
        """Let the request wait for none: the decode worker may compute the prompt."""
        return NoWorker(error)

    async def attempt(self) -> Event:
        """Send the prompt to the worker that was chosen."""
        job, worker, session = self._job, self.worker, self._session
        instance = worker.instance
        job.record.prefill_placement = worker.placement
        if job.suspect is not None:
            job.suspect.sent(instance.instance_id)
        job.timer.routed()
        sent_at, is_late = _now(), False  # a limit of ours is no failure of the connection
        try:
            try:
                async with asyncio.timeout(job.limit_seconds):
                    body = _with_rank(self._body, worker.placement)
                    self._answer = await self._router.compute(worker, body, job, self._course)
            except TimeoutError:
                if job.limit_seconds is None:
                    raise
                is_late = True
                raise ResponseTimeout(f"the prompt was not computed within {job.limit_seconds:g} s") from None
        except DynamoException as error:
            job.timer.arrived(failed=True)
            job.record.note_failure("prefill", worker.placement, error, _now())
            if not is_late:
                worker.record_failure(error)
                if session is not None:
                    session.failed(instance.instance_id, error)
                if job.suspect is not None:
                    job.suspect.count_failure(self._router.workers, worker, error, sent_at=sent_at, now=_now())
            return Lost(error, is_over=job.context.is_stopped())
        if session is not None:
            session.sent(instance.instance_id, worker.placement.dp_rank)
        return ITEMS

    async def again(self, error: DynamoException) -> bool:
        """Log the failure, and make the request anew where the last worker may have taken what it gives away once."""
        job = self._job
        logger.info(
            "request %s: prefill worker %x failed (%s: %s); trying another",
            job.context.id(), self.worker.instance.instance_id, type(error).__name__, error,
        )  # fmt: skip
        if job.renew is not None and may_be_taken(error):
            body = await job.renew()
            if body is None:
                return False
            self._body = body
        return True

    async def wait(self, seconds: float) -> Event:
        """Return at once: no request waits for a prefill worker."""
        return Tick()


class Decoders(Protocol):
    """The workers of the next stage: a `ModelPool`."""

    def choose(self, request: PlacementRequest) -> ChosenWorker: ...


def can_fall_back_to_decode(error: DynamoException) -> bool:
    """Return whether decoding alone can replace a failed prefill: the workers or the connections failed, not the request.

    Overload is no such failure: prompts that prefill workers cannot take would only drown the decode workers as well.
    """
    return rule_of(error).retryable and not isinstance(error, Overloaded)


def _with_rank(body: WorkerRequest, placement: Placement) -> WorkerRequest:
    """Return the request with the data-parallel rank that the placement chose for its prefill, if it chose one."""
    if placement.dp_rank is None:
        return body
    routing: RoutingHints = {**(body.get("routing") or {}), "prefill_dp_rank": placement.dp_rank}
    return {**body, "routing": routing}


async def _release_blocks(handoff: Handoff, workers: Decoders, context: Context) -> None:
    stops = handoff.body.get("stop_conditions") or {}
    body: WorkerRequest = {**handoff.body, "stop_conditions": {**stops, "max_tokens": 1}}
    own = context.detached(context.id())  # a worker does not even begin a request that is cancelled already
    try:
        async with asyncio.timeout(HAND_OVER_SECONDS):
            stream = await workers.choose(PlacementRequest(transfer=handoff.transfer)).open(body, own)
            try:
                while await stream.next_batch():
                    pass
            finally:
                stream.close()
    except (DynamoException, TimeoutError) as error:
        logger.info(
            "request %s: its KV blocks were not fetched, and expire (%s: %s)", context.id(), type(error).__name__, error
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
