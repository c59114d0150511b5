"""The parts of `dynamo.runtime.planes` that speak the native wire, over TCP and over NATS."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from dynamo.runtime.base.addresses import bind_host
from dynamo.runtime.calls.request_plane.base import RequestPlaneClient
from dynamo.runtime.calls.request_plane.metrics import REFUSALS, RefusalMetrics
from dynamo.runtime.calls.request_plane.native.call_home import CallHomeListener
from dynamo.runtime.planes import NATS_REQUESTS, NATS_WORKERS, CoreServer, PlaneParts

__all__ = ["call_home", "native_client", "nats_client", "nats_server"]


def call_home(parts: PlaneParts) -> CallHomeListener:
    """Return where workers that answer by calling home reach this process."""
    host = bind_host(parts.names.store, parts.requests.response_host, "") or None
    return CallHomeListener(replace(parts.requests, response_host=host), parts.security.server)


def nats_server(parts: PlaneParts) -> CoreServer:
    """Return the worker's side of the native wire over NATS."""
    from dynamo.runtime.calls.request_plane.listener import LIMITS
    from dynamo.runtime.calls.request_plane.native.nats_server import NatsServer

    refusals = RefusalMetrics(parts.metrics, REFUSALS["tcp"], LIMITS)
    server = NatsServer(parts.nats(NATS_REQUESTS), parts.requests, refused=refusals.count, security=parts.security)
    return server, server.core


def native_client(parts: PlaneParts) -> RequestPlaneClient:
    """Return the caller's side of the native wire over TCP."""
    from dynamo.runtime.calls.request_plane.native.client import NativeClient

    home, waited = cast(CallHomeListener, parts.call_home), parts.caller_metrics.queue_seconds.observe
    return NativeClient(parts.requests, home, waited=waited, security=parts.security)


def nats_client(parts: PlaneParts) -> RequestPlaneClient:
    """Return the caller's side of the native wire over NATS."""
    from dynamo.runtime.calls.request_plane.native.nats_client import NatsClient

    return NatsClient(
        parts.nats(NATS_WORKERS),
        cast(CallHomeListener, parts.call_home),
        request_timeout_seconds=parts.requests.nats_timeout_seconds,
        waited=parts.caller_metrics.queue_seconds.observe,
    )
