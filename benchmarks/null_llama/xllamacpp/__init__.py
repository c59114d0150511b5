"""A llama.cpp without a model: it answers at once. In the place of the package `xllamacpp`, it leaves only what we add to a request.

Both llama.cpp's own server (`tests/support/real_models.py`) and our worker's process (`dynamo.llamacpp.server`) start by `Server`.
"""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any, cast

VOCABULARY = 49_152
SLOTS = 8
CONTEXT = 2048
TOKEN = 82  # of every answer: a letter, in the vocabularies of SmolLM2 and of the demonstration model


class CommonParams:
    """Takes any parameter, also of groups of parameters."""

    def __getattr__(self, name: str) -> Any:
        made = self.__dict__[name] = CommonParams()
        return made


class Connection(asyncio.Protocol):
    """One connection; each answer ends it, as the real server's do for a request that requires this."""

    def __init__(self) -> None:
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end].decode("latin-1").lower()
            size = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:")), 0)
            if len(self._received) < end + 4 + size:
                return
            body, self._received = self._received[end + 4 : end + 4 + size], self._received[end + 4 + size :]
            assert self._transport is not None
            self._transport.write(answer(head.split(" ", 2)[1], json.loads(body) if body else {}))
            if "connection: close" in head:
                self._transport.close()


def answer(path: str, body: dict[str, Any]) -> bytes:
    """Return the whole answer to a request, with its head."""
    if path == "/v1/models":
        return plain({"data": [{"id": "null", "meta": {"n_vocab": VOCABULARY}}]})
    if path == "/props":
        return plain({"default_generation_settings": {"n_ctx": CONTEXT}, "total_slots": SLOTS})
    events = chat_events(body) if path.startswith("/v1/") else token_events(body)
    if not body.get("stream"):
        text = " a" * int(body.get("max_tokens") or 1)
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}
        return plain({"object": "chat.completion", "model": "null", "choices": [choice]})
    content = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return b"%b%x\r\n%b\r\n0\r\n\r\n" % (head, len(content), content)


def plain(value: Any) -> bytes:
    """Return a JSON answer."""
    content = json.dumps(value).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        len(content), content
    )  # fmt: skip


def chat_events(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of llama.cpp's chat route."""
    count = int(body.get("max_tokens") or 1)
    head = {"created": 1, "id": "chatcmpl-null", "model": "null", "object": "chat.completion.chunk"}
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": None}, *[{"content": " a"}] * count]
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}], **head} for delta in deltas]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], **head})
    used = {"completion_tokens": count, "prompt_tokens": 8, "total_tokens": 8 + count}
    return [*events, {"choices": [], "usage": used, **head}]


def token_events(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of llama.cpp's own route of completions."""
    count = int(body.get("n_predict") or 1)
    events: list[dict[str, Any]] = [
        {"index": 0, "content": " a", "tokens": [TOKEN], "stop": False, "tokens_predicted": number}
        for number in range(1, count + 1)
    ]
    last = {"tokens": [], "stop": True, "stop_type": "limit", "tokens_predicted": count, "timings/cache_n": 0}
    return [*events, last]


class Server:
    """Listens on the socket or the port of its parameters, in a thread of its own."""

    def __init__(self, parameters: Any) -> None:
        hostnames = vars(parameters).get("hostnames")
        self._path = hostnames[0] if hostnames else None
        self._port = vars(parameters).get("port") or 0
        self.listening_address = self._path or f"http://127.0.0.1:{self._port}"
        ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True).start()
        ready.wait()

    async def _serve(self, ready: threading.Event) -> None:
        loop = asyncio.get_running_loop()
        if self._path is not None:
            server: asyncio.Server = await loop.create_unix_server(Connection, self._path)
        else:
            server = await loop.create_server(Connection, "127.0.0.1", self._port)
        ready.set()
        await server.serve_forever()
