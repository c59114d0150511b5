"""DYN_LOG, the two formats, and what they carry."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.runtime.observe.logging import (
    LogFilter,
    LoggingSettings,
    LogHandler,
    configure_dynamo_logging,
    enter_log_span,
    format_jsonl,
    format_readable,
    log_span,
)
from support.cases import each_case
from support.properties import examples

OFF = 60
NO_FILE = Path("/nonexistent/logging.toml")


@pytest.fixture
def clean_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("DYN_LOG", "DYN_LOGGING_CONFIG_PATH", "DYN_LOGGING_CONSOLE_FORMAT", "DYN_LOGGING_JSONL", "RUST_LOG"):
        monkeypatch.delenv(name, raising=False)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@each_case(
    ("text", "target", "level"),
    [
        ("info", "anything", logging.INFO),
        ("debug", "anything", logging.DEBUG),
        ("WARNING", "anything", logging.WARNING),
        ("critical", "anything", logging.CRITICAL),
        ("off", "anything", OFF),
        ("debug,dynamo=debug", "other", logging.DEBUG),
        ("info,dynamo.runtime=debug", "dynamo.runtime.calls.health", logging.DEBUG),
        ("info,dynamo.runtime=debug", "dynamo.runtimes", logging.INFO),
        ("info,dynamo=error,dynamo.runtime=debug", "dynamo.runtime.x", logging.DEBUG),
        ("info,dynamo=error,dynamo.runtime=debug", "dynamo.frontend", logging.ERROR),
        ("info,dynamo::runtime=debug", "dynamo.runtime", logging.DEBUG),
        ("dynamo.runtime=debug", "other", OFF),
        ("dynamo.runtime", "dynamo.runtime", 5),
        ("dynamo.runtime", "other", OFF),
        ("banana", "anything", logging.INFO),
        ("banana,dynamo=debug", "anything", logging.INFO),
        ("dynamo=loud", "dynamo", logging.INFO),
        (" info , dynamo=warn ", "dynamo", logging.WARNING),
        ("", "anything", logging.INFO),
    ],
)
def test_the_longest_target_decides(text: str, target: str, level: int) -> None:
    assert LogFilter.parse(text).level_for(target) == level


@each_case(
    ("text", "lowest"),
    [("info", 20), ("info,a.b=trace", 5), ("a=error", 40), ("warn,[{x=1}]=debug", 10)],
)
def test_the_lowest_level_of_any_directive_is_known(text: str, lowest: int) -> None:
    assert LogFilter.parse(text).lowest == lowest


def test_what_cannot_be_read_is_named() -> None:
    assert LogFilter.parse("info,a=loud,b,c!d=info").rejected == ("a=loud", "b", "c!d=info")


def test_a_selector_looks_at_the_fields() -> None:
    chosen = LogFilter.parse('warn,dynamo[handle{request_id="r1",x}]=debug')
    fields = {"span_name": "handle", "request_id": "r1", "x": 2}
    assert chosen.allows("dynamo.a", logging.DEBUG, fields)
    for wrong in ({**fields, "request_id": "r2"}, {**fields, "span_name": "b"}, {"span_name": "handle"}):
        assert not chosen.allows("dynamo.a", logging.DEBUG, wrong)
    assert not chosen.allows("other", logging.DEBUG, fields)


def test_request_spans_pass_every_filter() -> None:
    assert LogFilter.parse("error").allows("request_span", logging.INFO)


# -- settings


def settings_from(**env: str) -> LoggingSettings:
    return LoggingSettings.from_env(env, is_tty=True, system_config=NO_FILE)


@each_case(
    ("env", "jsonl"),
    [
        ({}, False),
        ({"DYN_LOGGING_CONSOLE_FORMAT": "jsonl"}, True),
        ({"DYN_LOGGING_CONSOLE_FORMAT": "JSONL"}, True),
        ({"DYN_LOGGING_CONSOLE_FORMAT": "readable", "DYN_LOGGING_JSONL": "1"}, False),
        ({"DYN_LOGGING_CONSOLE_FORMAT": " ", "DYN_LOGGING_JSONL": "1"}, True),
        ({"DYN_LOGGING_CONSOLE_FORMAT": "xml"}, False),
    ],
)
def test_the_format(env: dict[str, str], jsonl: bool) -> None:
    assert settings_from(**env).jsonl is jsonl


def test_an_unknown_format_is_readable_with_a_complaint() -> None:
    assert "xml" in settings_from(DYN_LOGGING_CONSOLE_FORMAT="xml").complaints[0]


def test_colours_need_a_terminal_and_can_be_switched_off() -> None:
    assert settings_from().ansi
    assert not settings_from(DYN_SDK_DISABLE_ANSI_LOGGING="1").ansi
    assert not LoggingSettings.from_env({}, is_tty=False, system_config=NO_FILE).ansi


def test_rust_log_is_ignored() -> None:
    assert settings_from(RUST_LOG="trace").filter == LogFilter()


def test_the_file_is_below_the_variable(tmp_path: Path) -> None:
    path = tmp_path / "logging.toml"
    path.write_text('log_level = "warn"\n[log_filters]\n"a.b" = "debug"\n"c.d" = "error"\n')
    from_file = settings_from(DYN_LOGGING_CONFIG_PATH=str(path)).filter
    both = settings_from(DYN_LOGGING_CONFIG_PATH=str(path), DYN_LOG="error,c.d=info").filter
    assert [from_file.level_for(t) for t in ("x", "a.b", "c.d")] == [30, 10, 40]
    assert [both.level_for(t) for t in ("x", "a.b", "c.d")] == [40, 10, 20]


def test_the_system_file_is_below_the_named_one(tmp_path: Path) -> None:
    system, named = tmp_path / "system.toml", tmp_path / "named.toml"
    system.write_text('log_level = "error"\n[log_filters]\na = "debug"\n')
    named.write_text('log_level = "warn"\n')
    found = LoggingSettings.from_env({"DYN_LOGGING_CONFIG_PATH": str(named)}, system_config=system).filter
    assert [found.level_for(t) for t in ("x", "a")] == [30, 10]


@pytest.mark.parametrize("content", ["not toml", "log_filters = 3"])
def test_a_broken_file_is_a_complaint_not_a_crash(tmp_path: Path, content: str) -> None:
    path = tmp_path / "logging.toml"
    path.write_text(content)
    found = settings_from(DYN_LOGGING_CONFIG_PATH=str(path))
    assert found.filter == LogFilter()
    assert str(path) in found.complaints[0]


# -- formats


def record(message: str = "hello", level: int = logging.INFO, **extra: Any) -> logging.LogRecord:
    return logging.getLogger("dynamo.x").makeRecord("dynamo.x", level, "/src/x.py", 7, message, (), None, "run", extra)


def test_a_json_line_has_the_documented_keys_and_flattened_fields() -> None:
    line = json.loads(format_jsonl(record(request_id=17, tokens=3, share=0.5, ok=True, where=Path("/a"))))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line.pop("time"))
    assert line == {
        "level": "INFO",
        "file": "/src/x.py",
        "line": 7,
        "target": "dynamo.x",
        "message": "hello",
        "request_id": "17",
        "tokens": 3,
        "share": 0.5,
        "ok": True,
        "where": "/a",
    }


def test_numbers_a_collector_would_round_are_strings() -> None:
    assert json.loads(format_jsonl(record(lease=2**63)))["lease"] == str(2**63)


def test_a_json_line_is_one_line_whatever_the_message_and_traceback() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError:
        failed = record("x\ny")
        failed.exc_info = sys.exc_info()
    line = format_jsonl(failed)
    assert "\n" not in line
    assert "ValueError: a" in json.loads(line)["exception"]


def test_a_readable_line_has_time_level_target_message_and_fields() -> None:
    line = format_readable(record(request_id="r1", note="a b", empty=""))
    assert re.fullmatch(
        r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z  INFO dynamo\.x: hello request_id=r1 note="a b" empty=""', line
    )


def test_colours_are_only_there_when_asked_for() -> None:
    assert "\x1b[32m INFO\x1b[0m" in format_readable(record(), ansi=True)
    assert "\x1b" not in format_readable(record())


def test_local_time_names_its_offset() -> None:
    assert re.match(r"\S+[+-]\d\d:\d\d ", format_readable(record(), local_time=True))


@each_case(("level", "name"), [(5, "TRACE"), (10, "DEBUG"), (20, "INFO"), (30, "WARN"), (40, "ERROR"), (50, "ERROR")])
def test_level_names(level: int, name: str) -> None:
    assert json.loads(format_jsonl(record(level=level)))["level"] == name


# -- what comes from outside

FORGED = "x\n2026-01-01T00:00:00.000000Z ERROR dynamo.x: forged"
BREAKS = ["\n", "\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]
STEERING = ["\x1b[2J", "\x1b]0;title\x07", "\x9b2J", "\x7f", "\x00", "\u202e", "\u2066", "\u200b", "\ud800"]


def raised(text: str) -> logging.LogRecord:
    failed = record("it failed")
    try:
        raise ValueError(text)
    except ValueError:
        failed.exc_info = sys.exc_info()
    return failed


def everywhere(text: str) -> list[logging.LogRecord]:
    """Records that carry the text at each place where it can stand."""
    named = record()
    named.name = named.funcName = text
    return [record(text), record(x_request_id=text), record(**dict[str, Any]({text: 1})), record(span_name=text), named]


@each_case("text", [*BREAKS, *STEERING], ids=ascii)
def test_what_is_not_printable_is_escaped_at_every_place_of_a_record(text: str) -> None:
    for held in everywhere(f"a{text}b"):
        for line in (format_readable(held), format_jsonl(held)):
            assert line.isprintable()
            assert line.splitlines() == [line]
        for key, value in json.loads(format_jsonl(held)).items():
            assert f"{key}{value}".isprintable()  # also after a collector has decoded it


def test_only_the_first_line_of_a_record_begins_with_a_time() -> None:
    first, *others = format_readable(raised(FORGED)).splitlines()
    assert first.endswith("dynamo.x: it failed")
    assert [line for line in others if not line.startswith("    ")] == []
    assert others[-1] == "    2026-01-01T00:00:00.000000Z ERROR dynamo.x: forged"


@each_case("text", STEERING, ids=ascii)
def test_a_traceback_keeps_its_lines_and_nothing_else_that_is_not_printable(text: str) -> None:
    line = format_jsonl(raised(f"a{text}b\nc"))
    *_, last, after = json.loads(line)["exception"].split("\n")
    assert last.startswith("ValueError: a")
    assert after == "c"
    assert last.isprintable()
    assert line.isprintable()


@examples(300)
@given(st.dictionaries(st.sampled_from("abcdef"), st.text(max_size=40) | st.integers() | st.floats() | st.none()))
def test_a_field_reads_the_same_whatever_stands_beside_it(fields: dict[str, Any]) -> None:
    alone = [format_readable(record(**{f"x_{key}": value})).split(": ", 1)[1] for key, value in fields.items()]
    together = format_readable(record(**{f"x_{key}": value for key, value in fields.items()})).split(": ", 1)[1]
    message = format_readable(record()).split(": ", 1)[1]
    assert together == message + "".join(line.removeprefix(message) for line in alone)


def test_a_value_cannot_leave_its_quotes() -> None:
    assert format_readable(record(name_='x \\" forged=1')).endswith(r'name_="x \\\" forged=1"')


@pytest.mark.parametrize("size", [10_000, 60_000, pytest.param(5_000_000, marks=pytest.mark.process)])
def test_a_record_is_bounded_whatever_it_is_given(size: int) -> None:
    for held in (*everywhere("n" * size), raised("n" * size), raised("n\n" * size)):
        assert len(format_readable(held)) < 32_000
        assert len(format_jsonl(held)) < 32_000
    many = record(**dict[str, Any]((f"f{number}", number) for number in range(size // 100)))
    assert json.loads(format_jsonl(many))["fields_cut"] == size // 100 - 48


def test_a_cut_value_says_how_much_is_missing() -> None:
    assert json.loads(format_jsonl(record(x_request_id="i" * 60_000)))["x_request_id"] == (
        "i" * 512 + "...(cut, 59488 more characters)"
    )


def test_the_end_of_a_long_traceback_is_kept() -> None:
    assert json.loads(format_jsonl(raised("n\n" * 100_000 + "the end")))["exception"].endswith("n\nthe end")


# -- spans


async def test_the_fields_of_a_request_stay_with_its_task() -> None:
    async def serve(request_id: str, both_in: asyncio.Barrier) -> dict[str, Any]:
        enter_log_span("handle_payload", {"request_id": request_id, "trace_id": None})
        await both_in.wait()
        return dict(json.loads(format_jsonl(record())))

    both_in = asyncio.Barrier(2)
    lines = await asyncio.gather(serve("r1", both_in), serve("r2", both_in))
    assert [line["request_id"] for line in lines] == ["r1", "r2"]
    assert all(line["span_name"] == "handle_payload" and "trace_id" not in line for line in lines)
    assert "request_id" not in json.loads(format_jsonl(record()))


def test_spans_nest_and_end() -> None:
    with log_span("outer", request_id="r1"), log_span("inner", step=2):
        inside = format_readable(record())
    assert " inner: dynamo.x: hello request_id=r1 step=2" in inside
    assert "request_id" not in format_readable(record())


# -- the process


@pytest.mark.usefixtures("clean_root")
def test_configuring_twice_leaves_one_handler_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DYN_LOGGING_CONSOLE_FORMAT", "jsonl")
    monkeypatch.setenv("DYN_LOG", "warn,some.engine=debug")
    configure_dynamo_logging()
    first = logging.getLogger().handlers[0]
    configure_dynamo_logging()
    assert logging.getLogger().handlers == [first]
    logging.getLogger("some.engine").debug("yes")
    logging.getLogger("some.other").info("no")
    logging.getLogger("request_span").info("always")
    out, err = capsys.readouterr()
    assert out == ""
    assert [json.loads(line)["message"] for line in err.splitlines()] == ["yes", "always"]
    assert logging.getLogger().level == logging.DEBUG


@pytest.mark.usefixtures("clean_root")
def test_an_unknown_format_is_said_on_stderr_and_read_as_readable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DYN_LOGGING_CONSOLE_FORMAT", "xml")
    configure_dynamo_logging()
    assert "WARN" in capsys.readouterr().err


@pytest.mark.usefixtures("clean_root")
def test_the_service_name_stands_before_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    configure_dynamo_logging("sample", 3)
    logging.getLogger("x").info("hello")
    assert ": [sample:3] hello" in capsys.readouterr().err


@pytest.mark.usefixtures("clean_root")
def test_span_events_are_records_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DYN_LOG", "error")
    monkeypatch.setenv("DYN_LOGGING_JSONL", "1")
    monkeypatch.setenv("DYN_LOGGING_SPAN_EVENTS", "1")
    configure_dynamo_logging()
    with log_span("load", model="m"):
        pass
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["message"], line["span_name"], line["model"]) for line in lines] == [
        ("SPAN_FIRST_ENTRY", "load", "m"),
        ("SPAN_CLOSED", "load", "m"),
    ]
    monkeypatch.delenv("DYN_LOGGING_SPAN_EVENTS")
    configure_dynamo_logging()


def test_a_target_may_name_the_function() -> None:
    stream = io.StringIO()
    handler = LogHandler(LoggingSettings(filter=LogFilter.parse("error,dynamo.x.run=debug")), stream=stream)
    handler.handle(record("mine", logging.DEBUG))
    other = record("not mine", logging.DEBUG)
    other.funcName = "stop"
    handler.handle(other)
    assert stream.getvalue().count("mine") == 1
