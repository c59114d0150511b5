"""Reading the answer of a request plane to its end."""

from __future__ import annotations

from dynamo.runtime.calls.request_plane.base import ResponseStream, StreamItem

__all__ = ["read_all"]


async def read_all(stream: ResponseStream) -> list[StreamItem]:
    """Return every item of a stream, and leave the stream."""
    items: list[StreamItem] = []
    try:
        while batch := await stream.next_batch():
            items += batch
    finally:
        stream.close()
    return items
