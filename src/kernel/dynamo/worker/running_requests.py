"""The worker's own book of what runs: how many KV blocks its requests need, and how many prompt tokens still wait.

Engines report how full their cache is, but not which part of it running requests hold. The book knows: a request holds the
blocks of its prompt and of the tokens it got. Prefixes that several requests share are counted for each of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

REFRESH_SECONDS: Final = 0.5  # how often the tokens that running requests got are counted

ReportLoad = Callable[[int, int | None, int], None]
"""`report(dp_rank, active_decode_blocks, active_prefill_tokens)`."""


class RunningRequest:
    """One request in the book. The serving coroutine writes `tokens`; nothing else happens per token."""

    __slots__ = ("blocks", "prompt_tokens", "rank", "tokens", "waits_for_first")

    def __init__(self, rank: int, prompt_tokens: int, *, waits_for_first: bool) -> None:
        self.rank = rank
        self.prompt_tokens = prompt_tokens
        self.waits_for_first = waits_for_first
        self.tokens = 0  # generated so far
        self.blocks = 0  # as the book counts it now


class RunningRequests:
    """The running requests of one engine; reports the sums of each rank when they change. Used on the event loop only."""

    def __init__(
        self,
        report: ReportLoad,
        *,
        block_size: int | None,
        ranks: Sequence[int] = (0,),
        total_blocks: int | None = None,
        prefills: bool = True,
    ) -> None:
        """`block_size` None: the engine has no KV blocks, and only prompt tokens are reported. `ranks` are those that
        this worker hosts; each is reported at once, without load. `total_blocks` of a rank bounds what is reported.
        `prefills` False: prompts are computed by another worker.
        """
        self._report = report
        self._block_size = block_size
        self._total_blocks = total_blocks
        self._prefills = prefills
        self._running: set[RunningRequest] = set()
        self._blocks = dict.fromkeys(ranks, 0)
        self._prefill_tokens = dict.fromkeys(ranks, 0)
        for rank in ranks:
            self._report_rank(rank)
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, request: Mapping[str, Any]) -> RunningRequest:
        """Enter a request that is about to be served; `first_token` and `end` follow."""
        rank = self._rank_of(request)
        running = RunningRequest(rank, len(request["token_ids"]), waits_for_first=self._prefills)
        self._running.add(running)
        if running.waits_for_first:
            self._prefill_tokens[rank] += running.prompt_tokens
        self._count(running)
        self._report_rank(rank)
        if self._timer is None and self._block_size is not None:
            self._timer = asyncio.get_running_loop().call_later(REFRESH_SECONDS, self._refresh)
        return running

    def _rank_of(self, request: Mapping[str, Any]) -> int:
        """Return the rank that the router chose, else the one with the fewest blocks, as an engine that balances
        would choose.
        """
        routing = request.get("routing")
        rank = routing.get("dp_rank") if isinstance(routing, Mapping) else None
        if isinstance(rank, int) and rank in self._blocks:
            return rank
        return min(self._blocks, key=self._blocks.__getitem__)

    def first_token(self, running: RunningRequest) -> None:
        """Record a computed prompt. Idempotent."""
        if running.waits_for_first:
            running.waits_for_first = False
            self._prefill_tokens[running.rank] -= running.prompt_tokens
            self._report_rank(running.rank)

    def end(self, running: RunningRequest) -> None:
        """Take a request out, on every path."""
        self._running.discard(running)
        if running.waits_for_first:
            running.waits_for_first = False
            self._prefill_tokens[running.rank] -= running.prompt_tokens
        self._blocks[running.rank] -= running.blocks
        self._report_rank(running.rank)

    def close(self) -> None:
        """Stop counting. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _count(self, running: RunningRequest) -> None:
        if self._block_size is None:
            return
        blocks = -(-(running.prompt_tokens + running.tokens) // self._block_size)
        if blocks != running.blocks:
            self._blocks[running.rank] += blocks - running.blocks
            running.blocks = blocks

    def _report_rank(self, rank: int) -> None:
        blocks: int | None = None
        if self._block_size is not None:
            blocks = self._blocks[rank]
            blocks = blocks if self._total_blocks is None else min(blocks, self._total_blocks)
        self._report(rank, blocks, self._prefill_tokens[rank])

    def _refresh(self) -> None:
        self._timer = None
        if not self._running:
            return
        for running in self._running:
            self._count(running)
        for rank in {running.rank for running in self._running}:
            self._report_rank(rank)
        self._timer = asyncio.get_running_loop().call_later(REFRESH_SECONDS, self._refresh)
