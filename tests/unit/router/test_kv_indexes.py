"""Events and prediction taken together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from dynamo.kv.overlap import Overlap, WorkerRank
from dynamo.router.kv.indexes import KvIndexes

A, B = WorkerRank(1), WorkerRank(2, 3)


class Fixed:
    def __init__(self, found: Mapping[WorkerRank, Overlap]) -> None:
        self._found = found

    def find(self, sequence: Sequence[int], now: float = 0.0) -> Mapping[WorkerRank, Overlap]:
        return self._found


@pytest.mark.parametrize(
    ("known", "expected", "both"),
    [
        (Overlap(3, 2, 1), Overlap(2), Overlap(3, 2, 1)),
        (Overlap(3, 2, 1), Overlap(4), Overlap(4, 1, 1)),
        (Overlap(3, 2, 1), Overlap(6), Overlap(6)),
        (Overlap(3, 2, 4), Overlap(6), Overlap(6, 0, 3)),
        (Overlap(3), Overlap(9), Overlap(9)),
    ],
)
def test_of_events_and_prediction_each_rank_has_the_longer_match(
    known: Overlap, expected: Overlap, both: Overlap
) -> None:
    index = KvIndexes(Fixed({A: known, B: Overlap(1)}), Fixed({A: expected, WorkerRank(9): Overlap(2)}))
    assert index.find([1], 0.0) == {A: both, B: Overlap(1), WorkerRank(9): Overlap(2)}
