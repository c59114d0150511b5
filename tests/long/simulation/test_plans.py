"""The faults of a seed, written as a chaos plan and read again, make the same run."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo.chaos.plan import Fault, FaultKind, parse_plan, plan_text
from dynamo.cli.main import main
from dynamo.testing.simulation import draw, run_scenario

SEEDS = range(40, 52)


def test_a_plan_of_a_seed_is_the_run_of_the_seed() -> None:
    assert any(draw(seed).faults for seed in SEEDS)
    for seed in SEEDS:
        planned = parse_plan(plan_text(draw(seed).faults))
        assert run_scenario(draw(seed, faults=planned)).digest == run_scenario(draw(seed)).digest


@pytest.mark.parametrize(("process", "fires"), [("worker 0", True), (0, True), ("worker 9", False), (9, False)])
def test_a_planned_fault_finds_its_process(process: str | int, fires: bool) -> None:
    fault = Fault(FaultKind.ENGINE_ERROR, process=process)  # of any request
    alone = next(seed for seed in range(100) if draw(seed).workers == 1)
    outcome = run_scenario(draw(alone, faults=[fault]))
    assert outcome.fired == ((fault,) if fires else ())
    assert outcome.findings == ()


def test_the_command_prints_a_plan_and_runs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed = next(seed for seed in SEEDS if draw(seed).faults)
    assert main(["simulate", "--seed", str(seed), "--print-plan"]) == 0
    plan = tmp_path / "plan.toml"
    plan.write_text(capsys.readouterr().out)
    assert f"# dynamo simulate --runs 1 --seed {seed} --plan FILE" in plan.read_text()
    digests = []
    for more in ([], ["--plan", str(plan)]):
        assert main(["simulate", "--runs", "1", "--seed", str(seed), "--trace", *more]) == 0
        digests.append(capsys.readouterr().out.splitlines()[0])
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[fault]]\nkind = "crsh"', "fault 1: kind: there is no kind 'crsh'"),
        ('[[fault]]\nkind = "crash"\nid = "x"', "fault 1: id is for real processes"),
        ('[[fault]]\nkind = "crash"\nmetadata = { a = "b" }', "fault 1: metadata is for real processes"),
        ('[[fault]]\nkind = "crash"\ntimes = 2', "fault 1: times is for real processes"),
    ],
)
def test_a_plan_that_cannot_be_simulated_is_an_error_of_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(text)
    assert main(["simulate", "--plan", str(plan)]) == 2
    assert said in capsys.readouterr().err
