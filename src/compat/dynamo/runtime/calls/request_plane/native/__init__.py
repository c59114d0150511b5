"""The TCP wire of ai-dynamo 1.6, worker side: our workers serve behind a native frontend."""

from __future__ import annotations

from dynamo.runtime.calls.request_plane.native.server import NativeServer

__all__ = ["NativeServer"]
