"""A small closed-loop load generator: raw HTTP/1.1 over kept-alive connections, so that it costs little itself."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field


@dataclass
class Outcome:
    """What one load window saw."""

    requests: int = 0
    tokens: int = 0
    events: int = 0  # SSE events with content
    errors: int = 0
    seconds: float = 0.0
    first_token: list[float] = field(default_factory=list)  # seconds
    gaps: list[float] = field(default_factory=list)  # seconds between reads of one stream


async def _one(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, payload: bytes, outcome: Outcome, stream: bool
) -> None:
    begun = time.perf_counter()
    writer.write(payload)
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        outcome.errors += 1
        length = next(
            (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0
        )
        await reader.readexactly(length)
        return
    if not stream:
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        )
        body = json.loads(await reader.readexactly(length))
        outcome.tokens += body["usage"]["completion_tokens"]
        outcome.requests += 1
        return
    tail = b""
    first = True
    last = begun
    while True:
        data = await reader.read(262_144)
        if not data:
            outcome.errors += 1
            return
        now = time.perf_counter()
        if first:
            if b'"content"' in data:
                outcome.first_token.append(now - begun)
                first = False
        else:
            outcome.gaps.append(now - last)
        last = now
        outcome.events += data.count(b'"content"')
        tail = (tail + data)[-600:]
        if tail.endswith(b"0\r\n\r\n"):
            break
    at = tail.rfind(b'"completion_tokens":')
    outcome.tokens += int(tail[at + 20 :].split(b",")[0].split(b"}")[0])
    outcome.requests += 1


def request_bytes(port: int, path: str, body: dict[str, object]) -> bytes:
    """One POST, ready to send."""
    data = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    ).encode() + data


async def run_load(
    port: int, bodies: list[dict[str, object]], *, streams: int, requests: int, stream: bool = True
) -> Outcome:
    """`requests` requests over `streams` connections, each sending its next as soon as its last is answered."""
    outcome = Outcome()
    payloads = [request_bytes(port, "/v1/chat/completions", body) for body in bodies]
    remaining = iter(range(requests))

    async def worker(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        try:
            for turn in remaining:
                await _one(reader, writer, payloads[turn % len(payloads)], outcome, stream)
        finally:
            writer.close()

    begun = time.perf_counter()
    await asyncio.gather(*(worker(i) for i in range(streams)))
    outcome.seconds = time.perf_counter() - begun
    return outcome
