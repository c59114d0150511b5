"""The logging helpers of the native system: levels, and the configurations that they write for engines."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo.runtime import logging as native
from support.cases import each_case
from support.patience import PATIENCE_SECONDS


@each_case(
    ("level", "number"),
    [
        ("debug", 10),
        ("INFO", 20),
        ("warn", 30),
        ("warning", 30),
        ("critical", 50),
        ("trace", 20),
        ("off", 20),
        ("?", 20),
    ],
)
def test_a_level_has_a_number(level: str, number: int) -> None:
    assert native.log_level_mapping(level) == number


@each_case(
    ("filters", "number"), [("info", 20), ("warn,a=error", 30), ("error,a.b=debug", 10), ("info,a=trace", 10), ("", 20)]
)
def test_the_lowest_level_of_a_list_of_filters(
    filters: str, number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DYN_LOGGING_CONFIG_PATH", str(tmp_path / "levels.toml"))
    assert native.python_log_level_mapping(filters) == number
    (tmp_path / "levels.toml").touch()
    assert native.python_log_level_mapping(filters) == logging.DEBUG
    (tmp_path / "levels.toml").unlink()


def test_a_prefix_is_the_service_and_its_worker() -> None:
    prefix = native.construct_formatter_prefix
    assert (prefix("svc", 3), prefix("svc", None), prefix(None, 3), prefix(None, None)) == ("svc:3", "svc", ":3", "")


def test_a_flag_that_is_neither_true_nor_false_is_false(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for text, value in (("1", True), ("True", True), ("0", False), ("false", False)):
        monkeypatch.setenv("SOME_FLAG", text)
        assert native.get_bool_env_var("SOME_FLAG", "true") is value
    monkeypatch.delenv("SOME_FLAG")
    assert (native.get_bool_env_var("SOME_FLAG"), native.get_bool_env_var("SOME_FLAG", "true")) == (False, True)
    assert caplog.records == []
    monkeypatch.setenv("SOME_FLAG", "yes")
    assert native.get_bool_env_var("SOME_FLAG", "true") is False
    assert "SOME_FLAG='yes'" in caplog.text


PROGRAM = """
import json, logging, logging.config, os
from dynamo.runtime.logging import configure_logger, configure_{engine}_logging
configure_logger("svc", 7, logging.WARNING)
logging.info("not shown")
logging.warning("shown")
configure_{engine}_logging(logging.INFO)
path = os.environ["{variable}"]
logging.config.dictConfig(json.load(open(path)))
def check_health():
    logging.getLogger("{logger}").debug("healthy")
    logging.getLogger("{logger}").info("hurt")
logging.getLogger("{logger}.deep").debug("detail")
check_health()
print(path)
"""


def run(engine: str, variable: str, logger: str, **env: str) -> tuple[list[str], Path]:
    code = PROGRAM.format(engine=engine, variable=variable, logger=logger)
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )  # fmt: skip
    return done.stderr.splitlines(), Path(done.stdout.strip())


def test_an_engine_logs_like_its_worker_and_leaves_no_file() -> None:
    lines, file = run("vllm", "VLLM_LOGGING_CONFIG_PATH", "vllm")
    assert [line.partition("Z ")[2] for line in lines] == [
        " WARN <string>: [svc:7] shown",
        " INFO <string>.check_health: hurt",
    ]
    assert not file.exists()


def test_the_level_of_vllm_is_its_own_variable_and_its_health_checks_are_not_logged() -> None:
    lines, _ = run(
        "vllm", "VLLM_LOGGING_CONFIG_PATH", "vllm", VLLM_LOGGING_LEVEL="DEBUG", DYN_LOGGING_CONSOLE_FORMAT="jsonl"
    )
    records = [json.loads(line) for line in lines[1:]]
    assert [(record["level"], record["message"]) for record in records] == [("DEBUG", "detail"), ("INFO", "hurt")]
    assert records[1]["target"] == "<string>.check_health"


@pytest.mark.parametrize("logger", ["sglang", "gpu_memory_service"])
def test_sglang_and_its_memory_service_log_in_the_same_format(logger: str) -> None:
    lines, _ = run("sglang", "SGLANG_LOGGING_CONFIG_PATH", logger)
    assert lines[1].endswith(" INFO <string>.check_health: hurt")


def test_the_format_of_sglang_is_left_alone_where_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_SKIP_SGLANG_LOG_FORMATTING", "1")
    monkeypatch.setenv("SGLANG_LOGGING_CONFIG_PATH", "mine")
    native.configure_sglang_logging(logging.INFO)
    assert os.environ["SGLANG_LOGGING_CONFIG_PATH"] == "mine"
