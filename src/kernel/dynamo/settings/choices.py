"""Values of settings that several commands offer, in a module that costs nothing to import."""

from __future__ import annotations

from typing import Final

ROUTER_MODES: Final = (
    "round-robin", "random", "power-of-two", "least-loaded", "kv", "direct", "device-aware-weighted",
)  # fmt: skip
FAILURE_KINDS: Final = ("unavailable", "overloaded", "timeout", "failed")
"""The failures for which another model may serve a request."""
