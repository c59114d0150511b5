"""The units of systemd: what systemd says of them, and times that leave every process its own deadline."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo.frontend.args import parse_args
from support.cases import each_case
from support.units import UNITS, command, environment, read_unit

SERVICES = sorted(path.name for path in UNITS.glob("*.service"))
ROOT = Path(__file__).parents[3]
SETTINGS = "".join((ROOT / "docs" / f"{page}.md").read_text() for page in ("settings", "discovery"))
MARGIN_SECONDS = 5


def needs_systemd() -> str:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is missing (apt-get install systemd)")
    return program


@pytest.fixture
def copies(tmp_path: Path) -> list[Path]:
    """The units with a program that is there, as systemd looks for it."""
    found = []
    for name in SERVICES:
        path = tmp_path / name.replace("@.", "@demo.")
        path.write_text(re.sub(r"/opt/dynamo/bin/\w+", sys.executable, (UNITS / name).read_text()))
        found.append(path)
    return found


def test_systemd_finds_nothing_wrong_with_a_unit(copies: list[Path]) -> None:
    argv = [needs_systemd(), "verify", "--man=no", "--recursive-errors=no", *map(str, copies)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    ours = [line for line in done.stderr.splitlines() if any(path.name in line for path in copies)]
    assert (done.returncode, ours) == (0, [])


def test_systemd_finds_something_wrong_with_a_broken_unit(copies: list[Path]) -> None:
    for path in copies:
        path.write_text(path.read_text().replace("KillMode=", "KilMode="))
    argv = [needs_systemd(), "verify", "--man=no", "--recursive-errors=no", *map(str, copies)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    found = [path for path in copies if re.search(rf"{re.escape(path.name)}.*KilMode", done.stderr)]
    assert found == copies, done.stderr


def test_systemd_counts_the_units_as_closed(copies: list[Path]) -> None:
    # In tenths: 100 is a unit without any restriction. An engine keeps its devices, so a worker's is higher than a frontend's.
    limits = {"dynamo-frontend.service": 25, "dynamo-serve.service": 45, "dynamo-worker@demo.service": 45}
    assert {path.name for path in copies} == limits.keys()
    for path in copies:
        argv = [needs_systemd(), "security", "--offline=yes", f"--threshold={limits[path.name]}", str(path)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@each_case("name", SERVICES)
def test_the_kill_comes_after_the_process_s_own_deadline(name: str) -> None:
    unit = read_unit(name, "demo")
    env = environment({"Environment": unit["Environment"]}, Path)
    own = [float(value) for key, value in env.items() if key.endswith(("PERIOD_SECS", "TIMEOUT", "TIMEOUT_SECS"))]
    assert own
    assert float(unit["TimeoutStopSec"][0]) >= sum(own) + MARGIN_SECONDS
    assert unit["KillMode"] == ["mixed"]


@each_case("name", SERVICES)
def test_every_variable_of_a_unit_is_a_setting(name: str) -> None:
    env = environment({"Environment": read_unit(name, "demo")["Environment"]}, Path)
    assert [key for key in env if key.startswith("DYN_") and f"`{key}`" not in SETTINGS] == []


@each_case("name", SERVICES)
def test_a_unit_is_not_root_and_its_user_is_made(name: str) -> None:
    (user,) = read_unit(name)["User"]
    assert re.search(rf"^u {user} ", (UNITS / "dynamo.sysusers").read_text(), re.MULTILINE)


def test_a_word_with_a_dollar_becomes_the_words_of_its_variable() -> None:
    unit = read_unit("dynamo-frontend.service")
    words = command(unit, {"FRONTEND": "--router-mode kv"})
    assert words[-2:] == ["--router-mode", "kv"]
    assert parse_args(words[words.index("dynamo.frontend") + 1 :]) is not None
    assert command(unit, {})[-1] == "dynamo.frontend"
