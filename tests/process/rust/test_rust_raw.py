"""A raw engine in Rust: bodies in, objects out, over both wires and behind the frontend."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo.errors import InvalidArgument
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.mux.client import MuxClient
from support.http_client import CHAT, ask, chat
from support.native_caller import native_caller
from support.processes import Frontend, until
from support.rust_worker import NEEDS_ENGINE, RustWorker
from support.streams import read_all

pytestmark = NEEDS_ENGINE


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[RustWorker]:
    worker = RustWorker.start(tmp_path, is_raw=True)
    yield worker
    worker.close()


async def test_objects_arrive_as_they_are_and_the_end_is_the_end(worker: RustWorker) -> None:
    client = MuxClient()
    try:
        instance = worker.instance()
        items = await read_all(await client.open(instance, {"prompt": "ü", "steps": 3}, Context()))
        assert [item.extra for item in items] == [{"data": {"step": step, "prompt": "ü"}} for step in range(3)]
        for wrong, text in (({"fail": "too odd"}, "too odd"), ([1], "must be an object")):
            with pytest.raises(InvalidArgument, match=text):
                await read_all(await client.open(instance, wrong, Context()))
        context = Context()
        stream = await client.open(instance, {"prompt": "waits"}, context)
        await stream.next_batch()
        context.stop_generating()
        assert await read_all(stream) == []
    finally:
        await client.close()


@pytest.mark.parametrize("codec", ["msgpack", "json"])
async def test_a_native_caller_gets_them_in_envelopes(worker: RustWorker, codec: str) -> None:
    address, _, path = worker.instance().transport["tcp"].partition("/")
    async with native_caller(address) as caller:
        _, *items, final, sentinel = await (
            await caller.call(path, {"prompt": "p", "steps": 2}, codec=codec)
        ).everything()
        assert [item["data"]["data"] for item in items] == [{"step": step, "prompt": "p"} for step in range(2)]
        assert (final, sentinel) == ({"complete_final": True}, "sentinel")


async def test_a_chat_behind_the_frontend_gets_the_engine_s_own_chunks(worker: RustWorker, tmp_path: Path) -> None:
    worker.instance()
    argv = [sys.executable, "-m", "dynamo.frontend", "--discovery-backend", "file", "--http-host", "127.0.0.1"]
    frontend = Frontend("frontend", [*argv, "--http-port", "0"], worker.environment, tmp_path / "frontend.log")
    try:
        frontend.wait_ready()
        await until(lambda: "raw-model" in frontend.models())
        body = chat("raw-model") | {"messages": [{"role": "user", "content": "three small words"}]}
        reply = await ask(frontend.port, CHAT, body)
        assert (reply.status, reply.text) == (200, "three small words")
        streamed = await ask(frontend.port, CHAT, body | {"stream": True})
        assert (streamed.status, streamed.text) == (200, "three small words")
        assert len(streamed.events) >= 4
    finally:
        frontend.close()
