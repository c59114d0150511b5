"""The least that a Python server can cost on this machine, five ways. What ours costs beyond them is what it does.

    --what uvicorn  a bare ASGI app that sends one ready event per token, each stream asleep in between
    --what write    one `transport.write` of a ready event per token, from a plain protocol with one timer for all streams:
                    the part of a frontend that no frontend can leave out
    --what step     the same, but all streams get their event in the same turn of the loop, once every delay: what an engine
                    with continuous batching makes of it
    --what wake     no server: so many async generators that one future wakes together, once every delay; prints the cost of
                    one yield
    --what sleep    no server: so many async generators that sleep and yield, and nothing else; prints the cost of one yield,
                    which is the part of a paced worker that belongs to its engine

None parses a request, knows a model, or has a worker behind it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import uvicorn
import uvloop

EVENT = (
    b'data: {"id":"chatcmpl-3f2b8a52-6f0e-4b93-9d5c-0a7a3c1f9e11","choices":[{"index":0,"delta":{"content":" token"},'
    b'"finish_reason":null,"logprobs":null}],"created":1760000000,"model":"bench","object":"chat.completion.chunk"}\n\n'
)
TOKENS = re.compile(rb'"max_tokens": ?(\d+)')


def app(delay: float) -> Callable[..., Awaitable[None]]:
    """An ASGI app; `delay` in seconds between events."""

    async def serve(scope: dict[str, Any], receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        if scope["type"] != "http":
            return
        body, is_more = b"", True
        while is_more:
            message = await receive()
            body, is_more = body + message.get("body", b""), message.get("more_body", False)
        matched = TOKENS.search(body)
        count = int(matched[1]) if matched else 1
        usage = {"prompt_tokens": 64, "completion_tokens": count, "total_tokens": 64 + count}
        headers = [(b"content-type", b"text/event-stream")]
        if b'"stream"' not in body:
            answer = json.dumps({"usage": usage}).encode()
            headers = [(b"content-length", b"%d" % len(answer))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": answer})
            return
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(count):
            if delay:
                await asyncio.sleep(delay)
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        end = f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode()
        await send({"type": "http.response.body", "body": end})

    return serve


class Writer(asyncio.Protocol):
    """Answers each request with events that the ticker writes."""

    def __init__(self, due: dict[Writer, tuple[float, int]]) -> None:
        self.due = due
        self.transport: Any = None
        self.count = 0
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.due.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if not self.buffer.endswith(b"}"):
            return
        matched = TOKENS.search(self.buffer)
        self.count = int(matched[1]) if matched else 1
        is_streamed, self.buffer = b'"stream"' in self.buffer, b""
        if not is_streamed:
            answer = json.dumps({"usage": self.usage()}).encode()
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer))
            return
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        self.due[self] = (asyncio.get_running_loop().time(), self.count)

    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": 64, "completion_tokens": self.count, "total_tokens": 64 + self.count}

    def end(self) -> None:
        last = f"data: {json.dumps({'choices': [], 'usage': self.usage()})}\n\ndata: [DONE]\n\n".encode()
        self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last))


async def write_only(port: int, delay: float, *, in_steps: bool) -> None:
    """Serve with `Writer` until killed; `in_steps`: one turn for the events of all streams."""
    loop = asyncio.get_running_loop()
    due: dict[Writer, tuple[float, int]] = {}
    chunk = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)

    def tick() -> None:
        now = loop.time()
        for writer, (when, left) in list(due.items()):
            if in_steps or when <= now:
                writer.transport.write(chunk)
                if left > 1:
                    due[writer] = (when + delay, left - 1)
                else:
                    del due[writer]
                    writer.end()
        # A worker's timers, which fire in steps of a millisecond, or its one timer, make this of it:
        loop.call_later(delay if in_steps else 0.001, tick)

    tick()
    server = await loop.create_server(lambda: Writer(due), "127.0.0.1", port)
    await server.serve_forever()


async def wake_only(streams: int, tokens: int, delay: float) -> float:
    """Microseconds of CPU per yield, all streams woken by one future."""
    loop = asyncio.get_running_loop()
    step: asyncio.Future[None] | None = None

    def end() -> None:
        nonlocal step
        ended, step = step, None
        if ended is not None:
            ended.set_result(None)

    def stepped() -> asyncio.Future[None]:
        nonlocal step
        if step is None:
            step = loop.create_future()
            loop.call_later(delay, end)
        return step

    async def generate() -> AsyncGenerator[dict[str, Any], None]:
        for number in range(tokens):
            await stepped()
            yield {"token_ids": [number], "index": 0}

    async def read() -> None:
        async for _ in generate():
            pass

    begun = time.process_time()
    await asyncio.gather(*[read() for _ in range(streams)])
    return 1e6 * (time.process_time() - begun) / (streams * tokens)


async def sleep_only(streams: int, tokens: int, delay: float) -> float:
    """Microseconds of CPU per yield."""

    async def generate() -> AsyncGenerator[dict[str, Any], None]:
        for number in range(tokens):
            await asyncio.sleep(delay)
            yield {"token_ids": [number], "index": 0}

    async def read() -> None:
        async for _ in generate():
            pass

    begun = time.process_time()
    await asyncio.gather(*[read() for _ in range(streams)])
    return 1e6 * (time.process_time() - begun) / (streams * tokens)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("uvicorn", "write", "step", "sleep", "wake"), default="uvicorn")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--delay", type=float, default=0.02)
    arguments = parser.parse_args()
    if arguments.what == "sleep":
        print(uvloop.run(sleep_only(arguments.streams, arguments.tokens, arguments.delay)))
    elif arguments.what == "wake":
        print(uvloop.run(wake_only(arguments.streams, arguments.tokens, arguments.delay)))
    elif arguments.what in ("write", "step"):
        uvloop.run(write_only(arguments.port, arguments.delay, in_steps=arguments.what == "step"))
    else:
        uvicorn.run(
            app(arguments.delay),
            host="127.0.0.1",
            port=arguments.port,
            log_level="warning",
            access_log=False,
            lifespan="off",
        )
