"""Names and keywords of the native system that code written for it uses."""

from __future__ import annotations

import copy
import inspect
import random
import tomllib
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dynamo.runtime.logging as runtime_logging
from dynamo import prometheus_names
from dynamo.contract.engine import (
    BaseEngine,
    DiffusionEngine,
    EngineConfig,
    LLMEngine,
    RawEngine,
    deserialize_logits_processor_entries,
    is_generation_stage,
    logits_processors_for_request,
    serialize_logits_processor_entries,
)
from dynamo.contract.metrics import gather_with_labels
from dynamo.contract.modes import DisaggregationMode
from dynamo.contract.request_fields import trailing_stop_prefix_len
from dynamo.contract.requests import logprobs
from dynamo.contract.requests.disaggregation import require_prefill_result
from dynamo.contract.requests.dp_rank import forced_dp_rank, validate_global_dp_rank
from dynamo.contract.requests.multimodal import encoder_terminal_chunk, require_encoder_result
from dynamo.contract.requests.structural_tag import serialize_structural_tag
from dynamo.contract.requests.token_ids import normalize_request_token_ids, token_ids_len, token_ids_to_list
from dynamo.engines.callable.engine import engine_class
from dynamo.engines.sample.diffusion_engine import image_count, one_image
from dynamo.engines.sample.engine import SampleLLMEngine
from dynamo.errors import InvalidArgument
from dynamo.llm import ModelRuntimeConfig, RouterMode, lora_name_to_id, with_engine_data
from dynamo.placement import policy_for
from dynamo.runtime.calls.context import Context
from dynamo.runtime.client import Annotated
from dynamo.runtime.logging import configure_dynamo_logging
from support.cases import each_case


@each_case(
    ("native", "ours"),
    [
        ("RoundRobin", "ROUND_ROBIN"),
        ("Random", "RANDOM"),
        ("PowerOfTwoChoices", "POWER_OF_TWO"),
        ("LeastLoaded", "LEAST_LOADED"),
        ("Direct", "DIRECT"),
        ("DeviceAwareWeighted", "DEVICE_AWARE_WEIGHTED"),
    ],
)
def test_a_router_mode_has_two_spellings(native: str, ours: str) -> None:
    assert getattr(RouterMode, native) is getattr(RouterMode, ours)
    assert native not in [mode.name for mode in RouterMode]


def test_the_kv_router_mode_is_not_one_of_a_plain_client() -> None:
    assert RouterMode.of("kv") is RouterMode.KV
    with pytest.raises(InvalidArgument, match="not of a plain client"):
        policy_for(RouterMode.KV, rng=random.Random(0))


@pytest.mark.parametrize(("event", "is_error"), [(None, False), ("note", False), ("error", True)])
def test_an_annotated_item_reports_whether_it_is_an_error(event: str | None, is_error: bool) -> None:
    item = Annotated({} if event is None else {"event": event, "comment": ["it broke"]})
    assert item.is_error() is is_error


# -- keywords -----------------------------------------------------------------------------------------------------------


@each_case(
    ("function", "parameters"),
    [
        (validate_global_dp_rank, "dp_rank dp_start dp_size backend_label"),
        (encoder_terminal_chunk, "encoder_result completion_usage"),
        (require_encoder_result, "request mode"),
        (require_prefill_result, "request mode"),
        (logprobs.parse_logprob_options, "output_options"),
        (logprobs.build_sglang_logprob_kwargs, "output_options"),
        (
            logprobs.extract_from_completion_output,
            "output num_output_tokens_so_far tokenizer fallback_to_first_on_missing include_bytes",
        ),
        (logprobs.extract_prompt_logprobs_from_completion_output, "output tokenizer"),
        (logprobs.extract_from_sglang_meta, "meta_info return_tokens_as_token_ids"),
        (logprobs.extract_prompt_logprobs_from_sglang_meta, "meta"),
        (token_ids_to_list, "value"),
        (token_ids_len, "value"),
        (is_generation_stage, "disaggregation_mode"),
        (logits_processors_for_request, "spec disaggregation_mode"),
        (serialize_logits_processor_entries, "entries"),
        (deserialize_logits_processor_entries, "payload"),
        (serialize_structural_tag, "structural_tag"),
        (gather_with_labels, "registry auto_labels prefix_filters exclude_prefixes"),
        (with_engine_data, "completion values"),
        (lora_name_to_id, "lora_name"),
        (configure_dynamo_logging, "service_name worker_id"),
        (runtime_logging.configure_logger, "service_name worker_id level"),
        (runtime_logging.construct_formatter_prefix, "service_name worker_id"),
        (runtime_logging.log_level_mapping, "level"),
        (runtime_logging.python_log_level_mapping, "filters"),
        (runtime_logging.configure_vllm_logging, "dyn_level"),
        (runtime_logging.configure_sglang_logging, "dyn_level"),
        (runtime_logging.get_bool_env_var, "name default"),
        (BaseEngine.engine_control, "self control body"),
        (BaseEngine.engine_update, "self update body"),
    ],
)
def test_a_helpers_keywords_are_those_of_the_native_system(function: Any, parameters: str) -> None:
    assert " ".join(inspect.signature(function).parameters) == parameters


def test_the_names_of_metrics_are_those_of_the_native_system() -> None:
    content = tomllib.loads(Path(prometheus_names.__file__).with_suffix(".toml").read_text())
    native, classes = 0, 0
    pairs = [(getattr(prometheus_names, name), table) for name, table in content.items()]
    for group, table in pairs:  # grows
        pairs += [(getattr(group, name), inside) for name, inside in table.items() if isinstance(inside, dict)]
        constants = {name: value for name, value in vars(group).items() if name.isupper()}
        native += len(constants) - len(table.get("own", "").split())
        classes += group.__name__ != "work_handler_pool"
        assert all(isinstance(value, str) for value in constants.values())
    assert (native, classes) == (237, 31)
    with pytest.raises(ImportError):
        from dynamo.prometheus_names import nothing  # noqa: F401


@each_case(
    ("constant", "value"),
    [
        ("name_prefix.ROUTING_OVERHEAD", "dynamo_routing_overhead"),
        ("labels.NAMESPACE", "dynamo_namespace"),
        ("labels.ROUTER_ID", "router_id"),
        ("frontend_service.MODEL_MIGRATION_TOTAL", "model_migration_total"),
        ("frontend_service.METRICS_PREFIX_ENV", "DYN_METRICS_PREFIX"),
        ("frontend_service.error_type.NONE", ""),
        ("frontend_service.error_type.NOT_FOUND", "not_found"),
        ("router.KV_HIT_RATE", "router_kv_hit_rate"),
        ("routing_overhead.TOTAL_MS", "overhead_total_ms"),
        ("routing_overhead.SHARED_CACHE_ERRORS_TOTAL", "shared_cache_errors_total"),
        ("transport.nats.ERRORS_TOTAL", "nats_errors_total"),
        ("transport.tcp.POOL_IDLE", "tcp_pool_idle"),
        ("model_info.LOAD_TIME_SECONDS", "model_load_time_seconds"),
        ("trtllm_additional.KV_TRANSFER_BYTES", "trtllm_kv_transfer_bytes"),
        ("kv_publisher.ZMQ_EVENTS_TOTAL", "kv_publisher_zmq_events_total"),
    ],
)
def test_the_name_of_a_metric(constant: str, value: str) -> None:
    assert attrgetter(constant)(prometheus_names) == value


@each_case(
    ("completion", "values", "answer"),
    [
        ({"token_ids": [1]}, {"a": 1}, {"token_ids": [1], "engine_data": {"a": 1}}),
        ({"engine_data": {"b": 2}}, {"a": 1}, {"engine_data": {"b": 2, "a": 1}}),
        ({"engine_data": None}, {}, {"engine_data": {}}),
        ({"engine_data": {"k": 2}}, {"k": 1}, "engine_data already contains keys: 'k'"),
        ({"engine_data": [1]}, {"k": 1}, "completion.engine_data must be a mapping, got list"),
        ({}, None, "values must be a mapping, got NoneType"),
    ],
)
def test_what_an_engine_adds_to_a_chunk(completion: dict[str, Any], values: Any, answer: Any) -> None:
    before = copy.deepcopy(completion)
    if isinstance(answer, str):
        with pytest.raises(ValueError, match=f"^{answer}$"):
            with_engine_data(completion, values)
    else:
        assert with_engine_data(completion, values) == answer
    assert completion == before


def test_prompt_logprobs_without_text_are_decoded() -> None:
    class Tokenizer:
        def decode(self, token_ids: list[int]) -> str:
            return f"<{token_ids[0]}>"

    output = SimpleNamespace(
        prompt_logprobs=[
            None,
            {1: SimpleNamespace(logprob=-1.0, rank=2, decoded_token=None)},
            {2: SimpleNamespace(logprob=-2.0, rank=None, decoded_token="x")},
        ]
    )
    read = logprobs.extract_prompt_logprobs_from_completion_output
    assert read(output, tokenizer=Tokenizer()) == [
        None,
        {"1": {"logprob": -1.0, "rank": 2, "decoded_token": "<1>"}},
        {"2": {"logprob": -2.0, "decoded_token": "x"}},
    ]
    assert read(output) == [None, {"1": {"logprob": -1.0, "rank": 2}}, {"2": {"logprob": -2.0, "decoded_token": "x"}}]


@each_case(
    ("text", "stops", "length"),
    [
        ("abcEN", {"END", "X"}, 2),
        ("abcE", {"END"}, 1),
        ("", {"a"}, 0),
        ("ab", {"ab"}, 2),
        ("aab", {"abab", "bb"}, 2),
        ("abc", set(), 0),
    ],
)
def test_the_end_of_a_text_that_may_become_a_stop_string(text: str, stops: set[str], length: int) -> None:
    assert trailing_stop_prefix_len(text, stops) == length


# -- token ids ----------------------------------------------------------------------------------------------------------


def test_a_request_without_token_ids_stays_as_it_is() -> None:
    assert token_ids_to_list(None) is None
    assert token_ids_len(None) == 0
    assert normalize_request_token_ids({}) == {}
    assert normalize_request_token_ids({"token_ids": None}) == {"token_ids": None}
    assert token_ids_to_list(range(3)) == [0, 1, 2]


PACKED = b"\x61\x00\x00\x00\x62\x00\x00\x00"


async def words(token_ids: list[int]) -> list[int]:
    return token_ids


@pytest.mark.parametrize("engine", [SampleLLMEngine(delay=0), engine_class(words)()])
async def test_packed_token_ids_are_counted_as_tokens(engine: Any) -> None:
    request: Any = {"token_ids": PACKED, "stop_conditions": {"max_tokens": 2}}
    await engine.start(0)
    chunks = [chunk async for chunk in engine.generate(request, Context())]
    await engine.cleanup()
    assert chunks[-1]["completion_usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}


@each_case("mode", list(DisaggregationMode))
def test_an_encode_worker_publishes_no_load(mode: DisaggregationMode) -> None:
    ranks = [] if mode is DisaggregationMode.ENCODE else [0]
    assert SampleLLMEngine(disaggregation_mode=mode).component_metrics_dp_ranks() == ranks


# -- errors of the helpers ----------------------------------------------------------------------------------------------


@each_case(
    "call",
    [
        lambda: require_prefill_result({}, DisaggregationMode.DECODE),
        lambda: require_encoder_result({}, DisaggregationMode.AGGREGATED),
        lambda: require_encoder_result({"encoder_result": [1]}, DisaggregationMode.AGGREGATED),
        lambda: token_ids_to_list(b"12345"),
        lambda: token_ids_to_list("text"),
        lambda: normalize_request_token_ids({"token_ids": 3}),
        lambda: forced_dp_rank({"routing": {"dp_rank": "first"}}),
        lambda: image_count({"n": 11}),
        lambda: one_image({"response_format": "bmp"}),
    ],
)
def test_a_request_that_a_helper_rejects_is_the_clients_mistake(call: Callable[[], Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        call()
    assert isinstance(caught.value, ValueError)  # code written for the native helpers catches this


# -- hooks of every engine ----------------------------------------------------------------------------------------------


class Plain(BaseEngine):
    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any: ...

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig("m")

    async def cleanup(self) -> None: ...


async def test_every_kind_of_engine_has_the_control_and_update_hooks() -> None:
    engine = Plain()
    assert engine.supported_controls() == engine.supported_updates() == set()
    assert await engine.engine_control(control="pause", body={}) == {
        "status": "error",
        "message": "unsupported engine control: pause",
    }
    assert (await engine.engine_update(update="x", body={}))["message"] == "unsupported engine update: x"
    for kind in (LLMEngine, RawEngine, DiffusionEngine):
        assert kind.engine_control is BaseEngine.engine_control


# -- setters of the runtime configuration -------------------------------------------------------------------------------


@each_case(
    ("name", "values", "error"),
    [
        ("total_kv_blocks", ["1", 1.5, {"a": 1}], TypeError),
        ("total_kv_blocks", [-1, 2**64], OverflowError),
        ("context_length", [-1, 2**32], OverflowError),
        ("data_parallel_size", [None, "x"], TypeError),
        ("enable_eagle", [1, "true", None], TypeError),
        ("kv_event_publishing_enabled", ["yes", 1], TypeError),
        ("reasoning_parser", [1, b"x", ["x"]], TypeError),
        ("kv_transfer_enforcement", ["bogus", "Required"], ValueError),
        ("kv_transfer_enforcement", [1], TypeError),
        ("kv_transfer_preferred_weight", ["x", [1]], TypeError),
        ("tokenizer_backend", ["bogus"], ValueError),
        ("topology_domains", [{"a": 1}, {1: "x"}, ["x"], None], TypeError),
        ("taints", [["x"], {1}, "x"], TypeError),
        ("structural_tag", [{"scpoe": "auto"}], ValueError),
    ],
)
def test_a_setter_rejects_what_the_native_one_rejects(name: str, values: list[Any], error: type[Exception]) -> None:
    config = ModelRuntimeConfig()
    before = getattr(config, name)
    for value in values:
        with pytest.raises(error, match=name):
            setattr(config, name, value)
    assert getattr(config, name) == before


@each_case(
    ("name", "value", "stored"),
    [
        ("total_kv_blocks", 2**63, 2**63),
        ("max_num_seqs", True, 1),
        ("kv_transfer_enforcement", "required", "required"),
        ("kv_transfer_enforcement", "", None),
        ("kv_transfer_preferred_weight", 1, 1.0),
        ("topology_domains", {"zone": "a"}, {"zone": "a"}),
        ("taints", {"b", "a"}, {"a", "b"}),
        ("tokenizer_backend", "fastokens", "fastokens"),
        ("context_length", None, None),
    ],
)
def test_a_setter_stores_what_the_native_one_stores(name: str, value: Any, stored: Any) -> None:
    config = ModelRuntimeConfig()
    setattr(config, name, value)
    assert getattr(config, name) == stored
    assert type(getattr(config, name)) is type(stored)


@each_case(
    ("tag", "error"),
    [
        ({"scpoe": "auto"}, ValueError),
        ({"scope": "x"}, ValueError),
        ({"schema": None}, ValueError),
        ({"reasoning_boundary": "x"}, ValueError),
        ({"exclude_special_tokens": 3}, ValueError),
        ({1: 2}, ValueError),
        ("auto", TypeError),
    ],
)
def test_a_structural_tag_is_checked(tag: Any, error: type[Exception]) -> None:
    config = ModelRuntimeConfig()
    with pytest.raises(error, match="structural_tag"):
        config.set_structural_tag(tag)
    assert config.structural_tag is None


def test_a_structural_tag_is_completed() -> None:
    config = ModelRuntimeConfig()
    config.set_structural_tag({"scope": "always"})
    assert config.structural_tag == {
        "scope": "always",
        "schema": "auto",
        "allow_tool_calls_with_structured_output": False,
        "reasoning_boundary": "auto",
        "tool_arguments_any_order": False,
    }
    config.set_structural_tag()
    assert config.structural_tag is None


def test_a_bootstrap_address_is_checked_and_read_back() -> None:
    config = ModelRuntimeConfig()
    for host, port, error in (("h", 70000, OverflowError), ("h", "1", TypeError), (3, 1, TypeError)):
        with pytest.raises(error, match="bootstrap"):
            config.set_disaggregated_endpoint(host, port)  # type: ignore[arg-type]
    config.set_disaggregated_endpoint("h", 1)
    assert (config.bootstrap_host, config.bootstrap_port) == ("h", 1)
