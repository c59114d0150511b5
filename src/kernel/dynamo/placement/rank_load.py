"""The account of one rank: what is booked on it, its distinct blocks and their weights, and how its cache is used. Pure.

Blocks are counted once per rank, however many requests hold them. Sequence hashes are chained, so the blocks of one prompt
that are active on a rank are always its first ones, and `active_blocks` finds their number by search and not by counting.

Some blocks count for less than one: those that one request alone holds and will soon give up. All such blocks of a request
weigh the same, so a request has one record of its weight and of how many blocks have it, and a new weight costs the same for
a prompt of any length.

A rank evicts what was used longest ago. Every n-th block of each prompt that is sent there stands for n blocks, so a few
hundred entries per rank follow a cache of any size. A rank that would have to give up blocks used a moment ago is a worse
place for a new prompt than one whose oldest blocks were not used in a long time.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from dynamo.kv.overlap import WorkerRank
from dynamo.placement.prefill_pass import FinishedPasses, PrefillPass
from dynamo.placement.timing import DEFAULT_CAPACITY_TOKENS, DEFAULT_TIMING, rest_of_step_ms

ENTRIES: Final = 384  # samples of a full cache; the estimate is off by about one part in twenty


class ReuseClock:
    """The sampled blocks of one rank's cache, in the order of their last use. Bounded by about `ENTRIES`."""

    __slots__ = ("_entries", "_limit", "_stride", "blocks")

    def __init__(self) -> None:
        self.blocks: int | None = None  # of the cache; None: not known, and nothing is followed
        self._stride, self._limit = 1, 0
        self._entries: OrderedDict[int, float] = OrderedDict()  # block to the time of its last use, oldest first

    def set_blocks(self, blocks: int | None) -> None:
        """Take the size of the cache; another size than before begins anew."""
        if blocks == self.blocks:
            return
        self.blocks = blocks
        self._entries.clear()
        self._stride = max(1, (blocks or 0) // ENTRIES)
        self._limit = (blocks or 0) // self._stride

    def touch(self, sequence: Sequence[int], now: float) -> None:
        """Count a use of the blocks of one prompt."""
        if not self._limit:
            return
        entries, stride = self._entries, self._stride
        for block in reversed(sequence[stride // 2 :: stride]):  # the last block of a prompt is evicted first
            entries[block] = now
            entries.move_to_end(block)
        while len(entries) > self._limit:
            entries.popitem(last=False)

    @property
    def oldest_use_at(self) -> float | None:
        """When the block that is evicted next was last used. None: the cache is not full, or its size is not known."""
        entries = self._entries
        if not self._limit or len(entries) < self._limit:
            return None
        return next(iter(entries.values()))


class OutputBlocks:
    """What one request generates: its tokens and their blocks, and the weight of all blocks that this request alone holds."""

    __slots__ = ("_count", "_joined", "_start", "_weight", "expected", "names", "tokens")

    def __init__(self) -> None:
        self.expected: int | None = None  # tokens that are expected; None: not known
        self.tokens = 0
        self.names: list[int] = []
        self._joined = 0  # output blocks that have the weight
        self._start: int | None = None  # blocks of the prompt from this position on have the weight; None: ignored
        self._count = 0  # blocks that have the weight
        self._weight = 1.0


class BlockWeights:
    """The weights of the blocks of one rank. Bounded by the blocks of its active requests."""

    __slots__ = ("owners", "saved")

    def __init__(self) -> None:
        # Block to the record of the request that holds it alone; empty: every block counts in full.
        self.owners: dict[int, OutputBlocks] = {}
        self.saved = 0.0  # what the weights take off the number of blocks

    def weigh(self, record: OutputBlocks, sequence: Sequence[int], holders: Mapping[int, int], weight: float) -> None:
        """Let the output blocks, and the blocks at the end of `sequence` with one holder, count for `weight` each.

        `holders`: block to the number of requests that hold it.
        """
        names = record.names
        for block in names[record._joined :]:
            self._join(record, block)
        record._joined = len(names)
        at = len(sequence) if record._start is None else record._start
        while at < len(sequence) and self.owners.get(sequence[at]) is not record:  # shared since the last time
            at += 1
        while at and holders[sequence[at - 1]] == 1:
            at -= 1
            self._join(record, sequence[at])
        record._start = at
        self.saved += record._count * (record._weight - weight)
        record._weight = weight

    def reset(self, block: int) -> None:
        """Let a block count in full again: it is shared, or gone."""
        record = self.owners.pop(block, None)
        if record is not None:
            record._count -= 1
            self.saved = self.saved - (1.0 - record._weight) if self.owners else 0.0

    def _join(self, record: OutputBlocks, block: int) -> None:
        if self.owners.get(block) is not record:
            self.reset(block)
            self.owners[block] = record
            record._count += 1
            self.saved += 1.0 - record._weight


class FirstToken(NamedTuple):
    """When the first token of a request was there, and what had added up on its rank until then."""

    at: float
    area: float
    stream_seconds: float
    pass_seconds: float
    pass_steps: float


class Booked:
    """One active request."""

    __slots__ = (
        "added_at", "context_tokens", "expires", "first_token", "output", "prefill_tokens", "rank", "request_id", "sequence",
    )  # fmt: skip

    def __init__(self, request_id: str, rank: WorkerRank, sequence: Sequence[int], now: float) -> None:
        self.request_id, self.rank, self.sequence, self.added_at = request_id, rank, sequence, now
        self.prefill_tokens = 0  # counted for the rank until the first token
        self.context_tokens = 0
        self.output = OutputBlocks()
        self.first_token: FirstToken | None = None
        self.expires = True


class LoadClock:
    """The tokens and streams on one rank, and what has added up over time; the difference of two moments gives a mean."""

    __slots__ = ("_at", "area", "context_tokens", "pass_seconds", "pass_steps", "stream_seconds", "streams")

    def __init__(self) -> None:
        self.context_tokens = 0  # of all requests
        self.streams = 0
        self.area = 0.0  # tokens of context times the seconds that they were there
        self.stream_seconds = 0.0  # of all streams together
        self.pass_seconds = 0.0  # of passes that computed prompts
        self.pass_steps = 0.0  # steps that the streams made in them
        self._at = 0.0

    def advance(self, now: float) -> None:
        """Count the time since the last call; before a number of tokens or streams changes."""
        if now > self._at:
            self.area += self.context_tokens * (now - self._at)
            self.stream_seconds += self.streams * (now - self._at)
            self._at = now

    def add(self, passes: FinishedPasses) -> None:
        """Count passes that computed prompts. An arrival finds the step that runs half done."""
        self.pass_seconds += passes.seconds
        self.pass_steps += passes.passes + (0.5 if passes.was_idle else 0.0)

    def first_token(self, now: float) -> FirstToken:
        """Note what has added up until the first token of a request."""
        return FirstToken(now, self.area, self.stream_seconds, self.pass_seconds, self.pass_steps)


class LoadOfRank:
    """The account of one rank."""

    __slots__ = (
        "blocks", "booked", "boundary_at", "clock", "prefill_pass", "prefill_tokens", "reuse", "timing", "weights",
    )  # fmt: skip

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}  # sequence hash to the number of requests that hold it
        self.weights = BlockWeights()
        self.booked: dict[str, Booked] = {}
        self.prefill_tokens = 0
        # When a pass was last seen to end: a first token shows that, and so does the end of an answer.
        self.boundary_at: float | None = None
        self.clock = LoadClock()
        self.prefill_pass = PrefillPass()
        self.reuse = ReuseClock()
        self.timing = DEFAULT_TIMING  # as it was believed to be when the rank was last described

    def join_pass(self, request_id: str, tokens: int, now: float, block_size: int) -> None:
        """Let a prompt wait for its pass, which does not begin before the step ends that the streams make now."""
        rest, clock = 0.0, self.clock
        if clock.streams and not self.prefill_pass.running:
            fill = clock.context_tokens / ((self.reuse.blocks or 0) * block_size or DEFAULT_CAPACITY_TOKENS)
            step = self.timing.step_ms(min(1.0, fill), clock.streams)
            rest = rest_of_step_ms(now, self.boundary_at or 0.0, step)
        self.prefill_pass.join(request_id, tokens, now, now + rest / 1000)

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


def common_blocks(first: Sequence[int], second: Sequence[int], floor: int = 0) -> int:
    """Return how many leading blocks two prompts share, where the first `floor` are known to be shared."""
    low, high = floor, min(len(first), len(second))
    return low + bisect.bisect_left(range(low, high), True, key=lambda at: first[at] != second[at])
