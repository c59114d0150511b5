from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import InvalidArgument
from dynamo.protocol.model_types import ModelType, WorkerType
from dynamo.protocol.records import (
    FileRef,
    LoraRecord,
    ModelCard,
    ModelRecord,
    ModelRuntimeConfig,
    decode_card,
    decode_model_record,
    slugify,
)
from support.cases import each_case


def file(name: str, digit: str = "a") -> dict[str, Any]:
    return {"path": f"/models/m/{name}", "checksum": "blake3:" + digit * 64, "size": 10}


# As the native 1.6.1 worker writes it, values shortened.
NATIVE: dict[str, Any] = {
    "type": "Model",
    "namespace": "ns",
    "component": "backend",
    "endpoint": "generate",
    "instance_id": 17512140874996437413,
    "card_json": {
        "display_name": "org/M.1",
        "slug": "org_m_1",
        "source_path": "/models/m",
        "model_info": {"hf_config_json": file("config.json")},
        "tokenizer": {"hf_tokenizer_json": file("tokenizer.json", "b")},
        "prompt_formatter": {"hf_tokenizer_config_json": file("tokenizer_config.json", "c")},
        "chat_template_file": {"hf_chat_template_jinja": {"is_custom": True, "file": file("t.jinja", "d")}},
        "gen_config": {"hf_generation_config_json": file("generation_config.json", "e")},
        "architectural_max_context_length": 4096,
        "context_length": 2048,
        "kv_cache_block_size": 16,
        "migration_limit": 0,
        "model_type": "Chat | Completions",
        "model_input": "Tokens",
        "worker_type": "aggregated",
        "needs": [],
        "media_decoder": None,
        "media_fetcher": None,
        "runtime_config": {
            "context_length": 2048,
            "total_kv_blocks": 1000,
            "tool_call_parser": None,
            "tool_call_arguments_format": "json_string",
            "data_parallel_start_rank": 0,
            "data_parallel_size": 1,
            "enable_local_indexer": True,
            "taints": ["a", "b"],
            "a_member_of_the_future": {"x": 1},
        },
        "another_member_of_the_future": 7,
    },
}
MINIMAL: dict[str, Any] = {
    key: NATIVE["card_json"][key]
    for key in (
        "display_name",
        "slug",
        "source_path",
        "model_info",
        "tokenizer",
        "prompt_formatter",
        "context_length",
        "kv_cache_block_size",
        "migration_limit",
        "model_type",
        "model_input",
    )
}


def test_a_native_record_is_read_and_what_is_unknown_is_ignored() -> None:
    record = decode_model_record(json.dumps(NATIVE).encode())
    card = record.card
    assert record.instance_id == 17512140874996437413  # beyond 2**53: never a float
    assert record.key == f"ns/backend/generate/{17512140874996437413:x}"
    assert card.surfaces == ModelType.Chat | ModelType.Completions
    assert card.role is WorkerType.Aggregated
    assert card.file("hf_tokenizer_json") == FileRef("/models/m/tokenizer.json", "blake3:" + "b" * 64, 10)
    assert card.template_file() == ("hf_chat_template_jinja", FileRef("/models/m/t.jinja", "blake3:" + "d" * 64, 10))
    assert card.runtime_config.taints == {"a", "b"}
    assert card.runtime_config.tool_call_parser is None


def test_the_smallest_native_card_is_enough() -> None:
    card = decode_card(MINIMAL)
    assert (card.role, card.needs, card.runtime_config) == (WorkerType.Aggregated, [], ModelRuntimeConfig())


def test_a_prefill_worker_of_an_older_system_is_known_by_its_marker() -> None:
    card = decode_card(MINIMAL | {"model_type": "Prefill"})
    assert card.role is WorkerType.Prefill
    assert card.surfaces == ModelType.Empty


@each_case("key", [*MINIMAL, "runtime_config", "needs", "aliases", "worker_type", "lora"])
def test_null_counts_as_absent(key: str) -> None:
    if key == "display_name":
        with pytest.raises(InvalidArgument, match="display_name"):
            decode_card(MINIMAL | {key: None})
        return
    card = decode_card(MINIMAL | {key: None})
    absent = {name: value for name, value in MINIMAL.items() if name != key}
    assert card == decode_card(absent)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"context_length": "many"}, "context_length"),
        ({"runtime_config": {"data_parallel_size": "two"}}, "data_parallel_size"),
        ({"aliases": [1]}, "aliases"),
    ],
)
def test_a_member_of_the_wrong_type_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        decode_card(MINIMAL | change)


def test_a_file_reference_without_a_path_is_named() -> None:
    card = decode_card(MINIMAL | {"tokenizer": {"hf_tokenizer_json": {"checksum": "blake3:0"}}})
    with pytest.raises(InvalidArgument, match=r"tokenizer\.hf_tokenizer_json"):
        card.checksum()


@each_case("data", [b"", b"[]", b"{", b'{"type":"Endpoint"}', b'{"type":"Model","namespace":1}'])
def test_rubbish_is_a_typed_error(data: bytes) -> None:
    with pytest.raises(InvalidArgument, match="malformed"):
        decode_model_record(data)


def test_a_card_survives_the_way_there_and_back() -> None:
    card = ModelCard(
        display_name="m",
        model_type="Chat",
        worker_type="decode",
        needs=[["prefill"]],
        aliases=["n"],
        lora=LoraRecord("l", 4),
        user_data={"x": [1]},
        runtime_config=ModelRuntimeConfig(taints={"b", "a"}, runtime_data={"k": 1}),
    )
    record = ModelRecord(namespace="n", component="c", endpoint="e", instance_id=1, card_json=card.to_json())
    assert decode_model_record(record.encode()).card == card
    assert json.loads(record.encode())["type"] == "Model"


def test_what_is_not_set_is_not_published() -> None:
    published = ModelCard(display_name="m", model_type="Chat", worker_type="aggregated").to_json()
    assert published == {
        "display_name": "m",
        "slug": "m",
        "source_path": "",
        "context_length": 0,
        "kv_cache_block_size": 16,
        "migration_limit": 0,
        "model_type": "Chat",
        "model_input": "Tokens",
        "worker_type": "aggregated",
        "needs": [],
        "media_decoder": None,
        "media_fetcher": None,
        "runtime_config": {
            "tool_call_arguments_format": "json_string",
            "structural_tag_mode": "off",
            "structural_tag_scope": "auto",
            "structural_tag_schema": "auto",
            "exclude_tools_when_tool_choice_none": True,
            "data_parallel_start_rank": 0,
            "data_parallel_size": 1,
            "enable_local_indexer": True,
            "enable_eagle": False,
        },
    }


@each_case(
    "change",
    [
        {"kv_cache_block_size": 32},
        {"tokenizer": {"hf_tokenizer_json": file("tokenizer.json", "f")}},
        {"gen_config": {"hf_generation_config_json": file("generation_config.json", "f")}},
        {"needs": [["encode"]]},
        {"worker_type": "decode"},
        {"model_type": "Chat"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_workers_that_answer_differently_have_different_checksums(change: dict[str, Any]) -> None:
    assert decode_card(MINIMAL | change).checksum() != decode_card(MINIMAL).checksum()


@each_case(
    "change",
    [
        {"context_length": 1},
        {"migration_limit": 9},
        {"source_path": "/elsewhere"},
        {"tokenizer": {"hf_tokenizer_json": file("tokenizer.json", "b") | {"path": "http://x/tokenizer.json"}}},
        {"runtime_config": {"taints": ["cordoned"]}},
        {"worker_type": "aggregated"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_replicas_may_differ_in_what_does_not_change_the_answer(change: dict[str, Any]) -> None:
    assert decode_card(MINIMAL | change).checksum() == decode_card(MINIMAL).checksum()
    assert len(decode_card(MINIMAL).checksum()) == 64


def test_runtime_config_has_the_native_methods() -> None:
    config = ModelRuntimeConfig()
    config.set_engine_specific("a", "[1, 2]")
    config.set_engine_specific("b", "plain")
    config.set_disaggregated_endpoint("h", 1)
    assert (config.get_engine_specific("a"), config.get_engine_specific("b")) == ([1, 2], "plain")
    assert config.get_engine_specific("absent") is None
    assert config.to_json()["disaggregated_endpoint"] == {"bootstrap_host": "h", "bootstrap_port": 1}
    config.set_disaggregated_endpoint("h", None)
    assert "disaggregated_endpoint" not in config.to_json()


@pytest.mark.parametrize(("name", "slug"), [("/a/M.1", "a_m_1"), ("Qwen/Qwen3-0.6B", "qwen_qwen3-0_6b"), ("__x", "x")])
def test_slugs(name: str, slug: str) -> None:
    assert slugify(name) == slug


@given(st.text())
@pytest.mark.process  # computes for seconds
def test_a_slug_is_its_own_slug(name: str) -> None:
    assert slugify(slugify(name)) == slugify(name)


def test_a_card_whose_sizes_cannot_be_is_refused_by_name() -> None:
    for name, value in (
        ("data_parallel_size", 2**32 - 1),  # a router keeps an account of each rank
        ("data_parallel_size", -1),
        ("data_parallel_start_rank", -1),
        ("total_kv_blocks", -5),
    ):
        with pytest.raises(InvalidArgument, match=name):
            decode_card({"display_name": "m", "slug": "m", "runtime_config": {name: value}})
    with pytest.raises(InvalidArgument, match="kv_cache_block_size"):
        decode_card({"display_name": "m", "slug": "m", "kv_cache_block_size": -16})
