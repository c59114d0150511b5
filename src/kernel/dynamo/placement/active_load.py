"""What is booked on each rank: prompt tokens still to be computed, distinct blocks, streams. Pure.

A request is added with its rank, turns from a prefill into a stream with its first token, and is freed. Every step is
idempotent and harmless for an unknown request, so a lost or late report cannot make a count wrong for ever; what is never
freed expires.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from dynamo.kv.overlap import WorkerRank
from dynamo.placement.rank_load import Booked, LoadOfRank

DEFAULT_EXPIRY_SECONDS: Final = 300.0  # DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS
SCAN_SECONDS: Final = 30.0  # between searches for expired requests when requests are added
MAX_REQUESTS: Final = 200_000  # of one account; beyond that, adding one ends the oldest


class _Expiry:
    """When requests that were never freed are searched for, and which ones those are."""

    __slots__ = ("_seconds", "due_at")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.due_at = 0.0

    def stale(self, booked: Iterable[Booked], now: float, is_live: Callable[[str], bool] | None) -> list[str]:
        """Return the requests, of these with the oldest first, that were added too long ago and are not live."""
        self.due_at = now + SCAN_SECONDS
        limit = now - self._seconds
        old = itertools.takewhile(lambda each: each.added_at <= limit, booked)
        return [each.request_id for each in old if each.expires and not (is_live and is_live(each.request_id))]


class ActiveLoad:
    """The accounts of all ranks. Bounded by the requests that are active, and by `MAX_REQUESTS`."""

    __slots__ = (
        "_block_size", "_booked", "_expiry", "_output_serial", "_ranks", "_tracks_output", "changed", "heads",
        "on_relief",
    )  # fmt: skip

    def __init__(
        self, block_size: int, *, tracks_output_blocks: bool = False, expiry_seconds: float = DEFAULT_EXPIRY_SECONDS
    ) -> None:
        """Make an empty account. Without `tracks_output_blocks` generated tokens take no blocks here."""
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self._block_size, self._tracks_output = block_size, tracks_output_blocks
        self._expiry = _Expiry(expiry_seconds)
        self._ranks: dict[WorkerRank, LoadOfRank] = {}
        self._booked: dict[str, Booked] = {}  # oldest first
        # The first block of each prompt that is booked, to the ranks where it is and the requests that have it there.
        self.heads: dict[int, dict[WorkerRank, int]] = {}
        self.changed: set[WorkerRank] = set()  # ranks whose account changed since a reader cleared this
        # Called when a load may have fallen; empty unless requests wait for that.
        self.on_relief: dict[object, Callable[[], None]] = {}
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
        if now >= self._expiry.due_at or len(self._booked) >= MAX_REQUESTS:
            self._make_room(now)
        load = self.of(rank)
        booked = Booked(request_id, rank, sequence, now)
        booked.context_tokens = prompt_tokens
        booked.output.expected, booked.expires = expected_output, expires
        self._booked[request_id] = load.booked[request_id] = booked
        load.clock.advance(now)
        load.clock.context_tokens += prompt_tokens
        load.hold(sequence)
        if sequence:
            self._count_head(sequence[0], rank, 1)
        load.reuse.touch(sequence, now)
        if counts_prefill:
            booked.prefill_tokens = max(0, prompt_tokens - cached_tokens)
            load.prefill_tokens += booked.prefill_tokens
            load.join_pass(request_id, max(1, booked.prefill_tokens - coming_tokens), now, self._block_size)
        self.changed.add(booked.rank)
        return True

    def prefill_completed(self, request_id: str, now: float) -> Booked | None:
        """Turn a prefill into a stream: its first token is there. Return it if it was a prefill until now."""
        booked = self._booked.get(request_id)
        if booked is None or booked.first_token is not None:
            return None
        load = self._ranks[booked.rank]
        self._end_prefill(load, booked)
        passes = load.prefill_pass.complete(request_id, now)
        if passes is not None:
            load.clock.add(passes)
        clock = load.clock
        clock.advance(now)
        clock.streams += 1
        load.boundary_at = now
        booked.first_token = clock.first_token(now)
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
        load.clock.context_tokens += tokens
        blocks_before = -(-booked.context_tokens // self._block_size)
        booked.output.tokens += tokens
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
        clock = load.clock
        clock.advance(now)
        if booked.first_token is None:
            load.prefill_pass.drop(request_id, now)
        else:
            clock.streams -= 1
            load.boundary_at = now if clock.streams else None
        clock.context_tokens -= booked.context_tokens
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
        if dp_rank is not None:
            gone = [rank] if (rank := WorkerRank(worker_id, dp_rank)) in self._ranks else []
        else:
            gone = [rank for rank in self._ranks if rank.worker_id == worker_id]
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

    def requests(self, rank: WorkerRank) -> int:
        """Return the active requests."""
        load = self._ranks.get(rank)
        return 0 if load is None else len(load.booked)

    def prefills(self, rank: WorkerRank) -> Iterator[Booked]:
        """Iterate over the requests without a first token, oldest first."""
        load = self._ranks.get(rank)
        return iter(()) if load is None else (each for each in load.booked.values() if each.first_token is None)

    # -- expiry

    def expire(self, now: float, is_live: Callable[[str], bool] | None = None) -> list[str]:
        """Free what was added too long ago and was never freed; return the ids. What `is_live` confirms stays."""
        stale = self._expiry.stale(self._booked.values(), now, is_live)
        for request_id in stale:
            self.free(request_id, now)
        return stale

    def _make_room(self, now: float) -> None:
        if now >= self._expiry.due_at:
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
        output = booked.output
        load.hold(output.names[-blocks:])
        if output.expected is not None:
            weight = max(0.0, 1.0 - output.tokens / max(1, output.expected))
            load.weigh_unshared(booked, weight)
