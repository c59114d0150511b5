"""Fallbacks as a part: an ordered chain of models for a name, and the rule of when the next one serves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import ClassVar, Final, TypeVar

from dynamo.errors import DynamoException, InvalidArgument, Overloaded, ResponseTimeout
from dynamo.frontend.admission.model import urgency_of
from dynamo.frontend.base.asgi import HeaderPairs
from dynamo.frontend.base.settings.fallbacks import FallbackSettings, next_models
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.parts.part import Kernel, Part
from dynamo.frontend.pipeline.exchange import ANSWER_HEADERS, Exchange, FallbackStep, PartSlot, Phase
from dynamo.frontend.pipeline.failures import failure_kind
from dynamo.frontend.pipeline.outcome import Answering, OnDemand
from dynamo.frontend.pipeline.plan import Plan, WorkRequest
from dynamo.frontend.pipeline.reading import Resolved
from dynamo.frontend.pipeline.routing_answer import fallback_headers
from dynamo.frontend.pipeline.sink import OpenAnswer
from dynamo.frontend.pipeline.text_generation import TextPlan
from dynamo.protocol.dialect import Dialect
from dynamo.protocol.model_types import ModelType
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.requests import ChatRequest, CompletionRequest, Request, fresh_copy
from dynamo.protocol.vectors.requests import ResultRequest
from dynamo.runtime.base.tasks import cut_when
from dynamo.runtime.observe.metrics import Family

T = TypeVar("T")
Begin = Callable[[Request | ResultRequest], None]

FAMILIES: Final = (
    Family(
        "fallbacks_total", "counter",
        "Requests that another model of the [chain](upstream.md#fallbacks) took over, by the kind of failure; `refused`: the model does not take the request",
        ("model", "fallback", "reason"),
    ),
)  # fmt: skip

REFUSED: Final = "refused"


class Chain:
    """Where one request is in its chain."""

    __slots__ = ("begin", "names", "place", "request", "surface", "until", "work")

    def __init__(self, names: Sequence[str], request: Request, begin: Begin, until: float) -> None:
        """`begin`: see `OnDemand`. `until`: loop time by which there should be a first token."""
        self.names, self.request, self.begin, self.until, self.place = names, request, begin, until, 0
        self.surface = (ModelType.Chat if isinstance(request, ChatRequest) else ModelType.Completions).value
        self.work: WorkRequest | None = None  # of the models that were tried before


CHAIN: Final[PartSlot[Chain]] = PartSlot("place in the chain of fallbacks")


class FallbackPart(Part):
    """The chains of a frontend."""

    name: ClassVar[str] = "fallbacks"
    families = FAMILIES

    def __init__(self, settings: FallbackSettings, kernel: Kernel) -> None:
        """Raises InvalidArgument for settings of which one would have no effect."""
        self._chains = {chain[0]: chain for chain in settings.fallbacks}
        self._kinds, self._seconds = settings.fallback_on, settings.fallback_after_seconds
        for name in self._chains:
            if sum(chain[0] == name for chain in settings.fallbacks) > 1:
                raise InvalidArgument(
                    f"--fallback (DYN_FALLBACK) names {name} twice: write one chain, {name}=OTHER,ANOTHER"
                )
        if self._seconds is not None and "timeout" not in self._kinds:
            raise InvalidArgument(
                "--fallback-after-ms (DYN_FALLBACK_AFTER_MS) needs timeout in --fallback-on (DYN_FALLBACK_ON)"
            )
        self._hooks, self._names = kernel.pipeline.hooks, kernel.pipeline.models.names
        self._load: OnDemand | None = None  # of models that are loaded on demand; None: there are none
        self._taken = kernel.pipeline.metrics.families.of(FAMILIES).counters("fallbacks_total")

    async def start(self) -> None:
        """Serve requests by their chains from now on. What loads models on demand has started before."""
        self._load, self._hooks.on_demand, self._hooks.fallbacks = self._hooks.on_demand, self._first, self

    # -- the course of a request ---------------------------------------------------------------------------------------

    async def _first(self, exchange: Exchange, begin: Begin, request: Request | ResultRequest) -> str:
        """Return the first model of a chain that can be had. See `OnDemand`."""
        name, names = request.model, self._chains.get(request.model)
        if not isinstance(request, ChatRequest | CompletionRequest):
            return name if self._load is None else await self._load(exchange, begin, request)
        until = exchange.now() + (self._seconds or 0.0)
        if names is None:
            name = name if self._load is None else await self._load(exchange, begin, request)
            served = self._names.serving(name)  # under an alias, or as a preset
            if served and (names := self._chains.get(served[0].name)) is not None:
                exchange.keep(CHAIN, Chain(names, request, begin, until))
            return name
        chain = Chain(names, request, begin, until)
        exchange.keep(CHAIN, chain)
        try:
            model = await self._had(chain, exchange)
        except (DynamoException, RequestRejected) as error:
            if (model := await self._next(chain, exchange, failure_kind(error), error)) is None:
                raise
        model = model or await self._next(chain, exchange, "unavailable")
        return name if model is None else model.name

    def began(self, exchange: Exchange, resolved: Resolved) -> None:
        """Let the answer of a request with a chain name the model that serves it."""
        if exchange.of(CHAIN) is None:
            return
        before = exchange.of(ANSWER_HEADERS)

        def headers(dialect: Dialect) -> HeaderPairs:
            # The headers of a stream that waits for long are sent before it is known which model serves.
            own = fallback_headers(exchange.fallbacks) if exchange.phase >= Phase.STREAMING else ()
            return (*(() if before is None else before(dialect)), *own)

        exchange.keep(ANSWER_HEADERS, headers)

    def planned(self, exchange: Exchange, resolved: Resolved, plan: Plan) -> None:
        """Write the name of the model that serves into the bodies for a model that takes text."""
        if isinstance(plan, TextPlan) and exchange.fallbacks:
            for body in plan.bodies:
                body["model"] = resolved.model.name

    async def admitted(self, exchange: Exchange, resolved: Resolved, answer: Answering) -> Answering | None:
        chain, model = exchange.of(CHAIN), resolved.model
        while chain is not None:
            try:
                _enter(exchange, chain.request, model)
                return partial(self._answer, chain, model, answer)
            except Overloaded as error:
                if (found := await self._next(chain, exchange, "overloaded", error)) is None:
                    raise
                model = found
        return None

    async def _answer(
        self,
        chain: Chain,
        model: ServedModel,
        answer: Answering,
        exchange: Exchange,
        resolved: Resolved,
        opened: OpenAnswer,
    ) -> None:
        """Call `answer` for the models of a chain, one after the other, until one of them has answered."""
        failed: Exception | None = None
        try:
            while True:
                attempt = Resolved(fresh_copy(chain.request), model, resolved.effects)
                try:
                    if failed is not None:
                        _enter(exchange, chain.request, model)
                    has_begun = partial(_has_begun, exchange, opened, chain.work)
                    await self._in_time(chain, exchange, answer(exchange, attempt, opened), has_begun)
                    return
                except (DynamoException, RequestRejected) as error:
                    is_sent = opened.stream is not None and exchange.phase >= Phase.STREAMING
                    if is_sent or exchange.is_over or exchange.context.is_stopped():
                        raise
                    # Of a further model that does not take the request it does not count: the first one may take it.
                    is_refused = failed is not None and isinstance(error, RequestRejected)
                    failed = failed if is_refused and failed is not None else error
                    found = await self._next(chain, exchange, failure_kind(failed), error, is_refused=is_refused)
                    if found is None and not is_refused:
                        raise
                if found is None:
                    raise failed
                model = found
        finally:
            failed = None  # its traceback has this frame

    # -- the next model ------------------------------------------------------------------------------------------------

    def _further(self, chain: Chain, exchange: Exchange, kind: str | None) -> list[tuple[int, str]]:
        """Return the models after that of a failure which may serve, with their places in the chain."""
        caller, names = exchange.identity, next_models(chain.names, chain.place, kind, self._kinds)
        found = enumerate(names, chain.place + 1)
        return [(place, name) for place, name in found if caller is None or caller.allows_model(name)]

    async def _had(self, chain: Chain, exchange: Exchange) -> ServedModel | None:
        """Return the model at the place of a chain, loaded first where that is to be done; None: it is not there.

        Raises what loading it failed with.
        """
        name = chain.names[chain.place]
        if self._load is not None:
            named = fresh_copy(chain.request, name) if chain.place else chain.request
            name = await self._in_time(chain, exchange, self._load(exchange, chain.begin, named), bool)
        model = self._names.lookup(name)
        return model if model is not None and model.surface_bits & chain.surface else None

    async def _next(
        self,
        chain: Chain,
        exchange: Exchange,
        kind: str | None,
        error: Exception | None = None,
        *,
        is_refused: bool = False,
    ) -> ServedModel | None:
        """Move on in a chain, to the next model that can be had; None: there is none.

        `kind`: of the failure that counts. `error`: why the last model does not serve; None: it is not there.
        """
        failed, at, reason = chain.names[chain.place], exchange.now(), REFUSED if is_refused else str(kind)
        for place, name in self._further(chain, exchange, kind):
            chain.place, chain.until = place, exchange.now() + (self._seconds or 0.0)
            try:
                model = await self._had(chain, exchange)
            except (DynamoException, RequestRejected):  # it cannot be loaded now, and the one after it may be there
                continue
            if exchange.context.is_stopped():
                return None
            if model is not None:
                why, work, before = "" if error is None else type(error).__name__, exchange.work, chain.work
                tally, chain.work = None if work is None or work is before else work.tally, work
                had = ((), 0) if tally is None else (tally.instance_ids, tally.completion_tokens)
                step = FallbackStep(failed, name, reason, why, at, *had)
                exchange.early_end.fallbacks = (*exchange.fallbacks, step)
                exchange.timer.again()
                self._taken.labels(chain.names[0], name, reason).inc()
                return model
        return None

    async def _in_time(self, chain: Chain, exchange: Exchange, work: Awaitable[T], has_begun: Callable[[], bool]) -> T:
        """Do some work, and raise ResponseTimeout where it has not begun in time while another model could serve."""
        seconds = self._seconds
        if seconds is None:
            return await work

        def due() -> float | None:
            if has_begun():
                return None
            return 0.0 if any(map(self._is_there, self._further(chain, exchange, "timeout"))) else seconds

        try:
            return await cut_when(work, chain.until, due)
        except TimeoutError:
            raise ResponseTimeout(f"no first token within {seconds:g} s") from None

    def _is_there(self, found: tuple[int, str]) -> bool:
        return found[1] in self._names.on_demand or bool(self._names.serving(found[1]))


def _has_begun(exchange: Exchange, opened: OpenAnswer, before: WorkRequest | None) -> bool:
    """Return whether the model that is tried now has begun to answer. `before`: the work of those that were tried earlier."""
    if opened.stream is not None or exchange.is_over:
        return exchange.phase >= Phase.STREAMING
    work = exchange.work
    return work is not None and work is not before and work.tally.completion_tokens > 0


def _enter(exchange: Exchange, request: Request | ResultRequest, model: ServedModel) -> None:
    """Take a place of a model, in exchange for that of the one before. Raises Overloaded."""
    owner = None if exchange.identity is None else exchange.identity.owner
    slot = model.admission.enter(urgency_of(request.nvext), exchange.arrival.at, owner)
    if exchange.slot is not None:
        exchange.slot.leave()
    exchange.slot = slot
