"""Media as tokens of their content: the same answer with an encode worker and without, and nothing taken on trust."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo.contract.chunks import GenerateChunk
from dynamo.contract.conformance import mock_context, run_encode_conformance
from dynamo.contract.engine import LLMEngine
from dynamo.contract.modes import DisaggregationMode
from dynamo.errors import DynamoException, InvalidArgument
from dynamo.reference import Options, ReferenceEngine
from dynamo.reference.__main__ import engine_of_role
from dynamo.reference.encoder import ReferenceEncoder
from dynamo.reference.kv_transfer import TransferOptions
from dynamo.reference.media import EncodedMedia, MediaOptions
from dynamo.runtime.calls.context import Context
from support.cases import each_case

AGG, PREFILL, DECODE, ENCODE = DisaggregationMode
SMALL = Options(block_size=4, kv_cache_mb=2, max_num_seqs=8, max_num_batched_tokens=32)
PROMPT = [5, 6, 7, 8, 9, 10, 11]


def url(content: bytes, kind: str = "image/png") -> dict[str, str]:
    return {"Url": f"data:{kind};base64,{base64.b64encode(content).decode()}"}


def request(*contents: bytes, kind: str = "image_url", max_tokens: int = 12, **more: Any) -> Any:
    body = {
        "token_ids": PROMPT,
        "stop_conditions": {"max_tokens": max_tokens, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
        **more,
    }
    return {**body, "multi_modal_data": {kind: [url(each) for each in contents]}} if contents else body


@asynccontextmanager
async def running(
    directory: Path, mode: DisaggregationMode = AGG, *, routed: bool = False, part_tokens: int = 16
) -> AsyncIterator[LLMEngine]:
    media = MediaOptions(part_tokens, mode, route_to_encoder=routed)
    engine: LLMEngine
    if mode is ENCODE:
        engine = ReferenceEncoder(directory, media)
    else:
        engine = ReferenceEngine(directory, SMALL, mode=mode, transfer=TransferOptions(host="127.0.0.1"), media=media)
    try:
        await engine.start(1)
        yield engine
    finally:
        await engine.cleanup()


async def collect(engine: LLMEngine, body: Any, context: Context | None = None) -> list[GenerateChunk]:
    async with aclosing(engine.generate(body, context or mock_context())) as stream:
        return [chunk async for chunk in stream]


def tokens_of(chunks: list[GenerateChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk["token_ids"]]


async def alone(directory: Path, body: Any) -> list[int]:
    """What one worker says that encodes for itself."""
    async with running(directory) as whole:
        return tokens_of(await collect(whole, body))


async def encoded(directory: Path, body: Any) -> dict[str, Any]:
    async with running(directory, ENCODE) as encoder:
        (chunk,) = await collect(encoder, body)
    assert (chunk["token_ids"], chunk["finish_reason"]) == ([], "stop")
    return chunk["encoder_result"]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
async def test_an_answer_with_an_encode_worker_is_the_one_without(models: dict[str, Path], name: str) -> None:
    directory = models[name]
    body = request(b"one picture", b"another")
    expected = await alone(directory, body)
    routed = {**body, "encoder_result": await encoded(directory, body)}
    async with running(directory, routed=True) as whole:
        assert tokens_of(await collect(whole, routed)) == expected
    async with running(directory, PREFILL, routed=True) as prefill, running(directory, DECODE) as decode:
        params = (await collect(prefill, routed))[-1]["disaggregated_params"]
        onward = {**request(), "prefill_result": {"disaggregated_params": params}}
        assert tokens_of(await collect(decode, onward)) == expected


async def test_the_answer_depends_on_every_part_their_order_and_their_options(models: dict[str, Path]) -> None:
    directory = models["llama"]
    bodies = [
        request(),
        request(b"a", b"b"),
        request(b"b", b"a"),
        request(b"a"),
        request(b"a", b"b", kind="audio_url"),
        request(b"a", b"b", mm_processor_kwargs={"min_pixels": 64}),
    ]
    async with running(directory) as whole:
        prompts = [EncodedMedia((), ())] + [MediaOptions(16).encode(body, 97) for body in bodies[1:]]
        answers = [tokens_of(await collect(whole, {**body, "stop_conditions": {"max_tokens": 40}})) for body in bodies]
    assert len({prompt.token_ids for prompt in prompts}) == len(bodies)
    assert len({tuple(answer) for answer in answers}) > 1
    assert MediaOptions(16).encode(request(b"a"), 97) == MediaOptions(16).encode(request(b"a", kind="image"), 97)


async def test_the_same_media_are_found_in_the_prefix_cache_and_others_are_not(models: dict[str, Path]) -> None:
    def cached(chunks: list[GenerateChunk]) -> int:
        return (chunks[-1]["completion_usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    async with running(models["llama"]) as whole:
        assert cached(await collect(whole, request(b"a", b"b"))) == 0
        assert cached(await collect(whole, request(b"a", b"b"))) >= 32
        assert cached(await collect(whole, request(b"a", b"c"))) == 16
        assert cached(await collect(whole, request(b"c", b"b"))) == 0


async def test_a_request_that_moved_counts_what_was_generated_and_not_its_media(models: dict[str, Path]) -> None:
    body = request(b"a", sampling_options={"temperature": 0.8, "seed": 7, "frequency_penalty": 1.0})
    async with running(models["llama"]) as whole:
        expected = tokens_of(await collect(whole, body))
        context = mock_context()
        context.prompt_tokens = len(PROMPT)
        rest = {**body, "token_ids": [*PROMPT, *expected[:5]], "stop_conditions": {"max_tokens": 7, "ignore_eos": True}}
        assert tokens_of(await collect(whole, rest, context)) == expected[5:]


async def test_a_worker_behind_an_encode_worker_refuses_media_without_its_result(models: dict[str, Path]) -> None:
    directory = models["llama"]
    body = request(b"one")
    result = await encoded(directory, body)
    async with running(directory, routed=True) as whole:
        for wrong, said in (
            (body, "no encoder_result"),
            ({**body, "encoder_result": await encoded(directory, request(b"other"))}, "belongs to other media"),
            ({**body, "encoder_result": {**result, "token_ids": [[10**6]]}}, "holds 1000000"),
            ({**body, "encoder_result": {"handle": "foreign"}}, "encoder_result: "),
            ({**body, "encoder_result": {**result, "digests": [1]}}, "encoder_result: "),
        ):
            with pytest.raises((DynamoException, ValueError), match=said):
                await collect(whole, wrong)


@each_case(
    ("media", "said"),
    [
        ({"image_url": [{"Url": "https://example.com/a.png"}]}, "multi_modal_data.image_url[0]"),
        ({"image_url": [url(b"a"), {"UuidOnly": "x"}]}, "multi_modal_data.image_url[1]"),
        ({"image_url": [{"Url": "data:image/png,abc"}]}, "in base64"),
        ({"image_url": [{"Url": "data:image/png;base64,@"}]}, "is not valid base64"),
        ({"image_url": "x"}, "must be a list"),
        ({"image_url": [url(b"a")] * 33}, "33 parts"),
    ],
)
async def test_a_part_that_cannot_be_read_is_named(media: Any, said: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        MediaOptions(16).encode({"multi_modal_data": media}, 97)
    assert said in str(error.value)


async def test_media_are_refused_where_nothing_stands_for_them_and_on_decode_workers(models: dict[str, Path]) -> None:
    async with AsyncExitStack() as stack:
        plain = await stack.enter_async_context(running(models["llama"], part_tokens=0))
        decode = await stack.enter_async_context(running(models["llama"], DECODE))
        with pytest.raises(InvalidArgument, match="takes no images"):
            await collect(plain, request(b"a"))
        with pytest.raises(InvalidArgument, match="a decode worker takes no media"):
            await collect(decode, request(b"a"))


async def test_an_encode_worker_before_one_that_takes_no_media_is_a_mistake(models: dict[str, Path]) -> None:
    with pytest.raises(InvalidArgument, match="--route-to-encoder needs --media-tokens"):
        async with running(models["llama"], routed=True, part_tokens=0):
            pass


async def test_the_encoder_keeps_the_contract(models: dict[str, Path]) -> None:
    async def make() -> LLMEngine:
        engine, _ = await engine_of_role(["--model", str(models["llama"]), "--disaggregation-mode", "encode"])
        return engine

    await run_encode_conformance(make)


@each_case(
    ("argv", "said"),
    [
        (["--media-tokens", "-1"], "--media-tokens must be in 0..1024"),
    ],
)
async def test_a_bad_flag_of_media_is_one_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        await engine_of_role(["--model", "x", *argv])
    assert said in capsys.readouterr().err
