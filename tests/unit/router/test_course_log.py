"""The log of a course: what is written of it, and that it decides the same again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo.cli.usage import UsageError
from dynamo.errors import Disconnected, InvalidArgument, NoReplacement, Overloaded, WorkerUnavailable
from dynamo.router.dispatch.course import (
    MAX_STEPS,
    Again,
    Chosen,
    Course,
    CourseRules,
    Event,
    Instruction,
    Items,
    Lost,
    NoWorker,
    RequestCancelled,
    StageDone,
    StreamOpened,
    Tick,
    WorkerFound,
)
from dynamo.router.dispatch.course_log import (
    CourseRecord,
    InvalidCourse,
    StepRecord,
    course_record,
    read_courses,
    replay,
)

A, B = ("ns.c.e", 0x7B), ("ns.c.e", 2)
SHUT = WorkerUnavailable("closed")


def moved() -> tuple[Course, list[Instruction]]:
    """Return a course with every kind of value in it, and what it instructed at the time."""
    lost = Disconnected("gone")
    lost.is_reported = True
    course = Course(CourseRules(retries=3, stages=1))
    events: list[Event] = [
        StageDone(is_single_use=True), Chosen(A), StreamOpened(), Lost(lost, tokens=0), Again(lost), WorkerFound(),
        StageDone(), Chosen(B), Lost(Overloaded()), Chosen(("ns.c.e", 3)), StreamOpened(), Items(),
        Lost(SHUT, tokens=7, stages=1), NoWorker(NoReplacement("m"), True, 2.5), Tick((A,)),
        NoWorker(NoReplacement("m"), True, -1.0),
    ]  # fmt: skip
    return course, [course.step(event) for event in events]


def test_a_course_that_is_written_and_read_makes_the_same_decisions() -> None:
    course, made = moved()
    (record,) = read_courses(msgspec.json.encode(course_record(course)))
    steps = replay(record)
    assert steps == record.steps
    assert [step.then["is"] for step in steps] == [_word(each) for each in made]
    assert record == CourseRecord(CourseRules(retries=3, stages=1), steps, "failed")


def _word(instruction: Instruction) -> str:
    return {"NextStage": "next_stage", "OpenStream": "open_stream"}.get(
        type(instruction).__name__, type(instruction).__name__.lower()
    )


def test_what_is_written_can_be_read_by_people() -> None:
    course, _ = moved()
    steps = msgspec.to_builtins(course_record(course))["steps"]
    assert steps[1] == {
        "event": {"is": "chosen", "worker": "ns.c.e/7b"},
        "then": {"is": "open_stream", "worker": "ns.c.e/7b"},
    }
    error = {"kind": "Disconnected", "text": "gone", "is_reported": True}
    assert steps[3] == {"event": {"is": "lost", "error": error}, "then": {"is": "fail", "error": error}}
    assert steps[8]["then"]["excluded"] == ["ns.c.e/2", "ns.c.e/7b"]


def test_a_decision_that_differs_from_the_recorded_one_shows() -> None:
    record = course_record(moved()[0])
    record.steps[1] = StepRecord(record.steps[1].event, {"is": "finish"})
    assert [before == now for before, now in zip(record.steps, replay(record), strict=True)].count(False) == 1


def test_texts_are_cleaned_and_a_long_wait_is_cut() -> None:
    course = Course(CourseRules())
    course.step(NoWorker(WorkerUnavailable("secret"), True, 9.0))
    for _ in range(MAX_STEPS):
        course.step(Tick())
        course.step(NoWorker(WorkerUnavailable("secret"), True, 9.0))
    course.step(RequestCancelled())
    record = course_record(course, lambda text: text.replace("secret", "[6 characters]"))
    assert (len(record.steps), record.is_cut) == (MAX_STEPS, True)
    assert b"secret" not in msgspec.json.encode(record)
    assert replay(record) == record.steps


@pytest.mark.parametrize(
    "record",
    [
        {},
        [1],
        {"courses": 3},
        {"rules": {}, "steps": 3},
        {"rules": {"retries": "x"}, "steps": []},
        {"rules": {}, "steps": [{"event": {"is": "unheard"}, "then": {}}]},
        {"rules": {}, "steps": [{"event": {"is": "chosen"}, "then": {}}]},
        {"rules": {}, "steps": [{"event": {"is": "chosen", "worker": "x/zz"}, "then": {}}]},
        {"rules": {}, "steps": [{"event": {"is": "items"}, "then": {}}]},
        {"rules": {}, "steps": [{"then": {}}]},
        {"rules": {}, "steps": ["x"]},
    ],
)
def test_what_is_no_course_is_an_error_with_a_reason(record: Any) -> None:
    with pytest.raises(InvalidCourse, match=r"."):
        [replay(course) for course in read_courses(json.dumps(record).encode())]


def test_the_command_shows_each_step_and_whether_it_is_decided_as_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dynamo.cli.simulate import main

    file = tmp_path / "bundle.json"
    course = Course(CourseRules(retries=1))
    for event in (Chosen(A), StreamOpened(), Lost(InvalidArgument("no"))):
        course.step(event)
    courses = msgspec.to_builtins([course_record(course), course_record(moved()[0])])
    bundle = {"schema": "dynamo.failure.v1", "courses": courses}
    file.write_text(json.dumps(bundle))
    assert main(["--replay", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "course 1: generate, 1 retries, failed" in printed
    assert "lost error=InvalidArgument(no)  ->  fail error=InvalidArgument(no)" in printed
    assert "2 courses, 19 steps, 0 decided otherwise" in printed
    courses[0]["steps"][2]["then"] = {"is": "read"}
    file.write_text(json.dumps(bundle))
    assert main(["--replay", str(file)]) == 1
    assert 'but then it was: {"is": "read"}' in capsys.readouterr().out
    file.write_text("{")
    with pytest.raises(UsageError, match="truncated"):
        main(["--replay", str(file)])
