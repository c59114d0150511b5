"""One simulated engine rank without a clock: requests in, passes out, each with its duration.

    core = make_core(SchedulerOptions(num_gpu_blocks=4096, block_size=16), PolynomialTiming())
    core.submit(ScheduledRequest("a", prompt_tokens=562, max_output=4), now_ms=0.0)
    while (plan := core.begin_pass(now_ms)) is not None:
        now_ms += plan.duration_ms           # or wait for as long
        result = core.end_pass()             # what the pass brought is seen now, and not before

A pass decides at its beginning; a request that is submitted while a pass runs is considered when the next one begins.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from dynamo.scheduling.block_changes import BlockRun, EvictedBlocks
from dynamo.scheduling.host_tier import HostTier
from dynamo.scheduling.options import PassTiming, SchedulerOptions
from dynamo.scheduling.pool import PrefixPool
from dynamo.scheduling.request import ScheduledRequest

_NEVER: Final = 1 << 62  # tokens


@dataclass(slots=True)
class PassPlan:
    """What one pass will do."""

    duration_ms: float
    """How long it takes, speedups included; the slowest rank counts where ranks take their passes in step."""
    prefill_ms: float
    decode_ms: float
    prefill_requests: int
    prefill_tokens: int
    """Tokens that it computes for prompts."""
    decode_requests: int
    decode_context: int
    """Tokens of context of the requests that decode."""


@dataclass(slots=True, eq=False)
class PassResult:
    """What one pass brought."""

    emitted: list[ScheduledRequest] = field(default_factory=list)
    """Requests that got tokens: `burst` each, 1 without speculation; the last ones of `tail` where it is kept."""
    first: list[ScheduledRequest] = field(default_factory=list)
    """Those of them whose prompt this pass completed for the first time."""
    finished: list[ScheduledRequest] = field(default_factory=list)
    """Those of them that are complete; they hold nothing any more."""
    rejected: list[ScheduledRequest] = field(default_factory=list)
    """Requests that can never be served here."""
    events: list[EvictedBlocks | BlockRun] = field(default_factory=list)
    """Changes of the cache in order. Read a run before the next pass begins."""


class SchedulerCore(ABC):
    """What the schedulers share; `_schedule` is theirs. Not thread-safe."""

    def __init__(self, options: SchedulerOptions, timing: PassTiming, *, seed: int = 0) -> None:
        """`seed` decides which drafts are accepted, and the identities of output blocks of requests without tokens."""
        self.options = options
        self.pool = PrefixPool(options.num_gpu_blocks)
        self.host = None if options.host is None else HostTier(options.host, options.speedup_ratio)
        self.waiting: deque[ScheduledRequest] = deque()
        self.running: list[ScheduledRequest] = []
        self.preemptions = 0
        self._timing = timing
        self._chance = random.Random(seed)
        self._planned: list[ScheduledRequest] = []
        self._in_pass = False
        self._rejected: list[ScheduledRequest] = []
        self._cancelled: list[ScheduledRequest] = []

    # -- in ------------------------------------------------------------------------------------------------------------

    def submit(self, request: ScheduledRequest, now_ms: float) -> None:
        """Queue a request, unless it was cancelled before. One that can never be served is in `rejected` of the next pass."""
        if request.is_over:
            return
        request.submitted_ms = now_ms
        room = self.output_room(request.prompt_tokens)
        if room <= 0:
            request.is_over = True
            self._rejected.append(request)
            return
        request.max_output = min(1 if self.options.role == "prefill" else request.max_output, room)
        request.last = request.prompt_tokens + request.max_output
        self.waiting.append(request)

    def output_room(self, prompt_tokens: int) -> int:
        """Return how many tokens can follow such a prompt; none, and it is rejected."""
        options = self.options
        longest = options.capacity_tokens
        if options.max_model_len is not None:
            longest = min(longest, options.max_model_len)
        return longest - prompt_tokens

    def cancel(self, request: ScheduledRequest) -> None:
        """End a request; what it holds is free at the end of the pass that runs, or now. Idempotent."""
        if request.is_over:
            return
        request.is_over = True
        self._cancelled.append(request)
        if not self._in_pass:
            self._drop_cancelled()

    @property
    def has_work(self) -> bool:
        """Whether a pass would do anything."""
        return bool(self.running or self.waiting or self._rejected or (self.host is not None and self.host.loads))

    # -- one pass --------------------------------------------------------------------------------------------------------

    def begin_pass(self, now_ms: float) -> PassPlan | None:
        """Decide on the next pass; None when there is nothing to do. `end_pass` must follow before the next one."""
        if self._in_pass:
            raise RuntimeError("begin_pass() before end_pass() of the pass before")
        if not self.has_work:
            return None
        self._in_pass = True
        host = self.host
        if host is None:
            self._schedule(now_ms)
            return self._measured()
        self.running += host.begin_pass(now_ms)
        self._schedule(now_ms)
        plan = self._measured()
        if not self._planned:
            plan.duration_ms = max(plan.duration_ms, host.wait_ms(now_ms))
        host.pass_ends_ms = now_ms + plan.duration_ms
        return plan

    @abstractmethod
    def _schedule(self, now_ms: float) -> None:
        """Fill `_planned` with the requests of this pass, each with its `scheduled` tokens and the blocks they need."""

    def _measured(self) -> PassPlan:
        """Sum up what was planned, and apply the timing model."""
        options, timing = self.options, self._timing
        prefills = inputs = prefixes = decodes = context = 0
        is_decode = options.role == "decode"
        for request in self._planned:
            known, count = request.known, request.scheduled
            if count == 1 and known - request.computed == 1 and known > request.prompt_tokens:
                decodes += 1
                context += known
            elif count and not (is_decode and request.prompt_arrives):
                prefills += 1
                inputs += request.computed + count
                prefixes += request.computed
        prefill_ms = decode_ms = 0.0
        speedup = options.speedup_ratio
        if speedup:
            if prefills:
                prefill_ms = timing.prefill_ms(prefills, inputs // prefills, prefixes // prefills) / speedup
            if decodes and options.role != "prefill" and options.decode_speedup_ratio:
                decode_ms = timing.decode_ms(context, context // decodes, options.capacity_tokens)
                decode_ms /= speedup * options.decode_speedup_ratio
        return PassPlan(prefill_ms + decode_ms, prefill_ms, decode_ms, prefills, inputs - prefixes, decodes, context)

    def end_pass(self) -> PassResult:
        """Make what the pass computed visible, and return it."""
        if not self._in_pass:
            raise RuntimeError("end_pass() without begin_pass()")
        self._in_pass = False
        result = PassResult()
        if evicted := self.pool.take_evicted():
            result.events.append(EvictedBlocks(evicted))
        result.rejected, self._rejected = self._rejected, result.rejected
        planned, self._planned = self._planned, []
        emitted, block_size = result.emitted, self.options.block_size
        rates, caching = self.options.accept_rates, self.options.enable_prefix_caching
        has_ended = False
        for request in planned:
            if request.is_over:  # cancelled meanwhile
                continue
            known = request.known
            before = request.computed
            computed = before + request.scheduled
            if computed < known:
                request.computed = computed
                if caching and computed >= (request.named + 1) * block_size:
                    self._name_blocks(request, computed // block_size, result)
                continue
            if known == request.prompt_tokens:
                result.first.append(request)
                request.burst = burst = 1
            elif rates:
                burst = self._burst(rates, request.last - known) if computed - before == 1 else 1
                request.burst = burst
                computed += burst - 1
            else:
                burst = 1
            request.known = known = known + burst
            request.computed = computed
            if request.tail is not None and (output := request.output) is not None:
                for _ in range(burst):
                    request.tail.append(next(output))
            if caching and computed >= (request.named + 1) * block_size:
                self._name_blocks(request, computed // block_size, result)
            emitted.append(request)
            if known >= request.last:
                request.is_over = has_ended = True
                result.finished.append(request)
                self._release(request)
        if has_ended:
            self.running = [request for request in self.running if not request.is_over or request.held]
        if self._cancelled:
            self._drop_cancelled()
        if self.host is not None:
            self.host.end_pass(result.events)
        return result

    def _burst(self, rates: tuple[float, ...], room: int) -> int:
        """Draw how many tokens a decode step brings: one, and the drafts before the first refusal."""
        burst = 1
        for rate in rates[: room - 1]:
            if self._chance.random() >= rate:
                break
            burst += 1
        return burst

    # -- blocks ------------------------------------------------------------------------------------------------------------

    def _grow(self, request: ScheduledRequest, tokens: int) -> bool:
        """Give a request blocks for its first `tokens` tokens; return False, and change nothing, when there are too few."""
        missing = -(-tokens // self.options.block_size) - request.held
        if missing <= 0:
            return True
        if not self.pool.take(missing):
            return False
        request.held += missing
        return True

    def _pin_prefix(self, request: ScheduledRequest, blocks: int, now_ms: float) -> None:
        """Admit a request that reuses its first `blocks` blocks."""
        if blocks:
            self.pool.pin(request.identities, blocks)
        request.held = request.named = blocks
        request.computed = blocks * self.options.block_size
        if request.cached_tokens < 0:
            request.cached_tokens = min(request.computed, request.prompt_tokens)
            request.admitted_ms = now_ms

    def _name_blocks(self, request: ScheduledRequest, count: int, result: PassResult) -> None:
        if len(request.identities) < count:
            request.name_output_blocks(count, self.options.block_size, self._chance)
        runs = self.pool.name(request.identities, request.named, count, request.duplicates)
        request.named = count
        for begin, end in runs:
            result.events.append(BlockRun(request, begin, end))

    def _release(self, request: ScheduledRequest) -> None:
        """Take all blocks of a request back."""
        if request.held:
            self.pool.release(request.identities, request.named, request.held, request.duplicates)
            request.held = request.named = 0
            if request.duplicates:
                request.duplicates = set()

    def _preempt(self, request: ScheduledRequest) -> int:
        """Put a running request back to the head of the queue, without its blocks; return the tokens it had planned."""
        self._release(request)
        request.computed = given_back = 0
        if request in self._planned:
            self._planned.remove(request)
            given_back = request.scheduled
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)
        return given_back

    def _drop_cancelled(self) -> None:
        dropped, self._cancelled = self._cancelled, []
        for request in dropped:
            self._release(request)
        gone = set(map(id, dropped))
        self.running = [request for request in self.running if id(request) not in gone]
        if self.host is not None:
            self.host.loads = [load for load in self.host.loads if id(load.request) not in gone]
        self.waiting = deque(request for request in self.waiting if id(request) not in gone)

    def _computes(self, request: ScheduledRequest) -> bool:
        """Return whether the prompt of a request takes time and budget here."""
        return not (request.prompt_arrives and self.options.role == "decode")

    def _reusable(self, request: ScheduledRequest) -> int:
        """Count the blocks that a request may reuse: its last token must be computed."""
        options = self.options
        if not options.enable_prefix_caching:
            return 0
        blocks = (request.known - 1) // options.block_size
        if options.accept_rates:
            blocks -= 1
        return max(0, min(blocks, len(request.identities)))
