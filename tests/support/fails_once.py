"""Steps of loops that raise when they are first called, and the count of what `dynamo_loop_failures_total` counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import pytest

from dynamo.runtime.base import forever
from support.processes import until


class BrokenSteps:
    """`steps`: "module:Class.method" or "module:function", each of which raises at its first call from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *steps: str) -> None:
        self.calls = dict.fromkeys(steps, 0)
        self._before = forever.FAILURES.count
        monkeypatch.setattr(forever, "FIRST_DELAY_SECONDS", 0.01)
        for step in steps:
            module, _, path = step.partition(":")
            *owners, name = path.split(".")
            owner: Any = import_module(module)
            for each in owners:
                owner = getattr(owner, each)
            monkeypatch.setattr(owner, name, self._broken(step, getattr(owner, name)))

    def _broken(self, step: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def broken(*args: Any, **named: Any) -> Any:
            self.calls[step] += 1
            if self.calls[step] == 1:
                raise RuntimeError(f"{step} fails once")
            return own(*args, **named)

        return broken

    @property
    def counted(self) -> int:
        """How many failures of loops were counted since the steps are broken."""
        return forever.FAILURES.count - self._before

    @property
    def not_again(self) -> list[str]:
        """The steps that were not called again after they raised."""
        return [step for step, count in self.calls.items() if count < 2]

    def have_run(self, times: int) -> bool:
        """Return whether each was called so often."""
        return all(count >= times for count in self.calls.values())

    async def run_again(self, *shown: str) -> None:
        """Wait until each was called again; each failure was counted once, and `/health` names those loops."""
        await until(lambda: not self.not_again, lambda: f"another call of {self.not_again}")
        assert self.counted == len(self.calls)
        assert_shown(shown)


def assert_shown(loops: Sequence[str]) -> None:
    """Check that `/health` shows a failure of each of these loops."""
    troubles = forever.FAILURES.troubles()
    for loop in loops:
        assert f"{loop} failed (RuntimeError) and begins again; the log has the error" in troubles
