import dataclasses
import typing
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dynamo.common.backend as backend
from dynamo.common.backend import engine as contract
from dynamo.contract.engine import (
    DiffusionEngine,
    EngineConfig,
    ForcedTokenSequenceSpec,
    GenerateChunk,
    LLMEngine,
    LlmRegistration,
    LogitsProcessorSpec,
    PythonProcessorSpec,
    RawEngine,
    chunk,
    deserialize_logits_processor_entries,
    final_chunk,
    is_generation_stage,
    logits_processors_for_request,
    serialize_logits_processor_entries,
    usage,
)
from dynamo.contract.engine_config import read_engine_config
from dynamo.contract.modes import DisaggregationMode
from dynamo.errors import InvalidArgument
from dynamo.logits_processing import BaseLogitsProcessor
from support.cases import each_case

MODES = list(DisaggregationMode)


async def _from_args(cls: Any, argv: list[str] | None = None) -> Any:
    return cls(), None


async def _start(self: object, worker_id: int) -> EngineConfig:
    return EngineConfig("m")


async def _generate(self: object, request: Any, context: object) -> AsyncIterator[Any]:
    yield final_chunk("stop")


async def _cleanup(self: object) -> None:
    return None


replaced: Any = (
    dataclasses.replace
)  # `llm` is an argument of the constructor and no field, which the checker does not see

PARTS = {"from_args": classmethod(_from_args), "start": _start, "generate": _generate, "cleanup": _cleanup}


# -- the abstract bases -----------------------------------------------------------------------------------------------


@each_case("base", [LLMEngine, RawEngine, DiffusionEngine])
@each_case("missing", sorted(PARTS))
def test_an_engine_without_one_of_the_four_cannot_be_made(base: type, missing: str) -> None:
    incomplete = type("Incomplete", (base,), {name: part for name, part in PARTS.items() if name != missing})
    with pytest.raises(TypeError, match=missing):
        incomplete()


@pytest.mark.parametrize("base", [LLMEngine, RawEngine, DiffusionEngine])
async def test_every_other_hook_has_a_default_that_adds_nothing(base: type) -> None:
    engine = type("Whole", (base,), PARTS)()
    assert await engine.abort(None) is None
    assert await engine.drain() is None
    assert await engine.is_quiescent() is None
    assert await engine.register_prometheus(None) is None
    assert await engine.on_endpoint_ready(None) is None
    assert await engine.health_check_payload() is None
    assert engine.component_metrics_dp_ranks() == []
    assert engine.attach_snapshot_publisher(None) is None


async def test_a_token_engine_offers_no_controls_updates_sources_or_processors() -> None:
    engine = type("Whole", (LLMEngine,), PARTS)()
    assert engine.supported_controls() == set()
    assert engine.supported_updates() == set()
    assert await engine.kv_event_sources() == []
    assert await engine.logits_processor_spec() is None
    assert await engine.engine_control("nap", {}) == {
        "status": "error",
        "message": "unsupported engine control: nap",
    }
    assert await engine.engine_update("grow", {}) == {"status": "error", "message": "unsupported engine update: grow"}


def test_whether_is_quiescent_is_overridden_can_be_seen_on_the_class() -> None:
    plain = type("Plain", (LLMEngine,), PARTS)()
    aware = type("Aware", (LLMEngine,), {**PARTS, "is_quiescent": _cleanup})()
    assert type(plain).is_quiescent is LLMEngine.is_quiescent
    assert type(aware).is_quiescent is not LLMEngine.is_quiescent


def test_generate_is_declared_with_the_names_it_is_called_by() -> None:
    for base in (LLMEngine, RawEngine):
        assert list(base.generate.__annotations__) == ["request", "context", "return"]


def test_the_front_door_exports_exactly_the_published_names() -> None:
    assert sorted(backend.__all__) == sorted(
        [
            "BaseEngine",
            "LLMEngine",
            "RawEngine",
            "DiffusionEngine",
            "EngineConfig",
            "LlmRegistration",
            "GenerateRequest",
            "GenerateChunk",
            "RawRequest",
            "RawResponseChunk",
            "Worker",
            "WorkerConfig",
            "telemetry",
        ]
    )
    assert [name for name in contract.__all__ if not hasattr(contract, name)] == []
    with pytest.raises(AttributeError, match="nonsense"):
        backend.nonsense  # noqa: B018


def test_only_token_ids_are_certain_in_a_request_and_token_ids_and_index_in_a_chunk() -> None:
    assert contract.GenerateRequest.__required_keys__ == {"token_ids"}
    assert GenerateChunk.__required_keys__ == {"token_ids", "index"}
    assert "_HEALTH_CHECK" in typing.get_type_hints(contract.GenerateRequest)


# -- chunks -----------------------------------------------------------------------------------------------------------


def test_chunks_and_usage_are_short_to_write() -> None:
    assert chunk([1, 2]) == {"token_ids": [1, 2], "index": 0}
    assert chunk([3], 1) == {"token_ids": [3], "index": 1}
    assert usage(3, 2) == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert usage(3, 2, cached_tokens=1)["prompt_tokens_details"] == {"cached_tokens": 1}
    assert final_chunk("cancelled") == {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
    assert final_chunk("stop", [7], index=2, usage=usage(1, 1), disaggregated_params={"handle": "x"}) == {
        "token_ids": [7],
        "index": 2,
        "finish_reason": "stop",
        "completion_usage": usage(1, 1),
        "disaggregated_params": {"handle": "x"},
    }


# -- EngineConfig -----------------------------------------------------------------------------------------------------

LLM_VALUES: dict[str, Any] = {
    "context_length": 8192,
    "kv_cache_block_size": 16,
    "total_kv_blocks": 1000,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "data_parallel_size": 2,
    "data_parallel_start_rank": 4,
    "bootstrap_host": "10.0.0.1",
    "bootstrap_port": 9000,
}


def test_the_flat_and_the_nested_form_are_the_same_configuration() -> None:
    flat = EngineConfig(model="m", **LLM_VALUES)
    nested = EngineConfig(model="m", llm=LlmRegistration(**LLM_VALUES))
    assert flat == nested
    assert flat.llm == nested.llm == LlmRegistration(**LLM_VALUES)
    assert read_engine_config(flat) == read_engine_config(nested)


@each_case("name", sorted(LLM_VALUES))
def test_an_explicit_flat_value_beats_the_nested_one_and_unset_ones_are_filled(name: str) -> None:
    other = "elsewhere" if name == "bootstrap_host" else 5
    config = EngineConfig("m", **dict[str, Any]({name: other}), llm=LlmRegistration(**LLM_VALUES))
    assert config.llm == LlmRegistration(**{**LLM_VALUES, name: other})


def test_an_explicit_zero_is_a_value() -> None:
    assert EngineConfig("m", total_kv_blocks=0, llm=LlmRegistration(total_kv_blocks=9)).total_kv_blocks == 0


@pytest.mark.parametrize(
    "config", [EngineConfig("m", **LLM_VALUES), EngineConfig("m", llm=LlmRegistration(**LLM_VALUES))]
)
def test_a_copy_of_a_configuration_differs_in_what_was_replaced(config: EngineConfig) -> None:
    changed = dataclasses.replace(config, context_length=77, runtime_data={"a": 1})
    assert (changed.context_length, changed.runtime_data) == (77, {"a": 1})
    assert changed.llm == LlmRegistration(**{**LLM_VALUES, "context_length": 77})
    assert dataclasses.replace(config, context_length=None).context_length is None
    assert dataclasses.replace(config) == config
    assert dataclasses.asdict(changed)["context_length"] == 77


def test_a_new_llm_half_takes_the_place_of_the_old_one() -> None:
    config = EngineConfig("m", "served", **LLM_VALUES)
    half = LlmRegistration(context_length=5, total_kv_blocks=0)
    assert replaced(config, llm=half) == EngineConfig("m", "served", llm=half)
    assert replaced(config, max_num_seqs=9, llm=half).llm == dataclasses.replace(half, max_num_seqs=9)


def test_a_copy_remembers_that_an_empty_llm_half_was_given() -> None:
    empty = EngineConfig("m", llm=LlmRegistration())
    assert dataclasses.replace(empty, model="n").llm == LlmRegistration()
    assert dataclasses.replace(EngineConfig("m"), model="n").llm is None
    assert replaced(EngineConfig("m"), llm=LlmRegistration()).llm == LlmRegistration()


def test_a_raw_engines_configuration_has_no_llm_half() -> None:
    assert EngineConfig("m", "served").llm is None
    assert EngineConfig("m", runtime_data={"a": 1}).llm is None
    assert EngineConfig("m", llm=LlmRegistration()).llm == LlmRegistration()
    assert read_engine_config(EngineConfig("m")).llm is None
    assert read_engine_config(EngineConfig("m", llm=LlmRegistration())).llm == LlmRegistration()


def test_the_third_position_is_told_apart_by_its_type() -> None:
    assert EngineConfig("m", "s", 4096).context_length == 4096
    native = EngineConfig("m", "s", {"key": "value"})
    assert (native.context_length, native.runtime_data) == (None, {"key": "value"})
    with pytest.raises(TypeError, match="runtime_data twice"):
        EngineConfig("m", "s", {}, runtime_data={})


def test_mutable_defaults_are_not_shared() -> None:
    one, other = EngineConfig("m"), EngineConfig("m")
    one.runtime_data["a"] = 1
    one.model_aliases.append("x")
    assert (other.runtime_data, other.model_aliases) == ({}, [])


@each_case(
    ("override", "served", "expected"),
    [(None, None, "m"), (None, "s", "s"), ("o", "s", "o"), ("", "s", "s"), ("", "", "m")],
)
def test_the_served_name_is_the_override_then_the_engines_then_the_model(
    override: str | None, served: str | None, expected: str
) -> None:
    assert EngineConfig("m", served).resolve_served_name(override) == expected


def test_any_object_with_a_model_is_a_configuration() -> None:
    duck = SimpleNamespace(model="m", context_length=128, llm=SimpleNamespace(kv_cache_block_size=32))
    config = read_engine_config(duck)
    assert (config.model, config.context_length, config.kv_cache_block_size) == ("m", 128, 32)
    assert config.max_num_seqs is None


class _Index:
    def __index__(self) -> int:
        return 77


def test_integers_of_array_libraries_count_as_integers() -> None:
    assert read_engine_config(SimpleNamespace(model="m", context_length=_Index())).context_length == 77


WRONG = {
    **{name: "x" for name in LLM_VALUES if name != "bootstrap_host"},
    "bootstrap_host": 1,
    "served_model_name": 5,
    "runtime_data": [],
    "model_aliases": "one",
    "enable_eagle": "yes",
    "max_gpu_lora_count": 1.5,
}


@each_case("name", sorted(WRONG))
@each_case("build", [lambda values: EngineConfig("m", **values), lambda v: SimpleNamespace(model="m", **v)])
def test_a_value_of_the_wrong_type_is_an_error_that_names_it(build: Callable[[dict[str, Any]], Any], name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"EngineConfig.{name} must be"):
        read_engine_config(build({name: WRONG[name]}))


@each_case(
    ("name", "value"),
    [("bootstrap_port", 65536), ("context_length", 0), ("kv_cache_block_size", -1), ("data_parallel_size", True)],
)
def test_a_number_the_card_cannot_carry_is_an_error(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=name):
        read_engine_config(EngineConfig("m", **dict[str, Any]({name: value})))


@each_case("source", [None, {}, SimpleNamespace(), SimpleNamespace(model=None)])
def test_something_without_a_model_is_refused(source: object) -> None:
    with pytest.raises(InvalidArgument, match="model"):
        read_engine_config(source)


def test_an_attribute_that_fails_is_not_an_absent_one() -> None:
    class Broken:
        model = "m"

        @property
        def context_length(self) -> int:
            raise RuntimeError("the engine is on fire")

    with pytest.raises(RuntimeError, match="on fire"):
        read_engine_config(Broken())


# -- logits processors ------------------------------------------------------------------------------------------------

FORCED = ForcedTokenSequenceSpec((1, 2, 3), 9)


@each_case("mode", MODES)
def test_only_workers_that_produce_text_generate(mode: DisaggregationMode) -> None:
    generates = mode.value in ("agg", "decode")
    assert is_generation_stage(mode) is generates
    assert logits_processors_for_request(None, disaggregation_mode=mode) == []
    spec = LogitsProcessorSpec((FORCED,))
    assert logits_processors_for_request(spec, disaggregation_mode=mode) == ([FORCED] if generates else [])
    everywhere = LogitsProcessorSpec((FORCED,), generation_only=False)
    assert logits_processors_for_request(everywhere, disaggregation_mode=mode) == [FORCED]


@given(st.lists(st.builds(ForcedTokenSequenceSpec, st.lists(st.integers(0, 2**32 - 1)).map(tuple), st.integers(0, 9))))
def test_forced_sequences_survive_the_wire(entries: list[ForcedTokenSequenceSpec]) -> None:
    assert deserialize_logits_processor_entries(serialize_logits_processor_entries(entries)) == entries


def test_the_wire_form_is_plain() -> None:
    assert serialize_logits_processor_entries([FORCED]) == [
        {"kind": "forced_sequence", "token_ids": [1, 2, 3], "eos_token_id": 9}
    ]


def test_a_processor_of_this_process_cannot_leave_it() -> None:
    with pytest.raises(TypeError, match="PythonProcessorSpec"):
        serialize_logits_processor_entries([PythonProcessorSpec(lambda: lambda ids, logits: None)])


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'magic'"):
        deserialize_logits_processor_entries([{"kind": "magic"}])


def test_anything_callable_with_ids_and_logits_is_a_processor() -> None:
    assert isinstance(lambda input_ids, logits: None, BaseLogitsProcessor)
    assert not isinstance(3, BaseLogitsProcessor)
