"""The rolling restart: every worker is replaced, one after the other, without a lost request.

A replacement starts first and the old worker leaves afterwards, so the model never has fewer workers than it was given.
The first replacement that the frontend does not accept ends the restart: a version that does not work costs nothing but
a line in the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from dynamo.supervise.backoff import RestartPolicy
from dynamo.supervise.newcomer import Newcomers, NotAccepted
from dynamo.supervise.process import SupervisedProcess


class WorkerPool(Protocol):
    """The running workers, and the way to start more."""

    @property
    def workers(self) -> list[SupervisedProcess]:
        """The workers that serve, in their order. The restart puts each replacement in the old worker's position."""

    def add_replacement(self, leaving: SupervisedProcess, policy: RestartPolicy) -> SupervisedProcess:
        """Return the process that replaces `leaving`, not started yet. Whatever ends the command ends it as well."""

    def remove(self, worker: SupervisedProcess) -> None:
        """Forget a worker that was stopped."""

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` until the command ends."""


class RollingRestart:
    """`request` at any time; `run` beside everything else."""

    def __init__(
        self,
        pool: WorkerPool,
        newcomers: Newcomers,
        log: Callable[[str], None],
    ) -> None:
        self._pool, self._newcomers, self._log = pool, newcomers, log
        self._requested = asyncio.Event()
        self._is_running = False

    def request(self, reason: str) -> None:
        """Restart all workers; during a restart: once more after it, however often this is called."""
        if self._is_running:
            self._log(f"{reason}: one restart more follows the one under way")
        else:
            self._log(f"{reason}: replacing {', '.join(worker.name for worker in self._pool.workers)}")
        self._requested.set()

    async def run(self) -> None:
        """Carry out one request after the other. Never returns."""
        while True:
            await self._requested.wait()
            self._requested.clear()
            self._is_running = True
            try:
                async with self._newcomers.changing:
                    await self._replace_all()
            finally:
                self._is_running = False

    async def _replace_all(self) -> None:
        began = asyncio.get_running_loop().time()
        count = len(self._pool.workers)
        for index in range(count):
            if not await self._replace(index):
                return
        seconds = asyncio.get_running_loop().time() - began
        which = "the worker was" if count == 1 else f"all {count} workers were"
        self._log(f"{which} replaced in {seconds:.1f} s; the frontend stayed as it was")

    async def _replace(self, index: int) -> bool:
        """Replace one worker; return whether that was possible."""
        pool, loop = self._pool, asyncio.get_running_loop()
        old, count, began = pool.workers[index], len(pool.workers), loop.time()
        which = f"worker {index + 1} of {count}"
        # One attempt: a replacement that dies before it serves would die again, and no request depends on it.
        new = pool.add_replacement(old, RestartPolicy(early_failures=1))
        try:
            await self._newcomers.bring_up(new, "the replacement", which, pool.spawn)
        except NotAccepted as reason:
            self._log(
                f"{which}: {reason}; {old.name} (pid {_pid(old)}) stays, and the restart ends here ({index} replaced)"
            )
            await new.stop()
            pool.remove(new)
            return False
        pool.workers[index] = new
        pids = f"pid {_pid(old)} -> {_pid(new)}"
        await old.stop()
        pool.remove(old)
        killed = "; the old one did not end in time and was killed" if old.was_killed else ""
        self._log(f"{which}: replaced in {loop.time() - began:.1f} s ({pids}){killed}")
        return True


def _pid(worker: SupervisedProcess) -> str:
    return str(worker.process.pid) if worker.process is not None else "-"
