"""What a worker without an engine class needs before it has a runtime: names, endpoint types, the runtime itself."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable
from typing import Any, Final

from dynamo.contract.config import NAMESPACE_SUFFIX
from dynamo.contract.endpoint_name import parse_endpoint
from dynamo.protocol.model_types import ModelType
from dynamo.protocol.model_types import parse_endpoint_types as parse_surfaces
from dynamo.runtime import DistributedRuntime

__all__ = ["create_runtime", "get_worker_namespace", "parse_endpoint", "parse_endpoint_types", "run_async"]

DEFAULT_NAMESPACE: Final = "dynamo"


def parse_endpoint_types(endpoint_types_str: str) -> ModelType:
    """Read a comma list of OpenAI surfaces; `none` alone is a worker that clients do not see. Raises ValueError."""
    words = [word.strip().lower() for word in endpoint_types_str.split(",")]
    if "none" in words:
        if len(words) > 1:
            raise ValueError("the endpoint type 'none' cannot be combined with others")
        return ModelType.Empty
    try:
        return parse_surfaces(endpoint_types_str)
    except Exception as error:
        raise ValueError(str(error)) from error


def get_worker_namespace(namespace: str | None = None) -> str:
    """Return the namespace of this worker: the argument, else DYN_NAMESPACE, else "dynamo".

    DYN_NAMESPACE_WORKER_SUFFIX, when set, is appended with a dash.
    """
    found = namespace or os.environ.get("DYN_NAMESPACE") or DEFAULT_NAMESPACE
    suffix = NAMESPACE_SUFFIX.value(os.environ)
    return f"{found}-{suffix}" if suffix else found


def create_runtime(
    discovery_backend: str,
    request_plane: str,
    event_plane: str | None = None,
    use_kv_events: bool | None = None,
    response_plane: str = "tcp",
) -> tuple[DistributedRuntime, asyncio.AbstractEventLoop]:
    """Make a runtime on the running event loop, and return both. `use_kv_events` has no effect."""
    del use_kv_events
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(
        loop, discovery_backend, request_plane, event_plane=event_plane, response_plane=response_plane
    )
    return runtime, loop


async def run_async(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `func` and return its result: a coroutine function is awaited, any other runs in a thread."""
    if inspect.iscoroutinefunction(func):
        return await func(*args, **kwargs)
    return await asyncio.to_thread(func, *args, **kwargs)
