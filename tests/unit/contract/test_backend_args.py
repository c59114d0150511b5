import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest

from dynamo.contract.args import BackendArgumentParser, add_backend_arguments, worker_config_from
from dynamo.contract.config import WorkerConfig
from dynamo.contract.modes import DisaggregationMode
from dynamo.runtime.base.settings import NatsSettings, RequestPlaneSettings
from support.cases import each_case


def parse(argv: list[str], env: dict[str, str] | None = None, **defaults: str) -> argparse.Namespace:
    parser = BackendArgumentParser("my-backend")
    add_backend_arguments(parser, env=env or {}, **defaults)
    return parser.parse_args(argv)


def config(argv: list[str], env: dict[str, str] | None = None, **options: Any) -> WorkerConfig:
    return worker_config_from(parse(argv, env), environ={}, **options)


# flag, a value, its variable, the field of WorkerConfig (None: only stored), the value there
VALUES = [
    ("--namespace", "prod", "DYN_NAMESPACE", "namespace", "prod"),
    ("--component", "llm", "DYN_COMPONENT", "component", "llm"),
    ("--endpoint", "gen", "DYN_ENDPOINT", "endpoint", "gen"),
    ("--endpoint-types", "chat", "DYN_ENDPOINT_TYPES", "endpoint_types", "chat"),
    ("--discovery-backend", "mem", "DYN_DISCOVERY_BACKEND", "discovery_backend", "mem"),
    ("--request-plane", "nats", "DYN_REQUEST_PLANE", "request_plane", "nats"),
    ("--response-plane", "quic", "DYN_RESPONSE_PLANE", "response_plane", "quic"),
    ("--event-plane", "nats", "DYN_EVENT_PLANE", "event_plane", "nats"),
    ("--disaggregation-mode", "decode", "DYN_DISAGGREGATION_MODE", "disaggregation_mode", DisaggregationMode.DECODE),
    ("--kv-state-endpoint", "a.b.c", "DYN_KV_STATE_ENDPOINT", "kv_state_endpoint", "a.b.c"),
    ("--dyn-tool-call-parser", "hermes", "DYN_TOOL_CALL_PARSER", "tool_call_parser", "hermes"),
    ("--dyn-reasoning-parser", "qwen3", "DYN_REASONING_PARSER", "reasoning_parser", "qwen3"),
    ("--dyn-default-thinking-mode", "disabled", "DYN_DEFAULT_THINKING_MODE", "default_thinking_mode", "disabled"),
    ("--dyn-structural-tag-scope", "always", "DYN_STRUCTURAL_TAG_SCOPE", "structural_tag_scope", "always"),
    ("--dyn-structural-tag-schema", "strict", "DYN_STRUCTURAL_TAG_SCHEMA", "structural_tag_schema", "strict"),
    ("--dyn-structural-tag", '{"scope": "auto"}', "DYN_STRUCTURAL_TAG", "structural_tag", {"scope": "auto"}),
    ("--dyn-structural-tag", "on", "DYN_STRUCTURAL_TAG", "structural_tag", {}),
    ("--engine-request-limit", "8", "DYN_ENGINE_REQUEST_LIMIT", None, 8),
    ("--connector", "nixl, lmcache", "DYN_CONNECTOR", None, ["nixl", "lmcache"]),
    ("--output-modalities", "image", "DYN_OUTPUT_MODALITIES", None, ["image"]),
    ("--media-output-fs-url", "file:///m", "DYN_MEDIA_OUTPUT_FS_URL", None, "file:///m"),
    ("--media-output-http-url", "http://m", "DYN_MEDIA_OUTPUT_HTTP_URL", None, "http://m"),
    (
        "--multimodal-embedding-cache-capacity-gb",
        "1.5",
        "DYN_MULTIMODAL_EMBEDDING_CACHE_CAPACITY_GB",
        None,
        1.5,
    ),
    ("--tcp-tls-cert-path", "/c", "DYN_TCP_TLS_CERT_PATH", None, "/c"),
    ("--nats-tls-ca-cert-path", "/c", "NATS_TLS_CA_CERT_PATH", None, "/c"),
]

# flag, its negative, its variable, the field (None: only stored), the default
SWITCHES = [
    ("--route-to-encoder", "--no-route-to-encoder", "DYN_ROUTE_TO_ENCODER", "route_to_encoder", False),
    ("--enable-kv-routing", "--disable-kv-routing", "DYN_ENABLE_KV_ROUTING", "enable_kv_routing", True),
    ("--enable-local-indexer", "--no-enable-local-indexer", "DYN_LOCAL_INDEXER", "enable_local_indexer", True),
    (
        "--exclude-tools-when-tool-choice-none",
        "--no-exclude-tools-when-tool-choice-none",
        "DYN_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE",
        "exclude_tools_when_tool_choice_none",
        True,
    ),
    (
        "--dyn-enable-structural-tag",
        "--no-dyn-enable-structural-tag",
        "DYN_ENABLE_STRUCTURAL_TAG",
        "structural_tag_mode",
        False,
    ),
    ("--enable-rl", "--no-enable-rl", "DYN_ENABLE_RL", "enable_rl", False),
    ("--allow-download", "--no-allow-download", "DYN_ALLOW_DOWNLOAD", "allow_download", False),
    ("--fpm-trace", "--no-fpm-trace", "DYN_FPM_TRACE", None, False),
    ("--tcp-tls-insecure", "--no-tcp-tls-insecure", "DYN_TCP_TLS_INSECURE", None, False),
]


def dest(flag: str) -> str:
    return {"--dyn-structural-tag": "structural_tag"}.get(flag, flag.removeprefix("--").replace("-", "_"))


def read(argv: list[str], env: dict[str, str], flag: str, field: str | None) -> object:
    return getattr(config(argv, env), field) if field else getattr(parse(argv, env), dest(flag))


@each_case(("flag", "value", "variable", "field", "expected"), VALUES)
def test_a_flag_or_its_variable_sets_its_field(
    flag: str, value: str, variable: str, field: str | None, expected: Any
) -> None:
    assert read([flag, value], {}, flag, field) == expected
    assert read([], {variable: value}, flag, field) == expected
    assert read([], {variable: "  "}, flag, field) == read([], {}, flag, field)  # blank is unset


@each_case(("flag", "negative", "variable", "field", "default"), SWITCHES)
def test_a_switch_has_two_flags_and_a_variable(
    flag: str, negative: str, variable: str, field: str | None, default: bool
) -> None:
    def state(argv: list[str], env: dict[str, str]) -> object:
        found = read(argv, env, flag, field)
        return {"on": True, "off": False}.get(found, found) if isinstance(found, str) else found

    assert state([], {}) is default
    assert state([flag], {variable: "0"}) is True
    assert state([negative], {variable: "1"}) is False
    assert state([], {variable: "Yes"}) is True
    assert state([], {variable: "off"}) is False


def test_the_command_line_beats_the_environment_beats_the_default() -> None:
    assert config([]).namespace == "dynamo"
    assert config([], {"DYN_NAMESPACE": "env"}).namespace == "env"
    assert config(["--namespace", "cli"], {"DYN_NAMESPACE": "env"}).namespace == "cli"


def test_the_defaults_are_those_of_worker_config_but_need_no_service() -> None:
    assert config([]) == WorkerConfig("dynamo", discovery_backend="auto")


def test_a_backend_brings_its_own_defaults() -> None:
    found = worker_config_from(
        parse([], component="sample", endpoint="serve", endpoint_types="images"),
        model_name="path",
        served_model_name="name",
        enable_kv_routing=False,
        environ={},
    )
    assert (found.component, found.endpoint, found.endpoint_types) == ("sample", "serve", "images")
    assert (found.model_name, found.served_model_name, found.enable_kv_routing) == ("path", "name", False)


def test_the_choice_of_a_store_is_left_to_the_runtime_unless_it_is_made() -> None:
    assert config([], {"ETCD_ENDPOINTS": "http://etcd:2379"}).discovery_backend == "auto"
    assert config([], {"DYN_DISCOVERY_BACKEND": "mem"}).discovery_backend == "mem"
    assert config(["--discovery-backend", "file"], {"ETCD_ENDPOINTS": "x"}).discovery_backend == "file"


@pytest.mark.parametrize("argv", [[], ["--namespace", "dynamo"]])
def test_the_suffix_is_appended_to_the_namespace_wherever_it_came_from(argv: list[str]) -> None:
    assert config(argv, {"DYN_NAMESPACE_WORKER_SUFFIX": "blue"}).namespace == "dynamo-blue"


def test_an_endpoint_path_sets_all_three_names() -> None:
    found = config(["--endpoint", "dyn://a.b.c", "--namespace", "x"])
    assert (found.namespace, found.component, found.endpoint) == ("a", "b", "c")


def test_the_old_spelling_of_endpoint_types_is_accepted() -> None:
    assert config(["--dyn-endpoint-types", "completions"]).endpoint_types == "completions"


def test_a_template_must_exist(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    assert config(["--custom-jinja-template", str(template)]).custom_jinja_template == str(template)


def test_a_canary_is_read_by_its_own_rules() -> None:
    assert config(["--health-check-payload", '{"a": 1}']).health_check_payload == {"a": 1, "_HEALTH_CHECK": True}


BAD = [
    (["--namespace", ""], "--namespace"),
    (["--namespace", "a.b"], "'a.b' is not a name"),
    (["--component", "a/b"], "--component"),
    (["--endpoint", "dyn://a.b"], "dyn://NAMESPACE.COMPONENT.ENDPOINT"),
    (["--endpoint-types", "chat,chta"], "unknown endpoint type 'chta'"),
    (["--discovery-backend", "zookeeper"], "auto, file, mem, etcd, kubernetes"),
    (["--request-plane", "x"], "tcp, nats"),
    (["--response-plane", "x"], "tcp, quic"),
    (["--event-plane", "x"], "zmq, nats"),
    (["--disaggregation-mode", "x"], "agg, prefill, decode, encode"),
    (["--dyn-default-thinking-mode", "x"], "enabled, disabled"),
    (["--dyn-structural-tag", "[1]"], "JSON object"),
    (["--engine-request-limit", "0"], "0 is below 1"),
    (["--engine-request-limit", "many"], "of at least 1"),
    (["--multimodal-embedding-cache-capacity-gb", "-1"], "-1.0 is below 0"),
    (["--custom-jinja-template", "no/such/file"], "no such file"),
    (["--no-such-flag"], "--no-such-flag"),
    (["--name", "x"], "--name"),  # no abbreviations
]


@each_case(("argv", "said"), BAD)
def test_an_error_of_use_is_one_line_and_exit_2(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(argv)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("my-backend: error: ")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("variable", "value"),
    [("DYN_REQUEST_PLANE", "pigeon"), ("DYN_ROUTE_TO_ENCODER", "maybe"), ("DYN_ENGINE_REQUEST_LIMIT", "-1")],
)
def test_a_bad_variable_is_named_and_only_matters_without_the_flag(
    variable: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse([], {variable: value})
    assert stop.value.code == 2
    assert variable in capsys.readouterr().err
    flag = {
        "DYN_REQUEST_PLANE": ["--request-plane", "tcp"],
        "DYN_ROUTE_TO_ENCODER": ["--no-route-to-encoder"],
        "DYN_ENGINE_REQUEST_LIMIT": ["--engine-request-limit", "1"],
    }[variable]
    parse(flag, {variable: value})


def test_a_plain_argparse_parser_takes_the_flags_too() -> None:
    parser = argparse.ArgumentParser()
    add_backend_arguments(parser, env={})
    assert worker_config_from(parser.parse_args(["--component", "c"]), environ={}).component == "c"


def test_every_flag_says_what_it_is_for_and_where_its_variable_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(["--help"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    for row in VALUES + SWITCHES:
        assert row[0] in said
    for row in VALUES:
        assert row[2] in said


def test_what_the_flags_say_of_the_runtime_reaches_its_settings_and_not_the_environment() -> None:
    before, environ = dict(os.environ), {"DYN_TCP_MAX_STREAMS": "7"}
    found = worker_config_from(
        parse(["--engine-request-limit", "3", "--tcp-tls-insecure", "--nats-tls-client-key-path", "/k"]),
        environ=environ,
    ).runtime_settings
    assert found is not None
    assert found.requests == RequestPlaneSettings(engine_request_limit=3, tls_insecure=True, max_streams=7)
    assert found.nats == NatsSettings(tls_client_key_path="/k")
    assert (dict(os.environ), environ) == (before, {"DYN_TCP_MAX_STREAMS": "7"})


def test_a_mistyped_flag_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--namespaces", "x"])
    assert "unrecognized arguments: --namespaces x; did you mean --namespace?" in capsys.readouterr().err


def test_the_resolved_configuration_can_be_written_to_a_file(tmp_path: Path) -> None:
    target = tmp_path / "config.json"
    config(["--dump-config-to", str(target), "--namespace", "prod"])
    written = json.loads(target.read_text())
    assert written["worker"]["namespace"] == "prod"
    assert written["worker"]["disaggregation_mode"] == "agg"
    assert written["arguments"]["dump_config_to"] == str(target)


def test_a_file_that_cannot_be_written_is_an_error_of_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        config(["--dump-config-to", str(tmp_path / "missing" / "config.json")])
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
