"""The load of a role as one number."""

from __future__ import annotations

import math

import pytest

from dynamo.scaling.follower import RoleLoad, Smoothed, saturation_of


@pytest.mark.parametrize(
    ("load", "value", "part"),
    [
        (RoleLoad(2), 0.0, "none"),
        (RoleLoad(2, running=8, limit=16), 0.5, "running"),
        (RoleLoad(2, running=32, limit=16, waiting=16, queue_age_seconds=0.5), 2.0, "running"),
        (RoleLoad(2, running=18, limit=16, waiting=2, queue_age_seconds=0.5), 1.5, "waiting"),
        # A long prefill beside free places is no queue.
        (RoleLoad(2, running=8, limit=16, waiting=1, queue_age_seconds=9.0), 0.5, "running"),
        (RoleLoad(1, running=8, waiting=1, queue_age_seconds=0.9), 0.0, "none"),
        (RoleLoad(1, running=8, waiting=1, queue_age_seconds=3.0), 2.0, "waiting"),
        (RoleLoad(1, running=1, limit=16, kv_blocks=90, total_kv_blocks=100), 0.9, "kv_blocks"),
        (RoleLoad(1, prefill_tokens=4096, prefill_budget=2048), 2.0, "prefill_tokens"),
        (RoleLoad(0, running=1), 1.0, "waiting"),
        (RoleLoad(0), 0.0, "none"),
    ],
)
def test_the_largest_part_counts(load: RoleLoad, value: float, part: str) -> None:
    assert saturation_of(load) == (pytest.approx(value), part)


def test_two_processes_see_the_requests_of_each_and_the_workers_of_both() -> None:
    one = RoleLoad(2, running=5, limit=16, waiting=1, queue_age_seconds=0.2, kv_blocks=30, total_kv_blocks=100)
    other = RoleLoad(2, running=7, limit=16, waiting=2, queue_age_seconds=0.4, kv_blocks=30, total_kv_blocks=100)
    assert one + other == RoleLoad(
        2, running=12, limit=16, waiting=3, queue_age_seconds=0.4, kv_blocks=30, total_kv_blocks=100
    )


def test_the_average_forgets() -> None:
    average = Smoothed(15.0)
    assert average.take(1.0, 100.0) == 1.0
    assert average.take(0.0, 115.0) == pytest.approx(math.exp(-1))
    assert average.take(0.0, 100.0) == pytest.approx(math.exp(-1))  # a clock that was set back moves nothing
