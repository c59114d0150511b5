"""Disaggregated serving, seen from the caller: have a prompt computed by a prefill worker, then tell the decode worker
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
from collections.abc import Awaitable, Mapping
from typing import Any, Final, Protocol

from dynamo.errors import (
    DynamoException,
    InvalidArgument,
    Overloaded,
    ResponseTimeout,
    StreamIncomplete,
    Unknown,
    WorkerUnavailable,
    revive,
    rule_of,
)
from dynamo.placement import PlacementRequest, WorkerKey
from dynamo.protocol.finish import LENGTH, EngineFailed, normalise
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.router.pool import ChosenWorker, WorkerPool
from dynamo.runtime.context import Context
from dynamo.runtime.request_plane.base import Instance, ResponseStream, StreamItem

__all__ = ["Handoff", "PrefillAnswer", "PrefillRouter", "Stages", "may_go_without"]

logger = logging.getLogger(__name__)

MAX_ROOM: Final = 2**63 - 1
MAX_PORT: Final = 2**16 - 1

HAND_OVER_SECONDS: Final = 5.0
"""How long a decode worker gets to fetch, and thereby free, the blocks of a request whose client has left. Longer than
a transfer takes; a prefill worker that is never asked frees them by itself a while later."""

NOT_NAMED: Final = (
    "Prefill worker ID required in Direct routing mode but none found in request. Expected prefill_worker_id to be set "
    "via x-dynamo-prefill-instance-id header by external router (e.g., EPP)."
)

_DECODE_OVERRIDES: Final = {"overlap_score_credit": 0.0, "assume_kv_reuse": False, "track_prefill_tokens": False}
"""What the decode worker is chosen by: the prompt's blocks come from elsewhere, so what it has cached counts nothing,
and it computes no prompt."""


class Stages(Protocol):
    """Where a request's time is noted: `dynamo.frontend.pipeline.stage_timer.StageTimer`."""

    def routed(self) -> None: ...

    def dispatched(self) -> None: ...

    def arrived(self, *, failed: bool = False) -> None: ...


class PrefillAnswer:
    """The prefill worker ended the request itself (an end-of-sequence token came first): there is nothing to decode."""

    __slots__ = ("instance", "items")

    def __init__(self, instance: Instance, items: list[StreamItem]) -> None:
        """`items` is what the client gets; empty when its request was cancelled."""
        self.instance, self.items = instance, items


class Handoff:
    """A prompt that is computed, or being computed, and the request that continues it."""

    __slots__ = ("_running", "body", "instance")

    def __init__(self, instance: Instance, body: dict[str, Any], running: asyncio.Task[None] | None = None) -> None:
        """`instance` computes the prompt; `body` is for the decode worker. `running`: the prefill, where it still runs."""
        self.instance, self.body, self._running = instance, body, running

    async def beside(self, first_items: Awaitable[list[StreamItem]]) -> list[StreamItem]:
        """Await the decode's first items. One leg's failure ends the other; it is what is raised."""
        running = self._running
        if running is None:
            return await first_items
        decode = asyncio.ensure_future(first_items)
        try:
            await asyncio.wait({decode, running}, return_when=asyncio.FIRST_COMPLETED)
            if not decode.done():
                running.result()  # raises why the prefill failed
            items = await decode
        except BaseException:
            running.cancel()
            raise
        finally:
            if not decode.done():
                decode.cancel()
                await asyncio.wait({decode})
        return items  # the prefill ends by itself, and the router waits for it


class PrefillRouter:
    """The prefill workers of one model in one namespace."""

    def __init__(self, workers: WorkerPool, *, enforced: bool = False, rng: random.Random | None = None) -> None:
        """`enforced`: a prompt that no prefill worker can take fails, instead of being computed where it is decoded."""
        self.workers = workers
        self.is_enforced = enforced
        self._rng = rng or random.Random()
        self._configs: Mapping[int, ModelRuntimeConfig] = {}
        self._running: set[asyncio.Task[None]] = set()  # at most one per request in flight, and the moment after
        self._is_degraded = False

    def set_members(self, members: Mapping[tuple[str, int], ModelRuntimeConfig]) -> None:
        """Take over who computes prompts: by (endpoint, instance id), with what each says about itself."""
        self.workers.set_members(members)
        self._configs = {instance_id: config for (_, instance_id), config in members.items()}

    async def aclose(self) -> None:
        """End prefills that nobody waits for any more."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def prefill(
        self,
        body: Mapping[str, Any],
        context: Context,
        stages: Stages,
        *,
        retries: int = 0,
        limit_seconds: float | None = None,
    ) -> Handoff | PrefillAnswer:
        """Have the prompt of `body` computed, trying up to `retries` other workers after failures that these may not have.
        `limit_seconds`: what each of them may take until it has handed over, where that is waited for.

        Raises:
            InvalidArgument: the request names a prefill worker that is not there, or the worker refused the request.
            Unknown: the worker did not hand anything over.
            DynamoException: why the last worker failed; `may_go_without` tells whether decoding alone makes sense.
        """
        tried: list[WorkerKey] = []
        pinned = (body.get("routing") or {}).get("prefill_worker_id")
        last: DynamoException | None = None
        late: DynamoException | None = None  # a limit of ours: that is no fault of the way to the worker
        while True:
            try:
                worker = self._choose(body, pinned, tried)
            except WorkerUnavailable as error:
                raise last or error from None  # why the last one failed says more
            stages.routed()
            instance = worker.instance
            tried.append(worker.key)
            try:
                try:
                    async with asyncio.timeout(limit_seconds):
                        return await self._on(worker, body, context, stages)
                except TimeoutError:
                    if limit_seconds is None:
                        raise
                    late = ResponseTimeout(f"the prompt was not computed within {limit_seconds:g} s")
                    raise late from None
            except DynamoException as error:
                stages.arrived(failed=True)
                if error is not late:
                    worker.record_failure(error)
                if not rule_of(error).retryable or pinned is not None or len(tried) > retries or context.is_stopped():
                    raise
                logger.info(
                    "request %s: prefill worker %x failed (%s: %s); trying another",
                    context.id(),
                    instance.instance_id,
                    type(error).__name__,
                    error,
                )
                last = error

    def hand_over(self, handoff: Handoff, workers: Decoders, context: Context) -> None:
        """The client left between the two halves: let a decode worker fetch the blocks all the same, to have them freed.

        In the background, at most `HAND_OVER_SECONDS`; failures are logged, since nobody is left to tell.
        """
        # Awaited in aclose().
        task = asyncio.get_running_loop().create_task(
            _hand_over(handoff, workers, context), name=f"hand over {context.id()}"
        )
        self._running.add(task)
        task.add_done_callback(self._drained)

    def note(self, failure: DynamoException | None) -> None:
        """Say once that prompts are computed where they are decoded, and once that they are not any more (None)."""
        if failure is None and self._is_degraded:
            self._is_degraded = False
            logger.info("model %s: prompts go to prefill workers again", self.workers.name)
        elif failure is not None and not self._is_degraded:
            self._is_degraded = True
            logger.warning(
                "model %s: no prefill worker can take a prompt, decode workers compute it themselves (%s: %s)",
                self.workers.name,
                type(failure).__name__,
                failure,
            )

    def _choose(self, body: Mapping[str, Any], pinned: Any, tried: list[WorkerKey]) -> ChosenWorker:
        request = PlacementRequest(
            token_ids=body.get("token_ids") or (),
            pinned_instance_id=pinned,
            excluded=tried,
            # Where all circuits are open the decode workers compute the prompt, if they may.
            healthy_only=not self.is_enforced,
        )
        try:
            return self.workers.choose(request)
        except InvalidArgument as error:
            if pinned is None:  # the direct mode, which chooses nothing
                raise InvalidArgument(NOT_NAMED) from error
            raise

    async def _on(
        self, worker: ChosenWorker, body: Mapping[str, Any], context: Context, stages: Stages
    ) -> Handoff | PrefillAnswer:
        instance = worker.instance
        request = _prefill_request(body, instance.instance_id)
        bootstrap = self._bootstrap(instance.instance_id, body)
        if bootstrap is not None:
            request["bootstrap_info"] = bootstrap
        stream = await worker.open(request, context)
        stages.dispatched()
        if bootstrap is not None:
            # Awaited in aclose(), and by whoever reads the decode's first items.
            task = asyncio.get_running_loop().create_task(self._drain(stream), name=f"prefill {context.id()}")
            self._running.add(task)
            task.add_done_callback(self._drained)
            return Handoff(instance, _decode_request(body, instance.instance_id, bootstrap_info=bootstrap), task)
        reply = await _read(stream, context)
        stages.arrived(failed=True)  # what was awaited is only the first half: the answer is still to come
        if reply.reason != LENGTH:
            return PrefillAnswer(instance, reply.items)
        if reply.params is None and context.is_stopped():
            return PrefillAnswer(instance, reply.items)  # it was done before it heard of that, and let the blocks go
        if reply.params is None:
            raise Unknown("No disaggregated params in prefill response")
        return Handoff(instance, _decode_request(body, instance.instance_id, **reply.handed_over()))

    async def _drain(self, stream: ResponseStream) -> None:
        try:
            while await stream.next_batch():
                pass
        finally:
            stream.close()

    def _drained(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.info("%s failed: %s: %s", task.get_name(), type(error).__name__, error)

    def _bootstrap(self, instance_id: int, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """Where the two workers of this request meet; None where this worker advertises no such place."""
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
    """The workers that continue: a `WorkerPool`."""

    def choose(self, request: PlacementRequest) -> ChosenWorker: ...


async def _hand_over(handoff: Handoff, workers: Decoders, context: Context) -> None:
    stops = handoff.body.get("stop_conditions") or {}
    body = {**handoff.body, "stop_conditions": {**stops, "max_tokens": 1}}
    own = context.detached(context.id())  # a worker does not even begin a request that is cancelled already
    try:
        async with asyncio.timeout(HAND_OVER_SECONDS):
            stream = await workers.choose(PlacementRequest()).open(body, own)
            try:
                while await stream.next_batch():
                    pass
            finally:
                stream.close()
    except (DynamoException, TimeoutError) as error:
        logger.info(
            "request %s: its KV blocks were not fetched, and expire (%s: %s)", context.id(), type(error).__name__, error
        )


def may_go_without(error: DynamoException) -> bool:
    """Whether a failed prefill may be made up for by decoding alone: the workers or the way to them failed, not the request.

    Overload is no such failure: prompts that prefill workers cannot take would only drown the decode workers as well.
    """
    return rule_of(error).retryable and not isinstance(error, Overloaded)


class _Reply:
    """What a prefill worker said."""

    __slots__ = ("details", "items", "link", "params", "reason")

    def __init__(self) -> None:
        self.items: list[StreamItem] = []
        self.reason: str | None = None
        self.params: Any = None
        self.details: Any = None  # usage.prompt_tokens_details
        self.link: Any = None  # of the prefill's span

    def add(self, item: StreamItem) -> None:
        self.items.append(item)
        reason, extra = item.finish_reason, item.extra or {}
        if item.index < 0:  # from a bare endpoint handler
            if extra.get("event") == "error":
                raise revive(extra.get("error") or {"message": "; ".join(extra.get("comment") or ["unknown error"])})
            extra = extra.get("data") or {}
            if not isinstance(extra, dict):
                raise Unknown(f"the prefill worker sent {type(extra).__name__} where a chunk was expected")
            reason = extra.get("finish_reason")
        if (params := extra.get("disaggregated_params")) is not None:
            self.params = params
        usage = extra.get("completion_usage")
        if isinstance(usage, dict) and (details := usage.get("prompt_tokens_details")) is not None:
            self.details = details
        self.link = extra.get("worker_trace_link") or self.link
        if reason is not None:
            try:
                self.reason = normalise(reason)
            except (EngineFailed, TypeError) as error:
                raise Unknown(str(error)) from error

    def handed_over(self) -> dict[str, Any]:
        """The members of the decode request that this makes."""
        params = self.params
        members: dict[str, Any] = {} if self.link is None else {"migration_link": self.link}
        if isinstance(params, dict) and _is_bootstrap(params):
            names = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "handoff_id")
            return {**members, "bootstrap_info": {name: params[name] for name in names if name in params}}
        result = {"disaggregated_params": params}
        if self.details is not None:
            result["prompt_tokens_details"] = self.details
        return {**members, "prefill_result": result}


async def _read(stream: ResponseStream, context: Context) -> _Reply:
    reply = _Reply()
    try:
        while reply.reason is None:
            items = await stream.next_batch()
            if not items:
                if context.is_stopped():
                    return reply
                raise StreamIncomplete("the prefill worker ended the stream without a finish reason")
            for item in items:
                reply.add(item)
        stream.finish()
    finally:
        stream.close()
    return reply


def _prefill_request(body: Mapping[str, Any], instance_id: int) -> dict[str, Any]:
    routing = {**(body.get("routing") or {}), "prefill_worker_id": instance_id}
    routing.pop("dp_rank", None)  # the decode worker's
    if (rank := routing.get("prefill_dp_rank")) is not None:
        routing["dp_rank"] = rank
    stops = {**(body.get("stop_conditions") or {}), "max_tokens": 1}
    return {**body, "stop_conditions": stops, "routing": routing}


def _decode_request(body: Mapping[str, Any], instance_id: int, **members: Any) -> dict[str, Any]:
    routing = {**(body.get("routing") or {}), "prefill_worker_id": instance_id}
    override = {**(body.get("router_config_override") or {}), **_DECODE_OVERRIDES}
    return {**body, "routing": routing, "router_config_override": override, **members}


def _is_bootstrap(params: Mapping[str, Any]) -> bool:
    host, port, room = (params.get(f"bootstrap_{name}") for name in ("host", "port", "room"))
    return (
        isinstance(host, str)
        and isinstance(port, int)
        and 0 <= port <= MAX_PORT
        and isinstance(room, int)
        and 0 <= room < 2**64
    )
