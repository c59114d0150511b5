"""A stand-in for `vllm serve`, as far as a gateway and a picker see it: HTTP, Prometheus figures, KV events over ZMQ with replay.

Honest in what matters there: prompts become tokens by the model's own tokenizer, whole blocks stay in a cache and are published in
vLLM's own format (msgpack arrays) with the engine's own names, a cache that is full evicts the oldest, and the replay socket sends
what is kept. Not like the real one: an answer is a word again and again, and takes the time that the test says.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq
from aiohttp import web
from tokenizers import Tokenizer

from dynamo.runtime.calls.event_plane.zmq import SocketReader
from support.demo_model import FILES

BLOCK: Final = 16
_END: Final = (-1).to_bytes(8, "big", signed=True)


class FakeVllm:
    """One pod. Use as `async with`; `address` is known then. Its ports stay the same when it is started again."""

    def __init__(
        self, host: str = "127.0.0.1", *, port: int = 0, model: str = "m", blocks: int = 1000, replays: bool = True,
        root: Path = FILES,
    ) -> None:  # fmt: skip
        self.host, self.port, self.model, self.blocks, self.root = host, port, model, blocks, root
        self.event_port = self.replay_port = 0
        self._has_replay = replays
        self.running = self.waiting = self.served = 0
        self.seconds_per_token = 0.0
        self.is_well = True
        self.breaks_after: int | None = None
        """The connection is reset after so many tokens of a stream; None: it is not."""
        self.seen: list[dict[str, str]] = []
        """The headers of each request for a completion."""
        self.bodies: list[dict[str, Any]] = []
        self.cached: OrderedDict[bytes, int] = OrderedDict()  # chained digest of a block -> its name
        self.aborted = 0
        self._tokenizer = Tokenizer.from_file(str(FILES / "tokenizer.json"))
        self._started_at = 0.0

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    async def __aenter__(self) -> FakeVllm:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, with an empty cache."""
        self.cached.clear()
        self._sequence, self._started_at = 0, time.time()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=10_000)
        self._context = zmq.Context()
        self._events = self._bound(zmq.PUB, self.event_port)
        self.event_port = _port(self._events)
        if self._has_replay:
            replay = self._bound(zmq.ROUTER, self.replay_port)
            self.replay_port, self._replay = _port(replay), replay
            self._reader = SocketReader(replay, self._send_again)
            self._reader.start()
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Die: refuse connections, and cut those there are."""
        await self._runner.cleanup()
        if self._has_replay:
            self._reader.close()
        self._context.destroy(linger=0)

    def _bound(self, kind: int, port: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.bind(f"tcp://{self.host}:{port or '*'}")
        return socket

    # -- KV events -----------------------------------------------------------------------------------------------------

    def publish(self, *events: list[Any], is_lost: bool = False) -> None:
        """Publish a batch. `is_lost`: no subscriber gets it, but it can be requested again."""
        payload = msgspec.msgpack.encode([time.time(), list(events), 0])
        number = self._sequence.to_bytes(8, "big")
        self._kept.append((self._sequence, payload))
        self._sequence += 1
        if not is_lost:
            self._events.send_multipart([b"", number, payload])

    def hold(self, tokens: list[int], *, is_lost: bool = False) -> int:
        """Put the whole blocks of a prompt into the cache; return how many it held already."""
        digest, parent, hits, new, content = b"", None, 0, list[int](), list[int]()
        for start in range(0, len(tokens) - len(tokens) % BLOCK, BLOCK):
            block = tokens[start : start + BLOCK]
            digest = hashlib.sha256(digest + msgspec.msgpack.encode(block)).digest()
            name = int.from_bytes(digest[:8], "big")
            if digest in self.cached:
                self.cached.move_to_end(digest)
                hits, parent = hits + 1, name
                continue
            self.cached[digest] = name
            new.append(name)
            content += block
        if new:
            self.publish(["BlockStored", new, parent, content, BLOCK, None, "GPU", None], is_lost=is_lost)
        gone = [self.cached.popitem(last=False)[1] for _ in range(len(self.cached) - self.blocks)]
        if gone:
            self.publish(["BlockRemoved", gone, "GPU"], is_lost=is_lost)
        return hits

    def clear(self) -> None:
        """Lose the cache, as `/reset_prefix_cache` does."""
        self.cached.clear()
        self.publish(["AllBlocksCleared"])

    def tokens(self, prompt: str | list[int]) -> list[int]:
        """As vLLM encodes a prompt of a completion."""
        found: list[int] = self._tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
        return found

    def _send_again(self, parts: Any) -> None:
        client, _, start = parts
        for number, payload in self._kept:
            if number >= int.from_bytes(start, "big"):
                self._replay.send_multipart([client, b"", b"", number.to_bytes(8, "big"), payload])
        self._replay.send_multipart([client, b"", b"", _END, b""])

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.is_well else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        labels = f'engine="0",model_name="{self.model}"'
        lines = [
            "# HELP vllm:num_requests_running Number of requests in model execution batches.",
            f"vllm:num_requests_running{{{labels}}} {float(self.running)}",
            f"vllm:num_requests_waiting{{{labels}}} {float(self.waiting)}",
            f"vllm:kv_cache_usage_perc{{{labels}}} {min(len(self.cached) / self.blocks, 1.0)}",
            f'vllm:cache_config_info{{block_size="{BLOCK}",cache_dtype="auto",num_gpu_blocks="{self.blocks}"}} 1.0',
            f"process_start_time_seconds {self._started_at}",
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self.model, "object": "model", "root": str(self.root), "parent": None, "max_model_len": 4096}
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append({name.lower(): value for name, value in request.headers.items()})
        self.bodies.append(body)
        self.running += 1
        self.served += 1
        try:
            self.hold(self.tokens(body.get("prompt") or json.dumps(body.get("messages"))))
            return await self._answer(request, body)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        count = body.get("max_tokens") or 4
        named = {"x-pod": self.address}
        choice = {"index": 0, "text": "word ", "finish_reason": None}
        record = {"id": "cmpl-1", "object": "text_completion", "model": self.model, "choices": [choice]}
        if not body.get("stream"):
            await asyncio.sleep(self.seconds_per_token * count)
            return web.json_response({**record, "choices": [{**choice, "text": "word " * count}]}, headers=named)
        response = web.StreamResponse(headers={**named, "content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(count):
            if number == self.breaks_after and request.transport is not None:
                request.transport.abort()
            await response.write(b"data: " + json.dumps(record).encode() + b"\n\n")
            await asyncio.sleep(self.seconds_per_token)
        await response.write(b"data: [DONE]\n\n")
        return response


def _port(socket: zmq.Socket[bytes]) -> int:
    return int(bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").rpartition(b":")[2])
