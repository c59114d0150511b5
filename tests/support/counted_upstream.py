"""An OpenAI-compatible server behind a gateway with budgets: it counts what it reads and makes, while its clients are there.

It runs in the process of the clients, so that what was spent is known at every moment, without a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

MODEL: Final = "bench"
PROMPT: Final = "Count from one upwards, please."
PROMPT_TOKENS: Final = 14  # as LiteLLM counts them; the words alone are 7
WORDS: Final = (" one", " two", " three", " four", " five", " six", " seven", " eight", " nine", " ten")  # a token each
HEAD: Final = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: "
COMMON: Final = {"id": "chatcmpl-1", "created": 1760000000, "model": MODEL}
MODELS: Final = {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "bench"}]}


@dataclass
class CountedUpstream:
    """What was spent, in tokens, and the pace of each answer."""

    delay_seconds: float
    port: int = 0
    prompts: int = 0
    """Requests that arrived."""
    made: int = 0
    """Tokens of output, those of all choices, until the connection was closed."""
    _open: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def spent(self) -> int:
        """The tokens of input and output."""
        return self.prompts * PROMPT_TOKENS + self.made

    @property
    def running(self) -> int:
        """How many answers are not complete."""
        return len(self._open)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, and close."""
        self._open.add(writer)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                head = await reader.readuntil(b"\r\n\r\n")
                if not head.startswith(b"POST "):
                    writer.write(_whole(MODELS))
                    return
                length = next(
                    int(line.partition(b":")[2])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length:")
                )
                body = json.loads(await reader.readexactly(length))
                # A client that leaves closes its half, which is the end of what can be read.
                leaving = asyncio.create_task(reader.read())
                try:
                    await self._answer(body, writer, leaving)
                finally:
                    leaving.cancel()
                await writer.drain()
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answer(self, body: dict[str, Any], writer: asyncio.StreamWriter, leaving: asyncio.Task[bytes]) -> None:
        self.prompts += 1
        choices, most = body.get("n") or 1, body.get("max_completion_tokens") or body.get("max_tokens") or 16
        is_stream = bool(body.get("stream"))
        if is_stream:
            writer.write(HEAD + b"text/event-stream\r\n\r\n")
        for number in range(most):
            await asyncio.sleep(self.delay_seconds)
            if leaving.done() or writer.is_closing():
                return
            self.made += choices
            if is_stream:
                reason = "length" if number == most - 1 else None
                for index in range(choices):
                    delta = {"index": index, "delta": {"content": WORDS[number % len(WORDS)]}, "finish_reason": reason}
                    writer.write(_event([delta]))
        output = most * choices
        usage = {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": output,
            "total_tokens": PROMPT_TOKENS + output,
        }
        if is_stream:
            writer.write(_event([], usage=usage) + b"data: [DONE]\n\n")
            return
        message = {"role": "assistant", "content": "".join(WORDS[number % len(WORDS)] for number in range(most))}
        made = [{"index": index, "message": message, "finish_reason": "length"} for index in range(choices)]
        writer.write(_whole({**COMMON, "object": "chat.completion", "choices": made, "usage": usage}))


def _event(choices: list[dict[str, Any]], **more: Any) -> bytes:
    return (
        b"data: %b\n\n" % json.dumps({**COMMON, "object": "chat.completion.chunk", "choices": choices, **more}).encode()
    )


def _whole(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return HEAD + b"application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)


@asynccontextmanager
async def counted_upstream(delay_seconds: float) -> AsyncIterator[CountedUpstream]:
    """Serve at a port of this machine."""
    made = CountedUpstream(delay_seconds)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
