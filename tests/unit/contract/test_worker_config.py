import dataclasses
import logging
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.contract.config import RuntimeConfig, WorkerConfig
from dynamo.contract.modes import (
    DisaggregationMode,
    NativeDisaggregationMode,
    coerce_disaggregation_mode,
    native_disaggregation_mode,
    parse_disaggregation_mode,
)
from dynamo.errors import InvalidArgument
from dynamo.protocol.model_types import ModelInput, ModelType, WorkerType, parse_endpoint_types
from support.cases import each_case

PREFILL = DisaggregationMode.PREFILL
MINIMAL = {"namespace": "ns", "discovery_backend": "file", "request_plane": "tcp", "event_plane": None}


def runtime(**values: object) -> SimpleNamespace:
    return SimpleNamespace(**{**MINIMAL, **values})


def test_the_positions_of_the_fields_are_fixed() -> None:
    names = [entry.name for entry in dataclasses.fields(WorkerConfig) if not entry.kw_only]
    assert names == [
        "namespace",
        "component",
        "endpoint",
        "model_name",
        "served_model_name",
        "model_input",
        "endpoint_types",
        "discovery_backend",
        "request_plane",
        "event_plane",
        "use_kv_events",
        "custom_jinja_template",
        "tool_call_parser",
        "reasoning_parser",
        "exclude_tools_when_tool_choice_none",
        "enable_local_indexer",
        "enable_kv_routing",
        "metrics_labels",
        "disaggregation_mode",
        "health_check_payload",
        "structural_tag_mode",
        "structural_tag_scope",
        "structural_tag_schema",
        "route_to_encoder",
        "media_decoder",
        "media_fetcher",
        "kv_state_endpoint",
        "default_thinking_mode",
    ]
    assert {entry.name for entry in dataclasses.fields(WorkerConfig) if entry.kw_only} == {
        "structural_tag",
        "response_plane",
        "enable_rl",
        "allow_download",
        "runtime_settings",
        "loras",
        "model_aliases",
    }


def test_positional_construction_keeps_its_meaning() -> None:
    values = (
        "ns", "comp", "ep", "path", "served", ModelInput.Text, "chat", "file",
        "nats", "zmq", True, "t.jinja", "hermes", "qwen3", False, False,
    )  # fmt: skip
    config = WorkerConfig(*values)
    fields = dataclasses.fields(WorkerConfig)
    assert tuple(getattr(config, entry.name) for entry in fields[: len(values)]) == values


def test_the_defaults_are_the_documented_ones() -> None:
    config = WorkerConfig("ns")
    assert dataclasses.asdict(config) == {
        "namespace": "ns",
        "loras": (),
        "component": "backend",
        "endpoint": "generate",
        "model_name": "",
        "served_model_name": None,
        "model_input": ModelInput.Tokens,
        "endpoint_types": "chat,completions",
        "discovery_backend": "etcd",
        "request_plane": "tcp",
        "event_plane": None,
        "use_kv_events": False,
        "custom_jinja_template": None,
        "tool_call_parser": None,
        "reasoning_parser": None,
        "exclude_tools_when_tool_choice_none": True,
        "enable_local_indexer": True,
        "enable_kv_routing": True,
        "metrics_labels": [],
        "disaggregation_mode": DisaggregationMode.AGGREGATED,
        "health_check_payload": None,
        "structural_tag_mode": "off",
        "structural_tag_scope": "auto",
        "structural_tag_schema": "auto",
        "route_to_encoder": False,
        "media_decoder": None,
        "media_fetcher": None,
        "kv_state_endpoint": None,
        "default_thinking_mode": None,
        "structural_tag": None,
        "response_plane": "tcp",
        "enable_rl": False,
        "allow_download": False,
        "runtime_settings": None,
        "model_aliases": None,
    }


@pytest.mark.parametrize("name", ["structural_tag_mode", "structural_tag_scope", "structural_tag_schema"])
def test_an_unknown_structural_tag_word_is_an_error_that_names_the_field(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*'maybe'"):
        WorkerConfig("ns", **dict[str, Any]({name: "maybe"}))


@each_case("mode", list(DisaggregationMode))
def test_decode_and_encode_workers_answer_no_recovery_queries(mode: DisaggregationMode) -> None:
    assert WorkerConfig("ns", disaggregation_mode=mode).local_indexer_enabled is (mode.value in ("agg", "prefill"))
    assert not WorkerConfig("ns", disaggregation_mode=mode, enable_local_indexer=False).local_indexer_enabled


# -- from_runtime_config ----------------------------------------------------------------------------------------------


def test_the_four_required_attributes_are_enough() -> None:
    config = WorkerConfig.from_runtime_config(runtime(), "path")
    assert config == WorkerConfig("ns", model_name="path", discovery_backend="file")


@each_case("name", sorted(MINIMAL))
def test_without_a_required_attribute_there_is_no_configuration(name: str) -> None:
    source = runtime()
    delattr(source, name)
    with pytest.raises(AttributeError, match=name):
        WorkerConfig.from_runtime_config(source, "path")


@each_case(
    ("attribute", "value", "field", "expected"),
    [
        ("component", "c", "component", "c"),
        ("component", "", "component", "backend"),
        ("component", None, "component", "backend"),
        ("endpoint", "e", "endpoint", "e"),
        ("endpoint", "", "endpoint", "generate"),
        ("endpoint_types", "chat", "endpoint_types", "chat"),
        ("use_kv_events", True, "use_kv_events", True),
        ("custom_jinja_template", "t", "custom_jinja_template", "t"),
        ("dyn_tool_call_parser", "hermes", "tool_call_parser", "hermes"),
        ("dyn_reasoning_parser", "qwen3", "reasoning_parser", "qwen3"),
        ("dyn_default_thinking_mode", "enabled", "default_thinking_mode", "enabled"),
        ("exclude_tools_when_tool_choice_none", False, "exclude_tools_when_tool_choice_none", False),
        ("enable_local_indexer", False, "enable_local_indexer", False),
        ("enable_kv_routing", False, "enable_kv_routing", False),
        ("dyn_enable_structural_tag", 1, "structural_tag_mode", "on"),
        ("dyn_enable_structural_tag", 0, "structural_tag_mode", "off"),
        ("dyn_structural_tag_scope", "always", "structural_tag_scope", "always"),
        ("dyn_structural_tag_schema", "strict", "structural_tag_schema", "strict"),
        ("structural_tag", {"scope": "always"}, "structural_tag", {"scope": "always"}),
        ("route_to_encoder", True, "route_to_encoder", True),
        ("kv_state_endpoint", "ns.c.e", "kv_state_endpoint", "ns.c.e"),
        ("disaggregation_mode", PREFILL, "disaggregation_mode", PREFILL),
        ("disaggregation_mode", None, "disaggregation_mode", DisaggregationMode.AGGREGATED),
        ("serving_mode", PREFILL, "disaggregation_mode", PREFILL),
        ("response_plane", "quic", "response_plane", "quic"),
        ("enable_rl", True, "enable_rl", True),
        ("allow_download", True, "allow_download", True),
    ],
)
def test_each_attribute_finds_its_field(attribute: str, value: object, field: str, expected: object) -> None:
    config = WorkerConfig.from_runtime_config(runtime(**{attribute: value}), "path")
    assert getattr(config, field) == expected


def test_the_mode_is_asked_before_the_serving_mode() -> None:
    source = runtime(disaggregation_mode=PREFILL, serving_mode=DisaggregationMode.DECODE)
    assert WorkerConfig.from_runtime_config(source, "p").disaggregation_mode is PREFILL


def test_overrides_beat_everything_and_an_overridden_mode_is_not_even_asked() -> None:
    class Source(SimpleNamespace):
        @property
        def disaggregation_mode(self) -> None:
            raise RuntimeError("must not be asked")

    config = WorkerConfig.from_runtime_config(
        Source(**MINIMAL, component="c"),
        "path",
        "served",
        ModelInput.Text,
        component="other",
        disaggregation_mode=PREFILL,
    )
    assert (config.component, config.model_name, config.served_model_name) == ("other", "path", "served")
    assert (config.model_input, config.disaggregation_mode) == (ModelInput.Text, PREFILL)


def test_model_input_is_only_set_when_given() -> None:
    assert WorkerConfig.from_runtime_config(runtime(), "p", model_input=None).model_input is ModelInput.Tokens


def test_a_canary_from_the_command_line_is_parsed_and_marked() -> None:
    config = WorkerConfig.from_runtime_config(runtime(health_check_payload='{"token_ids": [1]}'), "p")
    assert config.health_check_payload == {"token_ids": [1], "_HEALTH_CHECK": True}


def test_a_canary_that_is_no_object_is_a_warning_and_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = WorkerConfig.from_runtime_config(runtime(health_check_payload="[1"), "p")
    assert config.health_check_payload is None
    assert "health" in caplog.text


# -- roles ------------------------------------------------------------------------------------------------------------


class Foreign(Enum):
    PREFILL = 2
    SIDEWAYS = 9


@each_case(
    ("value", "expected"),
    [
        (None, DisaggregationMode.AGGREGATED),
        (PREFILL, PREFILL),
        (Foreign.PREFILL, PREFILL),
        (NativeDisaggregationMode.Decode, DisaggregationMode.DECODE),
    ],
)
def test_roles_are_coerced_by_member_name(value: object, expected: DisaggregationMode) -> None:
    assert coerce_disaggregation_mode(value) is expected


@each_case("value", ["prefill", 2, Foreign.SIDEWAYS, object()])
def test_a_role_that_is_no_enum_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError, match="DisaggregationMode"):
        coerce_disaggregation_mode(value)
    with pytest.raises(TypeError, match="DisaggregationMode"):
        WorkerConfig.from_runtime_config(runtime(disaggregation_mode=value), "p")


@each_case(
    ("text", "mode"),
    [
        ("agg", DisaggregationMode.AGGREGATED),
        (" Aggregated ", DisaggregationMode.AGGREGATED),
        ("PREFILL", PREFILL),
        ("decode", DisaggregationMode.DECODE),
        ("encode", DisaggregationMode.ENCODE),
    ],
)
def test_slugs_are_read_in_any_case(text: str, mode: DisaggregationMode) -> None:
    assert parse_disaggregation_mode(text) is mode
    assert str(mode) == mode.value


def test_an_unknown_slug_lists_the_four() -> None:
    with pytest.raises(InvalidArgument, match="agg, prefill, decode, encode"):
        parse_disaggregation_mode("both")


@each_case(("mode", "number"), list(zip(DisaggregationMode, (1, 2, 3, 4), strict=True)))
def test_the_low_level_roles_are_numbers(mode: DisaggregationMode, number: int) -> None:
    native = native_disaggregation_mode(mode)
    assert native == number
    assert str(native) == mode.value
    assert mode.discovery_component == ("prefill" if mode is PREFILL else "backend")


# -- model enums ------------------------------------------------------------------------------------------------------


def test_model_types_have_the_native_bits_and_spelling() -> None:
    names = [
        "Chat",
        "Completions",
        "Embedding",
        "TensorBased",
        "Prefill",
        "Images",
        "Audios",
        "Videos",
        "Realtime",
        "Classify",
        "Pooling",
        "Rerank",
    ]
    assert [ModelType[name] for name in names] == [1 << bit for bit in range(len(names))]
    assert str(ModelType.Chat | ModelType.Completions) == "Chat | Completions"
    assert str(ModelType.Empty) == ""
    for bits in range(1 << len(names)):
        value = ModelType(bits)
        assert ModelType.from_card(str(value)) == value


def test_a_card_may_name_surfaces_from_the_future() -> None:
    assert ModelType.from_card("Chat | Telepathy") == ModelType.Chat


@each_case("flag", [flag for flag in ModelType if flag])
def test_each_surface_can_be_asked_for(flag: ModelType) -> None:
    asked = {
        "TensorBased": "tensor",
    }.get(str(flag.name), str(flag.name).lower())
    assert getattr(flag, f"supports_{asked}")()
    assert not getattr(ModelType.Empty, f"supports_{asked}")()


@each_case("role", list(WorkerType))
def test_roles_survive_the_card(role: WorkerType) -> None:
    assert WorkerType.from_card(str(role)) is role
    with pytest.raises(InvalidArgument, match="unknown worker type"):
        WorkerType.from_card("janitor")


@each_case(
    ("text", "expected"),
    [
        ("chat", ModelType.Chat),
        (" Chat , COMPLETIONS,", ModelType.Chat | ModelType.Completions),
        ("embedding", ModelType.Embedding),
        ("embeddings", ModelType.Embedding),
        ("tensor", ModelType.TensorBased),
        ("image,videos,audio", ModelType.Images | ModelType.Videos | ModelType.Audios),
    ],
)
def test_endpoint_types_are_a_comma_list(text: str, expected: ModelType) -> None:
    assert parse_endpoint_types(text) == expected


@each_case("text", ["prefill", "chat,chta", "", " , "])
def test_unknown_or_no_endpoint_types_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="endpoint type"):
        parse_endpoint_types(text)


# -- RuntimeConfig ----------------------------------------------------------------------------------------------------


def test_only_set_fields_reach_the_environment() -> None:
    environ = {"DYN_REQUEST_PLANE": "nats"}
    RuntimeConfig("file", response_plane="quic").export(environ)
    assert environ == {"DYN_DISCOVERY_BACKEND": "file", "DYN_REQUEST_PLANE": "nats", "DYN_RESPONSE_PLANE": "quic"}


def test_an_unknown_response_plane_is_refused() -> None:
    with pytest.raises(ValueError, match="tcp, quic"):
        RuntimeConfig(response_plane="pigeon")


@pytest.mark.parametrize(
    ("tag", "named"),
    [
        ({"scop": "auto"}, "scop"),
        ({"scope": "maybe"}, "structural_tag.scope"),
        ({"schema": 1}, "structural_tag.schema"),
    ],
)
def test_a_structural_tag_that_cannot_be_names_its_member(tag: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        WorkerConfig("ns", structural_tag=tag)
