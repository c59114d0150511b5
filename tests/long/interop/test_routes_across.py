"""The routes that were observed on 1.6.1: its own answers beside ours, to the same requests, over one worker."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from support.native_frontend import (
    NATIVE_PYTHON,
    Frontend,
    Reply,
    environment,
    free_port,
    frontend_process,
    process,
    why_not,
)
from support.reference_models import speaking_model

__all__ = ["speaking_model"]

REASON = why_not()
pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.asyncio(loop_scope="module"),
]

GENERATE = "/inference/v1/generate"
SAMPLING = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
IDS = [10, 11, 12]


class Sides(NamedTuple):
    """The two frontends over one worker."""

    ours: Frontend
    native: Frontend
    of_trainers: tuple[Frontend, Frontend]  # the same two, at the ports of `/v1/rl/workers`

    async def both(self, path: str, body: Any) -> tuple[Reply, Reply]:
        """Ask one after the other: in one batch, sums would differ."""
        return await self.ours.ask(path, body), await self.native.ask(path, body)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sides(tmp_path_factory: pytest.TempPathFactory, speaking_model: Path) -> AsyncIterator[Sides]:
    root = tmp_path_factory.mktemp("routes")
    model = root / "model"
    shutil.copytree(speaking_model, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({"model_type": "llama", **config}))  # the native system needs both
    template = (model / "chat_template.jinja").read_text()
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "</s>"}))
    routes = {"DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE": "1", "DYN_SGLANG_ENABLE_GENERATE": "1"}
    env = environment(root, root / "store", DYN_DISCOVERY_BACKEND="file", DYN_REQUEST_PLANE="tcp", **routes)
    async with AsyncExitStack() as stack:
        argv = [sys.executable, "-m", "dynamo.reference", "--model", str(model), "--served-model-name", "spoken"]
        argv += ["--kv-cache-mb", "8", "--enable-rl"]
        await stack.enter_async_context(
            process(argv, root / "worker.log", env | {"DYN_SYSTEM_PORT": "0", "DYN_SYSTEM_HOST": "127.0.0.1"})
        )
        found, trainers = [], list[Frontend]()
        for name, python in (("ours", sys.executable), ("native", NATIVE_PYTHON)):
            home, port = root / name, free_port()
            home.mkdir()
            trainers.append(Frontend(port))
            of_one = env | {"DYN_ENABLE_RL": "1", "DYN_RL_PORT": str(port)}
            frontend = await stack.enter_async_context(
                frontend_process(python, home, of_one, "--discovery-backend", "file")
            )
            await frontend.model_appears()
            await frontend.ask_when_ready(GENERATE, {"token_ids": IDS, "sampling_params": SAMPLING})
            found.append(frontend)
        yield Sides(found[0], found[1], (trainers[0], trainers[1]))


def shape(value: Any) -> Any:
    """A value with its types in the place of what differs from call to call."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in sorted(value.items())}
    if isinstance(value, list):
        return [shape(each) for each in value[:2]]
    return type(value).__name__


def shown(reply: Reply) -> str:
    return f"{reply.status} {reply.body.decode(errors='replace').strip()[:2400]}"


BODIES: dict[str, Any] = {
    "no ids": {"sampling_params": {}},
    "empty ids": {"token_ids": [], "sampling_params": {}},
    "a text for ids": {"token_ids": "a", "sampling_params": {}},
    "no sampling": {"token_ids": IDS},
    "no tokens": {"token_ids": IDS, "sampling_params": {"max_tokens": 0}},
    "min above max": {"token_ids": IDS, "sampling_params": {"max_tokens": 2, "min_tokens": 3}},
    "prompt logprobs": {"token_ids": IDS, "sampling_params": {"prompt_logprobs": -2}},
    "temperature": {"token_ids": IDS, "sampling_params": {"temperature": -1}},
    "top_p": {"token_ids": IDS, "sampling_params": {"top_p": 2}},
    "stream options": {"token_ids": IDS, "sampling_params": {}, "stream_options": {"include_usage": True}},
    "unknown model": {"token_ids": IDS, "sampling_params": {}, "model": "nothing"},
}


@pytest.mark.parametrize("case", BODIES)
async def test_a_refusal_of_the_token_route_is_the_same(sides: Sides, case: str) -> None:
    ours, native = await sides.both(GENERATE, BODIES[case])
    print(f"{case}\n  native {shown(native)}\n  ours   {shown(ours)}")
    assert ours.status == native.status
    theirs, mine = native.json(), ours.json()
    assert mine.keys() >= theirs.keys()
    if "error" in theirs:
        assert mine["error"]["message"] == theirs["error"]["message"]
        assert mine["error"]["type"] == theirs["error"]["type"]


async def test_an_answer_of_the_token_route_is_the_same(sides: Sides) -> None:
    body = {"token_ids": IDS, "sampling_params": {**SAMPLING, "logprobs": 1}, "request_id": "one"}
    ours, native = await sides.both(GENERATE, body)
    print(f"native {shown(native)}\nours   {shown(ours)}")
    assert (ours.status, native.status) == (200, 200)
    mine, theirs = ours.json(), native.json()
    for choices in (mine["choices"], theirs["choices"]):
        for entry in choices[0]["logprobs"]["content"]:
            for each in (entry, *entry["top_logprobs"]):
                each["logprob"] = round(each["logprob"], 5)
    assert mine == theirs


SGLANG: dict[str, Any] = {
    "no ids": {"stream": True},
    "empty ids": {"input_ids": [], "stream": True},
    "n": {"input_ids": IDS, "sampling_params": {"n": 2}, "stream": True},
    "negative": {"input_ids": IDS, "sampling_params": {"max_new_tokens": -1}, "stream": True},
    "internal": {"input_ids": IDS, "bootstrap_room": 3, "stream": True},
    "unary": {"input_ids": IDS},
}


@pytest.mark.parametrize("case", SGLANG)
async def test_a_refusal_of_the_route_of_sglang_is_the_same(sides: Sides, case: str) -> None:
    ours, native = await sides.both("/generate", SGLANG[case])
    print(f"{case}\n  native {shown(native)}\n  ours   {shown(ours)}")
    assert ours.status == native.status
    if case != "no ids":  # whose text names a place in the body
        assert ours.json() == native.json()


async def test_an_answer_of_the_route_of_sglang_is_the_same(sides: Sides) -> None:
    sampling = {"max_new_tokens": 5, "temperature": 0.0, "ignore_eos": True}
    ours, native = await sides.both(
        "/generate", {"input_ids": IDS, "sampling_params": sampling, "stream": True, "rid": "r"}
    )
    print(f"native {shown(native)}\nours   {shown(ours)}")
    assert (ours.status, native.status) == (200, 200)
    assert [shape(each) for each in ours.events()] == [shape(each) for each in native.events()]
    assert [each["output_ids"] for each in ours.events()] == [each["output_ids"] for each in native.events()]


@pytest.mark.parametrize(
    "path", ["/v1/models/spoken/ready", "/v1/models/nothing/ready", "/v1/models", "/health", "/live"]
)
async def test_what_is_read_has_the_members_of_the_native_answer(sides: Sides, path: str) -> None:
    ours, native = await asyncio.gather(sides.ours.ask(path), sides.native.ask(path))
    print(f"{path}\n  native {shown(native)}\n  ours   {shown(ours)}")
    assert ours.status == native.status
    assert json.loads(ours.body).keys() >= json.loads(native.body).keys()


@pytest.mark.parametrize("path", [GENERATE, "/generate"])
async def test_another_method_is_refused_in_the_same_way(sides: Sides, path: str) -> None:
    ours, native = await asyncio.gather(sides.ours.ask(path), sides.native.ask(path))
    print(f"GET {path}\n  native {shown(native)}\n  ours   {shown(ours)}")
    assert ours.status == native.status == 405


async def test_the_workers_of_a_trainer_are_listed_in_the_same_way(sides: Sides) -> None:
    ours, native = [await one.ask("/v1/rl/workers") for one in sides.of_trainers]
    print(f"native {shown(native)}\nours   {shown(ours)}")
    assert (ours.status, native.status) == (200, 200)
    mine, theirs = ours.json(), native.json()
    for worker in mine["workers"]:
        assert worker.pop("system_url").startswith("http://127.0.0.1:")  # which 1.6.1 leaves out here
    assert mine == theirs
    for path in ("/v1/rl/nothing", "/health"):
        ours, native = [await one.ask(path) for one in sides.of_trainers]
        assert (ours.status, native.status) == (404, 404)
