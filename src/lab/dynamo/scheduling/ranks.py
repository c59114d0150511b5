"""The data-parallel ranks of one worker, which take their passes in step."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.errors import InvalidArgument
from dynamo.scheduling.core import PassPlan, PassResult, SchedulerCore


class RankGroup:
    """Several cores behind one barrier: a pass lasts as long as that of the slowest rank, and an idle rank waits, too."""

    def __init__(self, cores: Sequence[SchedulerCore]) -> None:
        if not cores:
            raise InvalidArgument("a worker needs at least one rank")
        self.cores = tuple(cores)
        self._busy: list[int] = []

    @property
    def has_work(self) -> bool:
        """Whether a pass would do anything."""
        return any(core.has_work for core in self.cores)

    def begin_pass(self, now_ms: float) -> list[tuple[int, PassPlan]]:
        """Begin a pass of every rank with work: (rank, plan). Empty: none has any. `pass_duration` is how long it lasts."""
        plans = [
            (rank, plan)
            for rank, core in enumerate(self.cores)
            if core.has_work and (plan := core.begin_pass(now_ms)) is not None
        ]
        self._busy = [rank for rank, _ in plans]
        return plans

    def end_pass(self) -> list[tuple[int, PassResult]]:
        """End the pass of every rank that took part: (rank, result)."""
        busy, self._busy = self._busy, []
        return [(rank, self.cores[rank].end_pass()) for rank in busy]


def pass_duration(plans: Sequence[tuple[int, PassPlan]]) -> float:
    """Return how long a pass of several ranks lasts, in ms."""
    return max((plan.duration_ms for _, plan in plans), default=0.0)
