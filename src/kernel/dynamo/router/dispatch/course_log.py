"""The log of a course as a record: part of each failure bundle, and what `dynamo simulate --replay` runs again. Pure.

    {"rules": {"retries": 3}, "state": "failed", "steps": [
        {"event": {"is": "chosen", "worker": "ns.backend.generate/7b"}, "then": {"is": "open_stream", "worker": ...}}, ...]}

A worker is its endpoint and its id in hexadecimal; an error is its kind, its text and whether a worker reported it. Members that
have their default are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, get_args

import msgspec
from msgspec import Struct

from dynamo.errors import DynamoException, kind_of, revive
from dynamo.placement import WorkerKey
from dynamo.router.dispatch.course import MAX_STEPS, Course, CourseRules, Event, IllegalStep, Instruction

MAX_MESSAGE_CHARACTERS: Final = 300
MAX_COURSES: Final = 1024  # of one file

_Value = object
_Members = dict[str, _Value]


class InvalidCourse(ValueError):
    """A record is not one of a course."""


class StepRecord(Struct, frozen=True):
    """One step: what has happened, and what was to be done then."""

    event: _Members
    then: _Members


class CourseRecord(Struct, frozen=True, omit_defaults=True):
    """A course from its beginning, as far as its log was kept."""

    rules: CourseRules
    steps: list[StepRecord]
    state: str = ""  # where it ended
    is_cut: bool = False  # later steps are missing


class _Bundle(Struct, frozen=True):
    """What is read of a failure bundle."""

    courses: list[CourseRecord]


def course_record(course: Course, clean: Callable[[str], str] = str) -> CourseRecord:
    """Return the record of a course. `clean` takes out of the texts of errors what may not be kept."""
    again = Course(course.rules)
    steps = [StepRecord(_written(event, clean), _written(again.step(event), clean)) for event in course.log[:MAX_STEPS]]
    return CourseRecord(course.rules, steps, str(course.state), is_cut=len(course.log) > MAX_STEPS)


def read_courses(data: bytes) -> list[CourseRecord]:
    """Read the courses of a failure bundle, or one course alone. Raises InvalidCourse."""
    try:
        try:
            found = msgspec.json.decode(data, type=_Bundle).courses
        except msgspec.ValidationError as error:
            if "courses" in str(error) and "missing" not in str(error):
                raise
            found = [msgspec.json.decode(data, type=CourseRecord)]
    except msgspec.DecodeError as error:
        raise InvalidCourse(str(error)) from error
    if len(found) > MAX_COURSES:
        raise InvalidCourse(f"more than {MAX_COURSES} courses")
    return found


def replay(record: CourseRecord) -> list[StepRecord]:
    """Run a course again; return its steps, each with the instruction that is made now.

    Raises InvalidCourse for what no course can have been.
    """
    course = Course(record.rules)
    try:
        return [StepRecord(step.event, _written(course.step(_read_event(step.event)), str)) for step in record.steps]
    except (KeyError, TypeError, ValueError, IllegalStep) as error:
        raise InvalidCourse(f"{type(error).__name__}: {error}") from error


def step_line(step: StepRecord) -> str:
    """Return a step as one line."""
    return f"{_line(step.event)}  ->  {_line(step.then)}"


# -- values ------------------------------------------------------------------------------------------------------------

_WORD: Final = re.compile(r"(?<!^)(?=[A-Z])")


def _name(kind: type) -> str:
    return _WORD.sub("_", kind.__name__).lower()


_KINDS: Final[Mapping[str, Callable[..., Event]]] = {_name(kind): kind for kind in get_args(Event)}


def _written(value: Event | Instruction, clean: Callable[[str], str]) -> _Members:
    found: _Members = {"is": _name(type(value))}
    for each in msgspec.structs.fields(type(value)):
        member = getattr(value, each.name)
        if each.required or member != each.default:
            found[each.name] = _plain(member, clean)
    return found


def _plain(value: _Value, clean: Callable[[str], str]) -> _Value:
    if isinstance(value, DynamoException):
        text = clean(str(value))[:MAX_MESSAGE_CHARACTERS]
        return {"kind": kind_of(value).__name__, "text": text, **({"is_reported": True} if value.is_reported else {})}
    if isinstance(value, frozenset):
        return sorted(map(_worker, value))
    if isinstance(value, tuple):
        return _worker(value) if value and isinstance(value[0], str) else list(map(_worker, value))
    return value


def _worker(key: WorkerKey) -> str:
    return f"{key[0]}/{key[1]:x}"


class _ErrorRecord(Struct):
    kind: str
    text: str
    is_reported: bool = False


def _read_event(record: _Members) -> Event:
    return _KINDS[str(record["is"])](**{name: _read(name, value) for name, value in record.items() if name != "is"})


def _read(name: str, value: _Value) -> _Value:
    if name == "error":
        found = msgspec.convert(value, _ErrorRecord)
        error = revive({"error_type": found.kind, "message": found.text})
        error.is_reported = found.is_reported
        return error
    if name == "worker":
        return _key(msgspec.convert(value, str))
    return tuple(map(_key, msgspec.convert(value, list[str]))) if name == "readmitted" else value


def _key(text: str) -> WorkerKey:
    endpoint, _, instance_id = text.rpartition("/")
    return endpoint, int(instance_id, 16)


def _line(record: _Members) -> str:
    members = [f"{name}={_short(value)}" for name, value in record.items() if name != "is"]
    return " ".join([str(record.get("is")), *members])


def _short(value: _Value) -> str:
    if isinstance(value, dict):
        return f"{value.get('kind')}({value.get('text')})"
    return ",".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
