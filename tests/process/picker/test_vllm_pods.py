"""A pod of real vLLM under the picker: nothing of this package runs in it. `DYNAMO_VLLM_PYTHON` is a Python that has vLLM."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from dynamo.frontend.app import Frontend
from dynamo.picker.__main__ import follow_pods, parse_picker_args
from dynamo.picker.choice import Picker, Request
from dynamo.router.kv.placement import KvPlaced
from dynamo.runtime.distributed import DistributedRuntime
from support.demo_model import FILES
from support.ports import free_ports
from support.processes import Cluster, Process, get

PYTHON: Final = os.environ.get("DYNAMO_VLLM_PYTHON", "")
START_SECONDS: Final = 600.0
pytestmark = [
    pytest.mark.gateway,
    pytest.mark.skipif(not PYTHON, reason="set DYNAMO_VLLM_PYTHON to a Python that has vLLM (docs/engines.md)"),
]
BLOCK: Final = 32
VARIABLES: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1",
}  # fmt: skip
TEXT: Final = "What is 27 + 15? Tell it in words, and then in digits, and do not forget the sum of 3 and 4. " * 4


def serve_vllm(cluster: Cluster, port: int, events: int, replay: int) -> Process:
    publishing = {
        "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }  # fmt: skip
    argv = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(FILES), "--served-model-name", "m"]
    argv += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "2048",
    ]
    argv += ["--block-size", str(BLOCK), "--kv-events-config", json.dumps(publishing)]
    return cluster.process("vllm", argv, TMPDIR=str(cluster.root), **VARIABLES)


async def until(condition: Callable[[], bool], seconds: float, why: Callable[[], str]) -> None:
    try:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise AssertionError(why()) from None


@pytest.mark.timeout(900)
async def test_prompts_that_vllm_holds_are_known_as_vllm_hashes_them(tmp_path: Path) -> None:
    port, events, replay = free_ports(3)
    with Cluster(tmp_path) as cluster:
        vllm = serve_vllm(cluster, port, events, replay)

        def answers() -> bool:
            assert not vllm.has_ended, vllm.log[-3000:]
            try:
                return get(port, "/health")[0] == 200
            except OSError:
                return False

        await until(answers, START_SECONDS, lambda: vllm.log[-3000:])
        asked: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", {"model": "m", "prompt": TEXT, "max_tokens": 2}),
            ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}),
        ]
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session, AsyncExitStack() as stack:
            for path, body in asked:  # before there is a picker: only the replay shows what these left
                async with session.post(path, json=body) as response:
                    assert response.status == 200, await response.text()
            argv = ["--pods", f"127.0.0.1:{port}", "--pod-event-port", str(events), "--pod-replay-port", str(replay)]
            settings, of_frontend = parse_picker_args(argv, {})
            runtime = DistributedRuntime(asyncio.get_running_loop(), "mem", "mem", settings=of_frontend.runtime)
            stack.push_async_callback(runtime.aclose)
            frontend = await stack.enter_async_context(Frontend(of_frontend, runtime))
            pods = await stack.enter_async_context(follow_pods(settings, of_frontend, runtime))
            picker = Picker(frontend, pods)
            await until(lambda: picker.is_ready, 60, lambda: "the pod is not ready")
            (model,) = frontend.models.served()
            assert (model.card.kv_cache_block_size, model.context_length) == (BLOCK, 2048)
            assert (model.card.runtime_config.total_kv_blocks or 0) > 1000

            async def cached(path: str, body: dict[str, Any]) -> int:
                picked = await picker.choose(Request("POST", path, [], json.dumps(body).encode()))
                try:
                    assert picked.choice.addresses == [f"127.0.0.1:{port}"]
                    assert picked._booked is not None
                    worker = picked._booked.failover.worker
                    assert worker is not None
                    assert isinstance(worker.placement, KvPlaced)
                    return worker.placement.selection.cached_tokens
                finally:
                    picked.close()

            async def known(path: str, body: dict[str, Any], *, least: int, most: int = 10_000) -> None:
                async with asyncio.timeout(60):
                    while not least <= await cached(path, body) <= most:
                        await asyncio.sleep(0.1)

            for path, body in asked:
                await known(path, body, least=2 * BLOCK)
            new = {"model": "m", "prompt": f"Something else. {TEXT}", "max_tokens": 2}
            async with session.post("/v1/completions", json=new) as response:
                assert response.status == 200
            await known("/v1/completions", new, least=2 * BLOCK)  # published while the picker listens
            async with session.post("/reset_prefix_cache") as response:
                assert response.status == 200
            # vLLM publishes that with its next step.
            async with session.post("/v1/completions", json={"model": "m", "prompt": "a", "max_tokens": 1}) as response:
                assert response.status == 200
            for path, body in asked:
                await known(path, body, least=0, most=0)
            vllm.terminate()  # a kill would leave its engine behind
            await until(lambda: not picker.is_ready, 60, lambda: "a pod that is gone is still chosen")
