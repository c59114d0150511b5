"""The limits of the frontend's HTTP connections, and how their refusals look."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Final

from dynamo.frontend.http.request_id import HEADER, client_request_id
from dynamo.frontend.settings import FrontendSettings
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.runtime.http import HttpLimits, Rejection

__all__ = ["LIMITS", "http_limits", "render_rejection"]

LIMITS: Final = (
    "connections",
    "header_size",
    "header_count",
    "header_time",
    "body_size",
    "body_time",
    "body_framing",
    "pending_bodies",
    "pipeline",
    "idle",
    "write_stall",
    "malformed",
    "json_depth",
    "json_containers",
    "json_members",
    "body_tokens",
    "json_items",
    "messages",
    "models",
    "card_size",
    "guided_brackets",
    "guided_characters",
    "guided_depth",
    "guided_nodes",
    "guided_references",
    "guided_rules",
    "handshakes",
    "handshake_time",
    "handshake",
)
"""The labels under which refusals are counted."""


def http_limits(settings: FrontendSettings, *, max_connections: int, kind: type[HttpLimits] = HttpLimits) -> HttpLimits:
    """Return the limits of a connection; the settings are those of `docs/settings.md`."""
    return kind(
        prefix="HTTP",
        connections=max_connections,
        header_bytes=settings.header_limit_bytes,
        header_count=settings.header_count_limit,
        header_seconds=settings.header_timeout_seconds,
        body_bytes=settings.body_limit_bytes,
        body_seconds=settings.body_timeout_seconds,
        pipeline=settings.pipeline_limit,
        idle_seconds=settings.idle_connection_seconds,
        write_stall_seconds=settings.write_stall_seconds,
    )


def render_rejection(
    rejection: Rejection, request_headers: Sequence[tuple[bytes, bytes]]
) -> tuple[Mapping[bytes, bytes], bytes]:
    """Write a refusal of the listener as the errors of the API look."""
    rejected = RequestRejected(
        rejection.status, rejection.text, retry_after_seconds=rejection.retry_after_seconds, limit=rejection.limit
    )
    request_id = client_request_id(dict(request_headers)) or str(uuid.uuid4())
    headers = {name.lower().encode(): value.encode() for name, value in rejected.headers().items()}
    return {b"content-type": b"application/json", HEADER: request_id.encode(), **headers}, rejected.body()
