"""One request and its client as one object, and the register of those in flight.

An `Exchange` is made at the door, once the body is complete, and passed alone from there on: what the request brought,
its deadline, its slot, its times, and why it ended early. It knows no HTTP server and no ASGI.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from msgspec import Struct, field

from dynamo.errors import Cancelled, DynamoException, WorkerUnavailable
from dynamo.frontend.admission.model import AdmissionSlot
from dynamo.frontend.base.access import Caller
from dynamo.frontend.base.asgi import ClientGone, HeaderPairs
from dynamo.frontend.base.metrics.requests import RequestMetrics
from dynamo.frontend.base.stage_timer import StageTimer
from dynamo.frontend.pipeline.plan import Tally, WorkRequest
from dynamo.protocol.dialect import Dialect
from dynamo.protocol.request_ids import uuid_in
from dynamo.runtime.calls.context import Context
from dynamo.runtime.observe.tracing import TraceContext

T = TypeVar("T")

_TRACE_HEADERS: Final = (b"traceparent", b"tracestate", b"request-id")


class PartSlot(Generic[T]):
    """A place on every exchange for what one part keeps of it: `exchange.of(SLOT)`."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        """`name`: for people."""
        self.name = name


ANSWER_HEADERS: Final[PartSlot[Callable[[Dialect], HeaderPairs]]] = PartSlot("headers of every answer")
"""Returns further headers at the time at which the answer is sent, in the shape of an API."""


class KeyRevoked(Cancelled):
    """The key of the request was taken away while it ran, and takes its running requests with it."""

    def __init__(self) -> None:
        super().__init__("This API key was revoked")


class RequestAborted(Cancelled):
    """An operator ended the request."""

    def __init__(self, reason: str) -> None:
        """`reason`: the operator's; the client reads it. Empty: none was given."""
        super().__init__("This request was aborted by an operator" + (f": {reason}" if reason else ""))


class FrontendStopping(WorkerUnavailable):
    """The request was cut, as the frontend is stopped and the request did not end in its time."""

    def __init__(self) -> None:
        super().__init__("the frontend is stopping")


class Phase(enum.IntEnum):
    """How far a request has come. It never goes back; a request that fails goes to `ENDED` from any phase."""

    RECEIVED = 0  # its body is complete
    ADMITTED = 1  # it has a slot of its model
    PREPROCESSED = 2  # rendered and tokenised
    DISPATCHED = 3  # handed to a worker
    STREAMING = 4  # its first output has come
    ENDED = 5  # answered in full, or failed: its connection is no longer its concern


_STAGE_PHASES: Final = {
    "preprocess": Phase.ADMITTED,
    "route": Phase.PREPROCESSED,
    "dispatch": Phase.DISPATCHED,
}


class Arrival(Struct):
    """What came in, and when. Nothing changes it but the parser, which lets go of the body."""

    body: bytes  # empty once it was parsed: it is not held for as long as the answer takes
    at: float  # loop time at which the body was complete
    headers: Mapping[bytes, bytes] = field(default_factory=dict)  # by lower-case name; of a repeated one the first
    header_pairs: Sequence[tuple[bytes, bytes]] = ()  # all of them, in order
    client_request_id: str | None = None  # the client's `x-request-id`, if it may be repeated
    request_id_note: str = ""  # for the log, after our own id: the client's id, or what became of it
    client: str | None = None  # the peer's address; None: a caller in this process
    path: str = ""  # of the route
    identity: Caller | None = None  # the key behind it; None: no key is needed
    endpoint: str = ""  # of the API that takes it, as metrics name it
    kept: dict[PartSlot[Any], Any] = field(default_factory=dict)  # what parts keep of it, by their slots


class FallbackStep(Struct, frozen=True):
    """A model that did not serve a request, and the next one of its chain, which was tried then."""

    model: str
    next_model: str
    reason: str  # the kind of failure, as `--fallback-on` names it; "refused": it does not take this request
    error: str  # the class of the error
    at: float  # loop time
    workers: tuple[int, ...] = ()  # that had the request, by instance id
    output_tokens: int = 0  # that it had made, and no client got


def tried_models(steps: Sequence[FallbackStep]) -> str:
    """Return the models that did not serve a request with the reasons, as headers and logs show them: `a=timeout, b=failed`."""
    return ", ".join([f"{step.model}={step.reason}" for step in steps])


class EarlyEnd(Struct, eq=False):
    """What ends a request, or the attempt of one model at it, before its answer."""

    fallbacks: tuple[FallbackStep, ...] = ()  # in order; as many as the chain of its model has further models
    reason: DynamoException | None = None  # why we ended it ourselves
    is_client_gone: bool = False
    task: asyncio.Task[object] | None = None  # that serves it
    was_interrupted: bool = False  # that task was cancelled, so that it answers with the reason at once


class Exchange:
    """One request, from its complete body to the end of its answer."""

    __slots__ = (
        "arrival", "context", "counters", "early_end", "model", "now", "phase", "phase_times", "response_id", "slot",
        "timer", "work",
    )  # fmt: skip

    def __init__(self, id: str, arrival: Arrival, timer: StageTimer, response_id: str | None = None) -> None:
        """`id`: our own id of the request, a UUID, which workers and logs see. `response_id`: the `id` of its answer."""
        self.arrival = arrival
        self.timer = timer
        self.context = Context(id, trace=_trace_of(arrival) if b"traceparent" in arrival.headers else None)
        self.response_id = response_id or id  # with the prefix of its API, as clients and operators see it
        self.model: str | None = None  # for which it counts, whichever serves it; None until it is found
        self.counters: RequestMetrics | None = None  # None until the model is found
        self.slot: AdmissionSlot | None = None
        self.work: WorkRequest | None = None  # None until it is preprocessed
        self.early_end = EarlyEnd()
        self.phase = Phase.RECEIVED
        self.phase_times: list[float | None] = [arrival.at, None, None, None, None, None]
        timer.on_dispatch = self._dispatched
        self.now = asyncio.get_running_loop().time
        """Returns the time of the clock of its phases."""

    def of(self, slot: PartSlot[T]) -> T | None:
        """Return what is kept in a slot; None: nothing is."""
        found: T | None = self.arrival.kept.get(slot)
        return found

    def keep(self, slot: PartSlot[T], value: T) -> None:
        """Keep `value` until the request has ended, in place of what the slot had."""
        self.arrival.kept[slot] = value

    @property
    def tally(self) -> Tally | None:
        """What came of it so far; None until it is preprocessed."""
        return None if self.work is None else self.work.tally

    @property
    def is_client_gone(self) -> bool:
        """Whether its client left before it was answered."""
        return self.early_end.is_client_gone

    @property
    def identity(self) -> Caller | None:
        """The key behind it; None where no key is needed."""
        return self.arrival.identity

    @property
    def fallbacks(self) -> tuple[FallbackStep, ...]:
        """The models that did not serve it, each with the one that was tried next."""
        return self.early_end.fallbacks

    @property
    def served_model(self) -> str | None:
        """The model that serves it, or was tried last; None until that is known."""
        return self.early_end.fallbacks[-1].next_model if self.early_end.fallbacks else self.model

    @property
    def reason(self) -> DynamoException | None:
        """Why we ended it ourselves; None: we did not."""
        return self.early_end.reason

    @property
    def name(self) -> str:
        """What a line of the log calls it: by its own id and by that of its answer, so that either finds the line."""
        id, answer = self.context.id(), self.response_id
        return f"{answer if id in answer else f'{id} ({answer})'}{self.arrival.request_id_note}"

    @property
    def request_id(self) -> str:
        """What the client knows it by: its own `x-request-id`, or else the id of its answer."""
        return self.arrival.client_request_id or self.response_id

    def is_called(self, id: str) -> bool:
        """Return whether `id` is its UUID or the `id` of its answer."""
        return uuid_in(id) == self.context.id() or id == self.response_id

    @property
    def is_over(self) -> bool:
        """Whether it has been answered, so that nothing its connection does concerns it."""
        return self.phase is Phase.ENDED

    def enter(self, phase: Phase, now: float) -> None:
        """Advance the request to `phase`; an earlier phase changes nothing."""
        if phase > self.phase:
            self.phase = phase
            self.phase_times[phase] = now

    def end(self) -> None:
        """Mark the request as ended, and let go of its body. Idempotent."""
        if self.phase is not Phase.ENDED:
            self.phase = Phase.ENDED
            self.phase_times[Phase.ENDED] = self.now()
            # The timer calls this exchange back: a circle, which would keep all of the request until the collector comes.
            # A frontend's collector comes seldom, and a refused body may have many megabytes.
            self.timer.on_dispatch = None
            self.arrival.body = b""
            self.early_end.task = None  # which has a frame with this exchange

    def check_end(self) -> None:
        """Raise what ended the request early. Call it once, before the last bytes are sent: they end the request."""
        early = self.early_end
        if early.is_client_gone:
            raise ClientGone
        if early.reason is not None:
            raise early.reason
        self.end()

    def end_with(self, reason: DynamoException) -> None:
        """Kill the work; the client reads `reason`. Does nothing once the request is over or has another reason."""
        if not self.is_over and self.reason is None and not self.is_client_gone:
            self.early_end.reason = reason
            self.context.kill()

    def abort(self, reason: RequestAborted) -> None:
        """Do as `end_with`, and wait for no work that the frontend does itself, such as a long prompt that is tokenised."""
        if self.is_over or self.reason is not None or self.is_client_gone:
            return
        self.end_with(reason)
        if self.phase < Phase.PREPROCESSED and self.early_end.task is not None:
            self.early_end.was_interrupted = True
            self.early_end.task.cancel()

    def take_interruption(self) -> DynamoException | None:
        """Return the reason of `abort` where the cancellation of this task is that of `abort`, which is over then; else None."""
        if not self.early_end.was_interrupted or self.early_end.task is None or self.early_end.task.uncancel() > 0:
            return None
        return self.reason

    def client_left(self) -> None:
        """Kill the work, because its answer has no reader. Does nothing once the request is over."""
        if not self.is_over:
            self.early_end.is_client_gone = True
            self.context.kill()

    def _dispatched(self) -> None:
        if self.phase < Phase.DISPATCHED:
            self.phase = Phase.DISPATCHED
            self.phase_times[Phase.DISPATCHED] = self.now()


class ExchangeRegister:
    """The requests in flight, in order of arrival. Bounded by the admission: only admitted requests are added."""

    def __init__(self) -> None:
        self._exchanges: dict[Exchange, None] = {}

    def __len__(self) -> int:
        return len(self._exchanges)

    def __iter__(self) -> Iterator[Exchange]:
        return iter(list(self._exchanges))

    def count_in_stage(self, stage: str) -> int:
        """Return how many requests are in a stage: "preprocess", "route" or "dispatch". May be called in any thread."""
        phase = _STAGE_PHASES[stage]
        return sum(exchange.phase is phase for exchange in self)

    def add(self, exchange: Exchange) -> None:
        self._exchanges[exchange] = None

    def remove(self, exchange: Exchange) -> None:
        """Forget a request that is over; idempotent."""
        self._exchanges.pop(exchange, None)

    def end_revoked(self, is_gone: Callable[[Caller], bool]) -> int:
        """End every request whose key `is_gone`; return how many there were."""
        found = [exchange for exchange in self if exchange.identity is not None and is_gone(exchange.identity)]
        for exchange in found:
            exchange.end_with(KeyRevoked())
        return len(found)

    def end_all(self, reason: DynamoException) -> int:
        """End every request with `reason` (a status, or an error event); return how many there were."""
        exchanges = list(self)
        for exchange in exchanges:
            exchange.end_with(reason)
        return len(exchanges)


def _trace_of(arrival: Arrival) -> TraceContext | None:
    headers = arrival.headers
    found = {name.decode(): headers[name].decode("latin-1") for name in _TRACE_HEADERS if name in headers}
    if arrival.client_request_id is not None:
        found["x-request-id"] = arrival.client_request_id
    return TraceContext.from_headers(found)
