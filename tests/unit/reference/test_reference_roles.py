"""Prefill and decode engines over a real transfer: what comes out, who is freed, and what a lost peer costs."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo.contract.chunks import GenerateChunk
from dynamo.contract.conformance import mock_context, run_conformance
from dynamo.contract.modes import DisaggregationMode
from dynamo.errors import InvalidArgument
from dynamo.reference import Options, ReferenceEngine
from dynamo.reference.core import Core
from dynamo.reference.kv_transfer import TransferOptions, check_installed
from dynamo.runtime.calls.context import Context

AGG, PREFILL, DECODE = DisaggregationMode.AGGREGATED, DisaggregationMode.PREFILL, DisaggregationMode.DECODE
SMALL = Options(block_size=4, kv_cache_mb=2, max_num_seqs=8, max_num_batched_tokens=32)
LOCAL = TransferOptions(host="127.0.0.1")
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]

try:
    check_installed(TransferOptions("nixl"))
    NO_NIXL = None
except InvalidArgument as error:
    NO_NIXL = str(error)
NIXL = pytest.mark.skipif(NO_NIXL is not None, reason=str(NO_NIXL))


def request(tokens: list[int], max_tokens: int = 12, **more: Any) -> Any:
    stops = {"max_tokens": max_tokens, "ignore_eos": True}
    return {"token_ids": tokens, "stop_conditions": stops, "sampling_options": {"temperature": 0.0}, **more}


@asynccontextmanager
async def running(
    directory: Path,
    mode: DisaggregationMode = AGG,
    options: Options = SMALL,
    transfer: TransferOptions = LOCAL,
    **more: Any,
) -> AsyncIterator[ReferenceEngine]:
    engine = ReferenceEngine(directory, options, mode=mode, transfer=transfer, **more)
    try:
        await engine.start(1)
        yield engine
    finally:
        await engine.cleanup()


@asynccontextmanager
async def pair(
    directory: Path, transfer: TransferOptions = LOCAL, options: Options = SMALL
) -> AsyncIterator[tuple[ReferenceEngine, ReferenceEngine]]:
    async with (
        running(directory, PREFILL, options, transfer) as prefill,
        running(directory, DECODE, options, transfer) as decode,
    ):
        yield prefill, decode


async def collect(engine: ReferenceEngine, body: Any, context: Context | None = None) -> list[GenerateChunk]:
    async with aclosing(engine.generate(body, context or mock_context())) as stream:
        return [chunk async for chunk in stream]


async def computed(prefill: ReferenceEngine, body: Any) -> dict[str, Any]:
    """What the prefill worker hands over."""
    last = (await collect(prefill, body))[-1]
    assert last["finish_reason"] == "length"
    return dict(last["disaggregated_params"])


async def both(prefill: ReferenceEngine, decode: ReferenceEngine, body: Any) -> list[GenerateChunk]:
    params = await computed(prefill, body)
    return await collect(decode, {**body, "prefill_result": {"disaggregated_params": params}})


def tokens_of(chunks: list[GenerateChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk["token_ids"]]


async def settled(engine: ReferenceEngine) -> Core:
    """The core once the thread has done all that it was told."""
    assert engine._steps is not None
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    engine._steps.submit(lambda _core: loop.call_soon_threadsafe(done.set) and None)
    await done.wait()
    return engine._steps._core


async def held(engine: ReferenceEngine) -> int:
    return (await settled(engine)).pool.held


def computed_tokens(core: Core) -> Callable[[], int]:
    """Counts the prompt and answer tokens that go through the model from now on."""
    count, forward = 0, core.model.forward

    def counting(batch: Any, cache: Any) -> Any:
        nonlocal count
        count += len(batch.tokens)
        return forward(batch, cache)

    core.model.forward = counting  # type: ignore[method-assign]
    return lambda: count


@pytest.mark.parametrize(
    ("mode", "kind"), [(AGG, "tcp"), (PREFILL, "tcp"), (DECODE, "tcp"), pytest.param(PREFILL, "nixl", marks=NIXL)]
)
async def test_every_role_keeps_the_contract(mode: DisaggregationMode, kind: str, models: dict[str, Path]) -> None:
    transfer = TransferOptions(kind, "127.0.0.1")
    await run_conformance(lambda: ReferenceEngine(models["llama"], SMALL, mode=mode, transfer=transfer))


@pytest.mark.parametrize(
    ("name", "length", "kind"),
    [
        *((name, length, "tcp") for name in ("llama", "qwen3") for length in (1, 2, 4, 5, 8, 9, 31, 32, 33, 100)),
        pytest.param("llama", 33, "nixl", marks=NIXL),
        pytest.param("qwen3", 100, "nixl", marks=NIXL),
    ],
)
async def test_the_pair_says_what_one_worker_says(name: str, length: int, kind: str, models: dict[str, Path]) -> None:
    prompt = [(7 * n + length) % 90 + 2 for n in range(length)]
    async with (
        running(models[name]) as alone,
        pair(models[name], TransferOptions(kind, "127.0.0.1")) as (prefill, decode),
    ):
        expected = await collect(alone, request(prompt, 16))
        core = await settled(decode)
        count = computed_tokens(core)
        chunks = await both(prefill, decode, request(prompt, 16))
        assert tokens_of(chunks) == tokens_of(expected)
        assert count() == 16  # the last token of the prompt and 15 of the answer: nothing was computed twice
        assert chunks[-1]["completion_usage"]["completion_tokens"] == 16
        assert (await held(prefill), await held(decode)) == (0, 0)


async def test_many_at_once_say_what_they_say_alone(models: dict[str, Path]) -> None:
    random.seed(1)
    prompts = [[random.randrange(2, 90) for _ in range(random.randrange(1, 60))] for _ in range(24)]
    async with running(models["llama"]) as alone, pair(models["llama"]) as (prefill, decode):
        expected = [tokens_of(await collect(alone, request(prompt))) for prompt in prompts]
        found = await asyncio.gather(*(both(prefill, decode, request(prompt)) for prompt in prompts))
        core = await settled(alone)
        for prompt, one, two in zip(prompts, expected, map(tokens_of, found), strict=True):
            if one != two:  # another batch rounds differently: then the two best must be as good as equal
                at = next(n for n, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)
                gap = distance(core, [*prompt, *one[:at]])
                print(f"token {at} of {len(prompt)}: {one[at]} or {two[at]}, {gap:.2e} apart")
                assert gap < 1e-4
        assert (await held(prefill), await held(decode)) == (0, 0)


def distance(core: Core, tokens: list[int]) -> float:
    """Between the two best logits after `tokens`."""
    from dynamo.reference.model import KvCache, Piece, make_batch

    blocks = -(-len(tokens) // 4)
    cache = KvCache(core.model.config, blocks, 4)
    hidden = core.model.forward(make_batch([Piece(tokens, 0, range(blocks))], 4), cache)
    best = np.sort(core.model.logits(hidden[-1:])[0])[-2:]
    return float(best[1] - best[0])


@pytest.mark.parametrize("seed", [None, 3])
async def test_the_first_token_is_the_one_the_prefill_worker_drew(seed: int | None, models: dict[str, Path]) -> None:
    """Without a seed in the request, too: an answer that may end with its first token is drawn once, not twice."""
    body = request(PROMPT, 8, sampling_options={"temperature": 1.5, "seed": seed})
    async with pair(models["llama"]) as (prefill, decode):
        first = (await collect(prefill, body))[-1]
        result = {"disaggregated_params": first["disaggregated_params"]}
        chunks = await collect(decode, {**body, "prefill_result": result})
    assert first["token_ids"] == chunks[0]["token_ids"]


async def test_blocks_that_the_decode_worker_has_are_not_fetched(models: dict[str, Path]) -> None:
    async with pair(models["llama"]) as (prefill, decode):
        first = await both(prefill, decode, request(PROMPT))
        core = await settled(decode)
        written: list[int] = []
        put_page = core.cache.put_page
        core.cache.put_page = lambda block, page: (written.append(block), put_page(block, page))  # type: ignore
        again = await both(prefill, decode, request(PROMPT))
        assert tokens_of(again) == tokens_of(first)
        assert len(written) == 1  # 11 tokens: two full blocks are cached, the third one is not shared
        assert (await held(prefill), await held(decode)) == (0, 0)


async def test_a_prefill_that_ends_the_answer_hands_nothing_over(models: dict[str, Path]) -> None:
    async with running(models["llama"], PREFILL, transfer=LOCAL) as prefill:
        (token,) = tokens_of(await collect(prefill, request(PROMPT)))
        stops = {"max_tokens": 50, "stop_token_ids": [token]}
        (chunk,) = await collect(prefill, {**request(PROMPT), "stop_conditions": stops})
        assert (chunk["finish_reason"], "disaggregated_params" in chunk) == ("stop", False)
        assert prefill._prefill is not None
        await expire(prefill)
        assert await held(prefill) == 0


async def expire(prefill: ReferenceEngine) -> None:
    """As if nobody had come in time."""
    offers = prefill._prefill._sender._offers  # type: ignore[union-attr]
    for offer in list(offers._offers.values()):
        offers._expire(offer)


async def test_a_decode_that_never_comes_costs_the_blocks_for_a_while(
    models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    async with pair(models["llama"], TransferOptions(host="127.0.0.1", hold_seconds=3600)) as (prefill, _):
        await computed(prefill, request(PROMPT))
        assert await held(prefill) == 3
        assert await prefill.is_quiescent() is False
    async with pair(models["llama"], TransferOptions(host="127.0.0.1", hold_seconds=0.05)) as (prefill, decode):
        params = await computed(prefill, request(PROMPT))
        while not await prefill.is_quiescent():
            await asyncio.sleep(0.01)
        assert await held(prefill) == 0
        assert "a prompt of 11 tokens was not fetched in time" in caplog.text
        late = await collect(decode, {**request(PROMPT), "prefill_result": {"disaggregated_params": params}})
    assert len(tokens_of(late)) == 12
    assert "its prompt is computed here (StreamIncomplete: the peer refused: there is no such transfer" in caplog.text


async def test_prompts_wait_for_the_blocks_that_others_hold(models: dict[str, Path]) -> None:
    """Held blocks are nobody's to evict; whoever waits for them goes on as soon as they are fetched."""
    tight = Options(block_size=4, kv_cache_mb=1, context_length=8, max_num_seqs=2, max_num_batched_tokens=32)
    async with pair(models["llama"], options=tight) as (prefill, decode):
        core = await settled(prefill)
        params: list[Any] = []
        while core.pool.available >= 2:
            params.append(await computed(prefill, request([len(params) + 2, 5, 6, 7, 8, 9])))
        waiting = asyncio.create_task(computed(prefill, request(PROMPT[:6])))
        assert (await settled(prefill)).is_idle  # the thread sleeps instead of looking again and again
        assert not waiting.done()
        body = {**request([2, 5, 6, 7, 8, 9], 1), "prefill_result": {"disaggregated_params": params[0]}}
        await collect(decode, body)
        assert (await waiting)["tokens"] == 6
        await expire(prefill)
        assert await held(prefill) == 0


@pytest.mark.parametrize("lost", ["before", "during", "after"])
async def test_a_lost_prefill_worker_costs_a_computation_and_no_answer(
    lost: str, models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    body = request(PROMPT)
    async with running(models["llama"]) as alone:
        expected = tokens_of(await collect(alone, body))
    async with pair(models["llama"]) as (prefill, decode):
        params = await computed(prefill, body)
        sender = prefill._prefill._sender  # type: ignore[union-attr]
        if lost == "before":
            await sender.close()
        elif lost == "during":
            cut_after(sender, pages=1)
        handed: Any = {**body, "prefill_result": {"disaggregated_params": params}}
        stream = decode.generate(handed, mock_context())
        chunks = [await anext(stream)]
        if lost == "after":
            await sender.close()
        chunks += [chunk async for chunk in stream]
        assert tokens_of(chunks) == expected
        assert ("its prompt is computed here" in caplog.text) == (lost != "after")
        await expire(prefill)
        assert (await held(prefill), await held(decode)) == (0, 0)


def cut_after(sender: Any, *, pages: int) -> None:
    """The connection breaks after so many pages, as if the process had been killed."""
    send = sender._send

    async def cut(peer: Any, pull: Any, offer: Any) -> None:
        await send(peer, type(pull)(**{**{f: getattr(pull, f) for f in pull.__struct_fields__}, "count": pages}), offer)
        peer._writer.transport.abort()

    sender._send = cut


async def test_a_lost_decode_worker_leaves_the_blocks_to_the_next(models: dict[str, Path]) -> None:
    body = request(PROMPT)
    async with pair(models["llama"]) as (prefill, first), running(models["llama"], DECODE, transfer=LOCAL) as second:
        params = await computed(prefill, body)
        relay = Relay(params["port"])
        await relay.start()
        broken = {"disaggregated_params": {**params, "port": relay.route(cut_after_bytes=900)}}
        await collect(first, {**body, "prefill_result": broken})
        count = computed_tokens(await settled(second))
        await collect(second, {**body, "prefill_result": {"disaggregated_params": params}})
        assert count() == 12
        await relay.close()
        assert (await held(prefill), await held(first), await held(second)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sampling_options": {"temperature": 0.0, "n": 2}}, "its choices are made together"),
        ({"output_options": {"prompt_logprobs": 1}}, "its log probabilities are asked for"),
        ({"token_ids": [*PROMPT, 3]}, "11 of its 12 tokens were computed"),
    ],
)
async def test_blocks_that_are_of_no_use_are_freed_at_once_and_the_prompt_computed(
    change: dict[str, Any], said: str, models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    async with running(models["llama"]) as alone, pair(models["llama"]) as (prefill, decode):
        params = await computed(prefill, request(PROMPT))
        body = {**request(PROMPT), **change}
        expected = await collect(alone, body)
        found = await collect(decode, {**body, "prefill_result": {"disaggregated_params": params}})
        assert sorted(map(repr, found)) == sorted(map(repr, expected))
        assert said in caplog.text
        assert (await held(prefill), await held(decode)) == (0, 0)


async def test_blocks_of_another_shape_are_freed_at_once(
    models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    other = Options(block_size=8, kv_cache_mb=2, max_num_seqs=8, max_num_batched_tokens=32)
    async with (
        running(models["llama"], PREFILL, other, LOCAL) as prefill,
        running(models["llama"], DECODE, SMALL, LOCAL) as decode,
    ):
        assert len(tokens_of(await both(prefill, decode, request(PROMPT)))) == 12
        assert "block_size=8" in caplog.text
        assert await held(prefill) == 0


@pytest.mark.parametrize("phase", ["at once", "queued", "fetching"])
async def test_a_request_that_is_cancelled_before_its_first_token_frees_both_sides(
    phase: str, models: dict[str, Path]
) -> None:
    tight = Options(block_size=4, kv_cache_mb=1, context_length=64, max_num_seqs=1, max_num_batched_tokens=32)
    async with pair(models["llama"], options=tight) as (prefill, decode):
        context = mock_context()
        body = {**request(PROMPT), "prefill_result": {"disaggregated_params": await computed(prefill, request(PROMPT))}}
        others = decode.generate(request([9] * 5, 50), mock_context())
        notified = asyncio.Event()
        context.on_first_token(notified.set)
        if phase == "at once":
            context.stop_generating()
        elif phase == "queued":
            await anext(others)  # the only place is taken
        else:
            begun = stuck(prefill)
        asking = asyncio.create_task(collect(decode, body, context))
        if phase == "fetching":
            await begun.wait()
        elif phase == "queued":
            await settled(decode)
        context.stop_generating()
        (chunk,) = await asking
        assert (chunk["finish_reason"], chunk["completion_usage"]["completion_tokens"]) == ("cancelled", 0)
        assert notified.is_set()  # the framework's abort was held back until the peer had been told
        await others.aclose()
        assert (await prefill.is_quiescent(), await held(prefill), await held(decode)) == (True, 0, 0)


def stuck(prefill: ReferenceEngine) -> asyncio.Event:
    """The first transfer stops after it has begun."""
    sender: Any = prefill._prefill._sender  # type: ignore[union-attr]
    send, begun = sender._send, asyncio.Event()

    async def wait(peer: Any, pull: Any, offer: Any) -> None:
        sender._send = send
        begun.set()
        await asyncio.Event().wait()

    sender._send = wait
    return begun


async def test_a_prefill_that_is_cancelled_hands_nothing_over(models: dict[str, Path]) -> None:
    async with running(models["llama"], PREFILL, transfer=LOCAL) as prefill:
        for steps in range(4):
            context = mock_context()
            asking = asyncio.create_task(collect(prefill, request([steps + 5] * 60), context))
            for _ in range(steps):
                await settled(prefill)
            context.stop_generating()
            await prefill.abort(context)
            chunks = await asking
            if "disaggregated_params" not in chunks[-1]:
                assert await held(prefill) == 0
            await expire(prefill)
        assert await held(prefill) == 0


async def test_what_a_role_does_not_take_is_refused_by_field(models: dict[str, Path]) -> None:
    handed: dict[str, Any] = {"prefill_result": {"disaggregated_params": {}}}
    async with (
        running(models["llama"]) as alone,
        running(models["llama"], PREFILL, transfer=LOCAL) as prefill,
        running(models["llama"], DECODE, transfer=LOCAL, require_prefill_result=True) as strict,
    ):
        for engine, body, field in (
            (alone, {**request(PROMPT), **handed}, "prefill_result is set"),
            (prefill, {**request(PROMPT), **handed}, "prefill_result is set"),
            (prefill, {**request(PROMPT), "sampling_options": {"n": 2}}, r"sampling_options\.n must be 1"),
            (strict, request(PROMPT), "no prefill_result"),
            (strict, {**request(PROMPT), **handed}, r"prefill_result\.disaggregated_params"),
        ):
            with pytest.raises(InvalidArgument, match=field):
                await collect(engine, body)
        canary = await strict.health_check_payload()
        assert (await collect(strict, canary))[-1]["finish_reason"] == "length"
    with pytest.raises(InvalidArgument, match="encode"):
        ReferenceEngine(models["llama"], mode=DisaggregationMode.ENCODE)


@pytest.mark.process  # computes for a second and more
async def test_two_hundred_lost_peers_leave_every_block_free(
    models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Either side goes at a random point of the conversation; every answer is whole or cancelled."""
    caplog.set_level(logging.ERROR)
    chance = random.Random(11)
    async with running(models["llama"]) as alone, pair(models["llama"]) as (prefill, decode):
        body = request(PROMPT, 3)
        expected = tokens_of(await collect(alone, body))
        relay = Relay((await computed(prefill, body))["port"])
        await relay.start()

        async def one(number: int) -> None:
            prompt = [number % 80 + 2, *PROMPT]
            asked = request(prompt, 3)
            params = await computed(prefill, asked)
            cut = chance.choice(["none", "peer", "self"])
            if cut == "peer":
                params = {**params, "port": relay.route(chance.randrange(0, 9000))}
            context = mock_context()
            asked["prefill_result"] = {"disaggregated_params": params}
            async with aclosing(decode.generate(asked, context)) as stream:
                if cut == "self":
                    asyncio.get_running_loop().call_later(chance.random() * 0.004, context.stop_generating)
                chunks = [chunk async for chunk in stream]
            assert len(tokens_of(chunks)) == 3 or (cut == "self" and chunks[-1]["finish_reason"] == "cancelled")

        for start in range(0, 200, 8):
            await asyncio.gather(*(one(start + n) for n in range(8)))
        await relay.close()
        await expire(prefill)  # those whose decode worker was lost
        for engine in (prefill, decode):
            core = await settled(engine)
            assert (core.pool.held, core.is_idle, core._choices, engine._streams) == (0, True, {}, {})
            assert engine._steps is not None
            assert engine._steps.results == {}
        assert tokens_of(await both(prefill, decode, body)) == expected


class Relay:
    """A TCP forwarder that cuts the line, in both directions, after so many bytes from the far side."""

    def __init__(self, port: int) -> None:
        self._far_port, self._cut_after_bytes = port, 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    def route(self, cut_after_bytes: int) -> int:
        """The port to go to; the next connection is cut then."""
        assert self._server is not None
        self._cut_after_bytes = cut_after_bytes
        return int(self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = self._cut_after_bytes
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._far_port)
        up = asyncio.ensure_future(self._copy(reader, far_writer))
        try:
            while left > 0 and (data := await far_reader.read(min(left, 512))):
                left -= len(data)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # the near side went first
        finally:
            up.cancel()
            far_writer.transport.abort()
            writer.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            writer.write(data)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()
