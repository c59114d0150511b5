"""From an HTTP request to the address of its worker, by the frontend's own reading, preparing and choosing.

Nothing is decided here: the models, their workers, the index of what these hold and the policy are those of a `Frontend` that has
no listener. What is new is the way from a worker to an address, and that its answer passes elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from msgspec import Struct

from dynamo.errors import DynamoException, Overloaded, WorkerUnavailable
from dynamo.frontend.admission.model import urgency_of
from dynamo.frontend.admission.process import NotReady
from dynamo.frontend.apis.chat import ChatApi
from dynamo.frontend.apis.completions import CompletionApi
from dynamo.frontend.apis.messages import MessagesApi
from dynamo.frontend.apis.responses import ResponsesApi
from dynamo.frontend.app import Frontend
from dynamo.frontend.base.stage_timer import StageTimer
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.pipeline.api import GenerationApi
from dynamo.frontend.pipeline.exchange import Arrival
from dynamo.frontend.pipeline.failures import rejection_of
from dynamo.frontend.pipeline.plan import Plan
from dynamo.frontend.pipeline.reading import CallReader
from dynamo.frontend.pipeline.text_generation import TextPlan
from dynamo.picker.addresses import Addresses
from dynamo.picker.bookings import RequestHold
from dynamo.picker.metrics import PickerMetrics
from dynamo.picker.prefill import choose_prefill
from dynamo.placement import Candidate, PlacementRequest
from dynamo.protocol.openai.errors import RequestRejected, not_built
from dynamo.protocol.worker_request import WorkerRequest
from dynamo.router.dispatch.course import Choose
from dynamo.router.dispatch.failover import AnswerSoFar, DispatchRequest, Failover
from dynamo.router.dispatch.stages import PrefillStage
from dynamo.router.workers.pool import ChosenWorker, ModelPool
from dynamo.runtime.base.identifiers import random_uuid
from dynamo.runtime.calls.context import Context

logger = logging.getLogger(__name__)

SHED: Final = 429
"""The status of every "full" answer: 529 is not one of those that Envoy can send."""


class Refusal(Exception):
    """The request gets this answer in place of a worker."""

    def __init__(self, status: int, body: bytes, headers: Mapping[str, str], why: str) -> None:
        super().__init__(why)
        self.status, self.body, self.headers = status, body, headers


class Request(Struct, frozen=True):
    """An HTTP request as the gateway shows it."""

    method: str
    path: str  # without its query
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes | None  # None: it has none, or the gateway does not send it
    allowed: frozenset[str] | None = None  # the addresses to choose from; None: all


class Destination(Struct, frozen=True):
    """Where a request goes."""

    addresses: Sequence[str]  # the worker's first; the others are for retries
    headers: Sequence[tuple[str, str]] = ()  # for the worker's pod


class _Booked(Struct, frozen=True):
    """What is needed to count a request for another worker than the one that was chosen."""

    model: ServedModel
    body: WorkerRequest
    failover: Failover


class _Unreachable(NamedTuple):
    """The workers of a pool that a gateway cannot reach, for as long as its candidates and the addresses stay as they are."""

    candidates: Sequence[Candidate]
    changes: int
    found: frozenset[tuple[str, int]]


class PickedWorker:
    """The choice for one HTTP request, and what is held for it. Close it on every path."""

    def __init__(self, picker: Picker, choice: Destination, hold: RequestHold, booked: _Booked | None = None) -> None:
        self._picker, self.choice, self.hold, self._booked = picker, choice, hold, booked

    async def served_by(self, address: str) -> None:
        """Move the account to the worker that served, where a retry or the gateway's own policy took another one."""
        booked = self._booked
        if booked is None or address == self.choice.addresses[0]:
            return
        instance_id = self._picker.instance_at(booked.model, address)
        if instance_id is None:
            logger.warning("%s served a request, and no worker of model %s is there", address, booked.model.name)
            return
        request = PlacementRequest(
            booked.failover.request.prompt, pinned_instance_id=instance_id, kv=booked.failover.request.kv
        )
        try:
            worker = booked.model.choose(request)
        except DynamoException as error:
            logger.warning("the account of a request stays at the worker that was chosen: %s", error)
            return
        await self.hold.book(worker, booked.body, booked.failover.context)
        self._picker.metrics.moved.inc()

    def close(self) -> None:
        """Give back what is held. Idempotent."""
        self.hold.close()


class Picker:
    """Chooses workers for the requests of a gateway, over the models of a frontend."""

    def __init__(self, frontend: Frontend, addresses: Addresses, *, fallbacks: int = 0, seconds: float = 10.0) -> None:
        """`fallbacks`: how many more workers a choice names. `seconds`: how long a choice may take."""
        self._frontend, self._addresses = frontend, addresses
        self._fallbacks, self._seconds = fallbacks, seconds
        self._unreachable = WeakKeyDictionary[ModelPool, _Unreachable]()
        settings, pipeline = frontend.settings, frontend.pipeline
        offload = pipeline.preprocessor.offload
        apis: dict[str, GenerationApi[Any]] = {
            settings.paths["chat"]: ChatApi(),
            settings.paths["completions"]: CompletionApi(),
            settings.paths["responses"]: ResponsesApi(None, offload),
            settings.paths["messages"]: MessagesApi(),
        }
        self.metrics = PickerMetrics(frontend.kernel.runtime.metrics)
        self._calls = {path: (api, CallReader(api, settings, pipeline.models, offload)) for path, api in apis.items()}

    @property
    def body_limit_bytes(self) -> int:
        """How long a body may be."""
        return self._frontend.settings.limits.body_limit_bytes

    @property
    def is_ready(self) -> bool:
        """Whether the store answers, and a model has a worker."""
        models = self._frontend.models
        if self._addresses.trouble is not None:
            return False
        return models.store_trouble is None and any(each.is_reachable for each in models.served())

    def instance_at(self, pool: ModelPool, address: str) -> int | None:
        """Return the worker of a pool at an address; None: there is none."""
        for candidate in pool.candidates():
            if self._address_in(pool, candidate.instance_id) == address:
                return candidate.instance_id
        return None

    async def choose(self, request: Request) -> PickedWorker:
        """Choose a worker, and count the request for it. Raises Refusal."""
        began = time.perf_counter()  # the time of the loop is of whole milliseconds
        try:
            return await self._choose_in_time(request)
        except Refusal as refusal:
            self.metrics.refused.labels(str(refusal.status)).inc()
            raise
        finally:
            self.metrics.choice.observe(time.perf_counter() - began)

    async def _choose_in_time(self, request: Request) -> PickedWorker:
        call = self._calls.get(request.path) if request.method == "POST" and request.body is not None else None
        hold = RequestHold()
        try:
            async with asyncio.timeout(self._seconds):
                if call is None:
                    return PickedWorker(self, Destination([self._any(request)]), hold)
                return await self._choose(*call, request, hold)
        except TimeoutError as error:
            hold.close()
            late = RequestRejected(503, f"no worker was chosen within {self._seconds:g} s", retry_after_seconds=1)
            raise _refusal(late, call) from error
        except (DynamoException, NotReady, RequestRejected) as error:
            hold.close()
            raise _refusal(rejection_of(error, overload_status=SHED), call) from error
        except BaseException:
            hold.close()
            raise

    async def _choose(
        self, api: GenerationApi[Any], reader: CallReader, request: Request, hold: RequestHold
    ) -> PickedWorker:
        frontend, now = self._frontend, asyncio.get_running_loop().time()
        pairs = request.headers
        arrival = Arrival(request.body or b"", now, dict(reversed(pairs)), pairs, path=request.path)
        resolved = await reader.read(arrival)
        read, model, timer = resolved.request, resolved.model, StageTimer()
        media = getattr(read, "media", None)
        if media is not None:
            hold.add(media.end)
        hold.add_slot(model.admission.enter(urgency_of(read.nvext), now))
        plan, _ = await api.prepare(frontend.pipeline.preprocessor, read, resolved.effects, model, timer)
        if any(not isinstance(stage, PrefillStage) for stage in model.dispatcher.stages):
            raise not_built(f"Validation: the picker does not place requests of '{model.name}', whose media other "
                            "workers encode: send them to a frontend", "model")  # fmt: skip
        body, prompt = _first_body(plan)
        dispatch = DispatchRequest(
            body, prompt, record=plan.tally(), timer=timer, limits=plan.limits, pinned_instance_id=plan.pinned_instance_id,
            answer=AnswerSoFar(model.takes_text),
        )  # fmt: skip
        context = Context(random_uuid())
        if resolved.effects.metadata:
            context.metadata = resolved.effects.metadata
        hold.add(context.kill)
        failover = Failover(model.dispatcher, dispatch, context)
        hold.add(lambda: None if failover.session is None else failover.session.release())
        prefill = await choose_prefill(failover) if failover.stages else None
        worker, address = await self._answering(failover, request.allowed)
        if prefill is not None:
            await hold.book_prefill(prefill, body, context)
        await hold.book(worker, failover.body, context)
        if failover.session is not None:
            failover.session.sent(worker.instance.instance_id, worker.placement.dp_rank)
        addresses = [address]
        if self._fallbacks and dispatch.pinned_instance_id is None:
            addresses += self._others(failover, worker, request.allowed)
        # A retry carries the headers to another pod, which must not send the request back to the worker that was lost.
        for_pod = self._addresses.headers_for(worker) if len(addresses) == 1 else []
        if prefill is not None:
            for_pod += self._addresses.headers_of_prefill(prefill)
        return PickedWorker(self, Destination(addresses, for_pod), hold, _Booked(model, failover.body, failover))

    async def _answering(self, failover: Failover, allowed: frozenset[str] | None) -> tuple[ChosenWorker, str]:
        """Choose the worker that answers. Raises WorkerUnavailable, and Overloaded where it is only that all are full."""
        pool, given = failover.pool, failover.given
        excluded = self._excluded(pool, allowed)
        if given is not None and given.worker is not None and given.worker.key in excluded:
            failover.given = given._replace(worker=None)
        try:
            await failover.choose(Choose(excluded))
        except WorkerUnavailable as error:
            if self._are_full(pool, allowed):
                raise Overloaded(f"All workers of {pool.name} have too many requests waiting") from error
            raise
        worker = failover.worker
        address = None if worker is None else self._addresses.of(worker.instance)
        if worker is None or address is None or (allowed is not None and address not in allowed):
            raise WorkerUnavailable(f"No workers available for {pool.name}")
        return worker, address

    def _are_full(self, pool: ModelPool, allowed: frozenset[str] | None) -> bool:
        """Return whether a worker is there that is only left out because it is full."""
        return any(
            self._addresses.is_full(candidate.instance_id)
            and (allowed is None or self._address_in(pool, candidate.instance_id) in allowed)
            for candidate in pool.candidates()
        )

    def _others(self, failover: Failover, first: ChosenWorker, allowed: frozenset[str] | None) -> list[str]:
        """Return the addresses of the next best workers. Nothing is booked, and no turn is used up."""
        pool, found = failover.pool, list[str]()
        excluded = self._excluded(pool, allowed) | {first.key}
        for _ in range(self._fallbacks):
            try:
                _, placement = pool.preview(failover.placement(excluded))
            except DynamoException:  # no further one may take it
                break
            excluded |= {placement.candidate.key}
            address = self._address_in(pool, placement.candidate.instance_id)
            if address is not None and address not in found and address != self._addresses.of(first.instance):
                found.append(address)
        return found

    def _excluded(self, pool: ModelPool, allowed: frozenset[str] | None) -> frozenset[tuple[str, int]]:
        """Return the workers that a gateway cannot reach or does not allow."""
        candidates, changes = pool.candidates(), self._addresses.changes
        if allowed is None:
            known = self._unreachable.get(pool)
            if known is not None and known.candidates is candidates and known.changes == changes:
                return known.found
        found = set()
        for candidate in candidates:
            address = self._address_in(pool, candidate.instance_id)
            is_allowed = allowed is None or address in allowed
            if address is None or not is_allowed or self._addresses.is_full(candidate.instance_id):
                found.add(candidate.key)
        excluded = frozenset(found)
        if allowed is None:
            self._unreachable[pool] = _Unreachable(candidates, changes, excluded)
        return excluded

    def _address_in(self, pool: ModelPool, instance_id: int) -> str | None:
        return self._addresses.of(pool.instance(instance_id))

    def _any(self, request: Request) -> str:
        """Return the address of any worker: the request names no model, such as one for the list of models."""
        found = {
            address
            for model in self._frontend.models.served()
            for candidate in model.candidates()
            if not (candidate.is_circuit_open or candidate.is_busy)
            and (address := self._address_in(model, candidate.instance_id)) is not None
        }
        if request.allowed is not None:
            found &= request.allowed
        if not found:
            raise WorkerUnavailable("No workers available")
        return self._frontend.kernel.runtime.rng.choice(sorted(found))


def _first_body(plan: Plan) -> tuple[WorkerRequest, Sequence[int]]:
    """Return what the choice is made by: the first prompt of a request."""
    if isinstance(plan, TextPlan):
        body: Any = plan.bodies[0]
        return body, ()
    prompt = plan.prompts[0]
    return plan.fields.for_prompt(prompt), prompt


def _refusal(rejected: RequestRejected, call: tuple[GenerationApi[Any], CallReader] | None) -> Refusal:
    body = rejected.body() if call is None else call[0].dialect.error_body(rejected, "")
    return Refusal(rejected.status, body, rejected.headers(), rejected.message)
