"""Which requests end their workers: what counts as a death, what clears a request, and how long it is remembered."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo.errors import CannotConnect, Disconnected, DynamoException, EngineShutdown, RequestKillsWorkers
from dynamo.placement import Candidate, Placement
from dynamo.router.dispatch.query_of_death import CAPACITY, REMEMBERED_SECONDS, QueriesOfDeath, Suspect, content_hash
from dynamo.router.workers.pool import ChosenWorker
from dynamo.runtime.calls.request_plane.base import Instance
from support.cases import each_case

BODY: dict[str, Any] = {"model": "m", "token_ids": [1, 2, 3], "sampling_options": {"temperature": 0.5, "seed": 1}}


class Listing:
    """The part of a pool that tells whether discovery lists a worker."""

    def __init__(self, *ids: int) -> None:
        self.ids = ids

    def instance(self, instance_id: int) -> Instance | None:
        return worker(instance_id).instance if instance_id in self.ids else None


def worker(instance_id: int) -> ChosenWorker:
    instance = Instance(
        namespace="ns", component="c", endpoint="e", instance_id=instance_id, transport={"mem": str(instance_id)}
    )
    return ChosenWorker(Placement(Candidate(instance_id), "test"), instance, None)  # type: ignore[arg-type]


def reported(error: DynamoException) -> DynamoException:
    error.is_reported = True
    return error


DECODERS = Listing()


def fails(
    suspect: Suspect,
    instance_id: int,
    error: DynamoException,
    *listed: int,
    after_seconds: float = 0.1,
    of: Listing = DECODERS,
) -> None:
    of.ids = listed
    pool: Any = of
    suspect.count_failure(pool, worker(instance_id), error, sent_at=-after_seconds, now=0.0)


def test_the_second_death_in_a_row_convicts_and_the_content_is_refused_for_a_while() -> None:
    memory = QueriesOfDeath()
    suspect = Suspect(BODY, "r", memory)
    suspect.check(lambda: 0.0)
    fails(suspect, 1, Disconnected("lost"), 1, 2)
    with pytest.raises(RequestKillsWorkers):
        fails(suspect, 2, Disconnected("lost"), 1, 2)
    same = Suspect(
        {**BODY, "routing": {"priority": 3}, "sampling_options": {"temperature": 0.5, "seed": 7}}, "s", memory
    )
    with pytest.raises(RequestKillsWorkers):
        same.check(lambda: REMEMBERED_SECONDS - 1)
    Suspect({**BODY, "token_ids": [1, 2, 4]}, "t", memory).check(lambda: 1.0)
    same.check(lambda: REMEMBERED_SECONDS)
    assert not memory


def test_deaths_of_workers_with_different_roles_do_not_add_up() -> None:
    prefill, decode = Listing(), Listing()
    suspect = Suspect(BODY, "r", QueriesOfDeath())
    fails(suspect, 1, Disconnected("lost"), 1, 2, of=prefill)
    fails(suspect, 3, Disconnected("lost"), 3, 4, of=decode)
    fails(suspect, 2, Disconnected("lost"), 1, 2, of=prefill)  # the second of this role, but not in a row
    with pytest.raises(RequestKillsWorkers):
        fails(suspect, 1, Disconnected("lost"), 1, 2, of=prefill)


def test_a_prompt_that_was_computed_clears_the_request_for_prefill_workers_only() -> None:
    prefill, decode = Listing(), Listing()
    suspect = Suspect(BODY, "r", QueriesOfDeath())
    for of in (prefill, decode):
        fails(suspect, 1, Disconnected("lost"), 1, 2, of=of)
        suspect.passed(prefill)  # type: ignore[arg-type]
    with pytest.raises(RequestKillsWorkers):
        fails(suspect, 2, Disconnected("lost"), 1, 2, of=decode)
    suspect = Suspect(BODY, "r", QueriesOfDeath())
    for number in range(1, 9):
        fails(suspect, number, Disconnected("lost"), *range(10), of=prefill)
        suspect.passed(prefill)  # type: ignore[arg-type]


def engine_died() -> DynamoException:
    error = reported(EngineShutdown("the engine died"))
    error.__cause__ = reported(Disconnected("the worker lost its engine"))
    return error


def test_an_engine_that_died_under_its_worker_counts_as_a_death() -> None:
    suspect = Suspect(BODY, "r", QueriesOfDeath())
    fails(suspect, 1, engine_died(), 1, 2)
    with pytest.raises(RequestKillsWorkers):
        fails(suspect, 2, Disconnected("lost"), 1, 2)


def test_a_token_between_two_deaths_clears_the_request() -> None:
    suspect = Suspect(BODY, "r", QueriesOfDeath())
    for number in range(1, 9):
        fails(suspect, number, Disconnected("lost"), *range(10))
        suspect.acquit()


@each_case(
    ("error", "listed"),
    [
        (Disconnected("lost"), ()),  # it had left discovery before: a worker that drains
        (reported(Disconnected("its store")), (1,)),
        (reported(EngineShutdown("leaving")), (1,)),
        (CannotConnect("nothing was sent"), (1,)),
    ],
    ids=["drained", "reported", "leaving", "not sent"],
)
def test_only_a_connection_that_broke_under_the_request_is_a_death(
    error: DynamoException, listed: tuple[int, ...]
) -> None:
    suspect = Suspect(BODY, "r", QueriesOfDeath())
    for _ in range(5):
        fails(suspect, 1, error, *listed)


@each_case(
    ("first", "second", "is_convicted"),
    [
        (0.01, 0.4, True),
        (0.01, 1.9, False),
        (0.0, 0.0, True),
        (30.0, 20.0, True),
        (30.0, 5.0, False),
        (0.1, 60.0, False),
    ],
)
def test_deaths_at_quite_different_times_after_the_request_came_are_not_its_doing(
    first: float, second: float, is_convicted: bool
) -> None:
    suspect = Suspect(BODY, "r", QueriesOfDeath())
    fails(suspect, 1, Disconnected("lost"), 1, 2, 3, after_seconds=first)
    if is_convicted:
        with pytest.raises(RequestKillsWorkers):
            fails(suspect, 2, Disconnected("lost"), 1, 2, 3, after_seconds=second)
    else:
        fails(suspect, 2, Disconnected("lost"), 1, 2, 3, after_seconds=second)
        with pytest.raises(RequestKillsWorkers):
            fails(suspect, 3, Disconnected("lost"), 1, 2, 3, after_seconds=second)


OTHER: dict[str, Any] = {**BODY, "token_ids": [9]}


def test_the_deaths_of_a_node_convict_no_request_that_met_two_of_them() -> None:
    memory = QueriesOfDeath()
    suspect, elsewhere = Suspect(BODY, "r", memory), Suspect(OTHER, "s", memory)
    fails(suspect, 1, Disconnected("lost"), 1, 2, 3)
    fails(elsewhere, 3, Disconnected("lost"), 1, 2, 3)  # a worker that never had the request died, too
    fails(suspect, 2, Disconnected("lost"), 1, 2, 3)
    suspect.check(lambda: 1.0)
    assert not memory


def test_a_worker_that_dies_in_the_middle_of_other_answers_counts_as_another_explanation() -> None:
    memory = QueriesOfDeath()
    suspect = Suspect(BODY, "r", memory)
    fails(suspect, 1, Disconnected("lost"), 1, 2, 3)
    pool: Any = DECODERS
    memory.note_loss(pool, 3, Disconnected("lost"), 0.0)
    fails(suspect, 2, Disconnected("lost"), 1, 2, 3)
    assert not memory
    for error in (reported(Disconnected("its store")), CannotConnect("no way")):  # no deaths
        other = Suspect(OTHER, "s", memory := QueriesOfDeath())
        fails(other, 1, Disconnected("lost"), 1, 2, 3)
        memory.note_loss(pool, 3, error, 0.0)
        with pytest.raises(RequestKillsWorkers):
            fails(other, 2, Disconnected("lost"), 1, 2, 3)


def test_of_two_requests_that_lose_the_same_two_workers_neither_is_convicted() -> None:
    memory = QueriesOfDeath()
    both = [Suspect(BODY, "r", memory), Suspect(OTHER, "s", memory)]
    for worker_id in (1, 2):
        for suspect in both:
            suspect.sent(worker_id)
        for suspect in both:  # the first of them is counted while the loss of the other one has not come yet
            fails(suspect, worker_id, Disconnected("lost"), 1, 2, 3)
    assert not memory


def test_a_request_that_kills_is_convicted_at_the_third_death_whatever_else_explains_the_first_two() -> None:
    memory = QueriesOfDeath()
    both = [Suspect(BODY, "r", memory), Suspect(OTHER, "s", memory)]
    for worker_id in (1, 2):
        for suspect in both:
            suspect.sent(worker_id)
        for suspect in both:
            fails(suspect, worker_id, Disconnected("lost"), 1, 2, 3)
    both[1].acquit()
    with pytest.raises(RequestKillsWorkers):
        fails(both[0], 3, Disconnected("lost"), 1, 2, 3)


def test_company_that_went_elsewhere_or_has_the_same_content_explains_nothing() -> None:
    memory = QueriesOfDeath()
    suspect, same, moved = Suspect(BODY, "r", memory), Suspect(BODY, "t", memory), Suspect(OTHER, "s", memory)
    for each in (suspect, same, moved):
        fails(each, 1, Disconnected("lost"), 1, 2, 3)
    suspect.sent(2)
    same.sent(2)
    moved.sent(3)
    with pytest.raises(RequestKillsWorkers):
        fails(suspect, 2, Disconnected("lost"), 1, 2, 3)


def test_a_request_that_has_ended_is_no_company() -> None:
    memory = QueriesOfDeath()
    suspect, left = Suspect(BODY, "r", memory), Suspect(OTHER, "s", memory)
    for each in (suspect, left):
        fails(each, 1, Disconnected("lost"), 1, 2)
        each.sent(2)
    left.close()
    with pytest.raises(RequestKillsWorkers):
        fails(suspect, 2, Disconnected("lost"), 1, 2)


def test_an_answer_to_the_same_content_clears_it() -> None:
    memory = QueriesOfDeath()
    memory.remember(content_hash(BODY), 0.0)
    Suspect(BODY, "in flight since before", memory).acquit()
    Suspect(BODY, "r", memory).check(lambda: 1.0)


def test_the_memory_is_bounded_and_forgets_the_oldest() -> None:
    memory = QueriesOfDeath()
    for number in range(CAPACITY + 10):
        memory.remember(number.to_bytes(4, "big"), float(number) / CAPACITY)
    assert len(memory) == CAPACITY
    assert not memory.contains((9).to_bytes(4, "big"), 2.0)
    assert memory.contains((10).to_bytes(4, "big"), 2.0)
