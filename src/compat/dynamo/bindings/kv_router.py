"""`KvRouter` of the bindings (`EndpointKvRouter`): a KV-aware router in front of the workers of an endpoint, inside the caller's process.

router = KvRouter(runtime.endpoint("prod.backend.generate"), 16, KvRouterConfig())
async for chunk in await router.generate(token_ids, "model"): ...
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, Final

import msgspec

from dynamo.bindings.config import KvRouterConfig, LoadThresholdConfig, TaintConstraints, check_affinity
from dynamo.bindings.opened import Opened
from dynamo.errors import DynamoException, InvalidArgument
from dynamo.kv.approximate_index import ApproximateIndex
from dynamo.kv.block_chains import BlockChains, DumpedIndex
from dynamo.kv.hashing import block_hashes, sequence_hashes
from dynamo.kv.index import PrefixIndex
from dynamo.kv.media_routing import media_of_blocks
from dynamo.placement.kv_query import KvOverrides, KvQuery
from dynamo.placement.kv_state import Selection
from dynamo.router.kv import router as library
from dynamo.router.kv.domains import policy_of
from dynamo.router.kv.queue_gate import POLICY_CLASS
from dynamo.router.kv.settings import KvRouterSettings
from dynamo.router.standalone.routed_endpoint import (
    RoutedAnswer,
    RoutedEndpoint,
    kv_query_of,
    new_router,
    routed_endpoint,
)
from dynamo.router.standalone.service import overlap_scores
from dynamo.router.standalone.worker_reports import busy_filter
from dynamo.runtime.calls.context import Context
from dynamo.runtime.client import ClientStream
from dynamo.runtime.endpoint import Endpoint

__all__ = ["ChunkStream", "EndpointKvRouter"]

logger = logging.getLogger(__name__)

MediaInfos = Sequence[Mapping[str, Any] | None]

_TOKENS: Final = 2**32
_OVERRIDES: Final = frozenset(KvOverrides.__struct_fields__)
_MILLISECONDS: Final = 1000.0
# The members that a native request and a native chunk have at least, so that code may read them without `get`.
_STOPS: Final = (
    "max_tokens", "stop", "stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden", "min_tokens", "ignore_eos",
    "max_thinking_tokens",
)  # fmt: skip
_SAMPLING: Final = (
    "n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
    "use_beam_search", "length_penalty", "seed", "include_stop_str_in_output", "guided_decoding",
)  # fmt: skip
_OUTPUT: Final = (
    "logprobs", "prompt_logprobs", "skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids",
)  # fmt: skip
_CHUNK: Final[dict[str, Any]] = {
    "token_ids": [], "tokens": None, "text": None, "output_type": "text", "cum_log_probs": None, "log_probs": None,
    "top_logprobs": None, "finish_reason": None, "index": 0,
}  # fmt: skip


class _Routing:
    """What a router consists of once it is open."""

    __slots__ = ("chains", "learns", "workers")

    def __init__(self, workers: RoutedEndpoint, chains: BlockChains | None, *, learns: bool) -> None:
        self.workers = workers
        self.chains = chains  # None: nothing is known of caches
        self.learns = learns  # what is booked is all that is known of caches

    @property
    def router(self) -> library.KvRouter:
        return self.workers.router

    async def turn_of(self, query: KvQuery, policy_class: str | None) -> Selection:
        """Choose a rank, once it is the turn of the request. What is to be booked is booked before any await."""
        router, gate = self.router, self.workers.pre_dispatch.gate
        selection = router.select(query, _now())
        if gate is None:
            return selection
        context = Context(metadata={} if policy_class is None else {POLICY_CLASS: policy_class})
        policy = gate.parks(selection, query, context)
        if policy is None:
            return selection
        await gate.wait(policy, selection, query, context)
        return router.select(query, _now())

    def hashed(self, query: KvQuery, block_size: int) -> KvQuery:
        """Hash the prompt of a query, and return the query."""
        hashes = block_hashes(
            query.token_ids,
            block_size,
            lora_name=query.lora_name,
            cache_salt=query.cache_salt,
            eagle=self.workers.is_eagle,
            mm_hashes=query.mm_hashes,
        )
        query.sequence = sequence_hashes(hashes)
        if query.prompt_tokens is None:
            query.prompt_tokens = len(query.token_ids)
        if self.learns and self.chains is not None:
            self.chains.learn(None, hashes)
        return query


@asynccontextmanager
async def _routing(
    endpoint: Endpoint, block_size: int, settings: KvRouterSettings, thresholds: LoadThresholdConfig | None
) -> AsyncIterator[_Routing]:
    held = DumpedIndex(PrefixIndex()) if settings.reads_events else None
    router = new_router(settings, block_size, policy_of(settings)[0], endpoint, None if held is None else held.index)
    guesses = router.index
    chains = BlockChains(guesses.dump) if held is None and isinstance(guesses, ApproximateIndex) else None
    async with AsyncExitStack() as stack:
        workers = await stack.enter_async_context(routed_endpoint(endpoint, router, settings, held, needs_cards=True))
        await stack.enter_async_context(busy_filter(workers, None if thresholds is None else thresholds.thresholds))
        yield _Routing(workers, held.chains if held is not None else chains, learns=held is None)


class EndpointKvRouter:
    """Chooses the worker for a prompt, and sends it there. Used on the event loop of its endpoint's runtime.

    It may be made in a thread, too. The workers that are registered are known to its first call. It ends with its runtime, when it is collected, or by `close`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        block_size: int,
        kv_router_config: KvRouterConfig,
        ais_perf_config: object | None = None,
        session_affinity_ttl_secs: int | None = None,
        *,
        load_threshold_config: LoadThresholdConfig | None = None,
        session_affinity_mode: str = "hard",
    ) -> None:
        """Raises TypeError and ValueError for arguments that are none, NotImplementedError for what is not built."""
        if not isinstance(endpoint, Endpoint):
            raise TypeError(f"endpoint must be an Endpoint, got {type(endpoint).__name__}")
        if not isinstance(kv_router_config, KvRouterConfig):
            raise TypeError(f"kv_router_config must be a KvRouterConfig, got {type(kv_router_config).__name__}")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        check_affinity(session_affinity_ttl_secs, session_affinity_mode)
        if ais_perf_config is not None:
            raise NotImplementedError("KvRouter(ais_perf_config=...): not built in dynamo-unified's KvRouter")
        self._block_size = block_size
        settings = replace(
            kv_router_config.settings(),
            router_session_affinity_ttl_secs=session_affinity_ttl_secs,
            router_session_affinity_mode=session_affinity_mode,
        )
        opening = _routing(endpoint, block_size, settings, load_threshold_config)
        self._opened = Opened(self, endpoint, opening, name="KvRouter")

    async def close(self) -> None:
        """Stop following the workers. Idempotent."""
        await self._opened.close()

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        token_ids: Sequence[int],
        model: str,
        stop_conditions: Mapping[str, Any] | None = None,
        sampling_options: Mapping[str, Any] | None = None,
        output_options: Mapping[str, Any] | None = None,
        router_config_override: Mapping[str, Any] | None = None,
        worker_id: int | None = None,
        dp_rank: int | None = None,
        extra_args: Any = None,
        block_mm_infos: MediaInfos | None = None,
        multi_modal_data: Any = None,
        mm_routing_info: Mapping[str, Any] | None = None,
        routing_constraints: TaintConstraints | None = None,
        response_buffer_size: int = 100,
    ) -> ChunkStream:
        """Send a prompt to the worker with the lowest cost, or to `worker_id`; return the chunks of its answer.

        The load is booked until the answer ends, or is dropped: then its request is cancelled. `block_mm_infos` is short for
        an `mm_routing_info` with the prompt's own tokens.
        """
        body: dict[str, Any] = {"model": model, "token_ids": token_ids, "stop_conditions": stop_conditions}
        body |= {"sampling_options": sampling_options, "output_options": output_options}
        routing: dict[str, Any] = {}
        if worker_id is not None:
            routing["backend_instance_id"] = worker_id
        if dp_rank is not None:
            routing["dp_rank"] = dp_rank
        if routing_constraints is not None:
            routing["routing_constraints"] = routing_constraints.as_hint()
        body |= {"routing": routing, "router_config_override": router_config_override}
        if mm_routing_info is None and block_mm_infos is not None:
            mm_routing_info = {"block_mm_infos": block_mm_infos}
        for name, value in (
            ("extra_args", extra_args),
            ("multi_modal_data", multi_modal_data),
            ("mm_routing_info", mm_routing_info),
        ):
            if value is not None:
                body[name] = value
        return await self.generate_from_request(body, response_buffer_size)

    async def generate_from_request(self, request: Mapping[str, Any], response_buffer_size: int = 100) -> ChunkStream:
        """Send a worker's request, as `generate` does. What travels is bounded by the request plane's credits, whatever
        `response_buffer_size` is."""
        if response_buffer_size < 0:
            raise ValueError("response_buffer_size must be non-negative")
        received, received_at = time.monotonic(), time.time()
        if "token_ids" not in request:
            raise InvalidArgument("missing field `token_ids`")
        body = _completed(request)
        body["token_ids"] = _tokens(body["token_ids"])
        query = kv_query_of(body)
        routing = await self._opened.value()
        answer = await routing.workers.open(body, Context(), query=routing.hashed(query, self._block_size))
        return ChunkStream(answer, self._block_size, received=received, received_at=received_at)

    # -- questions ---------------------------------------------------------------------------------------------------

    async def best_worker(
        self,
        token_ids: Sequence[int],
        router_config_override: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        update_indexer: bool = False,
        block_mm_infos: MediaInfos | None = None,
        lora_name: str | None = None,
        routing_constraints: TaintConstraints | None = None,
        strict_priority: int = 0,
        policy_class: str | None = None,
        cache_namespace: str | None = None,
    ) -> tuple[int, int, int]:
        """Return (worker id, rank, blocks of the prompt that it holds) of the worker with the lowest cost.

        With `request_id` the request is booked there until `free`. With a `router_queue_threshold` this waits for the turn of
        the request, in its `policy_class`. `update_indexer`: where caches are guessed from where prompts go
        (`use_kv_events=False`), the prompt counts as sent there.
        """
        constraints = routing_constraints or TaintConstraints()
        query = self._query(token_ids, block_mm_infos, lora_name, cache_namespace)
        query.required_taints, query.preferred_taints = constraints.required_taints, constraints.preferred_taints
        query.overrides = kv_query_of({"token_ids": [], **_known_overrides(router_config_override)}).overrides
        query.strict_priority = strict_priority
        routing = await self._opened.value()
        selection = await routing.turn_of(routing.hashed(query, self._block_size), policy_class)
        router, now = routing.router, _now()
        if request_id is not None and not router.book(request_id, selection, now, is_learned=False):
            raise InvalidArgument(f"Request {request_id} already exists")
        if update_indexer and routing.learns:
            router.learn(selection, now)
        return (*selection.rank, selection.overlap.device)

    async def mark_prefill_complete(self, request_id: str) -> None:
        """Count the first token of a request that `best_worker` booked. Raises InvalidArgument for an unknown id."""
        router = (await self._opened.value()).router
        if request_id not in router.load:
            raise InvalidArgument(f"Request {request_id} not found")
        router.first_token(request_id, _now())

    async def free(self, request_id: str) -> None:
        """End a request that `best_worker` booked. Raises InvalidArgument for an unknown id."""
        if (await self._opened.value()).router.free(request_id, _now()) is None:
            raise InvalidArgument(f"Request {request_id} not found")

    async def get_potential_loads(
        self,
        token_ids: Sequence[int],
        block_mm_infos: MediaInfos | None = None,
        lora_name: str | None = None,
        cache_namespace: str | None = None,
    ) -> list[dict[str, int]]:
        """Return what the load of each rank would be with a prompt; the unfinished last block counts for no rank."""
        query = self._query(token_ids, block_mm_infos, lora_name, cache_namespace)
        routing = await self._opened.value()
        unfinished = 1 if len(query.token_ids) % self._block_size else 0
        return [
            {
                "worker_id": each.rank.worker_id,
                "dp_rank": each.rank.dp_rank,
                "potential_prefill_tokens": each.potential_prefill_tokens,
                "potential_decode_blocks": round(each.potential_decode_blocks) - unfinished,
                "active_requests": each.active_requests,
            }
            for each in routing.router.potential_loads(routing.hashed(query, self._block_size), _now())
        ]

    async def get_overlap_scores(
        self,
        token_ids: Sequence[int],
        router_config_override: Mapping[str, Any] | None = None,
        block_mm_infos: MediaInfos | None = None,
        lora_name: str | None = None,
        include_shared: bool = True,
        cache_namespace: str | None = None,
    ) -> dict[str, object]:
        """Return the blocks of a prompt that each rank holds, by tier, unweighed. An override changes nothing, and there is
        no shared cache to query."""
        query = self._query(token_ids, block_mm_infos, lora_name, cache_namespace)
        routing = await self._opened.value()
        return overlap_scores(routing.router, routing.hashed(query, self._block_size), _now())

    async def dump_events(self) -> str:
        """Return the events, as a JSON list, that store what the ranks hold as far as the router knows.

        Raises InvalidArgument for a router that ignores caches (`overlap_score_credit` 0).
        """
        chains = (await self._opened.value()).chains
        if chains is None:
            raise InvalidArgument("event dumping requires a KV indexer: overlap_score_credit is 0")
        return msgspec.json.encode(chains.events()).decode()

    def _query(
        self,
        token_ids: Sequence[int],
        block_mm_infos: MediaInfos | None,
        lora_name: str | None,
        cache_namespace: str | None,
    ) -> KvQuery:
        return KvQuery(
            token_ids=_tokens(token_ids),
            lora_name=lora_name,
            cache_salt=cache_namespace,
            mm_hashes=media_of_blocks(block_mm_infos),
        )


class ChunkStream(AsyncIterator[dict[str, Any]]):
    """The chunks of one answer, to be iterated once. One that is dropped half-read cancels its request.

    Raises ValueError for an error of the worker.
    """

    def __init__(self, answer: RoutedAnswer, block_size: int, *, received: float, received_at: float) -> None:
        self._answer, self._block_size = answer, block_size
        self._items = ClientStream(answer, answer.request.context, False, _nothing)
        self._received, self._received_at, self._opened = received, received_at, time.monotonic()
        self._first: float | None = None

    def __aiter__(self) -> ChunkStream:
        return self

    async def __anext__(self) -> dict[str, Any]:
        data = await anext(self._items)
        if not isinstance(data, dict) or "token_ids" not in data:
            return data  # an object of the handler's own
        if self._first is None:
            self._first = time.monotonic()
        chunk = {**_CHUNK, **data}
        if chunk["finish_reason"] is not None:
            of_engine = chunk.get("routing_data")
            chunk["routing_data"] = {
                **(of_engine if isinstance(of_engine, dict) else {}), "timing": self._timing(self._first)
            }  # fmt: skip
        return chunk

    async def aclose(self) -> None:
        """Leave; what has not ended is cancelled. Idempotent."""
        await self._items.aclose()

    def _timing(self, first: float) -> dict[str, float]:
        selection = self._answer.selection
        assert selection is not None, "an answer has come"
        blocks = -(-selection.state.request.prompt_tokens // self._block_size)
        return {
            "request_received_ms": int(self._received_at * _MILLISECONDS),
            "prefill_wait_time_ms": (self._opened - self._received) * _MILLISECONDS,
            "prefill_time_ms": (first - self._opened) * _MILLISECONDS,
            "ttft_ms": (first - self._received) * _MILLISECONDS,
            "total_time_ms": (time.monotonic() - self._received) * _MILLISECONDS,
            "kv_hit_rate": selection.overlap.device / blocks if blocks else 0.0,
            "router_queue_depth": 0,
        }


def _completed(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request with the members that a worker may count on."""
    body: dict[str, Any] = {"eos_token_ids": [], "mdc_sum": None, "annotations": [], "routing": {}, **request}
    for name, members in (("stop_conditions", _STOPS), ("sampling_options", _SAMPLING), ("output_options", _OUTPUT)):
        given = body.get(name)
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(f"{name} must be an object, got {type(given).__name__}")
        body[name] = {**dict.fromkeys(members), **(given or {})}
    body |= {"router_config_override": None, **_known_overrides(body.get("router_config_override"))}
    return body


def _known_overrides(given: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Return the override of a request without members that no router knows, which the native router ignores."""
    if not given:
        return {}
    if unknown := sorted(given.keys() - _OVERRIDES):
        logger.warning("router_config_override: %s has no effect", ", ".join(unknown))
    return {"router_config_override": {name: value for name, value in given.items() if name in _OVERRIDES}}


def _tokens(token_ids: object) -> list[int]:
    """Return a prompt. Raises TypeError for anything but integers, OverflowError for one that is not unsigned 32-bit."""
    if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Sequence):
        raise TypeError(f"token_ids must be a sequence of token ids, got {type(token_ids).__name__}")
    tokens = list(token_ids)
    if not all(isinstance(each, int) for each in tokens):
        raise TypeError("token_ids must be integers")
    if tokens and not (min(tokens) >= 0 and max(tokens) < _TOKENS):
        raise OverflowError("a token id is an unsigned 32-bit integer")
    return tokens


def _nothing(_error: DynamoException) -> None:
    """Ignore a failure: the client that the answer came through has taken note of it."""


def _now() -> float:
    return asyncio.get_running_loop().time()
