"""Watches the choices that run for progress, and moves those that have none. One timer for the whole frontend.

It looks at numbers that are there anyway (how many tokens a choice has), so a token costs nothing, and nor does a wake-up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

from dynamo.errors import DynamoException, ResponseTimeout
from dynamo.frontend.pace import Finding, Pace, Patience, judge

__all__ = ["StallWatch", "Watched"]

logger = logging.getLogger(__name__)

MAX_FROZEN: Final = 1024  # workers remembered; the oldest is forgotten


class Watched(Protocol):
    """What is needed of a choice."""

    is_reading: bool  # waiting for its worker, and not for its client

    @property
    def request_id(self) -> str: ...

    @property
    def tokens(self) -> int:
        """How many there were so far."""

    @property
    def attempts(self) -> int:
        """How many workers were asked so far."""

    @property
    def instance_id(self) -> int | None:
        """Who is being asked; None between two workers."""

    def give_up(self, error: DynamoException, *, blames_worker: bool, is_last: bool) -> bool:
        """Leave the worker with `error`; whether that was done. Not `is_last`: only if another one may go on."""


class StallWatch:
    """All running choices of one frontend."""

    def __init__(self, patience: Patience, on_stall: Callable[[Finding], None]) -> None:
        """`on_stall`: for the metrics; once for each choice that is moved or ended."""
        self.patience = patience
        self._on_stall = on_stall
        self._paces: dict[Watched, Pace] = {}  # bounded by the requests in flight
        self._frozen: dict[int, None] = {}  # found so, and no token came from there since
        self._timer: asyncio.TimerHandle | None = None

    def add(self, choice: Watched) -> None:
        """Watch a choice that begins."""
        if self.patience.is_on:
            self._paces[choice] = Pace()
            if self._timer is None:
                self._set_timer()

    def remove(self, choice: Watched) -> None:
        """It has ended; idempotent."""
        self._paces.pop(choice, None)
        if not self._paces:
            self.close()

    def close(self) -> None:
        """Stop the timer; it starts again with the next choice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def __len__(self) -> int:
        return len(self._paces)

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.patience.beat_seconds, self._beat)

    def _beat(self) -> None:
        self._set_timer()
        frozen = self._frozen
        by_worker: dict[int, list[Pace]] = {}
        choices: dict[Pace, Watched] = {}
        for choice, pace in self._paces.items():
            instance_id = choice.instance_id
            has_news = pace.beat(choice.tokens, choice.attempts, choice.is_reading)
            if instance_id is None:
                continue
            if has_news and frozen:
                frozen.pop(instance_id, None)
            if choice.is_reading:
                choices[pace] = choice
                by_worker.setdefault(instance_id, []).append(pace)
        for instance_id, paces in by_worker.items():
            for pace, finding, is_last in judge(paces, self.patience, was_frozen=instance_id in frozen):
                self._give_up(choices[pace], instance_id, pace, finding, is_last)

    def _give_up(self, choice: Watched, instance_id: int, pace: Pace, finding: Finding, is_last: bool) -> None:
        seconds = pace.silence * self.patience.beat_seconds
        if finding is Finding.FROZEN:
            if len(self._frozen) >= MAX_FROZEN:
                self._frozen.pop(next(iter(self._frozen)))
            self._frozen[instance_id] = None
        error = ResponseTimeout(f"no token for {seconds:.1f} s: {finding.value}")
        if choice.give_up(error, blames_worker=finding.blames_worker, is_last=is_last):
            pace.silence = 0
            self._on_stall(finding)
            logger.warning(
                "request %s: no token from worker %x for %.1f s: %s",
                choice.request_id,
                instance_id,
                seconds,
                finding.value,
            )
