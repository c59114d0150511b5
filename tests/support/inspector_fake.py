"""An inspector whose picture a test writes itself: real sockets, the page's real files, records that msgspec encodes.

What a real frontend shows is tested against a real frontend; this one shows what a real one rarely has: a thousand streams, names
that attack the reader, a restart in the middle of a sentence.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from dynamo.frontend.base.asgi import Receive, Scope, Send, first_headers, reply
from dynamo.frontend.http.server import render_rejection
from dynamo.frontend.parts.inspector.part import inspect_files
from dynamo.frontend.pipeline.settings import ApiLimits
from dynamo.protocol.inspector.views import (
    CacheView,
    CountersView,
    EventView,
    FleetView,
    ModelView,
    Patch,
    Picture,
    PrefixView,
    RequestDetail,
    ResidentView,
    StreamView,
    WorkerView,
)
from dynamo.runtime.http.service import HttpService
from support.patience import PATIENCE_SECONDS

T = TypeVar("T")
Answer = tuple[int, Any]

LISTS = (
    "frontends", "models", "residents", "workers", "streams", "recent", "routing", "caches", "prefixes", "errors", "events",
)  # fmt: skip


def now_ms() -> int:
    return int(time.time() * 1000)


def a_stream(id: str, **members: Any) -> StreamView:
    at = now_ms()
    given: dict[str, Any] = {
        "frontend": "f1", "model": "demo", "endpoint": "/v1/chat/completions", "phase": "decode", "started_ms": at - 5_000,
        "phase_ms": at - 4_000, "is_streaming": True, "ttft_seconds": 0.084, "prompt_tokens": 512, "cached_tokens": 128,
        "output_tokens": 190, "max_tokens": 1024, "tokens_per_second": 47.1, "last_token_ms": at, "workers": ["7e9f"],
    }  # fmt: skip
    return StreamView(id=id, **{**given, **members})


def a_worker(id: str, **members: Any) -> WorkerView:
    given: dict[str, Any] = {
        "role": "agg", "models": ["demo"], "address": "127.0.0.1:4000", "wire": "mux", "state": "ready",
        "since_ms": now_ms() - 60_000, "running": 3, "limit": 16, "kv_blocks_used": 80, "kv_blocks_total": 100,
    }  # fmt: skip
    return WorkerView(id=id, **{**given, **members})


def a_cache(id: str, **members: Any) -> CacheView:
    given: dict[str, Any] = {
        "model": "demo", "role": "agg", "block_size": 16, "trust": "exact", "blocks_known": 15_841, "blocks_total": 16_000,
        "index_share": 0.5, "tiers": {"device": 15_841}, "hit_share": 0.91, "hit_blocks_per_minute": 6871.0,
        "prompt_blocks_per_minute": 7540.0, "history": [1.0, 4.0, 2.0],
        "evicted_blocks_per_minute": 1_234.0, "gaps": 2, "resyncs": 1,
    }  # fmt: skip
    return CacheView(id=id, **{**given, **members})


def a_prefix(id: str, **members: Any) -> PrefixView:
    return PrefixView(
        id=id, **{"model": "demo", "blocks": 96, "depth": 131, "holders": ["7e9f"], "hits": 34, **members}
    )


def a_model(name: str, **members: Any) -> ModelView:
    return ModelView(
        id=f"ns/{name}",
        name=name,
        **{"namespace": "ns", "types": ["chat"], "is_ready": True, "workers": {"agg": 2}, **members},
    )


def a_resident(name: str, **members: Any) -> ResidentView:
    given: dict[str, Any] = {
        "state": "loaded", "taken_bytes": 949_000_000, "needed_bytes": 949_000_000, "running": 3, "waiting": 0,
        "is_pinned": True, "presets": ["coding"], "used_ms": now_ms() - 2_000,
    }  # fmt: skip
    return ResidentView(id=f"f1/{name}", name=name, **{**given, **members})


def an_event(id: str, text: str, **members: Any) -> EventView:
    return EventView(id=id, at_ms=now_ms(), kind=members.pop("kind", "worker joined"), text=text, **members)


class FakeInspector:
    """One picture and those who watch it. Every method may be called from the test's thread."""

    def __init__(self, *, key: str | None = None) -> None:
        self.key = key
        self.posts: list[tuple[str, Any]] = []
        self.watched: list[str] = []
        self.answers: dict[str, Callable[[], Answer]] = {}
        self.event_streams: dict[str, list[Any]] = {}  # by path: what a POST there gets as events
        self.detail: Callable[[], RequestDetail] | None = None
        self.read_only, self.role = False, "admin"
        self.started_ms = now_ms() - 60_000
        self.lists: dict[str, dict[str, Any]] = {name: {} for name in LISTS}
        self.budget_bytes: int | None = None
        self.totals: dict[str, int] = {}
        self.partial: list[str] = []
        self.now = CountersView(requests_per_second=41.2, output_tokens_per_second=6210.0, ttft_p50_seconds=0.084)
        self._seq = 0
        self._watchers: list[asyncio.Queue[bytes | None]] = []
        self._files = inspect_files()
        self._loop = asyncio.new_event_loop()
        self._service: HttpService | None = None
        self.port = 0

    # -- what the test does ------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/inspect/"

    def show(self, view: str, *entries: Any) -> None:
        """Add or change entries, and tell the watchers in one patch."""
        for entry in entries:
            self.lists[view][entry.id] = entry
        self.send(Patch(seq=0, taken_ms=0, set={f"{view}/{entry.id}": entry for entry in entries}))

    def drop(self, view: str, *ids: str) -> None:
        for id in ids:
            del self.lists[view][id]
        self.send(Patch(seq=0, taken_ms=0, gone=[f"{view}/{id}" for id in ids]))

    def send(self, patch: Patch) -> None:
        async def queue() -> None:
            self._seq += 1
            patch.seq, patch.taken_ms, patch.totals = self._seq, now_ms(), self.totals
            for watcher in self._watchers:
                watcher.put_nowait(self._event("patch", patch))

        self._call(queue())

    def stop(self) -> None:
        """Close the listener and every connection, as a process that ends does."""

        async def close() -> None:
            for watcher in self._watchers:
                watcher.put_nowait(None)
            assert self._service is not None
            await self._service.close(0.1)

        self._call(close())

    def start(self) -> None:
        """Listen again, at the same port."""
        self._call(self._listen())

    def restart(self) -> None:
        """Come back as a new process would: everything that ran is gone."""
        self.started_ms, self._seq = now_ms(), 0
        self.lists["streams"] = {}
        self.start()

    # -- the server --------------------------------------------------------------------------------------------------

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_SECONDS)

    async def _listen(self) -> None:
        self._service = HttpService(self._app, ApiLimits(), render=render_rejection, refused=lambda _: None)
        await self._service.listen_at("127.0.0.1", self.port)
        self.port = self._service.sockets[0].getsockname()[1]

    def picture(self, views: set[str]) -> Picture:
        residents = self.lists["residents"].values()
        fleet = FleetView(
            cluster="test", started_ms=self.started_ms, frontends=1, workers=len(self.lists["workers"]),
            models=len(self.lists["models"]), now=self.now, history={"requests_per_second": [1.0, 2.0, None, 4.0]},
            read_only=self.read_only, role=self.role, budget_bytes=self.budget_bytes,
            resident_bytes=sum(row.taken_bytes or 0 for row in residents) if residents else None,
        )  # fmt: skip
        lists: dict[str, Any] = {name: list(self.lists[name].values()) for name in LISTS if name in views}
        return Picture(seq=self._seq, taken_ms=now_ms(), partial=self.partial, totals=self.totals, fleet=fleet, **lists)

    def _event(self, name: str, value: Any) -> bytes:
        return b"event: %s\nid: %d\ndata: %s\n\n" % (name.encode(), self._seq, msgspec.json.encode(value))

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if path in self._files:
            await self._files[path](scope, receive, send)
            return
        if self.key is not None and first_headers(scope).get(b"authorization") != b"Bearer " + self.key.encode():
            await self._json(send, 401, {"message": "Incorrect API key provided", "code": "invalid_api_key"})
            return
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        body += message.get("body", b"")
        if scope["method"] == "POST":
            self.posts.append((path, json.loads(body or b"null")))
        if path == "/admin/v1/watch" and path not in self.answers:
            query = scope["query_string"].decode()
            self.watched.append(query)
            await self._watch(send, set(dict(pair.split("=") for pair in query.split("&"))["views"].split("%2C")))
        elif path in self.event_streams:
            await self._events(send, self.event_streams[path])
        elif path in self.answers:
            await self._json(send, *self.answers[path]())
        elif path.startswith("/admin/v1/requests/") and scope["method"] == "GET":
            found = self.lists["streams"].get(path.removeprefix("/admin/v1/requests/"))
            detail = RequestDetail(stream=found, timeline=[("admitted", self.started_ms, None)])
            await self._json(send, 200, detail if self.detail is None else self.detail())
        elif scope["method"] == "POST":
            await self._json(send, 202, {"accepted": True})
        else:
            await self._json(send, 404, {"message": f"{path} is not here"})

    async def _json(self, send: Send, status: int, value: Any) -> None:
        await reply(send, status, msgspec.json.encode(value))

    async def _events(self, send: Send, events: list[Any]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        body = b"".join(b"data: %s\n\n" % msgspec.json.encode(event) for event in events) + b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": body})

    async def _watch(self, send: Send, views: set[str]) -> None:
        events: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._watchers.append(events)
        try:
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
            )
            piece: bytes | None = self._event("snapshot", self.picture(views))
            while piece is not None:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                piece = await events.get()
        finally:
            self._watchers.remove(events)


@contextmanager
def fake_inspector(**members: Any) -> Iterator[FakeInspector]:
    """A fake in a thread of its own, with two workers and one model."""
    fake = FakeInspector(**members)
    thread = threading.Thread(target=fake._loop.run_forever, name="inspector-fake")
    thread.start()
    try:
        fake.start()
        fake.lists["models"] = {one.id: one for one in (a_model("demo"),)}
        fake.lists["workers"] = {
            one.id: one for one in (a_worker("7e9f"), a_worker("7ea0", state="quarantined", note="refused"))
        }
        yield fake
    finally:
        fake.stop()
        fake._call(_end_tasks())
        fake._loop.call_soon_threadsafe(fake._loop.stop)
        thread.join()
        fake._loop.close()


async def _end_tasks() -> None:
    tasks: list[Awaitable[Any]] = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()  # type: ignore[attr-defined]
    await asyncio.gather(*tasks, return_exceptions=True)
