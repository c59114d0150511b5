"""The least that a Python server can cost on this machine: a bare uvicorn app that sends one ready event per token.

It parses no request, knows no model, and has no worker behind it. What our frontend costs beyond it is what it does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--delay", type=float, default=0.02)
    arguments = parser.parse_args()
    uvicorn.run(
        app(arguments.delay),
        host="127.0.0.1",
        port=arguments.port,
        log_level="warning",
        access_log=False,
        lifespan="off",
    )
