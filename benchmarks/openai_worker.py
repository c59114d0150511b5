"""A worker for gateways that relay HTTP: it answers chat requests as an OpenAI server does, and computes nothing.

Each token is an event of its own, written when it is due, with one of the three rhythms of `engine.py`: `--delay 0` gives
every stream a token in each turn of the loop (burst), `--delay S` each stream one every S seconds (paced), `--step S` all
streams one at the same moment (stepped). It reads no more of a request than `stream` and `max_tokens`, and has no tokenizer.
So a gateway in front of it is measured with the cheapest worker that it can have.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from typing import Any, Final, cast

import uvloop

TOKENS: Final = re.compile(rb'"max_(?:completion_)?tokens": ?(\d+)')
STREAM: Final = re.compile(rb'"stream": ?true')
LENGTH: Final = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
PROMPT_TOKENS: Final = 64
COMMON: Final = {"id": "chatcmpl-3f2b8a526f0e4b939d5c0a7a3c1f9e11", "created": 1760000000, "model": "bench"}
MODELS: Final = {"object": "list", "data": [{"id": "bench", "object": "model", "created": 0, "owned_by": "bench"}]}


def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
    """Return one event as a chunk of a chunked answer."""
    body = json.dumps({**COMMON, "object": "chat.completion.chunk", "choices": choices, **more}, separators=(",", ":"))
    return b"%x\r\ndata: %b\n\n\r\n" % (len(body) + 8, body.encode())


def token_event(finish: str | None) -> bytes:
    """Return the event of one token."""
    return event([{"index": 0, "delta": {"content": " token"}, "logprobs": None, "finish_reason": finish}])


def usage(count: int) -> dict[str, int]:
    """Return the usage of an answer of `count` tokens."""
    return {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": count, "total_tokens": PROMPT_TOKENS + count}


def whole(body: dict[str, Any]) -> bytes:
    """Return an answer in one piece."""
    data = json.dumps(body).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)


MIDDLE: Final = token_event(None)
LAST: Final = token_event("length")
STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
DONE: Final = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Rhythm:
    """Gives the running streams their tokens."""

    def __init__(self, delay: float, step: float) -> None:
        self.delay, self._step = delay, step
        self._running: set[Answers] = set()
        self._is_due = False

    def begin(self, stream: Answers) -> None:
        """Give `stream` its tokens from now on."""
        if self.delay:
            asyncio.get_running_loop().call_later(self.delay, self._paced, stream)
            return
        self._running.add(stream)
        self._next()

    def leave(self, stream: Answers) -> None:
        """Give it no more."""
        self._running.discard(stream)

    def _paced(self, stream: Answers) -> None:
        if stream.token():
            asyncio.get_running_loop().call_later(self.delay, self._paced, stream)

    def _next(self) -> None:
        if self._is_due or not self._running:
            return
        self._is_due = True
        loop = asyncio.get_running_loop()
        if self._step:
            loop.call_at((loop.time() // self._step + 1) * self._step, self._turn)
        else:
            loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._is_due = False
        self._running -= {stream for stream in self._running if not stream.token()}
        self._next()


class Answers(asyncio.Protocol):
    """One connection; one request on it at a time."""

    def __init__(self, rhythm: Rhythm) -> None:
        self._rhythm = rhythm
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._left = self._count = 0
        self._is_streamed = self._is_full = self._is_behind = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._rhythm.leave(self)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        if self._is_behind:
            self._is_behind = False
            self._rhythm.begin(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._buffer[:end]
        length = int(found[1]) if (found := LENGTH.search(head)) else 0
        if len(self._buffer) >= end + 4 + length:
            body, self._buffer = self._buffer[end + 4 : end + 4 + length], self._buffer[end + 4 + length :]
            self._request(head, body)

    def _request(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        if not head.startswith(b"POST "):  # health, models, whatever a gateway asks
            self._transport.write(whole(MODELS))
            return
        self._count = self._left = int(found[1]) if (found := TOKENS.search(body)) else 16
        self._is_streamed = STREAM.search(body) is not None
        if self._is_streamed:
            self._transport.write(STREAM_HEAD)
        self._rhythm.begin(self)

    def token(self) -> bool:
        """Send the next token; False when no other one shall come by itself."""
        transport = self._transport
        if transport is None:
            return False
        if self._is_full:  # the reader is behind: its next token comes when it has caught up
            self._is_behind = True
            return False
        self._left -= 1
        if self._left:
            if self._is_streamed:
                transport.write(MIDDLE)
            return True
        if self._is_streamed:
            transport.write(LAST + event([], usage=usage(self._count)) + DONE)
        else:
            message = {"role": "assistant", "content": " token" * self._count}
            choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
            transport.write(
                whole({**COMMON, "object": "chat.completion", "choices": [choice], "usage": usage(self._count)})
            )
        return False


async def serve(port: int, delay: float, step: float) -> None:
    """Serve until killed."""
    rhythm = Rhythm(delay, step)
    server = await asyncio.get_running_loop().create_server(lambda: Answers(rhythm), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--step", type=float, default=0.0)
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.port, arguments.delay, arguments.step))
