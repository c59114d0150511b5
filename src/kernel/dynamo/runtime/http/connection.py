"""One HTTP connection: parses requests, has them answered one after the other, and bounds what its client may cost.

Before a request is understood that is header size and count, the time to complete them and the body, pipelined requests, idle
time and the number of connections; afterwards, a client that does not read its answer is cut. A request over a limit gets an
answer that names the setting, and is counted.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections import deque
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast
from urllib.parse import unquote

import httptools

from dynamo.runtime.base.http_limits import HttpLimits, Rejection
from dynamo.runtime.http.cycle import Application, Cycle, Receive, Scope, Send
from dynamo.runtime.http.flow import ConnectionPhase, Gate, Watch
from dynamo.runtime.http.head import status_line
from dynamo.runtime.http.limits import SPARE_CONNECTIONS

if TYPE_CHECKING:
    from dynamo.runtime.http.service import HttpService

logger = logging.getLogger(__name__)

FRAMING_FACTOR: Final = 8  # a chunked body of one-byte chunks takes six bytes on the wire for each of its own
FEED_BYTES: Final = 16 * 1024
"""The parser gets this much of a head at once: it assembles one header of any length before it hands it over."""
KNOWN_URL_BYTES: Final = 128  # a longer URL is taken apart each time

_Address: TypeAlias = tuple[str, int] | None
_HOP: Final = frozenset({b"upgrade", b"connection", b"http2-settings"})
_HOST: Final = re.compile(rb"[\w.\-~!$&'()*+,;=%:\[\]]*")
"""RFC 9112, section 3.2: a request with two Host headers, one that is no host, or in HTTP/1.1 none is a 400. Two would let a proxy
in front and the checks behind it each read another one."""

_WRONG_HOST: Final = Rejection(400, "The request needs one Host header with a valid name", "malformed")
_WAITING, _HEAD, _BODY, _ANSWERING, _LEAVING = ConnectionPhase  # an attribute less at each test


class _Stop(Exception):
    """Leaves the parser after a refusal."""


class _Request:
    """What the parser has handed over of the request that is arriving."""

    __slots__ = ("body_bytes", "ends", "expects_continue", "head_bytes", "headers", "raw_bytes", "url")

    def __init__(self) -> None:
        self.ends: tuple[str, _Address, _Address] = "http", None, None  # scheme, server, client: of the connection
        self.head_bytes = 0  # whatever arrived since the last request was complete
        self.begin()

    def begin(self) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.expects_continue = False
        self.raw_bytes = self.body_bytes = 0  # the first as it travelled: chunk sizes, extensions and trailers included


class HttpConnection(asyncio.Protocol):
    """See above. Made by `HttpService.connection`."""

    def __init__(self, service: HttpService) -> None:
        self._service = service
        self.limits: HttpLimits = service.limits
        self.default_headers = service.default_headers
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)  # until `connection_made`
        self._gate: Gate = cast(Gate, None)
        self._parser = httptools.HttpRequestParser(self)
        self._request = _Request()
        self._cycle: Cycle | None = None  # of the request that arrived last
        self._active: Cycle | None = None  # the one being answered
        self._waiting: deque[tuple[Cycle, Application]] = deque()
        self._watch = Watch(self)
        self._is_refused = False

    # -- asyncio.Protocol ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports implement `asyncio.Transport` without inheriting from it.
        self.transport = cast(asyncio.Transport, transport)
        self._gate = Gate(self.transport)
        self._request.ends = _ends(transport)
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._service.connections.add(self)
        self._watch.arm()
        over = len(self._service.connections) - self.limits.max_connections
        if over > SPARE_CONNECTIONS:
            self.count("connections")
            self.transport.abort()
        elif over > 0:
            self.refuse(self.limits.too_many_connections())

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.stop()
        self._service.connections.discard(self)
        self._waiting.clear()
        for cycle in {self._active, self._cycle}:
            if cycle is not None:
                cycle.disconnect()
        self._gate.resume_writing()
        self._active = self._cycle = None
        self._parser = cast(Any, None)  # no circle is left to the collector

    def eof_received(self) -> bool:
        return False

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._watch.drop()
            return
        if self._watch.phase is not _BODY and len(data) > FEED_BYTES:
            # In small steps, so that the limit is checked before a long header is assembled.
            view = memoryview(data)
            for start in range(0, len(data), FEED_BYTES):
                if not self._feed(bytes(view[start : start + FEED_BYTES])):
                    return
        else:
            self._feed(data)

    def _feed(self, data: bytes) -> bool:
        """Parse some bytes; whether more are read."""
        watch, request = self._watch, self._request
        # Until the headers are complete, whatever arrives counts; one read may also bring the body, and is not judged
        # before the parser has seen it.
        request.head_bytes += len(data)
        if watch.phase is _BODY:
            request.raw_bytes += len(data)
        try:
            while True:  # as many requests of one read may request another protocol as `pipeline_limit` lets wait
                try:
                    self._parser.feed_data(data)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    data = self._without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if not self._is_refused:
                logger.debug("a request that is not valid HTTP: %s", error)
                self.refuse(Rejection(400, "The request is not well-formed HTTP", "malformed"))
        if watch.phase is _ANSWERING or self._is_refused or self.transport.is_closing():
            return not self._is_refused
        if watch.phase is _BODY:
            self._check_body()
        elif request.head_bytes > self.limits.header_limit_bytes:
            self.refuse(self.limits.head_too_long())
        watch.arm()
        return not self._is_refused

    def pause_writing(self) -> None:
        self._gate.pause_writing()
        self._watch.pause_writing()

    def resume_writing(self) -> None:
        self._watch.resume_writing()
        self._gate.resume_writing()

    # -- the parser ------------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._watch.enter(_HEAD)
        self._request.begin()

    def on_url(self, url: bytes) -> None:
        self._request.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._watch.phase is _BODY:
            return  # a trailer: it is not read, and `_check_body` bounds it
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._request.expects_continue = True
        self._request.headers.append((name, value))
        if len(self._request.headers) > self.limits.header_count_limit:
            self._stop(self.limits.too_many_headers())

    def on_headers_complete(self) -> None:
        limits, request = self.limits, self._request
        if request.head_bytes > limits.header_limit_bytes:  # perhaps only because the same read brought a body
            size = len(request.url) + sum([len(name) + len(value) for name, value in request.headers])
            if size > limits.header_limit_bytes:
                self._stop(limits.head_too_long())
        if not _has_one_host(request.headers, self._parser.get_http_version()):
            self._stop(_WRONG_HOST)
        if self._parser.should_upgrade():
            if self._parser.get_method() == b"CONNECT":
                raise _Stop
            return  # the parser stops here: `_read_on_without_upgrade`
        is_behind = self._active is not None and not self._active.response_complete
        if is_behind and len(self._waiting) >= limits.pipeline_limit:
            self._stop(limits.too_many_requests())
        self._watch.enter(_BODY)
        cycle = self._cycle = Cycle(
            self,
            self._gate,
            self._scope(request),
            keep_alive=self._parser.should_keep_alive(),
            expects_continue=request.expects_continue,
        )
        cycle.scope["extensions"] = cycle.extensions()
        if is_behind:
            self._gate.pause_reading()
            self._waiting.append((cycle, self._service.app))
        else:
            self._start(cycle, self._service.app)

    def on_body(self, body: bytes) -> None:
        self._request.body_bytes += len(body)
        if self._cycle is not None:
            self._cycle.request.add(body)

    def on_message_complete(self) -> None:
        if self._watch.phase is _HEAD:
            return  # the parser believes that an upgrade ends the request
        cycle = self._cycle
        if cycle is not None:
            cycle.request.end()
        self._request.head_bytes = 0
        # Answered before its body was complete, or not yet.
        self._watch.enter(_WAITING if cycle is not None and cycle.response_complete else _ANSWERING)

    def _scope(self, request: _Request) -> dict[str, object]:
        split = _split_known if len(request.url) <= KNOWN_URL_BYTES else _split
        path, raw_path, query = split(request.url)
        scheme, server, client = request.ends
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self._parser.get_http_version(),
            "server": server,
            "client": client,
            "scheme": scheme,
            "method": self._parser.get_method().decode("ascii"),
            "root_path": "",
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": request.headers,
            "state": {},
        }

    def _without_upgrade(self, rest: bytes) -> bytes:
        """Return the request as if it requested no other protocol, and `rest`: so HTTP lets a server decline.

        The parser leaves the body of such a request out. Clients that prefer HTTP/2 (Java's) send one with every POST.
        """
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        kept = [b"%b: %b\r\n" % header for header in self._request.headers if header[0] not in _HOP]
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._request.url, version, b"".join(kept))
        self._parser = httptools.HttpRequestParser(self)
        return head + rest

    # -- answers ---------------------------------------------------------------------------------------------------------

    def _start(self, cycle: Cycle, app: Application) -> None:
        self._active = cycle
        self._service.run(cycle, app)

    def answered(self) -> None:
        """End the active cycle: its answer is complete."""
        if self.transport.is_closing() or self._watch.phase is _LEAVING:
            return
        if self._gate.read_paused:
            self._gate.resume_reading()
        if self._waiting:
            self._start(*self._waiting.popleft())
        elif self._watch.phase is _ANSWERING:
            self._watch.enter(_WAITING)

    def close_after_answer(self) -> None:
        """Close, but leave a client that is still sending its request the time to read the answer."""
        if self._watch.phase is _BODY:
            self._linger()
        else:
            self.transport.close()

    def close(self) -> None:
        """Close once the answer under way is complete; at once where none is."""
        if self._cycle is None or self._cycle.response_complete:
            self.transport.close()
        else:
            self._cycle.keep_alive = False

    # -- limits ----------------------------------------------------------------------------------------------------------

    @property
    def is_reading_paused(self) -> bool:
        """Whether what the client sends waits because of this side."""
        return self._gate.read_paused

    def count(self, limit: str) -> None:
        """Count a refusal."""
        self._service.refused(limit)

    def _stop(self, rejection: Rejection) -> None:
        self.refuse(rejection)
        raise _Stop

    def _check_body(self) -> None:
        limits, request, cycle = self.limits, self._request, self._cycle
        if request.raw_bytes > FRAMING_FACTOR * request.body_bytes + limits.header_limit_bytes:
            # Not a body at all: chunk extensions or trailers without end. The header limit is what they may take.
            self.refuse(limits.too_much_framing())
        elif cycle is not None and cycle.response_complete and request.body_bytes > limits.body_limit_bytes:
            self._count_once("body_size")  # answered long ago, and still sending
            self._linger()

    def _count_once(self, limit: str) -> None:
        if not self._is_refused:
            self._is_refused = True
            self.count(limit)

    def refuse(self, rejection: Rejection) -> None:
        """Answer what is wrong and read no more requests. An answer under way is finished first."""
        if self._is_refused:
            return
        self._count_once(rejection.limit)
        own = self._cycle if self._watch.phase is _BODY else None
        if self.transport.is_closing():
            return
        active = self._active
        if active is not None and not active.response_complete and active is not own:
            # The refusal waits for its turn, as the request would have.
            if self._waiting and self._waiting[-1][0] is own:
                self._waiting.pop()
            self._cycle = Cycle(self, self._gate, {**active.scope, "method": "GET"}, keep_alive=False)
            self._waiting.append(
                (
                    self._cycle,
                    partial(_answer, *self._service.render(rejection, self._request.headers), rejection.status),
                )
            )
            self._watch.enter(_ANSWERING)
            return
        if own is not None:
            if own.response_started:
                if own.response_complete:
                    self._linger()
                else:
                    self.transport.abort()
                return
            own.disconnect()  # the rest of the body will not arrive
        headers, body = self._service.render(rejection, self._request.headers)
        head = b"".join([b"%b: %b\r\n" % header for header in headers.items()])
        framing = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(status_line(rejection.status) + head + framing + body)
        self._linger()

    def _linger(self) -> None:
        """Close when the client has read what was written and left, or has sent nothing for `LINGER_SECONDS`."""
        transport = self.transport
        if transport.is_closing() or self._watch.phase is _LEAVING:
            return
        self._is_refused = True
        self._gate.resume_reading()
        if transport.can_write_eof():
            transport.write_eof()
        self._watch.leave()


def _has_one_host(headers: list[tuple[bytes, bytes]], version: str) -> bool:
    host: bytes | None = None
    for name, value in headers:
        if name == b"host":
            if host is not None:
                return False
            host = value
    return version != "1.1" if host is None else _HOST.fullmatch(host) is not None


def _split(url: bytes) -> tuple[str, bytes, bytes]:
    """Return the path, the path as it was sent, and the query. Raises what the parser raises."""
    parts = httptools.parse_url(url)
    path = parts.path.decode("ascii")
    return unquote(path) if "%" in path else path, parts.path, parts.query or b""


_split_known: Final = lru_cache(maxsize=256)(_split)


def _ends(transport: asyncio.BaseTransport) -> tuple[str, _Address, _Address]:
    get = transport.get_extra_info
    return "http" if get("sslcontext") is None else "https", _address(get("sockname")), _address(get("peername"))


def _address(found: object) -> _Address:
    return (str(found[0]), int(found[1])) if isinstance(found, tuple) and len(found) >= 2 else None


async def _answer(
    headers: Mapping[bytes, bytes], body: bytes, status: int, scope: Scope, receive: Receive, send: Send
) -> None:
    framing = [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": [*headers.items(), *framing]})
    await send({"type": "http.response.body", "body": body})
