"""The part of the vLLM engine that needs no vLLM: versions, flags, requests, answers, errors, reports."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dynamo.contract.kv_events import ComponentSnapshot, ZmqSource
from dynamo.contract.modes import DisaggregationMode
from dynamo.errors import EngineShutdown, HttpError, InvalidArgument, WorkerUnavailable
from dynamo.vllm import arguments
from dynamo.vllm.arguments import check_built, served_names
from dynamo.vllm.errors import map_vllm_error
from dynamo.vllm.installed import DEFAULTS, check_version, prepare_environment
from dynamo.vllm.operations import VllmOperations
from dynamo.vllm.pooling import check_tasks
from dynamo.vllm.reports import LoadReports, event_sources, events_address
from dynamo.vllm.requests import VllmAnswer, VllmLimits, constraint_of, own_args, read_sampling
from dynamo.vllm.starting import bind_threads
from support.cases import each_case

LIMITS = VllmLimits(context_length=100, vocab_size=50)


# -- what is installed ------------------------------------------------------------------------------------------------


@each_case("version", ["0.20.0", "0.32.0", "0.33.1rc2", "0.28.0+cpu", "0.24.0.dev12+gabcdef"])
def test_known_releases_pass(version: str) -> None:
    check_version(version)


@each_case("version", ["0.19.9", "0.16.0", "0.34.0", "1.0.0", "", "dev"])
def test_another_release_is_one_sentence_that_names_both(version: str) -> None:
    with pytest.raises(InvalidArgument, match=r"0\.20 to 0\.33") as caught:
        check_version(version)
    assert version in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_the_operator_set_stays() -> None:
    environment = {"VLLM_NO_USAGE_STATS": "0"}
    prepare_environment(environment)
    assert environment == {**DEFAULTS, "VLLM_NO_USAGE_STATS": "0"}


@each_case(
    "before, cores, after",
    [
        ({}, 2, {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}),
        ({}, 1, {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}),
        ({"OMP_NUM_THREADS": "4"}, 8, {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "4"}),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-3"}, 8, {"VLLM_CPU_OMP_THREADS_BIND": "0-3", "OMP_NUM_THREADS": "7"}),
    ],
)
def test_the_choice_of_threads_is_logged_and_overruled(
    before: dict[str, str], cores: int, after: dict[str, str]
) -> None:
    environment = dict(before)
    said: list[Any] = []
    bind_threads(environment, cores, said.append)
    assert environment == after
    assert all(f"{name}={after[name]}" in said[0] for name in set(after) - set(before))


# -- flags ------------------------------------------------------------------------------------------------------------


@each_case(
    "values, names",
    [(None, []), (["a"], ["a"]), (["a,b", "c"], ["a", "b", "c"]), (["a", "b,", "a"], ["a", "b"])],
)
def test_the_first_served_name_is_the_name_and_the_others_are_aliases(values: Any, names: list[str]) -> None:
    assert served_names(values) == names


@each_case(
    "own, rest, named",
    [
        ({}, ["--headless"], "--headless"),
        ({}, ["--classify-worker=1"], "--classify-worker"),
        ({"connector": ["nixl"]}, [], "--kv-transfer-config"),
        ({"disaggregation_mode": DisaggregationMode.ENCODE}, [], "--disaggregation-mode encode"),
    ],
)
def test_what_is_not_built_is_refused_by_name(own: dict[str, Any], rest: list[str], named: str) -> None:
    given = {"connector": None, "disaggregation_mode": DisaggregationMode.AGGREGATED} | own
    check_built(argparse.Namespace(connector=None, disaggregation_mode=DisaggregationMode.AGGREGATED), ["--seed", "1"])
    with pytest.raises(InvalidArgument, match=named):
        check_built(argparse.Namespace(**given), rest)


@each_case(
    "flags, types",
    [
        ([], "embedding"),
        (["--endpoint-types", "classify"], "classify"),
    ],
)
def test_a_pooling_worker_serves_embeddings_unless_other_vectors_are_named(flags: list[str], types: str) -> None:
    own = arguments._own_parser().parse_args(["--model", "m", "--embedding-worker", *flags])
    assert own.embedding_worker
    assert arguments._worker_config(own, [], is_pooling=True).endpoint_types == types
    assert arguments._worker_config(own, [], is_pooling=False).endpoint_types == own.endpoint_types


def test_a_pooling_worker_is_no_half_of_a_request() -> None:
    own = arguments._own_parser().parse_args(["--model", "m", "--disaggregation-mode", "prefill"])
    with pytest.raises(InvalidArgument, match="--disaggregation-mode: a pooling worker"):
        arguments._worker_config(own, [], is_pooling=True)


def test_a_pooling_worker_does_not_chat() -> None:
    own = arguments._own_parser().parse_args(["--model", "m", "--endpoint-types", "chat,embedding"])
    with pytest.raises(InvalidArgument, match="--endpoint-types chat,embedding: a pooling worker"):
        arguments._worker_config(own, [], is_pooling=True)


@each_case(
    "tasks, types, refused",
    [
        (("embed", "token_embed"), "embedding", None),
        (("classify",), "classify", None),
        (("classify",), "embeddings", "its tasks are classify"),
        ((), "classify", "its tasks are none"),
    ],
)
def test_a_model_without_the_task_is_refused(tasks: tuple[str, ...], types: str, refused: str | None) -> None:
    if refused is None:
        check_tasks(tasks, types)
        return
    with pytest.raises(InvalidArgument, match=refused):
        check_tasks(tasks, types)


# -- requests ---------------------------------------------------------------------------------------------------------


def sampling(limits: VllmLimits = LIMITS, **groups: Any) -> dict[str, Any]:
    return read_sampling({"token_ids": [1, 2, 3], **groups}, limits)


def test_a_bare_request_runs_to_the_end_of_the_context() -> None:
    assert sampling() == {"n": 1, "max_tokens": 97, "min_tokens": 0, "ignore_eos": False, "stop_token_ids": []}


def test_every_option_has_its_place() -> None:
    found = sampling(
        sampling_options={
            "n": 2, "best_of": 2, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "seed": 7,
            "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1,
        },
        stop_conditions={
            "max_tokens": 5, "min_tokens": 2, "stop_token_ids": [4], "stop_token_ids_visible": [5],
            "stop_token_ids_hidden": [6, 4, 99], "max_thinking_tokens": 3, "stop": ["x"],
        },
        output_options={"logprobs": 0, "prompt_logprobs": 2},
        eos_token_ids=[6, 7],
        extra_args={"sampling_options": {"logit_bias": {"3": -1}, "allowed_token_ids": [1, 2]}},
    )  # fmt: skip
    assert found == {
        "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "seed": 7,
        "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1,
        "max_tokens": 5, "min_tokens": 2, "ignore_eos": False, "stop_token_ids": [4, 5, 6, 7],
        "thinking_token_budget": 3, "logprobs": 0, "prompt_logprobs": 2,
        "logit_bias": {3: -1.0}, "allowed_token_ids": [1, 2],
    }  # fmt: skip


def test_the_models_own_defaults_lie_under_the_request() -> None:
    limits = VllmLimits(100, 50, {"temperature": 0.6, "top_k": 20, "max_tokens": 10})
    found = sampling(limits, sampling_options={"temperature": 0.0}, stop_conditions={"max_tokens": None})
    assert (found["temperature"], found["top_k"], found["max_tokens"]) == (0.0, 20, 10)
    assert sampling(limits, stop_conditions={"max_tokens": 500})["max_tokens"] == 97


def test_ignore_eos_leaves_no_end_token() -> None:
    found = sampling(stop_conditions={"ignore_eos": True}, eos_token_ids=[6])
    assert (found["ignore_eos"], found["stop_token_ids"]) == (True, [])


def test_single_tokens_to_report_replace_the_most_likely_ones() -> None:
    found = sampling(output_options={"logprobs": 3}, extra_args={"sampling_options": {"logprob_token_ids": [1]}})
    assert found["logprob_token_ids"] == [1]
    assert "logprobs" not in found


@each_case(
    "changes, named",
    [
        ({"token_ids": list(range(100))}, "100 tokens"),
        ({"multi_modal_data": {"image": []}, "prompt_embeds": "x"}, "prompt_embeds"),
        ({"bootstrap_info": {"a": 1}}, "bootstrap_info"),
        ({"sampling_options": {"n": 2, "best_of": 3}}, "best_of"),
        ({"sampling_options": {"use_beam_search": True}}, "use_beam_search"),
        ({"sampling_options": []}, "sampling_options"),
        ({"extra_args": {"sampling_options": {"logit_bias": {"x": 1}}}}, "logit_bias"),
        ({"extra_args": {"sampling_options": {"bad_words_token_ids": [[1]]}}}, "bad_words_token_ids"),
        ({"extra_args": {"sampling_options": {"suffix": "x"}}}, "suffix"),
    ],
)
def test_what_cannot_be_served_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        sampling(**changes)


@each_case(
    "guided, found",
    [
        (None, None),
        ({}, None),
        ({"choice": []}, None),
        ({"json": {}}, {"json": {}}),
        ({"regex": "a+", "backend": "x"}, {"regex": "a+"}),
        ({"choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"structural_tag": {"type": "x"}}, {"structural_tag": '{"type": "x"}'}),
        (
            {"json": {"type": "object"}, "whitespace_pattern": " ?"},
            {"json": {"type": "object"}, "whitespace_pattern": " ?"},
        ),
    ],
)
def test_a_constraint_is_passed_on(guided: Any, found: Any) -> None:
    assert constraint_of({"sampling_options": {"guided_decoding": guided}}) == found


def test_two_constraints_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="json and regex"):
        constraint_of({"sampling_options": {"guided_decoding": {"json": {}, "regex": "a"}}})


# -- answers ----------------------------------------------------------------------------------------------------------


@dataclass
class Logprob:
    logprob: float
    rank: int = 1
    decoded_token: str | None = None


@dataclass
class Part:
    token_ids: list[int]
    index: int = 0
    finish_reason: str | None = None
    stop_reason: Any = None
    logprobs: Any = None


@dataclass
class Output:
    outputs: list[Part]
    num_cached_tokens: int | None = None
    prompt_logprobs: Any = None
    finished: bool = field(default=False)


def chunks(answer: VllmAnswer, *outputs: Output) -> list[Any]:
    return [chunk for output in outputs for chunk in answer.chunks(output)]


def test_outputs_become_chunks_and_the_last_one_counts_them() -> None:
    answer = VllmAnswer(3, 1, wants_logprobs=False)
    found = chunks(
        answer,
        Output([Part([5])], num_cached_tokens=2, prompt_logprobs=[None, {7: Logprob(-1.0)}]),
        Output([Part([])]),
        Output([Part([6, 7])]),
        Output([Part([8], finish_reason="stop", stop_reason=8)]),
    )
    assert found == [
        {"token_ids": [5], "index": 0},
        {"token_ids": [6, 7], "index": 0},
        {
            "token_ids": [8],
            "index": 0,
            "finish_reason": "stop",
            "stop_reason": 8,
            "completion_usage": {
                "prompt_tokens": 3,
                "completion_tokens": 4,
                "total_tokens": 7,
                "prompt_tokens_details": {"cached_tokens": 2},
            },
            "engine_data": {"prompt_logprobs": [None, {"7": {"logprob": -1.0, "rank": 1}}]},
        },
    ]
    assert answer.is_complete


def test_each_choice_ends_by_itself_and_the_last_one_has_the_usage() -> None:
    answer = VllmAnswer(1, 2, wants_logprobs=False)
    first = chunks(answer, Output([Part([5], 1, "length"), Part([6], 0)]))
    assert first == [{"token_ids": [5], "index": 1, "finish_reason": "length"}, {"token_ids": [6], "index": 0}]
    assert not answer.is_complete
    (last,) = chunks(answer, Output([Part([], 0, "repetition")]))
    assert (last["finish_reason"], last["completion_usage"]["completion_tokens"]) == ("stop", 2)


def test_log_probabilities_stand_beside_their_tokens() -> None:
    answer = VllmAnswer(1, 1, wants_logprobs=True)
    (chunk,) = chunks(answer, Output([Part([5], logprobs=[{5: Logprob(-0.5), 9: Logprob(-2.0, 2)}])]))
    assert chunk["log_probs"] == [-0.5]
    assert [each["token_id"] for each in chunk["top_logprobs"][0]] == [5, 9]


@each_case("reason", ["abort", "error"])
def test_a_request_that_vllm_gave_up_goes_to_another_worker(reason: str) -> None:
    with pytest.raises(EngineShutdown):
        chunks(VllmAnswer(1, 1, wants_logprobs=False), Output([Part([], finish_reason=reason)]))


# -- errors -----------------------------------------------------------------------------------------------------------


class VLLMError(Exception): ...


class VLLMClientError(VLLMError): ...


class VLLMNotFoundError(VLLMClientError): ...


class VLLMUnprocessableEntityError(VLLMClientError): ...


class EngineDeadError(VLLMError): ...


class QueueOverflowError(VLLMError):
    http_status = 503


class OldValidation(ValueError): ...


OldValidation.__name__ = "VLLMValidationError"


@each_case(
    "raised, kind, status",
    [
        (VLLMClientError("bad regex"), InvalidArgument, None),
        (OldValidation("bad regex"), InvalidArgument, None),
        (VLLMNotFoundError("no adapter"), HttpError, 404),
        (VLLMUnprocessableEntityError("no"), HttpError, 422),
        (QueueOverflowError("full"), HttpError, 503),
        (EngineDeadError("x"), EngineShutdown, None),
    ],
)
def test_its_errors_keep_their_meaning(raised: Exception, kind: type[Exception], status: int | None) -> None:
    mapped = map_vllm_error(raised)
    assert type(mapped) is kind
    assert getattr(mapped, "code", None) == status


@each_case("raised", [RuntimeError("x"), ValueError("ours"), VLLMError("server side")])
def test_other_errors_stay_what_they_are(raised: Exception) -> None:
    assert map_vllm_error(raised) is None


# -- reports ----------------------------------------------------------------------------------------------------------


class Publisher:
    def __init__(self) -> None:
        self.said: list[tuple[int, ComponentSnapshot]] = []

    def publish(self, rank: int, snapshot: ComponentSnapshot) -> None:
        self.said.append((rank, snapshot))


def test_statistics_become_snapshots_with_the_hit_rate_so_far() -> None:
    reports, publisher = LoadReports(), Publisher()
    reports.blocks_per_rank = 100
    logger = reports.factory()(object(), engine_index=0)
    step = SimpleNamespace(kv_cache_usage=0.25, prefix_cache_stats=SimpleNamespace(queries=10, hits=0))
    logger.record(step, None, engine_idx=1)  # nobody is attached yet
    reports.publisher = publisher  # type: ignore[assignment]
    logger.record(None, None)
    step.prefix_cache_stats = SimpleNamespace(queries=10, hits=5)
    logger.record(step, None, mm_cache_stats=None, engine_idx=1, something_of_a_later_release=1)
    assert publisher.said == [(1, ComponentSnapshot(25, 100, 0.25, 1, 0.25))]
    assert reports.used_blocks == 25


@each_case(
    "endpoint, second",
    [
        (events_address(Path("/tmp/x")), "ipc:///tmp/x/inproc-kv-events_dp1"),
        ("tcp://*:5557", "tcp://*:5558"),
    ],
)
def test_each_rank_has_its_own_source(endpoint: str, second: str) -> None:
    config = SimpleNamespace(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, topic="kv")
    assert event_sources(config, range(2)) == [ZmqSource(endpoint, "kv", 0), ZmqSource(second, "kv", 1)]
    config.enable_kv_cache_events = False
    assert event_sources(config, range(2)) == []
    assert event_sources(None, range(1)) == []


# -- operations -------------------------------------------------------------------------------------------------------


class Client:
    """What the operations need of `AsyncLLM`."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **keywords: Any) -> None:
            self.calls.append((name, *args, *keywords.items()))
            if name == "start_profile":
                raise RuntimeError("needs --profiler-config")

        return call


async def no_step() -> None:
    """What an engine would compute."""


async def test_a_cleared_cache_is_followed_by_a_step_unless_nothing_runs() -> None:
    steps = []

    async def step() -> None:
        steps.append(1)

    operations = VllmOperations(Client(), step)
    for name in (
        "clear_kv_blocks",
        "pause_generation",
        "clear_kv_blocks",
        "resume_generation",
        "sleep",
        "clear_kv_blocks",
    ):
        assert (await operations.control(name, {}))["status"] == "ok"
    assert len(steps) == 1


async def test_a_sleeping_engine_serves_nothing_until_it_wakes_up() -> None:
    client = Client()
    operations = VllmOperations(client, no_step)
    operations.check_serving()
    for _ in range(2):
        assert (await operations.control("sleep", {"level": 2}))["status"] == "ok"
    with pytest.raises(WorkerUnavailable):
        operations.check_serving()
    for _ in range(2):
        assert (await operations.control("wake_up", {}))["status"] == "ok"
    operations.check_serving()
    assert client.calls == [("sleep", 2), ("wake_up",)]


@each_case(
    "name, body, text",
    [
        ("sleep", {"level": 3}, "level must be one of 1, 2"),
        ("pause_generation", {"mode": "x"}, "mode must be one of keep, wait, abort"),
        ("start_profile", {}, "needs --profiler-config"),
    ],
)
async def test_what_cannot_be_done_is_a_body_with_an_error(name: str, body: dict[str, Any], text: str) -> None:
    answer = await VllmOperations(Client(), no_step).control(name, body)
    assert answer["status"] == "error"
    assert text in answer["message"]


async def test_weights_are_changed_while_nothing_is_computed_and_no_block_is_kept(tmp_path: Path) -> None:
    for name in ("served", "other"):
        write_model(tmp_path / name, {"a": (2, 3)})
    client = Client()
    operations = VllmOperations(client, no_step, model=str(tmp_path / "served"))
    body = {"model_path": str(tmp_path / "other"), "weight_version": "7"}
    assert (await operations.update("update_weights_from_disk", body))["status"] == "ok"
    names = [name for name, *_ in client.calls]
    assert names == [
        "pause_generation", "collective_rpc", "reset_prefix_cache", "update_weight_version", "resume_generation",
    ]  # fmt: skip


@each_case(
    "config, shapes, named",
    [
        ({"hidden_size": 8}, {"a": (2, 3)}, "hidden_size of config.json"),
        ({}, {"a": (3, 2)}, "a has the shape [3, 2], this model's is [2, 3]"),
        ({}, {"b": (2, 3)}, "has no tensor a"),
        ({}, {"a": (2, 3), "b": (1,)}, "for which this model has no place"),
        ({}, None, "has no weights"),
    ],
)
async def test_weights_of_another_model_never_reach_vllm(
    tmp_path: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]] | None, named: str
) -> None:
    served, other = (Path(tempfile.mkdtemp(dir=tmp_path)) for _ in range(2))
    write_model(served, {"a": (2, 3)})
    write_model(other, shapes, {"torch_dtype": "float32", **config})
    client = Client()
    answer = await VllmOperations(client, no_step, model=str(served)).update(
        "update_weights_from_disk", {"model_path": str(other)}
    )
    assert (answer["status"], client.calls) == ("error", [])
    assert named in answer["message"]


def write_model(
    directory: Path, shapes: dict[str, tuple[int, ...]] | None, config: dict[str, Any] | None = None
) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config or {"torch_dtype": "bfloat16"}))
    if shapes is not None:
        tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        save_file(tensors, directory / "model.safetensors")


def test_an_unknown_field_is_refused_before_anything_is_touched() -> None:
    refusal = VllmOperations(Client(), no_step).refusal("wake_up", {"level": 1})
    assert refusal is not None
    assert "level" in refusal["message"]


def test_the_route_of_tokens_has_what_only_vllm_knows_and_the_rest_is_refused() -> None:
    def of(envelope: dict[str, Any]) -> dict[str, Any]:
        return {"token_ids": [1], "extra_args": {"vllm_tito": envelope}}

    sampling = {"temperature": 0.5, "stop": ["x"], "skip_reading_prefix_cache": True, "vllm_xargs": {"a": 1}}
    assert read_sampling(of({"sampling_params": sampling}), LIMITS)["skip_reading_prefix_cache"] is True
    given = of({"sampling_params": sampling, "kv_transfer_params": {"b": 2}})
    assert own_args(given, None) == {"a": 1, "kv_transfer_params": {"b": 2}}
    assert own_args(given, {"c": 3}) == {"a": 1, "kv_transfer_params": {"c": 3}}
    assert own_args({}, None) is None
    for envelope, named in (
        ({"sampling_params": {"routed_experts_prompt_start": 1}}, "sampling_params.routed_experts_prompt_start"),
        ({"features": {"mm_hashes": {}}}, "features"),
    ):
        with pytest.raises(InvalidArgument, match=named):
            read_sampling(of(envelope), LIMITS)
