"""Payloads of the canary: who wins, and what counts as a probe."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.contract.health_check import (
    HEALTH_CHECK_KEY,
    bos_token_id_or,
    build_health_check_payload,
    build_raw_health_check_payload,
    is_probe,
    parse_health_check_payload_cli,
    resolve_health_check_payload,
)
from dynamo.health_check import HealthCheckPayload, load_health_check_from_env
from support.cases import each_case


@pytest.fixture(autouse=True)
def no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYN_HEALTH_CHECK_PAYLOAD", raising=False)


@each_case(
    ("value", "probe"), [(True, True), (1, False), ("true", False), (False, False), (None, False), ([True], False)]
)
def test_only_true_itself_marks_a_probe(value: Any, probe: bool) -> None:
    assert is_probe({HEALTH_CHECK_KEY: value}) is probe


def test_a_request_without_the_marker_is_no_probe() -> None:
    assert not is_probe({})


def test_the_default_payload_is_one_greedy_token_and_extras_go_on_top() -> None:
    assert build_health_check_payload(7, extras={"x": 1, "sampling_options": {"temperature": 1.0}}) == {
        "token_ids": [7],
        "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
        "sampling_options": {"temperature": 1.0},
        "x": 1,
        "_HEALTH_CHECK": True,
    }


@pytest.mark.parametrize(("text", "expected"), [('{"a":1}', {"a": 1}), ("{}", {})])
def test_the_environment_replaces_the_whole_payload(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: dict[str, Any]
) -> None:
    monkeypatch.setenv("DYN_HEALTH_CHECK_PAYLOAD", text)
    wanted = {**expected, "_HEALTH_CHECK": True}
    assert build_health_check_payload(1) == wanted
    assert build_raw_health_check_payload({"b": 2}) == wanted


def test_the_environment_may_name_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('{"a":1}')
    monkeypatch.setenv("DYN_HEALTH_CHECK_PAYLOAD", f"@{tmp_path / 'p.json'}")
    assert load_health_check_from_env() == {"a": 1}


@each_case("value", ["{nope", "[1]", "3", "@/nonexistent/payload.json"])
def test_an_unusable_payload_is_a_warning_and_none(caplog: pytest.LogCaptureFixture, value: str) -> None:
    assert parse_health_check_payload_cli(value) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize("value", ["", None])
def test_no_flag_is_no_payload_and_no_warning(caplog: pytest.LogCaptureFixture, value: str | None) -> None:
    assert parse_health_check_payload_cli(value) is None
    assert not caplog.records


def test_the_flag_is_marked() -> None:
    assert parse_health_check_payload_cli('{"a":1}') == {"a": 1, "_HEALTH_CHECK": True}


@each_case(
    ("operator", "env", "engine", "expected"),
    [
        ({"o": 1}, '{"v":1}', {"e": 1}, {"o": 1}),
        ({}, '{"v":1}', {"e": 1}, {}),
        (None, '{"v":1}', {"e": 1}, {"v": 1}),
        (None, "{}", {"e": 1}, {}),
        (None, "", {"e": 1}, {"e": 1}),
    ],
)
def test_the_operator_beats_the_environment_beats_the_engine(
    operator: Any, env: str, engine: Any, expected: dict[str, Any]
) -> None:
    found = resolve_health_check_payload(operator, engine, env={"DYN_HEALTH_CHECK_PAYLOAD": env})
    assert found == {**expected, "_HEALTH_CHECK": True}


def test_nobodys_payload_means_no_canary() -> None:
    assert resolve_health_check_payload(None, None) is None


@pytest.mark.parametrize(("operator", "engine"), [([1], {"e": 1}), (None, "text")])
def test_a_payload_that_is_no_object_switches_the_canary_off_with_a_warning(
    caplog: pytest.LogCaptureFixture, operator: Any, engine: Any
) -> None:
    assert resolve_health_check_payload(operator, engine) is None
    assert "canary is off" in caplog.text


@each_case(
    ("tokenizer", "expected"),
    [
        (SimpleNamespace(bos_token_id=5), 5),
        (SimpleNamespace(bos_token_id=None, tokenizer=SimpleNamespace(bos_token_id=6)), 6),
        (SimpleNamespace(tokenizer=SimpleNamespace()), 9),
        (SimpleNamespace(bos_token_id=0), 0),
        (None, 9),
    ],
)
def test_the_bos_id_is_looked_for_in_both_places(tokenizer: Any, expected: int) -> None:
    assert bos_token_id_or(tokenizer, 9) == expected


def test_a_payload_class_needs_its_default_first() -> None:
    class Forgot(HealthCheckPayload):
        pass

    with pytest.raises(NotImplementedError, match="default_payload"):
        Forgot()


def test_a_payload_class_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(HealthCheckPayload):
        def __init__(self) -> None:
            self.default_payload = {"a": 1}
            super().__init__()

    mine = Mine()
    first = mine.to_dict()
    monkeypatch.setenv("DYN_HEALTH_CHECK_PAYLOAD", '{"b":1}')
    assert mine.to_dict() is first
    assert first == {"a": 1, "_HEALTH_CHECK": True}
    assert Mine().to_dict() == {"b": 1, "_HEALTH_CHECK": True}
