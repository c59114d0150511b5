"""Prefill and decode workers of one system behind the frontend of the other."""

from __future__ import annotations

import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from support.interop_cluster import PYTHONS
from support.native_frontend import NATIVE_PYTHON, Frontend, environment, free_port, frontend_process, process, why_not
from support.random_weights import random_tensors
from support.tiny_model import write_tiny_model

REASON = why_not()
pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.timeout(240),
]

FILES = ("--discovery-backend", "file")

PLAIN_IDS = """
from dynamo.frontend.__main__ import main
from dynamo.frontend.apis.chat import ChatApi
ChatApi.id_prefix = ""
main()
"""


def body(model: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "The quick brown fox"}]
    return {"model": model, "messages": messages, "max_tokens": 12, "temperature": 0, **more}


async def answered(frontend: Frontend, request: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """What was said, streamed and not, once both roles are there; and which workers said so."""
    path = "/v1/chat/completions"
    asked = {**request, "nvext": {"extra_fields": ["worker_id"]}}
    await frontend.model_appears()
    reply = await frontend.ask_when_ready(path, asked)
    assert reply.status == 200, reply.body
    whole = reply.json()
    streamed = await frontend.ask(path, {**request, "stream": True})
    text = whole["choices"][0]["message"]["content"]
    deltas = [event["choices"][0]["delta"].get("content") or "" for event in streamed.events() if event["choices"]]
    assert "".join(deltas) == text
    return text, whole["nvext"]["worker_id"]


@pytest.mark.parametrize("front", ["ours", "native"])
async def test_our_reference_pair_behind_either_frontend(front: str, tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model")
    save_file(random_tensors(json.loads((directory / "config.json").read_text())), directory / "model.safetensors")
    env = environment(tmp_path, tmp_path / "store", DYN_TCP_RPC_HOST="127.0.0.1")
    base = [sys.executable, "-m", "dynamo.reference", "--model", str(directory), *FILES]
    async with AsyncExitStack() as stack:
        frontend = await stack.enter_async_context(frontend_process(PYTHONS[front], tmp_path, env, *FILES))
        for role in ("prefill", "decode"):
            argv = [*base, "--served-model-name", "pair", "--disaggregation-mode", role, "--component", role]
            await stack.enter_async_context(process(argv, tmp_path / f"{role}.log", env))
        argv = [*base, "--served-model-name", "alone", "--component", "alone"]
        await stack.enter_async_context(process(argv, tmp_path / "alone.log", env))
        await frontend.model_appears()
        alone = (await frontend.ask_when_ready("/v1/chat/completions", body("alone"))).json()
        text, workers = await answered(frontend, body("pair"))
        assert text == alone["choices"][0]["message"]["content"]
        assert workers["prefill_worker_id"] != workers["decode_worker_id"]
        assert "is computed here" not in (tmp_path / "decode.log").read_text()


@pytest.mark.parametrize("meets", ["by itself", "through the frontend"])
async def test_a_pair_of_native_mockers_behind_our_frontend(meets: str, tmp_path: Path) -> None:
    """With a bootstrap port both halves run at once; without, what the prefill says goes to the decode.

    The mockers meet by a protocol of their own, which takes a request id for a UUID: ours has a prefix before it, as the
    answer's id has, so the frontend of that case is told to leave it out.
    """
    directory = write_tiny_model(tmp_path / "model")
    env = environment(tmp_path, tmp_path / "store", DYN_TCP_RPC_HOST="127.0.0.1")
    async with AsyncExitStack() as stack:
        port = free_port()
        argv = [sys.executable, "-c", PLAIN_IDS, "--http-port", str(port), *FILES]
        await stack.enter_async_context(process(argv, tmp_path / "frontend.log", env))
        frontend = Frontend(port)
        for role in ("prefill", "decode"):
            argv = [NATIVE_PYTHON, "-m", "dynamo.mocker", "--model-path", str(directory), "--model-name", "mock"]
            argv += [*FILES, "--disaggregation-mode", role]
            if role == "prefill" and meets == "by itself":
                argv += ["--bootstrap-ports", str(free_port())]
            await stack.enter_async_context(process(argv, tmp_path / f"{role}.log", env))
        _, workers = await answered(frontend, body("mock"))
        assert workers["prefill_worker_id"] != workers["decode_worker_id"]
