"""What Envoy sends a picker, without Envoy: its calls over one connection, byte by byte as Envoy 1.40 wrote them once."""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Iterable
from typing import Final, cast

from dynamo.picker.grpc.connection import (
    ACK,
    CANCEL,
    DATA,
    END_HEADERS,
    HEADERS,
    MAX_WINDOW,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW,
    WINDOW_UPDATE,
    frame,
)
from dynamo.picker.grpc.hpack import write_headers
from dynamo.picker.wire import of_bytes, of_number

ANSWER: Final = b'{"id":"1","object":"text_completion","choices":[{"index":0,"text":"a","finish_reason":"length"}]}'
_PATH: Final = bytes.fromhex(  # /envoy.service.ext_proc.v3.ExternalProcessor/Process, which Envoy writes anew each time
    "04a560b5773fa5d05b3b98855cbe5315761c8bf7657c1e525b2a1d1aec390a841ec635d8721508"
)
# What it writes once, and names by a number from then on.
_NUMBERED: Final = (
    (b":authority", b"picker"), (b"te", b"trailers"), (b"content-type", b"application/grpc"),
    (b"x-envoy-internal", b"true"), (b"x-forwarded-for", b"127.0.0.1"),
)  # fmt: skip
_FIRST: Final = b"\x83\x86" + _PATH + b"".join(b"\x40" + write_headers([each])[1:] for each in _NUMBERED)
_LATER: Final = b"\x83\x86" + _PATH + bytes(range(0xBE, 0xBE + len(_NUMBERED)))
_DESTINATION: Final = re.compile(rb"x-gateway-destination-endpoint.{2}(\d+\.\d+\.\d+\.\d+:\d+)", re.DOTALL)


def _headers(field: int, headers: Iterable[tuple[str, str]]) -> bytes:
    pairs = (of_bytes(1, of_bytes(1, name.encode()) + of_bytes(3, value.encode())) for name, value in headers)
    return of_bytes(field, of_bytes(1, b"".join(pairs)))


class Call:
    """One request on its way: what is sent next, and how many messages answer it."""

    def __init__(self, number: int, body: bytes, *, duplex: bool) -> None:
        self.began, self.chosen_after = time.perf_counter(), 0.0
        self.destination = b""
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.awaited = 0
        self._received = b""
        self._duplex = duplex
        named = [
            (":authority", "a"), (":path", "/v1/completions"), (":method", "POST"), (":scheme", "http"),
            ("content-type", "application/json"), ("content-length", str(len(body))), ("x-forwarded-proto", "http"),
            ("x-request-id", f"8c924250-ce5e-4c95-bbc4-{number:012}"),
        ]  # fmt: skip
        modes = of_number(1, 4) + of_number(2, 4) if duplex else of_number(1, 2)
        head, none = _headers(2, named) + of_bytes(8, b"") + of_bytes(11, modes), of_bytes(8, b"")
        self._steps: deque[tuple[list[bytes], int]] = deque(
            [([head, of_bytes(4, of_bytes(1, body)) + none, of_bytes(4, of_number(2, 1)) + none], 2)]
            if duplex
            else [([head], 1), ([of_bytes(4, of_bytes(1, body) + of_number(2, 1)) + none], 1)]
        )

    def take(self, data: bytes) -> bool:
        """Take data of the call's stream, and return whether all answers to the last step have come."""
        self._received += data
        while len(self._received) >= 5 and len(self._received) >= (
            size := 5 + int.from_bytes(self._received[1:5], "big")
        ):
            message, self._received = self._received[5:size], self._received[size:]
            self.awaited -= 1
            if not self.destination and (found := _DESTINATION.search(message)) is not None:
                self.destination, self.chosen_after = found[1], time.perf_counter() - self.began
                self._steps.append(self._answer())
        return self.awaited <= 0

    def next_messages(self) -> list[bytes]:
        """Return what is sent next; nothing: the call is over."""
        if not self._steps:
            return []
        messages, self.awaited = self._steps.popleft()
        return messages

    def _answer(self) -> tuple[list[bytes], int]:
        names = (b"x-gateway-destination-endpoint", b"x-gateway-destination-endpoint-served")
        text = of_bytes(3, self.destination)
        members = b"".join(of_bytes(1, of_bytes(1, name) + of_bytes(2, text)) for name in names)
        served = of_bytes(8, of_bytes(1, of_bytes(1, b"envoy.lb") + of_bytes(2, members)))
        named = [
            (":status", "200"), ("content-type", "application/json"), ("content-length", str(len(ANSWER))),
            ("x-envoy-upstream-service-time", "0"),
        ]  # fmt: skip
        messages = [_headers(3, named) + served]
        if self._duplex:
            messages += [of_bytes(5, of_bytes(1, ANSWER)) + served, of_bytes(5, of_number(2, 1)) + served]
        return messages, len(messages)


class EnvoyCalls(asyncio.Protocol):
    """A connection of Envoy's to the picker."""

    def __init__(self) -> None:
        self._calls: dict[int, Call] = {}
        self._received = b""
        self._last = -1
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        grown = (MAX_WINDOW - WINDOW).to_bytes(4, "big")
        self._transport.write(PREFACE + frame(SETTINGS, 0, 0) + frame(WINDOW_UPDATE, 0, 0, grown))

    async def send(self, number: int, body: bytes, *, duplex: bool) -> Call | None:
        """Send one request, and return it with its choice; None: it was refused."""
        self._last += 2
        stream, call = self._last, Call(number, body, duplex=duplex)
        self._calls[stream] = call
        block = frame(HEADERS, END_HEADERS, stream, _FIRST if stream == 1 else _LATER)
        self._write(block + self._framed(stream, call.next_messages()))
        return call if await call.done else None

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._received += data
        at = 0
        while len(self._received) >= at + 9:
            size = int.from_bytes(self._received[at : at + 3], "big")
            if len(self._received) < at + 9 + size:
                break
            kind, flags = self._received[at + 3 : at + 5]
            number = int.from_bytes(self._received[at + 5 : at + 9], "big")
            self._take(kind, flags, number, self._received[at + 9 : at + 9 + size])
            at += 9 + size
        self._received = self._received[at:]

    def connection_lost(self, error: Exception | None) -> None:
        for number in list(self._calls):
            self._end(number, is_served=False)

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        call = self._calls.get(number)
        if kind == SETTINGS and not flags & ACK:
            self._write(frame(SETTINGS, ACK, 0))
        elif kind == RST_STREAM or (kind == HEADERS and flags & 1):
            self._end(number, is_served=False)
        elif kind == DATA and call is not None and call.take(payload):
            if messages := call.next_messages():
                self._write(self._framed(number, messages))
            else:
                self._write(frame(RST_STREAM, 0, number, CANCEL.to_bytes(4, "big")))
                self._end(number, is_served=bool(call.destination))

    def _end(self, number: int, *, is_served: bool) -> None:
        if (call := self._calls.pop(number, None)) is not None:
            call.done.set_result(is_served)

    def _framed(self, stream: int, messages: list[bytes]) -> bytes:
        return b"".join(frame(DATA, 0, stream, b"\0" + len(each).to_bytes(4, "big") + each) for each in messages)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)
