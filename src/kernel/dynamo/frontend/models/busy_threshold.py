"""The thresholds above which workers count as busy: kept by model, changed at `/busy_threshold`, fed with load reports.

Off unless a threshold is set, by a flag for every model or by the route for one model, or autoscale signals are on,
which need the loads of all, or a viewer of the inspector watches the workers. Until then no load is followed, and a
request pays one test of an empty set. Where all workers of a model are busy the client gets 529.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from collections.abc import Set as AbstractSet
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Final

import msgspec

from dynamo.errors import DynamoException
from dynamo.frontend.base.asgi import BodyBudget, ClientGone, Receive, Scope, Send, first_headers, read_body, reply
from dynamo.frontend.base.peers import Peers
from dynamo.frontend.models.directory import ModelDirectory
from dynamo.frontend.models.settings import ModelSettings
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.router.workers.busy_workers import BusyThresholds, BusyWorkers, LoadedPool, LoadReport
from dynamo.runtime.base.tasks import Background, first_of
from dynamo.runtime.calls.event_plane.base import Event

logger = logging.getLogger(__name__)

LOAD_TOPIC: Final = "kv_metrics"
RETRY_SECONDS: Final = 1.0
LOOKED_SECONDS: Final = 30.0  # that loads are followed after a viewer has polled them
MAX_MODELS: Final = 1024  # with thresholds of their own
MAX_BODY_BYTES: Final = 16 * 1024

Subscribe = Callable[[str], AbstractAsyncContextManager[AsyncIterator[Event]]]
"""From "namespace.component.endpoint" to the load reports of its workers."""

ReportOwn = Callable[[str], AbstractAsyncContextManager[None]]


def _nothing_to_report(_endpoint: str) -> AbstractAsyncContextManager[None]:
    return nullcontext()


_decode_load: Final = msgspec.msgpack.Decoder(LoadReport).decode
_decode_thresholds: Final = msgspec.json.Decoder(BusyThresholds).decode
_encode: Final = msgspec.json.encode


class _Audience:
    """Subscriptions to the loads of all models: autoscale signals for ever, a viewer until LOOKED_SECONDS after a poll."""

    def __init__(self, *, needs_all: bool) -> None:
        self.needs_all = needs_all
        self._looks_until = 0.0  # loop time

    def look(self) -> bool:
        """Note a poll; return whether there was no viewer before."""
        is_new = not self.is_looking
        self._looks_until = asyncio.get_running_loop().time() + LOOKED_SECONDS
        return is_new

    @property
    def is_looking(self) -> bool:
        return asyncio.get_running_loop().time() < self._looks_until

    @property
    def is_there(self) -> bool:
        return self.needs_all or self.is_looking

    async def leave(self) -> None:
        """Return when no viewer has polled for a while; never, where there is none."""
        loop = asyncio.get_running_loop()
        if not self.is_looking:
            await loop.create_future()
        while (left := self._looks_until - loop.time()) > 0:
            await asyncio.sleep(left)


class _Thresholds:
    """The thresholds of models: their own, or the default."""

    def __init__(self, default: BusyThresholds) -> None:
        self._default = default
        self.by_model: dict[str, BusyThresholds] = {}
        self._by_default: dict[str, BusyThresholds] = {}  # of the other models that were looked up; bounded like them

    @property
    def are_set(self) -> bool:
        """Whether any model may have one."""
        return self._default.is_set or bool(self.by_model)

    def of(self, model: str) -> BusyThresholds:
        """Return the thresholds of a model."""
        found = self.by_model.get(model) or self._by_default.get(model)
        if found is None:
            if len(self._by_default) >= 2 * MAX_MODELS:
                self._by_default.clear()
            found = self._by_default[model] = msgspec.structs.replace(self._default, model=model)
        return found

    def check_room(self, model: str) -> None:
        """Raise ValueError where a model would be one too many with thresholds of its own."""
        if model not in self.by_model and len(self.by_model) >= MAX_MODELS:
            raise ValueError(f"more than {MAX_MODELS} models have thresholds")


class _Followers:
    """The subscriptions to the loads of endpoints."""

    def __init__(
        self,
        subscribe: Subscribe,
        report_own: ReportOwn,
        report: Callable[[Event, bool], None],
        background: Background,
    ) -> None:
        self._subscribe, self._report_own, self._report, self._background = subscribe, report_own, report, background
        # By endpoint, and whether a threshold or a signal needs its loads: else a viewer only watches them.
        self.tasks: dict[tuple[str, bool], asyncio.Task[None]] = {}

    def follow(self, keys: AbstractSet[tuple[str, bool]]) -> None:
        """Follow these endpoints, and no others."""
        for key in self.tasks.keys() - keys:
            self.tasks.pop(key).cancel()
        for key in keys - self.tasks.keys():
            self.tasks[key] = self._background.keep(partial(self._follow, *key), f"frontend: loads of {key[0]}")

    async def _follow(self, endpoint: str, needs_loads: bool) -> None:
        """Follow the loads of an endpoint. Where a viewer only watches them, nothing of this process is reported or counted."""
        while True:
            own = self._report_own(endpoint) if needs_loads else nullcontext()
            try:
                async with self._subscribe(endpoint) as events, own:
                    async for event in events:
                        self._report(event, needs_loads)
                return  # the plane was closed
            except DynamoException as error:
                logger.warning(
                    "the load reports of %s cannot be followed, next attempt in %g s: %s",
                    endpoint,
                    RETRY_SECONDS,
                    error,
                )
            await asyncio.sleep(RETRY_SECONDS)


class LoadFollower:
    """Follows the loads of the models that have thresholds, and marks their busy workers. Used on the event loop only."""

    def __init__(
        self,
        settings: ModelSettings,
        models: ModelDirectory,
        subscribe: Subscribe,
        peers: Peers | None = None,
        *,
        report_own: ReportOwn = _nothing_to_report,
    ) -> None:
        """`report_own`: reports what this process itself has booked at an endpoint, while its loads are followed."""
        self._models, self._peers = models, peers
        self._thresholds = _Thresholds(settings.busy_thresholds)
        self._audience = _Audience(needs_all=settings.autoscale)
        self.busy_workers = BusyWorkers(models.pools, self._thresholds.of)
        self._background = Background()
        self._followers = _Followers(subscribe, report_own, self._report, self._background)
        self._keeper: asyncio.Task[None] | None = None
        self._was_set = asyncio.Event()
        if peers is not None:
            peers.on_shared(self._take)

    def start(self) -> None:
        """Begin to follow loads if a threshold is set."""
        if (
            self._keeper is None
            and not self._background.is_closed
            and (self._audience.is_there or self._thresholds.are_set)
        ):
            self._keeper = self._background.keep(self._keep, "frontend: loads")

    def look(self) -> None:
        """Follow the loads of all models for a while, for a viewer. No worker is busy because of that."""
        if self._audience.look():
            self._was_set.set()
            self.start()

    async def aclose(self) -> None:
        """Stop following loads. Idempotent."""
        self._followers.tasks.clear()
        self.busy_workers.close()
        await self._background.close()

    # -- thresholds --------------------------------------------------------------------------------------------------

    def all(self) -> list[BusyThresholds]:
        """Return the thresholds of every model that has any."""
        names = {model.name for model in self._models.served()} | self._thresholds.by_model.keys()
        return [found for name in sorted(names) if (found := self._thresholds.of(name)).is_set]

    async def set(self, given: BusyThresholds) -> BusyThresholds:
        """Change the thresholds that `given` sets, in all processes of the group; return all of the model's afterwards.

        Raises ValueError naming a field, or when too many models have thresholds of their own.
        """
        given.check()
        changed = given.over(self._thresholds.of(given.model))
        if given.is_set:
            self._thresholds.check_room(given.model)
            self._apply(changed)
            if self._peers is not None:
                await self._peers.share(f"busy_threshold/{given.model}", _encode(changed))
        return changed

    def _take(self, key: str, value: bytes) -> None:
        """Take over a change that another process of the group received."""
        if key.startswith("busy_threshold/"):
            self._apply(_decode_thresholds(value))

    def _apply(self, thresholds: BusyThresholds) -> None:
        self._thresholds.by_model[thresholds.model] = thresholds
        self._was_set.set()
        self.start()
        self.busy_workers.thresholds_changed()

    # -- loads -------------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Follow the endpoints of the models that have thresholds, or of all that a viewer watches, whatever comes and goes."""
        while True:
            self._was_set.clear()
            self._reconcile()
            await first_of(self._models.change(), self._was_set.wait(), self._audience.leave())

    def _is_followed(self, model: str) -> bool:
        return self._audience.needs_all or self._thresholds.of(model).is_set

    def _reconcile(self) -> None:
        is_looked_at, followed = self._audience.is_looking, list[LoadedPool]()
        wanted: set[tuple[str, bool]] = set()
        for pool in self._models.pools():
            needs_loads = self._is_followed(pool.name)
            if needs_loads or is_looked_at:
                followed.append(pool)
                wanted |= {(path, needs_loads) for path in pool.endpoints}
        wanted -= {(path, False) for path, needs_loads in wanted if needs_loads}
        self._followers.follow(wanted)
        self.busy_workers.keep_only(frozenset().union(*[pool.member_ids for pool in followed]))

    def _report(self, event: Event, is_counted: bool) -> None:
        try:
            load = _decode_load(event.payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # also no UTF-8, or nested too deep
            logger.warning("a load report is not readable and ignored: %s", error)
            return
        self.busy_workers.report(load)
        if is_counted:
            self._models.note_load(load)


class BusyThresholdRoute:
    """`/busy_threshold`: GET returns the thresholds, POST changes those of one model."""

    def __init__(self, loads: LoadFollower, models: ModelDirectory, budget: BodyBudget) -> None:
        self._loads, self._models, self._budget = loads, models, budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "GET":
            await reply(send, 200, _encode({"thresholds": self._loads.all()}))
            return
        try:
            body = await read_body(first_headers(scope), receive, MAX_BODY_BYTES, self._budget)
            status, answer = await self._change(body)
        except ClientGone:
            return
        except RequestRejected as rejected:
            status, answer = rejected.status, {"error": str(rejected)}
        await reply(send, status, _encode(answer))

    async def _change(self, body: bytes) -> tuple[int, object]:
        try:
            given = _decode_thresholds(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return 422, {"error": f"the body is not understood: {error}"}
        if not self._models.is_registered(given.model):
            return 404, {"error": f"Model '{given.model}' not found. Thresholds can only be set for discovered models."}
        try:
            return 200, await self._loads.set(given)
        except ValueError as error:
            return 400, {"error": str(error)}
        except TimeoutError:
            return 503, {"error": "The other frontend processes did not answer in time"}
