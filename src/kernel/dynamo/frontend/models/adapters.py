"""The adapters of a cluster: loaded at every worker of their base model, unloaded everywhere, and brought to workers that come later.

What should be loaded is remembered here and written on the cards (`lora.source`), so that other frontends, and this one after a
restart, find it there. A worker that had an adapter and lost it is left alone: an operator unloaded it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final
from urllib.parse import unquote

import msgspec
from msgspec import Struct

from dynamo.errors import DynamoException
from dynamo.frontend.base.asgi import BodyBudget, ClientGone, Receive, Scope, Send, first_headers, read_body, reply
from dynamo.frontend.models.cards import CardEntry, Group
from dynamo.frontend.models.directory import ModelDirectory
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.shapes import JsonObject
from dynamo.runtime.base.tasks import Background

logger = logging.getLogger(__name__)

ADAPTERS_PATH: Final = "/v1/loras"
MAX_BODY_BYTES: Final = 64 * 1024
MAX_CHARS: Final = 4096

MAX_ADAPTERS: Final = 1000  # that are remembered
AT_ONCE: Final = 8  # workers that are called at a time
ANSWER_SECONDS: Final = 600.0  # a source may have to be fetched
RETRY_SECONDS: Final = 5.0
_NO_WORKERS: Final[frozenset[int]] = frozenset()
AskWorker = Callable[[CardEntry, Mapping[str, object]], Awaitable[Mapping[str, object]]]
"""Sends one request for adapters to a worker; returns its answer, or raises `DynamoException`."""


class WorkerAnswer(Struct, frozen=True, omit_defaults=True):
    """What one worker answered."""

    instance_id: int
    endpoint: str
    status: str  # "success" or "error"
    message: str | None = None


class _Wanted(Struct, frozen=True):
    base: str
    source: str


class AdapterKeeper:
    """Open it with `start`, leave it with `aclose`."""

    def __init__(self, models: ModelDirectory, ask: AskWorker) -> None:
        self._models, self._ask = models, ask
        self._wanted: dict[str, _Wanted] = {}  # by the adapter's name
        self._had: dict[str, set[int]] = {}  # by adapter: the instances that it was seen at; of those that are there
        self._failed: dict[tuple[int, str], float] = {}  # loop time of the last failure
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._background = Background()

    def start(self) -> None:
        """Begin to bring adapters to workers that come later."""
        self._background.keep(self._keep, "frontend: adapters")

    async def aclose(self) -> None:
        """Leave the workers as they are. Idempotent."""
        await self._background.close()

    # -- what an operator requests -----------------------------------------------------------------------------------

    def bases(self, name: str) -> frozenset[str]:
        """Return the models whose workers have an adapter of this name."""
        names = self._models.base_names()
        return frozenset(names[entry.instance_id] for entry in self._holders(name) if entry.instance_id in names)

    def is_base(self, name: str) -> bool:
        """Return whether workers serve this model, and it is not an adapter itself."""
        return any(entry.card.lora is None for entry in self._models.workers_of(name))

    def is_taken(self, name: str) -> bool:
        """Return whether a name is that of a model that is not an adapter."""
        if name in self._had and not self.is_base(name):
            return False  # an adapter, which may have been unloaded a moment ago
        return self._models.is_registered(name) and not self._holders(name)

    async def load(self, base: str, name: str, source: str) -> Sequence[WorkerAnswer]:
        """Load an adapter at every worker of a model, and at those that come later. Loaded already: nothing changes there."""
        if name not in self._wanted and len(self._wanted) >= MAX_ADAPTERS:
            raise ValueError(f"more than {MAX_ADAPTERS} adapters are remembered; unload some")
        self._wanted[name] = _Wanted(base, source)
        return await asyncio.gather(*[self._load_at(entry, name, source) for entry in self._base_workers(base)])

    async def unload(self, name: str) -> Sequence[WorkerAnswer]:
        """Take an adapter away from every worker that has it, and forget it; return the answers of those that had it.

        The workers are queried: what was loaded a moment ago may not be seen in discovery yet.
        """
        wanted = self._wanted.pop(name, None)
        bases = self.bases(name) | ({wanted.base} if wanted is not None else set())
        workers = {entry.instance_id: entry for base in bases for entry in self._base_workers(base)}
        answers = await asyncio.gather(*[self._unload_at(entry, name) for entry in workers.values()])
        return [answer for answer in answers if answer is not None]

    async def _unload_at(self, entry: CardEntry, name: str) -> WorkerAnswer | None:
        """Return None where the worker does not have the adapter."""
        listed, failure = await self._answer(entry, {"operation": "list_loras"})
        if failure is not None:
            return failure
        loaded = listed.get("loras")
        if isinstance(loaded, list) and not any(
            isinstance(each, Mapping) and each.get("lora_name") == name for each in loaded
        ):
            return None
        _, failure = await self._answer(entry, {"operation": "unload_lora", "lora_name": name})
        return failure or WorkerAnswer(entry.instance_id, entry.endpoint, "success")

    def listed(self) -> list[JsonObject]:
        """Return every adapter with its base model and its workers, and what is requested and not loaded anywhere yet."""
        names, found = self._models.base_names(), dict[str, JsonObject]()
        for entry in self._models.adapters():
            assert entry.card.lora is not None
            adapter = found.setdefault(
                entry.card.display_name,
                {
                    "lora_name": entry.card.display_name,
                    "base_model": names.get(entry.instance_id),
                    "source": entry.card.lora.source,
                    "workers": [],
                },
            )
            adapter["workers"].append({"instance_id": entry.instance_id, "endpoint": entry.endpoint})
        for name, wanted in self._wanted.items():
            found.setdefault(
                name, {"lora_name": name, "base_model": wanted.base, "source": wanted.source, "workers": []}
            )
        return [found[name] for name in sorted(found)]

    # -- workers that come later -------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            for entry, name, wanted in self._missing():
                await self._bring(entry, name, wanted)
            try:
                async with asyncio.timeout(RETRY_SECONDS if self._failed else None):
                    await self._models.change()
            except TimeoutError:
                continue

    def _missing(self) -> list[tuple[CardEntry, str, _Wanted]]:
        """Return (worker, adapter) pairs where a worker should load an adapter that it has not had so far."""
        if not self._wanted and not self._models.has_managed_adapters:
            self._had, self._failed = {}, {}
            return []
        names, wanted = self._models.base_names(), dict(self._wanted)
        bases, held = dict[str, list[Group]](), dict[str, frozenset[int]]()
        for group in self._models.groups():  # whole groups, as sets: there are as many pairs as workers times adapters
            name = group.key.model
            if group.card.lora is None:
                bases.setdefault(name, []).append(group)
                continue
            held[name] = held.get(name, _NO_WORKERS) | group.instance_ids
            for entry in group.accepted if name not in wanted else ():
                lora = entry.card.lora
                if lora is not None and lora.source is not None and entry.instance_id in names:
                    wanted[name] = _Wanted(names[entry.instance_id], lora.source)
                    break
        self._had = {
            name: {*(names.keys() & self._had.get(name, ())), *held.get(name, ())} for name in self._had.keys() | held
        }
        self._failed = {pair: at for pair, at in self._failed.items() if pair[0] in names and pair[1] in wanted}
        now = asyncio.get_running_loop().time()
        return [
            (entry, name, what)
            for name, what in wanted.items()
            for group in bases.get(what.base, ())
            if (missing := group.instance_ids - self._had.get(name, _NO_WORKERS))
            for entry in group.accepted
            if entry.instance_id in missing
            and self._models.is_there(entry)
            and now - self._failed.get((entry.instance_id, name), -RETRY_SECONDS) >= RETRY_SECONDS
        ]

    async def _bring(self, entry: CardEntry, name: str, wanted: _Wanted) -> None:
        answer = await self._load_at(entry, name, wanted.source)
        pair = (entry.instance_id, name)
        if answer.status == "success":
            self._failed.pop(pair, None)
            self._had.setdefault(name, set()).add(entry.instance_id)
            logger.info("adapter %s was loaded at worker %x, which came later", name, entry.instance_id)
        else:
            self._failed[pair] = asyncio.get_running_loop().time()
            logger.warning("adapter %s is not loaded at worker %x: %s", name, entry.instance_id, answer.message)

    # -- workers -----------------------------------------------------------------------------------------------------

    def _base_workers(self, base: str) -> list[CardEntry]:
        return [entry for entry in self._models.workers_of(base) if entry.card.lora is None]

    def _holders(self, name: str) -> list[CardEntry]:
        return [entry for entry in self._models.workers_of(name) if entry.card.lora is not None]

    async def _load_at(self, entry: CardEntry, name: str, source: str) -> WorkerAnswer:
        _, failure = await self._answer(entry, _loading(name, source))
        return failure or WorkerAnswer(entry.instance_id, entry.endpoint, "success")

    async def _answer(
        self, entry: CardEntry, body: Mapping[str, object]
    ) -> tuple[Mapping[str, object], WorkerAnswer | None]:
        """Return what a worker answers, and how it failed if it did."""
        try:
            async with self._slots, asyncio.timeout(ANSWER_SECONDS):
                answer = await self._ask(entry, body)
        except TimeoutError:
            message = f"no answer in {ANSWER_SECONDS:g} s"
        except DynamoException as error:
            message = str(error)
        else:
            if answer.get("status") != "error":
                return answer, None
            message = str(answer.get("message") or "refused")
        return {}, WorkerAnswer(entry.instance_id, entry.endpoint, "error", message)


def _loading(name: str, source: str) -> dict[str, object]:
    return {"operation": "load_lora", "lora_name": name, "source": {"uri": source, "managed": True}}


class AdapterSource(Struct, forbid_unknown_fields=True):
    """Where an adapter is from."""

    uri: str


class AdapterLoad(Struct, forbid_unknown_fields=True):
    """The body of a load."""

    base_model: str
    lora_name: str
    source: AdapterSource | str


class AdaptersRoute:
    """`GET` lists, `POST` loads, `DELETE /v1/loras/{name}` unloads."""

    def __init__(self, keeper: AdapterKeeper, budget: BodyBudget) -> None:
        self._keeper, self._budget = keeper, budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            match scope["method"]:
                case "GET":
                    adapters = self._keeper.listed()
                    status, answer = 200, {"status": "success", "loras": adapters, "count": len(adapters)}
                case "POST":
                    body = await read_body(first_headers(scope), receive, MAX_BODY_BYTES, self._budget)
                    status, answer = await self._load(body)
                case _:
                    status, answer = await self._unload(unquote(scope["path"].removeprefix(ADAPTERS_PATH).lstrip("/")))
        except ClientGone:
            return
        except RequestRejected as rejected:
            status, answer = rejected.status, _refusal(str(rejected))
        await reply(send, status, msgspec.json.encode(answer))

    async def _load(self, body: bytes) -> tuple[int, dict[str, object]]:
        try:
            given = msgspec.json.decode(body, type=AdapterLoad)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return 400, _refusal(f"the body is not understood: {error}")
        source = given.source if isinstance(given.source, str) else given.source.uri
        for field, value in (("base_model", given.base_model), ("lora_name", given.lora_name), ("source", source)):
            if not 0 < len(value) <= MAX_CHARS:
                return 400, _refusal(f"{field} must have 1 to {MAX_CHARS} characters")
        if not self._keeper.is_base(given.base_model):
            return 404, _refusal(f"no worker serves the model {given.base_model!r}")
        if self._keeper.is_taken(given.lora_name):
            return 409, _refusal(f"lora_name {given.lora_name!r} is the name of a model that is not an adapter")
        others = self._keeper.bases(given.lora_name) - {given.base_model}
        if others:
            return 409, _refusal(f"lora_name {given.lora_name!r} is an adapter of {sorted(others)[0]!r}")
        try:
            answers = await self._keeper.load(given.base_model, given.lora_name, source)
        except ValueError as error:
            return 409, _refusal(str(error))
        return _judged(given.lora_name, answers)

    async def _unload(self, name: str) -> tuple[int, JsonObject]:
        answers = await self._keeper.unload(name)
        if not answers:
            known = ", ".join(entry["lora_name"] for entry in self._keeper.listed()[:16]) or "none"
            return 404, _refusal(f"no worker has an adapter {name!r}; loaded are: {known}")
        return _judged(name, answers)


def _judged(name: str, answers: Sequence[WorkerAnswer]) -> tuple[int, dict[str, object]]:
    """Return 200 where every worker did it, else 502: the change holds for some of them only."""
    failed = [answer for answer in answers if answer.status != "success"]
    status = "success" if not failed else "partial" if len(failed) < len(answers) else "error"
    body: dict[str, object] = {"status": status, "lora_name": name, "workers": answers}
    if failed:
        body["message"] = failed[0].message
    return (502 if failed else 200), body


def _refusal(message: str) -> dict[str, object]:
    return {"status": "error", "message": message}
