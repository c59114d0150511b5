"""The scheduler of sglang: prompts are admitted against the memory that running requests will still need.

Its radix cache works by pages (a page is a block here): complete pages are entered after each prompt and token, and the
least recently used leaves are evicted, which is the order of `PrefixPool`.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from dynamo.scheduling.core import SchedulerCore
from dynamo.scheduling.options import PassTiming, SchedulerOptions
from dynamo.scheduling.request import ScheduledRequest

FIRST_RATIO: Final = 0.7  # times the conservativeness: the part of the possible output that is reserved at first
LEAST_RATIO: Final = 0.14  # of the first ratio
RATIO_STEPS: Final = 600  # passes from the first to the least ratio
LPM_MAX_WAITING: Final = 128  # above it the queue is not sorted
LPM_SHARED_TOKENS: Final = 32  # a prefix this long that several wait for is computed by one of them first


class SglangCore(SchedulerCore):
    """Decodes all running requests, and admits prompts while slots, budgets and memory last."""

    def __init__(self, options: SchedulerOptions, timing: PassTiming, *, seed: int = 0) -> None:
        super().__init__(options, timing, seed=seed)
        self._first_ratio = FIRST_RATIO * options.sglang.schedule_conservativeness
        self._ratio = self._first_ratio

    def _schedule(self, now_ms: float) -> None:
        least = LEAST_RATIO * self._first_ratio
        self._ratio = max(least, self._ratio - (self._first_ratio - least) / RATIO_STEPS)
        if self._schedule_decodes():
            self._ratio = self._first_ratio
        elif self.waiting:
            if self.options.sglang.schedule_policy == "lpm" and 1 < len(self.waiting) <= LPM_MAX_WAITING:
                self._sort_by_prefix()
            self._admit(now_ms)

    # -- decode --------------------------------------------------------------------------------------------------------

    def _schedule_decodes(self) -> bool:
        """Plan a token for each running request; return whether pages were too few for all."""
        options, running = self.options, self.running
        block_size, drafts = options.block_size, len(options.accept_rates)
        needed = 0
        for request in running:
            upto = request.known if not drafts else min(request.known + drafts, request.last)
            if (missing := upto - request.held * block_size) > 0:
                needed += -(-missing // block_size)
        was_short = False
        while needed > self.pool.available:
            was_short = True
            if len(running) > 1:
                victim = min(running, key=_output_tokens)
                running.remove(victim)
                upto = min(victim.known + drafts, victim.last)
                needed -= max(0, -(-upto // block_size) - victim.held)
                self._preempt(victim)
            else:
                self._reclaim()
        for request in running:
            upto = request.known if not drafts else min(request.known + drafts, request.last)
            if upto > request.held * block_size:
                self._grow(request, upto)
            request.scheduled = 1
        self._planned.extend(running)
        return was_short

    def _reclaim(self) -> None:
        """Take the pages of prompts back that are computed in part and wait."""
        for request in self.waiting:
            self._release(request)
            request.computed = 0

    # -- admission -----------------------------------------------------------------------------------------------------

    def _admit(self, now_ms: float) -> None:
        options, waiting = self.options, self.waiting
        block_size, clip = options.block_size, options.sglang.clip_max_new_tokens
        budget = min(options.sglang.max_prefill_tokens, options.sglang.chunked_prefill_size)
        reserved = self._ratio * sum(min(request.last - request.known, clip) for request in self.running)
        while waiting and len(self.running) < options.max_num_seqs and budget > 0:
            request = waiting[0]
            found, active = (request.computed // block_size, 0) if request.held else self._matched(request)
            missing = request.known - found * block_size
            computes_prompts = self._computes(request)
            whole = missing <= budget or not computes_prompts
            count = missing if whole else budget // block_size * block_size
            if not count:
                return
            charge = -(-count // block_size) * block_size
            future = min(request.last - request.known, clip) if whole else 0
            room = (self.pool.available - (0 if request.held else found - active)) * block_size - reserved
            if room <= charge + future:
                if self._planned:
                    return
                waiting.popleft()
                self._reclaim()  # it is alone, and everything is its
                waiting.appendleft(request)
            if not request.held:
                self._pin_prefix(request, found, now_ms)
            if not self._grow(request, request.computed + count):
                raise RuntimeError(f"request {request.request_id} was admitted without room for its pages")
            request.scheduled = count
            self._planned.append(request)
            if not whole:
                return  # the rest of it stays at the head of the queue
            waiting.popleft()
            self.running.append(request)
            reserved += future
            budget -= charge if computes_prompts else 0

    def _matched(self, request: ScheduledRequest) -> tuple[int, int]:
        limit = self._reusable(request)
        return self.pool.match(request.identities, limit) if limit else (0, 0)

    def _sort_by_prefix(self) -> None:
        """Put the longest cached prefix first, and a request that waits for another one's prefix last."""
        block_size = self.options.block_size
        shared = -(-LPM_SHARED_TOKENS // block_size) - 1  # number of the page in which the shared tokens end
        begun = [request for request in self.waiting if request.held]
        ahead: list[tuple[int, ScheduledRequest]] = []
        behind: list[ScheduledRequest] = []
        seen: set[int] = set()
        for request in self.waiting:
            if request.held:
                continue
            cached = self._matched(request)[0] * block_size
            if cached <= LPM_SHARED_TOKENS and len(request.identities) > shared:
                identity = request.identities[shared]
                if identity in seen:
                    behind.append(request)
                    continue
                seen.add(identity)
            ahead.append((cached, request))
        ahead.sort(key=_cached_first)
        self.waiting = deque([*begun, *(request for _, request in ahead), *behind])


def _output_tokens(request: ScheduledRequest) -> int:
    return request.known - request.prompt_tokens


def _cached_first(entry: tuple[int, ScheduledRequest]) -> int:
    return -entry[0]
