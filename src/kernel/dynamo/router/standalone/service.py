"""The router as a service of its own: three endpoints in front of the workers of another one.

    {namespace}.router.generate             a worker's request; the answer of the worker that was chosen
    {namespace}.router.best_worker_id       a list of token ids; the id of the worker that would be chosen
    {namespace}.router.get_overlap_scores   {"token_ids": [...]}; what each rank holds of the prompt

Any worker endpoint can be behind it: those of prefill workers, or of a pool that another router sends to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final, Self

from dynamo.errors import InvalidArgument
from dynamo.kv.overlap import Overlap, WorkerRank
from dynamo.placement.kv_query import KvQuery
from dynamo.router.kv.router import KvRouter
from dynamo.router.kv.settings import KvRouterSettings
from dynamo.router.standalone.routed_endpoint import RoutedEndpoint, kv_query_of, token_ids_of
from dynamo.router.workers.busy_settings import BusySettings
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import OBJECT_INDEX, Handler, ResponseSink
from dynamo.runtime.served_endpoint import ServedEndpoint
from dynamo.settings.readers import SettingReader, integer
from dynamo.settings.table import section, setting

_GROUP: Final = "router"


def _endpoint(given: str) -> str:
    parts = given.removeprefix("dyn://").split(".")
    if len(parts) != 3 or not all(parts) or "/" in given.removeprefix("dyn://"):
        raise ValueError(f"an endpoint is NAMESPACE.COMPONENT.ENDPOINT, got {given!r}")
    return ".".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterServiceSettings(BusySettings):
    """What an operator sets for the standalone router."""

    # fmt: off
    endpoint: str | None = setting(None, "DYN_ROUTER_ENDPOINT", SettingReader(_endpoint, metavar="PATH"),
        "The workers' endpoint, such as `prod.prefill.generate`. Needed. The router serves "
        "`{namespace}.router.generate`, `.best_worker_id` and `.get_overlap_scores`", flag="--endpoint", group=_GROUP)
    block_size: int = setting(128, "DYN_ROUTER_BLOCK_SIZE", integer(1),
        "Tokens of a KV block; must be that of the workers", flag=("--router-block-size", "--block-size"), group=_GROUP)
    # fmt: on
    kv: KvRouterSettings = section(KvRouterSettings)


COMPONENT: Final = "router"

_NOTHING: Final = Overlap()


class RouterService:
    """Serves the three endpoints for `workers`, which is entered. Use as `async with RouterService(workers): ...`"""

    def __init__(self, workers: RoutedEndpoint) -> None:
        self._workers = workers
        self._stack = AsyncExitStack()
        self._served: list[ServedEndpoint] = []

    async def __aenter__(self) -> Self:
        workers = self._workers.endpoint
        try:
            for name, handler in self._handlers().items():
                endpoint = workers.runtime.endpoint(f"{workers.namespace}.{COMPONENT}.{name}")
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

    async def generate(self, body: object, context: Context, sink: ResponseSink) -> None:
        """Send a worker's request where its prefix lies, and pass on the answer."""
        answer = await self._workers.open(_object(body), context)
        try:
            while items := await answer.next_batch():
                for item in items:
                    if item.index == OBJECT_INDEX:
                        sink.send_object(item.extra or {})
                    else:
                        sink.send_tokens(item.token_ids, item.index, item.finish_reason, item.extra)
                    if not sink.has_credit():
                        await sink.wait_credit()
        finally:
            answer.close()

    async def best_worker_id(self, body: object, context: Context, sink: ResponseSink) -> None:
        """Answer with the worker that a prompt would go to. Nothing is booked."""
        query = KvQuery(token_ids=token_ids_of(body))
        sink.send_object({"data": self._workers.router.select(query, _now()).rank.worker_id})

    async def get_overlap_scores(self, body: object, context: Context, sink: ResponseSink) -> None:
        """Answer with the blocks of a prompt that each rank holds, unweighed."""
        sink.send_object({"data": overlap_scores(self._workers.router, kv_query_of(_object(body)), _now())})


def overlap_scores(router: KvRouter, query: KvQuery, now: float) -> dict[str, object]:
    """Return the native record of what each rank holds of a prompt, unweighed."""
    lookup = router.look_up(query, now)
    return {
        "block_size": router.block_size,
        "num_blocks": len(lookup.sequence),
        "workers": [_scores(rank, lookup.overlaps.get(rank, _NOTHING)) for rank in sorted(router.ranks)],
        "shared_cache": {"enabled": False, "total_hit_blocks": 0, "ranges": [], "error": None},
    }


def _object(body: object) -> Mapping[str, object]:
    if not isinstance(body, dict):
        raise InvalidArgument("the request must be an object with `token_ids`")
    return body


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


def _now() -> float:
    return asyncio.get_running_loop().time()
