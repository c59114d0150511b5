"""The name of a request by its content: equal requests have equal keys, in every process. Pure.

A recording names its answers by it, and the engine that answers from a recording finds them by it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import msgspec

# How the answer travels, the client, and where the request is routed: none of it changes the content.
_LEFT_OUT: Final = frozenset(
    {"stream", "stream_options", "nvext", "user", "metadata", "store", "model", "service_tier"}
)


def content_key(body: Mapping[str, Any]) -> str:
    """Return the key of a request in the form in which a worker that takes text gets it. Members that are null do not count."""
    asked = {name: value for name, value in body.items() if value is not None and name not in _LEFT_OUT}
    encoded = msgspec.json.encode(asked, order="deterministic")
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()
