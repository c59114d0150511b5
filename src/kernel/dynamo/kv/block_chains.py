"""The events that make any router hold what an index holds.

An index keeps the chained name of a block and nothing of its own tokens; the published form of an event needs both. So
a caller that dumps an index keeps, for each block, the hash of its tokens and the block before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from dynamo.kv.changes import BlockRecord, PublishedEvent
from dynamo.kv.events import BlocksAdded, RouterEvent
from dynamo.kv.hashing import extend_sequence
from dynamo.kv.index import PrefixIndex
from dynamo.kv.overlap import WorkerRank

SPARE_BLOCKS: Final = 4096  # that may be remembered beyond twice those that are held
_TIERS: Final = ("device", "host_pinned", "disk", "external")  # a block of a lower tier may follow one of a higher tier


class BlockChains:
    """What each block of an index is made of. Bounded by about twice the blocks that the index holds."""

    __slots__ = ("_dump", "_limit", "_links")

    def __init__(self, dump: Callable[[], Iterable[RouterEvent]]) -> None:
        """`dump`: every block of the index by itself, its sequence hash as its `tokens_hash` (`PrefixIndex.dump`)."""
        self._dump = dump
        self._links: dict[
            int, tuple[int | None, int]
        ] = {}  # by sequence hash: the block before, the hash of its tokens
        self._limit = SPARE_BLOCKS

    def __len__(self) -> int:
        """Return how many blocks are remembered."""
        return len(self._links)

    def learn(self, parent: int | None, tokens_hashes: Sequence[int]) -> None:
        """Take blocks that follow each other and the block with the sequence hash `parent`."""
        for tokens_hash, block in zip(tokens_hashes, extend_sequence(parent, tokens_hashes), strict=True):
            self._links[block] = (parent, tokens_hash)
            parent = block
        if len(self._links) > self._limit:
            held = {_sequence_hash(event) for event in self._dump()}
            self._links = {block: link for block, link in self._links.items() if block in held}
            self._limit = 2 * len(self._links) + SPARE_BLOCKS

    def events(self) -> list[PublishedEvent]:
        """Return events that store every block that is held with all blocks before it: runs without a branch, parents first.

        A block whose rank gave up one before it is left out: no prompt reaches it.
        """
        by_place: dict[tuple[WorkerRank, str, str], dict[int, int]] = {}  # names of the blocks, by sequence hash
        for event in self._dump():
            rank = WorkerRank(event.worker_id, event.event.dp_rank)
            domain = event.residency_domain if isinstance(event.residency_domain, str) else "worker"
            stored = _stored(event)
            by_place.setdefault((rank, event.storage_tier, domain), {}).setdefault(
                _sequence_hash(event), stored.blocks[0].block_hash
            )
        events: list[PublishedEvent] = []
        known: dict[WorkerRank, dict[int, int]] = {}  # names of the blocks that were reported already
        for (rank, tier, domain), names in sorted(by_place.items(), key=_by_rank_and_tier):
            told = known.setdefault(rank, {})
            for parent, blocks in self._runs(names, told):
                events.append(
                    {
                        "worker_id": rank.worker_id,
                        "storage_tier": tier,
                        "residency_domain": domain,
                        "event": {
                            "event_id": len(events),
                            "data": {"stored": {"parent_hash": parent, "start_position": None, "blocks": blocks}},
                            "dp_rank": rank.dp_rank,
                        },
                    }
                )
        return events

    def _runs(self, names: dict[int, int], told: dict[int, int]) -> Iterator[tuple[int | None, list[BlockRecord]]]:
        """Return the runs of one place, each with the name of the block before it; what is returned is added to `told`."""
        after: dict[int | None, list[int]] = {}
        for block in sorted(names):
            if block in self._links:
                after.setdefault(self._links[block][0], []).append(block)
        waiting: list[tuple[int | None, int]] = [(None, block) for block in reversed(after.get(None, ()))]
        for parent in told.keys() & after.keys():
            if parent not in names:  # it is in a higher tier
                waiting.extend((told[parent], block) for block in after[parent])
        while waiting:
            name, block = waiting.pop()
            run: list[BlockRecord] = []
            following = [block]
            while len(following) == 1:
                (block,) = following
                told[block] = names[block]
                run.append({"block_hash": names[block], "tokens_hash": self._links[block][1], "mm_extra_info": None})
                following = after.get(block, [])
            yield name, run
            waiting.extend((names[block], child) for child in reversed(following))


class DumpedIndex:
    """An exact index that can be dumped: what a feed of KV events fills (`index_feed.KvSink`)."""

    __slots__ = ("chains", "index")

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self.chains = BlockChains(index.dump)

    def apply(self, event: RouterEvent) -> str:
        """Apply one event; return what became of it."""
        status = self.index.apply(event)
        data = event.event.data
        if status == "ok" and not isinstance(data, str) and data.stored is not None:
            stored = data.stored
            rank = WorkerRank(event.worker_id, event.event.dp_rank)
            parent = None if stored.parent_hash is None else self.index.sequence_hash(rank, stored.parent_hash)
            self.chains.learn(parent, [block.tokens_hash for block in stored.blocks])
        return status

    def forget(self, worker_id: int, dp_rank: int) -> None:
        """Drop all blocks of a rank."""
        self.index.forget(worker_id, dp_rank)


def _stored(event: RouterEvent) -> BlocksAdded:
    data = event.event.data
    assert not isinstance(data, str)
    assert data.stored is not None, "a dump only stores"
    return data.stored


def _sequence_hash(event: RouterEvent) -> int:
    return _stored(event).blocks[0].tokens_hash


def _by_rank_and_tier(place: tuple[tuple[WorkerRank, str, str], object]) -> tuple[WorkerRank, int, str]:
    rank, tier, domain = place[0]
    return rank, _TIERS.index(tier), domain
