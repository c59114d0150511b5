"""A whole worker of ours, `run(Engine)` in its own process, behind the real 1.6.1 frontend."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.native_frontend import Frontend, native_frontend, why_not
from support.tiny_model import write_tiny_model

REASON = why_not()
pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.asyncio(loop_scope="module"),
]

ENGINE = """
import asyncio
import sys
from pathlib import Path

from tokenizers import Tokenizer

from dynamo.common.backend import EngineConfig, LLMEngine, WorkerConfig
from dynamo.common.backend.run import run
from dynamo.llm.exceptions import InvalidArgument

MODEL_DIR, LOG = Path(sys.argv[1]), Path(sys.argv[2])


class CountingEngine(LLMEngine):
    @classmethod
    async def from_args(cls, argv=None):
        return cls(), WorkerConfig(
            namespace="interop", component="backend", endpoint="generate",
            model_name=str(MODEL_DIR), served_model_name="tiny-model", discovery_backend="file",
        )

    async def start(self, worker_id):
        self.tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
        self.answer = self.tokenizer.encode("count from 0 to 9", add_special_tokens=False).ids
        return EngineConfig(model="tiny-model", served_model_name="tiny-model", context_length=2048)

    async def generate(self, request, context):
        limit = request["stop_conditions"]["max_tokens"]
        if limit == 7:
            raise InvalidArgument("seven is unlucky")
        forever = limit == 2000
        sent = 0
        try:
            while not context.is_stopped():
                for token_id in self.answer:
                    yield {"token_ids": [token_id], "index": 0}
                    sent += 1
                    await asyncio.sleep(0.001)
                if not forever:
                    prompt = len(request["token_ids"])
                    yield {"token_ids": [], "index": 0, "finish_reason": "stop", "completion_usage": {
                        "prompt_tokens": prompt, "completion_tokens": sent, "total_tokens": prompt + sent}}
                    return
            yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
        finally:
            with LOG.open("a") as log:
                log.write("generate left\\\\n")

    async def abort(self, context):
        with LOG.open("a") as log:
            log.write("abort\\\\n")

    async def cleanup(self):
        with LOG.open("a") as log:
            log.write("cleanup\\\\n")


run(CountingEngine, [])
"""


class Cluster:
    """One real frontend, one real worker process, and what the engine wrote down."""

    def __init__(self, frontend: Frontend, process: asyncio.subprocess.Process, log: Path) -> None:
        self.frontend, self.process, self._log = frontend, process, log

    def lines(self) -> list[str]:
        return self._log.read_text().split("\n")[:-1] if self._log.exists() else []

    def forget(self) -> None:
        self._log.unlink(missing_ok=True)

    async def wrote(self, *expected: str) -> None:
        async with asyncio.timeout(10):
            while self.lines() != list(expected):
                await asyncio.sleep(0.02)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    root = tmp_path_factory.mktemp("native-worker")
    store, model_dir, log = root / "store", write_tiny_model(root / "model"), root / "engine.log"
    script = root / "engine.py"
    script.write_text(ENGINE.replace("\\\\n", "\\n"), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}
    environment |= {
        "DYN_FILE_KV": str(store),
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
    }
    async with native_frontend(root, store) as frontend:
        with (root / "worker.log").open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, str(script), str(model_dir), str(log)), env=environment, stdout=output, stderr=output
            )
            try:
                await frontend.model_appears()
                yield Cluster(frontend, process, log)
            finally:
                if process.returncode is None:
                    process.send_signal(signal.SIGKILL)
                await process.wait()
                print((root / "worker.log").read_text()[-5000:])


def chat_body(**options: Any) -> dict[str, Any]:
    return {"model": "tiny-model", "messages": [{"role": "user", "content": "count"}], "max_tokens": 64, **options}


async def test_a_chat_answer_of_a_worker_process_arrives_whole_and_streamed(cluster: Cluster) -> None:
    reply = await cluster.frontend.ask_when_ready("/v1/chat/completions", chat_body())
    assert reply.status == 200, reply.body
    choice = reply.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("count from 0 to 9", "stop")
    streamed = await cluster.frontend.ask("/v1/chat/completions", chat_body(stream=True))
    texts = [event["choices"][0]["delta"].get("content") or "" for event in streamed.events()]
    assert "".join(texts) == "count from 0 to 9"
    assert sum(map(bool, texts)) > 3
    assert "abort" not in cluster.lines()  # a native frontend closes first; that is no cancellation


async def test_a_completion_of_a_worker_process_arrives(cluster: Cluster) -> None:
    body = {"model": "tiny-model", "prompt": "count", "max_tokens": 64}
    reply = await cluster.frontend.ask_when_ready("/v1/completions", body)
    assert reply.status == 200, reply.body
    assert reply.json()["choices"][0]["text"] == "count from 0 to 9"


async def test_an_engine_error_of_a_worker_process_has_its_status_and_text(cluster: Cluster) -> None:
    reply = await cluster.frontend.ask_when_ready("/v1/chat/completions", chat_body(max_tokens=7))
    assert (reply.status, reply.json()["message"]) == (400, "seven is unlucky"), reply.body


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_aborts_the_engine_once_and_its_generator_leaves(
    cluster: Cluster, stream: bool
) -> None:
    assert (await cluster.frontend.ask_when_ready("/v1/chat/completions", chat_body())).status == 200
    cluster.forget()
    body = chat_body(stream=stream, max_tokens=2000)
    reader, writer = await cluster.frontend.send("/v1/chat/completions", body)
    if stream:
        await asyncio.wait_for(reader.readuntil(b"data: "), 10)
    else:
        await asyncio.sleep(0.3)  # nothing tells a client that its unary request has begun
    writer.transport.abort()
    await cluster.wrote("abort", "generate left")


async def test_sigterm_ends_the_worker_cleanly_and_the_model_disappears(cluster: Cluster) -> None:
    cluster.forget()
    cluster.process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(cluster.process.wait(), 20) == 0
    assert cluster.lines() == ["cleanup"]
    async with asyncio.timeout(10):
        while (await cluster.frontend.ask("/v1/models")).json()["data"]:
            await asyncio.sleep(0.05)
