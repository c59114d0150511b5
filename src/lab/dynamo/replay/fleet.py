"""The workers of a replay that are there now, and those that were. Pure."""

from __future__ import annotations

from typing import Final

from dynamo.replay.setup import ReplaySetup
from dynamo.replay.worker import MakeCore, ReplayWorker, WorkerSpeed

FIRST_WORKER_ID: Final = 1 << 40  # as large as real ids, so that nothing mistakes one for a place in a list


class Fleet:
    """The workers that are there."""

    def __init__(self, setup: ReplaySetup, make_core: MakeCore) -> None:
        self._make_core = make_core
        self._seed = setup.seed
        self._keeps_blocks = bool(setup.event_loss or setup.restarts)
        self._next_id = FIRST_WORKER_ID
        factors = setup.speeds or (1.0,)
        self.speeds = [WorkerSpeed(factors[number % len(factors)]) for number in range(setup.workers)]
        self.lives: list[ReplayWorker] = []  # the lost ones, too
        self.by_id: dict[int, ReplayWorker] = {}
        self.workers = [self._start(number) for number in range(setup.workers)]  # by number, the last life of each

    @property
    def ids(self) -> list[int]:
        return list(self.by_id)

    def _start(self, number: int) -> ReplayWorker:
        worker_id, self._next_id = self._next_id, self._next_id + 0x10001
        core = self._make_core((self._seed << 20) + len(self.lives), self.speeds[number])
        worker = ReplayWorker(number, worker_id, core, keeps_blocks=self._keeps_blocks)
        self.lives.append(worker)
        self.by_id[worker_id] = worker
        return worker

    def remove(self, worker: ReplayWorker) -> None:
        """Lose a worker; a worker that is lost already stays so."""
        self.by_id.pop(worker.worker_id, None)

    def replace(self, lost: ReplayWorker) -> ReplayWorker:
        """Start the next life of a worker, with another id and an empty cache."""
        worker = self.workers[lost.number] = self._start(lost.number)
        return worker
