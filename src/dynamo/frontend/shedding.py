"""Workers that say they are full get no requests, and when all of a model's do, the client is told so (529).

Off unless a threshold is set, by a flag for every model or by `/busy_threshold` for one; until then nobody listens to loads
and a request pays one test of an empty set. Loads are what workers publish. As a report may be lost, a worker counts as busy
for `BUSY_SECONDS` after its last one at most: then the next request tries it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import msgspec

from dynamo.errors import DynamoException
from dynamo.frontend.http.asgi import BodyBudget, ClientGone, Receive, Scope, Send, first_headers, read_body, reply
from dynamo.frontend.http.operations import Peers
from dynamo.frontend.models.directory import ModelDirectory, ServedModel
from dynamo.frontend.settings import FrontendSettings
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.runtime.event_plane.base import Event

__all__ = ["LOAD_TOPIC", "BusyThresholdRoute", "Shedding", "Thresholds"]

logger = logging.getLogger(__name__)

LOAD_TOPIC: Final = "kv_metrics"
BUSY_SECONDS: Final = 5.0
RETRY_SECONDS: Final = 1.0
MAX_MODELS: Final = 1024  # with thresholds of their own
MAX_BODY_BYTES: Final = 16 * 1024
MAX_WORKERS: Final = 65_536  # whose load is remembered

Subscribe = Callable[[str], AbstractAsyncContextManager[AsyncIterator[Event]]]
"""From "namespace.component.endpoint" to the load reports of its workers."""


class Thresholds(msgspec.Struct, frozen=True):
    """Above any of these a rank is busy. None: not looked at."""

    model: str
    active_decode_blocks_threshold: float | None = None  # a part of the KV blocks of a rank
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | None = None  # of the tokens of one engine step

    @property
    def is_set(self) -> bool:
        return any(value is not None for name, value in msgspec.structs.asdict(self).items() if name != "model")

    def check(self) -> None:
        """Raises ValueError naming the field."""
        blocks = self.active_decode_blocks_threshold
        if blocks is not None and not 0 <= blocks <= 1:
            raise ValueError(f"active_decode_blocks_threshold must be between 0.0 and 1.0, got {blocks:g}")
        for name in ("active_prefill_tokens_threshold", "active_prefill_tokens_threshold_frac"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 2**63:
                raise ValueError(f"{name} must be at least 0, got {value:g}")

    def over(self, other: Thresholds) -> Thresholds:
        """These where they say something, else those of `other`."""
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return msgspec.structs.replace(other, **given)

    def is_busy(self, load: Load, *, total_kv_blocks: int | None, max_batched_tokens: int | None) -> bool:
        """Whether one rank with this load is."""
        blocks, tokens, part = (
            load.active_decode_blocks,
            load.active_prefill_tokens,
            self.active_prefill_tokens_threshold_frac,
        )
        limit = self.active_decode_blocks_threshold
        if limit is not None and blocks is not None and total_kv_blocks and blocks / total_kv_blocks > limit:
            return True
        if tokens is None:
            return False
        most = self.active_prefill_tokens_threshold
        return (most is not None and tokens > most) or (
            part is not None and bool(max_batched_tokens) and tokens > part * (max_batched_tokens or 0)
        )


class Load(msgspec.Struct, frozen=True):
    """One report of one rank. Unknown keys are ignored."""

    worker_id: int
    dp_rank: int = 0
    active_decode_blocks: int | None = None
    active_prefill_tokens: int | None = None


_decode_load: Final = msgspec.msgpack.Decoder(Load).decode
_decode_thresholds: Final = msgspec.json.Decoder(Thresholds).decode
_encode: Final = msgspec.json.encode


class Shedding:
    """Follows the loads of the models that have thresholds, and marks their busy workers. Used on the event loop only."""

    def __init__(
        self, settings: FrontendSettings, models: ModelDirectory, subscribe: Subscribe, peers: Peers | None = None
    ) -> None:
        self._models, self._subscribe, self._peers = models, subscribe, peers
        self._default = Thresholds(
            "",
            settings.active_decode_blocks_threshold,
            settings.active_prefill_tokens_threshold,
            settings.active_prefill_tokens_threshold_frac,
        )
        self._by_model: dict[str, Thresholds] = {}
        self._loads: dict[int, dict[int, Load]] = {}  # by worker and rank; of workers that exist
        self._expiries: dict[int, asyncio.TimerHandle] = {}  # by worker: when it is tried again
        self._followers: dict[str, asyncio.Task[None]] = {}  # by endpoint
        self._keeper: asyncio.Task[None] | None = None
        self._was_set = asyncio.Event()
        if peers is not None:
            peers.on_shared(self._take)

    def start(self) -> None:
        """Begin to listen if there is a reason to."""
        if self._keeper is None and (self._default.is_set or self._by_model):
            self._keeper = asyncio.create_task(self._keep(), name="frontend: loads")  # awaited in aclose()

    async def aclose(self) -> None:
        """Idempotent."""
        tasks = [*self._followers.values(), *([self._keeper] if self._keeper else [])]
        self._followers.clear()
        self._keeper = None
        for timer in self._expiries.values():
            timer.cancel()
        self._expiries.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- thresholds --------------------------------------------------------------------------------------------------

    def of(self, model: str) -> Thresholds:
        """What holds for a model."""
        found = self._by_model.get(model)
        return found if found is not None else msgspec.structs.replace(self._default, model=model)

    def all(self) -> list[Thresholds]:
        """Those of every model that has any."""
        names = {model.name for model in self._models.served()} | self._by_model.keys()
        return [found for name in sorted(names) if (found := self.of(name)).is_set]

    async def set(self, given: Thresholds) -> Thresholds:
        """Change what `given` says something about, in all processes of the group; the whole of it afterwards.

        Raises ValueError naming a field, or when too many models have thresholds of their own.
        """
        given.check()
        changed = given.over(self.of(given.model))
        if given.is_set:
            if given.model not in self._by_model and len(self._by_model) >= MAX_MODELS:
                raise ValueError(f"more than {MAX_MODELS} models have thresholds")
            self._apply(changed)
            if self._peers is not None:
                await self._peers.share(f"busy_threshold/{given.model}", _encode(changed))
        return changed

    def _take(self, key: str, value: bytes) -> None:
        """Another process was told."""
        if key.startswith("busy_threshold/"):
            self._apply(_decode_thresholds(value))

    def _apply(self, thresholds: Thresholds) -> None:
        self._by_model[thresholds.model] = thresholds
        self._was_set.set()
        self.start()
        for worker in list(self._loads):
            self._judge(worker)

    # -- loads -------------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Follow the endpoints of the models that have thresholds, whatever comes and goes."""
        while True:
            changed = asyncio.create_task(self._models.change(), name="frontend: models changed")
            was_set = asyncio.create_task(self._was_set.wait(), name="frontend: thresholds set")
            self._was_set.clear()
            try:
                self._reconcile()
                await asyncio.wait({changed, was_set}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
                was_set.cancel()

    def _reconcile(self) -> None:
        wanted = {path for model in self._models.served() if self.of(model.name).is_set for path in model.endpoints}
        for path in self._followers.keys() - wanted:
            self._followers.pop(path).cancel()
        for path in wanted - self._followers.keys():
            self._followers[path] = asyncio.create_task(self._follow(path), name=f"frontend: loads of {path}")
        present = {worker for model in self._models.served() for worker in model.member_ids}
        for worker in self._loads.keys() - present:
            self._forget(worker)

    async def _follow(self, endpoint: str) -> None:
        while True:
            try:
                async with self._subscribe(endpoint) as events:
                    async for event in events:
                        self._hear(event)
                return  # the plane was closed
            except DynamoException as error:
                logger.warning(
                    "the loads of %s cannot be followed, next attempt in %g s: %s", endpoint, RETRY_SECONDS, error
                )
            await asyncio.sleep(RETRY_SECONDS)

    def _hear(self, event: Event) -> None:
        try:
            load = _decode_load(event.payload)
        except msgspec.MsgspecError as error:
            logger.warning("a load report is not readable and ignored: %s", error)
            return
        if load.worker_id not in self._loads and len(self._loads) >= MAX_WORKERS:
            return
        self._loads.setdefault(load.worker_id, {})[load.dp_rank] = load
        self._judge(load.worker_id)

    def _judge(self, worker: int) -> None:
        """Mark a worker busy or not, in every model that it serves."""
        if (timer := self._expiries.pop(worker, None)) is not None:
            timer.cancel()
        ranks = self._loads.get(worker, {})
        is_busy = False
        for model in self._models.served():
            if worker in model.member_ids and self._mark(model, worker, ranks):
                is_busy = True
        if is_busy:
            self._expiries[worker] = asyncio.get_running_loop().call_later(BUSY_SECONDS, self._forget, worker)

    def _mark(self, model: ServedModel, worker: int, ranks: dict[int, Load]) -> bool:
        limits, runtime = self.of(model.name), model.card.runtime_config
        is_busy = bool(ranks) and all(
            limits.is_busy(
                load, total_kv_blocks=runtime.total_kv_blocks, max_batched_tokens=runtime.max_num_batched_tokens
            )
            for load in ranks.values()
        )
        if is_busy != (worker in model.busy):
            model.busy = model.busy | {worker} if is_busy else model.busy - {worker}
        return is_busy

    def _forget(self, worker: int) -> None:
        """It is gone, or has said nothing for too long."""
        self._loads.pop(worker, None)
        self._judge(worker)


class BusyThresholdRoute:
    """`/busy_threshold`: GET tells the thresholds, POST changes those of one model."""

    def __init__(self, shedding: Shedding, models: ModelDirectory, budget: BodyBudget) -> None:
        self._shedding, self._models, self._budget = shedding, models, budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "GET":
            await reply(send, 200, _encode({"thresholds": self._shedding.all()}))
            return
        try:
            body = await read_body(first_headers(scope), receive, MAX_BODY_BYTES, self._budget)
            status, answer = await self._change(body)
        except ClientGone:
            return
        except RequestRejected as rejected:
            status, answer = rejected.status, {"error": str(rejected)}
        await reply(send, status, _encode(answer))

    async def _change(self, body: bytes) -> tuple[int, Any]:
        try:
            given = _decode_thresholds(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return 422, {"error": f"the body is not understood: {error}"}
        if not self._models.is_registered(given.model):
            return 404, {"error": f"Model '{given.model}' not found. Thresholds can only be set for discovered models."}
        try:
            return 200, await self._shedding.set(given)
        except ValueError as error:
            return 400, {"error": str(error)}
        except TimeoutError:
            return 503, {"error": "The other frontend processes did not answer in time"}
