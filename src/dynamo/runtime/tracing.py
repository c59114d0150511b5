"""W3C trace context, and spans that cost nothing when nobody exports them."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal

_TRACEPARENT: Final = re.compile(r"^00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})$")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """What arrived in (or will leave through) the W3C headers."""

    trace_id: str  # 32 lower-case hex digits
    span_id: str  # 16 lower-case hex digits: the caller's span
    sampled: bool = True
    tracestate: str | None = None
    x_request_id: str | None = None
    request_id: str | None = None
    parent_span_id: str | None = None

    @classmethod
    def from_headers(cls, headers: dict[str, str]) -> TraceContext | None:
        """Read `traceparent` and its companions (lower-case names); None when absent or malformed."""
        found = _TRACEPARENT.match(headers.get("traceparent", "").strip())
        if found is None or found[1] == "0" * 32 or found[2] == "0" * 16:
            return None
        return cls(
            found[1],
            found[2],
            bool(int(found[3], 16) & 1),
            headers.get("tracestate"),
            headers.get("x-request-id"),
            headers.get("request-id"),
        )

    def extra_headers(self) -> dict[str, str]:
        """The companions that are carried along unchanged."""
        pairs = {
            "tracestate": self.tracestate,
            "x-request-id": self.x_request_id,
            "request-id": self.request_id,
        }
        return {name: value for name, value in pairs.items() if value is not None}

    def headers(self) -> dict[str, str]:
        """The headers of an outgoing call made on behalf of this context."""
        flags = "01" if self.sampled else "00"
        return {"traceparent": f"00-{self.trace_id}-{self.span_id}-{flags}", **self.extra_headers()}


class SpanProxy:
    """A span an engine may decorate. This base class is the silent one."""

    __slots__ = ()

    span_id: str | None = None
    is_recording: bool = False

    def set_attribute(self, key: str, value: Any) -> None:
        """Record one attribute; bool, int, float and str are kept, anything else becomes its repr."""

    def add_event(self, name: str, attrs: dict[str, Any] | None = None) -> None:
        """Record a moment."""

    def set_status(self, status: str, description: str | None = None) -> None:
        """Mark the outcome. Raises ValueError for anything but "ok" and "error"."""
        check_status(status)

    def child(self, name: str, attrs: dict[str, Any] | None = None) -> SpanProxy:
        """A nested span."""
        return NO_SPAN

    def headers(self) -> dict[str, str] | None:
        """`traceparent` naming this span, or None."""
        return None

    def close(self) -> None:
        """End the span; idempotent."""

    def __enter__(self) -> SpanProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> Literal[False]:
        self.close()
        return False


def check_status(status: str) -> None:
    """Raise ValueError unless `status` is "ok" or "error"."""
    if status not in ("ok", "error"):
        raise ValueError(f'span status must be "ok" or "error", got {status!r}')


NO_SPAN: Final = SpanProxy()


def new_span_id() -> str:
    """A random 16-digit span id."""
    return secrets.token_hex(8)
