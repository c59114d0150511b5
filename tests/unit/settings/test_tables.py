"""The tables of settings: how a value comes from a flag, a variable or the default, and what a bad one says."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from typing import Self

import pytest

from dynamo.settings.command import CommandParser
from dynamo.settings.flags import add_flags
from dynamo.settings.readers import (
    SettingReader,
    integer,
    mebibytes,
    milliseconds,
    number,
    off_at_zero,
    one_of,
    port,
    switch,
    text,
)
from dynamo.settings.table import Status, read_settings, section, setting, settings_of
from support.cases import each_case

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Inner:
    pause_seconds: float = setting(0.5, "T_PAUSE_MS", milliseconds(), "Time between two tries")


@dataclass(frozen=True, slots=True)
class Table:
    port: int = setting(
        80, "T_PORT", port, "Port to `listen` on; see [ports](ports.md#all)", flag="--port", group="net"
    )
    size_bytes: int = setting(4 * MIB, "T_SIZE_MB", mebibytes, "Size of a [body](a.md)", flag="--size", group="net")
    mode: str = setting("a", "T_MODE", one_of("a", "b"), "How", flag=("--mode", "--old-mode"), dest="how")
    on: bool = setting(True, "T_ON", switch, "Do it", flag="--on", negative="--off")
    limit: int | None = setting(None, "T_LIMIT", integer(1), "At most so many")
    idle_seconds: float | None = setting(None, "T_IDLE_SECS", off_at_zero(number(0, unit="s")), "0: never", shown="0")
    kept: str = setting("", "T_KEPT", text, "For others", flag="--kept", status=Status.KEPT)
    secret: str | None = setting(None, "T_SECRET", text, "Not shown", secret=True)
    plain: int = 7
    inner: Inner = section(Inner)

    def settle(self, env: object) -> Self:
        return replace(self, plain=self.plain + 1)


def parse(argv: list[str], env: dict[str, str] | None = None) -> Table:
    parser = CommandParser("tool")
    add_flags(parser, (made for _, made in settings_of(Table)), env or {})
    return read_settings(Table, env or {}, vars(parser.parse_args(argv)))


def refused(argv: list[str], env: dict[str, str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        parse(argv, env)
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_without_flags_and_variables_the_defaults_hold() -> None:
    assert parse([]) == read_settings(Table, {}) == replace(Table(), plain=8)


def test_a_flag_beats_its_variable_which_beats_the_default() -> None:
    assert parse([], {"T_PORT": "81"}).port == 81
    assert parse(["--port", "82"], {"T_PORT": "81"}).port == 82
    assert parse([], {"T_PORT": "  "}).port == 80  # blank is unset


def test_every_kind_of_field_is_read_in_the_unit_of_its_variable() -> None:
    env = {
        "T_SIZE_MB": "3",
        "T_MODE": "B",
        "T_ON": "off",
        "T_LIMIT": "9",
        "T_IDLE_SECS": "0",
        "T_PAUSE_MS": "250",
        "T_SECRET": " x ",
    }
    found = read_settings(Table, env)
    assert (found.size_bytes, found.mode, found.on, found.limit, found.idle_seconds) == (3 * MIB, "b", False, 9, None)
    assert (found.inner.pause_seconds, found.secret) == (0.25, "x")
    assert "x" not in repr(found).replace("T_", "")


def test_flags_have_spellings_negatives_and_names_of_their_own() -> None:
    assert parse(["--old-mode", "b", "--off"]) == replace(Table(), mode="b", on=False, plain=8)
    assert parse(["--on"], {"T_ON": "0"}).on is True


@each_case(
    ("env", "field", "value", "said"),
    [
        ({"T_LIMIT": "many"}, "limit", None, "T_LIMIT: 'many' is not an integer of at least 1; ignoring it"),
        ({"T_LIMIT": "0"}, "limit", None, "T_LIMIT: 0 is below 1; ignoring it"),
        ({"T_SIZE_MB": "0"}, "size_bytes", MIB, "T_SIZE_MB: 0 is below 1; using 1"),
        ({"T_ON": "maybe"}, "on", True, "T_ON: 'maybe' is neither true nor false; using on"),
        ({"T_MODE": "c"}, "mode", "a", "T_MODE: 'c' is unknown; use one of a, b; using a"),
        ({"T_IDLE_SECS": "nan"}, "idle_seconds", None, "T_IDLE_SECS: 'nan' is not a number of at least 0; ignoring it"),
    ],
)
def test_a_variable_that_cannot_be_read_is_a_warning_that_names_it(
    env: dict[str, str], field: str, value: object, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert getattr(read_settings(Table, env), field) == value
    assert [record.getMessage() for record in caplog.records] == [said]


@each_case(
    ("argv", "env", "said"),
    [
        (["--port", "70000"], {}, "--port: 70000 is not a port: use 0..65535"),
        ([], {"T_PORT": "http"}, "T_PORT: 'http' is not an integer from 0 to 65535"),
        (["--mode", "c"], {}, "--mode/--old-mode: 'c' is unknown; use one of a, b"),
        ([], {"T_ON": "maybe"}, "T_ON: 'maybe' is neither true nor false"),
        (["--prot", "1"], {}, "unrecognized arguments: --prot 1; did you mean --port?"),
        (["--por", "1"], {}, "unrecognized arguments: --por 1; did you mean --port?"),
    ],
)
def test_a_bad_flag_or_the_variable_behind_one_is_one_line_that_names_it(
    argv: list[str], env: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(argv, env, capsys) == f"tool: error: {said} (see tool --help)"


def test_a_bad_variable_does_not_matter_when_its_flag_is_given() -> None:
    assert parse(["--port", "1"], {"T_PORT": "http"}).port == 1


def test_the_help_names_meaning_default_unit_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "net: --port PORT Port to listen on; see ports (docs/ports.md) (default: 80) [T_PORT]" in shown
    assert "--size N Size of a body (docs/a.md) (default: 4 MiB) [T_SIZE_MB]" in shown
    assert "--on, --off Do it (default: on) [T_ON]" in shown
    assert "--kept KEPT For others (for engines that read it) [T_KEPT]" in shown
    assert "T_LIMIT" not in shown


def test_a_plain_argparse_parser_takes_the_flags_too() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, (made for _, made in settings_of(Table)), {})
    expected = {"port": 80, "size": 2 * MIB, "how": "a", "on": True, "kept": ""}
    assert vars(parser.parse_args(["--size", "2"])) == expected


def test_a_setting_shows_its_default_in_the_unit_of_its_variable() -> None:
    shown = {name: made.shown_default for name, made in settings_of(Table)}
    assert shown["size_bytes"] == "4"
    assert (shown["pause_seconds"], shown["idle_seconds"], shown["limit"]) == ("500", "0", "")


@each_case("value", ["inf", "-inf", "nan", "1e999"])
def test_no_number_is_infinite(value: str) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        number().parse(value)
    assert math.isfinite(number().parse("1e300"))


def test_a_reader_is_a_function_and_its_way_back() -> None:
    reader = SettingReader(lambda given: given.split(":"), show=":".join)
    assert reader.show(reader.parse("a:b")) == "a:b"
