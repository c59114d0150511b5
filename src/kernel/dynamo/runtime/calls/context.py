"""One request's identity, deadline, trace and stop/kill tree."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, ItemsView, Iterator, KeysView, MutableMapping, ValuesView
from functools import partial
from typing import Any, Final

from dynamo.runtime.observe.tracing import NO_SPAN, SpanProxy, TraceContext

_MISSING: Final[object] = object()


class ContextMetadata(MutableMapping[str, str]):
    """A live str -> str mapping with sorted keys. Anything but str is a TypeError."""

    __slots__ = ("_values",)

    def __init__(self, values: MutableMapping[str, str] | dict[str, str] | None = None) -> None:
        self._values: dict[str, str] = {}
        for key, value in (values or {}).items():
            self[key] = value

    def __getitem__(self, key: str) -> str:
        return self._values[key]

    def __setitem__(self, key: str, value: str) -> None:
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata maps str to str, got {type(key).__name__} -> {type(value).__name__}")
        self._values[key] = value

    def __delitem__(self, key: str) -> None:
        del self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._values))

    def __len__(self) -> int:
        return len(self._values)

    def pop(self, key: str, default: Any = _MISSING) -> Any:
        if default is _MISSING:
            return self._values.pop(key)
        return self._values.pop(key, default)

    def keys(self) -> KeysView[str]:
        return KeysView(self)

    def values(self) -> ValuesView[str]:
        return ValuesView(self)

    def items(self) -> ItemsView[str, str]:
        return ItemsView(self)

    def clear(self) -> None:
        self._values.clear()

    def copy(self) -> dict[str, str]:
        """Return a plain, detached dict."""
        return dict(sorted(self._values.items()))

    def __repr__(self) -> str:
        return f"ContextMetadata({self.copy()!r})"


class Context:
    """One request, as every part on its way sees it.

    Stop means "finish gracefully": chunks already produced may still be delivered. Kill means the reader is gone:
    nothing more is delivered. A killed context is also stopped. Both are final and idempotent, propagate to linked
    children first, and may be called from any thread.

    Engines only need `id()`, `is_stopped()` and, to wait for a cancellation, `async_killed_or_stopped()`.
    """

    __slots__ = (
        "__weakref__", "_callbacks", "_first_token", "_id", "_killed", "_metadata", "_span", "_stopped", "_trace",
        "deadline", "prompt_tokens",
    )  # fmt: skip

    def __init__(
        self,
        id: str | None = None,
        metadata: dict[str, str] | ContextMetadata | None = None,
        *,
        trace: TraceContext | None = None,
        deadline: float | None = None,
    ) -> None:
        """`deadline` is an absolute time of the running loop's clock, in seconds; None means none."""
        self._id = id if id is not None else str(uuid.uuid4())
        self._metadata: ContextMetadata | dict[str, str] | None = metadata
        self._stopped = False
        self._killed = False
        # Made here and not on first use: two threads that register at once must find the same one.
        self._callbacks: dict[object, Callable[[bool], None]] = {}
        self._first_token: Callable[[], None] | None = None
        self._trace = trace
        self._span: SpanProxy | None = None
        self.deadline = deadline
        # The length of the prompt as the client sent it: a migrated request's prompt has grown, but its penalties, grammar and
        # usage still count from here (`max_tokens` and `min_tokens` are what is left of them). None: it was not migrated.
        self.prompt_tokens: int | None = None

    def id(self) -> str:
        return self._id

    # -- stop and kill -------------------------------------------------------------------------------------------

    def is_stopped(self) -> bool:
        """True after stop or kill."""
        return self._stopped

    def is_killed(self) -> bool:
        """True after kill only."""
        return self._killed

    def stop_generating(self) -> None:
        """Request a graceful end."""
        if not self._stopped:
            self._stopped = True
            self._fire(killed=False)

    def kill(self) -> None:
        """Stop now and deliver nothing more: the reader is gone."""
        if not self._killed:
            self._stopped = self._killed = True
            self._fire(killed=True)

    def on_cancel(self, callback: Callable[[bool], None]) -> Callable[[], None]:
        """Call `callback(killed)` at stop and again at a later kill; at once if it already happened.

        Returns a function that takes the registration back. Callbacks run in the thread that stops the context and
        must not block or raise. One that is registered while another thread stops the context may be called twice for it.
        """
        token = object()
        self._callbacks[token] = callback
        if self._stopped:
            callback(self._killed)
        return partial(self._forget, token)

    def _forget(self, token: object) -> None:
        self._callbacks.pop(token, None)

    def link_child(self, child: Context) -> Callable[[], None]:
        """Stop or kill `child` with this context. Returns a function that unlinks it."""
        return self.on_cancel(lambda killed: child.kill() if killed else child.stop_generating())

    def _fire(self, *, killed: bool) -> None:
        for callback in list(self._callbacks.values()):
            callback(killed)

    async def async_killed_or_stopped(self) -> bool:
        """Wait until the context is stopped or killed, then return True; returns at once if it already is."""
        if self._stopped:
            return True
        loop = asyncio.get_running_loop()
        fired: asyncio.Future[bool] = loop.create_future()

        def wake(_killed: bool) -> None:
            # stop() may come from an engine's own thread, so the future is only touched on its loop.
            loop.call_soon_threadsafe(_resolve, fired)

        forget = self.on_cancel(wake)
        try:
            return await fired
        finally:
            forget()

    # -- first token ---------------------------------------------------------------------------------------------

    def notify_first_token(self) -> None:
        """Report the arrival of the KV transfer (decode role). Does nothing in other roles; idempotent."""
        signal, self._first_token = self._first_token, None
        if signal is not None:
            signal()

    def on_first_token(self, callback: Callable[[], None] | None) -> None:
        """Framework use: what `notify_first_token` triggers, once, after what was set before; None: nothing."""
        before = self._first_token

        def both() -> None:
            for each in (before, callback):
                if each is not None:
                    each()

        self._first_token = None if callback is None else both

    # -- identity ------------------------------------------------------------------------------------------------

    def detached(self, id: str) -> Context:
        """Make an unlinked context: same trace, a snapshot of the metadata, not stopped, no first-token signal."""
        twin = Context(id, self.metadata.copy(), trace=self._trace, deadline=self.deadline)
        twin._span = self._span
        return twin

    @property
    def metadata(self) -> ContextMetadata:
        found = self._metadata
        if not isinstance(found, ContextMetadata):  # most requests never use it, so it is built on first use
            found = self._metadata = ContextMetadata(found)
        return found

    @metadata.setter
    def metadata(self, values: dict[str, str] | ContextMetadata) -> None:
        self._metadata = ContextMetadata(values)

    @property
    def has_metadata(self) -> bool:
        """Whether there is any metadata; cheaper than building it, since most requests have none."""
        return bool(self._metadata)

    # -- trace ---------------------------------------------------------------------------------------------------

    @property
    def trace(self) -> TraceContext | None:
        """The inbound W3C trace context, if any."""
        return self._trace

    @property
    def trace_id(self) -> str | None:
        if self._span is not None and self._span.trace_id:
            return self._span.trace_id  # a trace that began here has no inbound context
        return self._trace.trace_id if self._trace else None

    @property
    def span_id(self) -> str | None:
        if self._span is not None and self._span.span_id:
            return self._span.span_id
        return self._trace.span_id if self._trace else None

    @property
    def parent_span_id(self) -> str | None:
        if self._span is not None and self._span.span_id:
            return self._trace.span_id if self._trace else None
        return self._trace.parent_span_id if self._trace else None

    def trace_headers(self) -> dict[str, str] | None:
        """Return the W3C headers for a nested call, preferring the `engine.generate` span over the inbound one;
        None: no trace.
        """
        if self._span is not None and self._span.is_recording:
            headers = self._span.headers()
            if headers is not None:
                return {**(self._trace.extra_headers() if self._trace else {}), **headers}
        return self._trace.headers() if self._trace else None

    def current_span(self) -> SpanProxy:
        """Return the request's span; a span without effect where nothing is exported."""
        return self._span if self._span is not None else NO_SPAN

    def start_span(self, name: str, attrs: dict[str, object] | None = None) -> SpanProxy:
        """Start a child span, usable as a context manager."""
        return self.current_span().child(name, attrs)

    def attach_span(self, span: SpanProxy | None) -> None:
        """Framework use: the span that `current_span` returns."""
        self._span = span

    def __repr__(self) -> str:
        state = "killed" if self._killed else "stopped" if self._stopped else "live"
        return f"Context({self._id!r}, {state})"


def on_loop(loop: asyncio.AbstractEventLoop, callback: Callable[[bool], None]) -> Callable[[bool], None]:
    """Make a callback for `Context.on_cancel` that runs on `loop`, at once if the context was stopped on that loop."""

    def call(killed: bool) -> None:
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:  # stopped from an engine's own thread
            here = None
        if here is loop:
            callback(killed)
        else:
            loop.call_soon_threadsafe(callback, killed)

    return call


def _resolve(future: asyncio.Future[bool]) -> None:
    if not future.done():
        future.set_result(True)
