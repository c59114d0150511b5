"""The door of an inference API over HTTP: read the body, make the exchange, send its stream, watch for the client's departure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from dynamo.frontend.base.access import IDENTITY, Access, owner_of
from dynamo.frontend.base.asgi import (
    JSON,
    BodyBudget,
    ClientGone,
    Headers,
    Message,
    Receive,
    Scope,
    Send,
    check_content_type,
    first_headers,
    read_body,
    reply_rejected,
)
from dynamo.frontend.base.request_id import HEADER as ID_HEADER
from dynamo.frontend.base.request_id import client_request_id, request_id_note
from dynamo.frontend.pipeline.exchange import ANSWER_HEADERS, Arrival, Exchange
from dynamo.frontend.pipeline.inference import Call
from dynamo.frontend.pipeline.sink import AnswerStream, HeaderPairs, SplicedEvents
from dynamo.protocol.dialect import OPENAI, Dialect
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.sse import KEEP_ALIVE
from dynamo.runtime.base.identifiers import random_uuid
from dynamo.runtime.http.cycle import (
    CUT_MESSAGE,
    FIRST_BODY,
    LEAVE_EXTENSION,
    PUSH_EXTENSION,
    RESPOND_EXTENSION,
    SPLICE_EXTENSION,
    Respond,
)

EXCHANGE: Final = "dynamo.exchange"
"""The entry of a scope in which an inference route puts its `Exchange`; there is none where no log needs it."""


class AsgiSink:
    """The answer of one exchange as ASGI messages, or in one write where our listener is below."""

    __slots__ = ("_dialect", "_extensions", "_extra", "_request_id", "_send", "exchange")

    def __init__(self, scope: Scope, send: Send, request_id: str, dialect: Dialect = OPENAI) -> None:
        self._send, self._request_id, self._dialect = send, request_id, dialect
        self._extensions: dict[str, Any] = scope.get("extensions") or {}
        written, names = request_id.encode("latin-1"), dialect.id_headers
        # Nearly always one, and a comprehension is a call.
        self._extra = ((names[0], written),) if len(names) == 1 else tuple([(name, written) for name in names])
        self.exchange: Exchange | None = None  # that is answered; None: it was refused before there was one

    @property
    def on_leave(self) -> Callable[[Callable[[], None]], None] | None:
        """What calls back when the client leaves; None: the server below cannot."""
        return self._extensions.get(LEAVE_EXTENSION)

    async def reply(self, status: int, body: bytes, headers: HeaderPairs = (), *, content_type: bytes = JSON) -> None:
        respond: Respond | None = self._extensions.get(RESPOND_EXTENSION)
        sent = [(b"content-length", b"%d" % len(body)), *self._fixed(), *headers, (b"content-type", content_type)]
        if respond is None or not respond(status, sent, body):
            await self._send({"type": "http.response.start", "status": status, "headers": sent})
            await self._send({"type": "http.response.body", "body": body})

    async def reject(self, rejected: RequestRejected) -> None:
        await reply_rejected(self._send, rejected, self._fixed(), dialect=self._dialect, request_id=self._request_id)

    def _fixed(self) -> tuple[tuple[bytes, bytes], ...]:
        """Return the headers of every answer."""
        further = None if self.exchange is None else self.exchange.of(ANSWER_HEADERS)
        return self._extra if further is None else (*self._extra, *further(self._dialect))

    def open_stream(
        self, *, peek_seconds: float, keep_alive_seconds: float | None, late_headers: Callable[[], HeaderPairs]
    ) -> AnswerStream:
        is_fixed = self.exchange is None or self.exchange.of(ANSWER_HEADERS) is None
        return EventStream(
            self._send,
            push=self._extensions.get(PUSH_EXTENSION),
            splice=self._extensions.get(SPLICE_EXTENSION),
            extra=self._extra if is_fixed else (),
            late_headers=late_headers if is_fixed else lambda: (*self._fixed(), *late_headers()),
            peek_seconds=peek_seconds,
            keep_alive_seconds=keep_alive_seconds,
            keep_alive=self._dialect.keep_alive,
            content_type=self._dialect.stream_type,
        )

    def open_bytes(self, content_type: bytes, headers: HeaderPairs = ()) -> ByteStream:
        can_cut = RESPOND_EXTENSION in self._extensions
        return ByteStream(self._send, content_type, (*self._fixed(), *headers), can_cut=can_cut)


class FormReader(Protocol):
    """Reads the bodies of a route that are forms, as JSON."""

    @staticmethod
    def takes(headers: Headers) -> bool:
        """Return whether the content type of a request is that of a form."""

    async def read(self, headers: Headers, receive: Receive, budget: BodyBudget) -> bytes:
        """Return the form as JSON, within a budget. Raises RequestRejected, and ClientGone when the client leaves."""


class InferenceRoute:
    """One inference API as an ASGI application."""

    def __init__(
        self,
        call: Call,
        *,
        access: Access = Access.INFERENCE,
        body_limit_bytes: int,
        budget: BodyBudget,
        form: FormReader | None = None,
    ) -> None:
        """`form`: reads the bodies that are forms; None: only JSON is taken."""
        self._form = form
        self._call, self._body_limit_bytes, self._budget = call, body_limit_bytes, budget
        self.dialect = call.dialect
        self.access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        headers = first_headers(scope)
        known = client_request_id(headers) if ID_HEADER in headers else None
        request_id = random_uuid()
        sink = AsgiSink(scope, send, known or self._call.response_id(request_id), self.dialect)
        began = loop.time()
        budget = self._budget.of(owner_of(scope)) if IDENTITY in scope else self._budget
        try:
            if self._form is not None and self._form.takes(headers):
                body = await self._form.read(headers, receive, budget)
            else:
                if headers.get(b"content-type") != JSON:
                    check_content_type(headers)
                body = await read_body(headers, receive, self._body_limit_bytes, budget)
        except ClientGone:
            return
        except RequestRejected as error:
            arrival = _arrival(scope, b"", began, headers, known)
            await self._call.refuse(self._call.open(request_id, arrival), error, sink)
            return
        # How long a client takes to send its request is no time of ours.
        arrival = _arrival(scope, body, loop.time(), headers, known)
        sink.exchange = exchange = self._call.open(request_id, arrival)
        if EXCHANGE in scope:
            scope[EXCHANGE] = exchange
        if (on_leave := sink.on_leave) is not None:
            on_leave(exchange.client_left)
            await self._call.run(exchange, sink)
            return
        # Under another server a task has to wait for it. It is cancelled below, and has nothing to clean up.
        watcher = loop.create_task(watch_client(receive, exchange), name="frontend: client watch")
        try:
            await self._call.run(exchange, sink)
        finally:
            watcher.cancel()


async def watch_client(receive: Receive, exchange: Exchange) -> None:
    """Kill the work when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    exchange.client_left()


def _arrival(scope: Scope, body: bytes, at: float, headers: Headers, known: str | None) -> Arrival:
    client = scope.get("client")
    return Arrival(
        body,
        at,
        headers,
        scope["headers"],
        known,
        request_id_note(headers) if ID_HEADER in headers else "",
        None if client is None else f"{client[0]}:{client[1]}",
        path=scope["path"],
        identity=scope.get(IDENTITY),
    )


# One server-sent event stream: when HTTP 200 is committed, and what keeps a silent stream alive.
#
# Nothing is sent until the first `write` or until the peek time is over, so that an early error can still be a real HTTP
# status. A timer does both jobs; it creates a task only in the rare case that it has something to send.

Push = Callable[[bytes], bool]
"""The ASGI extension `dynamo.push` of our listener: write one body chunk now, or return False without writing anything.
"""
Splice = Callable[[bytes, bytes], SplicedEvents]
"""The ASGI extension `dynamo.splice` of our listener: (opening, closing) to what pushes chunks with these ends."""
_HEADERS: Final = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise collect tokens into 4 KiB
)


class EventStream:
    """Used by one task; its own timer is the only other sender and the two never interleave."""

    __slots__ = (
        "_headers", "_keep_alive", "_keep_alive_seconds", "_last_write", "_loop", "_push", "_send", "_sending",
        "_splice", "_spliced", "_timer", "is_committed",
    )  # fmt: skip

    def __init__(
        self,
        send: Send,
        *,
        push: Push | None = None,
        splice: Splice | None = None,
        extra: tuple[tuple[bytes, bytes], ...] = (),
        late_headers: Callable[[], Sequence[tuple[bytes, bytes]]] = tuple,
        peek_seconds: float,
        keep_alive_seconds: float | None,
        keep_alive: bytes = KEEP_ALIVE,
        content_type: bytes = b"text/event-stream",
    ) -> None:
        """`late_headers` is called when the headers are sent. `keep_alive`: what is sent after that many silent seconds."""
        self._keep_alive = keep_alive
        self._push = push
        self._splice = splice
        self._spliced: SplicedEvents | None = None
        self._headers = ((b"content-type", content_type), *_HEADERS, *extra), late_headers
        self._send, self._keep_alive_seconds = send, keep_alive_seconds
        self._loop = asyncio.get_running_loop()
        self._sending: asyncio.Task[None] | None = None
        self._last_write = 0.0
        self.is_committed = False
        """Whether the status is on its way; from then on an error can only be an event."""
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(peek_seconds, self._tick)

    async def write(self, data: bytes) -> None:
        """Send `data`, the headers first if need be. Returns when the transport has room for more."""
        if self._sending is not None:
            await self._sending  # the timer was a moment earlier
            self._sending = None
        self._last_write = self._loop.time()
        if not self.is_committed:
            self._rearm()
        await self._send_data(data)

    @property
    def can_push(self) -> bool:
        """Whether `push` may return True."""
        return self._push is not None and self.is_committed

    def push(self, data: bytes, now: float) -> bool:
        """Send `data` without waiting; False when that is not possible now (use `write`): the client reads too slowly,
        or the server under us has no such way. `now` is the loop's time."""
        if self._push is None or self._sending is not None or not self.is_committed:
            return False
        self._last_write = now
        return self._push(data)

    def splicer(self, opening: bytes, closing: bytes) -> SplicedEvents | None:
        """Return what pushes events that differ only in their middle; None where `push` is all there is."""
        if self._splice is None or not self.can_push:
            return None
        spliced = self._spliced = self._splice(opening, closing)
        return spliced

    async def end(self, data: bytes) -> None:
        """Send the last bytes and end the response."""
        self.close()
        if self._sending is not None:
            await self._sending
        await self._send_data(data, more=False)

    def close(self) -> None:
        """Stop the timer; idempotent, for every path."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def settle(self) -> None:
        """Stop the timer and let what it began to send get out; before anything else is sent in place of a stream."""
        self.close()
        if self._sending is not None:
            await self._sending
            self._sending = None

    async def _send_data(self, data: bytes, *, more: bool = True) -> None:
        """Send `data`, the first time behind the head: as one write where our own listener is below."""
        if not self.is_committed:
            self.is_committed = True
            fixed, late_headers = self._headers
            start: Message = {"type": "http.response.start", "status": 200, "headers": [*fixed, *late_headers()]}
            if self._splice is not None:
                start[FIRST_BODY] = data, more
            await self._send(start)
            if self._splice is not None:
                return
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    def _rearm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        seconds = self._keep_alive_seconds
        self._timer = None if seconds is None else self._loop.call_later(seconds, self._tick)

    def _tick(self) -> None:
        first = not self.is_committed
        if not first and self._keep_alive_seconds is not None:
            last = self._last_write if self._spliced is None else max(self._last_write, self._spliced.pushed_at)
            silent = self._loop.time() - last
            if silent < self._keep_alive_seconds:  # data went out meanwhile: check again when it could be due
                self._timer = self._loop.call_later(self._keep_alive_seconds - silent, self._tick)
                return
        if self._sending is None or self._sending.done():  # else the client does not read: nothing to keep alive
            # Awaited in write.
            self._last_write = self._loop.time()
            self._sending = self._loop.create_task(self._send_data(self._keep_alive), name="frontend: keep-alive")
        self._rearm()


class ByteStream:
    """An `AnswerStream`. Used by one task."""

    __slots__ = ("_can_cut", "_head", "_is_cut", "_send", "can_push", "is_committed")

    def __init__(self, send: Send, content_type: bytes, headers: HeaderPairs, *, can_cut: bool) -> None:
        """`can_cut`: our own listener is below. Any other cuts an answer that is left without its end."""
        self._send, self._can_cut = send, can_cut
        self._head: Sequence[tuple[bytes, bytes]] = [(b"content-type", content_type), *headers]
        self._is_cut = False
        self.can_push = False
        self.is_committed = False

    async def write(self, data: bytes) -> None:
        """Send `data`, the headers first if need be. Returns when the transport has room for more."""
        if not data:
            return
        await self._begin()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def push(self, data: bytes, now: float) -> bool:
        return False

    def splicer(self, opening: bytes, closing: bytes) -> SplicedEvents | None:
        return None

    async def settle(self) -> None:
        """Wait for nothing: nothing is sent but by `write` and `end`."""

    async def end(self, data: bytes) -> None:
        """Send the last bytes and end the answer; nothing once it was cut."""
        if self._is_cut:
            return
        await self._begin()
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def cut(self) -> None:
        """End the connection in place of the answer, so that a client cannot take what was sent for all of it."""
        self._is_cut = True
        if self.is_committed and self._can_cut:
            await self._send({"type": CUT_MESSAGE})

    def close(self) -> None:
        """Stop nothing: there are no timers."""

    async def _begin(self) -> None:
        if not self.is_committed:
            self.is_committed = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._head})
