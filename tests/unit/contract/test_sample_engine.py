import asyncio
import base64
import re
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from dynamo.contract.conformance import run_conformance, run_encode_conformance, run_raw_conformance
from dynamo.contract.modes import DisaggregationMode
from dynamo.engines.sample.diffusion_engine import SampleDiffusionEngine
from dynamo.engines.sample.drawing import draw_png
from dynamo.engines.sample.engine import SampleLLMEngine
from dynamo.protocol.model_types import ModelInput
from dynamo.runtime.calls.context import Context
from dynamo.worker.kv_publishing.publisher import PushSource
from support.cases import each_case
from support.patience import PATIENCE_SECONDS

AGG, PREFILL, DECODE, ENCODE = DisaggregationMode
MEDIA: dict[str, Any] = {
    "multi_modal_data": {"image": [{"Url": "data:image/png;base64,AA=="}]},
    "mm_processor_kwargs": {"a": 1},
}


def engine(**options: Any) -> SampleLLMEngine:
    return SampleLLMEngine(delay=0, **options)


def request(prompt: int = 3, max_tokens: int | None = None, **more: Any) -> Any:
    # Members that are not set arrive as None, as from the frontend.
    return {
        "token_ids": list(range(prompt)),
        "stop_conditions": {"max_tokens": max_tokens, "stop": None},
        "output_options": {"logprobs": more.pop("logprobs", None)},
        "routing": {},
        **more,
    }


async def collect(source: Any, body: dict[str, Any], context: Context | None = None) -> list[dict[str, Any]]:
    async with aclosing(source.generate(body, context=context or Context())) as stream:
        return [item async for item in stream]


# -- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 16])
async def test_an_answer_has_as_many_chunks_as_tokens_and_ends_in_length(count: int) -> None:
    chunks = await collect(engine(), request(5, count))
    assert [item["token_ids"] for item in chunks] == [[number] for number in range(1, count + 1)]
    assert all(item["index"] == 0 for item in chunks)
    assert [item.get("finish_reason") for item in chunks] == [None] * (count - 1) + ["length"]
    assert chunks[-1]["completion_usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": count,
        "total_tokens": 5 + count,
    }
    assert all(set(item) == {"token_ids", "index"} for item in chunks[:-1])


@each_case("body", [{"token_ids": [1]}, request(1), request(1, 0), {"token_ids": [1], "stop_conditions": None}])
async def test_a_request_that_does_not_say_gets_the_engines_length(body: dict[str, Any]) -> None:
    assert len(await collect(engine(max_tokens=4), body)) == 4


async def test_token_ids_rotate_below_32000() -> None:
    source = engine()
    chunks = await collect(source, request(1, 32_001))
    assert [item["token_ids"][0] for item in chunks[31_997:]] == [31_998, 31_999, 0, 1]


async def test_a_cancelled_answer_counts_what_was_sent() -> None:
    context = Context()
    seen = []
    async with aclosing(engine().generate(request(5, 100), context)) as stream:
        async for item in stream:
            seen.append(item)
            if len(seen) == 3:
                context.stop_generating()
    assert len(seen) == 4
    assert seen[-1]["finish_reason"] == "cancelled"
    assert seen[-1]["token_ids"] == []
    assert seen[-1]["completion_usage"]["completion_tokens"] == 3


class OnlyStops:
    """All that the guide's own test double has."""

    def is_stopped(self) -> bool:
        return False


async def test_a_context_that_only_knows_whether_it_is_stopped_is_enough() -> None:
    chunks = [item async for item in engine().generate(request(1, 2), OnlyStops())]  # type: ignore[arg-type]
    assert len(chunks) == 2


async def test_answers_do_not_share_state() -> None:
    source = engine()
    answers = await asyncio.gather(*(collect(source, request(1, 1 + number)) for number in range(8)))
    assert [len(answer) for answer in answers] == list(range(1, 9))


# -- log probabilities ------------------------------------------------------------------------------------------------


async def test_no_alternatives_unless_they_were_asked_for() -> None:
    chunks = await collect(engine(), request(1, 3, logprobs=0))
    assert [item["log_probs"] for item in chunks] == [[pytest.approx(-0.1 * n)] for n in (1, 2, 3)]
    assert all("top_logprobs" not in item for item in chunks)


async def test_alternatives_follow_the_chosen_token() -> None:
    (only,) = await collect(engine(), request(1, 1, logprobs=3))
    (entries,) = only["top_logprobs"]
    assert [entry["rank"] for entry in entries] == [1, 2, 3, 4]
    assert [entry["token_id"] for entry in entries] == [1, 2, 3, 4]
    assert [entry["token"] for entry in entries] == ["token_id:1", "token_id:2", "token_id:3", "token_id:4"]
    assert [entry["logprob"] for entry in entries] == pytest.approx([-0.1, -0.2, -0.3, -0.4])


async def test_at_most_twenty_alternatives() -> None:
    (only,) = await collect(engine(), request(1, 1, logprobs=99))
    assert len(only["top_logprobs"][0]) == 21


# -- roles ------------------------------------------------------------------------------------------------------------


async def test_prefill_makes_one_token_and_a_handoff() -> None:
    (only,) = await collect(engine(disaggregation_mode=PREFILL), request(2, 8))
    assert only["finish_reason"] == "length"
    handoff = only["disaggregated_params"]
    assert handoff["completed_tokens"] == [1]
    assert re.fullmatch("[0-9a-f]{32}", handoff["sample_handle"])


async def test_decode_takes_the_handoff_and_makes_none() -> None:
    source = engine(disaggregation_mode=DECODE)
    chunks = await collect(source, request(2, 3, prefill_result={"disaggregated_params": {}}))
    assert len(chunks) == 3
    assert "disaggregated_params" not in chunks[-1]


async def test_decode_refuses_a_request_without_a_handoff_but_not_a_probe() -> None:
    source = engine(disaggregation_mode=DECODE)
    with pytest.raises(ValueError, match=r"decode.*prefill_result"):
        await collect(source, request(2, 3))
    payload = await source.health_check_payload()
    assert payload["_HEALTH_CHECK"] is True
    assert len(await collect(source, payload)) == 1


async def test_decode_refuses_raw_media() -> None:
    with pytest.raises(ValueError, match="decode worker should not receive raw multimodal payloads"):
        await collect(engine(disaggregation_mode=DECODE), request(2, 3, prefill_result={}, **MEDIA))


async def test_encode_answers_with_one_handle() -> None:
    (only,) = await collect(engine(disaggregation_mode=ENCODE), request(3, 8, **MEDIA))
    assert only["token_ids"] == []
    assert only["finish_reason"] == "stop"
    assert only["encoder_result"]["handle"].startswith("sample-encoder:")
    assert only["encoder_result"]["multimodal_kwargs"] == MEDIA
    assert only["completion_usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}


@pytest.mark.parametrize("when", ["before", "during"])
async def test_encode_sees_a_stop_before_and_after_its_work(when: str) -> None:
    context = Context()
    stream = SampleLLMEngine(delay=0 if when == "before" else 0.01, disaggregation_mode=ENCODE).generate(
        request(3, **MEDIA), context
    )
    if when == "before":
        context.stop_generating()
    else:
        asyncio.get_running_loop().call_soon(context.stop_generating)
    (only,) = [item async for item in stream]
    assert only["finish_reason"] == "cancelled"
    assert "encoder_result" not in only


@pytest.mark.parametrize("mode", [AGG, PREFILL])
async def test_media_are_encoded_here_when_there_is_no_encoder(mode: DisaggregationMode) -> None:
    chunks = await collect(engine(disaggregation_mode=mode), request(3, 2, **MEDIA))
    seen = chunks[-1]["engine_data"]["sample_multimodal"]
    assert seen["handle"].startswith("sample-encoder:")
    assert seen["multimodal_kwargs"] == MEDIA


async def test_an_encoders_result_is_used_as_it_is() -> None:
    result = {"handle": "sample-encoder:abc", "multimodal_kwargs": {}}
    chunks = await collect(engine(route_to_encoder=True), request(3, 2, encoder_result=result, **MEDIA))
    assert chunks[-1]["engine_data"]["sample_multimodal"] is result


@each_case(
    ("more", "said"),
    [
        ({}, "no encoder_result"),
        ({"encoder_result": [1]}, "JSON object"),
        ({"encoder_result": {"handle": "other:1"}}, r"encoder_result\.handle"),
        ({"encoder_result": {}}, r"encoder_result\.handle"),
    ],
)
async def test_with_an_encoder_in_front_its_result_must_be_there_and_its_own(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        await collect(engine(route_to_encoder=True), request(3, 2, **more, **MEDIA))


async def test_a_request_of_text_needs_no_encoder() -> None:
    chunks = await collect(engine(route_to_encoder=True), request(3, 2))
    assert "engine_data" not in chunks[-1]


# -- start, flags, health ---------------------------------------------------------------------------------------------


async def test_start_reports_the_documented_figures() -> None:
    config = await engine(model_name="m").start(7)
    assert (config.model, config.served_model_name) == ("m", "m")
    assert (config.context_length, config.kv_cache_block_size, config.total_kv_blocks) == (2048, 16, 1000)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (64, 2048)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "DYN_NAMESPACE",
        "DYN_COMPONENT",
        "DYN_DISCOVERY_BACKEND",
        "ETCD_ENDPOINTS",
        "DYN_HEALTH_CHECK_PAYLOAD",
    ):
        monkeypatch.delenv(name, raising=False)


async def test_the_command_line_has_the_documented_defaults() -> None:
    source, config = await SampleLLMEngine.from_args([])
    assert (source.model_name, source.max_tokens, source.delay) == ("sample-model", 16, 0.01)
    assert (source.disaggregation_mode, source.route_to_encoder) == (AGG, False)
    assert (config.namespace, config.component, config.endpoint) == ("dynamo", "sample", "generate")
    assert (config.model_name, config.served_model_name) == ("sample-model", "sample-model")
    assert config.endpoint_types == "chat,completions"
    assert (config.request_plane, config.event_plane, config.enable_kv_routing) == ("tcp", None, True)


async def test_the_command_line_reaches_engine_and_worker() -> None:
    source, config = await SampleLLMEngine.from_args(
        [
            "--model-name",
            "m",
            "--max-tokens",
            "3",
            "--delay",
            "0.5",
            "--disaggregation-mode",
            "prefill",
            "--route-to-encoder",
            "--disable-kv-routing",
            "--discovery-backend",
            "file",
        ]
    )
    assert (source.model_name, source.max_tokens, source.delay) == ("m", 3, 0.5)
    assert (source.disaggregation_mode, source.route_to_encoder) == (PREFILL, True)
    assert (config.disaggregation_mode, config.route_to_encoder) == (PREFILL, True)
    assert (config.enable_kv_routing, config.discovery_backend) == (False, "file")


async def test_the_probe_asks_for_one_token() -> None:
    payload = await engine().health_check_payload()
    assert payload["token_ids"] == [1]
    assert len(await collect(engine(), payload)) == 1


# -- KV events and load -----------------------------------------------------------------------------------------------


class Recorder:
    """Stands in for both publishers; the engine's own thread calls it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.snapshots: list[tuple[int, Any]] = []
        self.threads: set[str] = set()
        self.changed = threading.Condition()
        self.failures = 0

    def _note(self, call: tuple[Any, ...]) -> None:
        with self.changed:
            self.threads.add(threading.current_thread().name)
            self.calls.append(call)
            self.changed.notify_all()
            if self.failures:
                self.failures -= 1
                raise ConnectionError("no plane")

    def publish_stored(self, token_ids: list[int], num_block_tokens: list[int], block_hashes: list[int]) -> None:
        self._note(("stored", token_ids, num_block_tokens, block_hashes))

    def publish_removed(self, block_hashes: list[int]) -> None:
        self._note(("removed", block_hashes))

    def publish(self, dp_rank: int, snapshot: Any) -> None:
        with self.changed:
            self.snapshots.append((dp_rank, snapshot))
            self.changed.notify_all()

    async def wait(self, condition: Any) -> None:
        def block() -> bool:
            with self.changed:
                return self.changed.wait_for(condition, timeout=PATIENCE_SECONDS)

        assert await asyncio.to_thread(block)


@asynccontextmanager
async def connected(source: SampleLLMEngine) -> AsyncIterator[Recorder]:
    recorder = Recorder()
    (push,) = await source.kv_event_sources()
    assert isinstance(push, PushSource)
    assert push.dp_rank == 0
    push.on_ready(recorder)
    source.attach_snapshot_publisher(recorder)  # type: ignore[arg-type]
    try:
        yield recorder
    finally:
        await source.cleanup()
        assert "sample-kv-publisher" not in {thread.name for thread in threading.enumerate()}
        await source.cleanup()


@pytest.mark.parametrize(("prompt", "blocks"), [(1, 1), (16, 1), (40, 2)])
async def test_each_request_holds_fresh_blocks_while_it_runs(prompt: int, blocks: int) -> None:
    source = engine()
    async with connected(source) as recorder:
        await collect(source, request(prompt, 1))
        await collect(source, request(prompt, 1))
        await recorder.wait(lambda: len(recorder.calls) == 4)
    hashes = [call[-1] for call in recorder.calls]
    assert [call[0] for call in recorder.calls] == ["stored", "removed"] * 2
    assert hashes[0] == hashes[1] == list(range(1, blocks + 1))
    assert hashes[2] == hashes[3] == list(range(blocks + 1, 2 * blocks + 1))
    assert recorder.calls[0][2] == [16] * blocks
    assert len(recorder.calls[0][1]) == 16 * blocks
    assert recorder.threads == {"sample-kv-publisher"}


async def test_blocks_are_released_when_a_stream_is_dropped() -> None:
    source = engine()
    async with connected(source) as recorder:
        stream = source.generate(request(1, 100), Context())
        await anext(stream)
        await stream.aclose()
        await recorder.wait(lambda: len(recorder.calls) == 2)
    assert recorder.calls[1] == ("removed", [1])


async def test_an_idle_engine_reports_its_load() -> None:
    source = engine()
    async with connected(source) as recorder:
        stream = source.generate(request(32, 100), Context())
        await anext(stream)
        await recorder.wait(lambda: any(snapshot.kv_used_blocks == 2 for _, snapshot in recorder.snapshots))
        await stream.aclose()
        await recorder.wait(lambda: recorder.snapshots[-1][1].kv_used_blocks == 0)
    rank, snapshot = next(found for found in recorder.snapshots if found[1].kv_used_blocks == 2)
    assert (rank, snapshot.kv_total_blocks, snapshot.gpu_cache_usage) == (0, 1000, 0.002)
    assert (snapshot.dp_rank, snapshot.kv_cache_hit_rate) == (0, None)


async def test_a_failing_publisher_is_logged_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    source = engine()
    async with connected(source) as recorder:
        recorder.failures = 1
        await collect(source, request(1, 1))
        await recorder.wait(lambda: len(recorder.calls) == 2)
    assert "no plane" in caplog.text


async def test_cleanup_needs_neither_start_nor_publishers() -> None:
    source = engine()
    await source.cleanup()
    await source.cleanup()


async def test_only_an_encoder_has_no_kv_events() -> None:
    assert await engine(disaggregation_mode=ENCODE).kv_event_sources() == []
    assert engine().component_metrics_dp_ranks() == [0]


# -- images -----------------------------------------------------------------------------------------------------------


async def test_an_image_request_gets_one_answer_with_as_many_pictures() -> None:
    source = SampleDiffusionEngine(delay=0)
    (default,) = await collect(source, {"prompt": "a cat"})
    picture = base64.b64encode(draw_png("0/0/a cat", 64, 64)).decode()
    assert default["data"] == [{"url": f"data:image/png;base64,{picture}"}]
    assert isinstance(default["created"], int)
    (three,) = await collect(source, {"prompt": "a cat", "n": 3, "response_format": "b64_json"})
    assert three["data"][0] == {"b64_json": picture}
    assert len({entry["b64_json"] for entry in three["data"]}) == 3


@each_case("count", [0, 11, -1, "2", 1.0, True])
async def test_a_senseless_number_of_images_is_refused(count: Any) -> None:
    with pytest.raises(ValueError, match=r"n must be an integer in 1\.\.10"):
        await collect(SampleDiffusionEngine(delay=0), {"prompt": "x", "n": count})


async def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="response_format"):
        await collect(SampleDiffusionEngine(delay=0), {"prompt": "x", "response_format": "gif"})


async def test_a_probe_of_the_image_engine_does_not_wait() -> None:
    source = SampleDiffusionEngine(delay=3600)
    payload = await source.health_check_payload()
    assert payload == {"prompt": "ping", "n": 1, "response_format": "b64_json", "_HEALTH_CHECK": True}
    assert len(await collect(source, payload)) == 1


async def test_the_image_engine_registers_as_a_raw_one() -> None:
    source, config = await SampleDiffusionEngine.from_args(["--model-name", "m"])
    assert (config.component, config.endpoint_types, config.model_input) == ("sample", "images", ModelInput.Text)
    assert (config.enable_kv_routing, config.served_model_name, config.model_name) == (False, "m", "")
    assert (await source.start(0)).llm is None
    await source.cleanup()


# -- the kit ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"route_to_encoder": True}])
async def test_the_sample_engine_passes_the_conformance_kit(options: dict[str, Any]) -> None:
    await run_conformance(lambda: SampleLLMEngine(delay=0.001, **options))


async def test_the_sample_encoder_passes_its_conformance_kit() -> None:
    await run_encode_conformance(lambda: SampleLLMEngine(delay=0.001, disaggregation_mode=ENCODE))


async def test_the_image_engine_passes_its_conformance_kit() -> None:
    await run_raw_conformance(lambda: SampleDiffusionEngine(delay=0.001))
