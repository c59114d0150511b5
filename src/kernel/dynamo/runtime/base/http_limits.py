"""What one HTTP listener allows its clients, and the words in which it declines what is beyond."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.settings.table import settings_of


@dataclass(frozen=True, slots=True)
class Rejection:
    """An answer of the listener itself; `limit` is the name under which it is counted."""

    status: int
    text: str
    limit: str
    retry_after_seconds: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Sizes in bytes, times in seconds. The table of a listener gives each its default and variable, which answers name."""

    max_connections: int
    header_limit_bytes: int
    header_count_limit: int
    header_timeout_seconds: float
    body_limit_bytes: int  # checked here only for what still arrives after the answer; the application checks it before
    body_timeout_seconds: float
    pipeline_limit: int
    idle_seconds: float
    write_stall_seconds: float

    def too_many_connections(self) -> Rejection:
        text = f"More than {self.max_connections} connections, the limit set by {self._name('max_connections')}"
        return Rejection(503, text, "connections", retry_after_seconds=1)

    def head_too_long(self) -> Rejection:
        kib, name = self.header_limit_bytes // 1024, self._name("header_limit_bytes")
        return Rejection(431, f"Request line and headers exceed the limit of {kib} KiB set by {name}", "header_size")

    def too_many_headers(self) -> Rejection:
        text = f"More than {self.header_count_limit} headers, the limit set by {self._name('header_count_limit')}"
        return Rejection(431, text, "header_count")

    def too_many_requests(self) -> Rejection:
        text = f"More than {self.pipeline_limit} requests wait, the limit set by {self._name('pipeline_limit')}"
        return Rejection(429, text, "pipeline", retry_after_seconds=1)

    def too_much_framing(self) -> Rejection:
        name = self._name("header_limit_bytes")
        text = f"The chunk extensions and trailers of the body exceed the limit set by {name}"
        return Rejection(431, text, "body_framing")

    def headers_too_late(self) -> Rejection:
        return self._late("headers", self.header_timeout_seconds, "header_timeout_seconds", "header_time")

    def body_too_late(self) -> Rejection:
        return self._late("body", self.body_timeout_seconds, "body_timeout_seconds", "body_time")

    def _late(self, what: str, seconds: float, field: str, limit: str) -> Rejection:
        return Rejection(408, f"The {what} did not arrive in time; {self._name(field)} allows {seconds:g} s", limit)

    def _name(self, field: str) -> str:
        """Return the variable that sets a field; the field's own name where nothing does."""
        return {name: made.variable for name, made in settings_of(type(self))}.get(field) or field
