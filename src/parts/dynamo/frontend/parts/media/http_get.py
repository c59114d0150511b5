"""One GET request to one address that was checked: HTTP/1.1, no redirects, no proxy, every size bounded.

The name of the host goes into the `Host` header, into TLS and into the check of the certificate; the connection goes to the
address that the caller chose. So no second DNS answer can move it.
"""

from __future__ import annotations

import asyncio
import ssl
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import httptools

from dynamo.errors import Overloaded
from dynamo.frontend.parts.media.addresses import FetchTarget, MediaRefused

MAX_HEAD_BYTES: Final = 64 * 1024
_READ_BYTES: Final = 64 * 1024
_CODINGS: Final = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
_REDIRECTS: Final = (301, 302, 303, 307, 308)


class Answered:
    """What a server answered: the body, or where it lies instead."""

    __slots__ = ("_window_bits", "body", "cache_control", "location")

    def __init__(self, body: bytes, location: str | None, cache_control: str, window_bits: int | None = None) -> None:
        """`window_bits`: of zlib, where the server compressed the body; None: it did not."""
        self.body, self.location, self.cache_control = body, location, cache_control
        self._window_bits = window_bits

    @property
    def is_compressed(self) -> bool:
        """Whether `unpacked` has something to do."""
        return self._window_bits is not None

    def unpacked(self, max_bytes: int) -> bytes:
        """Return the body as it was before its server compressed it. Blocks; raises MediaRefused where it is longer."""
        if self._window_bits is None:
            return self.body
        inflate = zlib.decompressobj(self._window_bits)
        try:
            found = inflate.decompress(self.body, max_bytes + 1)
        except zlib.error:
            raise MediaRefused("its server sent a content encoding that cannot be read") from None
        if len(found) > max_bytes:
            del found  # the traceback of an error keeps this frame
            raise _too_long(max_bytes)
        if not inflate.eof:
            raise MediaRefused("its server closed the connection too early")
        return found


async def get(
    target: FetchTarget, addresses: Sequence[str], *, agent: str, max_bytes: int, take: Callable[[int], None]
) -> Answered:
    """Return the answer of the first address that can be reached. `take` gets each piece of the body, and may raise.

    Raises MediaRefused. The caller bounds the time.
    """
    reader, writer = await _connect(target, addresses)
    try:
        head = (
            f"GET {target.path} HTTP/1.1\r\nHost: {target.authority}\r\nUser-Agent: {agent}\r\nAccept: */*\r\n"
            "Accept-Encoding: identity\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode("ascii"))
        return await _read(reader, max_bytes, take)
    except (OSError, ssl.SSLError):
        raise MediaRefused("the connection to its server was lost") from None
    finally:
        writer.transport.abort()  # nothing is reused, and a server that stalls must not delay anything


async def _connect(target: FetchTarget, addresses: Sequence[str]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    options: dict[str, Any] = {}
    if target.scheme == "https":
        options = {"ssl": await _tls(), "server_hostname": target.host}
    for address in addresses:
        try:
            return await asyncio.open_connection(address, target.port, limit=_READ_BYTES, **options)
        except ssl.SSLError:
            raise MediaRefused("the TLS connection to its server failed") from None
        except OSError:
            continue
    raise MediaRefused("its server cannot be reached")


_context: ssl.SSLContext | None = None


async def _tls() -> ssl.SSLContext:
    """Return the context of all fetches; the first one reads the authorities of this machine, which takes milliseconds."""
    global _context
    if _context is None:
        _context = await asyncio.to_thread(ssl.create_default_context)
    return _context


async def _read(reader: asyncio.StreamReader, max_bytes: int, take: Callable[[int], None]) -> Answered:
    answer = _AnswerReader(max_bytes, take)
    head_bytes = 0
    try:
        while not answer.is_complete:
            data = await reader.read(_READ_BYTES)
            if not data:
                answer.end_of_stream()
                break
            if not answer.status:
                head_bytes += len(data)
            answer.feed(data)
            if head_bytes > MAX_HEAD_BYTES and not answer.status:
                raise MediaRefused("the headers of its server are too long")
    except httptools.HttpParserError as error:
        if isinstance(error.__context__, MediaRefused | Overloaded):  # raised inside a callback
            raise error.__context__ from None
        raise MediaRefused("its server does not speak HTTP/1.1") from None
    else:
        return answer.result()
    finally:
        answer.close()


def _too_long(max_bytes: int) -> MediaRefused:
    return MediaRefused(f"it has more than the {max_bytes} bytes allowed (DYN_MM_MAX_FILE_SIZE_MB)")


class _AnswerReader:
    """Judges an answer while it comes in: the parser calls it back."""

    def __init__(self, max_bytes: int, take: Callable[[int], None]) -> None:
        self._max_bytes, self._take = max_bytes, take
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self._window_bits: int | None = None
        self.status = 0  # 0 until the head is complete
        self.is_complete = False

    def close(self) -> None:
        """Let go of the body and the parser, which calls this object back: a circle that only the collector would find."""
        self._body = bytearray()
        del self._parser

    def feed(self, data: bytes) -> None:
        """Take what the server sent. Raises MediaRefused inside the parser's own errors."""
        self._parser.feed_data(data)

    # -- callbacks of the parser -------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; of a repeated one the first counts."""
        self._headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        """Judge the head, before any of the body is read."""
        status = self._parser.get_status_code()
        if status < 200:  # the answer is still to come
            self._headers.clear()
            return
        self.status = status
        if status in _REDIRECTS:
            self.is_complete = True  # the text of a redirect is for people
            return
        if status != 200:
            raise MediaRefused(f"its server answered with status {status}")
        length = self._headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > self._max_bytes:
            raise _too_long(self._max_bytes)
        coding = self._headers.get("content-encoding", "").strip().lower()
        if coding not in ("", "identity"):
            if coding not in _CODINGS:
                raise MediaRefused("its server sent a content encoding that was not asked for")
            self._window_bits = _CODINGS[coding]

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        if self.is_complete:
            return
        if len(self._body) + len(body) > self._max_bytes:
            raise _too_long(self._max_bytes)
        self._take(len(body))
        self._body += body

    def on_message_complete(self) -> None:
        """Take the end of the answer."""
        self.is_complete = self.status >= 200

    # -- the end -----------------------------------------------------------------------------------------------------

    def end_of_stream(self) -> None:
        """Take the end of the connection: it ends a body without a length, and cuts off any other."""
        if not self.status or "content-length" in self._headers or "transfer-encoding" in self._headers:
            raise MediaRefused("its server closed the connection too early")

    def result(self) -> Answered:
        """Return the whole answer."""
        if self.status in _REDIRECTS:
            location = self._headers.get("location")
            if not location:
                raise MediaRefused("its server redirected it to nowhere")
            return Answered(b"", location, "")
        return Answered(bytes(self._body), None, self._headers.get("cache-control", ""), self._window_bits)
