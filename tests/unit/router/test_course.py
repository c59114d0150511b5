"""The course of a request: every event in every state, and what is decided when workers are lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import (
    CannotConnect,
    Disconnected,
    DynamoException,
    EngineShutdown,
    InvalidArgument,
    Overloaded,
    ResponseTimeout,
    StreamIncomplete,
    WorkerUnavailable,
)
from dynamo.router.dispatch.course import (
    LONGEST_CYCLE,
    MAX_STEPS,
    TABLE,
    Again,
    Choose,
    Chosen,
    Course,
    CourseRules,
    CourseState,
    Declined,
    Event,
    Fail,
    Failed,
    Finish,
    IllegalStep,
    Instruction,
    Items,
    Lost,
    NextStage,
    NoWorker,
    OpenStream,
    Read,
    RequestCancelled,
    StageDone,
    StreamOpened,
    Tick,
    Wait,
    WorkerFound,
)
from support.cases import each_case

A, B, C = ("ns.c.e", 1), ("ns.c.e", 2), ("ns.c.e", 3)
GONE: Final = Disconnected("gone")
NONE: Final = WorkerUnavailable("none")
FULL: Final = Overloaded()
PLAIN: Final = CourseRules(retries=3)
STAGED: Final = CourseRules(retries=3, stages=2)

SENT: Final[Sequence[Event]] = (Chosen(A), StreamOpened())
EXPECTED: Final = NoWorker(NONE, is_expected=True, left_seconds=5.0)

REACHED: Final[Mapping[CourseState, tuple[CourseRules, Sequence[Event]]]] = {
    CourseState.STAGING: (STAGED, ()),
    CourseState.SEEKING: (STAGED, (StageDone(), StageDone(), *SENT, Items(), Lost(EngineShutdown("going"), stages=1))),
    CourseState.SEEK_WAITING: (
        STAGED, (StageDone(), StageDone(), *SENT, Items(), Lost(EngineShutdown("going"), stages=1), EXPECTED)
    ),
    CourseState.CHOOSING: (PLAIN, ()),
    CourseState.WAITING: (PLAIN, (EXPECTED,)),
    CourseState.OPENING: (PLAIN, (Chosen(A),)),
    CourseState.SENT: (PLAIN, SENT),
    CourseState.READING: (PLAIN, (*SENT, Items())),
    CourseState.FINISHED: (PLAIN, (RequestCancelled(),)),
    CourseState.FAILED: (STAGED, (StageDone(), StageDone(), *SENT, Lost(InvalidArgument("no")))),
}  # fmt: skip
"""One way to each state."""

EVENTS: Final[Mapping[type, Sequence[Event]]] = {
    Chosen: [Chosen(B)],
    WorkerFound: [WorkerFound()],
    NoWorker: [NoWorker(NONE), EXPECTED, NoWorker(NONE, is_expected=True)],
    StreamOpened: [StreamOpened()],
    Items: [Items()],
    Lost: [
        Lost(GONE),
        Lost(FULL),
        Lost(InvalidArgument("no")),
        Lost(GONE, is_over=True),
        Lost(GONE, is_registered_anew=True),
        Lost(GONE, blocker="a grammar"),
        Lost(GONE, is_complete=True),
        Lost(GONE, stages=2),
    ],
    StageDone: [StageDone(), StageDone(is_single_use=True)],
    Again: [Again(GONE), Again(GONE, readmits_all=True), Again(GONE, uncounts_last=True)],
    Declined: [Declined(A)],
    Tick: [Tick(), Tick((A,))],
    Failed: [Failed(InvalidArgument("no"))],
    RequestCancelled: [RequestCancelled()],
}


def driven(rules: CourseRules, events: Sequence[Event]) -> Course:
    course = Course(rules)
    course.validate()
    for event in events:
        course.step(event)
        course.validate()
    return course


def test_every_state_and_every_event_is_tried() -> None:
    assert REACHED.keys() == set(CourseState)
    assert EVENTS.keys() == set(get_args(Event))
    assert {state for state, _ in TABLE} == set(CourseState) - {CourseState.FINISHED}


@pytest.mark.parametrize("state", CourseState)
def test_every_event_in_every_state_has_a_row_or_is_illegal(state: CourseState) -> None:
    rules, way = REACHED[state]
    for kind, events in EVENTS.items():
        row = TABLE.get((state, kind))
        for event in events:
            course = driven(rules, way)
            assert course.state is state
            if row is None:
                before = course.instruction
                with pytest.raises(IllegalStep, match=f"{kind.__name__} in state {state}"):
                    course.step(event)
                assert (course.state, course.instruction) == (state, before)
            else:
                course.step(event)
                assert course.state in row.leads_to
                course.validate()


def test_no_worker_declines_a_stage_that_is_not_there() -> None:
    course = driven(PLAIN, [*SENT, Lost(InvalidArgument("no"))])
    with pytest.raises(IllegalStep, match="no stage is before the workers"):
        course.step(Declined(A))
    course.validate()


def test_no_row_names_a_state_that_is_never_reached() -> None:
    found: dict[tuple[CourseState, type], set[CourseState]] = {}
    for state, (rules, way) in REACHED.items():
        for base in (rules, CourseRules(retries=0, is_pinned=True)) if not rules.stages else (rules,):
            for kind, events in EVENTS.items():
                if (state, kind) in TABLE:
                    for event in events:
                        course = driven(base, way)
                        course.step(event)
                        found.setdefault((state, kind), set()).add(course.state)
    rare: dict[tuple[CourseState, type], set[CourseState]] = {
        # to the worker that answers, behind the last stage
        (CourseState.STAGING, StageDone): {CourseState.CHOOSING},
        # without stages, and where nothing more may be tried
        **{(state, Again): {CourseState.CHOOSING, CourseState.SEEKING, CourseState.FAILED} for state in CourseState},
        # the last failure decides whether there is room for a replacement
        (CourseState.SEEKING, NoWorker): {CourseState.SEEK_WAITING, CourseState.FAILED},
    }
    for key, row in TABLE.items():
        assert found[key] | rare.get(key, set()) >= row.leads_to, key


_errors = st.sampled_from(
    [
        GONE,
        FULL,
        NONE,
        EngineShutdown("going"),
        CannotConnect("no way"),
        ResponseTimeout("late"),
        StreamIncomplete("cut"),
        InvalidArgument("no"),
    ]
)
_workers = st.sampled_from([A, B, C])
_events: st.SearchStrategy[Event] = st.one_of(
    st.builds(Chosen, _workers),
    st.builds(Lost, _errors, st.integers(0, 9), st.booleans(), st.booleans(), stages=st.integers(0, 2)),
    st.builds(Lost, _errors, blocker=st.sampled_from([None, "a grammar"]), is_complete=st.booleans()),
    st.builds(NoWorker, _errors, st.booleans(), st.floats(-1, 10)),
    st.builds(StageDone, st.booleans()),
    st.builds(Again, _errors, st.booleans(), st.booleans()),
    st.builds(Declined, _workers),
    st.builds(Tick, st.lists(_workers, max_size=3).map(tuple)),
    st.builds(Failed, _errors),
    st.sampled_from([WorkerFound(), StreamOpened(), Items(), RequestCancelled()]),
)
_rules = st.builds(
    CourseRules,
    retries=st.integers(0, 3),
    stages=st.integers(0, 2),
    is_pinned=st.booleans(),
    has_adapter=st.booleans(),
    only_unsent=st.booleans(),
    is_movable=st.booleans(),
)


def may_happen(course: Course, event: Event) -> bool:
    """Return whether a shell could report this now: a worker that is excluded is not chosen, for example."""
    if isinstance(event, Chosen):
        return event.worker not in course.excluded
    return not isinstance(event, Declined) or bool(course.rules.stages and course._stages)


@given(_rules, st.lists(_events, max_size=60))
def test_whatever_happens_in_whatever_order_a_course_stays_valid(rules: CourseRules, events: list[Event]) -> None:
    course = Course(rules)
    for event in events:
        if (course.state, type(event)) in TABLE and may_happen(course, event):
            course.step(event)
            course.validate()


@given(_rules, st.lists(_events, max_size=60))
def test_the_events_of_a_course_lead_to_the_same_instructions_again(rules: CourseRules, events: list[Event]) -> None:
    first = Course(rules)
    made = [first.step(event) for event in events if (first.state, type(event)) in TABLE and may_happen(first, event)]
    again = Course(rules)
    assert [again.step(event) for event in first.log] == made


def test_a_wait_of_any_length_leaves_a_log_with_a_bound() -> None:
    course = driven(PLAIN, [EXPECTED])
    for _ in range(2 * MAX_STEPS):
        course.step(Tick())
        course.step(EXPECTED)
    assert MAX_STEPS <= len(course.log) <= MAX_STEPS + LONGEST_CYCLE
    course.validate()


# -- what is decided -----------------------------------------------------------------------------------------------------

CASES: Final[Mapping[str, tuple[CourseRules, Sequence[Event], Instruction]]] = {
    "a request begins with a worker": (PLAIN, [], Choose()),
    "and its answer is read": (PLAIN, [*SENT, Items()], Read()),
    "the worker that is lost is left out": (PLAIN, [*SENT, Lost(GONE)], Choose(frozenset({A}), GONE)),
    "also in the middle of its answer": (PLAIN, [*SENT, Items(), Lost(GONE, 7)], Choose(frozenset({A}), GONE)),
    "unless its id was registered anew": (
        PLAIN, [*SENT, Lost(GONE, is_registered_anew=True)], Choose(frozenset(), GONE)
    ),
    "what the request itself did is its end": (
        PLAIN, [*SENT, Lost(error := InvalidArgument("no"))], Fail(error)
    ),
    "a request that is over is not moved": (PLAIN, [*SENT, Lost(GONE, is_over=True)], Fail(GONE)),
    "nor is one that names its worker": (CourseRules(retries=3, is_pinned=True), [*SENT, Lost(GONE)], Fail(GONE)),
    "nor one that has used up its attempts": (
        CourseRules(retries=1), [*SENT, Lost(FULL), Chosen(B), StreamOpened(), Lost(GONE)], Fail(GONE)
    ),
    "nor one whose grammar cannot be taken up": (
        PLAIN, [*SENT, Items(), Lost(GONE, 7, blocker="a grammar")], Fail(GONE, "a grammar")
    ),
    "a blocker explains nothing where no move was allowed": (
        CourseRules(), [*SENT, Items(), Lost(GONE, 7, blocker="a grammar")], Fail(GONE)
    ),
    "an answer that is whole needs no worker": (
        PLAIN, [*SENT, Items(), Lost(GONE, 7, is_complete=True)], Finish(is_complete=True)
    ),
    "a worker without room is tried again once another is lost": (
        PLAIN, [*SENT, Lost(FULL), Chosen(B), Lost(GONE)], Choose(frozenset({B}), GONE)
    ),
    "but not while others only have no room": (
        PLAIN, [*SENT, Lost(FULL), Chosen(B), Lost(FULL)], Choose(frozenset({A, B}), FULL)
    ),
    "without a worker the last failure is the end": (PLAIN, [*SENT, Lost(GONE), NoWorker(NONE)], Fail(GONE)),
    "without any failure the want of workers is": (PLAIN, [NoWorker(NONE)], Fail(NONE)),
    "a request waits for a worker that is expected": (PLAIN, [EXPECTED], Wait(5.0)),
    "and chooses when something has changed": (
        PLAIN,
        [*SENT, Lost(GONE), EXPECTED, Tick((A,))],
        Choose(frozenset(), GONE, is_after_wait=True),
    ),
    "and gives up when the time is up": (
        PLAIN, [*SENT, Lost(GONE), EXPECTED, Tick(), NoWorker(NONE, is_expected=True)], Fail(GONE)
    ),
    "a silent worker makes no room for another": (
        PLAIN, [*SENT, Lost(late := ResponseTimeout("late")), EXPECTED], Fail(late)
    ),
    "a client that leaves ends it": (PLAIN, [EXPECTED, RequestCancelled()], Finish()),
    "stages come first": (STAGED, [], NextStage(0)),
    "one after the other": (STAGED, [StageDone()], NextStage(1)),
    "then the worker that answers": (STAGED, [StageDone(), StageDone()], Choose()),
    "what a stage answers itself is read": (STAGED, [Items()], Read()),
    "before the stages are done again there must be a worker": (
        STAGED,
        [StageDone(), StageDone(), *SENT, Items(), Lost(GONE, 7, stages=1)],
        Choose(frozenset({A}), GONE, looks_only=True),
    ),
    "and then they begin again": (
        STAGED, [StageDone(), StageDone(), *SENT, Items(), Lost(GONE, 7, stages=1), WorkerFound()], NextStage(0)
    ),
    "a request of which one worker has taken all goes to no other one": (
        STAGED, [StageDone(), StageDone(is_single_use=True), *SENT, Lost(GONE)], Fail(GONE)
    ),
    "unless that worker had not even been reached": (
        STAGED,
        [StageDone(), StageDone(is_single_use=True), Chosen(A), Lost(unreached := CannotConnect("no way"))],
        Choose(frozenset({A}), unreached),
    ),
    "the last stage can be done again": (
        STAGED,
        [StageDone(), StageDone(is_single_use=True), *SENT, Lost(GONE), Again(GONE), WorkerFound()],
        NextStage(1),
    ),
    "and readmit the workers that lacked its result": (
        STAGED,
        [StageDone(), StageDone(is_single_use=True), *SENT, Lost(GONE), Again(GONE, readmits_all=True)],
        Choose(frozenset(), GONE, looks_only=True),
    ),
    "what has failed before a stage is made good by it": (
        STAGED,
        [StageDone(), StageDone(True), *SENT, Lost(GONE), Again(GONE), WorkerFound(), StageDone()],
        Choose(frozenset({A})),
    ),
    "a worker that declines what a stage chose it for is not left out": (
        STAGED, [StageDone(), StageDone(), *SENT, Lost(InvalidArgument("no")), Declined(A), StageDone()], Choose()
    ),
    "a worker that may have begun gets the only attempt": (
        CourseRules(retries=3, only_unsent=True), [*SENT, Lost(GONE)], Fail(GONE)
    ),
    "one that has not does not": (
        CourseRules(retries=3, only_unsent=True), [*SENT, Lost(FULL)], Choose(frozenset({A}), FULL)
    ),
}  # fmt: skip


@each_case("case", CASES.values(), ids=CASES)
def test_what_comes_next(case: tuple[CourseRules, Sequence[Event], Instruction]) -> None:
    rules, events, instruction = case
    assert driven(rules, events).instruction == instruction


@pytest.mark.parametrize(
    ("error", "is_reported", "has_adapter", "waits"),
    [
        (EngineShutdown("going"), True, False, True),
        (Disconnected("gone"), False, False, True),
        (Disconnected("its store"), True, False, False),
        (CannotConnect("no way"), False, False, True),
        (CannotConnect("its store"), True, False, False),
        (WorkerUnavailable("closed"), True, False, True),
        (WorkerUnavailable("no such adapter"), True, True, False),
        (StreamIncomplete("cut"), False, False, False),
        (Overloaded(), True, False, False),
    ],
)
def test_whether_a_failure_makes_room_for_a_replacement(
    error: DynamoException, is_reported: bool, has_adapter: bool, waits: bool
) -> None:
    error.is_reported = is_reported
    course = driven(CourseRules(retries=3, has_adapter=has_adapter), [*SENT, Lost(error), EXPECTED])
    assert course.instruction == (Wait(5.0) if waits else Fail(error))
    assert isinstance(course.instruction, Wait | Fail)


def test_an_attempt_that_is_taken_back_does_not_count() -> None:
    course = driven(CourseRules("prefill"), [Chosen(A), StreamOpened(), Items(), Again(GONE, uncounts_last=True)])
    assert (course.count, course.instruction) == (0, Choose(frozenset(), GONE))
    course = driven(CourseRules("prefill"), [Chosen(A), StreamOpened(), Items(), Again(GONE)])
    assert course.instruction == Fail(GONE)


def test_opening_a_worker_is_counted_once() -> None:
    course = driven(PLAIN, [Chosen(A)])
    assert (course.count, course.instruction, course.excluded) == (1, OpenStream(A), {A})
