"""The names of the frontend's limits, and the form of their refusals."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Final

from dynamo.frontend.base.request_id import client_request_id
from dynamo.protocol.dialect import OPENAI
from dynamo.protocol.messages.errors import MESSAGES, VERSION_HEADER
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.runtime.base.http_limits import Rejection

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
    "json_structure",
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


def render_rejection(
    rejection: Rejection, request_headers: Sequence[tuple[bytes, bytes]]
) -> tuple[Mapping[bytes, bytes], bytes]:
    """Write a refusal of the listener in the form of the API's errors."""
    rejected = RequestRejected(
        rejection.status, rejection.text, retry_after_seconds=rejection.retry_after_seconds, limit=rejection.limit
    )
    given = dict(request_headers)
    request_id = client_request_id(given) or str(uuid.uuid4())
    # Of a refused request not even the path may be known; Anthropic's clients name the version of their API in a header.
    dialect = MESSAGES if VERSION_HEADER in given else OPENAI
    headers = {name.lower().encode(): value.encode() for name, value in rejected.headers().items()}
    named = dict.fromkeys(dialect.id_headers, request_id.encode())
    return {b"content-type": b"application/json", **named, **headers}, dialect.error_body(rejected, request_id)
