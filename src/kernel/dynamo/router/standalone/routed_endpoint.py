"""The workers of one endpoint behind a `KvRouter`: their cards, and the requests that go to them.

async with RoutedEndpoint(endpoint, router) as workers:
    answer = await workers.open({"token_ids": [...]}, context)
    while items := await answer.next_batch(): ...
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Annotated, Final, Self

import msgspec

from dynamo.errors import InvalidArgument
from dynamo.kv.approximate_index import ApproximateIndex
from dynamo.kv.block_chains import DumpedIndex
from dynamo.kv.index import PrefixIndex
from dynamo.kv.media_routing import RoutedPrompt
from dynamo.kv.overlap import OverlapIndex, WorkerRank
from dynamo.placement.kv_query import (
    KvQuery,
    RankInfo,
    Trust,
    clamp_output,
    media_prompt,
    read_overrides,
    read_preferred_taints,
    read_priority,
    read_target,
)
from dynamo.placement.kv_state import KvPolicy
from dynamo.placement.kv_transfer import topology_taints
from dynamo.protocol.records import ModelCard, ModelRuntimeConfig, decode_model_record
from dynamo.router.kv.domains import router_options
from dynamo.router.kv.fetch_hints import fetch_terms
from dynamo.router.kv.pre_dispatch import PreDispatchGate, gate_for_endpoint
from dynamo.router.kv.router import KvRouter
from dynamo.router.kv.settings import KvRouterSettings
from dynamo.router.peers.load_reports import RouterLoadReports
from dynamo.router.peers.replica_sync import ReplicaSync
from dynamo.router.standalone.routed_answer import RoutedAnswer
from dynamo.router.standalone.worker_reports import IndexOfWorkers, follow_events
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.calls.context import Context
from dynamo.runtime.client import Client
from dynamo.runtime.discovery.base import MODEL_CARDS, Change, Put
from dynamo.runtime.discovery.follow import follow
from dynamo.runtime.endpoint import Endpoint

__all__ = ["RoutedAnswer", "RoutedEndpoint", "kv_query_of", "new_router", "ranks_of", "routed_endpoint", "token_ids_of"]

logger = logging.getLogger(__name__)

_NO_GATE: Final = PreDispatchGate()
FIRST_CARDS_SECONDS: Final = 5.0  # how long the cards of the workers that are there may take to be read
RETRY_SECONDS: Final = 1.0
MAX_CARDS: Final = 65_536  # of one endpoint; a store gone wild must not take the memory

_UNKNOWN_CONFIG: Final = ModelRuntimeConfig()

_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class RoutedEndpoint:
    """Follows the workers of an endpoint for a router, and sends them requests. Use as `async with`."""

    def __init__(
        self,
        workers: Endpoint,
        router: KvRouter,
        *,
        pre_dispatch: PreDispatchGate = _NO_GATE,
        needs_cards: bool = False,
    ) -> None:
        """`workers`: the endpoint whose instances serve the requests. What feeds the router's index is the caller's. `pre_dispatch`:
        what requests pass before they go to a worker. `needs_cards`: a worker gets no requests before its model card is there."""
        self.endpoint, self.router, self.pre_dispatch = workers, router, pre_dispatch
        self._needs_cards = needs_cards
        self._stack = AsyncExitStack()
        self._cards: dict[str, tuple[int, ModelCard]] = {}  # by key; instance id and card
        self._trusts: dict[WorkerRank, Trust] = {}  # what the events of a rank are worth; absent: none have come
        self._busy: frozenset[int] = frozenset()
        self._degraded: frozenset[WorkerRank] = frozenset()  # ranks that the index has no room for
        self.on_ranks: Callable[[], None] | None = None  # called when the ranks have changed
        self._client: Client | None = None
        self._attempts = itertools.count(1)

    async def __aenter__(self) -> Self:
        try:
            self._client = client = await self.endpoint.client()
            self._stack.push_async_callback(client.close)
            self._stack.callback(client.on_change(self._set_ranks))
            background = await self._stack.enter_async_context(Background())
            known = asyncio.Event()
            background.keep(partial(self._follow_cards, known, set[str]()), "model cards of the workers", RETRY_SECONDS)
            if self._needs_cards:
                # Else the first request, right behind the constructor, would find no worker although all are registered.
                with suppress(TimeoutError):  # the store does not answer: what comes later is taken as it comes
                    async with asyncio.timeout(FIRST_CARDS_SECONDS):
                        await known.wait()
            self._set_ranks()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    @property
    def client(self) -> Client:
        """The client of the workers."""
        assert self._client is not None, "used before it was entered"
        return self._client

    @property
    def runtime_config(self) -> ModelRuntimeConfig:
        """The engine of the first worker, by its card; without a card nothing is known."""
        return next((card.runtime_config for _, card in self._cards.values()), _UNKNOWN_CONFIG)

    @property
    def is_eagle(self) -> bool:
        """Whether the workers' blocks also cover the token behind them."""
        return self.runtime_config.enable_eagle

    @property
    def busy(self) -> frozenset[int]:
        """The workers that get no requests, as they are over a threshold."""
        return self._busy

    @busy.setter
    def busy(self, busy: frozenset[int]) -> None:
        self._busy = busy
        self._set_ranks()

    async def open(self, body: Mapping[str, object], context: Context, *, query: KvQuery | None = None) -> RoutedAnswer:
        """Send a request where its prefix lies, and book it until its answer ends.

        Raises InvalidArgument for a request that is not one, what `KvRouter.select` raises where no rank may serve it,
        RouterQueueLimitExceeded where too many wait already, and the last worker's error when all that were tried decline it.
        The answer to a request that is cancelled while it waits is empty.
        """
        answer = RoutedAnswer(self, body, context, kv_query_of(body) if query is None else query)
        await answer.start()
        return answer

    def booking_id(self, request_id: str) -> str:
        """Return a name for the booking of a request: its id, unless another attempt or caller uses it."""
        return f"{request_id}/{next(self._attempts)}" if request_id in self.router.load else request_id

    # -- the workers -------------------------------------------------------------------------------------------------

    async def _follow_cards(self, known: asyncio.Event, keys: set[str]) -> None:
        """Take the cards as they change; `known` is set after the first ones. `keys`: those that an attempt that failed had."""
        workers = self.endpoint
        prefix = f"{MODEL_CARDS}/{workers.namespace}/{workers.component}/{workers.name}"
        async with aclosing(follow(workers.runtime.discovery, prefix, keys)) as changes:
            async for batch in changes:
                for change in batch:
                    self._take_card(change)
                self._set_ranks()
                known.set()

    def _take_card(self, change: Change) -> None:
        if not isinstance(change, Put):
            self._cards.pop(change.key, None)
            return
        if change.key not in self._cards and len(self._cards) >= MAX_CARDS:
            return
        try:
            record = decode_model_record(change.value)
            if record.model_suffix is None:  # an adapter's card has nothing new about its worker
                self._cards[change.key] = (record.instance_id, record.card)
        except InvalidArgument as error:
            logger.warning("model card %s is not read: %s", change.key, error)

    def set_trust(self, rank: WorkerRank, trust: Trust) -> None:
        """Take what the events of a rank are worth from now on (`index_feed.OnTrust`)."""
        if trust is Trust.NONE:
            self._trusts.pop(rank, None)
        else:
            self._trusts[rank] = trust
        if self._client is not None:
            self._set_ranks()

    def is_live(self, rank: WorkerRank) -> bool:
        """Return whether a worker that is there has the rank."""
        return rank in self.router.ranks

    def set_degraded(self, ranks: frozenset[WorkerRank]) -> None:
        """Take the ranks that reported more blocks than there is room for."""
        self._degraded = ranks
        if self._client is not None:
            self._set_ranks()

    def _set_ranks(self) -> None:
        cards, instance_ids = dict(self._cards.values()), self.client.instance_ids()
        if self._needs_cards:
            instance_ids = [each for each in instance_ids if each in cards]
        trusts = {**self._trusts, **dict.fromkeys(self._degraded, Trust.DEGRADED)} if self._degraded else self._trusts
        ranks = ranks_of(instance_ids, cards, trusts)
        for rank, info in ranks.items():
            if rank.worker_id in self._busy:
                ranks[rank] = msgspec.structs.replace(info, is_busy=True)
        self.router.set_ranks(ranks)
        self.router.load.relieved()  # what waits may wait for one of these
        if self.on_ranks is not None:
            self.on_ranks()


# -- what a router goes by -------------------------------------------------------------------------------------------


def new_router(
    kv: KvRouterSettings, block_size: int, policy: KvPolicy, endpoint: Endpoint, held: OverlapIndex | None
) -> KvRouter:
    """Return the router that the settings describe. `held`: the index that events feed; None where they are not read."""
    return KvRouter(
        block_size=block_size,
        policy=policy,
        rng=endpoint.runtime.rng,
        index=_guesses(kv) if held is None else held,
        predicted=_predictions(kv),
        options=router_options(kv),
    )


def _guesses(kv: KvRouterSettings) -> OverlapIndex | None:
    """Return the index of what was sent where, for workers whose KV events are not read."""
    if not kv.guesses:
        return None
    return ApproximateIndex(ttl_seconds=kv.router_ttl_secs, is_lru=kv.router_approximate_cache_policy == "lru")


def _predictions(kv: KvRouterSettings) -> OverlapIndex | None:
    """Return the index that counts a prompt's blocks as held until the events of its worker arrive."""
    seconds = kv.router_predicted_ttl_secs
    return ApproximateIndex(ttl_seconds=seconds) if kv.reads_events and seconds is not None else None


@asynccontextmanager
async def routed_endpoint(
    endpoint: Endpoint,
    router: KvRouter,
    kv: KvRouterSettings,
    index: PrefixIndex | DumpedIndex | None,
    *,
    needs_cards: bool = False,
) -> AsyncIterator[RoutedEndpoint]:
    """Follow an endpoint's workers for a router, feed `index` their KV events, and share the bookings, as the settings have it."""
    async with AsyncExitStack() as stack:
        gate = await stack.enter_async_context(gate_for_endpoint(kv, router, endpoint))
        workers = RoutedEndpoint(endpoint, router, pre_dispatch=gate, needs_cards=needs_cards)
        if index is not None:
            opened = asyncio.get_running_loop().create_future()
            background = await stack.enter_async_context(Background())
            following = partial(follow_events, workers, IndexOfWorkers(index, workers), opened)
            background.keep(following, "KV events of the workers", RETRY_SECONDS)
            await opened
        await stack.enter_async_context(RouterLoadReports(endpoint, router.load))
        if kv.router_replica_sync:
            sync = ReplicaSync(
                endpoint,
                router.load,
                router_id=endpoint.connection_id(),
                block_size=router.block_size,
                is_live=workers.is_live,
            )
            router.observer = await stack.enter_async_context(sync)
        yield await stack.enter_async_context(workers)


def ranks_of(
    instance_ids: Iterable[int], cards: Mapping[int, ModelCard], trusts: Mapping[WorkerRank, Trust]
) -> dict[WorkerRank, RankInfo]:
    """Return the ranks of workers. A worker without a card has one rank of which nothing but the trust is known."""
    found: dict[WorkerRank, RankInfo] = {}
    for instance_id in instance_ids:
        card = cards.get(instance_id)
        if card is None:
            rank = WorkerRank(instance_id)
            found[rank] = RankInfo(trust=trusts.get(rank, Trust.NONE))
            continue
        runtime = card.runtime_config
        info = RankInfo(
            total_kv_blocks=runtime.total_kv_blocks,
            max_num_batched_tokens=runtime.max_num_batched_tokens,
            max_num_seqs=runtime.max_num_seqs,
            taints=frozenset(runtime.taints) | topology_taints(runtime),
            topology=runtime.topology_domains,
        )
        for rank in (WorkerRank(instance_id, dp_rank) for dp_rank in runtime.ranks):
            terms = fetch_terms(runtime.runtime_data, rank.dp_rank)
            found[rank] = msgspec.structs.replace(info, trust=trusts.get(rank, Trust.NONE), fetches=terms)
    return found


class _Constraints(msgspec.Struct):
    required_taints: list[str] | None = None
    preferred_taints: dict[str, float] | None = None


class _Hints(msgspec.Struct):
    """Where a request should be served, by its own members. Every member may be absent or null."""

    backend_instance_id: int | None = None
    decode_worker_id: int | None = None
    dp_rank: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    cache_namespace: str | None = None
    priority: float | None = None
    priority_jump: float | None = None
    strict_priority: int | None = None
    slo_ttft_ms: float | None = None
    expected_output_tokens: int | None = None
    allowed_worker_ids: list[int] | None = None
    routing_constraints: _Constraints | None = None


def kv_query_of(body: Mapping[str, object]) -> KvQuery:
    """Return the query to a router for a request. Raises InvalidArgument naming the member that is wrong."""
    if "token_ids" not in body:
        raise InvalidArgument("missing field `token_ids`")
    try:
        hints = msgspec.convert(body.get("routing") or {}, _Hints)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"routing: {error}") from error
    constraints = hints.routing_constraints or _Constraints()
    pinned = hints.backend_instance_id
    token_ids, media = token_ids_of(body["token_ids"]), body.get("mm_routing_info")
    prompt = RoutedPrompt(token_ids, len(token_ids)) if media is None else media_prompt(media, token_ids)
    return KvQuery(
        token_ids=prompt.token_ids,
        prompt_tokens=prompt.length,
        mm_hashes=prompt.mm_hashes,
        lora_name=hints.lora_name,
        cache_salt=hints.cache_salt or hints.cache_namespace,
        priority=read_priority(hints.priority_jump or hints.priority),
        strict_priority=hints.strict_priority or 0,
        aim=read_target(hints.slo_ttft_ms),
        pinned_worker_id=hints.decode_worker_id if pinned is None else pinned,
        pinned_dp_rank=hints.dp_rank,
        allowed=None if hints.allowed_worker_ids is None else set(hints.allowed_worker_ids),
        required_taints=constraints.required_taints or (),
        preferred_taints=read_preferred_taints(constraints.preferred_taints),
        expected_output=clamp_output(hints.expected_output_tokens),
        overrides=read_overrides(body.get("router_config_override")),
    )


def token_ids_of(value: object) -> Sequence[int]:
    """Return a prompt. Raises InvalidArgument for anything but a list of token ids."""
    try:
        return msgspec.convert(value, list[_TokenId])
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"token_ids must be a list of token ids: {error}") from error


def _now() -> float:
    return asyncio.get_running_loop().time()
