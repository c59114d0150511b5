"""Helper modules of the native system: what they answer, as observed there, or where their like is."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dynamo._core
from dynamo._core.backend import DisaggregationMode as NativeMode
from dynamo._core.backend import RuntimeConfig, Worker, WorkerConfig
from dynamo.common import config_dump
from dynamo.common.absent import absent
from dynamo.common.configuration import ArgGroup, ConfigBase, add_argument, add_negatable_bool_argument, env_or_default
from dynamo.common.configuration.utils import (
    Deprecated,
    nullable_float,
    nullable_int,
    parse_bool,
    split_served_model_names,
)
from dynamo.common.model_taints import MODEL_TAINT_ROUTE, TOPOLOGY_TAINT_PREFIX, register_model_taint_route
from dynamo.common.token_budget import TokenBudget, publish_token_budget
from dynamo.common.utils.endpoint_types import parse_endpoint_types
from dynamo.common.utils.env import env_bool
from dynamo.common.utils.guided_json import admits_only_empty_object, reject_nonprogressing_guided_json_ref_cycles
from dynamo.common.utils.input_params import InputParamManager, resolve_thinking_token_budget
from dynamo.common.utils.media_decoder import build_frontend_image_decoder_options, enable_frontend_video_decoding
from dynamo.common.utils.namespace import get_worker_namespace
from dynamo.common.utils.prometheus import LLMBackendMetrics, get_prometheus_expfmt, register_engine_metrics_callback
from dynamo.common.utils.runtime import create_runtime, parse_endpoint, run_async
from dynamo.contract.modes import DisaggregationMode
from dynamo.engines.sample.engine import SampleLLMEngine
from dynamo.errors import HttpError, InvalidArgument
from dynamo.llm import (
    MediaDecoder,
    MediaFetcher,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    fetch_model,
    register_model,
)
from dynamo.runtime import DistributedRuntime
from dynamo.worker import run as worker_run
from support.cases import each_case

# -- names --------------------------------------------------------------------------------------------------------------


@each_case("name", sorted(absent("names")))
@each_case("module", ["dynamo._core", "dynamo.llm", "dynamo.common.multimodal", "dynamo.common.utils.prometheus"])
def test_a_name_that_is_not_here_names_its_like(module: str, name: str) -> None:
    with pytest.raises(ImportError, match=rf"{module}\.{name} is not part of dynamo-unified; \w"):
        getattr(importlib.import_module(module), name)


def test_a_name_that_nobody_has_is_an_attribute_error() -> None:
    assert not hasattr(dynamo._core, "Nothing")


@each_case("module", sorted(absent("modules")))
def test_a_module_that_is_not_here_names_its_like(module: str) -> None:
    with pytest.raises(ImportError, match=rf"^{re.escape(module)} \(\w.*\) is not part of dynamo-unified; \w[^.\n]*\w"):
        importlib.import_module(module)


def test_what_an_error_refers_to_is_there() -> None:
    texts = [table["instead"] for kind in ("names", "modules") for table in absent(kind).values()]
    named = {name for text in texts for name in re.findall(r"\bdynamo(?:\.\w+)+", text)}
    assert all(pkgutil.resolve_name(name) for name in named)
    assert len(named) > 15


def test_the_options_of_the_decoder_are_those_of_1_6_1(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = MediaDecoder()
    assert build_frontend_image_decoder_options() == {"limits": {"max_alloc": 134217728}}
    decoder.enable_image(build_frontend_image_decoder_options(max_alloc=1000))
    enable_frontend_video_decoding(decoder)
    assert decoder == {"image": {"limits": {"max_alloc": 1000}}, "video": {"max_frames": 32}}
    monkeypatch.setenv("DYN_MM_VIDEO_NUM_FRAMES", "8")
    enable_frontend_video_decoding(decoder)
    assert decoder["video"] == {"max_frames": 8}
    assert caplog.records == []
    other: Any = object()
    enable_frontend_video_decoding(other)
    assert "decoding of videos is not enabled" in caplog.text


def test_the_native_module_has_the_names_of_the_lower_level_path() -> None:
    assert dynamo._core.__version__.startswith("1.6.1")
    assert dynamo._core.ModelRuntimeConfig is ModelRuntimeConfig
    assert dynamo._core.register_model is register_model


@each_case(
    ("name", "number"),
    [("my-lora", 868637996), ("", 1979294118), ("a", 1500095571), ("sql", 789992715), ("ü", 658731773)],
)
def test_the_id_of_an_adapter_is_the_native_one(name: str, number: int) -> None:
    assert dynamo._core.lora_name_to_id(name) == number


def test_media_may_come_from_private_networks_only_when_that_is_set() -> None:
    fetcher = MediaFetcher()
    fetcher.allow_private_ips(allow=True)
    fetcher.allowed_media_domains(domains=["a"])
    assert fetcher == {"allow_private_ips": True, "allowed_media_domains": ["a"]}


async def test_a_directory_is_its_own_model(tmp_path: Path) -> None:
    assert await fetch_model(remote_name=str(tmp_path), ignore_weights=True) == str(tmp_path)


# -- the low-level worker -----------------------------------------------------------------------------------------------


def test_the_low_level_configuration_takes_its_planes_from_the_runtime() -> None:
    config = WorkerConfig("ns", model_name="m", runtime=RuntimeConfig("file", "tcp", "zmq"), enable_rl=True)
    assert (config.discovery_backend, config.request_plane, config.event_plane) == ("file", "tcp", "zmq")
    assert (config.model_name, config.enable_rl) == ("m", True)
    assert WorkerConfig("ns").discovery_backend == ""  # the environment decides


def test_the_low_level_configuration_has_the_native_positions() -> None:
    values = ("ns", "comp", "ep", "m", "served", ModelInput.Text, "chat", "t.jinja", "hermes", "qwen3")
    config = WorkerConfig(*values)
    names = ["namespace", "component", "endpoint", "model_name", "served_model_name", "model_input", "endpoint_types"]
    names += ["custom_jinja_template", "tool_call_parser", "reasoning_parser"]
    assert tuple(getattr(config, name) for name in names) == values


def test_the_low_level_configuration_takes_23_positions() -> None:
    planes = RuntimeConfig("file", "tcp", "zmq")
    values: tuple[Any, ...] = (
        "ns", "comp", "ep", "m", "served", ModelInput.Tokens, "chat", "t.jinja", "hermes", "qwen3", False, False, False,
        [("a", "b")], planes, NativeMode.Prefill, {"token_ids": [1]}, {"scope": "always"}, True, MediaDecoder(), MediaFetcher(),
        "ns.kv.state", "on",
    )  # fmt: skip
    config = WorkerConfig(*values)
    names = list(inspect.signature(WorkerConfig).parameters)[: len(values)]
    assert names[-1] == "default_thinking_mode"
    for name, value in zip(names, values, strict=True):
        if name == "runtime":
            assert (config.discovery_backend, config.event_plane) == ("file", "zmq")
        elif name == "disaggregation_mode":
            assert config.disaggregation_mode is DisaggregationMode.PREFILL
        else:
            assert getattr(config, name) == value, name


async def test_the_low_level_worker_holds_its_event_loop_and_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "0")
    config = WorkerConfig("ns", runtime=RuntimeConfig("mem", "mem"))
    with pytest.raises(TypeError, match="RawEngine"):
        Worker(SampleLLMEngine(), config, asyncio.get_running_loop(), True)
    other = asyncio.new_event_loop()
    try:
        with pytest.raises(RuntimeError, match="another event loop"):
            await Worker(engine=SampleLLMEngine(), config=config, event_loop=other, raw=False).run()
    finally:
        other.close()
    worker = Worker(SampleLLMEngine(), config, asyncio.get_running_loop())
    running = asyncio.create_task(worker.run())
    await asyncio.wait({running, serving := asyncio.create_task(worker.wait_serving())}, return_when="FIRST_COMPLETED")
    assert serving.done()
    worker.request_stop()
    await running


# -- small helpers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["dyn://a.b.c", "a.b.c"])
def test_an_endpoint_has_three_parts(text: str) -> None:
    assert parse_endpoint(text) == ("a", "b", "c")


@each_case("text", ["a.b", "dyn://a.b.c.d", "", "a/b/c"])
def test_an_endpoint_without_three_parts_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"NAMESPACE\.COMPONENT\.ENDPOINT"):
        parse_endpoint(text)


def test_endpoint_types_may_be_none_alone() -> None:
    assert parse_endpoint_types("chat, completions") == ModelType.Chat | ModelType.Completions
    assert parse_endpoint_types("none") == ModelType.Empty
    for text in ("none,chat", "", "x"):
        with pytest.raises(ValueError, match="endpoint type"):
            parse_endpoint_types(text)


def test_the_namespace_comes_from_the_argument_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYN_NAMESPACE", raising=False)
    monkeypatch.delenv("DYN_NAMESPACE_WORKER_SUFFIX", raising=False)
    assert (get_worker_namespace(), get_worker_namespace("x")) == ("dynamo", "x")
    monkeypatch.setenv("DYN_NAMESPACE", "env")
    monkeypatch.setenv("DYN_NAMESPACE_WORKER_SUFFIX", "s")
    assert (get_worker_namespace(), get_worker_namespace("x")) == ("env-s", "x-s")


@each_case(
    ("text", "by_default"),
    [
        (None, (False, True)), ("", (False, True)), (" ", (False, False)),
        *((word, (True, True)) for word in ("1", "true", "YES", " yes ")),
        *((word, (False, False)) for word in ("on", "ON", "off", "0", "t", "y", "maybe")),
    ],
)  # fmt: skip
def test_a_flag_variable(monkeypatch: pytest.MonkeyPatch, text: str | None, by_default: tuple[bool, bool]) -> None:
    if text is None:
        monkeypatch.delenv("SOME_FLAG", raising=False)
    else:
        monkeypatch.setenv("SOME_FLAG", text)
    assert tuple(env_bool("SOME_FLAG", default=default) for default in (False, True)) == by_default


async def test_run_starts_what_from_args_or_the_factory_makes_with_the_worker_of_the_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    class Recorded:
        def __init__(self, engine: Any, config: Any) -> None:
            seen.append((engine, config))

        async def run(self) -> None:
            seen.append("run")

    class Engine(SampleLLMEngine):
        @classmethod
        async def from_args(cls, argv: list[str] | None = None) -> Any:
            return "engine", argv

    async def factory(argv: list[str] | None) -> Any:
        return "made", argv

    monkeypatch.setattr(worker_run, "Worker", Recorded)
    await worker_run._start(Engine, ["--a"])
    await worker_run._start(Engine)
    await worker_run._start(Engine, ["--b"], factory)
    assert seen == [("engine", ["--a"]), "run", ("engine", None), "run", ("made", ["--b"]), "run"]


async def test_a_runtime_is_made_on_the_running_loop() -> None:
    runtime, loop = create_runtime("mem", "mem")
    assert isinstance(runtime, DistributedRuntime)
    assert loop is asyncio.get_running_loop()
    await asyncio.to_thread(runtime.shutdown)
    assert await run_async(max, 1, 2) == 2
    assert await run_async(asyncio.sleep, 0, "done") == "done"


def test_a_token_budget_is_an_entry_of_the_runtime_configuration() -> None:
    config = ModelRuntimeConfig()
    publish_token_budget(config, TokenBudget(10, True, False))
    assert config.get_engine_specific("token_budget") == {
        "combined_limit": 10,
        "reject_prompt_overflow": True,
        "reject_total_overflow": False,
    }
    with pytest.raises(ValueError, match="combined_limit must be non-negative"):
        TokenBudget(-1, True, False)


async def test_the_taints_route_refuses_what_it_cannot_take_and_changes_nothing() -> None:
    runtime, _ = create_runtime("mem", "mem")
    register_model_taint_route(runtime, runtime.endpoint("ns.backend.generate"))
    for body, said in (
        (b'{"taints": ["%s"]}' % TOPOLOGY_TAINT_PREFIX.encode(), "reserved"),
        (b"[]", "must be a JSON object"),
        (b"{}", "must be a list of strings"),
        (b"", "must be a list of strings"),
        (b'{"taints": null}', "must be a list of strings"),
        (b'{"taints": "x"}', "must be a list of strings"),
    ):
        reply = await runtime.status_server.answer("POST", f"/engine/{MODEL_TAINT_ROUTE}", body)
        assert (reply.status, json.loads(reply.body)["error"]) == (500, "Handler error"), body
        assert said in json.loads(reply.body)["message"]
    await asyncio.to_thread(runtime.shutdown)


# -- JSON schemas -------------------------------------------------------------------------------------------------------

CLOSED = {"type": "object", "additionalProperties": False}


@each_case(
    ("schema", "only_empty"),
    [
        (CLOSED, True),
        (CLOSED | {"properties": {}, "required": []}, True),
        (CLOSED | {"properties": {"a": {}}}, False),
        (CLOSED | {"patternProperties": {"x": {}}}, False),
        ({"type": "object"}, False),
        ({"additionalProperties": False}, False),
        ({"type": ["object"], "additionalProperties": False}, False),
        (json.dumps(CLOSED), False),
        (None, False),
    ],
)
def test_a_schema_of_the_empty_object(schema: Any, only_empty: bool) -> None:
    assert admits_only_empty_object(schema) is only_empty


@each_case(
    "schema",
    [
        {"$ref": "#"},
        '{"$ref": "#"}',
        {"allOf": [{"$ref": "#"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}},
        {"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"properties": {"a": {"$ref": "#/properties/b"}, "b": {"$ref": "#/properties/a"}}},
        {"items": [{"$ref": "#/items/0"}]},
        {"$ref": "#/%24defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    ],
)
def test_references_that_never_reach_a_value_are_rejected(schema: Any) -> None:
    with pytest.raises(HttpError, match=r"non-progressing local \$ref cycle") as caught:
        reject_nonprogressing_guided_json_ref_cycles(schema)
    assert caught.value.code == 400


@each_case(
    "schema",
    [
        {},
        "x",
        None,
        {"properties": {"a": {"$ref": "#"}}},
        {"items": {"$ref": "#"}},
        {"anyOf": [{"$ref": "#"}]},
        {"oneOf": [{"$ref": "#"}]},
        {"not": {"$ref": "#"}},
        {"$ref": "http://x"},
        {"$ref": "#/nope"},
        {"const": {"$ref": "#"}},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"properties": {"$ref": {"type": "string"}}},
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "$ref": "#/$defs/a"},
    ],
)
def test_references_through_a_value_or_an_alternative_pass(schema: Any) -> None:
    reject_nonprogressing_guided_json_ref_cycles(schema)


def test_a_chain_of_references_without_end_in_sight_needs_no_recursion() -> None:
    chain = {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(20_000)}
    reject_nonprogressing_guided_json_ref_cycles({"$ref": "#/$defs/0", "$defs": chain})


# -- prompts ------------------------------------------------------------------------------------------------------------


class Tokenizer:
    def apply_chat_template(self, messages: list[Any], **options: Any) -> tuple[Any, ...]:
        return (messages, options)

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]


def test_the_prompt_of_a_request() -> None:
    manager = InputParamManager(Tokenizer())
    plain = {"tokenize": False, "add_generation_prompt": True}
    assert manager.get_input_param({"token_ids": [1]}, False) == [1]
    assert manager.get_input_param({}, False) is None
    assert manager.get_input_param({"prompt": "a"}, True) == manager.get_input_param({"text": "a"}, True) == [97]
    assert manager.get_input_param({"messages": [], "chat_template_kwargs": {"x": 1}}, True) == ([], plain | {"x": 1})
    request = {"messages": [{"role": "assistant", "content": "a", "reasoning_content": "r"}]}
    assert manager.get_input_param(request, True) == ([{"role": "assistant", "content": "<think>r</think>a"}], plain)
    with pytest.raises(InvalidArgument, match="no input"):
        manager.get_input_param({"token_ids": [1]}, True)


def test_the_budget_of_reasoning_tokens() -> None:
    assert resolve_thinking_token_budget({"thinking_token_budget": 5}) == 5
    assert resolve_thinking_token_budget({"nvext": {"max_thinking_tokens": 3}}) == 3
    assert resolve_thinking_token_budget({"stop_conditions": {"max_thinking_tokens": 3}}) is None


# -- flags --------------------------------------------------------------------------------------------------------------


@each_case(
    ("text", "default", "value"),
    [
        ("5", 3, 5),
        ("true", False, True),
        ("0", True, False),
        ("bogus", False, False),
        ("1.5", 1.0, 1.5),
        ("a b", ["x"], ["a", "b"]),
        ("5", None, "5"),
        ("", "d", ""),
        (None, 3, 3),
    ],
)
def test_a_variable_has_the_type_of_its_default(
    text: str | None, default: Any, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        monkeypatch.setenv("SOME_VARIABLE", text)
    assert env_or_default("SOME_VARIABLE", default) == value


def parse(argv: list[str]) -> dict[str, Any]:
    class Mine(ArgGroup):
        def add_arguments(self, parser: argparse.ArgumentParser) -> None:
            add_argument(parser, flag_name="--my-flag", env_var="MY", default=3, help="100%", arg_type=int)
            add_argument(
                parser, flag_name="--kind", env_var="KIND", default=None, help="k", obsolete_flag="--old", choices=["a"]
            )
            add_negatable_bool_argument(parser, flag_name="--my-bool", env_var="BOOL", default=False, help="b")

    parser = argparse.ArgumentParser()
    Mine().add_arguments(parser)
    assert "100%" in parser.format_help()
    return vars(parser.parse_args(argv))


def test_a_flag_beats_its_variable_and_the_variable_beats_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse([]) == {"my_flag": 3, "kind": None, "my_bool": False}
    monkeypatch.setenv("MY", "7")
    monkeypatch.setenv("BOOL", "true")
    assert parse([]) == {"my_flag": 7, "kind": None, "my_bool": True}
    assert parse(["--my-flag", "8", "--no-my-bool", "--old", "a"]) == {"my_flag": 8, "kind": "a", "my_bool": False}


def test_a_configuration_is_read_from_the_arguments() -> None:
    class Mine(ConfigBase):
        a: int
        b: str = "x"

    config = Mine.from_cli_args(argparse.Namespace(a=1, c=2))
    assert vars(config) == {"a": 1, "b": "x", "c": 2}
    assert repr(Mine.from_cli_args(argparse.Namespace(a=1))) == "Mine(a=1, b='x')"


def test_small_readers() -> None:
    assert [parse_bool(word) for word in ("1", "ON", "yes", "0", "off", "")] == [True, True, True, False, False, False]
    with pytest.raises(argparse.ArgumentTypeError, match="true/false"):
        parse_bool("y")
    assert (nullable_int("None"), nullable_int("-1"), nullable_float(""), nullable_float("1.5")) == (
        None,
        -1,
        None,
        1.5,
    )
    assert split_served_model_names(["a,b", " c "]) == ["a", "b", "c"]
    assert split_served_model_names(None) == split_served_model_names("") == []
    old = Deprecated("--new", "2.0")
    assert old.message("--old") == "--old is deprecated and will be removed in 2.0; use --new."
    with pytest.warns(FutureWarning, match="--old is deprecated"):
        old.warn("--old")


def declared(argv: list[str], add: Callable[..., None] = add_argument, **options: Any) -> Any:
    parser = argparse.ArgumentParser()
    add(parser, flag_name="--my-flag", env_var="MY", help="what it does", **options)
    return parser.parse_args(argv).my_flag


@each_case(
    ("options", "argv", "value"),
    [
        ({"default": 0, "action": "count"}, ["--my-flag", "--my-flag"], 2),
        ({"default": 0, "action": "count", "arg_type": None}, ["--my-flag"], 1),
        ({"default": False, "action": "store_true", "arg_type": None}, ["--my-flag"], True),
        ({"default": "a", "action": "store_const", "const": "b"}, ["--my-flag"], "b"),
        ({"default": None, "action": "append", "arg_type": int}, ["--my-flag", "1"], [1]),
        ({"default": None, "nargs": "+"}, ["--my-flag", "1", "2"], ["1", "2"]),
    ],
)
def test_a_declared_flag_takes_any_action(options: dict[str, Any], argv: list[str], value: object) -> None:
    assert declared(argv, **options) == value


def test_a_flag_that_counts_begins_at_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY", "3")
    assert declared([], default=0, action="count", arg_type=None) == 3
    assert declared(["--my-flag"], default=0, action="count", arg_type=None) == 4


@each_case(
    ("add", "options", "argv", "named"),
    [
        (add_argument, {"default": None}, ["--my-flag", "1"], "--my-flag"),
        (add_argument, {"default": None}, ["--my-flag=1"], "--my-flag"),
        (add_argument, {"default": None, "obsolete_flag": "--old"}, ["--old", "1"], "--old"),
        (add_argument, {"default": 0, "action": "count"}, ["--my-flag"], "--my-flag"),
        (add_negatable_bool_argument, {"default": False}, ["--my-flag"], "--my-flag"),
        (add_negatable_bool_argument, {"default": False}, ["--no-my-flag"], "--no-my-flag"),
    ],
)
def test_the_use_of_a_deprecated_flag_is_a_warning_that_names_it(
    add: Callable[..., None], options: dict[str, Any], argv: list[str], named: str
) -> None:
    with pytest.warns(FutureWarning, match=f"^{named} is deprecated and will be removed in 2.0; use --new.$"):
        declared(argv, add, deprecated=Deprecated("--new", "2.0"), **options)


def test_a_deprecated_flag_that_is_not_used_is_quiet_and_its_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    declared([], default=None, deprecated=Deprecated("--new", "2.0"))
    monkeypatch.setenv("MY", "1")
    with pytest.warns(FutureWarning, match="^MY is deprecated"):
        assert declared([], default=None, deprecated=Deprecated("--new", "2.0")) == "1"


# -- what is written down -----------------------------------------------------------------------------------------------


class Settings:
    def __init__(self) -> None:
        self.a, self.b, self.api_key = 1, {"y", "x"}, "s"
        self.me = self


def test_a_configuration_dump_is_json_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_SOMETHING", "1")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    target = tmp_path / "deep" / "config.json"
    config_dump.dump_config(str(target), Settings())
    found = json.loads(target.read_text())
    assert (found["config"]["a"], found["config"]["b"]) == (1, ["x", "y"])
    assert found["config"]["api_key"] == "<REDACTED>"
    assert (found["environment"]["DYN_SOMETHING"], found["environment"]["HF_TOKEN"]) == ("1", "<REDACTED>")
    assert "hf_secret" not in target.read_text()
    assert {"dynamo_version", "gpu_info", "installed_packages", "runtime_info", "system_info"} <= set(found)


def test_a_registered_encoder_decides_how_its_class_is_written(caplog: pytest.LogCaptureFixture) -> None:
    class Celsius:
        degrees = 3

    @config_dump.register_encoder(Celsius)
    def encode(value: Any) -> str:
        return f"{value.degrees} C"

    assert json.loads(config_dump.get_config_dump({"t": Celsius()}, {"extra": 1}))["config"] == {"t": "3 C"}
    with caplog.at_level("ERROR"):
        config_dump.dump_config("/proc/none/such", {})
    assert "cannot write the configuration to /proc/none/such" in caplog.text
    for level, count in (("INFO", 0), ("DEBUG", 1)):
        with caplog.at_level(level, logger=config_dump.__name__):
            config_dump.dump_config(None, {})
        assert caplog.text.count("CONFIG_DUMP: {") == count


def test_the_gauges_of_a_worker_and_their_labels() -> None:
    metrics = LLMBackendMetrics(model_name="m", component_name="c")
    metrics.set_total_blocks("0", 5)
    metrics.set_gpu_cache_usage("0", 0.5)
    metrics.set_kv_cache_hit_rate("0", 0.25)
    metrics.set_model_load_time(1.5)
    text = get_prometheus_expfmt(
        metrics.registry, ["dynamo_component_total"], inject_custom_labels={"model": "x", "z": "1"}
    )
    assert (
        text.splitlines()[-1] == 'dynamo_component_total_blocks{dp_rank="0",dynamo_component="c",model="m",z="1"} 5.0'
    )

    registered: list[Any] = []

    class Endpoint:
        class metrics:
            register_prometheus_expfmt_callback = registered.append

    register_engine_metrics_callback(Endpoint(), metrics.registry, namespace_name="n", model_name="m")
    assert 'dynamo_namespace="n"' in registered[0]()
