"""The schedulers of vllm and of trtllm: one token budget for the prompts and the decode steps of a pass."""

from __future__ import annotations

from dynamo.scheduling.core import SchedulerCore
from dynamo.scheduling.request import ScheduledRequest


class VllmCore(SchedulerCore):
    """Running requests first, then waiting ones in their order; running ones are preempted when blocks run out."""

    def _schedule(self, now_ms: float) -> None:
        budget, preempted = self._schedule_running()
        if self.waiting and not preempted:
            self._admit(budget, now_ms)

    def _schedule_running(self) -> tuple[int, bool]:
        """Plan the running requests; return what is left of the budget (0: nothing more this pass), and whether any was
        preempted.
        """
        options, running, planned = self.options, self.running, self._planned
        budget = options.max_num_batched_tokens
        chunked, block_size, drafts = options.enable_chunked_prefill, options.block_size, len(options.accept_rates)
        preempted = False
        number = 0
        while number < len(running) and budget > 0:
            request = running[number]
            computed = request.computed
            count = request.known - computed
            if count > budget:
                if not chunked:
                    return 0, preempted
                count = budget
            upto = computed + count
            if drafts and upto == request.known > request.prompt_tokens:
                upto = min(upto + drafts, request.last)
            if upto > request.held * block_size and not self._grow(request, upto):
                budget += self._make_room()
                preempted = True
                if options.preemption_mode == "fifo" and number:
                    number -= 1
                continue  # the same request once more, unless it was the one that went
            request.scheduled = count
            planned.append(request)
            budget -= count
            number += 1
        return budget, preempted

    def _make_room(self) -> int:
        """Preempt one running request; return the part of the budget that it gives back."""
        return self._preempt(self.running.pop(0 if self.options.preemption_mode == "fifo" else -1))

    def _admit(self, budget: int, now_ms: float) -> None:
        options, waiting, running = self.options, self.waiting, self.running
        block_size, host = options.block_size, self.host
        while waiting and budget > 0:
            if len(running) + (0 if host is None else len(host.loads)) >= options.max_num_seqs:
                return
            request = waiting[0]
            found = self._admissible(request)
            if found is None:
                return
            computes_prompts = self._computes(request)
            if host is not None and computes_prompts:
                loaded = host.match(request.identities, found, self._reusable(request))
                if loaded:
                    waiting.popleft()
                    self._load(request, found, found + loaded, now_ms)
                    continue
            missing = request.known - found * block_size
            count = missing if not computes_prompts else min(missing, budget)
            if count < missing and not options.enable_chunked_prefill:
                if budget < options.max_num_batched_tokens:
                    return
                count = missing  # more than any budget: alone in a pass, instead of never
            waiting.popleft()
            self._pin_prefix(request, found, now_ms)
            if not self._grow(request, request.computed + count):
                raise RuntimeError(f"request {request.request_id} was admitted without room for its blocks")
            request.scheduled = count
            running.append(request)
            self._planned.append(request)
            budget -= count if computes_prompts else 1

    def _load(self, request: ScheduledRequest, found: int, blocks: int, now_ms: float) -> None:
        """Admit a request with `found` blocks of the device and the next ones, up to `blocks`, of the host."""
        is_first = request.cached_tokens < 0
        self._pin_prefix(request, found, now_ms)
        request.computed = blocks * self.options.block_size
        if not self._grow(request, request.computed):
            raise RuntimeError(f"request {request.request_id} was admitted without room for its blocks")
        if is_first:
            request.cached_tokens = min(request.computed, request.prompt_tokens)
        assert self.host is not None
        self.host.load(request, blocks - found, now_ms)

    def _admissible(self, request: ScheduledRequest) -> int | None:
        """Return how many cached blocks the request can reuse; None when the cache has no room for it now."""
        needed = -(-request.known // self.options.block_size)
        limit = self._reusable(request)
        available = self.pool.available
        if needed - limit > available:
            return None
        found, active = self.pool.match(request.identities, limit) if limit else (0, 0)
        return None if needed - active > available else found


class TrtllmCore(VllmCore):
    """Admits only what can run to its end beside all that run already, so that nothing is ever preempted."""

    def _make_room(self) -> int:
        raise RuntimeError("a request ran out of the blocks that its admission had reserved")

    def _admissible(self, request: ScheduledRequest) -> int | None:
        block_size = self.options.block_size
        promised = sum(-(-other.last // block_size) - other.held for other in self.running)
        room = self.pool.available - promised
        limit = self._reusable(request)
        needed = -(-request.last // block_size)
        if needed - limit > room:
            return None
        found, active = self.pool.match(request.identities, limit) if limit else (0, 0)
        return None if needed - active > room else found

    def _reusable(self, request: ScheduledRequest) -> int:
        """Count the blocks that a request may reuse: all of them, without computing the last one again."""
        if not self.options.enable_prefix_caching:
            return 0
        return min(request.known // self.options.block_size, len(request.identities))
