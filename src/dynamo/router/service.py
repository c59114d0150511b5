"""The router as a service of its own: three endpoints in front of the workers of another one.

    {namespace}.router.generate             a worker's request; the answer of the worker that was chosen
    {namespace}.router.best_worker_id       a list of token ids; the id of the worker that would be chosen
    {namespace}.router.get_overlap_scores   {"token_ids": [...]}; what each rank holds of the prompt

Any worker endpoint can be behind it: those of prefill workers, or of a pool that another router sends to.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Annotated, Final, Self

import msgspec

from dynamo.errors import CannotConnect, InvalidArgument, Overloaded, WorkerUnavailable
from dynamo.kv.overlap import Overlap, WorkerRank
from dynamo.placement.kv_query import KvOverrides, KvQuery, RankInfo, Trust
from dynamo.protocol.records import ModelCard, decode_model_record
from dynamo.router.kv_router import KvRouter, Selection
from dynamo.runtime.client import Client
from dynamo.runtime.context import Context
from dynamo.runtime.discovery.base import MODEL_CARDS, Change, Put
from dynamo.runtime.discovery.follow import follow
from dynamo.runtime.endpoint import Endpoint
from dynamo.runtime.request_plane.base import OBJECT_INDEX, Handler, ResponseSink, ResponseStream, StreamItem
from dynamo.runtime.served_endpoint import ServedEndpoint
from dynamo.runtime.tasks import Background

__all__ = ["RouterService", "kv_query_of", "ranks_of"]

logger = logging.getLogger(__name__)

COMPONENT: Final = "router"
OTHER_WORKERS: Final = 3  # that a request may be sent to, where workers decline it before they answer
MAX_CARDS: Final = 65_536  # of one endpoint; a store gone wild must not take the memory

_NOT_STARTED: Final = (CannotConnect, WorkerUnavailable, Overloaded)  # errors of a worker that has not begun


_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
_NOTHING: Final = Overlap()


class RouterService:
    """Serves the three endpoints, and follows the workers. Use as `async with RouterService(endpoint, router): ...`"""

    def __init__(self, workers: Endpoint, router: KvRouter) -> None:
        """`workers`: the endpoint whose instances serve the requests. What feeds the router's index is the caller's."""
        self._workers, self._router = workers, router
        self._stack = AsyncExitStack()
        self._cards: dict[str, tuple[int, ModelCard]] = {}  # by key; instance id and card
        self._trusts: dict[WorkerRank, Trust] = {}  # what the events of a rank are worth; absent: none have come
        self._client: Client | None = None
        self._served: list[ServedEndpoint] = []
        self._attempts = itertools.count(1)

    async def __aenter__(self) -> Self:
        runtime, namespace = self._workers.runtime, self._workers.namespace
        try:
            self._client = client = await self._workers.client()
            self._stack.push_async_callback(client.close)
            self._stack.callback(client.on_change(self._set_ranks))
            background = await self._stack.enter_async_context(Background())
            background.start(self._follow_cards(), "model cards of the workers")
            self._set_ranks()
            for name, handler in self._handlers().items():
                endpoint = runtime.endpoint(f"{namespace}.{COMPONENT}.{name}")
                served = await endpoint.start_serving(handler)
                self._stack.push_async_callback(served.close)
                self._served.append(served)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def drain(self, seconds: float) -> None:
        """Leave discovery, let the answers in flight end for so long, and cut the rest."""
        await asyncio.gather(*(served.drain(seconds) for served in self._served))

    def _handlers(self) -> Mapping[str, Handler]:
        return {
            "generate": self.generate,
            "best_worker_id": self.best_worker_id,
            "get_overlap_scores": self.get_overlap_scores,
        }

    # -- the endpoints -----------------------------------------------------------------------------------------------

    async def generate(self, body: object, context: Context, sink: ResponseSink) -> None:
        """Send a worker's request where its prefix lies, and pass on the answer."""
        if not isinstance(body, dict):
            raise InvalidArgument("the request must be an object with `token_ids`")
        query = kv_query_of(body)
        excluded: set[int] = set()
        while True:
            query.excluded = excluded
            selection = self._router.select(query, _now())
            try:
                await self._generate_at(selection, body, context, sink)
                return
            except _NOT_STARTED as error:
                excluded.add(selection.rank.worker_id)
                if sink.response_bytes or len(excluded) > OTHER_WORKERS or query.pinned_worker_id is not None:
                    raise
                if excluded.issuperset(rank.worker_id for rank in self._router.ranks):
                    raise
                logger.info(
                    "request %s: worker %x failed before its first token (%s: %s)",
                    context.id(),
                    selection.rank.worker_id,
                    type(error).__name__,
                    error,
                )

    async def best_worker_id(self, body: object, context: Context, sink: ResponseSink) -> None:
        """Answer with the worker that a prompt would go to. Nothing is booked."""
        query = KvQuery(token_ids=_token_ids(body))
        sink.send_object({"data": self._router.select(query, _now()).rank.worker_id})

    async def get_overlap_scores(self, body: object, context: Context, sink: ResponseSink) -> None:
        """Answer with the blocks of a prompt that each rank holds, unweighed."""
        if not isinstance(body, dict):
            raise InvalidArgument("the request must be an object with `token_ids`")
        lookup = self._router.look_up(kv_query_of(body), _now())
        workers = [_scores(rank, lookup.overlaps.get(rank, _NOTHING)) for rank in sorted(self._router.ranks)]
        shared = {"enabled": False, "total_hit_blocks": 0, "ranges": [], "error": None}
        scores = {
            "block_size": self._router.block_size,
            "num_blocks": len(lookup.sequence),
            "workers": workers,
            "shared_cache": shared,
        }
        sink.send_object({"data": scores})

    # -- one attempt -------------------------------------------------------------------------------------------------

    async def _generate_at(
        self, selection: Selection, body: dict[str, object], context: Context, sink: ResponseSink
    ) -> None:
        client, router = self._client, self._router
        assert client is not None
        request_id = context.id()
        if request_id in router.load:  # of another caller, or an attempt that is on its way out
            request_id = f"{request_id}/{next(self._attempts)}"
        routing = body.get("routing")
        hints = {**(routing if isinstance(routing, dict) else {}), "dp_rank": selection.rank.dp_rank}
        router.book(request_id, selection, _now(), expires=False)
        try:
            instance = client.named(selection.rank.worker_id)
            stream = await client.open(instance, {**body, "routing": hints}, context)
            try:
                await self._pass_on(stream, request_id, selection.rank, sink)
            finally:
                stream.close()
        finally:
            router.free(request_id, _now())

    async def _pass_on(self, stream: ResponseStream, request_id: str, rank: WorkerRank, sink: ResponseSink) -> None:
        router, is_first = self._router, True
        while items := await stream.next_batch():
            if is_first:
                router.first_token(request_id, _now())
            tokens = 0
            for item in items:
                if item.index == OBJECT_INDEX:
                    sink.send_object(item.extra or {})
                else:
                    tokens += len(item.token_ids)
                    extra = _with_worker(item, rank) if is_first else item.extra
                    is_first = False
                    sink.send_tokens(item.token_ids, item.index, item.finish_reason, extra)
                if not sink.has_credit():
                    await sink.wait_credit()
            router.output(request_id, tokens, _now())

    # -- the workers -------------------------------------------------------------------------------------------------

    async def _follow_cards(self) -> None:
        workers = self._workers
        prefix = f"{MODEL_CARDS}/{workers.namespace}/{workers.component}/{workers.name}"
        async with aclosing(follow(workers.runtime.discovery, prefix)) as changes:
            async for batch in changes:
                for change in batch:
                    self._take_card(change)
                self._set_ranks()

    def _take_card(self, change: Change) -> None:
        if not isinstance(change, Put):
            self._cards.pop(change.key, None)
            return
        if change.key not in self._cards and len(self._cards) >= MAX_CARDS:
            return
        try:
            record = decode_model_record(change.value)
            if record.model_suffix is None:  # an adapter's card says nothing new about its worker
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

    def _set_ranks(self) -> None:
        assert self._client is not None
        self._router.set_ranks(ranks_of(self._client.instance_ids(), dict(self._cards.values()), self._trusts))


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
            taints=frozenset(runtime.taints),
            topology=runtime.topology_domains,
            is_decode=card.worker_type == "decode",
        )
        for rank in (WorkerRank(instance_id, dp_rank) for dp_rank in runtime.ranks):
            found[rank] = msgspec.structs.replace(info, trust=trusts.get(rank, Trust.NONE))
    return found


class _Constraints(msgspec.Struct):
    required_taints: list[str] | None = None
    preferred_taints: dict[str, float] | None = None


class _Hints(msgspec.Struct):
    """What a request says about where it should be served. Every member may be absent or null."""

    backend_instance_id: int | None = None
    decode_worker_id: int | None = None
    dp_rank: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    cache_namespace: str | None = None
    priority: int | None = None
    expected_output_tokens: int | None = None
    allowed_worker_ids: list[int] | None = None
    routing_constraints: _Constraints | None = None


def kv_query_of(body: Mapping[str, object]) -> KvQuery:
    """Return what a router is asked about a worker's request. Raises InvalidArgument naming the member that is wrong."""
    if "token_ids" not in body:
        raise InvalidArgument("missing field `token_ids`")
    try:
        hints = msgspec.convert(body.get("routing") or {}, _Hints)
        overrides = msgspec.convert(body.get("router_config_override"), KvOverrides | None)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"routing or router_config_override: {error}") from error
    constraints = hints.routing_constraints or _Constraints()
    pinned = hints.backend_instance_id
    return KvQuery(
        token_ids=_token_ids(body["token_ids"]),
        lora_name=hints.lora_name,
        cache_salt=hints.cache_salt or hints.cache_namespace,
        priority=hints.priority or 0,
        pinned_worker_id=hints.decode_worker_id if pinned is None else pinned,
        pinned_dp_rank=hints.dp_rank,
        allowed=None if hints.allowed_worker_ids is None else set(hints.allowed_worker_ids),
        required_taints=constraints.required_taints or (),
        preferred_taints=constraints.preferred_taints or {},
        expected_output=hints.expected_output_tokens,
        overrides=overrides,
    )


def _token_ids(value: object) -> Sequence[int]:
    try:
        return msgspec.convert(value, list[_TokenId])
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"token_ids must be a list of token ids: {error}") from error


def _scores(rank: WorkerRank, overlap: Overlap) -> dict[str, int | None]:
    """Return the native record of one rank. Each tier's depth counts from the first block of the prompt."""
    host = overlap.device + overlap.host
    return {
        "worker_id": rank.worker_id,
        "dp_rank": rank.dp_rank,
        "device_blocks": overlap.device,
        "host_pinned_blocks": host,
        "disk_blocks": host + overlap.disk,
        "host_pinned_extension_blocks": overlap.host,
        "disk_extension_blocks": overlap.disk,
        "shared_beyond_device_blocks": None,
    }


def _with_worker(item: StreamItem, rank: WorkerRank) -> dict[str, object]:
    """Return the further members of the first chunk, with the worker that serves the request."""
    extra = item.extra or {}
    data = extra.get("routing_data")
    served_by = {
        "prefill_worker_id": rank.worker_id,
        "prefill_dp_rank": rank.dp_rank,
        "decode_worker_id": rank.worker_id,
        "decode_dp_rank": rank.dp_rank,
    }
    return {**extra, "routing_data": {"worker_id": served_by, **(data if isinstance(data, dict) else {})}}


def _now() -> float:
    return asyncio.get_running_loop().time()
