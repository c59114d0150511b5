"""The door of an inference API over HTTP: read the body, make the exchange, watch for the client's departure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol

from dynamo.frontend.base.access import IDENTITY, Access, owner_of
from dynamo.frontend.base.asgi import (
    JSON,
    BodyBudget,
    ClientGone,
    Headers,
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
from dynamo.frontend.http.event_stream import PUSH_EXTENSION, SPLICE_EXTENSION, ByteStream, EventStream
from dynamo.frontend.pipeline.exchange import ANSWER_HEADERS, Arrival, Exchange
from dynamo.frontend.pipeline.inference import Call
from dynamo.frontend.pipeline.sink import AnswerStream, HeaderPairs
from dynamo.protocol.dialect import OPENAI, Dialect
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.runtime.base.identifiers import random_uuid
from dynamo.runtime.http.cycle import LEAVE_EXTENSION, RESPOND_EXTENSION, Respond

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
