"""Elastic expert parallelism: a running vLLM gets more ranks, or fewer, where it was started for that, on Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final

from dynamo.errors import InvalidArgument

logger = logging.getLogger(__name__)

SIZE: Final = "new_data_parallel_size"
NOT_ENABLED: Final = (
    "elastic EP scaling is not enabled on this worker; it requires enable_elastic_ep=true and data_parallel_backend=ray"
)


class ElasticExperts:
    """The ranks of one engine. On the event loop only."""

    def __init__(self, client: Any, parallel: Any) -> None:
        """`client`: vLLM's `AsyncLLM`. `parallel`: its `ParallelConfig`, whose size vLLM keeps up to date; None: one rank."""
        self._client, self._parallel = client, parallel
        self._is_scaling = False
        self.failure = ""  # why the engine is neither what it was nor what it was to become

    async def scale(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Change the number of data-parallel ranks. Raises InvalidArgument for a size that is not one, and while a scale runs."""
        size = body.get(SIZE)
        if size is None:
            raise InvalidArgument(f"Missing required field: {SIZE}")
        if type(size) is not int:
            raise InvalidArgument(f"{SIZE} must be an integer, got: {size}")
        if size < 1:
            raise InvalidArgument(f"{SIZE} must be >= 1, got: {size}")
        self._check_enabled()
        if self._is_scaling:
            raise InvalidArgument(
                f"A scale_elastic_ep operation is already in progress; rejecting concurrent request for {SIZE}={size}"
            )
        self._is_scaling = True
        try:
            await self._client.scale_elastic_ep(size)
        except BaseException as error:
            self.failure = f"scale_elastic_ep to {size} ranks failed: {type(error).__name__}: {error}"
            logger.error("%s; the worker ends", self.failure)
            raise
        finally:
            self._is_scaling = False
        return {"message": f"Scaled to data_parallel_size={size}", SIZE: size}

    async def capacity(self) -> dict[str, Any]:
        """Return how many ranks there are, and the GPUs of the Ray cluster. Raises InvalidArgument without elastic EP."""
        self._check_enabled()
        parallel = self._parallel
        return {
            "data_parallel_size": parallel.data_parallel_size,
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "data_parallel_backend": parallel.data_parallel_backend,
            "data_parallel_external_lb": bool(getattr(parallel, "data_parallel_external_lb", False)),
            **await asyncio.to_thread(_gpus),
        }

    def _check_enabled(self) -> None:
        parallel = self._parallel
        if not getattr(parallel, "enable_elastic_ep", False) or parallel.data_parallel_backend != "ray":
            raise InvalidArgument(NOT_ENABLED)


def _gpus() -> dict[str, Any]:
    import ray

    total, available = (int(found.get("GPU", 0)) for found in (ray.cluster_resources(), ray.available_resources()))
    nodes = [
        {
            "node_id": node["NodeID"],
            "address": node["NodeManagerAddress"],
            "total_gpus": int(node["Resources"].get("GPU", 0)),
        }
        for node in ray.nodes()
        if node["Alive"]
    ]
    return {"total_gpus": total, "available_gpus": available, "used_gpus": total - available, "nodes": nodes}
