"""Which prompts of a rank are computed now, and which wait for the next pass, as far as first tokens show it. Pure.

An engine computes prompts in passes. What arrives during a pass is admitted when the pass ends, so a new request waits for
the rest of the running pass, and then shares its own pass with everything that waits already. A router sees arrivals and
first tokens only: the first token of a running request shows that its pass has ended, and that the next one, with all that
waited, began at that moment.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import msgspec

__all__ = ["FinishedPasses", "PrefillPass", "pass_count", "pass_squares"]

DEFAULT_PASS_BUDGET: Final = 8192  # tokens of one pass, where a rank does not report its own


class FinishedPasses(msgspec.Struct, frozen=True, gc=False):
    """What was computed up to one first token, and how long that took."""

    passes: int
    tokens: int
    squares: float  # the squares of the tokens of each pass, added up
    seconds: float
    was_idle: bool  # it began with an arrival and not with the end of another pass


class PrefillPass:
    """The running pass of one rank and what waits behind it. Bounded by the active requests."""

    __slots__ = (
        "_finished",
        "budget",
        "running",
        "running_tokens",
        "started_at",
        "waiting",
        "waiting_tokens",
        "was_idle",
    )

    def __init__(self) -> None:
        self.budget = DEFAULT_PASS_BUDGET
        # Request id to the uncached tokens that are left, in the order of arrival: an order that can be taken from in front.
        self.running: OrderedDict[str, int] = OrderedDict()
        self.waiting: dict[str, int] = {}
        self.running_tokens = self.waiting_tokens = 0
        self.started_at = 0.0
        self.was_idle = False
        self._finished: FinishedPasses | None = None

    def set_budget(self, tokens: int | None) -> None:
        """Take how many tokens a pass computes at most; None or less than 1: not known."""
        self.budget = tokens if tokens and tokens > 0 else DEFAULT_PASS_BUDGET

    @property
    def next_is_full(self) -> bool:
        """Whether what waits fills the next pass, so that a new prompt is begun after it."""
        return self.waiting_tokens >= self.budget

    def join(self, request_id: str, tokens: int, now: float) -> None:
        """Count a request with `tokens` uncached tokens that is sent to the rank at `now`."""
        if self.running:
            self.waiting[request_id] = tokens
            self.waiting_tokens += tokens
        else:
            self.running[request_id] = self.running_tokens = tokens
            self.started_at, self.was_idle = now, True

    def complete(self, request_id: str, now: float) -> FinishedPasses | None:
        """Count the first token of a request; return what it shows, if it is the first one of its pass."""
        if request_id not in self.running:
            self.drop(request_id, now)  # its pass was seen to end already, or it overtook the others
            return None
        at = 0
        for known, tokens in self.running.items():
            at += tokens
            if known == request_id:
                break
        passes = max(1, pass_count(at, self.budget))
        done = min(passes * self.budget, self.running_tokens)
        self._finished = FinishedPasses(
            passes, done, pass_squares(done, self.budget), now - self.started_at, self.was_idle
        )
        self._start_next(done, now)
        return self._finished

    def drop(self, request_id: str, now: float) -> None:
        """Take out a request that ended without a first token, if it is counted."""
        if request_id in self.running:
            self.running_tokens -= self.running.pop(request_id)
            if not self.running:
                self._start_next(0, now)
        else:
            self.waiting_tokens -= self.waiting.pop(request_id, 0)

    def take_finished(self) -> FinishedPasses | None:
        """Return what the first token of the last pass showed, once."""
        finished, self._finished = self._finished, None
        return finished

    def _start_next(self, done: int, now: float) -> None:
        """Begin the pass after one that computed the first `done` tokens of those that ran."""
        running = self.running
        self.running_tokens += self.waiting_tokens
        while running:
            request_id, tokens = next(iter(running.items()))
            if tokens > done:
                running[request_id] = tokens - done
                self.running_tokens -= done
                break
            del running[request_id]
            self.running_tokens -= tokens
            done -= tokens
        running.update(self.waiting)
        self.waiting, self.waiting_tokens = {}, 0
        self.started_at, self.was_idle = now, False


def pass_count(tokens: int, budget: int) -> int:
    """Return how many passes compute `tokens` tokens."""
    return -(-tokens // budget)


def pass_squares(tokens: int, budget: int) -> float:
    """Return the squares of the tokens of each pass, added up."""
    whole, rest = divmod(tokens, budget)
    return float(whole * budget * budget + rest * rest)
