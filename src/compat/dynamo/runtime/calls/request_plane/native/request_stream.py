"""A stream of requests on the native wire, at its worker: a second connection to the caller, which sends on it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from typing import Any, Final, cast

import msgspec

from dynamo.runtime.base.tasks import OneWaiter
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import RequestStream
from dynamo.runtime.calls.request_plane.expansion import exceeds_when_decoded
from dynamo.runtime.calls.request_plane.native.frames import (
    MAX_MESSAGE_BYTES,
    Codec,
    MalformedFrame,
    TwoPart,
    TwoPartDecoder,
    decode_body,
    handshake,
)
from dynamo.runtime.observe.log_rate import LogRate

logger = logging.getLogger(__name__)

HELD_REQUESTS: Final = 8  # decoded and not read yet, as in 1.6; then the socket is no longer read


class NativeRequestStream(RequestStream, asyncio.Protocol):
    """The connection and the iterator in one object.

    "sentinel" is the end and nothing more; "stop" also stops the request's context. "kill", a broken frame and a connection
    that ends without a word kill it: a part of the input must not pass for the whole.
    """

    def __init__(
        self, subject: str, codec: Codec, context: Context, log: LogRate | None = None, max_decoded_bytes: int = 1 << 28
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._greeting = handshake(subject, "request")
        self._decode_request = partial(_decode_request, codec, max_decoded_bytes)
        self._context = context
        self._log = log or LogRate(logger)
        self._decoder = TwoPartDecoder(max_data_bytes=MAX_MESSAGE_BYTES)
        self._requests: deque[Any] = deque()
        self._has_ended = False
        self._is_reading = True
        self._waiter = OneWaiter()
        self._transport: asyncio.Transport | None = None
        self._forget = context.on_cancel(self._cancelled)

    # -- RequestStream -------------------------------------------------------------------------------------------

    async def __anext__(self) -> Any:
        while not self._requests:
            if self._has_ended:
                raise StopAsyncIteration
            await self._waiter.wait()
        request = self._requests.popleft()
        self._decode()
        return request

    def close(self) -> None:
        self._forget()
        self._has_ended = True
        self._requests.clear()
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports implement `asyncio.Transport` without inheriting from it.
        transport = self._transport = cast(asyncio.Transport, transport)
        transport.write(self._greeting)
        if self._has_ended:  # killed while it was being connected
            transport.close()
        elif transport.can_write_eof():
            transport.write_eof()

    def data_received(self, data: bytes) -> None:
        self._decoder.feed(data)
        self._decode()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._broken(str(exc) if exc else "the connection was closed")

    # -- for the server ------------------------------------------------------------------------------------------

    def not_connected(self) -> None:
        """End the stream: the connection could not be made."""
        self._broken("it could not be connected")

    # -- inside --------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """Take over as many requests as there is room for."""
        try:
            while len(self._requests) < HELD_REQUESTS and not self._has_ended:
                frame = self._decoder.next_frame()
                if frame is None:
                    break
                self._on_frame(frame)
        except MalformedFrame as error:
            self._broken(str(error))
        self._flow(reads=len(self._requests) < HELD_REQUESTS)
        if self._requests or self._has_ended:
            self._waiter.wake()

    def _on_frame(self, frame: TwoPart) -> None:
        if not frame.header:
            self._requests.append(self._decode_request(frame.data))
            return
        match None if frame.data else _word(frame.header):
            case "sentinel":
                self._has_ended = True
            case "stop":
                self._has_ended = True
                self._context.stop_generating()
            case "kill":
                self._has_ended = True
                self._context.kill()
            case _:
                raise MalformedFrame("a control frame that is neither sentinel, stop nor kill")
        if self._transport is not None:
            self._transport.close()

    def _flow(self, *, reads: bool) -> None:
        transport = self._transport
        if transport is None or transport.is_closing() or reads == self._is_reading:
            return
        self._is_reading = reads
        if reads:
            transport.resume_reading()
        else:
            transport.pause_reading()

    def _broken(self, why: str) -> None:
        if self._has_ended:
            return
        text = "request %s: killed, the stream of its requests broke off: %s"
        self._log.warn("streams of requests that broke off", text, self._context.id(), why)
        self._has_ended = True
        self._context.kill()
        if self._transport is not None:
            self._transport.abort()
        self._waiter.wake()

    def _cancelled(self, killed: bool) -> None:
        if killed:
            self._loop.call_soon_threadsafe(self._end_of_request)

    def _end_of_request(self) -> None:
        self._has_ended = True
        self._requests.clear()
        if self._transport is not None:
            self._transport.abort()
        self._waiter.wake()


def _decode_request(codec: Codec, max_decoded_bytes: int, data: bytes) -> Any:
    if exceeds_when_decoded(data, max_decoded_bytes, codec):
        raise MalformedFrame(f"a request of {len(data)} bytes exceeds DYN_TCP_MAX_DECODED_MB once decoded")
    return decode_body(data, codec)


def _word(header: bytes) -> Any:
    try:
        return msgspec.json.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
