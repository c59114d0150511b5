"""The logging helpers of the native system: levels, and the configurations that they write for engines."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from dynamo.runtime import logging as native
from support.cases import each_case


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


def test_the_format_of_sglang_is_left_alone_where_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_SKIP_SGLANG_LOG_FORMATTING", "1")
    monkeypatch.setenv("SGLANG_LOGGING_CONFIG_PATH", "mine")
    native.configure_sglang_logging(logging.INFO)
    assert os.environ["SGLANG_LOGGING_CONFIG_PATH"] == "mine"
