"""Holds the requests for models that are not loaded, and orders the command that has the processes to load and unload.

The orders and what became of them are JSON lines over one socket. The command has the state of every process: a frontend
that is started again gets all of it with the first line.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final

import msgspec

from dynamo.errors import Cancelled, Overloaded, WorkerUnavailable
from dynamo.frontend.base.access import Access
from dynamo.frontend.base.asgi import Receive, Scope
from dynamo.frontend.http.json_route import JsonRoute
from dynamo.frontend.http.routes import GuardedRoute
from dynamo.frontend.models.directory import ModelDirectory
from dynamo.frontend.parts.part import Kernel, Part
from dynamo.frontend.parts.residency.metrics import FAMILIES, ResidencyMetrics
from dynamo.frontend.pipeline.exchange import Exchange, PartSlot
from dynamo.frontend.pipeline.outcome import Outcome
from dynamo.protocol.inspector.views import ModelsInMemory, ResidentView
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.requests import ChatRequest, Request
from dynamo.protocol.vectors.requests import ResultRequest
from dynamo.residency.machine import Known, Memory, Residence, Residency, Resident, Verdict
from dynamo.runtime.base.tasks import Background, first_of

Table = Mapping[str, Any]

MAX_WAITING: Final = 4096  # requests; one that waits keeps its body
ACCEPT_SECONDS: Final = 60.0  # from a worker's registration until requests can go to it; it takes a tenth of a second
MAX_LINE_BYTES: Final = 1 << 20
RESIDENCY_PATH: Final = "/residency/v1"


class ModelTicket:
    """One request for a model that is loaded on demand."""

    __slots__ = ("arrived_at", "exchange", "is_running", "name", "turn")

    def __init__(self, name: str, exchange: Exchange, arrived_at: float, *, is_running: bool) -> None:
        self.name, self.exchange, self.arrived_at, self.is_running = name, exchange, arrived_at, is_running
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class ModelTickets:
    """The requests for one model, apart by whether they may run: many run, and few wait."""

    __slots__ = ("running", "waiting")

    def __init__(self) -> None:
        self.running: set[ModelTicket] = set()
        self.waiting: set[ModelTicket] = set()

    def of(self, ticket: ModelTicket) -> set[ModelTicket]:
        """Return the set that a request belongs to."""
        return self.running if ticket.is_running else self.waiting


TICKET: Final = PartSlot[ModelTicket]("residency")


class ResidencyPart(Part):
    """Which models are in memory."""

    name: ClassVar[str] = "residency"
    families = FAMILIES

    def __init__(self, kernel: Kernel, descriptor: int, wait_seconds: float) -> None:
        """`descriptor`: the socket of the command. `wait_seconds`: how long a request waits for its model."""
        self._pipeline = kernel.pipeline
        self._metrics = ResidencyMetrics(kernel.pipeline.metrics.families)
        self._command = CommandLine(descriptor)
        self._wait_seconds = wait_seconds
        self._residency = Residency([])
        self._presets: Mapping[str, Table] = {}
        self._tickets: dict[str, ModelTickets] = {}  # by model; bounded by the admission
        self._timer: asyncio.TimerHandle | None = None
        self._background = Background()

    def routes(self) -> Sequence[GuardedRoute]:
        return [GuardedRoute(RESIDENCY_PATH, ResidencyRoute(self.shown), "GET", access=Access.METRICS)]

    def shown(self) -> Table:
        """Return what is loaded, what is on its way, and what waits, as JSON."""
        residency = self._residency
        models = [
            {"name": model.name, "state": model.state.value, "bytes": model.memory.taken,
             "needed_bytes": model.memory.needed, "pinned": model.is_pinned, "running": model.running,
             "waiting": model.waiting, "failure": model.failure and model.failure.reason}
            for model in residency.models.values()
        ]  # fmt: skip
        presets = {name: preset["model"] for name, preset in self._presets.items()}
        budget, used = residency.budget_bytes, residency.used_bytes
        return {"budget_bytes": budget, "used_bytes": used, "models": models, "presets": presets}

    def in_memory(self, ms: Callable[[float], int]) -> ModelsInMemory:
        """Return the same for the inspector. See `Residents`."""
        presets: dict[str, list[str]] = {}
        for name, preset in self._presets.items():
            presets.setdefault(preset["model"], []).append(name)
        rows = [resident_view(model, presets.get(model.name, []), ms) for model in self._residency.models.values()]
        used = sum(row.taken_bytes or 0 for row in rows)
        return ModelsInMemory(used_bytes=used, budget_bytes=self._residency.budget_bytes, models=rows)

    async def start(self) -> None:
        setup = await self._command.open()
        models = [Resident(each["name"], memory_of(each), is_pinned=each["pinned"]) for each in setup["models"]]
        self._residency = Residency(models, budget_bytes=setup["budget_bytes"], idle_seconds=setup["idle_seconds"])
        self._presets = setup["presets"]
        self._tickets = {model.name: ModelTickets() for model in models}
        for each in setup["models"]:
            name, state = each["name"], Residence(each["state"])
            self._residency.found(name, state, asyncio.get_running_loop().time())
            if state is Residence.LOADED:  # for a frontend that was here before
                self._background.start(self._accept(name, each["bytes"], is_new=False), f"accept {name}")
        self._pipeline.models.names.on_demand = frozenset((*self._tickets, *self._presets))
        self._pipeline.hooks.on_demand, self._pipeline.hooks.residents = self.enter, self.in_memory
        self._metrics.show(self._residency)
        self._background.keep(self._follow, "frontend: residency", 1.0)
        self._step()

    async def aclose(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._background.close()
        self._command.close()

    # -- requests ------------------------------------------------------------------------------------------------------

    async def enter(
        self,
        exchange: Exchange,
        begin: Callable[[Request | ResultRequest], None],
        request: Request | ResultRequest,
    ) -> str:
        """Return the model of a request once it is loaded. See `OnDemand`. Another model may be tried before."""
        self._leave(exchange)
        name = request.model
        if (preset := self._presets.get(name)) is not None:
            name = preset["model"]
            apply_preset(preset, request)
        model = self._residency.models.get(name)
        if model is None:
            return name
        if sum(each.waiting for each in self._residency.models.values()) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} requests wait for models to be loaded")
        now = exchange.now()
        verdict = self._residency.arrive(name, now)
        if verdict is Verdict.REFUSED:
            raise self._refusal(model, now)
        ticket = ModelTicket(name, exchange, now, is_running=verdict is Verdict.RUNS)
        self._tickets[name].of(ticket).add(ticket)
        exchange.keep(TICKET, ticket)
        if verdict is Verdict.WAITS:
            exchange.model = name  # the list of requests in flight shows what it waits for
            begin(request)
            self._step()
            await self._turn(ticket)
        return name

    def ended(self, exchange: Exchange, outcome: Outcome) -> None:
        self._leave(exchange)

    def _leave(self, exchange: Exchange) -> None:
        ticket: ModelTicket | None = exchange.arrival.kept.pop(TICKET, None)
        if ticket is not None and ticket in (found := self._tickets[ticket.name].of(ticket)):
            found.remove(ticket)
            self._residency.leave(ticket.name, exchange.now(), was_running=ticket.is_running)
            self._step()

    async def _turn(self, ticket: ModelTicket) -> None:
        """Wait until a request may run. Raises what its model failed with, and RequestRejected when that takes too long."""
        try:
            async with asyncio.timeout(self._wait_seconds):
                await first_of(ticket.turn, ticket.exchange.context.async_killed_or_stopped())
        except TimeoutError:
            text = f"Model `{ticket.name}` was not loaded within {self._wait_seconds:g} s: others are in use, or it loads for longer"
            raise RequestRejected(503, text, code="model_not_loaded", retry_after_seconds=5) from None
        if ticket.exchange.context.is_stopped():
            raise ticket.exchange.reason or Cancelled("its client has left")

    def _refusal(self, model: Resident, now: float) -> RequestRejected:
        if self._residency.never_fits(model):
            budget = self._residency.budget_bytes or 0
            text = f"Model `{model.name}` takes {model.memory.needed / 1e9:.2f} GB, more than is left of --memory ({budget / 1e9:.2f} GB)"
            return RequestRejected(503, text, code="model_too_large")
        assert model.failure is not None
        text = f"Model `{model.name}` could not be loaded: {model.failure.reason}"
        seconds = max(1, math.ceil(model.failure.retry_at - now))
        return RequestRejected(503, text, code="model_load_failed", retry_after_seconds=seconds)

    # -- the command ---------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Give the orders that are due, let requests run whose model is loaded, and come again when time alone changes it."""
        residency, now = self._residency, asyncio.get_running_loop().time()
        for order in residency.decide(now):
            self._command.send({"order": order.action.value, "model": order.name})
            if order.reason is not None:
                self._metrics.ordered_out(order.name, order.reason)
        for model in residency.models.values():
            if model.state is Residence.LOADED:
                self._let_run(model.name, now)
            elif model.state is Residence.ABSENT and residency.never_fits(model):
                self._fail(model, now)
        if self._timer is not None:
            self._timer.cancel()
        seconds = residency.next_look(now)
        loop = asyncio.get_running_loop()
        self._timer = None if seconds is None else loop.call_later(max(seconds, 0.01), self._step)

    def _let_run(self, name: str, now: float) -> None:
        """Let the requests go on that the decision counts as running."""
        tickets = self._tickets[name]
        while tickets.waiting:
            ticket = tickets.waiting.pop()
            ticket.is_running = True
            tickets.running.add(ticket)
            if not ticket.turn.done():
                ticket.turn.set_result(None)
                self._metrics.waited(name, now - ticket.arrived_at)

    def _fail(self, model: Resident, now: float) -> None:
        """Answer every request of a model that cannot be had, those included that had begun before its worker died."""
        tickets = self._tickets[model.name]
        for ticket in (*tickets.running, *tickets.waiting):
            refusal = self._refusal(model, now)
            if ticket.is_running:
                ticket.exchange.end_with(WorkerUnavailable(refusal.message))
            elif not ticket.turn.done():
                ticket.turn.set_exception(refusal)

    async def _follow(self) -> None:
        while (said := await self._command.read()) is not None:
            name, now = said["model"], asyncio.get_running_loop().time()
            model = self._residency.models[name]
            match said["event"]:
                case "serving":
                    self._background.start(self._accept(name, said["bytes"]), f"accept {name}")
                case "measured":
                    self._residency.measured(name, said["bytes"])
                case "ended" if model.state is Residence.UNLOADING:
                    self._metrics.gone(name, now - model.since)
                    self._residency.gone(name, now)
                case "ended" if model.state is not Residence.ABSENT:
                    was_loading = model.state is Residence.LOADING
                    self._residency.failed(name, said["reason"], now)
                    if was_loading:
                        self._metrics.failed(name)
                        self._fail(model, now)
            self._step()

    async def _accept(self, name: str, taken_bytes: int, *, is_new: bool = True) -> None:
        """Take a model as loaded once requests can go to its worker."""
        models = self._pipeline.models
        with suppress(TimeoutError):  # its worker is not usable: the command is ordered to end it, and reports that
            async with asyncio.timeout(ACCEPT_SECONDS):
                await models.wait_for(lambda: is_reachable(models, name))
        model, now = self._residency.models[name], asyncio.get_running_loop().time()
        if model.state is not Residence.LOADING:
            return  # it died meanwhile
        if is_reachable(models, name):
            if is_new:
                self._metrics.loaded(name, now - model.since)
            self._residency.loaded(name, taken_bytes, now)
            self._let_run(name, now)  # before the next decision, which may close it to later ones
        else:
            self._command.send({"order": "unload", "model": name})
        self._step()


def is_reachable(models: ModelDirectory, name: str) -> bool:
    """Return whether requests for a model can go to a worker now."""
    served = models.lookup(name)
    return served is not None and served.is_reachable


def memory_of(model: Table) -> Memory:
    """Return what the command knows of the memory of a model."""
    return Memory(model["bytes"], Known.MEASURED if model["measured"] else Known.ESTIMATED)


def resident_view(model: Resident, presets: list[str], ms: Callable[[float], int]) -> ResidentView:
    """Return what the inspector shows of one model."""
    state = model.state.value
    if model.state is Residence.LOADED and not model.running:
        state = "idle"
    elif model.state is Residence.ABSENT and model.failure is not None:
        state = "failed"
    return ResidentView(
        id=model.name,
        name=model.name,
        state=state,
        why=None if model.failure is None else model.failure.reason,
        taken_bytes=model.memory.taken or None,
        needed_bytes=model.memory.needed,
        running=model.running,
        waiting=model.waiting,
        is_pinned=model.is_pinned,
        presets=presets,
        used_ms=ms(model.used_at) if model.used_at else None,
    )


def apply_preset(preset: Table, request: Request | ResultRequest) -> None:
    """Fill in what a preset sets and the client left open; its system text comes before the client's messages."""
    for member, value in preset["members"].items():
        if getattr(request, member, None) is None:
            setattr(request, member, value)
    if (system := preset.get("system")) and isinstance(request, ChatRequest):
        request.messages = [{"role": "system", "content": system}, *request.messages]


class ResidencyRoute(JsonRoute):
    """What is loaded, what is on its way, and what waits."""

    def __init__(self, shown: Callable[[], Table]) -> None:
        self._shown = shown

    async def _answer(self, scope: Scope, receive: Receive) -> bytes:
        return msgspec.json.encode(self._shown())


class CommandLine:
    """The socket to the command that has the processes, of which a copy stays open there."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> Table:
        """Return what the command has to load, and the state of each; lines for a frontend that was here before are skipped."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=MAX_LINE_BYTES)
        self.send({"order": "hello"})
        while (said := await self.read()) is not None:
            if said.get("event") == "setup":
                return said
        raise WorkerUnavailable("the command that has the models is gone")

    def send(self, said: Table) -> None:
        assert self._writer is not None
        self._writer.write(json.dumps(said).encode() + b"\n")

    async def read(self) -> Table | None:
        """Return the next line; None: the command is gone."""
        assert self._reader is not None
        while line := await self._reader.readline():
            with suppress(ValueError):  # the rest of a line that a frontend before this one had begun to read
                found: Table | int | str = json.loads(line)
                if isinstance(found, dict):
                    return found
        return None

    def close(self) -> None:
        """Close this end. Idempotent."""
        if self._writer is not None:
            self._writer.close()
        self._socket.close()
