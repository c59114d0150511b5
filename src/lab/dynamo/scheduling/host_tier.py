"""A second tier of a simulated KV cache in host memory: finished blocks are copied there, and come back when a prompt needs them.

Copies go over two links, one for each direction, one after another; they take time and run beside the passes. A block is
there once its copy has ended. What was used longest ago makes room.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from dynamo.errors import InvalidArgument
from dynamo.scheduling.block_changes import HOST_TIER, BlockRun, EvictedBlocks
from dynamo.scheduling.request import ScheduledRequest

LEAST_WAIT_MS: Final = 1.0
WAITS_PER_LOAD: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTierOptions:
    """The host memory of one rank. Raises InvalidArgument that names the field."""

    num_host_blocks: int
    to_host_block_ms: float
    """How long the copy of one block takes, before any speedup."""
    to_device_block_ms: float

    def __post_init__(self) -> None:
        if self.num_host_blocks < 1:
            raise InvalidArgument(f"num_host_blocks must be at least 1, got {self.num_host_blocks}")


class HostLoad(NamedTuple):
    """A request that has its blocks on the device, and waits for the copies that fill them."""

    request: ScheduledRequest
    ready_ms: float


class CopyLink:
    """Copies blocks in one direction, one copy after another."""

    __slots__ = ("_block_ms", "_free_ms")

    def __init__(self, block_ms: float, speedup_ratio: float) -> None:
        self._block_ms = block_ms / speedup_ratio if speedup_ratio else 0.0
        self._free_ms = 0.0  # when it has done what it was given

    def copy(self, blocks: int, now_ms: float) -> float:
        """Take `blocks` more blocks to copy, not before `now_ms`; return when they are there."""
        self._free_ms = max(now_ms, self._free_ms) + blocks * self._block_ms
        return self._free_ms


class HostTier:
    """The blocks that lie in host memory, and those on their way there. Bounded by its size, both together by twice that."""

    def __init__(self, options: HostTierOptions, speedup_ratio: float) -> None:
        """`speedup_ratio` divides every time; 0: copies take none."""
        self.blocks = options.num_host_blocks
        self._to_host = CopyLink(options.to_host_block_ms, speedup_ratio)
        self._to_device = CopyLink(options.to_device_block_ms, speedup_ratio)
        self._held: OrderedDict[int, None] = OrderedDict()  # the next one to go is in front
        self._copies: deque[tuple[float, BlockRun]] = deque()  # with the time when each ends
        self._copied: set[int] = set()  # blocks of `_copies`
        self._events: list[BlockRun | EvictedBlocks] = []  # that the pass that runs will show
        self.loads: list[HostLoad] = []  # requests that wait for blocks; bounded by max_num_seqs
        self.pass_ends_ms = 0.0  # of the pass that runs

    @property
    def held(self) -> int:
        """Blocks that are there."""
        return len(self._held)

    # -- one pass --------------------------------------------------------------------------------------------------------

    def begin_pass(self, now_ms: float) -> list[ScheduledRequest]:
        """Take note of the copies that have ended by now; return the requests whose blocks have come."""
        self._events = self._take_copied(now_ms)
        ready = [load.request for load in self.loads if load.ready_ms <= now_ms]
        if ready:
            self.loads = [load for load in self.loads if load.ready_ms > now_ms]
        return ready

    def wait_ms(self, now_ms: float) -> float:
        """Return how long a pass waits that has nothing to compute: a part of what the next load takes, as requests may come."""
        left = min((load.ready_ms for load in self.loads), default=now_ms) - now_ms
        return min(left, max(LEAST_WAIT_MS, left / WAITS_PER_LOAD))

    def end_pass(self, events: list[BlockRun | EvictedBlocks]) -> None:
        """Begin to copy the blocks that a pass completed, and add to its events what became of earlier copies."""
        for event in events:
            if isinstance(event, BlockRun):
                self._copy(event)
        events += self._events
        self._events = []

    # -- to the host -----------------------------------------------------------------------------------------------------

    def _copy(self, run: BlockRun) -> None:
        """Begin to copy blocks. What is there or on its way is not copied again; nor what is more than the tier holds."""
        for number, identity in enumerate(run.identities, run.begin):
            if identity not in self._held and identity not in self._copied and len(self._copied) < self.blocks:
                self._copied.add(identity)
                there_ms = self._to_host.copy(1, self.pass_ends_ms)
                self._copies.append((there_ms, run.part(number, number + 1, HOST_TIER)))

    def _take_copied(self, now_ms: float) -> list[BlockRun | EvictedBlocks]:
        """Return what copies have changed by now: blocks that made room first, then those that have arrived."""
        arrived: list[BlockRun] = []
        while self._copies and self._copies[0][0] <= now_ms:
            _, run = self._copies.popleft()
            self._copied.discard(run.identities[0])
            self._held[run.identities[0]] = None
            if arrived and arrived[-1].request is run.request and arrived[-1].end == run.begin:
                arrived[-1].end = run.end
            else:
                arrived.append(run)
        for run in arrived:
            self._touch(run.request.identities[: run.end])
        evicted = [self._held.popitem(last=False)[0] for _ in range(len(self._held) - self.blocks)]
        return [*arrived, EvictedBlocks(evicted, HOST_TIER)] if evicted else [*arrived]

    def _touch(self, identities: Sequence[int]) -> None:
        """Count blocks of one prompt as used; the last one goes first, so that a suffix makes room before its prefix."""
        held = self._held
        for identity in reversed(identities):
            if identity in held:
                held.move_to_end(identity)

    # -- to the device ---------------------------------------------------------------------------------------------------

    def match(self, identities: Sequence[int], begin: int, limit: int) -> int:
        """Return how many blocks from number `begin` on, up to `limit`, are there without a gap."""
        found = 0
        for identity in islice(identities, begin, limit):
            if identity not in self._held:
                break
            found += 1
        return found

    def load(self, request: ScheduledRequest, blocks: int, now_ms: float) -> None:
        """Begin to fill the last `blocks` blocks that a request has; `begin_pass` returns it when they are there."""
        self._touch(request.identities[: request.held])
        self.loads.append(HostLoad(request, self._to_device.copy(blocks, now_ms)))
