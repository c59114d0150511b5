"""What the sinks of every plane keep of their request."""

from __future__ import annotations

from dynamo.runtime.calls.context import Context


class SinkRecord:
    """The base of a sink."""

    __slots__ = ("_object_bytes", "context", "failure", "request_bytes")

    def __init__(self, context: Context, request_bytes: int = 0) -> None:
        self.context = context
        self.failure: BaseException | None = None  # what `end` was given
        self.request_bytes = request_bytes
        self._object_bytes = 0  # encoded, of the objects sent so far
