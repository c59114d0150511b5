"""The rolling restart: every worker is replaced, one after the other, and nobody who asks the model notices.

A replacement comes first and the old worker leaves afterwards, so the model never has fewer workers than it was given.
The first replacement that does not get as far as being asked by the frontend ends the restart: a version that does not
work costs nothing but a line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from dynamo.cli.readiness import POLL_SECONDS, Address, WorkerRefused, takes_requests
from dynamo.supervise.backoff import RestartPolicy
from dynamo.supervise.process import GaveUp, Place, exit_words

__all__ = ["RollingRestart", "Workforce"]

PROGRESS_SECONDS: Final = 10.0
ACCEPT_SECONDS: Final = 60.0  # from a worker's registration until the frontend asks it; it takes a tenth of a second


class NotReplaced(Exception):
    """Why a worker keeps its place."""


class Workforce(Protocol):
    """Who starts workers, and knows those there are."""

    @property
    def workers(self) -> list[Place]:
        """Those that serve, in their order; a replaced one is replaced in here."""

    def hire(self, leaving: Place, policy: RestartPolicy) -> Place:
        """A place for the replacement of `leaving`, not filled yet. Whatever ends the command ends it as well."""

    def retire(self, place: Place) -> None:
        """A place that was stopped is no longer anybody's business."""

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run it until the command ends."""


@dataclass(slots=True)
class _Applicant:
    """A replacement on its way."""

    place: Place
    is_accepted: bool = False
    has_ended: bool = False
    why: str = ""  # it ended
    model: str | None = None  # what it registered, once it has
    instance_id: int = 0


class RollingRestart:
    """`request` at any time; `run` beside everything else."""

    def __init__(
        self, workforce: Workforce, address: Address, say: Callable[[str], None], *, limit_seconds: float
    ) -> None:
        """`limit_seconds`: how long a replacement may take to load its model."""
        self._workforce, self._address, self._say = workforce, address, say
        self._limit_seconds = limit_seconds
        self._requested = asyncio.Event()
        self._is_running = False
        self._applicant: _Applicant | None = None

    def request(self, reason: str) -> None:
        """Restart all workers; during a restart: once more after it, however often this is called."""
        if self._is_running:
            self._say(f"{reason}: one restart more follows the one under way")
        else:
            self._say(f"{reason}: replacing {', '.join(worker.name for worker in self._workforce.workers)}")
        self._requested.set()

    def heard(self, place: Place, report: Mapping[str, Any]) -> bool:
        """A worker has registered; whether it is the replacement, which is not ready before the frontend says so."""
        applicant = self._applicant
        if applicant is None or applicant.place is not place:
            return False
        applicant.model, applicant.instance_id = report["model"], report["instance_id"]
        return True

    async def run(self) -> None:
        """Wait for requests, and do what they ask. Never returns."""
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
        count = len(self._workforce.workers)
        for index in range(count):
            if not await self._replace(index):
                return
        seconds = asyncio.get_running_loop().time() - began
        which = "the worker was" if count == 1 else f"all {count} workers were"
        self._say(f"{which} replaced in {seconds:.1f} s; the frontend stayed as it was")

    async def _replace(self, index: int) -> bool:
        """Replace one worker; whether it was possible."""
        workforce, loop = self._workforce, asyncio.get_running_loop()
        old, count, began = workforce.workers[index], len(workforce.workers), loop.time()
        which = f"worker {index + 1} of {count}"
        # One attempt: a replacement that dies before it serves would die again, and nobody depends on it.
        new = workforce.hire(old, RestartPolicy(early_failures=1))
        applicant = self._applicant = _Applicant(new)
        workforce.spawn(self._keep(applicant), f"{new.name}, replacement")
        try:
            await self._until_accepted(applicant, which)
        except NotReplaced as why:
            self._say(
                f"{which}: {why}; {old.name} (pid {_pid(old)}) stays, and the restart ends here ({index} replaced)"
            )
            await new.stop()
            workforce.retire(new)
            return False
        finally:
            self._applicant = None
        applicant.is_accepted = True
        new.mark_ready()
        workforce.workers[index] = new
        pids = f"pid {_pid(old)} -> {_pid(new)}"
        await old.stop()
        workforce.retire(old)
        killed = "; the old one did not end in time and was killed" if old.was_killed else ""
        self._say(f"{which}: replaced in {loop.time() - began:.1f} s ({pids}){killed}")
        return True

    async def _keep(self, applicant: _Applicant) -> None:
        try:
            await applicant.place.keep()
        except (GaveUp, OSError) as failure:
            if applicant.is_accepted:  # a worker like any other by now
                raise
            applicant.why = _reason(failure)
        finally:
            applicant.has_ended = True

    async def _until_accepted(self, applicant: _Applicant, which: str) -> None:
        """Return once the frontend sends requests there. Raises NotReplaced."""
        loop = asyncio.get_running_loop()
        began = said = loop.time()
        registered_at: float | None = None
        while not await self._is_accepted(applicant):
            now = loop.time()
            if applicant.has_ended:
                raise NotReplaced(applicant.why or "the replacement was stopped")
            if applicant.model is None and now - began >= self._limit_seconds:
                raise NotReplaced(
                    f"the replacement has not loaded within {self._limit_seconds:g} s (--replace-timeout)"
                )
            if applicant.model is not None:
                registered_at = now if registered_at is None else registered_at
                if now - registered_at >= ACCEPT_SECONDS:
                    raise NotReplaced(f"the frontend has not taken the replacement within {ACCEPT_SECONDS:g} s")
            if now - said >= PROGRESS_SECONDS:
                said = now
                missing = (
                    "the replacement to load" if applicant.model is None else "the frontend to see the replacement"
                )
                self._say(f"{which}: waiting for {missing} ({now - began:.0f} s)")
            await asyncio.sleep(POLL_SECONDS)

    async def _is_accepted(self, applicant: _Applicant) -> bool:
        if applicant.model is None or applicant.has_ended:
            return False
        try:
            return await takes_requests(self._address, applicant.model, applicant.instance_id)
        except WorkerRefused as refusal:
            raise NotReplaced(f"the frontend refuses the replacement ({refusal})") from None


def _reason(failure: GaveUp | OSError) -> str:
    if isinstance(failure, GaveUp):
        return f"the replacement {exit_words(failure.status)}"
    return f"no replacement can be started ({failure.strerror or failure})"


def _pid(place: Place) -> str:
    return str(place.process.pid) if place.process is not None else "-"
