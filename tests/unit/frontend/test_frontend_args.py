from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dynamo.frontend.args import INERT, REFUSED, parse_args
from dynamo.frontend.pipeline.settings import ApiLimits
from dynamo.frontend.settings import FrontendSettings
from dynamo.settings.table import Setting
from support.cases import each_case


def refused(argv: list[str], capsys: pytest.CaptureFixture[str], env: dict[str, str] | None = None) -> str:
    with pytest.raises(SystemExit) as left:
        parse_args(argv, env or {})
    assert left.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_without_flags_the_defaults_of_the_native_frontend_hold() -> None:
    settings = parse_args([], {})
    assert (settings.http_host, settings.http_port, settings.router_mode) == ("127.0.0.1", 8000, "round-robin")
    assert (settings.overload_status, settings.graceful_shutdown_seconds) == (529, 5.0)
    assert settings.limits.body_limit_bytes == 45 * 1024 * 1024


def test_a_flag_wins_over_its_variable() -> None:
    env = {"DYN_HTTP_PORT": "8001", "DYN_NAMESPACE": "from-env"}
    settings = parse_args(["--http-port", "9001"], env)
    assert (settings.http_port, settings.namespace) == (9001, "from-env")


@each_case(
    ("env", "field", "value"),
    [
        ({"DYN_HTTP_OVERLOAD_STATUS_CODE": "503"}, "overload_status", 503),
        ({"DYN_HTTP_OVERLOAD_STATUS_CODE": "101"}, "overload_status", 529),
        ({"DYN_HTTP_OVERLOAD_STATUS_CODE": "full"}, "overload_status", 529),
        ({"DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS": "250"}, "peek_seconds", 0.25),
        ({"DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS": "0"}, "keep_alive_seconds", None),
        ({"DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS": "2000"}, "keep_alive_seconds", 2.0),
        ({"DYN_HTTP_BODY_LIMIT_MB": "1"}, "limits", ApiLimits(body_limit_bytes=1024 * 1024)),
        ({"DYN_TOKENIZER_CACHE": "0"}, "tokenizer_cache_bytes", 0),
        ({"DYN_CONTEXT_WINDOW": "4096"}, "context_window", 4096),
        ({"DYN_CONTEXT_WINDOW": "none"}, "context_window", None),
        ({"DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS": "9"}, "backend_stream_timeout_seconds", 9.0),
        ({"DYN_OPEN_GUIDED_OBJECTS": "1"}, "open_guided_objects", True),
        ({"DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS": "1"}, "ignore_unsupported_fields", True),
        ({"DYN_ALLOW_CONTROL_TOKENS_IN_TEXT": "1"}, "allow_control_tokens_in_text", True),
        ({"DYN_REASONING_FIELD_NAME": "reasoning"}, "reasoning_field_name", "reasoning"),
        ({"DYN_ENABLE_STREAMING_TOOL_DISPATCH": "1"}, "streaming_tool_dispatch", True),
        ({"DYN_ENABLE_STREAMING_REASONING_DISPATCH": "1"}, "streaming_reasoning_dispatch", True),
    ],
)
def test_variables_are_read_into_the_settings(env: dict[str, str], field: str, value: Any) -> None:
    assert getattr(FrontendSettings.from_env(env), field) == value


def test_the_reasoning_member_has_one_of_two_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_args(["--reasoning-field-name", "reasoning"], {}).reasoning_field_name == "reasoning"
    assert "reasoning_content" in refused(["--reasoning-field-name", "thoughts"], capsys)
    assert "DYN_REASONING_FIELD_NAME" in refused([], capsys, {"DYN_REASONING_FIELD_NAME": "thoughts"})
    assert parse_args(["--enable-streaming-tool-dispatch"], {}).streaming_tool_dispatch
    assert not parse_args([], {}).streaming_reasoning_dispatch


def test_route_paths_can_be_moved() -> None:
    settings = FrontendSettings.from_env({"DYN_HTTP_SVC_CHAT_PATH": "/api/chat"})
    assert settings.paths["chat"] == "/api/chat"
    assert settings.paths["health"] == "/health"


@pytest.mark.parametrize(("argv", "env"), [(["--router-mode", "kv"], {}), ([], {"DYN_ROUTER_MODE": "kv"})])
def test_the_kv_router_reads_events_unless_told_otherwise(argv: list[str], env: dict[str, str]) -> None:
    settings = parse_args(argv, env)
    assert (settings.router_mode, settings.kv_router.policy) == ("kv", "time")
    assert (settings.kv_router.reads_events, settings.kv_router.guesses) == (True, False)


def test_the_kv_router_takes_the_native_flags_in_both_spellings() -> None:
    given = parse_args(["--no-kv-events", "--track-output-blocks", "--router-temperature", "0.5"], {}).kv_router
    assert (given.use_kv_events, given.router_track_output_blocks, given.router_temperature) == (False, True, 0.5)
    assert (given.reads_events, given.guesses) == (False, True)
    assert not parse_args(["--no-router-kv-events"], {}).kv_router.use_kv_events


def test_routing_by_load_alone_is_the_kv_mode_without_caches() -> None:
    settings = parse_args(["--load-aware", "--router-mode", "random", "--router-kv-overlap-score-credit", "2"], {})
    kv = settings.kv_router
    assert (settings.router_mode, kv.overlap_score_credit, kv.use_kv_events) == ("kv", 0.0, False)
    assert (kv.guesses, kv.router_assume_kv_reuse) == (False, False)


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--router-predicted-ttl-secs", "5", "--no-kv-events"], "--router-predicted-ttl-secs adds to KV events"),
        (["--router-approximate-cache-policy", "lru"], "lru needs --no-router-kv-events"),
        (["--router-policy", "best"], "--router-policy: 'best' is unknown; use one of time, default, two-tier"),
        (["--router-temperature", "-1"], "--router-temperature: -1.0 is out of range"),
        (["--router-tracking-hash", "keyed-xxh3-v1"], "use one of public-xxh3-v1"),
    ],
)
def test_kv_settings_that_cannot_hold_are_errors_of_use(
    argv: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error in refused(argv, capsys)


def written(made: Setting) -> list[str]:
    return [made.flags[0]] if made.read.is_switch else [made.flags[0], "1"]


@each_case("made", REFUSED, ids=lambda made: made.flags[0])
def test_a_feature_that_is_not_built_is_refused_by_name(made: Setting, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"error: {made.flags[0]} is not in this version" in refused(written(made), capsys)


@each_case("made", INERT, ids=lambda made: made.flags[0])
def test_a_flag_without_an_effect_is_accepted(made: Setting) -> None:
    assert parse_args(written(made), {}) == parse_args([], {})


@each_case("made", [made for made in REFUSED if made.read.is_switch], ids=lambda made: made.flags[0])
def test_switching_off_what_does_not_exist_is_fine(made: Setting) -> None:
    parse_args([*made.negative_flags], {})


def test_the_short_name_of_a_refused_flag_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert "error: -i is not in this version" in refused(["-i"], capsys)


@each_case(
    ("argv", "part"),
    [
        (["--http-port", "http"], "'http' is neither off nor an integer"),
        (["--http-port", "70000"], "is not a port"),
        (["--router-mode", "best"], "--router-mode: 'best' is unknown; use one of round-robin"),
        (["--request-plane", "carrier-pigeon"], "--request-plane: 'carrier-pigeon' is unknown; use one of tcp, nats"),
        (["--tls-cert-path", "x.pem"], "need each other"),
        (["--tls-client-ca-cert-path", "x.pem"], "needs --tls-cert-path"),
        (["--tls-cert-path", "/nowhere/c", "--tls-key-path", "/nowhere/k"], "there is no file /nowhere/c"),
        (["--max-requests-in-flight", "0"], "0 is below 1"),
        (["--migration-limit", "-1"], "-1 is out of range: use 0 to 4294967295"),
        (["--port", "1"], "unrecognized arguments: --port 1; did you mean --http-port?"),
        (["--discovery-backend", "bogus"], "--discovery-backend: 'bogus' is unknown; use one of auto, file, mem"),
        (["--metrics-prefix", "1st-frontend"], "--metrics-prefix: '1st-frontend'"),
        (["--tls-cert-path", __file__, "--tls-key-path", __file__], "these are no certificate and its key"),
    ],
)
def test_an_error_of_use_is_one_line_and_status_2(
    argv: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert part in refused(argv, capsys)


@each_case(
    ("env", "part"),
    [
        ({"DYN_HTTP_PORT": "99999"}, "DYN_HTTP_PORT: 99999 is not a port"),
        ({"DYN_REQUEST_PLANE": "pigeon"}, "DYN_REQUEST_PLANE: 'pigeon' is unknown"),
        ({"DYN_EVENT_PLANE": "pigeon"}, "DYN_EVENT_PLANE: 'pigeon' is unknown"),
        ({"DYN_DISCOVERY_BACKEND": "bogus"}, "DYN_DISCOVERY_BACKEND: 'bogus' is unknown"),
        ({"DYN_HISTOGRAM_TTFT_COUNT": "1"}, "DYN_HISTOGRAM_TTFT_MIN, _MAX, _COUNT: need"),
        ({"DYN_HTTP_SVC_CHAT_PATH": "chat"}, "DYN_HTTP_SVC_CHAT_PATH: a path begins with /, got 'chat'"),
        ({"DYN_HTTP_SVC_METRICS_PATH": "/health"}, "DYN_HTTP_SVC_METRICS_PATH: /health is the path of health already"),
        ({"DYN_METRICS_PREFIX": "a b"}, "DYN_METRICS_PREFIX: 'a b'"),
    ],
)
def test_a_variable_that_cannot_work_is_one_line_and_status_2(
    env: dict[str, str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert part in refused([], capsys, env)


def test_a_chat_template_that_does_not_compile_is_refused_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "broken.jinja"
    template.write_text("{% for %}")
    assert "does not compile at line 1" in refused(["--chat-template", str(template)], capsys)


def test_the_settings_can_be_dumped(tmp_path: Path) -> None:
    parse_args(["--http-port", "1", "--dump-config-to", str(tmp_path / "config.json")], {})
    assert json.loads((tmp_path / "config.json").read_text())["http_port"] == 1


def test_a_dump_holds_no_secret(tmp_path: Path) -> None:
    parse_args(["--dump-config-to", str(tmp_path / "config.json")], {"NATS_AUTH_TOKEN": "t0ken", "NATS_SERVER": "n"})
    written = (tmp_path / "config.json").read_text()
    assert "t0ken" not in written
    nats = json.loads(written)["runtime"]["nats"]
    assert (nats["token"], nats["nkey"], nats["servers"]) == ("***", None, ["nats://n"])


def test_the_flags_of_the_runtime_reach_its_settings_and_nothing_else() -> None:
    before = dict(os.environ)
    argv = [
        "--tcp-tls-ca-cert-path",
        "/ca",
        "--nats-tls-insecure",
        "--discovery-backend",
        "mem",
        "--event-plane",
        "nats",
    ]
    runtime = parse_args(argv, {"DYN_SYSTEM_PORT": "9000", "DYN_TCP_TLS_CERT_PATH": "/c"}).runtime
    assert (runtime.requests.tls_ca_cert_path, runtime.requests.tls_cert_path) == ("/ca", "/c")
    assert (runtime.nats.tls_insecure, runtime.discovery_backend, runtime.event_plane) == (True, "mem", "nats")
    assert not runtime.system.enabled  # that is a worker's
    assert dict(os.environ) == before


def test_origins_are_given_one_by_one_or_with_commas() -> None:
    env = {"DYN_CORS_ORIGINS": "https://a.example, https://b.example"}
    assert parse_args([], env).cors_origins == ("https://a.example", "https://b.example")
    argv = ["--cors-origin", "https://c.example", "--cors-origin", "*"]
    assert parse_args(argv, env).cors_origins == ("https://c.example", "*")


def test_help_explains_every_flag_that_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse_args(["--help"], {})
    assert left.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--http-port", "--namespace-prefix", "--max-requests-in-flight", "DYN_HTTP_MAX_REQUESTS_IN_FLIGHT"):
        assert flag in text


def test_decisions_of_several_processes_are_not_written_to_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        parse_args(["--workers", "2", "--router-mode", "kv", "--router-decisions", str(tmp_path / "d.jsonl")])
    assert left.value.code == 2
    assert "--router-decisions is for one process" in capsys.readouterr().err
