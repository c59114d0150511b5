"""A worker that is started beside those that serve: it counts once the frontend sends requests to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final

from dynamo.supervise.process import GaveUp, SupervisedProcess, exit_words

POLL_SECONDS: Final = 0.1
PROGRESS_SECONDS: Final = 10.0
ACCEPT_SECONDS: Final = (
    60.0  # from a worker's registration until the frontend routes to it; it takes a tenth of a second
)


class WorkerRefused(Exception):
    """The frontend will never send requests to this worker; the message gives the reason."""


class NotAccepted(Exception):
    """Why the new worker does not serve."""


class Newcomer:
    """One worker on its way. Spawn `keep`, and await `accepted`."""

    def __init__(self, process: SupervisedProcess, noun: str, *, limit_seconds: float) -> None:
        """`noun`: what the log calls it, as "the replacement". `limit_seconds`: how long it may take to load its model."""
        self.process = process
        self._noun, self._limit_seconds = noun, limit_seconds
        self._is_accepted = self._has_ended = False
        self._end_reason = ""
        self._model: str | None = None  # the model that it registered, once it has
        self._instance_id = 0

    def registered(self, report: Mapping[str, Any]) -> None:
        """Take its report that it has registered; it is not ready before the frontend routes to it."""
        self._model, self._instance_id = report["model"], report["instance_id"]

    async def keep(self) -> None:
        """Keep its process running; before it was accepted, a process that ends is not started again."""
        try:
            await self.process.keep()
        except GaveUp as failure:
            if self._is_accepted:  # a worker like any other by now
                raise
            self._end_reason = f"{self._noun} {exit_words(failure.status, failure.last_lines)}"
        finally:
            self._has_ended = True

    async def accepted(
        self, takes_requests: Callable[[str, int], Awaitable[bool]], log: Callable[[str], None], which: str
    ) -> None:
        """Return once the frontend routes to it. Raises NotAccepted. `which` begins each line of the log."""
        loop = asyncio.get_running_loop()
        began = reported_at = loop.time()
        registered_at: float | None = None
        while not await self._is_routed_to(takes_requests):
            now = loop.time()
            if self._has_ended:
                raise NotAccepted(self._end_reason or f"{self._noun} was stopped")
            if self._model is None and now - began >= self._limit_seconds:
                raise NotAccepted(f"{self._noun} has not loaded within {self._limit_seconds:g} s (--replace-timeout)")
            if self._model is not None:
                registered_at = now if registered_at is None else registered_at
                if now - registered_at >= ACCEPT_SECONDS:
                    raise NotAccepted(f"the frontend has not taken {self._noun} within {ACCEPT_SECONDS:g} s")
            if now - reported_at >= PROGRESS_SECONDS:
                reported_at = now
                missing = f"{self._noun} to load" if self._model is None else f"the frontend to see {self._noun}"
                log(f"{which}: waiting for {missing} ({now - began:.0f} s)")
            await asyncio.sleep(POLL_SECONDS)
        self._is_accepted = True
        self.process.mark_ready()

    async def _is_routed_to(self, takes_requests: Callable[[str, int], Awaitable[bool]]) -> bool:
        if self._model is None or self._has_ended:
            return False
        try:
            return await takes_requests(self._model, self._instance_id)
        except WorkerRefused as refusal:
            raise NotAccepted(f"the frontend refuses {self._noun} ({refusal})") from None


class Newcomers:
    """Brings up new workers beside those that serve. Code that changes which workers there are holds `changing`."""

    def __init__(
        self,
        takes_requests: Callable[[str, int], Awaitable[bool]],
        log: Callable[[str], None],
        *,
        limit_seconds: float,
    ) -> None:
        """`takes_requests(model, instance_id)`: whether the frontend routes to that worker; raises WorkerRefused.

        `limit_seconds`: how long a new worker may take to load its model.
        """
        self._takes_requests, self._log, self._limit_seconds = takes_requests, log, limit_seconds
        self._on_their_way: dict[SupervisedProcess, Newcomer] = {}  # bounded by the workers there may be
        self.changing = asyncio.Lock()

    async def bring_up(
        self,
        process: SupervisedProcess,
        noun: str,
        which: str,
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        """Start a worker and return once it serves; raises NotAccepted where it does not, and it is the caller's to stop.

        `noun` is what the log calls it, `which` begins each line; `spawn(work, name)` runs work until the command ends.
        """
        newcomer = Newcomer(process, noun, limit_seconds=self._limit_seconds)
        self._on_their_way[process] = newcomer
        spawn(newcomer.keep(), f"{process.name}, {noun.removeprefix('the ')}")
        try:
            await newcomer.accepted(self._takes_requests, self._log, which)
        finally:
            del self._on_their_way[process]

    def registered(self, process: SupervisedProcess, report: Mapping[str, Any]) -> bool:
        """Take the report of a worker that has registered; return whether it is one of those on their way."""
        newcomer = self._on_their_way.get(process)
        if newcomer is None:
            return False
        newcomer.registered(report)
        return True
