"""Images over HTTP: every mixture of roles says the same, a worker lost in any phase costs no answer, prefixes are found again.

A frontend and workers of the reference engine as processes, with a small random model that sees.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from support.media_server import MediaServer, media_server, ok
from support.patience import PATIENCE_SECONDS
from support.pictures import BLUE, RED, data_url, image_part, quarters_png
from support.processes import Cluster, Frontend, Worker
from support.vision_model import write_vision_files

MODEL = "seer"
SIZES = ("--block-size", "4", "--kv-cache-mb", "4", "--max-num-seqs", "8")
ROUTED = ("--route-to-encoder",)
PICTURES = [
    quarters_png([(n % 256, 255 - n, 40 * (n % 7)), (0, 0, n), (200, n, 0), (n, n, n)]) for n in range(0, 256, 5)
]
MIXTURES: dict[str, list[tuple[str, Sequence[str]]]] = {
    "encode-agg": [("encode", ()), ("agg", ROUTED)],
    "prefill-decode": [("prefill", ()), ("decode", ())],
    "encode-prefill-decode": [("encode", ()), ("prefill", ROUTED), ("decode", ())],
    "two-of-each": [(role, ROUTED if role == "prefill" else ()) for role in ("encode", "prefill", "decode") * 2],
}

# The process is gone with the first request with media that its engine is asked.
DIES_WHEN_ASKED = """
import os, signal
from dynamo.reference import {module}
def die(self, request, context):
    if request.get("multi_modal_data") or request.get("prefill_result"):
        os.kill(os.getpid(), signal.SIGKILL)
    return asked(self, request, context)
asked = {module}.{name}.generate
{module}.{name}.generate = die
"""


@pytest.fixture(scope="module")
def directory(
    tmp_path_factory: pytest.TempPathFactory, save_model: Callable[..., Path], tensors_of: Callable[..., Any]
) -> Path:
    found, config = write_vision_files(tmp_path_factory.mktemp("seen") / "model", rms_norm_eps=1e-5)
    return save_model(found, dict(config), tensors_of(dict(config)))


class Stack:
    """The processes, and a client of the frontend."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster, self._directory = cluster, directory
        self.frontend: Frontend | None = None
        self.client = AsyncOpenAI(api_key="none")
        self.workers: list[Worker] = []

    def worker(self, role: str, *flags: str, program: str = "") -> Worker:
        name = f"{role}-{len(self.workers)}"
        mode = ("--disaggregation-mode", role, "--component", role)
        worker = self.cluster.reference(name, MODEL, self._directory, *mode, *SIZES, *flags, program=program)
        self.workers.append(worker)
        return worker

    async def start(self, mixture: list[tuple[str, Sequence[str]]], *flags: str, **env: str) -> None:
        for role, more in mixture:
            self.worker(role, *more)
        self.frontend = self.cluster.frontend("frontend", *flags, **env)
        for worker in self.workers:
            await asyncio.to_thread(worker.wait_ready)
        await asyncio.to_thread(self.frontend.wait_ready)
        self.client = AsyncOpenAI(base_url=f"{self.frontend.url}/v1", api_key="none", max_retries=0)
        await self.knows(len(mixture))

    async def knows(self, workers: int) -> None:
        """Wait until the frontend has seen this many workers."""
        await until_of_thread(lambda: self._count() == workers)

    def _count(self) -> int:
        assert self.frontend is not None
        status, body = self.frontend.get(f"/v1/models/{MODEL}/ready")
        found = json.loads(body) if status == 200 else {"namespaces": {}}
        roles = [role for each in found["namespaces"].values() for role in each["worker_types"].values()]
        return sum(len(role["instance_ids"]) for role in roles)

    async def ask(self, *pictures: bytes, tokens: int = 24, text: str = "what?", **more: Any) -> Any:
        parts = [image_part(data_url(each)) for each in pictures]
        extra = {"ignore_eos": True, "nvext": {"extra_fields": ["completion_token_ids", "worker_id"]}}
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": [*parts, {"type": "text", "text": text}]}],  # type: ignore[misc, list-item]
                max_tokens=tokens,
                temperature=0,
                extra_body=extra,
                **more,
            )


async def until_of_thread(look: Callable[[], bool]) -> None:
    """Wait until `look`, which blocks, returns true."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await asyncio.to_thread(look):
            await asyncio.sleep(0.05)


def tokens_of(answer: Any) -> list[int]:
    found: list[int] = answer.nvext["completion_token_ids"]
    return found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as found:
        yield found


@pytest.fixture
async def stack(cluster: Cluster, directory: Path) -> AsyncIterator[Stack]:
    found = Stack(cluster, directory)
    yield found
    await found.client.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, directory: Path) -> list[list[int]]:
    """What one worker alone says to each picture, and to two of them in both orders."""

    async def ask_all(cluster: Cluster) -> list[list[int]]:
        alone = Stack(cluster, directory)
        await alone.start([("agg", ())])
        answers = [tokens_of(await alone.ask(each)) for each in PICTURES]
        answers += [tokens_of(await alone.ask(RED, BLUE)), tokens_of(await alone.ask(BLUE, RED))]
        await alone.client.close()
        return answers

    with Cluster(tmp_path_factory.mktemp("alone")) as cluster:
        found = asyncio.run(ask_all(cluster))
    assert len({tuple(each) for each in found}) > 10  # it sees, in 64 colours
    return found


@pytest.mark.parametrize("mixture", MIXTURES)
async def test_every_mixture_of_roles_says_what_one_worker_says(
    mixture: str, stack: Stack, expected: list[list[int]]
) -> None:
    await stack.start(MIXTURES[mixture])
    answers = await asyncio.gather(*[stack.ask(each) for each in PICTURES[:12]])
    assert [tokens_of(each) for each in answers] == expected[:12]
    assert [tokens_of(await stack.ask(*pair)) for pair in ((RED, BLUE), (BLUE, RED))] == expected[-2:]
    assert (await stack.ask()).choices[0].finish_reason == "length"  # text, which no encoder sees
    assert stack.frontend is not None
    _, metrics = stack.frontend.get("/metrics")
    encoded = b'dynamo_frontend_encoder_requests_total{outcome="success"} 14' in metrics
    assert encoded == ("encode" in mixture or "two" in mixture)
    assert b"dynamo_frontend_encoder_fallbacks_total 0" in metrics


@pytest.mark.parametrize(
    ("who", "seconds"), [("frontend", 6.0), ("encode", 11.0)]
)  # above 5 s to connect, 10 s to greet
async def test_a_process_that_stands_still_costs_no_answer(
    who: str, seconds: float, stack: Stack, expected: list[list[int]]
) -> None:
    await stack.start(MIXTURES["encode-prefill-decode"])
    (process,) = (each for each in (stack.frontend, *stack.workers) if each is not None and each.name.startswith(who))

    async def stand_still() -> None:
        await asyncio.sleep(0.1)  # while connections are made, as a rule: there is nothing to see of that from outside
        process.signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        process.signal(signal.SIGCONT)

    answers = await asyncio.gather(stand_still(), *[stack.ask(each) for each in PICTURES[:12]])
    assert [tokens_of(each) for each in answers[1:]] == expected[:12]


async def test_a_worker_killed_in_each_phase_costs_no_answer(stack: Stack, expected: list[list[int]]) -> None:
    await stack.start(MIXTURES["encode-prefill-decode"], "--migration-limit", "5")
    numbers = iter(range(10_000))

    async def whole() -> None:
        number = next(numbers) % len(PICTURES)
        assert tokens_of(await stack.ask(PICTURES[number])) == expected[number]

    for role, module, name, flags in (
        ("encode", "encoder", "ReferenceEncoder", ()),
        ("prefill", "engine", "ReferenceEngine", ROUTED),
        ("decode", "engine", "ReferenceEngine", ()),
    ):
        doomed = stack.worker(role, *flags, program=DIES_WHEN_ASKED.format(module=module, name=name))
        await asyncio.to_thread(doomed.wait_ready)
        for _ in range(40):  # until its turn has come
            await asyncio.gather(*[whole() for _ in range(4)])
            if doomed.has_ended:
                break
        assert doomed.has_ended, f"{role} never had its turn:\n{doomed.log}"
        await whole()


async def test_the_same_image_goes_where_its_prefix_is_and_another_finds_nothing(stack: Stack) -> None:
    await stack.start([("agg", ())], "--router-mode", "kv", "--router-policy", "default")
    text = "and now a long question about it, the same each time, that fills some blocks of the cache"

    async def ask(picture: bytes) -> tuple[dict[str, Any], int]:
        """Why the worker was chosen, and how many tokens it had cached."""
        answer = await stack.ask(picture, text=text, tokens=2, extra_headers={"x-dynamo-explain-routing": "1"})
        details = answer.usage.prompt_tokens_details
        return answer.nvext["routing"]["decode"], 0 if details is None else details.cached_tokens or 0

    first, cached = await ask(RED)
    assert cached == 0
    second = stack.worker("agg")
    await asyncio.to_thread(second.wait_ready)
    await stack.knows(2)
    for _ in range(4):
        placed, cached = await ask(RED)
        assert (placed["trust"], placed["worker_id"]) == ("exact", first["worker_id"])
        home, other = placed["candidates"]
        assert home["cached_blocks"]["device"] in (
            placed["prompt_blocks"],
            placed["prompt_blocks"] - 1,
        )  # the last may be filled up
        assert placed["prompt_blocks"] > 12
        assert other["cached_blocks"]["device"] == 0
        assert cached >= 4 * (placed["prompt_blocks"] - 2)
    placed, cached = await ask(BLUE)
    assert [each["cached_blocks"]["device"] for each in placed["candidates"]] == [0, 0]
    assert cached == 0


# -- the official client -------------------------------------------------------------------------------------------------


@pytest.fixture
async def server() -> AsyncIterator[MediaServer]:
    async with media_server() as found:
        found.answers["/red.png"] = ok(RED)
        yield found


async def test_the_openai_client_sends_images_by_url_and_as_data(stack: Stack, server: MediaServer) -> None:
    await stack.start([("agg", ())], DYN_MM_ALLOW_INTERNAL="1")
    parts: list[Any] = [image_part(server.url("/red.png")), {"type": "text", "text": "what?"}]
    messages: list[Any] = [{"role": "user", "content": parts}]
    by_data = await stack.ask(RED)
    assert by_data.usage.prompt_tokens == by_data.usage.total_tokens - 24
    extra: Any = {"ignore_eos": True}
    by_url = await stack.client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=24, temperature=0, extra_body=extra
    )
    assert by_url.choices[0].message.content == by_data.choices[0].message.content
    assert by_url.usage == by_data.usage.model_copy(update={"prompt_tokens_details": by_url.usage.prompt_tokens_details}) if by_url.usage else None  # fmt: skip
    stream = await stack.client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=24, temperature=0, extra_body=extra, stream=True
    )
    streamed = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(streamed) == by_data.choices[0].message.content
    assert server.hits == ["/red.png"]  # kept for the second request
    response = await stack.client.responses.create(
        model=MODEL,
        input=[{"role": "user", "content": [{"type": "input_image", "image_url": data_url(RED), "detail": "auto"}, {"type": "input_text", "text": "what?"}]}],
        max_output_tokens=8,
        temperature=0,
    )  # fmt: skip
    assert response.status in ("completed", "incomplete")


async def test_the_openai_client_gets_a_400_that_names_the_part(stack: Stack, server: MediaServer) -> None:
    await stack.start([("agg", ())])
    for url in (server.url("/red.png"), "file:///etc/passwd", "http://localhost/x.png"):
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "a"}, image_part(url)]}]
        with pytest.raises(BadRequestError) as caught:
            await stack.client.chat.completions.create(model=MODEL, messages=messages)
        assert caught.value.param == "messages[0].content[1]"
    assert server.heads == []
