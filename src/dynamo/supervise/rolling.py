"""The rolling restart: every worker is replaced, one after the other, without a lost request.

A replacement starts first and the old worker leaves afterwards, so the model never has fewer workers than it was given.
The first replacement that the frontend does not accept ends the restart: a version that does not work costs nothing but
a line in the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from dynamo.supervise.backoff import RestartPolicy
from dynamo.supervise.process import GaveUp, SupervisedProcess, exit_words

__all__ = ["RollingRestart", "WorkerPool", "WorkerRefused"]

POLL_SECONDS: Final = 0.1
PROGRESS_SECONDS: Final = 10.0
ACCEPT_SECONDS: Final = (
    60.0  # from a worker's registration until the frontend routes to it; it takes a tenth of a second
)


class WorkerRefused(Exception):
    """The frontend will never send requests to this worker; the message gives the reason."""


class NotReplaced(Exception):
    """Why the old worker stays."""


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


@dataclass(slots=True)
class _Replacement:
    """A replacement on its way."""

    process: SupervisedProcess
    is_accepted: bool = False
    has_ended: bool = False
    end_reason: str = ""
    model: str | None = None  # the model that it registered, once it has
    instance_id: int = 0


class RollingRestart:
    """`request` at any time; `run` beside everything else."""

    def __init__(
        self,
        pool: WorkerPool,
        takes_requests: Callable[[str, int], Awaitable[bool]],
        log: Callable[[str], None],
        *,
        limit_seconds: float,
    ) -> None:
        """`takes_requests(model, instance_id)`: whether the frontend routes to that worker; raises WorkerRefused.

        `limit_seconds`: how long a replacement may take to load its model.
        """
        self._pool, self._takes_requests, self._log = pool, takes_requests, log
        self._limit_seconds = limit_seconds
        self._requested = asyncio.Event()
        self._is_running = False
        self._replacement: _Replacement | None = None

    def request(self, reason: str) -> None:
        """Restart all workers; during a restart: once more after it, however often this is called."""
        if self._is_running:
            self._log(f"{reason}: one restart more follows the one under way")
        else:
            self._log(f"{reason}: replacing {', '.join(worker.name for worker in self._pool.workers)}")
        self._requested.set()

    def on_registered(self, worker: SupervisedProcess, report: Mapping[str, Any]) -> bool:
        """Take the report of a worker that has registered, and return whether it is the replacement.

        The replacement is not ready before the frontend routes to it.
        """
        replacement = self._replacement
        if replacement is None or replacement.process is not worker:
            return False
        replacement.model, replacement.instance_id = report["model"], report["instance_id"]
        return True

    async def run(self) -> None:
        """Carry out one request after the other. Never returns."""
        while True:
            await self._requested.wait()
            self._requested.clear()
            self._is_running = True
            try:
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
        replacement = self._replacement = _Replacement(new)
        pool.spawn(self._keep(replacement), f"{new.name}, replacement")
        try:
            await self._until_accepted(replacement, which)
        except NotReplaced as reason:
            self._log(
                f"{which}: {reason}; {old.name} (pid {_pid(old)}) stays, and the restart ends here ({index} replaced)"
            )
            await new.stop()
            pool.remove(new)
            return False
        finally:
            self._replacement = None
        replacement.is_accepted = True
        new.mark_ready()
        pool.workers[index] = new
        pids = f"pid {_pid(old)} -> {_pid(new)}"
        await old.stop()
        pool.remove(old)
        killed = "; the old one did not end in time and was killed" if old.was_killed else ""
        self._log(f"{which}: replaced in {loop.time() - began:.1f} s ({pids}){killed}")
        return True

    async def _keep(self, replacement: _Replacement) -> None:
        try:
            await replacement.process.keep()
        except (GaveUp, OSError) as failure:
            if replacement.is_accepted:  # a worker like any other by now
                raise
            replacement.end_reason = _reason(failure)
        finally:
            replacement.has_ended = True

    async def _until_accepted(self, replacement: _Replacement, which: str) -> None:
        """Return once the frontend routes to the replacement. Raises NotReplaced."""
        loop = asyncio.get_running_loop()
        began = reported_at = loop.time()
        registered_at: float | None = None
        while not await self._is_accepted(replacement):
            now = loop.time()
            if replacement.has_ended:
                raise NotReplaced(replacement.end_reason or "the replacement was stopped")
            if replacement.model is None and now - began >= self._limit_seconds:
                raise NotReplaced(
                    f"the replacement has not loaded within {self._limit_seconds:g} s (--replace-timeout)"
                )
            if replacement.model is not None:
                registered_at = now if registered_at is None else registered_at
                if now - registered_at >= ACCEPT_SECONDS:
                    raise NotReplaced(f"the frontend has not taken the replacement within {ACCEPT_SECONDS:g} s")
            if now - reported_at >= PROGRESS_SECONDS:
                reported_at = now
                missing = (
                    "the replacement to load" if replacement.model is None else "the frontend to see the replacement"
                )
                self._log(f"{which}: waiting for {missing} ({now - began:.0f} s)")
            await asyncio.sleep(POLL_SECONDS)

    async def _is_accepted(self, replacement: _Replacement) -> bool:
        if replacement.model is None or replacement.has_ended:
            return False
        try:
            return await self._takes_requests(replacement.model, replacement.instance_id)
        except WorkerRefused as refusal:
            raise NotReplaced(f"the frontend refuses the replacement ({refusal})") from None


def _reason(failure: GaveUp | OSError) -> str:
    if isinstance(failure, GaveUp):
        return f"the replacement {exit_words(failure.status)}"
    return f"no replacement can be started ({failure.strerror or failure})"


def _pid(worker: SupervisedProcess) -> str:
    return str(worker.process.pid) if worker.process is not None else "-"
