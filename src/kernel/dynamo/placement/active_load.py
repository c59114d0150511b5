"""What is booked on each rank: prompt tokens still to be computed, distinct blocks, streams. Pure.

A request is added with its rank, turns from a prefill into a stream with its first token, and is freed. Every step is
idempotent and harmless for an unknown request, so a lost or late report cannot make a count wrong for ever; what is never
freed expires.

Blocks are counted once per rank, however many requests hold them. Sequence hashes are chained, so the blocks of one prompt
that are active on a rank are always its first ones, and `active_blocks` finds their number by search and not by counting.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from dynamo.kv.overlap import WorkerRank
from dynamo.placement.block_weights import BlockWeights, OutputBlocks
from dynamo.placement.prefill_pass import FinishedPasses, PrefillPass
from dynamo.placement.reuse_clock import ReuseClock

DEFAULT_EXPIRY_SECONDS: Final = 300.0  # DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS
SCAN_SECONDS: Final = 30.0  # between searches for expired requests when requests are added
MAX_REQUESTS: Final = 200_000  # of one account; beyond that, adding one ends the oldest


class Booked:
    """One active request."""

    __slots__ = (
        "added_at",
        "clock_at_first_token",
        "context_tokens",
        "expected_output",
        "expires",
        "first_token_at",
        "output",
        "output_tokens",
        "prefill_tokens",
        "rank",
        "request_id",
        "sequence",
    )

    def __init__(self, request_id: str, rank: WorkerRank, sequence: Sequence[int], now: float) -> None:
        self.request_id, self.rank, self.sequence, self.added_at = request_id, rank, sequence, now
        self.prefill_tokens = 0  # counted for the rank until the first token
        self.context_tokens = 0
        self.expected_output: int | None = None
        self.output_tokens = 0
        self.output = OutputBlocks()
        self.first_token_at: float | None = None
        self.clock_at_first_token = (0.0, 0.0, 0.0, 0.0)  # area, stream_seconds, pass_seconds, pass_steps
        self.expires = True


class LoadClock:
    """What has added up on one rank over time; the difference between two moments gives a mean."""

    __slots__ = ("_at", "area", "pass_seconds", "pass_steps", "stream_seconds")

    def __init__(self) -> None:
        self.area = 0.0  # tokens of context times the seconds that they were there
        self.stream_seconds = 0.0  # of all streams together
        self.pass_seconds = 0.0  # of passes that computed prompts
        self.pass_steps = 0.0  # steps that the streams made in them
        self._at = 0.0

    def advance(self, context_tokens: int, streams: int, now: float) -> None:
        """Count the time since the last call, in which there were `context_tokens` and `streams`."""
        if now > self._at:
            self.area += context_tokens * (now - self._at)
            self.stream_seconds += streams * (now - self._at)
            self._at = now

    def add(self, passes: FinishedPasses) -> None:
        """Count passes that computed prompts. An arrival finds the step that runs half done."""
        self.pass_seconds += passes.seconds
        self.pass_steps += passes.passes + (0.5 if passes.was_idle else 0.0)


class LoadOfRank:
    """The account of one rank."""

    __slots__ = (
        "blocks",
        "booked",
        "boundary_at",
        "clock",
        "context_tokens",
        "prefill_pass",
        "prefill_tokens",
        "reuse",
        "streams",
        "weights",
    )

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}  # sequence hash to the number of requests that hold it
        self.weights = BlockWeights()
        self.booked: dict[str, Booked] = {}
        self.prefill_tokens = 0
        self.streams = 0
        # When a pass was last seen to end: a first token shows that, and so does the end of an answer.
        self.boundary_at: float | None = None
        self.context_tokens = 0  # of all requests
        self.clock = LoadClock()
        self.prefill_pass = PrefillPass()
        self.reuse = ReuseClock()

    @property
    def decode_blocks(self) -> float:
        """The distinct active blocks, each with its weight."""
        return len(self.blocks) - self.weights.saved

    def hold(self, sequence: Sequence[int]) -> None:
        """Count one more request for each block."""
        blocks = self.blocks
        for block in sequence:
            blocks[block] = blocks.get(block, 0) + 1
        if self.weights.owners:
            for block in sequence:
                self.weights.reset(block)  # a block that is shared now counts in full

    def let_go(self, sequence: Sequence[int]) -> None:
        """Count one request less for each block."""
        blocks = self.blocks
        for block in sequence:
            left = blocks[block] - 1
            if left:
                blocks[block] = left
            else:
                del blocks[block]
        if self.weights.owners:
            for block in sequence:
                if block not in blocks:
                    self.weights.reset(block)

    def weigh_unshared(self, booked: Booked, weight: float) -> None:
        """Let the blocks that only this request holds count for `weight` each, back to its last shared block."""
        self.weights.weigh(booked.output, booked.sequence, self.blocks, weight)

    def active_blocks(self, sequence: Sequence[int], guess: int = 0) -> int:
        """Return how many blocks of a prompt are active, from the first one on. `guess` is tried first."""
        blocks = self.blocks
        count = len(sequence)
        if not count or sequence[0] not in blocks:
            return 0
        if 0 < guess <= count and sequence[guess - 1] in blocks and (guess == count or sequence[guess] not in blocks):
            return guess
        low, step = 1, 1  # the first `low` blocks are active
        while low + step <= count and sequence[low + step - 1] in blocks:
            low += step
            step *= 2
        high = min(low + step, count + 1)  # the first `high` blocks are not all active
        while high - low > 1:
            middle = (low + high) // 2
            if sequence[middle - 1] in blocks:
                low = middle
            else:
                high = middle
        return low


class ActiveLoad:
    """The accounts of all ranks. Bounded by the requests that are active, and by `MAX_REQUESTS`."""

    __slots__ = (
        "_block_size",
        "_booked",
        "_expiry_seconds",
        "_next_scan",
        "_output_serial",
        "_ranks",
        "_tracks_output",
        "changed",
        "heads",
        "on_relief",
    )

    def __init__(
        self,
        block_size: int,
        *,
        tracks_output_blocks: bool = False,
        expiry_seconds: float = DEFAULT_EXPIRY_SECONDS,
    ) -> None:
        """Make an empty account. Without `tracks_output_blocks` generated tokens take no blocks here."""
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self._block_size, self._tracks_output, self._expiry_seconds = block_size, tracks_output_blocks, expiry_seconds
        self._ranks: dict[WorkerRank, LoadOfRank] = {}
        self._booked: dict[str, Booked] = {}  # oldest first
        # The first block of each prompt that is booked, to the ranks where it is and the requests that have it there.
        self.heads: dict[int, dict[WorkerRank, int]] = {}
        self.changed: set[WorkerRank] = set()  # ranks whose account changed since a reader cleared this
        # Called when a load may have fallen; empty unless requests wait for that.
        self.on_relief: dict[object, Callable[[], None]] = {}
        self._next_scan = 0.0
        self._output_serial = 0  # names of output blocks are negative, so no hash is ever one of them

    def __len__(self) -> int:
        return len(self._booked)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._booked

    @property
    def block_size(self) -> int:
        return self._block_size

    # -- steps of a request

    def add(
        self,
        request_id: str,
        rank: WorkerRank,
        sequence: Sequence[int],
        *,
        prompt_tokens: int,
        cached_tokens: int,
        now: float,
        coming_tokens: int = 0,
        expected_output: int | None = None,
        counts_prefill: bool = True,
        expires: bool = True,
    ) -> bool:
        """Book a request; return False for one that is booked already, which changes nothing.

        `sequence` are the chained hashes of the prompt's complete blocks. `coming_tokens` are not cached, but will be before
        this prompt is begun: they count as tokens of the rank, and not as work of its passes. `expires=False`: the caller frees it in any case.
        """
        if request_id in self._booked:
            return False
        if now >= self._next_scan or len(self._booked) >= MAX_REQUESTS:
            self._make_room(now)
        load = self.of(rank)
        booked = Booked(request_id, rank, sequence, now)
        booked.context_tokens = prompt_tokens
        booked.expected_output, booked.expires = expected_output, expires
        self._booked[request_id] = load.booked[request_id] = booked
        load.clock.advance(load.context_tokens, load.streams, now)
        load.context_tokens += prompt_tokens
        load.hold(sequence)
        if sequence:
            self._count_head(sequence[0], rank, 1)
        load.reuse.touch(sequence, now)
        if counts_prefill:
            booked.prefill_tokens = max(0, prompt_tokens - cached_tokens)
            load.prefill_tokens += booked.prefill_tokens
            load.prefill_pass.join(request_id, max(1, booked.prefill_tokens - coming_tokens), now)
        self.changed.add(booked.rank)
        return True

    def prefill_completed(self, request_id: str, now: float) -> Booked | None:
        """Turn a prefill into a stream: its first token is there. Return it if it was a prefill until now."""
        booked = self._booked.get(request_id)
        if booked is None or booked.first_token_at is not None:
            return None
        booked.first_token_at = now
        load = self._ranks[booked.rank]
        self._end_prefill(load, booked)
        passes = load.prefill_pass.complete(request_id, now)
        if passes is not None:
            load.clock.add(passes)
        clock = load.clock
        clock.advance(load.context_tokens, load.streams, now)
        load.streams += 1
        load.boundary_at = now
        booked.clock_at_first_token = (clock.area, clock.stream_seconds, clock.pass_seconds, clock.pass_steps)
        self.changed.add(booked.rank)
        if self.on_relief:
            self.relieved()
        return booked

    def output(self, request_id: str, tokens: int) -> None:
        """Count `tokens` more generated tokens."""
        booked = self._booked.get(request_id)
        if booked is None or tokens <= 0:
            return
        load = self._ranks[booked.rank]
        load.context_tokens += tokens
        blocks_before = -(-booked.context_tokens // self._block_size)
        booked.output_tokens += tokens
        booked.context_tokens += tokens
        if self._tracks_output:
            self._grow(load, booked, -(-booked.context_tokens // self._block_size) - blocks_before)
        self.changed.add(booked.rank)

    def free(self, request_id: str, now: float, rank: WorkerRank | None = None) -> Booked | None:
        """End a request, however it ended; return it if it was booked.

        With `rank`, only a booking on that rank ends: a late report about an earlier attempt leaves a newer one alone.
        """
        booked = self._booked.get(request_id)
        if booked is None or (rank is not None and booked.rank != rank):
            return None
        del self._booked[request_id]
        load = self._ranks[booked.rank]
        del load.booked[request_id]
        self._end_prefill(load, booked)
        load.clock.advance(load.context_tokens, load.streams, now)
        if booked.first_token_at is None:
            load.prefill_pass.drop(request_id, now)
        else:
            load.streams -= 1
            load.boundary_at = now if load.streams else None
        load.context_tokens -= booked.context_tokens
        load.reuse.touch(booked.sequence, now)
        load.let_go(booked.sequence)
        if booked.sequence:
            self._count_head(booked.sequence[0], booked.rank, -1)
        if booked.output.names:
            load.let_go(booked.output.names)
        self.changed.add(booked.rank)
        if self.on_relief:
            self.relieved()
        return booked

    def output_block(self, request_id: str, decay_fraction: float | None = None) -> bool:
        """Count one more output block, and let the unshared blocks weigh `decay_fraction` each. False: not booked."""
        booked = self._booked.get(request_id)
        if booked is None:
            return False
        load = self._ranks[booked.rank]
        self._output_serial -= 1
        booked.output.names.append(self._output_serial)
        load.hold((self._output_serial,))
        if decay_fraction is not None:
            load.weigh_unshared(booked, decay_fraction)
        self.changed.add(booked.rank)
        return True

    def _count_head(self, block: int, rank: WorkerRank, change: int) -> None:
        ranks = self.heads.setdefault(block, {})
        count = ranks.get(rank, 0) + change
        if count:
            ranks[rank] = count
        else:
            del ranks[rank]
            if not ranks:
                del self.heads[block]

    # -- ranks

    def of(self, rank: WorkerRank) -> LoadOfRank:
        """Return the account of a rank, an empty one for a rank that is new."""
        load = self._ranks.get(rank)
        if load is None:
            load = self._ranks[rank] = LoadOfRank()
        return load

    def get(self, request_id: str) -> Booked | None:
        """Return an active request."""
        return self._booked.get(request_id)

    def knows(self, rank: WorkerRank) -> bool:
        """Return whether the rank has an account."""
        return rank in self._ranks

    def ranks(self) -> list[WorkerRank]:
        """Return the ranks that have an account."""
        return list(self._ranks)

    def forget(self, worker_id: int, dp_rank: int | None = None) -> None:
        """Remove a worker, or one rank of it, with everything that is booked there."""
        gone = [rank for rank in self._ranks if rank.worker_id == worker_id and dp_rank in (None, rank.dp_rank)]
        for rank in gone:
            for request_id in self._ranks.pop(rank).booked:
                sequence = self._booked.pop(request_id).sequence
                if sequence:
                    self._count_head(sequence[0], rank, -1)
            self.changed.add(rank)
        if self.on_relief:
            self.relieved()

    def relieved(self) -> None:
        """Notify what waits for room that a load may have fallen, or that the ranks have changed."""
        for tell in tuple(self.on_relief.values()):
            tell()

    # -- what is read

    def prefill_tokens(self, rank: WorkerRank) -> int:
        """Return the uncached prompt tokens of requests without a first token."""
        load = self._ranks.get(rank)
        return 0 if load is None else load.prefill_tokens

    def decode_blocks(self, rank: WorkerRank) -> float:
        """Return the distinct active blocks."""
        load = self._ranks.get(rank)
        return 0.0 if load is None else load.decode_blocks

    def new_blocks(self, rank: WorkerRank, sequence: Sequence[int]) -> int:
        """Return how many blocks of a prompt are not active on the rank."""
        load = self._ranks.get(rank)
        return len(sequence) if load is None else len(sequence) - load.active_blocks(sequence)

    def requests(self, rank: WorkerRank) -> int:
        """Return the active requests."""
        load = self._ranks.get(rank)
        return 0 if load is None else len(load.booked)

    def prefills(self, rank: WorkerRank) -> Iterator[Booked]:
        """Iterate over the requests without a first token, oldest first."""
        load = self._ranks.get(rank)
        return iter(()) if load is None else (each for each in load.booked.values() if each.first_token_at is None)

    # -- expiry

    def expire(self, now: float, is_live: Callable[[str], bool] | None = None) -> list[str]:
        """Free what was added too long ago and was never freed; return the ids. What `is_live` confirms stays."""
        self._next_scan = now + SCAN_SECONDS
        limit = now - self._expiry_seconds
        stale = []
        for request_id, booked in self._booked.items():
            if booked.added_at > limit:
                break
            if booked.expires and not (is_live is not None and is_live(request_id)):
                stale.append(request_id)
        for request_id in stale:
            self.free(request_id, now)
        return stale

    def _make_room(self, now: float) -> None:
        if now >= self._next_scan:
            self.expire(now)
        if len(self._booked) >= MAX_REQUESTS:
            self.free(next(iter(self._booked)), now)

    # -- parts of the steps

    @staticmethod
    def _end_prefill(load: LoadOfRank, booked: Booked) -> None:
        load.prefill_tokens -= booked.prefill_tokens
        booked.prefill_tokens = 0

    def _grow(self, load: LoadOfRank, booked: Booked, blocks: int) -> None:
        """Count new output blocks. With an expected output, what only this request holds weighs less the nearer its end is."""
        if blocks <= 0:
            return
        for _ in range(blocks):
            self._output_serial -= 1
            booked.output.names.append(self._output_serial)
        load.hold(booked.output.names[-blocks:])
        if booked.expected_output is not None:
            weight = max(0.0, 1.0 - booked.output_tokens / max(1, booked.expected_output))
            load.weigh_unshared(booked, weight)


def common_blocks(first: Sequence[int], second: Sequence[int], floor: int = 0) -> int:
    """Return how many leading blocks two prompts share, where the first `floor` are known to be shared."""
    low, high = floor, min(len(first), len(second))
    return low + bisect.bisect_left(range(low, high), True, key=lambda at: first[at] != second[at])
