"""One HTTP connection: uvicorn's protocol with the limits that it lacks.

What a client may cost before its request is understood is bounded here: header size and count, the time to complete them
and the body, pipelined requests, idle time, the number of connections. So is what it may cost afterwards: a client that
does not read its answer is cut. A request over a limit gets an answer that names the setting, and is counted.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import socket
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import httptools
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from dynamo.frontend.http.asgi import RESPOND_EXTENSION, Receive, Scope, Send, reply_rejected
from dynamo.frontend.http.event_stream import PUSH_EXTENSION
from dynamo.frontend.http.request_id import HEADER, client_request_id
from dynamo.frontend.settings import FrontendSettings
from dynamo.protocol.openai.errors import RequestRejected

__all__ = ["LIMITS", "LimitedProtocol", "Refuse", "protocol_class"]

logger = logging.getLogger(__name__)

LINGER_SECONDS: Final = 2.0
"""After a refusal the client may still be sending. Closing at once would make the kernel answer that with a reset, which
throws away the refusal before it is read; so for this long what comes is read and dropped."""

SPARE_CONNECTIONS: Final = 64  # beyond the limit, for as many clients at once to be told so; the rest is just closed

LOOKS_PER_LIMIT: Final = 4  # how many times within the write stall limit a connection is looked at

FRAMING_FACTOR: Final = 8  # a chunked body of one-byte chunks takes six bytes on the wire for each of its own

LIMITS: Final = (
    "connections",
    "header_size",
    "header_count",
    "header_time",
    "body_size",
    "body_time",
    "body_framing",
    "pending_bodies",
    "pipeline",
    "idle",
    "write_stall",
    "malformed",
    "json_depth",
    "json_containers",
    "json_members",
    "body_tokens",
    "json_items",
    "messages",
    "models",
    "card_size",
    "guided_brackets",
    "guided_characters",
    "guided_depth",
    "guided_nodes",
    "guided_references",
    "guided_rules",
    "handshakes",
    "handshake_time",
    "handshake",
)
"""The labels under which refusals are counted."""

_HOP: Final = frozenset({b"upgrade", b"connection", b"http2-settings"})

Refuse = Callable[[str], None]
"""Counts one refusal under the limit's label."""


class _Phase(enum.Enum):
    """What a connection is doing, from the listener's side."""

    WAITING = enum.auto()  # for the first byte of a request
    HEAD = enum.auto()
    BODY = enum.auto()
    ANSWERING = enum.auto()  # the request is complete
    LEAVING = enum.auto()  # refused: reads and drops until the client has left


_WAITING, _HEAD, _BODY, _ANSWERING, _LEAVING = _Phase  # an attribute less at each test


class _Stop(Exception):
    """Leaves the parser after a refusal."""


class _LingeringTransport:
    """The transport of a response whose request is still arriving: closing it leaves the client time to read."""

    def __init__(self, protocol: LimitedProtocol, transport: asyncio.Transport) -> None:
        self._protocol = protocol
        self._transport = transport
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.get_extra_info = transport.get_extra_info

    def close(self) -> None:
        if self._protocol.is_request_arriving:
            self._protocol.linger()
        else:
            self._transport.close()


class LimitedProtocol(HttpToolsProtocol):
    """See above. `protocol_class` makes the class for one listener.

    One timer per connection, moved forward only when a deadline begins that is nearer than what it waits for: a request
    that arrives in one read moves nothing.
    """

    settings: FrontendSettings
    max_connections: int
    refuse_counter: Refuse

    _phase = _WAITING
    _phase_began = 0.0
    _head_bytes = 0
    _raw_bytes = 0  # of the body as it travelled: chunk sizes, extensions and trailers included
    _body_bytes = 0
    _is_refused = False
    _active: RequestResponseCycle | None = None  # the one being answered
    _paused_at: float | None = None  # since when the client has not read enough
    _unread = 0  # bytes in the write buffer at the last look
    _unread_since = 0.0
    _timer: asyncio.TimerHandle | None = None

    # -- asyncio.Protocol ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)  # type: ignore[arg-type]
        self._phase_began = self._unread_since = self.loop.time()
        self._arm()
        if len(self.connections) > self.max_connections:
            if len(self.connections) > self.max_connections + SPARE_CONNECTIONS:
                self.refuse_counter("connections")
                self.transport.abort()
                return
            text = f"More than {self.max_connections} connections, the limit set by DYN_HTTP_MAX_CONNECTIONS"
            self._refuse(RequestRejected(503, text, retry_after_seconds=1, limit="connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.pipeline.clear()
        super().connection_lost(exc)
        # uvicorn calls this timer off after a close only; after a reset it would keep the connection for as long.
        self._unset_keepalive_if_required()
        self._active = None

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        # Until the headers are complete, whatever arrives counts; one read may also bring the body, and is not judged
        # before the parser has seen it.
        self._head_bytes += len(data)
        if self._phase is _BODY:
            self._raw_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._read_on_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if not self._is_refused:
                logger.debug("a request that is no HTTP: %s", error)
                self._refuse(RequestRejected(400, "The request is not well-formed HTTP", limit="malformed"))
        if self._phase is _ANSWERING or self._is_refused or self.transport.is_closing():
            return
        if self._phase is _BODY:
            self._check_body()
        elif self._head_bytes > self.settings.header_limit_bytes:
            self._refuse(self._too_long())
        self._arm()

    def pause_writing(self) -> None:
        self._paused_at = self.loop.time()
        super().pause_writing()
        self._arm()

    def resume_writing(self) -> None:
        self._paused_at = None
        super().resume_writing()

    # -- the parser ------------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._enter(_HEAD)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is _BODY:
            return  # a trailer: nobody reads it, and `_check_body` bounds it
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        settings = self.settings
        if self._head_bytes > settings.header_limit_bytes:  # perhaps only because the same read brought a body
            size = len(self.url) + sum([len(name) + len(value) for name, value in self.headers])
            if size > settings.header_limit_bytes:
                self._refuse(self._too_long())
                raise _Stop
        if len(self.headers) > settings.header_count_limit:
            text = f"More than {settings.header_count_limit} headers, the limit set by DYN_HTTP_HEADER_COUNT_LIMIT"
            self._refuse(RequestRejected(431, text, limit="header_count"))
            raise _Stop
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise _Stop
            return  # the parser stops here: `_read_on_without_upgrade`
        is_behind = self._active is not None and not self._active.response_complete
        if is_behind and len(self.pipeline) >= settings.pipeline_limit:
            text = f"More than {settings.pipeline_limit} requests wait, the limit set by DYN_HTTP_PIPELINE_LIMIT"
            self._refuse(RequestRejected(429, text, retry_after_seconds=1, limit="pipeline"))
            raise _Stop
        self._enter(_BODY)
        self._raw_bytes = self._body_bytes = 0
        super().on_headers_complete()
        if self.cycle is not None:  # its task has not run yet
            cycle = self.cycle
            extensions: dict[str, Any] = {
                PUSH_EXTENSION: partial(_push, cycle),
                RESPOND_EXTENSION: partial(_respond, cycle),
            }
            cycle.scope["extensions"] = extensions

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._phase is _HEAD:
            return  # the parser believes that an upgrade ends the request
        super().on_message_complete()
        self._head_bytes = 0
        self._enter(_ANSWERING)
        if self.cycle is not None and self.cycle.response_complete:
            self._enter(_WAITING)  # answered before its body was complete

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        if self._active is not None:  # else each request were a circle that only the collector could free
            self._active.scope.pop("extensions", None)
        super().on_response_complete()
        if is_last and self._phase is _ANSWERING:
            self._enter(_WAITING)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def timeout_keep_alive_handler(self) -> None:
        if self._phase is _WAITING and not self.transport.is_closing():
            self.refuse_counter("idle")
        super().timeout_keep_alive_handler()

    def _read_on_without_upgrade(self, rest: bytes) -> None:
        """Read the request again as if it did not ask for another protocol, which is how HTTP lets a server decline.

        The parser leaves the body of such a request out. Clients that prefer HTTP/2 (Java's) send one with every POST.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        kept = [
            f"{name.decode('latin-1')}: {value.decode('latin-1')}\r\n"
            for name, value in self.headers
            if name not in _HOP
        ]
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, "".join(kept).encode("latin-1"))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(head + rest)

    # -- limits ----------------------------------------------------------------------------------------------------------

    def _enter(self, phase: _Phase) -> None:
        self._phase = phase
        self._phase_began = self.loop.time()

    def _too_long(self) -> RequestRejected:
        kib = self.settings.header_limit_bytes // 1024
        text = f"Request line and headers exceed the limit of {kib} KiB set by DYN_HTTP_HEADER_LIMIT_KB"
        return RequestRejected(431, text, limit="header_size")

    def _check_body(self) -> None:
        settings = self.settings
        if self._raw_bytes > FRAMING_FACTOR * self._body_bytes + settings.header_limit_bytes:
            # Not a body at all: chunk extensions or trailers without end. The header limit is what they may take.
            text = "The chunk extensions and trailers of the body exceed the limit set by DYN_HTTP_HEADER_LIMIT_KB"
            self._refuse(RequestRejected(431, text, limit="body_framing"))
        elif self.cycle is not None and self.cycle.response_complete and self._body_bytes > settings.body_limit_bytes:
            self._count_once("body_size")  # answered long ago, and still sending
            self.linger()
        elif self.cycle is not None and self.cycle.transport is self.transport:
            self.cycle.transport = _LingeringTransport(self, self.transport)  # type: ignore[assignment]

    def _due(self) -> float:
        """When this connection is to be looked at next."""
        settings, began = self.settings, self._phase_began
        look = self.loop.time() + settings.write_stall_seconds / LOOKS_PER_LIMIT
        match self._phase:
            case _Phase.WAITING:
                return min(began + settings.idle_connection_seconds, look)
            case _Phase.HEAD:
                return min(began + settings.header_timeout_seconds, look)
            case _Phase.BODY:
                return min(began + settings.body_timeout_seconds, look)
            case _Phase.LEAVING:
                return began + LINGER_SECONDS
        return look

    def _arm(self) -> None:
        """See that the timer fires in time for the nearest deadline."""
        due = self._due()
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = self.loop.call_at(due, self._look)

    def _look(self) -> None:
        self._timer = None
        now, settings = self.loop.time(), self.settings
        if self._is_stalled(now):
            self.refuse_counter("write_stall")
            self.transport.abort()
            return
        waited = now - self._phase_began
        match self._phase:
            case _Phase.LEAVING if waited >= LINGER_SECONDS:
                self.transport.abort()
                return
            case _Phase.WAITING if waited >= settings.idle_connection_seconds and not self.transport.is_closing():
                self.refuse_counter("idle")
                self.transport.close()
            case _Phase.HEAD | _Phase.BODY if self.flow.read_paused:
                self._phase_began = now  # it is us who do not read
            case _Phase.HEAD if waited >= settings.header_timeout_seconds:
                self._refuse(_late("headers", settings.header_timeout_seconds, "HEADER", "header_time"))
            case _Phase.BODY if waited >= settings.body_timeout_seconds:
                self._refuse(_late("body", settings.body_timeout_seconds, "BODY", "body_time"))
        self._arm()

    def _is_stalled(self, now: float) -> bool:
        """Whether the client has not read for too long, as far as the write buffer tells."""
        limit = self.settings.write_stall_seconds
        if self._paused_at is not None and now - self._paused_at >= limit:
            return True
        unread = self.transport.get_write_buffer_size()
        if unread == 0 or unread < self._unread:
            self._unread_since = now
        self._unread = unread
        if self.transport.is_closing() and self._phase is not _LEAVING:
            # Closed by an answer's end; the rest of the buffer must leave as a whole within the limit.
            self._enter(_LEAVING)
            self._phase_began += limit - LINGER_SECONDS
        return unread > 0 and now - self._unread_since >= limit

    # -- refusals --------------------------------------------------------------------------------------------------------

    def _count_once(self, limit: str) -> None:
        if not self._is_refused:
            self._is_refused = True
            self.refuse_counter(limit)

    def _refuse(self, rejected: RequestRejected) -> None:
        """Answer what is wrong and read no more requests. An answer under way is finished first."""
        if self._is_refused:
            return
        self._count_once(rejected.limit or "malformed")
        transport, own = self.transport, self.cycle if self._phase is _BODY else None
        if transport.is_closing():
            return
        active = self._active
        if active is not None and not active.response_complete and active is not own:
            # The refusal waits for its turn, as the request would have.
            if self.pipeline and self.pipeline[0][0] is own:
                self.pipeline.popleft()
            self.cycle = _cycle_like(active, transport, self.on_response_complete)
            self.pipeline.appendleft((self.cycle, partial(_answer, rejected, self._request_id())))
            self._enter(_ANSWERING)
            return
        if own is not None:
            if own.response_started:
                if own.response_complete:
                    self.linger()
                else:
                    transport.abort()
                return
            own.disconnected = True  # whoever waits for the rest of the body waits in vain
            own.message_event.set()
        transport.write(_raw(rejected, self._request_id()))
        self.linger()

    def _request_id(self) -> str:
        """What an answer of the connection itself carries as `x-request-id`."""
        return client_request_id(dict(self.headers or ())) or str(uuid.uuid4())

    @property
    def is_request_arriving(self) -> bool:
        """Whether the client is still sending the request that is being answered."""
        return self._phase is _BODY

    def linger(self) -> None:
        """Close as soon as the client has read what was written and left, or after `LINGER_SECONDS`."""
        transport = self.transport
        if transport.is_closing() or self._phase is _LEAVING:
            return
        self._is_refused = True
        self._enter(_LEAVING)
        self.flow.resume_reading()
        if transport.can_write_eof():
            transport.write_eof()
        self._arm()


def _late(what: str, seconds: float, variable: str, limit: str) -> RequestRejected:
    text = f"The {what} did not arrive in time; DYN_HTTP_{variable}_TIMEOUT_SECS allows {seconds:g} s"
    return RequestRejected(408, text, limit=limit)


def _raw(rejected: RequestRejected, request_id: str) -> bytes:
    """A whole response, for where no ASGI cycle is there to write it."""
    body = rejected.body()
    more = b"".join([f"{name}: {value}\r\n".encode() for name, value in rejected.headers().items()])
    return (
        b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
        b"x-request-id: %b\r\n%bconnection: close\r\n\r\n%b"
        % (rejected.status, rejected.type.encode(), len(body), request_id.encode(), more, body)
    )


async def _answer(rejected: RequestRejected, request_id: str, scope: Scope, receive: Receive, send: Send) -> None:
    await reply_rejected(send, rejected, ((HEADER, request_id.encode()), (b"connection", b"close")))


def _cycle_like(
    active: RequestResponseCycle, transport: asyncio.Transport, on_response: Callable[..., None]
) -> RequestResponseCycle:
    """A cycle for the refusal that follows `active` on its connection."""
    return RequestResponseCycle(
        scope={**active.scope, "method": "GET"},
        transport=transport,
        flow=active.flow,
        logger=active.logger,
        access_logger=active.access_logger,
        access_log=False,
        default_headers=active.default_headers,
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=False,
        on_response=on_response,
    )


def _push(cycle: RequestResponseCycle, data: bytes) -> bool:
    """What `send` does for one more body chunk, where nothing has to be waited for; the extension `dynamo.push`."""
    if (
        cycle.flow.write_paused
        or cycle.disconnected
        or cycle.response_complete
        or not cycle.response_started
        or not cycle.chunked_encoding
        or cycle.scope["method"] == "HEAD"
    ):
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return True


def _respond(cycle: RequestResponseCycle, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
    """What two calls of `send` do for a whole answer, in one write: the second would be another system call, and often
    another wake-up of the client. The extension `dynamo.respond`."""
    if (
        cycle.flow.write_paused
        or cycle.disconnected
        or cycle.response_started
        or cycle.scope["method"] == "HEAD"
        or cycle.default_headers
    ):
        return False
    head = b"".join([b"%b: %b\r\n" % header for header in headers])
    if head.count(b"\n") != len(headers) or head.count(b"\r") != len(headers) or b"\0" in head:
        return False  # uvicorn knows what to say of a header that is none
    cycle.response_started = True
    cycle.waiting_for_100_continue = False
    closing = b"" if cycle.keep_alive else b"connection: close\r\n"
    cycle.transport.write(b"%b%b%b\r\n%b" % (httptools_impl.STATUS_LINE[status], head, closing, body))
    cycle.chunked_encoding, cycle.expected_content_length = False, 0
    cycle.response_complete = True
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()
    return True


def protocol_class(settings: FrontendSettings, refuse: Refuse, *, max_connections: int) -> type[LimitedProtocol]:
    """The protocol of one listener; `refuse` counts."""
    members = {"settings": settings, "max_connections": max_connections, "refuse_counter": staticmethod(refuse)}
    return type("FrontendProtocol", (LimitedProtocol,), members)
