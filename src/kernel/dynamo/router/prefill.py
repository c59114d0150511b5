"""Disaggregated serving, seen from the caller: have a prompt computed by a prefill worker, then pass its result to the decode worker
where to fetch the result.

Two ways, by what the prefill worker's card says. Where it advertises a bootstrap address, both requests get the same
room number and run at once; the workers meet there. Otherwise the prefill request is awaited, and what its last chunk
says in `disaggregated_params` goes into the decode request verbatim: the transfer is the engines' own business.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Final, Protocol

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
from dynamo.router.course import may_be_taken
from dynamo.router.detour import Detour
from dynamo.router.handoff import (
    Handoff,
    PrefillAnswer,
    Renew,
    decode_request,
    prefill_request,
    read_reply,
)
from dynamo.router.kv.sessions import SessionHold
from dynamo.router.pool import ChosenWorker, ModelPool
from dynamo.router.query_of_death import Suspect
from dynamo.router.record import DispatchRecord
from dynamo.runtime.base.tasks import Background, Work
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseStream

__all__ = ["CanReceive", "DispatchTimer", "PrefillAttempts", "PrefillRouter", "can_fall_back_to_decode"]

logger = logging.getLogger(__name__)

MAX_ROOM: Final = 2**63 - 1

CanReceive = Callable[[TransferRule], bool]
"""Whether a decode worker is there to which blocks can be sent by this rule."""

HAND_OVER_SECONDS: Final = 5.0
"""How long a decode worker gets to fetch, and thereby free, the blocks of a request whose client has left. Longer than
a transfer takes; a prefill worker that is never asked frees them by itself a while later."""

NOT_NAMED: Final = (
    "Prefill worker ID required in Direct routing mode but none found in request. Expected prefill_worker_id to be set "
    "via x-dynamo-prefill-instance-id header by external router (e.g., EPP)."
)


class DispatchTimer(Protocol):
    """Where a request's time is noted."""

    def routed(self) -> None: ...

    def dispatched(self) -> None: ...

    def arrived(self, *, failed: bool = False) -> None: ...


class PrefillAttempts:
    """The prefill workers that one request has tried, and why the last of them failed."""

    __slots__ = ("last", "tried")

    def __init__(self) -> None:
        self.tried: list[WorkerKey] = []
        self.last: DynamoException | None = None


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
        self.detour = Detour(
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

    async def prefill(
        self,
        body: WorkerRequest,
        context: Context,
        timer: DispatchTimer,
        *,
        record: DispatchRecord,
        retries: int = 0,
        limit_seconds: float | None = None,
        suspect: Suspect | None = None,
        can_receive: CanReceive | None = None,
        attempts: PrefillAttempts | None = None,
        renew: Renew | None = None,
    ) -> Handoff | PrefillAnswer:
        """Request the prefill of `body`, trying up to `retries` other workers after failures that depend on the worker.

        `record` gets the placement of the worker that has taken it. `can_receive`: whether a decode worker is there for a
        prefill worker's rule; a worker without one is passed over. `attempts`: those of the request so far.
        `renew` makes the request anew for another worker, where it holds what one worker can take only.

        Raises:
            InvalidArgument: the request names a prefill worker that is not there, or the worker refused the request.
            Unknown: the worker did not hand anything over.
            DynamoException: why the last worker failed; `can_fall_back_to_decode` is whether decoding alone makes sense.
        """
        attempts = attempts or PrefillAttempts()
        tried = attempts.tried
        pinned = (body.get("routing") or {}).get("prefill_worker_id")
        late: DynamoException | None = None  # a limit of ours, which is no failure of the connection
        kv = self.workers.kv
        query = None if kv is None else await kv.query(body, record, pinned=pinned, is_prefill=True)
        rank = (body.get("routing") or {}).get("prefill_dp_rank")
        session = await self.workers.hold_session(body, context, worker_id=pinned, dp_rank=rank)
        with ExitStack() as stack:
            if session is not None:
                stack.callback(session.release)
            while True:
                if attempts.last is not None and len(tried) > retries:
                    raise attempts.last
                try:
                    without = [*tried, *self._cut_off(can_receive)]
                    worker = self._choose(body, pinned, without, query, session)
                    wait = None if tried else self.workers.wait_for_turn(worker, context)
                    if wait is not None and session is not None and session.may_go_elsewhere:
                        wait.close()  # a session that only prefers its worker goes elsewhere before it waits
                        session.go_elsewhere()
                        worker = self._choose(body, pinned, without, query, session)
                        wait = self.workers.wait_for_turn(worker, context)
                    if wait is not None:
                        began = _now()
                        is_turn = await wait
                        record.queued_seconds += _now() - began
                        if not is_turn:
                            return PrefillAnswer(worker.instance, [])  # cancelled while it waited
                        worker = self._choose(body, pinned, without, query, session)
                except WorkerUnavailable as error:
                    raise attempts.last or error from None  # the last failure explains more
                record.prefill_placement = worker.placement
                timer.routed()
                instance = worker.instance
                tried.append(worker.key)
                sent_at = _now()
                try:
                    try:
                        async with asyncio.timeout(limit_seconds):
                            answer = await self._on(worker, _with_rank(body, worker.placement), context, timer, suspect)
                        if session is not None:
                            session.sent(instance.instance_id, worker.placement.dp_rank)
                        return answer
                    except TimeoutError:
                        if limit_seconds is None:
                            raise
                        late = ResponseTimeout(f"the prompt was not computed within {limit_seconds:g} s")
                        raise late from None
                except DynamoException as error:
                    timer.arrived(failed=True)
                    record.note_failure("prefill", worker.placement, error, _now())
                    if error is not late:
                        worker.record_failure(error)
                        if session is not None:
                            session.failed(instance.instance_id, error)
                        if suspect is not None:
                            suspect.count_failure(self.workers, worker, error, sent_at=sent_at, now=_now())
                    if (
                        not rule_of(error).retryable
                        or pinned is not None
                        or len(tried) > retries
                        or context.is_stopped()
                    ):
                        raise
                    logger.info(
                        "request %s: prefill worker %x failed (%s: %s); trying another",
                        context.id(),
                        instance.instance_id,
                        type(error).__name__,
                        error,
                    )
                    attempts.last = error
                    if renew is not None and may_be_taken(error):
                        renewed = await renew()
                        if renewed is None:
                            return PrefillAnswer(instance, [])
                        body = renewed

    async def peek(self, body: WorkerRequest, record: DispatchRecord, can_receive: CanReceive | None) -> ChosenWorker:
        """Return the worker that would get the prefill of `body` now. Raises what the choice of a worker raises."""
        kv = self.workers.kv
        pinned = (body.get("routing") or {}).get("prefill_worker_id")
        query = None if kv is None else await kv.query(body, record, pinned=pinned, is_prefill=True)
        return self._choose(body, pinned, self._cut_off(can_receive), query)

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

    def _cut_off(self, can_receive: CanReceive | None) -> list[WorkerKey]:
        """Return the workers whose blocks can be sent to no decode worker."""
        if can_receive is None or not self._rules:
            return []
        verdicts = {rule: can_receive(rule) for rule in self._rules.values() if rule.is_required}
        return [key for key, rule in self._rules.items() if not verdicts.get(rule, True)]

    def _choose(
        self,
        body: WorkerRequest,
        pinned: int | None,
        tried: list[WorkerKey],
        query: KvQuery | None,
        session: SessionHold | None = None,
    ) -> ChosenWorker:
        request = PlacementRequest(
            token_ids=body.get("token_ids") or (),
            pinned_instance_id=pinned,
            bound=None if session is None else session.rank,
            excluded=tried,
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

    async def _on(
        self,
        worker: ChosenWorker,
        body: WorkerRequest,
        context: Context,
        timer: DispatchTimer,
        suspect: Suspect | None = None,
    ) -> Handoff | PrefillAnswer:
        instance, rule = worker.instance, self._rules.get(worker.key)
        request = prefill_request(body, instance.instance_id)
        bootstrap = self._bootstrap(instance.instance_id, body)
        if bootstrap is not None:
            request["bootstrap_info"] = bootstrap
        stream = await worker.open(request, context)
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
            return PrefillAnswer(
                instance, reply.items
            )  # it ended before the cancellation arrived, and freed the blocks
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
            # Not as text: each plane writes it as its readers want it.
            "handoff_id": uuid.UUID(int=self._rng.getrandbits(128), version=4),
        }


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
