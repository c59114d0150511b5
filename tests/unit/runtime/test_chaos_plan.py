"""A chaos plan is read as it was written, and every mistake in one is told by fault, field and what is allowed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.chaos.fault_plan import FaultPlan
from dynamo.chaos.injection import Role, admitted, check_real, faults_of
from dynamo.chaos.plan import (
    _ITEM_KINDS,
    _LASTING,
    _ONLY_OF,
    Fault,
    FaultKind,
    InvalidPlan,
    parse_plan,
    plan_text,
    read_plan,
)
from dynamo.cli.local_processes import programs
from dynamo.cli.serve import read_options
from dynamo.cli.usage import UsageError
from dynamo.contract.args import BackendArgumentParser, add_backend_arguments, worker_config_from
from dynamo.errors import InvalidArgument
from dynamo.frontend.args import parse_args
from dynamo.runtime.base.settings import ChaosSettings
from dynamo.runtime.calls.context import Context
from support.cases import each_case

TEXTS = st.text(min_size=1, max_size=12)


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    """Faults without fields that their kind has no use for."""
    kind = draw(st.sampled_from(FaultKind))
    seconds = st.floats(0.001 if kind in _LASTING else 0, 86_400)
    return Fault(
        kind,
        draw(st.none() | st.integers(0, 2**31 - 1)),
        draw(st.integers(1 if kind in _ITEM_KINDS else 0, 10_000)),
        draw(seconds) if kind in _ONLY_OF["seconds"] else 0.0,
        draw(st.sampled_from(("up", "down", "both"))) if kind in _ONLY_OF["way"] else "both",
        draw(st.booleans()) if kind in _ONLY_OF["patient"] else True,
        draw(st.none() | TEXTS | st.integers(0, 1000)),
        draw(st.none() | TEXTS),
        tuple(sorted(draw(st.dictionaries(TEXTS, st.text(max_size=12), max_size=3)).items())),
        draw(st.integers(1, 1000)),
    )


@given(st.lists(faults(), max_size=3))
def test_a_plan_is_read_as_it_was_written(planned: list[Fault]) -> None:
    assert parse_plan(plan_text(planned)) == tuple(planned)


@given(st.text(max_size=200) | st.lists(faults(), max_size=2).map(plan_text).flatmap(
    lambda text: st.tuples(st.just(text), st.integers(0, 200), st.text(max_size=3)).map(
        lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] :]
    )
))  # fmt: skip
def test_any_text_is_a_plan_or_a_typed_error(text: str) -> None:
    try:
        found = parse_plan(text)
    except InvalidPlan:
        return
    assert all(isinstance(fault, Fault) for fault in found)


CRASH = '[[fault]]\nkind = "crash"\n'


@each_case(
    ("text", "said"),
    [
        ("[[fault", "this is not TOML: "),
        ("[fault]\nkind = 'crash'", "write [[fault]], with two brackets"),
        ("fault = 3", "write [[fault]], with two brackets"),
        ("[[faults]]", "there is no 'faults' in a plan; it is a list of [[fault]]"),
        ("[[fault]]\npoint = 3", "fault 1: kind is missing; it is one of clock-jump, crash, "),
        (
            CRASH + '[[fault]]\nkind = "crsh"',
            "fault 2: kind: there is no kind 'crsh'; it is one of clock-jump, crash, ",
        ),
        (CRASH + "after = 3", "there is no field 'after'; a fault has kind, process, request, id, metadata, point, "),
        (CRASH + "point = -1", "point must be a whole number from 0, got -1"),
        (CRASH + "point = true", "point must be a whole number from 0, got True"),
        (CRASH + "request = 1.5", "request must be a whole number from 0, got 1.5"),
        (CRASH + "times = 0", "times must be a whole number from 1, got 0"),
        (CRASH + 'seconds = "3"', "seconds must be a number from 0 to 86400 for crash, got '3'"),
        (CRASH + "seconds = inf", "seconds must be a number from 0 to 86400 for crash, got inf"),
        (CRASH + "seconds = nan", "seconds must be a number from 0 to 86400 for crash, got nan"),
        (CRASH + 'way = "up"', "way has no meaning for crash; it belongs to partition, store-cut"),
        (CRASH + "patient = false", "patient has no meaning for crash; it belongs to stall"),
        (CRASH + "process = 1.5", "process must be a name, or the number of a worker, got 1.5"),
        (CRASH + 'process = ""', "process must be a text of 1 to 1024 characters"),
        (CRASH + "id = 3", "id must be a text of 1 to 1024 characters, got 3"),
        (CRASH + "metadata = { a = 1 }", 'metadata must be a table of texts, like { tag = "x" }'),
        ('[[fault]]\nkind = "cut"\npoint = 0', "point must be a whole number from 1, got 0"),
        ('[[fault]]\nkind = "freeze"', "seconds must be a number above 0 to 86400 for freeze, got none"),
        ('[[fault]]\nkind = "lease"\nseconds = 3', "seconds has no meaning for lease; it belongs to "),
        ('[[fault]]\nkind = "partition"\nseconds = 3\nway = "left"', "way must be one of up, down, both, got 'left'"),
        ('[[fault]]\nkind = "stall"\npatient = 0', "patient must be true or false, got 0"),
        (CRASH * 1001, "1001 faults; at most 1000 are allowed"),
    ],
)
def test_a_mistake_is_told_by_fault_field_and_what_is_allowed(text: str, said: str) -> None:
    with pytest.raises(InvalidPlan) as caught:
        parse_plan(text)
    assert said in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidPlan, match=r"chaos plan .*none\.toml: No such file or directory"):
        read_plan(tmp_path / "none.toml")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidPlan, match="this is not UTF-8 text"):
        read_plan(tmp_path / "bytes")


def test_a_plan_needs_permission(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(CRASH)
    assert admitted(None, False) is None
    assert admitted(str(path), True) == (Fault(FaultKind.CRASH),)
    with pytest.raises(InvalidArgument, match=r"add --allow-chaos \(DYN_ALLOW_CHAOS=1\) as well"):
        admitted(str(path), False)


@each_case(
    "kind",
    [
        FaultKind.STORE_CUT,
        FaultKind.STORE_STOP,
        FaultKind.STORE_WIPE,
        FaultKind.CLOCK_JUMP,
        FaultKind.SLOW_CLIENT,
        FaultKind.VANISH,
    ],
)
def test_what_a_process_cannot_have_is_refused_by_name(kind: FaultKind) -> None:
    with pytest.raises(InvalidPlan, match=rf"fault 2: {kind} is for the simulation only: \w+"):
        check_real([Fault(FaultKind.CRASH), Fault(kind)], "plan.toml")


def test_each_process_takes_its_own_faults() -> None:
    anyone, first, other = (
        Fault(FaultKind.CRASH),
        Fault(FaultKind.CRASH, process=1),
        Fault(FaultKind.CRASH, process="worker-2"),
    )
    frontend, frozen = Fault(FaultKind.FRONTEND_CRASH), Fault(FaultKind.FREEZE, process="frontend", seconds=1.0)
    planned = (anyone, first, other, frontend, frozen)
    assert faults_of(Role.WORKER, "worker-1", planned) == (anyone, first)
    assert faults_of(Role.WORKER, "worker-2", planned) == (anyone, other)
    assert faults_of(Role.WORKER, "worker-11", planned) == (anyone,)
    assert faults_of(Role.FRONTEND, "frontend", planned) == (frontend, frozen)


def test_a_fault_fires_for_the_requests_it_names_and_as_often_as_it_says() -> None:
    second = Fault(FaultKind.CRASH, request=1)
    named = Fault(FaultKind.DROP, request_id="me", point=2)
    tagged = Fault(FaultKind.DRAIN, metadata=(("tag", "x"),), times=2)
    plan = FaultPlan([second, named, tagged], name="worker")
    first = plan.begin(Context("me"))
    assert plan.due(first, 0, set(FaultKind)) == []
    assert plan.due(first, 2, {FaultKind.CRASH}) == []
    assert plan.due(first, 2, set(FaultKind)) == [named]
    assert plan.due(first, 2, set(FaultKind)) == []
    assert plan.due(plan.begin(Context("you")), 0, set(FaultKind)) == [second]
    for expected in ([tagged], [tagged], []):
        assert plan.due(plan.begin(Context("3", {"tag": "x", "more": "y"})), 0, set(FaultKind)) == expected
        assert plan.due(plan.begin(Context("4", {"tag": "y"})), 0, set(FaultKind)) == []
    assert plan.pending == []


# -- the command lines --------------------------------------------------------------------------------------------------

REFUSALS = [
    (CRASH, (), "add --allow-chaos (DYN_ALLOW_CHAOS=1) as well"),
    ('[[fault]]\nkind = "vanish"', ("--allow-chaos",), "vanish is for the simulation only: the client is not one"),
    ('[[fault]]\nkind = "crsh"', ("--allow-chaos",), "fault 1: kind: there is no kind 'crsh'; it is one of "),
]


def worker_line(*flags: str, env: dict[str, str] | None = None) -> ChaosSettings:
    """What a worker's command line says of faults."""
    parser, environ = BackendArgumentParser("backend"), dict(env or {})
    add_backend_arguments(parser, env=environ)
    settings = worker_config_from(parser.parse_args(flags), environ=environ).runtime_settings
    assert settings is not None
    return settings.chaos


def frontend_line(*flags: str) -> None:
    parse_args(flags, {})


@pytest.mark.parametrize(("text", "flags", "said"), REFUSALS)
@pytest.mark.parametrize("role", ["worker", "frontend", "serve"])
def test_a_plan_that_may_not_be_is_one_line_of_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], role: str, text: str, flags: tuple[str, ...], said: str
) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(text)
    if role == "serve":
        with pytest.raises(UsageError, match=re.escape(said)):
            read_options(["--chaos", str(plan), *flags], {})
        return
    read = worker_line if role == "worker" else frontend_line
    with pytest.raises(SystemExit) as left:
        read("--chaos", str(plan), *flags)
    assert left.value.code == 2
    told = capsys.readouterr().err
    assert said in told
    assert len(told.splitlines()) == 1


def test_the_runtime_hears_of_a_plan_that_is_allowed(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(CRASH)
    told, allowed = {"DYN_CHAOS": str(plan), "DYN_ALLOW_CHAOS": "1"}, ChaosSettings(str(plan), True)
    assert worker_line("--chaos", str(plan), "--allow-chaos") == allowed
    assert worker_line(env=told) == allowed
    named = worker_line("--chaos", str(plan), "--chaos-name", "me", env={"DYN_ALLOW_CHAOS": "on"})
    assert named == ChaosSettings(str(plan), True, "me")
    assert worker_line("--allow-chaos").plan is None
    assert parse_args([], told).runtime.chaos == allowed


def test_dynamo_serve_gives_the_plan_to_the_first_process_of_each_place(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(CRASH)
    for argv, env in (
        (["--chaos", str(plan), "--allow-chaos"], {}),
        ([], {"DYN_CHAOS": str(plan), "DYN_ALLOW_CHAOS": "1"}),
    ):
        options = read_options([*argv, "--workers", "2"], env)
        started = programs(options, [3], tmp_path, env)
        assert [program.first_env["DYN_CHAOS_NAME"] for program in started] == ["frontend", "worker-1", "worker-2"]
        assert {program.first_env["DYN_CHAOS"] for program in started} == {str(plan)}
        assert not any("DYN_CHAOS" in program.env for program in started)
    with pytest.raises(UsageError, match="--chaos has no meaning with --in-process"):
        read_options(["--chaos", str(plan), "--allow-chaos", "--in-process"], {})
    with pytest.raises(UsageError, match="write it before the --"):
        read_options(["--", "--chaos", str(plan)], {})
