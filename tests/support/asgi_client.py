"""Call an ASGI application in-process, one message at a time, with a client that can leave at any moment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import unquote

from support.patience import PATIENCE_SECONDS


class Exchange:
    """One request to an ASGI application."""

    def __init__(
        self,
        app: Any,
        method: str,
        path: str,
        body: bytes,
        headers: dict[str, str],
        query: str = "",
        *,
        more_body: bool = False,
    ) -> None:
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._messages.put_nowait({"type": "http.request", "body": body, "more_body": more_body})
        self._scope = {
            "type": "http",
            "method": method,
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        }
        self._app = app
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = b""
        self.is_complete = False
        self._progress = asyncio.Event()
        self.task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        await self._app(self._scope, self._messages.get, self._send)

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            assert self.status is None, "the response was started twice"
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            assert self.status is not None, "a body before its headers"
            assert not self.is_complete, "a body after the end"
            self.body += message.get("body", b"")
            self.is_complete = not message.get("more_body", False)
        self._progress.set()

    def disconnect(self) -> None:
        """The client closes its connection."""
        self._messages.put_nowait({"type": "http.disconnect"})

    async def until(self, condition: Any) -> None:
        """Wait until `condition(self)`, asked after every message."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition(self):
                self._progress.clear()
                await self._progress.wait()

    async def done(self, patience_seconds: float = PATIENCE_SECONDS) -> Exchange:
        async with asyncio.timeout(patience_seconds):
            await self.task
        return self

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        """The blocks of an event stream, without comments."""
        return [block for block in self.body.decode().split("\n\n") if block and not block.startswith(":")]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The JSON of every data event but the terminator, which must be the last one."""
        data = [block.removeprefix("data: ") for block in self.events if block.startswith("data: ")]
        assert data, self.body
        assert data[-1] == "[DONE]", data[-1]
        return [json.loads(one) for one in data[:-1]]

    def text(self, choice: int = 0) -> str:
        """What a streamed chat or completion said."""
        ours = [one for chunk in self.chunks for one in chunk.get("choices", []) if one["index"] == choice]
        return "".join(one["delta"].get("content", "") if "delta" in one else one["text"] for one in ours)

    def finish_reasons(self, choice: int = 0) -> list[str | None]:
        return [one["finish_reason"] for chunk in self.chunks for one in chunk["choices"] if one["index"] == choice]


class AsgiClient:
    """A client of one application; leaves no task behind when used as `async with`."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._open: list[Exchange] = []

    def begin(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        query: str = "",
        more_body: bool = False,
    ) -> Exchange:
        """Start a request and return at once; `more_body`: its client sends no more of it, and does not leave."""
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        base = {"content-type": "application/json"} if method == "POST" else {}
        exchange = Exchange(self._app, method, path, raw, {**base, **(headers or {})}, query, more_body=more_body)
        self._open.append(exchange)
        return exchange

    async def call(
        self, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None
    ) -> Exchange:
        return await self.begin(method, path, body, headers=headers).done()

    async def get(self, path: str, **headers: str) -> Exchange:
        return await self.call("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})

    async def chat(self, content: str = "hi", *, headers: dict[str, str] | None = None, **fields: Any) -> Exchange:
        return await self.begin_chat(content, headers=headers, **fields).done()

    def begin_chat(self, content: str = "hi", *, headers: dict[str, str] | None = None, **fields: Any) -> Exchange:
        body = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
        return self.begin("POST", "/v1/chat/completions", body, headers=headers)

    async def completion(self, prompt: Any = "hi", *, headers: dict[str, str] | None = None, **fields: Any) -> Exchange:
        return await self.call("POST", "/v1/completions", {"model": "m", "prompt": prompt, **fields}, headers=headers)

    async def aclose(self) -> None:
        for exchange in self._open:
            if not exchange.task.done():
                exchange.task.cancel()
        await asyncio.gather(*(exchange.task for exchange in self._open), return_exceptions=True)


@asynccontextmanager
async def asgi_client(app: Any) -> AsyncIterator[AsgiClient]:
    client = AsgiClient(app)
    try:
        yield client
    finally:
        await client.aclose()
