"""How an inference API writes what is not an answer of the model: a rejection, the failure of a stream, a sign of life.

Every route of an API speaks its dialect, also before anything of the request was decoded (413, 415, 503, 529).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final

from msgspec import Struct

from dynamo.protocol.openai.errors import RequestRejected, model_not_found
from dynamo.protocol.openai.sse import DONE, KEEP_ALIVE


class RateStatus(Struct, frozen=True, gc=False):
    """How far a rate limit is used."""

    kind: str  # "requests" or "tokens"
    limit: int
    remaining: int
    reset_seconds: float
    reset_at: float  # seconds since the epoch


_RATE_HEADERS: Final = {
    kind: tuple([b"x-ratelimit-%b-%b" % (what, kind.encode()) for what in (b"limit", b"remaining", b"reset")])
    for kind in ("requests", "tokens")
}


class Dialect(ABC):
    """The shapes one API has for these; without state, so that one value serves all requests."""

    keep_alive: ClassVar[bytes] = KEEP_ALIVE  # sent when a stream has been silent for too long
    stream_type: ClassVar[bytes] = b"text/event-stream"
    id_headers: ClassVar[tuple[bytes, ...]] = (b"x-request-id",)  # of every answer, each with the id of the request

    @abstractmethod
    def error_body(self, rejected: RequestRejected, request_id: str) -> bytes:
        """Return the JSON body of an answer with `rejected.status`."""

    @abstractmethod
    def stream_failure(self, rejected: RequestRejected, request_id: str) -> bytes:
        """Return the last bytes of a stream that fails once its status is sent."""

    def rate_headers(self, status: RateStatus) -> tuple[tuple[bytes, bytes], ...]:
        """Return the headers that report how far a rate limit is used."""
        limit, remaining, reset = _RATE_HEADERS[status.kind]
        return (
            (limit, b"%d" % status.limit),
            (remaining, b"%d" % status.remaining),
            (reset, span_text(status.reset_seconds).encode()),
        )

    def unknown_model(self, model: str, served: Sequence[str] = ()) -> RequestRejected:
        """Return the rejection of a request for a model that is not served; `served`: those that this client may use."""
        return model_not_found(model, served)


class OpenAiDialect(Dialect):
    """OpenAI's shapes, with the flat members of 1.6.1 beside them."""

    def error_body(self, rejected: RequestRejected, request_id: str) -> bytes:
        return rejected.body()

    def stream_failure(self, rejected: RequestRejected, request_id: str) -> bytes:
        return rejected.frame() + DONE


def span_text(seconds: float) -> str:
    """Write a length of time as OpenAI does: `12ms`, `1.5s`, `6m0s`, `2h0m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60:
        return f"{round(seconds, 3):g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60}m{rest}s"


OPENAI: Final = OpenAiDialect()
