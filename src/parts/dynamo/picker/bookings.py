"""What is held for a request that a gateway has sent to its worker: its load, its place and its session, until its answer ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, cast

from dynamo.errors import DynamoException
from dynamo.frontend.admission.model import AdmissionSlot
from dynamo.picker.prefill import PrefillWorker
from dynamo.placement import Placement
from dynamo.protocol.worker_request import WorkerRequest
from dynamo.router.kv.placement import KvPlacement
from dynamo.router.workers.pool import ChosenWorker
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import Instance, ResponseStream


class AnswerElsewhere:
    """An answer that passes through the gateway and not through this process, as what keeps the accounts sees a stream.

    Only what a booking needs of a `ResponseStream` is here: nothing reads the answer.
    """

    def __init__(self) -> None:
        self.tokens_taken = 0
        self._first: list[Callable[[DynamoException | None], None]] = []
        self._released: list[Callable[[], None]] = []

    def book(
        self, *, first: Callable[[DynamoException | None], None] | None, released: Callable[[], None] | None
    ) -> None:
        """Call `first` with the first output, and `released` at the end. See `ResponseStream.book`."""
        if first is not None:
            self._first.append(first)
        if released is not None:
            self._released.append(released)

    def begin(self) -> None:
        """Take the first output. Later calls do nothing."""
        calls, self._first = self._first, []
        for call in calls:
            call(None)

    def close(self) -> None:
        """Take the end. Idempotent."""
        calls, self._released = self._released, []
        for call in calls:
            call()


class _Gateway:
    """Stands where a client of the request plane stands: the gateway sends the request."""

    async def open(self, instance: Instance, body: object, context: Context) -> ResponseStream:
        """Return the answer as the accounts see it."""
        return cast("ResponseStream", AnswerElsewhere())


class _Opened(NamedTuple):
    placement: Placement
    instance: Instance
    client: _Gateway


class RequestHold:
    """What one request holds. Close it on every path."""

    def __init__(self) -> None:
        self._answer: AnswerElsewhere | None = None
        self._prompt: AnswerElsewhere | None = None  # of the prefill worker, while it computes the prompt
        self._slot: AdmissionSlot | None = None
        self._releases: list[Callable[[], None]] = []

    def add_slot(self, slot: AdmissionSlot) -> None:
        """Hold a place of the model."""
        self._slot = slot
        self._releases.append(slot.leave)

    def add(self, release: Callable[[], None]) -> None:
        """Call `release` at the end."""
        self._releases.append(release)

    async def book(self, worker: ChosenWorker, body: WorkerRequest, context: Context) -> None:
        """Count the request for its worker, and for no other from now on. Only the kv mode keeps such an account."""
        if worker.kv is None:
            return
        former, began = self._answer, self._answer is not None and not self._answer._first
        self._answer = await _booked(worker.kv, worker, body, context)
        if former is not None:
            former.close()
        if began:
            self._answer.begin()

    async def book_prefill(self, worker: PrefillWorker, body: WorkerRequest, context: Context) -> None:
        """Count the prompt for the worker that computes it, until the first output."""
        if worker.kv is not None:
            self._prompt = await _booked(worker.kv, worker, body, context)

    def first_output(self, now: float) -> None:
        """Take the first output of the worker: the prompt is computed. Later calls do nothing."""
        if self._slot is not None:
            self._slot.begun(now)
        self._end_prefill()
        if self._answer is not None:
            self._answer.begin()

    def add_tokens(self, tokens: int) -> None:
        """Count output."""
        if self._answer is not None:
            self._answer.tokens_taken += tokens

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self._end_prefill()
        if self._answer is not None:
            self._answer.close()
        try:
            while self._releases:
                self._releases.pop()()
        finally:
            if self._releases:  # one has failed: the others follow
                self.close()

    def _end_prefill(self) -> None:
        prompt, self._prompt = self._prompt, None
        if prompt is not None:
            prompt.begin()
            prompt.close()


_GATEWAY: Final = _Gateway()


async def _booked(
    kv: KvPlacement, worker: ChosenWorker | PrefillWorker, body: WorkerRequest, context: Context
) -> AnswerElsewhere:
    opened = _Opened(worker.placement, worker.instance, _GATEWAY)
    return cast("AnswerElsewhere", await kv.open(opened, body, context))
