"""The mock engine behind the contract, in real time."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dynamo.contract.conformance import mock_context, run_conformance
from dynamo.contract.kv_events import ComponentSnapshot, PushSource
from dynamo.errors import CannotConnect, Disconnected, EngineShutdown, InvalidArgument
from dynamo.mocker.configuration import KvTransferTime, MockOptions
from dynamo.mocker.engine import HANDOFF, REJECTED, MockEngine
from dynamo.mocker.output import ReasoningShape, ResponseTrace
from dynamo.placement.replica_events import BookedWorker, BookingEvent, decode_bookings
from dynamo.runtime.calls.context import Context
from dynamo.scheduling import HostTierOptions, SchedulerOptions
from support.patience import PATIENCE_SECONDS
from support.processes import until


def options(**scheduler: Any) -> MockOptions:
    return MockOptions(scheduler=SchedulerOptions(**{"block_size": 4, "num_gpu_blocks": 64, **scheduler}))


instant = options(speedup_ratio=0.0)


def request(tokens: int = 10, output: int | None = 5, **more: Any) -> Any:
    return {"token_ids": list(range(tokens)), "stop_conditions": {"max_tokens": output}, **more}


async def answer(engine: MockEngine, asked: Any, context: Context | None = None) -> list[Any]:
    return [chunk async for chunk in engine.generate(asked, context or mock_context())]


def ids(chunks: list[Any]) -> list[int]:
    return [token for chunk in chunks for token in chunk["token_ids"]]


async def test_it_keeps_the_contract() -> None:
    await run_conformance(lambda: MockEngine("m", options(speedup_ratio=20.0)))


async def test_an_answer_is_as_long_as_asked_and_can_be_repeated() -> None:
    answers = []
    for seed, worker in ((1, 1), (1, 2), (2, 1)):
        engine = MockEngine("m", replace(instant, seed=seed), seed=worker)
        await engine.start(0)
        chunks = await answer(engine, request(), Context("same"))
        await engine.cleanup()
        answers.append(ids(chunks))
        assert [len(chunk["token_ids"]) for chunk in chunks] == [1] * 5
        assert chunks[-1]["finish_reason"] == "length"
        assert chunks[-1]["completion_usage"]["completion_tokens"] == 5
    assert answers[0] == answers[1] != answers[2]
    assert all(1000 <= token <= 1999 for token in answers[0])


async def test_another_worker_continues_an_answer_as_the_first_would_have() -> None:
    thought = replace(instant, reasoning=ReasoningShape(7, 8, 0.5))
    for chosen in (instant, thought):
        whole, rest = MockEngine("m", chosen), MockEngine("m", chosen, seed=9)
        await whole.start(0)
        await rest.start(0)
        expected = ids(await answer(whole, request(10, 8), Context("moved")))
        context = Context("moved")
        context.prompt_tokens = 10
        moved = {"token_ids": [*range(10), *expected[:3]], "stop_conditions": {"max_tokens": 5}}
        chunks = await answer(rest, moved, context)
        assert ids(chunks) == expected[3:]
        usage = chunks[-1]["completion_usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (10, 8)
        await whole.cleanup()
        await rest.cleanup()


async def test_routers_learn_at_the_first_token_that_a_prompt_is_computed() -> None:
    told = Endpoint()
    engine = MockEngine("m", MockOptions(scheduler=instant.scheduler, dp_size=2))
    await engine.start(0)
    await engine.on_endpoint_ready(told)  # type: ignore[arg-type]
    await answer(engine, request(routing={"dp_rank": 1}), Context("asked"))
    (event,) = decode_bookings(msgspec.msgpack.encode(told.payloads[0]))
    assert event == BookingEvent("asked", BookedWorker(77, 1), "MarkPrefillCompleted", 77)
    await engine.cleanup()
    assert told.is_closed


class Endpoint:
    """An endpoint whose event channel remembers."""

    def __init__(self) -> None:
        self.payloads: list[Any] = []
        self.is_closed = False
        self.runtime = SimpleNamespace(event_plane="zmq")

    def connection_id(self) -> int:
        return 77

    def event_channel(self, topic: str) -> Endpoint:
        assert topic == "active_sequences_events"
        return self

    def publish(self, payload: Any) -> None:
        self.payloads.append(payload)

    async def close(self) -> None:
        self.is_closed = True


async def test_the_first_and_the_last_chunk_say_how_much_was_cached() -> None:
    engine = MockEngine("m", instant)
    await engine.start(0)
    await answer(engine, request(16))
    first, *_, last = await answer(engine, request(16))
    assert first["completion_usage"]["prompt_tokens_details"] == {"cached_tokens": 12}
    assert last["completion_usage"]["prompt_tokens_details"] == {"cached_tokens": 12}
    await engine.cleanup()


async def test_passes_take_their_time() -> None:
    engine = MockEngine("m", options())
    await engine.start(0)
    began = time.monotonic()
    await answer(engine, request(10, 4))
    assert time.monotonic() - began >= 0.016 + 3 * 0.006
    await engine.cleanup()


async def test_what_cannot_be_served_is_refused_with_the_reason() -> None:
    engine = MockEngine("m", instant)
    with pytest.raises(EngineShutdown):
        await answer(engine, request())
    await engine.start(0)
    with pytest.raises(EngineShutdown):
        await engine.start(0)
    with pytest.raises(InvalidArgument, match="max_tokens"):
        await answer(engine, request(output=None))
    with pytest.raises(InvalidArgument, match="dp_rank 3 is out of bounds for dp_size 1"):
        await answer(engine, request(routing={"dp_rank": 3}))
    with pytest.raises(InvalidArgument, match=REJECTED):
        await answer(engine, request(64 * 4))
    (only,) = await answer(engine, request(output=0))
    assert (only["token_ids"], only["finish_reason"]) == ([], "length")
    await engine.cleanup()
    with pytest.raises(EngineShutdown):
        await answer(engine, request())


async def test_a_cancelled_request_ends_at_once_and_frees_its_blocks() -> None:
    engine = MockEngine("m", options(num_gpu_blocks=1000))
    reports = Reports()
    await engine.start(0)
    engine.attach_snapshot_publisher(reports)  # type: ignore[arg-type]
    context = mock_context()
    chunks = []
    async for chunk in engine.generate(request(10, 1000), context):
        chunks.append(chunk)
        if len(chunks) == 2:
            context.stop_generating()
    assert chunks[-1]["finish_reason"] == "cancelled"
    assert chunks[-1]["completion_usage"]["completion_tokens"] == len(ids(chunks)) == 2
    await answer(engine, request(3, 1))
    assert reports.loads[-1] == (0, 0)
    await engine.cleanup()


async def test_cleanup_ends_requests_that_run() -> None:
    engine = MockEngine("m", options(num_gpu_blocks=1000))
    await engine.start(0)
    running = asyncio.create_task(answer(engine, request(10, 1000)))
    await asyncio.sleep(0)
    await engine.cleanup()
    with pytest.raises(EngineShutdown):
        await running
    await engine.cleanup()


class Reports:
    """A snapshot publisher and a KV event publisher that remember."""

    def __init__(self) -> None:
        self.loads: list[tuple[int, int]] = []
        self.changes: list[Any] = []
        self.tiers: list[tuple[str, ...]] = []

    def publish(self, rank: int, snapshot: ComponentSnapshot) -> None:
        self.loads.append((rank, snapshot.kv_used_blocks))

    def publish_changes(self, changes: Any, tier: str) -> None:
        self.changes += changes
        self.tiers.append((tier, *(next(iter(change)) for change in changes)))


async def test_ranks_take_requests_in_turn_and_publish_their_own_blocks() -> None:
    engine = MockEngine("m", MockOptions(scheduler=instant.scheduler, dp_size=2))
    config = await engine.start(0)
    assert config.data_parallel_size == 2
    told = [Reports(), Reports()]
    for source in await engine.kv_event_sources():
        assert isinstance(source, PushSource)
        source.on_ready(told[source.dp_rank])
    await answer(engine, request(9))
    await answer(engine, request(9))
    await answer(engine, request(13, 1, routing={"dp_rank": 1}))
    stored = [[len(change["stored"]["blocks"]) for change in each.changes] for each in told]
    assert stored == [[2, 1], [2, 1, 1]]
    await engine.cleanup()


async def test_blocks_of_the_host_tier_are_published_as_such() -> None:
    tier = HostTierOptions(num_host_blocks=3, to_host_block_ms=1.0, to_device_block_ms=1.0)
    engine = MockEngine("m", MockOptions(scheduler=replace(instant.scheduler, host=tier)))
    await engine.start(0)
    (source,) = await engine.kv_event_sources()
    assert isinstance(source, PushSource)
    told = Reports()
    source.on_ready(told)
    await answer(engine, request(13))
    await answer(engine, request(1, 1, token_ids=list(range(500, 513))))
    await answer(engine, request(1, 1))
    assert ("host_pinned", "stored") in told.tiers
    assert ("host_pinned", "stored", "removed") in told.tiers
    await engine.cleanup()


async def test_a_prefill_worker_hands_over_after_one_token() -> None:
    prefill = MockOptions(
        scheduler=SchedulerOptions(role="prefill", speedup_ratio=0.0), transfer=KvTransferTime(1.0, 1_000_000)
    )
    engine = MockEngine("m", prefill)
    await engine.start(0)
    began = time.monotonic()
    (only,) = await answer(engine, request(30, 500))
    assert time.monotonic() - began >= 0.03
    assert (len(only["token_ids"]), only["disaggregated_params"]) == (1, HANDOFF)
    await engine.cleanup()


async def test_a_decode_worker_publishes_no_blocks() -> None:
    engine = MockEngine("m", options(role="decode", speedup_ratio=0.0))
    await engine.start(0)
    assert await engine.kv_event_sources() == []
    assert len(ids(await answer(engine, request(30)))) == 5
    await engine.cleanup()


async def pair(**prefilling: Any) -> tuple[MockEngine, MockEngine, dict[str, Any]]:
    """A prefill and a decode worker, and where they meet."""
    prefill = MockEngine("m", replace(options(role="prefill", **prefilling), bootstrap_port=0))
    decode = MockEngine("m", options(role="decode", speedup_ratio=0.0))
    config = await prefill.start(0)
    await decode.start(1)
    info = {"bootstrap_host": "127.0.0.1", "bootstrap_port": config.bootstrap_port, "bootstrap_room": 5}
    assert config.bootstrap_host
    return prefill, decode, info


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_a_decode_worker_waits_where_the_prompt_is_computed(first: str) -> None:
    prefill, decode, info = await pair()
    engines = [prefill, decode] if first == "prefill" else [decode, prefill]
    tasks = [asyncio.create_task(answer(engine, request(bootstrap_info=info))) for engine in engines]
    began = time.monotonic()
    answers = dict(zip([first, "other"], await asyncio.gather(*tasks), strict=True))
    assert time.monotonic() - began >= 0.016
    assert sorted(len(ids(chunks)) for chunks in answers.values()) == [1, 5]
    await prefill.cleanup()
    await decode.cleanup()


async def test_each_half_learns_when_the_other_one_leaves() -> None:
    prefill, decode, info = await pair(speedup_ratio=0.0001)  # minutes, which nobody waits for
    slow = request(200, bootstrap_info=info)
    computing = asyncio.create_task(answer(prefill, slow))
    context = mock_context()
    waiting = asyncio.create_task(answer(decode, slow, context))
    await until(lambda: any(session.is_awaited for session in desk_of(prefill)))
    context.stop_generating()
    assert (await waiting)[-1]["finish_reason"] == "cancelled"
    with pytest.raises(Disconnected, match="decode worker left"):
        await computing
    stopped = mock_context()
    computing = asyncio.create_task(answer(prefill, slow, stopped))
    waiting = asyncio.create_task(answer(decode, slow))
    await until(lambda: any(session.is_awaited for session in desk_of(prefill)))
    stopped.stop_generating()
    await computing
    with pytest.raises(Disconnected, match="did not finish the prompt"):
        await waiting
    with pytest.raises(InvalidArgument, match="requires a handoff ID"):
        await answer(prefill, request(bootstrap_info={"bootstrap_host": "x"}))
    assert desk_of(prefill) == []
    await prefill.cleanup()
    with pytest.raises(CannotConnect):
        await answer(decode, slow)
    await decode.cleanup()


def desk_of(engine: MockEngine) -> list[Any]:
    desk = engine._desk
    assert desk is not None
    return list(desk._sessions.values())


async def test_a_decode_worker_computes_a_prompt_that_nobody_computed() -> None:
    engine = MockEngine("m", options(role="decode"))
    await engine.start(0)

    async def seconds_of(**more: Any) -> float:
        began = time.monotonic()
        await answer(engine, request(20, 1, **more))
        return time.monotonic() - began

    async with asyncio.timeout(PATIENCE_SECONDS):  # other programs on the machine may lengthen any one of them
        while await seconds_of(prefill_result={"disaggregated_params": {}}) >= 0.016:
            pass
    assert await seconds_of() >= 0.016
    await engine.cleanup()


async def test_the_text_of_its_metrics_has_the_engines_names() -> None:
    for backend, names in (("vllm", ("vllm:num_requests_running", "vllm:time_to_first_token_seconds_count")),
                           ("sglang", ("sglang:num_running_reqs", "sglang:cache_hit_rate"))):  # fmt: skip
        engine = MockEngine("m", options(backend=backend, speedup_ratio=0.0))
        await engine.start(0)
        await answer(engine, request())
        texts: list[Any] = []
        await engine.register_prometheus(Scraped(texts))  # type: ignore[arg-type]
        for name in names:
            assert f'{name}{{model_name="m"}}' in texts[0]()
        await engine.cleanup()


class Scraped:
    """Takes the callbacks of an engine."""

    def __init__(self, callbacks: list[Any]) -> None:
        self.register_prometheus_expfmt_callback = callbacks.append


async def test_reasoning_ids_stand_where_the_thought_begins_and_ends() -> None:
    shape = ReasoningShape(7, 8, 0.5)
    assert [shape.thinking_tokens(tokens) for tokens in (0, 1, 2, 3, 10)] == [0, 0, 2, 2, 5]
    engine = MockEngine("m", MockOptions(scheduler=instant.scheduler, reasoning=shape))
    await engine.start(0)
    thought = ids(await answer(engine, request(output=10)))
    assert (thought[0], thought[4]) == (7, 8)
    assert not {7, 8} & set(thought[1:4] + thought[5:])
    await engine.cleanup()


async def test_answers_come_from_a_trace(tmp_path: Any) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"request_id": "a", "output_length": 2, "output_token_ids": [5, 6]}\n'
        '{"session_id": "s", "output_token_ids": [7]}\n{"session_id": "s", "output_token_ids": [8]}\n'
        '{"output_token_ids": [9]}\n'
    )
    read = ResponseTrace.read(trace)
    assert [read.find(key) for key in ("a", "s:0", "s:1", "3", "b")] == [[5, 6], [7], [8], [9], None]
    engine = MockEngine("m", MockOptions(scheduler=instant.scheduler, response_trace=trace))
    config = await engine.start(0)
    assert config.runtime_data == {"output_replay_consumer": "true"}
    assert ids(await answer(engine, request(output=2, annotations=["output_replay_id:a"]))) == [5, 6]
    assert len(ids(await answer(engine, request(output=2, annotations=["output_replay_id:zzz"])))) == 2
    await engine.cleanup()


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ('{"request_id": "a", "output_token_ids": [1]}\n' * 2, "line 2.*second row"),
        ('{"output_length": 3, "output_token_ids": [1]}', "output_length is 3"),
        ('{"output_token_ids": [-1]}', "output_token_ids"),
        ("[]", "expected an object"),
        ("{", "not JSON"),
    ],
)
def test_a_trace_that_is_not_right_is_refused_with_its_line(tmp_path: Any, rows: str, said: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(rows)
    with pytest.raises(InvalidArgument, match=said):
        ResponseTrace.read(trace)
