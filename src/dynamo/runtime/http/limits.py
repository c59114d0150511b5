"""What one listener allows its clients, and how it declines what is beyond."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

__all__ = ["LINGER_SECONDS", "SPARE_CONNECTIONS", "HttpLimits", "Rejection", "RenderRejection"]

LINGER_SECONDS: Final = 2.0
"""After a refusal the client may still be sending. Closing at once would make the kernel answer that with a reset, which
throws away the refusal before it is read; so for this long what comes is read and dropped."""

SPARE_CONNECTIONS: Final = (
    64  # beyond the limit, for as many clients at once to get a refusal; the others are just closed
)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Sizes in bytes, times in seconds. `prefix` begins the names of the settings that an answer names."""

    prefix: str  # "HTTP"; after "DYN_"
    connections: int
    header_bytes: int
    header_count: int
    header_seconds: float
    body_bytes: int  # checked here only for what still arrives after the answer; the application checks it before
    body_seconds: float
    pipeline: int
    idle_seconds: float
    write_stall_seconds: float
    header_time_name: str = "HEADER"  # inside the names of the settings of the two times
    body_time_name: str = "BODY"

    def too_many_connections(self) -> Rejection:
        text = f"More than {self.connections} connections, the limit set by DYN_{self.prefix}_MAX_CONNECTIONS"
        return Rejection(503, text, "connections", retry_after_seconds=1)

    def head_too_long(self) -> Rejection:
        kib = self.header_bytes // 1024
        text = f"Request line and headers exceed the limit of {kib} KiB set by DYN_{self.prefix}_HEADER_LIMIT_KB"
        return Rejection(431, text, "header_size")

    def too_many_headers(self) -> Rejection:
        text = f"More than {self.header_count} headers, the limit set by DYN_{self.prefix}_HEADER_COUNT_LIMIT"
        return Rejection(431, text, "header_count")

    def too_many_requests(self) -> Rejection:
        text = f"More than {self.pipeline} requests wait, the limit set by DYN_{self.prefix}_PIPELINE_LIMIT"
        return Rejection(429, text, "pipeline", retry_after_seconds=1)

    def too_much_framing(self) -> Rejection:
        text = (
            f"The chunk extensions and trailers of the body exceed the limit set by DYN_{self.prefix}_HEADER_LIMIT_KB"
        )
        return Rejection(431, text, "body_framing")

    def headers_too_late(self) -> Rejection:
        return self._late("headers", self.header_seconds, self.header_time_name, "header_time")

    def body_too_late(self) -> Rejection:
        return self._late("body", self.body_seconds, self.body_time_name, "body_time")

    def _late(self, what: str, seconds: float, name: str, limit: str) -> Rejection:
        text = f"The {what} did not arrive in time; DYN_{self.prefix}_{name}_TIMEOUT_SECS allows {seconds:g} s"
        return Rejection(408, text, limit)


@dataclass(frozen=True, slots=True)
class Rejection:
    """An answer of the listener itself; `limit` is the name under which it is counted."""

    status: int
    text: str
    limit: str
    retry_after_seconds: int | None = None


class RenderRejection(Protocol):
    """Writes a rejection as the answers of an application look."""

    def __call__(
        self, rejection: Rejection, request_headers: Sequence[tuple[bytes, bytes]]
    ) -> tuple[Mapping[bytes, bytes], bytes]:
        """Return headers (without content-length and connection) and body."""
