from __future__ import annotations

import itertools

import pytest

from dynamo.contract.modes import DisaggregationMode
from dynamo.worker.lifecycle import (
    FORCED_EXIT_STATUS,
    TRANSITIONS,
    AdminGate,
    IllegalTransition,
    Lifecycle,
    ShutdownTimes,
    State,
    WorkerEvent,
)
from support.cases import each_case

PAIRS = list(itertools.product(State, WorkerEvent))


def at(state: State) -> Lifecycle:
    """A lifecycle in `state`, reached by legal moves only."""
    paths: dict[State, list[WorkerEvent]] = {State.INIT: []}
    queue = [State.INIT]
    while queue:
        here = queue.pop(0)
        for event, there in TRANSITIONS.get(here, {}).items():
            if there not in paths:
                paths[there] = [*paths[here], event]
                queue.append(there)
    life = Lifecycle()
    for event in paths[state]:
        life.apply(event)
    assert life.state is state
    return life


@each_case(("state", "event"), PAIRS, ids=lambda value: value.name)
def test_every_move_is_in_the_table_or_refused_by_name(state: State, event: WorkerEvent) -> None:
    life = at(state)
    expected = TRANSITIONS.get(state, {}).get(event)
    if expected is not None:
        assert life.apply(event) is expected
        return
    with pytest.raises(IllegalTransition, match=f"{state.name}.*{event.name}"):
        life.apply(event)
    assert life.state is state


def test_every_state_is_reached_and_nothing_leaves_closed() -> None:
    for state in State:
        at(state)
    assert State.CLOSED not in TRANSITIONS


def walks(state: State, seen: tuple[WorkerEvent, ...] = ()) -> list[tuple[WorkerEvent, ...]]:
    """Every way to CLOSED, self-loops left out."""
    if state is State.CLOSED:
        return [seen]
    return [
        walk
        for event, following in TRANSITIONS[state].items()
        if following is not state
        for walk in walks(following, (*seen, event))
    ]


def test_cleanup_happens_exactly_once_if_start_was_entered_and_never_otherwise() -> None:
    everything = walks(State.INIT)
    assert len(everything) > 5
    for walk in everything:
        assert walk.count(WorkerEvent.CLEANED) == (1 if WorkerEvent.START in walk else 0), walk


def test_only_an_engine_that_started_is_drained() -> None:
    for walk in walks(State.INIT):
        if WorkerEvent.DRAINED in walk:
            assert WorkerEvent.STARTED in walk


def test_a_second_stop_changes_nothing_wherever_it_comes() -> None:
    for state in State:
        first = TRANSITIONS.get(state, {}).get(WorkerEvent.STOP)
        if first is None or first is State.CLOSED:
            continue
        assert TRANSITIONS[first][WorkerEvent.STOP] is first


def test_a_stop_during_start_lets_it_finish_and_then_drains() -> None:
    life = at(State.STARTING)
    assert life.apply(WorkerEvent.STOP) is State.STOPPING_START
    assert life.is_stopping
    assert life.apply(WorkerEvent.STARTED) is State.DRAINING


def test_a_start_that_fails_after_a_stop_is_cleaned_up_without_a_drain() -> None:
    life = at(State.STARTING)
    life.apply(WorkerEvent.STOP)
    assert life.apply(WorkerEvent.FAILED) is State.CLEANING


def test_the_admin_gate_is_open_only_while_serving() -> None:
    gates = {state: at(state).gate for state in State}
    assert [state for state in State if gates[state] is AdminGate.OPEN] == [State.SERVING]
    assert {state for state in State if gates[state] is AdminGate.STARTING} == {
        State.INIT,
        State.STARTING,
        State.PREPARING,
    }


def test_the_forced_exit_is_911_as_posix_keeps_it() -> None:
    assert FORCED_EXIT_STATUS == 143


@pytest.mark.parametrize(
    ("times", "deadline", "streams"),
    [
        (ShutdownTimes(), 35.0, 30.0),
        (ShutdownTimes(grace_seconds=60.0, timeout_seconds=30), 90.0, 85.0),
        (ShutdownTimes(grace_seconds=0.0, timeout_seconds=2), 2.0, 0.0),
    ],
)
def test_grace_comes_on_top_of_the_timeout(times: ShutdownTimes, deadline: float, streams: float) -> None:
    assert times.deadline_seconds == deadline
    assert times.streams_until_seconds == streams


@each_case("mode", DisaggregationMode)
def test_only_prefill_workers_are_polled_for_quiescence(mode: DisaggregationMode) -> None:
    times = ShutdownTimes(timeout_seconds=60)
    assert times.quiescence_seconds(mode) == (30.0 if mode is DisaggregationMode.PREFILL else 0.0)


@each_case(("timeout", "budget"), [(30, 25.0), (6, 1.0), (5, 0.0), (1, 0.0), (100, 30.0)])
def test_the_quiescence_budget_leaves_five_seconds_for_cleanup(timeout: int, budget: float) -> None:
    assert ShutdownTimes(timeout_seconds=timeout).quiescence_seconds(DisaggregationMode.PREFILL) == budget
