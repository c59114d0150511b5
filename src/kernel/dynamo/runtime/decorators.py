"""The two decorators of the native Python surface, and its unary helpers."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.handler import takes_context
from dynamo.runtime.calls.request_plane.base import RequestStream
from dynamo.runtime.client import Client, ClientStream
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.endpoint import Endpoint, MetricsLabels

P = ParamSpec("P")
T = TypeVar("T")


def dynamo_worker(
    enable_nats: bool | Callable[..., object] | None = None,
) -> Callable[[Callable[Concatenate[DistributedRuntime, P], Awaitable[T]]], Callable[P, Awaitable[T]]]:
    """Turn `async def worker(runtime, *args)` into `async def worker(*args)` with a runtime made from the environment.

    The runtime is closed when the function returns. No signal handlers are installed.
    """

    def decorate(function: Callable[Concatenate[DistributedRuntime, P], Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        @functools.wraps(function)
        async def run(*args: P.args, **kwargs: P.kwargs) -> T:
            nats = None if callable(enable_nats) else enable_nats
            runtime = DistributedRuntime(asyncio.get_running_loop(), None, None, nats)
            async with runtime:
                return await function(runtime, *args, **kwargs)

        return run

    # `@dynamo_worker` without parentheses is understood, too.
    return decorate(enable_nats) if callable(enable_nats) else decorate  # type: ignore[arg-type, return-value]


def dynamo_endpoint(
    request_model: object, response_model: object
) -> Callable[[Callable[..., AsyncIterable[object]]], Callable[..., AsyncIterator[object]]]:
    """Parse the request (JSON text or a dict) into a pydantic model before the async generator sees it.

    A request that does not fit raises ValueError "Invalid request: ...". Models that are yielded travel as dicts.
    """

    def decorate(function: Callable[..., AsyncIterable[object]]) -> Callable[..., AsyncIterator[object]]:
        @functools.wraps(function)
        async def handle(*args: object, **kwargs: object) -> AsyncIterator[object]:
            found = list(args)
            # The request is the last argument, or the one before the context; a method has `self` in front.
            position = len(found) - 2 if found and isinstance(found[-1], Context) else len(found) - 1
            if position >= 0:
                found[position] = _parse(request_model, found[position])
            async for item in function(*found, **kwargs):
                yield item.model_dump(mode="json") if hasattr(item, "model_dump") else item

        return handle

    return decorate


def _parse(model: object, request: object) -> object:
    if not hasattr(model, "model_validate"):
        return request  # `str` or `dict` in place of a model: nothing to check
    try:
        return model.model_validate(json.loads(request) if isinstance(request, str | bytes) else request)
    except ValueError as error:  # pydantic's and json's errors are both one
        raise ValueError(f"Invalid request: {error}") from error


async def serve_unary_endpoint(
    endpoint: Endpoint,
    handler: Callable[..., Awaitable[object]],
    *,
    graceful_shutdown: bool = True,
    metrics_labels: MetricsLabels | None = None,
    health_check_payload: Mapping[str, object] | None = None,
) -> None:
    """Serve `async def handler(request[, context])` that returns one value; see `Endpoint.serve_endpoint`.

    The context may be a parameter that is given by its name only.
    """
    with_context = takes_context(handler)
    named = inspect.signature(handler).parameters.get("context")
    by_name = named is not None and named.kind is named.KEYWORD_ONLY

    async def stream(request: object, context: Context) -> AsyncIterator[object]:
        if by_name:
            yield await handler(request, context=context)
        else:
            yield await (handler(request, context) if with_context else handler(request))

    await endpoint.serve_endpoint(stream, graceful_shutdown, metrics_labels, health_check_payload)


class UnaryClient:
    """Calls an endpoint whose answer is one value."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def generate(self, request: object, context: Context | None = None) -> Any:
        """Return the one value of the answer. Raises as `ClientStream` does, and ValueError when the answer is
        empty.
        """
        stream = await self._client.generate(request, annotated=False, context=context)
        return await self._only(stream)

    async def complete(self, request: object, *, context: Context | None = None) -> Any:
        """Return the one value of the answer, as `generate`."""
        return await self.generate(request, context)

    async def direct(self, request: object, instance_id: int, context: Context | None = None) -> Any:
        """Return the one value of an answer from the given instance."""
        stream = await self._client.direct(request, instance_id, annotated=False, context=context)
        return await self._only(stream)

    @staticmethod
    async def _only(stream: ClientStream) -> Any:
        try:
            async for value in stream:
                return value
        finally:
            await stream.aclose()
        raise ValueError("Unavailable: the answer was empty")


PyAsyncRequestStream = RequestStream
"""What the handler of a bidirectional endpoint iterates over; the native name."""
