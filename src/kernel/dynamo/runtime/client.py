"""The caller's side of one endpoint: its instances, a way to each, and the stream of an answer."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Container, Mapping
from contextlib import aclosing
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from dynamo.errors import (
    CannotConnect,
    DynamoException,
    InvalidArgument,
    RouterQueueLimitExceeded,
    SelectionServiceError,
    Unknown,
    WorkerUnavailable,
    inhibits,
    is_answer,
    revive,
    rule_of,
)
from dynamo.placement import Booking, Candidate, Placement, PlacementRequest, Policy, RouterMode, place, policy_for
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.instances import InstanceChanges, InstanceSet, decode_instance
from dynamo.runtime.calls.request_plane.base import OBJECT_INDEX, Instance, ResponseStream, StreamItem
from dynamo.runtime.discovery.base import INSTANCES, MODEL_CARDS, Change, Put
from dynamo.runtime.discovery.follow import follow
from dynamo.runtime.observe.tracing import NO_SPAN, CallSpan, RequestSpan

if TYPE_CHECKING:
    from dynamo.runtime.endpoint import Endpoint

logger = logging.getLogger(__name__)

WATCH_RETRY_SECONDS: Final = 1.0
SLICE: Final = 32  # records that are taken over in one go; each costs up to 30 us among a thousand

_ANY: Final = PlacementRequest()


class Client:
    """Calls one endpoint. Made by `Endpoint.client`; closed with its runtime, or before by `close`."""

    def __init__(self, endpoint: Endpoint, mode: RouterMode | None = None) -> None:
        """`mode` None: like the native client, which chooses at random by default."""
        self._endpoint = endpoint
        self._mode = mode or RouterMode.RANDOM
        settings = endpoint.runtime.settings
        self._set = InstanceSet(endpoint.path, inhibit_seconds=settings.inhibit_seconds)
        self._policies: dict[RouterMode, Policy] = {}  # made on first use: most clients need one
        self._changes = InstanceChanges()
        self._work = Background()
        self._watching: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None  # done once the instances there are now are known
        self._closed = False

    async def start(self) -> None:
        """Follow the store; returns once the instances there are now are known. Idempotent; retries what failed."""
        if self._closed:
            raise CannotConnect(f"the client of {self._endpoint.path} is closed")
        if self._ready is None or self._watching is None or self._watching.done():
            self._ready = asyncio.get_running_loop().create_future()
            self._ready.add_done_callback(asyncio.Future.exception)  # retrieved, also when no caller waits any more
            watch = partial(self._watch, self._ready, set[str]())
            self._watching = self._work.keep(watch, f"watch {self._endpoint.path}", WATCH_RETRY_SECONDS)
        await asyncio.shield(self._ready)  # of all concurrent callers

    async def close(self) -> None:
        """Stop following the store. Streams go on; idempotent."""
        self._closed = True
        self._endpoint.runtime.forget_client(self)
        await self._work.close()
        self._changes.wake()

    # -- instances -----------------------------------------------------------------------------------------------

    def instance_ids(self) -> list[int]:
        """Return the ids that discovery lists now, sorted."""
        return [instance.instance_id for instance in self._set.discovered]

    def instances(self) -> list[InstanceView]:
        """Return the instances that discovery lists now, by id."""
        return [InstanceView(instance) for instance in self._set.discovered]

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back whenever the instances have changed; returns a function that takes it back."""
        return self._changes.listen(callback)

    async def wait_for_instances(self) -> list[int]:
        """Wait until there is at least one instance; their ids."""
        await self.start()
        while not (found := self.instance_ids()):
            if self._closed:
                raise CannotConnect(f"the client of {self._endpoint.path} was closed while it waited for instances")
            await self._changes.next()
        return found

    async def wait_for_instance_by_runtime_data(self, key: str, value: object, timeout_s: float | None = None) -> int:
        """Wait for the one instance whose model card has `runtime_data[key] == value`; return its id.

        Raises TimeoutError also where several have it: a caller that needs that one must not get any of them.
        """
        return (await _with_runtime_data(self._endpoint, {key: value}, timeout_s, range(1, 2)))[0]

    async def wait_for_instances_by_runtime_data(
        self, key: str, value: object, min_count: int, timeout_s: float | None = None
    ) -> list[int]:
        """Wait for at least `min_count` instances with `runtime_data[key] == value`; return their ids, sorted.
        Raises TimeoutError.
        """
        if min_count < 1:
            raise ValueError("min_count must be positive")
        return await _with_runtime_data(self._endpoint, {key: value}, timeout_s, range(min_count, sys.maxsize))

    def inhibit(self, instance_id: int) -> None:
        """Leave an instance out for a while: a request to it failed in a way that another might, too."""
        if self._set.inhibit(instance_id, self._now()):
            self._endpoint.runtime.caller_metrics.quarantines.inc()
            logger.warning(
                "quarantined instance %x of %s for %.1f s",
                instance_id,
                self._endpoint.path,
                self._endpoint.runtime.settings.inhibit_seconds,
            )

    def count_quarantined(self) -> int:
        """Count the instances that are excluded, or were and have not answered since."""
        return len(self._set.breaker)

    def circuits(self) -> dict[int, float]:
        """Return when each instance that failed, and has not answered since, gets its next request; by id, loop times."""
        return self._set.breaker.until()

    # -- calls, as the planes see them ---------------------------------------------------------------------------

    def candidates(self, *, members: Container[int] | None = None, busy: Collection[int] = ()) -> list[Candidate]:
        """Return what a choice is made from, by id. `members`: only these ids; `busy`: the ids that are full."""
        return self._set.candidates(asyncio.get_running_loop().time(), members=members, busy=busy)

    def pick(self, context: Context, *, exclude: Collection[int] = (), healthy_only: bool = False) -> Instance:
        """Return the next instance by this client's mode. Raises `WorkerUnavailable` when there is none.

        An instance with an open circuit is chosen only where there is no other, and never with `healthy_only`.
        Open the instance in the same turn of the loop: the load that others see is booked there.
        """
        path = self._endpoint.path
        excluded = [(path, instance_id) for instance_id in exclude]
        request = PlacementRequest(excluded=excluded, healthy_only=healthy_only)
        return self._set.named(self._place(self._mode, request).candidate.instance_id)

    def _place(self, mode: RouterMode, request: PlacementRequest) -> Placement:
        policy = self._policies.get(mode)
        if policy is None:
            policy = self._policies[mode] = policy_for(
                mode,
                rng=self._endpoint.runtime.rng,
                cuda_to_cpu_ratio=self._endpoint.runtime.settings.cuda_to_cpu_ratio,
            )
        now = self._now()
        return place(policy, request, self._set.candidates(now), now, scope=self._set.scope)

    def named(self, instance_id: int) -> Instance:
        """Return one instance by id, in quarantine or not. Raises `WorkerUnavailable` naming the id."""
        return self._set.named(instance_id)

    async def open(self, instance: Instance, body: object, context: Context) -> ResponseStream:
        """Send a request to one instance; close the stream on every path. Errors are those of the request plane."""
        instance_id = instance.instance_id
        booking = self._set.book(instance_id)
        runtime = self._endpoint.runtime
        metrics = runtime.caller_metrics
        if self._set.breaker.open and self._set.breaker.record_request(instance_id, self._now()):
            metrics.probes.inc()
            logger.info("request %s probes instance %x", context.id(), instance_id)
        metrics.inflight_requests.inc()
        call = None if context.current_span() is NO_SPAN else _start_call(self._endpoint.path, instance_id, context)
        began = perf_counter()  # a loop's own clock stands still within a turn
        try:
            stream = await runtime.planes.client(instance).open(instance, body, context)
        except BaseException as error:
            self._release(booking)
            self._on_first_sign(instance_id, error)
            if call is not None:
                _opened(call, context, error)
            raise
        sent = perf_counter()
        metrics.send_seconds.observe(sent - began)

        def first(error: DynamoException | None) -> None:
            if self._set.breaker.open:
                self._on_first_sign(instance_id, error)
            if error is None:
                metrics.roundtrip_ttft_seconds.observe(perf_counter() - sent)

        stream.book(first=first, released=partial(self._release, booking))
        if call is not None:
            _opened(call, context, stream)
        return stream

    def record_failure(self, instance: Instance, error: DynamoException) -> bool:
        """Leave an instance out for a while if `error` is about the connection to it.

        Return True when another record of the same id took the instance's place instead: then the id may be tried again.
        """
        is_lost = inhibits(error)
        if (is_lost or isinstance(error, WorkerUnavailable)) and self._set.use_next_record(instance):
            return True
        if is_lost:
            self.inhibit(instance.instance_id)
        return False

    def _on_first_sign(self, instance_id: int, error: BaseException | None) -> None:
        """Take the first thing that came of a request. An answer closes a circuit, and so does a refusal of the worker."""
        if not self._set.breaker.open or (error is not None and not is_answer(error)):
            return
        if self._set.breaker.record_answer(instance_id):
            logger.info("instance %x of %s answers again", instance_id, self._endpoint.path)

    def _release(self, booking: Booking) -> None:
        if booking.release():
            self._endpoint.runtime.caller_metrics.inflight_requests.dec()

    # -- calls, as users make them -------------------------------------------------------------------------------

    async def generate(self, request: object, annotated: bool = True, context: Context | None = None) -> ClientStream:
        """Call an instance by this client's router mode (random unless one was given) and iterate over its answer."""
        return await self._call(self._mode, request, annotated, context)

    async def random(self, request: object, annotated: bool = True, context: Context | None = None) -> ClientStream:
        """Call an instance by chance."""
        return await self._call(RouterMode.RANDOM, request, annotated, context)

    async def round_robin(
        self, request: object, annotated: bool = True, context: Context | None = None
    ) -> ClientStream:
        """Call the instances in turn."""
        return await self._call(RouterMode.ROUND_ROBIN, request, annotated, context)

    async def device_aware_weighted(
        self, request: object, annotated: bool = True, context: Context | None = None
    ) -> ClientStream:
        """Call an instance by load, counting a GPU as several CPUs."""
        return await self._call(RouterMode.DEVICE_AWARE_WEIGHTED, request, annotated, context)

    async def direct(
        self, request: object, instance_id: int, annotated: bool = True, context: Context | None = None
    ) -> ClientStream:
        """Call one instance. An unknown id is an error naming it."""
        return await self._call(None, request, annotated, context, instance_id)

    async def _call(
        self, mode: RouterMode | None, request: object, annotated: bool, context: Context | None, instance_id: int = 0
    ) -> ClientStream:
        context = context or Context()
        if context.is_stopped():
            return ClientStream(None, context, annotated, _nothing)
        chosen: Instance | None = None
        try:
            await self.start()
            chosen = self._choose(mode, instance_id)
            stream = await self.open(chosen, request, context)
        except DynamoException as error:
            if chosen is not None:
                self.record_failure(chosen, error)
            raise _prefixed(error) from error
        return ClientStream(stream, context, annotated, lambda error: self._on_failure(chosen, error))

    def _choose(self, mode: RouterMode | None, instance_id: int) -> Instance:
        if mode is not None:
            instance_id = self._place(mode, _ANY).candidate.instance_id
        return self._set.named(instance_id)

    def _on_failure(self, instance: Instance, error: DynamoException) -> None:
        self.record_failure(instance, error)

    # -- following the store -------------------------------------------------------------------------------------

    async def _watch(self, ready: asyncio.Future[None], known: set[str]) -> None:
        """Apply what changes until the store is closed. `known`: the keys that an attempt that failed may have applied.

        Before `ready` a failure is that of the callers of `start`, and ends the watch.
        """
        endpoint = self._endpoint
        prefix = f"{INSTANCES}/{endpoint.namespace}/{endpoint.component}/{endpoint.name}"
        try:
            await endpoint.runtime.start()
            following = follow(endpoint.runtime.discovery, prefix, known, raises_first=not ready.done())
            async with aclosing(following) as changes:
                async for batch in changes:
                    for start in range(0, len(batch), SLICE):
                        if start:
                            await asyncio.sleep(0)  # streams go on while hundreds of records come in
                        self._apply(batch[start : start + SLICE])
                    self._changes.notify()
                    if not ready.done():
                        ready.set_result(None)
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)
        except asyncio.CancelledError:
            if not ready.done():
                ready.set_exception(CannotConnect(f"the client of {self._endpoint.path} was closed"))
            raise

    def _apply(self, batch: list[Change]) -> None:
        for change in batch:
            if not isinstance(change, Put):
                self._set.remove(change.key)
                continue
            try:
                instance = decode_instance(change.value)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # also no UTF-8, or nested too deep
                # What was known of this key stays.
                logger.warning("ignored the record of %s, which is not a valid instance: %s", change.key, error)
                continue
            self._set.put(change.key, instance)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


class InstanceView:
    """An instance as users see it."""

    __slots__ = ("component", "device_type", "endpoint", "instance_id", "namespace", "transport")

    def __init__(self, instance: Instance) -> None:
        self.instance_id = instance.instance_id
        self.namespace = instance.namespace
        self.component = instance.component
        self.endpoint = instance.endpoint
        self.transport = TransportView(instance.transport)
        self.device_type = instance.device_type

    def __str__(self) -> str:
        return f"{self.namespace}/{self.component}/{self.endpoint}/{self.instance_id}"

    def __repr__(self) -> str:
        return f"Instance({self})"


class TransportView:
    """How an instance is reached: `kind` is "tcp", "nats_tcp" or "mem"."""

    __slots__ = ("address", "kind")

    def __init__(self, transport: Mapping[str, str]) -> None:
        self.kind, self.address = next(iter(transport.items()), ("", ""))

    def __repr__(self) -> str:
        return f"Transport({self.kind}={self.address})"


class Annotated:
    """One item of an answer with what came with it."""

    __slots__ = ("_envelope",)

    def __init__(self, envelope: Mapping[str, Any]) -> None:
        self._envelope = envelope

    def data(self) -> Any:
        return self._envelope.get("data")

    def event(self) -> str | None:
        return self._envelope.get("event")

    def is_error(self) -> bool:
        """Return whether the handler marked this item as a failure; `comments` hold the causes."""
        return self.event() == "error"

    def comments(self) -> list[str] | None:
        return self._envelope.get("comment")

    def id(self) -> str | None:
        return self._envelope.get("id")

    def __repr__(self) -> str:
        return f"Annotated({dict(self._envelope)!r})"


class AnswerItems(Protocol):
    """What is needed of an answer to be read item by item."""

    async def next_batch(self) -> list[StreamItem]:
        """Return what has arrived; [] at the end."""
        ...

    def close(self) -> None: ...


def _start_call(path: str, instance_id: int, context: Context) -> CallSpan | None:
    """Open the span of a call, which the worker's own continues; None where the request has none that is exported."""
    outer = context.current_span()
    if not isinstance(outer, RequestSpan):
        return None
    call = outer.start_call(context.id(), {"endpoint": path, "worker_id": f"{instance_id:x}"})
    context.attach_span(call)
    return call


def _opened(call: CallSpan, context: Context, outcome: ResponseStream | BaseException) -> None:
    """Let the stream of a call end its span, or end it with why there is none."""
    context.attach_span(call.request_span)
    if isinstance(outcome, BaseException):
        call.failed(outcome)
        call.close()
        return
    stream = outcome

    def first(error: DynamoException | None) -> None:
        if error is None:
            call.add_event("first output")

    def released() -> None:
        if (error := stream.failure) is not None:
            call.failed(error)
        call.close()

    stream.book(first=first, released=released)


class ClientStream(AsyncIterator[Any]):
    """The items of one answer, to be iterated once. One that is dropped half-read kills its request.

    Raises `InvalidArgument` when the handler did, and `ValueError("{Class}: {message}")`, caused by the typed error, for
    every other failure. Once this side stopped the context, an error is the end.
    """

    def __init__(
        self,
        stream: AnswerItems | None,
        context: Context,
        annotated: bool,
        on_failure: Callable[[DynamoException], None],
    ) -> None:
        self._stream = stream
        self._context = context
        self._annotated = annotated
        self._on_failure = on_failure
        self._items: list[StreamItem] = []  # last one first
        self._finalizer: Callable[[], object] | None = None
        if stream is not None:
            self._finalizer = _when_dropped(self, stream)

    def __aiter__(self) -> ClientStream:
        return self

    async def __anext__(self) -> Any:
        if not self._items:
            if self._stream is None:
                raise StopAsyncIteration
            try:
                batch = await self._stream.next_batch()
            except DynamoException as error:
                self._fail(error)
                raise StopAsyncIteration from None
            if not batch:
                await self.aclose()
                raise StopAsyncIteration
            batch.reverse()
            self._items = batch
        envelope = _envelope_of(self._items.pop())
        if envelope.get("event") == "error":
            self._fail(_error_of(envelope))
            raise StopAsyncIteration
        return Annotated(envelope) if self._annotated else envelope.get("data")

    async def aclose(self) -> None:
        """Leave; what has not ended is killed. Idempotent."""
        self._items = []
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None

    def _fail(self, error: DynamoException) -> None:
        """End the stream; raises what the user sees of `error`, unless this side had cancelled the stream."""
        self._items = []
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        if self._context.is_stopped():
            return
        self._on_failure(error)
        if isinstance(error, InvalidArgument) and error.public:
            raise error
        raise ValueError(f"{rule_of(error).wire_class}: {error}") from error


def _when_dropped(owner: object, stream: AnswerItems) -> Callable[[], object]:
    """Close `stream` when `owner` is collected, in whatever thread that happens; returns what calls it off."""
    loop = asyncio.get_running_loop()

    def close() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stream.close)

    finalizer = weakref.finalize(owner, close)
    finalizer.atexit = False
    return finalizer.detach


def _envelope_of(item: StreamItem) -> Mapping[str, object]:
    """Return an object item as it is, a token item as the chunk it was made of."""
    if item.index == OBJECT_INDEX:
        return item.extra or {}
    chunk: dict[str, object] = {"token_ids": list(item.token_ids), "index": item.index}
    if item.finish_reason is not None:
        chunk["finish_reason"] = item.finish_reason
    if item.extra:
        chunk.update(item.extra)
    return {"data": chunk}


def _error_of(envelope: Mapping[str, Any]) -> DynamoException:
    record = envelope.get("error")
    if record is not None:
        return revive(record)
    return Unknown("; ".join(str(comment) for comment in envelope.get("comment") or ()) or "the handler sent an error")


def _prefixed(error: DynamoException) -> Exception:
    """Return the form of a failure before there is a stream: its class's name goes before its message."""
    if isinstance(error, InvalidArgument | RouterQueueLimitExceeded | SelectionServiceError):
        return error
    return type(error)(f"{rule_of(error).wire_class}: {error}")


def _nothing(_error: DynamoException) -> None:
    pass


async def _with_runtime_data(
    endpoint: Endpoint, data: Mapping[str, object], timeout_seconds: float | None, wanted: range
) -> list[int]:
    """Wait until as many instances of an endpoint as `wanted` holds have `data` on their cards; return their ids, sorted."""
    if timeout_seconds is not None and not 0 <= timeout_seconds < math.inf:
        raise ValueError("timeout_s must be a finite non-negative number")
    matching: dict[str, int] = {}
    try:
        prefix = f"{MODEL_CARDS}/{endpoint.namespace}/{endpoint.component}/{endpoint.name}"
        async with asyncio.timeout(timeout_seconds), endpoint.runtime.discovery.watch(prefix) as changes:
            async for batch in changes:
                for change in batch:
                    matching.pop(change.key, None)
                    if isinstance(change, Put):
                        found = _runtime_data(change.value)
                        if found is not None and data.items() <= found[1].items():
                            matching[change.key] = found[0]
                if len(ids := sorted(set(matching.values()))) in wanted:
                    return ids
    except TimeoutError:
        ids = sorted(set(matching.values()))
        needed = "exactly 1" if len(wanted) == 1 else f"at least {wanted.start}"
        raise TimeoutError(
            f"{len(ids)} instance(s) of {endpoint.path} had {data} as runtime_data after {timeout_seconds:g} s, "
            f"{needed} must have it: {ids}"
        ) from None
    raise CannotConnect("the runtime was closed while waiting for instances")


def _runtime_data(record: bytes) -> tuple[int, Mapping[str, object]] | None:
    """Return (instance id, `runtime_data`) of a model record; None for anything else."""
    try:
        match msgspec.json.decode(record):
            case {"instance_id": int(instance_id), "card_json": {"runtime_config": {"runtime_data": dict(data)}}}:
                return instance_id, data
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass  # not a record of ours to complain about: the model watch does
    return None
