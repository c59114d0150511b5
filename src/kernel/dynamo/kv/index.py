"""Which worker ranks hold which blocks, by the KV events they publish.

Every block is known by its sequence hash, which this index chains from the tokens hashes of the events. The engine's own
name of a block matters only to name parents and removals. A rank's answer counts its blocks from the first one of a
prompt to the first one it lacks, also where it dropped a block in the middle and holds what follows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat, takewhile
from typing import Final, TypeAlias

import msgspec

from dynamo.kv.events import BlocksAdded, BlockUpdate, HeldBlock, KvChange, RouterEvent
from dynamo.kv.hashing import extend_sequence
from dynamo.kv.held_prefixes import HeldPrefixes, held_prefixes
from dynamo.kv.holders import BlockHolders, RankBits, RankMask, extend_depths
from dynamo.kv.overlap import Overlap, WorkerRank

OK: Final = "ok"
PARENT_NOT_FOUND: Final = "parent_block_not_found"
BLOCK_NOT_FOUND: Final = "block_not_found"
INVALID_SEQUENCE: Final = "invalid_block_sequence"
INVALID_BLOCK: Final = "invalid_block"
CAPACITY_EXHAUSTED: Final = "capacity_exhausted"
UNSUPPORTED_DOMAIN: Final = "unsupported_residency_domain"
STATUSES: Final = (
    OK,
    PARENT_NOT_FOUND,
    BLOCK_NOT_FOUND,
    INVALID_SEQUENCE,
    INVALID_BLOCK,
    CAPACITY_EXHAUSTED,
    UNSUPPORTED_DOMAIN,
)
"""What can become of an event."""

# A rank whose worker has reported no size may hold this many blocks in each tier, some 100 MB of this process.
DEFAULT_CAPACITY: Final = 1_000_000
MAX_CAPACITY: Final = 4_000_000  # of a rank and tier, whatever its worker reports: 64 million tokens in blocks of 16
MAX_RANKS: Final = 16_384

SWEPT_AT_ONCE: Final = (
    1024  # blocks of ranks that were forgotten, with each event and choice: some tenths of a millisecond
)
_ALL: Final = 2**63

_U64: Final = 2**64 - 1
_I64: Final = -(2**63)

_WORKER: Final = "worker"
_CACHE_OWNER: Final = "cache_owner"
_DOMAINS: Final = (_WORKER, _CACHE_OWNER)
_DEVICE: Final = ("device", _WORKER)
_HOST: Final = tuple(("host_pinned", domain) for domain in _DOMAINS)
_DISK: Final = tuple((tier, domain) for tier in ("disk", "external") for domain in _DOMAINS)
_PLACES: Final = (_DEVICE, *_HOST, *_DISK)

Place: TypeAlias = tuple[str, str]
"""(storage tier, residency domain)"""


class _RankBlocks:
    """The blocks of one rank in one place."""

    __slots__ = ("bit", "by_block", "capacity", "count", "holders", "names", "repeated")

    def __init__(self, bit: RankMask, holders: BlockHolders, capacity: int) -> None:
        self.bit = bit
        self.holders = holders
        self.capacity = capacity
        self.count = 0
        # The engine's name -> sequence hash; None while every name is the sequence hash, as with most engines.
        self.names: dict[int, int] | None = None
        self.repeated: dict[int, int] = {}  # sequence hash -> how many further names it has
        self.by_block: dict[int, int] | None = None  # sequence hash -> a name, once a fetch from here was considered

    def sequence_hash(self, name: int) -> int | None:
        """Return the sequence hash of a block; None for a block that the rank does not hold."""
        if self.names is not None:
            return self.names.get(name)
        return name if self.holders.is_held(self.bit, name) else None

    def store_chain(self, sequence: list[int], parent: int | None) -> None:
        """Book blocks that follow each other, and `parent`, and that the engine names by their sequence hashes."""
        if self.names is None:
            self.count += self.holders.add(self.bit, sequence, parent)
        else:
            self.store(dict(zip(sequence, sequence, strict=True)), sequence, parent)

    def store(self, named: dict[int, int], sequence: list[int], parent: int | None) -> None:
        """Book blocks that follow each other, and `parent`: `named` has the engine's name of each block of `sequence`."""
        own = self.names
        if own is None:
            own = self.names = {block: block for block in self.holders.blocks_of(self.bit)}
        if self.by_block is not None:
            self.by_block.update(zip(sequence, named, strict=True))
        if own.keys().isdisjoint(named) and self.holders.add_unheld(self.bit, sequence, parent):
            own |= named  # as nearly every event is
            self.count = len(own)
            return
        names = list(named)
        known = list(map(own.get, names))
        if known == sequence:
            return
        if known.count(None) < len(known) or self.holders.held_by(self.bit, sequence):
            for name, block in zip(names, sequence, strict=True):
                self._store_again(own, name, block)
        else:
            own.update(zip(names, sequence, strict=True))
            self.holders.add(self.bit, sequence, parent)
        self.count = len(own)

    def remove(self, names: list[int]) -> bool:
        """Drop blocks; False: some were not known."""
        own = self.names
        if own is None:
            gone = self.holders.discard(self.bit, names)
            self.count -= gone
            return gone == len(names)
        known = list(map(own.pop, names, repeat(None)))
        is_complete = self.count - len(own) == len(names)
        self.count = len(own)
        self.holders.discard(self.bit, self._release([block for block in known if block is not None]))
        return is_complete

    def fits(self, blocks: Sequence[HeldBlock]) -> bool:
        """Return whether there is room for blocks."""
        if self.count + len(blocks) <= self.capacity:
            return True
        if len(blocks) > self.capacity:  # each has a name of its own
            return False
        return self.count + sum(self.sequence_hash(block.block_hash) is None for block in blocks) <= self.capacity

    def items(self) -> Iterable[tuple[int, int]]:
        """Return name and sequence hash of each block."""
        return (
            ((block, block) for block in self.holders.blocks_of(self.bit)) if self.names is None else self.names.items()
        )

    def names_of(self, sequence: Sequence[int]) -> list[int]:
        """Return the engine's names of blocks that are held, up to the first one without a known name."""
        if self.names is None:
            return list(sequence)
        if self.by_block is None:
            self.by_block = {block: name for name, block in self.names.items()}
        return list(takewhile(lambda name: name is not None, map(self.by_block.get, sequence)))  # type: ignore[arg-type]

    def _store_again(self, own: dict[int, int], name: int, block: int) -> None:
        """Book one block of which the name or the content may be known already."""
        before = own.get(name)
        if before == block:
            return
        if before is not None:  # the engine uses the name for another block now
            self.holders.discard(self.bit, self._release([before]))
        if self.holders.is_held(self.bit, block):
            self.repeated[block] = self.repeated.get(block, 0) + 1
        else:
            self.holders.add(self.bit, [block])
        own[name] = block

    def _release(self, sequence: list[int]) -> list[int]:
        """Return those of the blocks that have lost their last name."""
        if self.by_block is not None:
            for block in sequence:
                self.by_block.pop(block, None)
        if not self.repeated:
            return sequence
        gone: list[int] = []
        for block in sequence:
            names = self.repeated.get(block, 0)
            if names > 1:
                self.repeated[block] = names - 1
            elif names:
                del self.repeated[block]
            else:
                gone.append(block)
        return gone


class _PlaceBlocks:
    """The blocks of all ranks in one place."""

    __slots__ = ("holders", "ranks")

    def __init__(self) -> None:
        self.holders = BlockHolders()
        self.ranks: dict[tuple[int, int], _RankBlocks] = {}  # keyed by WorkerRank or the tuple equal to it


class PrefixIndex:
    """The exact index. Not thread-safe; applying an event or finding a prompt never waits."""

    def __init__(self, *, max_ranks: int = MAX_RANKS) -> None:
        self._bits = RankBits(max_ranks)
        self._device = _PlaceBlocks()
        self._places: dict[Place, _PlaceBlocks] = {_DEVICE: self._device}  # further ones as they are needed
        self._capacities: dict[tuple[tuple[int, int], str], int] = {}
        self._degraded: frozenset[WorkerRank] = frozenset()
        self._retired: RankMask = 0  # bits of ranks that were forgotten, until `_sweep` has removed what they held
        # What an event's four words lead to, so that most events need one lookup; emptied whenever a rank is.
        self._routes: dict[tuple[int, int, str, str | msgspec.UnsetType | None], _RankBlocks] = {}

    @property
    def degraded(self) -> frozenset[WorkerRank]:
        """Ranks that reported more blocks than their worker has, so that removals must have been lost.

        It is another object whenever it has changed, and the same object while it has not.
        """
        return self._degraded

    def set_capacity(self, rank: WorkerRank, blocks: int | None, tier: str = "device") -> None:
        """Set how many blocks a rank can hold in a tier, by its worker's word; None or 0: unknown again.

        What does not fit is not stored, and the rank counts as degraded until it is forgotten or cleared. No rank holds
        more than `MAX_CAPACITY`.
        """
        if blocks is not None and blocks < 0:
            raise ValueError(f"blocks must be at least 0, got {blocks}")
        if not blocks:
            self._capacities.pop((rank, tier), None)
        else:
            blocks = self._capacities[rank, tier] = min(blocks, MAX_CAPACITY)
        for domain in _DOMAINS:
            content = self._places.get((tier, domain))
            if content is not None and rank in content.ranks:
                content.ranks[rank].capacity = blocks or DEFAULT_CAPACITY

    def apply(self, event: RouterEvent) -> str:
        """Apply one event and return what became of it, one of STATUSES.

        An event that is not ok is applied as far as it can be: of a removal all blocks that are known, of a store none.
        """
        if self._retired:
            self._sweep(SWEPT_AT_ONCE)
        change = event.event
        data = change.data
        if isinstance(data, str):
            return self._clear_for(event)
        route = (event.worker_id, change.dp_rank, event.storage_tier, event.residency_domain)
        held = self._routes.get(route)
        if held is None:
            place = _place_of(event)
            if place is None:
                return UNSUPPORTED_DOMAIN
            found = self._rank_blocks(place, WorkerRank(event.worker_id, change.dp_rank), data.stored)
            if isinstance(found, str):
                return found
            if found is None:
                return BLOCK_NOT_FOUND if data.removed is not None and data.removed.block_hashes else OK
            held = self._routes[route] = found
        status = OK
        if data.stored is not None:
            status = self._store(route, held, data.stored)
        if data.removed is not None and not held.remove(data.removed.block_hashes):
            status = BLOCK_NOT_FOUND
        return status

    def forget(self, worker_id: int, dp_rank: int | None = None) -> None:
        """Drop all blocks of a rank, or of all ranks of a worker, with their capacities."""
        if dp_rank is not None:
            self._forget(WorkerRank(worker_id, dp_rank))
            return
        for rank in {*self._bits, *(rank for rank, _ in self._capacities)}:
            if rank[0] == worker_id:
                self._forget(WorkerRank(*rank))

    def find(self, sequence: Sequence[int], now: float = 0.0) -> Mapping[WorkerRank, Overlap]:
        """Return the overlap of each rank with a prompt, as OverlapIndex describes it. `now` is not read."""
        if self._retired:
            self._sweep(SWEPT_AT_ONCE)
        depths = self._device.holders.depths(sequence)
        if len(self._places) > 1 and sequence:
            return self._find_in_tiers(sequence, depths)
        return self._bits.overlaps(depths)

    def blocks(self, rank: WorkerRank | None = None) -> int:
        """Return how many blocks a rank holds in all tiers, or all ranks together."""
        return sum(
            held.count
            for place in self._places.values()
            for held in (place.ranks.values() if rank is None else filter(None, [place.ranks.get(rank)]))
        )

    def blocks_by_tier(self, rank: WorkerRank) -> dict[str, int]:
        """Return how many blocks a rank holds, by tier."""
        found: dict[str, int] = {}
        for (tier, _), place in self._places.items():
            held = place.ranks.get(rank)
            if held is not None and held.count:
                found[tier] = found.get(tier, 0) + held.count
        return found

    def prefixes(self, hits: Mapping[int, int], most: int) -> HeldPrefixes:
        """Return the prefixes on devices, as `held_prefixes` chooses them."""
        return held_prefixes(self._device.holders, self._bits, hits, most)

    def sequence_hash(self, rank: WorkerRank, name: int) -> int | None:
        """Return the sequence hash of a block that a rank holds, by the engine's name; None for an unknown name."""
        return self._sequence_hash(rank, name)

    def engine_names(self, rank: WorkerRank, sequence: Sequence[int]) -> list[int]:
        """Return the engine's names of blocks that a rank holds on its device, up to the first one without a known name."""
        held = self._device.ranks.get(rank)
        return [] if held is None else held.names_of(sequence)

    def dump(self) -> list[RouterEvent]:
        """Return events that make an index of this package hold the same blocks, the same for the same blocks.

        The index keeps no hashes of a block's own tokens. Each block is therefore reported as the first one of a sequence,
        where both hashes are one: `tokens_hash` is its sequence hash, and it has no parent.
        """
        rows = sorted(
            (place, rank, block, name)
            for place, content in self._places.items()
            for rank, held in content.ranks.items()
            for name, block in held.items()
        )
        return [
            RouterEvent(
                worker_id,
                KvChange(number, BlockUpdate(stored=BlocksAdded([HeldBlock(name, block)])), dp_rank),
                tier,
                domain,
            )
            for number, ((tier, domain), (worker_id, dp_rank), block, name) in enumerate(rows)
        ]

    # -- changes -----------------------------------------------------------------------------------------------------

    def _store(
        self, route: tuple[int, int, str, str | msgspec.UnsetType | None], held: _RankBlocks, stored: BlocksAdded
    ) -> str:
        blocks = stored.blocks
        if not blocks:
            return OK
        if not held.fits(blocks):  # before anything is hashed, which takes a microsecond for each block
            self._degrade(WorkerRank(route[0], route[1]))
            return CAPACITY_EXHAUSTED
        names = [block.block_hash for block in blocks]
        parent_name = stored.parent_hash
        parent: int | None = None
        if parent_name is not None:
            parent = held.sequence_hash(parent_name)
            if parent is None:
                parent = self._sequence_hash(route[:2], parent_name)
                if parent is None:
                    return INVALID_SEQUENCE if parent_name in names else PARENT_NOT_FOUND
        try:
            sequence = extend_sequence(parent, [block.tokens_hash for block in blocks])
        except ValueError:  # a hash of more than 64 bits, which a JSON text can hold
            return INVALID_SEQUENCE if parent_name in names else INVALID_BLOCK
        if names == sequence:  # as most engines name their blocks; a chain of hashes holds no block twice
            held.store_chain(names, parent)
        elif parent_name in names:
            return INVALID_SEQUENCE
        else:
            if not _fit_64_bits(names):
                return INVALID_BLOCK
            named = dict(zip(names, sequence, strict=True))
            if len(named) < len(names):
                return INVALID_SEQUENCE
            held.store(named, sequence, parent)
        return OK

    def _degrade(self, rank: WorkerRank) -> None:
        if rank not in self._degraded:
            self._degraded |= {rank}

    def _clear_for(self, event: RouterEvent) -> str:
        domain = event.residency_domain
        if domain is not msgspec.UNSET and domain not in _DOMAINS:
            return UNSUPPORTED_DOMAIN
        self._clear(WorkerRank(event.worker_id, event.event.dp_rank), None if domain is msgspec.UNSET else domain)
        return OK

    def _clear(self, rank: WorkerRank, domain: str | None) -> None:
        self._routes.clear()
        for (_, own_domain), content in self._places.items():
            if domain is None or own_domain == domain:
                held = content.ranks.pop(rank, None)
                if held is not None and held.count:
                    content.holders.drop(held.bit)
        if rank in self._degraded:
            self._degraded -= {rank}
        if (bit := self._bits.get(rank)) is None:
            return
        if any(rank in content.ranks for content in self._places.values()):
            self._sweep(_ALL)  # the rank keeps its bit for what it holds elsewhere
        else:
            self._bits.retire(rank)
            self._retired |= bit

    def _sweep(self, blocks: int) -> None:
        """Remove some of what ranks held that were forgotten; their bits are free once all of it is gone."""
        left = 0
        for content in self._places.values():
            content.holders.sweep(blocks)
            left |= content.holders.dead
        self._bits.give_back(self._retired & ~left)
        self._retired &= left

    def _forget(self, rank: WorkerRank) -> None:
        self._clear(rank, None)
        for tier, _ in _PLACES:
            self._capacities.pop((rank, tier), None)

    def _sequence_hash(self, rank: tuple[int, int], name: int) -> int | None:
        """Return the sequence hash of a rank's block in any place; a block of a lower tier may follow one elsewhere."""
        for place in _PLACES:
            content = self._places.get(place)
            held = None if content is None else content.ranks.get(rank)
            if held is not None and (found := held.sequence_hash(name)) is not None:
                return found
        return None

    def _rank_blocks(self, place: Place, rank: WorkerRank, stored: BlocksAdded | None) -> _RankBlocks | str | None:
        """Return what a rank holds in a place, made new for blocks that can be stored; else None, or what is wrong."""
        content = self._places.get(place)
        held = None if content is None else content.ranks.get(rank)
        if held is not None or stored is None or not stored.blocks:
            return held
        capacity = self._capacities.get((rank, place[0]), DEFAULT_CAPACITY)
        if len(stored.blocks) > capacity:
            self._degrade(rank)
            return CAPACITY_EXHAUSTED
        parent = stored.parent_hash
        if parent is not None:
            if any(block.block_hash == parent for block in stored.blocks):
                return INVALID_SEQUENCE
            if self._sequence_hash(rank, parent) is None:
                return PARENT_NOT_FOUND
        bit = self._bits.take(rank)
        if bit is None and self._retired:
            self._sweep(_ALL)
            bit = self._bits.take(rank)
        if bit is None:
            self._degrade(rank)
            return CAPACITY_EXHAUSTED
        if content is None:
            content = self._places[place] = _PlaceBlocks()
        held = content.ranks[rank] = _RankBlocks(bit, content.holders, capacity)
        return held

    # -- lower tiers -------------------------------------------------------------------------------------------------

    def _find_in_tiers(
        self, sequence: Sequence[int], depths: list[tuple[int, RankMask]]
    ) -> Mapping[WorkerRank, Overlap]:
        begun = 0
        for _, mask in depths:
            begun |= mask
        depths = [*depths, (0, self._bits.all() & ~begun)]
        after_host = extend_depths(depths, self._masks_in(_HOST, sequence))
        after_disk = extend_depths(after_host, self._masks_in(_DISK, sequence))
        device, host = self._by_rank(depths), self._by_rank(after_host)
        return {
            rank: Overlap(device[rank], host[rank] - device[rank], end - host[rank])
            for end, mask in after_disk
            if end
            for rank in self._bits.of(mask)
        }

    def _by_rank(self, depths: list[tuple[int, RankMask]]) -> dict[WorkerRank, int]:
        return {rank: depth for depth, mask in depths for rank in self._bits.of(mask)}

    def _masks_in(self, places: Sequence[Place], sequence: Sequence[int]) -> Sequence[RankMask]:
        """Return the holders of each block in any of the places."""
        found = [self._places[place].holders.masks(sequence) for place in places if place in self._places]
        if len(found) < 2:
            return found[0] if found else ()
        return [_union(masks) for masks in zip(*found, strict=True)]


def _fit_64_bits(names: list[int]) -> bool:
    """Return whether all names are 64-bit numbers, signed or unsigned."""
    try:
        array("Q", names)  # a third of the time that two passes in search of the ends take
    except OverflowError:
        return max(names) <= _U64 and min(names) >= _I64
    return True


def _place_of(event: RouterEvent) -> Place | None:
    """Return where the blocks of an event are; None for a tier or domain that does not exist."""
    domain = _WORKER if event.residency_domain is msgspec.UNSET else event.residency_domain
    return next((place for place in _PLACES if place == (event.storage_tier, domain)), None)


def _union(masks: tuple[RankMask, ...]) -> RankMask:
    union = 0
    for mask in masks:
        union |= mask
    return union
