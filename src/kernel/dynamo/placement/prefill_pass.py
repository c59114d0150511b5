"""Which prompts of a rank are computed now, and which wait for the next pass, as far as first tokens show it. Pure.

An engine computes prompts in passes. What arrives during a pass is admitted when the pass ends, so a new request waits for
the rest of the running pass, and then shares its own pass with everything that waits already. A router sees arrivals and
first tokens only: the first token of a running request shows that its pass has ended, and that the next one, with all that
waited, began at that moment.

An engine also takes into one pass what arrived while it finished a step. That shows in two first tokens at nearly the same
moment: the second prompt was then in the pass that has just ended, and what is known of that pass is corrected.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import msgspec

DEFAULT_PASS_BUDGET: Final = 8192  # tokens of one pass, where a rank does not report its own

SAME_MOMENT_SHARE: Final = 1 / 16
"""A first token that follows the one before it by so little of that one's pass has had no pass of its own. The first tokens of
one pass travel together. A pass has a fixed cost, so the shortest one takes more than that beside the longest."""

SAME_MOMENT_SECONDS: Final = 0.001  # never less than that, as processes and connections are late by some tenths of it


class FinishedPasses(msgspec.Struct, frozen=True, gc=False):
    """What was computed up to one first token, and how long that took."""

    passes: int
    tokens: int
    squares: float  # the squares of the tokens of each pass, added up
    seconds: float
    was_idle: bool  # it began with an arrival and not with the end of another pass
    is_corrected: bool = False  # takes the place of what was reported of the same passes a moment ago

    @property
    def moment_seconds(self) -> float:
        """Return how long after their end a first token may come that belongs to the same pass."""
        each = self.seconds / self.passes
        return max(SAME_MOMENT_SHARE * each, min(SAME_MOMENT_SECONDS, each / 2))


class PrefillPass:
    """The running pass of one rank and what waits behind it. Bounded by the active requests."""

    __slots__ = (
        "_begins_at", "_finished", "_last", "budget", "running", "running_tokens", "started_at", "waiting", "waiting_tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.budget = DEFAULT_PASS_BUDGET
        # Request id to the uncached tokens that are left, in the order of arrival: an order that can be taken from in front.
        self.running: OrderedDict[str, int] = OrderedDict()
        self.waiting: OrderedDict[str, tuple[int, float]] = OrderedDict()  # the same, with when each joined
        self.running_tokens = self.waiting_tokens = 0
        self.started_at = 0.0
        # When the running pass begins, at least; None: when the one before has ended.
        self._begins_at: float | None = None
        self._finished: FinishedPasses | None = None
        self._last: FinishedPasses | None = None  # that ended when those that run began

    def set_budget(self, tokens: int | None) -> None:
        """Take how many tokens a pass computes at most; None or less than 1: not known."""
        self.budget = tokens if tokens and tokens > 0 else DEFAULT_PASS_BUDGET

    @property
    def next_is_full(self) -> bool:
        """Whether what waits fills the next pass, so that a new prompt is begun after it."""
        return self.waiting_tokens >= self.budget

    def join(self, request_id: str, tokens: int, now: float, begins_at: float = 0.0) -> None:
        """Count a request with `tokens` uncached tokens that is sent to the rank at `now`.

        `begins_at`: when its pass begins at a rank that computes no prompt; what comes until then may be in the same pass.
        """
        if self.running:
            self.waiting[request_id] = tokens, now
            self.waiting_tokens += tokens
        else:
            self.running[request_id] = self.running_tokens = tokens
            self.started_at, self._last, self._begins_at = now, None, begins_at

    def complete(self, request_id: str, now: float) -> FinishedPasses | None:
        """Count the first token of a request; return the passes that it shows to have ended, if it is the first one of them."""
        if request_id not in self.running:
            self.drop(request_id, now)  # its pass was seen to end already, or it overtook the others
            return None
        at = 0
        for known, tokens in self.running.items():
            at += tokens
            if known == request_id:
                break
        if self._correct_last(request_id, at, now):
            return None
        passes = max(1, pass_count(at, self.budget))
        self._fill(passes, now)
        done = min(passes * self.budget, self.running_tokens)
        self._finished = self._last = FinishedPasses(
            passes, done, pass_squares(done, self.budget), now - self.started_at, self._begins_at is not None
        )
        self._start_next(done, now)
        return self._finished

    def drop(self, request_id: str, now: float) -> None:
        """Take out a request that ended without a first token, if it is counted."""
        if request_id in self.running:
            self.running_tokens -= self.running.pop(request_id)
            if not self.running:
                self._last = None
                self._start_next(0, now)
        else:
            self.waiting_tokens -= self.waiting.pop(request_id, (0, now))[0]

    def take_finished(self) -> FinishedPasses | None:
        """Return what the first token of the last pass showed, once."""
        finished, self._finished = self._finished, None
        return finished

    def _correct_last(self, request_id: str, at: int, now: float) -> bool:
        """Count a request, and all before it, `at` tokens together, with the passes that ended last; False: it had its own."""
        last = self._last
        if last is None or now - self.started_at > last.moment_seconds or last.tokens + at > last.passes * self.budget:
            return False
        tokens = last.tokens + at
        self._finished = self._last = msgspec.structs.replace(
            last, tokens=tokens, squares=pass_squares(tokens, self.budget), is_corrected=True
        )
        self.running_tokens -= at
        done = None
        while done != request_id:
            done, _ = self.running.popitem(last=False)
        if not self.running and self.waiting:  # they came after that pass had ended, to a rank without prompts
            self._last = None
            self._start_next(0, now)
            self._begins_at = now
        return True

    def _fill(self, passes: int, now: float) -> None:
        """Count what waited when the last of some passes began with it, where that filled it and a prompt goes on in the next.

        What fitted into it whole need not be guessed: its first tokens come with that of the pass.
        """
        began = max(self.started_at, self._begins_at or 0.0)
        begun_at = began + (now - began) * (passes - 1) / passes
        filled, inside, room = self.running_tokens, 0, passes * self.budget
        for tokens, joined_at in self.waiting.values():
            if filled > room or joined_at >= begun_at:
                break
            filled, inside = filled + tokens, inside + 1
        if filled > room:
            for _ in range(inside):
                request_id, (tokens, _) = self.waiting.popitem(last=False)
                self.running[request_id] = tokens
                self.waiting_tokens -= tokens
            self.running_tokens = filled

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
        running.update((request_id, tokens) for request_id, (tokens, _) in self.waiting.items())
        self.waiting, self.waiting_tokens = OrderedDict(), 0
        self.started_at, self._begins_at = now, None


def pass_count(tokens: int, budget: int) -> int:
    """Return how many passes compute `tokens` tokens."""
    return -(-tokens // budget)


def pass_squares(tokens: int, budget: int) -> float:
    """Return the squares of the tokens of each pass, added up."""
    whole, rest = divmod(tokens, budget)
    return float(whole * budget * budget + rest * rest)
