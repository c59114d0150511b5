"""Workers that are full, killed or replaced, each behind the other system's frontend."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from support.interop_cluster import IN_RUST, chat_body, interop_cluster
from support.interop_engine import FOREVER, SENTENCE
from support.native_frontend import why_not

REASON = why_not()
pytestmark = [pytest.mark.interop, pytest.mark.skipif(bool(REASON), reason=REASON)]

PAIRS = [("ours", "native"), ("native", "ours")]
RUST = ("native", "rust")


@pytest.mark.parametrize(("frontend", "worker"), [*PAIRS, pytest.param(*RUST, marks=IN_RUST)])
async def test_a_full_worker_is_an_overload(frontend: str, worker: str, tmp_path: Path) -> None:
    more = {"DYN_ENGINE_REQUEST_LIMIT": "1", "DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "1"}
    async with interop_cluster(tmp_path, frontend=frontend, workers=[worker], more=more) as cluster:
        # One runs and one waits; 1.6.1 also holds one on its way from the first to the second.
        occupying = [
            await cluster.frontend.send("/v1/chat/completions", chat_body(max_tokens=FOREVER)) for _ in range(6)
        ]
        first_lines = [asyncio.create_task(reader.readline()) for reader, _ in occupying]
        done, waiting = await asyncio.wait(first_lines, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        assert done
        assert {line.result().split()[1] for line in done} == {b"529"}
        for line in waiting:
            line.cancel()
        for _, writer in occupying:
            writer.transport.abort()
        await cluster.ready()


@pytest.mark.parametrize(
    ("frontend", "worker", "plane"),
    [*((*pair, plane) for pair in PAIRS for plane in ("tcp", "nats")), pytest.param(*RUST, "tcp", marks=IN_RUST)],
)
async def test_a_worker_killed_in_the_middle_loses_no_request_of_ours_and_another_one_serves_on(
    frontend: str, worker: str, plane: str, tmp_path: Path
) -> None:
    async with interop_cluster(tmp_path, frontend=frontend, workers=[worker, worker], plane=plane) as cluster:
        first, second = cluster.workers
        reader, writer = await cluster.frontend.send("/v1/chat/completions", chat_body(stream=True, max_tokens=FOREVER))
        await asyncio.wait_for(reader.readuntil(b"data: "), 10)
        busy, idle = (first, second) if first.lines()[-1:] == ["request"] else (second, first)
        idle.forget()
        busy.process.send_signal(signal.SIGKILL)
        if frontend == "ours":  # the stream moves
            await idle.wrote("request")
            for _ in range(3):
                assert b"error" not in await asyncio.wait_for(reader.readuntil(b"data: "), 10)
            writer.close()
            async with asyncio.timeout(10):
                while "abort" not in idle.lines():
                    await asyncio.sleep(0.02)
        else:
            rest = (await asyncio.wait_for(reader.read(), 10)).decode()
            writer.close()
            assert "error" in rest
            assert '"finish_reason":"stop"' not in rest
        idle.forget()
        for _ in range(6):  # the dead one is still listed, and tried first by some of them
            if frontend == "ours":
                reply = await cluster.chat()  # and the client sees nothing of it
            else:
                reply = await cluster.frontend.ask_when_ready("/v1/chat/completions", chat_body())
            assert reply.json()["choices"][0]["message"]["content"] == SENTENCE
        assert idle.served() == 6
