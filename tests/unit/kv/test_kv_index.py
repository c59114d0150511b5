"""The index of KV events, against the simplest model of the same promises."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.kv.events import BlocksAdded, BlocksDropped, BlockUpdate, HeldBlock, KvChange, RouterEvent, read_events
from dynamo.kv.hashing import sequence_hashes
from dynamo.kv.index import MAX_CAPACITY, PrefixIndex
from dynamo.kv.overlap import Overlap, WorkerRank
from support.cases import each_case
from support.properties import examples

A, B = WorkerRank(1), WorkerRank(2, 3)
TIERS = ("device", "host_pinned", "disk", "external")


def stored(
    rank: WorkerRank,
    tokens: Sequence[int],
    names: Sequence[int] | None = None,
    *,
    parent: int | None = None,
    tier: str = "device",
    domain: str | msgspec.UnsetType | None = msgspec.UNSET,
) -> RouterEvent:
    """`names` None: each block by its sequence hash, of a sequence that begins here."""
    names = sequence_hashes(tokens) if names is None else names
    blocks = [HeldBlock(name, token) for name, token in zip(names, tokens, strict=True)]
    update = BlockUpdate(stored=BlocksAdded(blocks, parent))
    return RouterEvent(rank.worker_id, KvChange(1, update, rank.dp_rank), tier, domain)


def removed(
    rank: WorkerRank, *names: int, tier: str = "device", domain: str | msgspec.UnsetType | None = msgspec.UNSET
) -> RouterEvent:
    update = BlockUpdate(removed=BlocksDropped(list(names)))
    return RouterEvent(rank.worker_id, KvChange(1, update, rank.dp_rank), tier, domain)


def cleared(rank: WorkerRank, domain: str | msgspec.UnsetType | None = msgspec.UNSET) -> RouterEvent:
    return RouterEvent(rank.worker_id, KvChange(1, "cleared", rank.dp_rank), "device", domain)


def index_of(*events: RouterEvent) -> PrefixIndex:
    index = PrefixIndex()
    for event in events:
        assert index.apply(event) == "ok"
    return index


CHAIN = sequence_hashes([1, 2, 3, 4])


def test_each_rank_answers_with_its_depth() -> None:
    index = index_of(stored(A, [1, 2, 3]), stored(B, [1, 2]), stored(B, [9]))
    assert index.find(CHAIN) == {A: Overlap(3), B: Overlap(2)}
    assert index.find(sequence_hashes([9, 1])) == {B: Overlap(1)}
    assert index.find(sequence_hashes([2, 3])) == {}
    assert index.find([]) == {}
    assert index.blocks() == 6
    assert index.blocks(B) == 3
    assert index.blocks(WorkerRank(7)) == 0


def test_a_block_dropped_in_the_middle_ends_the_match_until_it_is_back() -> None:
    index = index_of(stored(A, [1, 2, 3, 4]), stored(B, [1, 2, 3, 4]), removed(A, CHAIN[1]))
    assert index.find(CHAIN) == {A: Overlap(1), B: Overlap(4)}
    index.apply(stored(A, [2], [CHAIN[1]], parent=CHAIN[0]))
    assert index.find(CHAIN) == {A: Overlap(4), B: Overlap(4)}


def test_engines_may_name_blocks_as_they_like() -> None:
    index = index_of(stored(A, [1, 2], [70, 71]), stored(A, [3], [72], parent=71), stored(B, [1], [70]))
    assert index.find(CHAIN) == {A: Overlap(3), B: Overlap(1)}
    assert index.apply(removed(A, 71, 72)) == "ok"
    assert index.find(CHAIN) == {A: Overlap(1), B: Overlap(1)}


def test_a_block_with_two_names_stays_until_both_are_removed() -> None:
    index = index_of(stored(A, [1], [70]), stored(A, [1], [80]), stored(A, [1], [90]))
    for name in (70, 80):
        index.apply(removed(A, name))
        assert index.find(CHAIN) == {A: Overlap(1)}
    index.apply(removed(A, 90))
    assert index.find(CHAIN) == {}


def test_a_name_that_is_used_again_means_the_newer_block() -> None:
    index = index_of(stored(A, [1], [70]), stored(A, [5], [70]))
    assert index.find(CHAIN) == {}
    assert index.find([5]) == {A: Overlap(1)}
    assert index.blocks() == 1


def test_what_does_not_fit_is_named_and_the_rest_is_done() -> None:
    index = index_of(stored(A, [1, 2]))
    assert index.apply(stored(A, [3], [7], parent=99)) == "parent_block_not_found"
    assert index.apply(stored(B, [3], [7], parent=CHAIN[1])) == "parent_block_not_found"  # another rank's block
    assert index.apply(stored(A, [3], [CHAIN[1]], parent=CHAIN[1])) == "invalid_block_sequence"
    assert index.apply(stored(A, [3, 4], [7, 7])) == "invalid_block_sequence"
    assert index.apply(stored(A, [])) == "ok"
    assert index.apply(removed(A, 5, CHAIN[1])) == "block_not_found"
    assert index.apply(removed(B, 5)) == "block_not_found"
    assert index.find(CHAIN) == {A: Overlap(1)}


def test_lower_tiers_go_on_where_the_device_ends() -> None:
    index = index_of(
        stored(A, [1]),
        stored(A, [2, 3], CHAIN[1:3], parent=CHAIN[0], tier="host_pinned"),
        stored(A, [4], CHAIN[3:], parent=CHAIN[2], tier="external"),
        stored(B, [1, 2], tier="disk"),
    )
    assert index.find(CHAIN) == {A: Overlap(1, 2, 1), B: Overlap(0, 0, 2)}
    index.apply(removed(A, CHAIN[2], tier="host_pinned"))
    assert index.find(CHAIN)[A] == Overlap(1, 1, 0)
    assert index.find(CHAIN[:1]) == {A: Overlap(1), B: Overlap(0, 0, 1)}


def test_domains_are_cleared_apart_or_together() -> None:
    def filled() -> PrefixIndex:
        return index_of(
            stored(A, [1]),
            stored(A, [2], [CHAIN[1]], parent=CHAIN[0], tier="host_pinned", domain="cache_owner"),
            stored(A, [2, 3], CHAIN[1:3], parent=CHAIN[0], tier="host_pinned", domain="worker"),
            stored(B, [1]),
        )

    index = filled()
    assert index.find(CHAIN) == {A: Overlap(1, 2), B: Overlap(1)}
    index.apply(cleared(A, "worker"))
    assert index.find(CHAIN) == {B: Overlap(1)}
    assert index.blocks(A) == 1
    index = filled()
    index.apply(cleared(A, "cache_owner"))
    assert index.find(CHAIN) == {A: Overlap(1, 2), B: Overlap(1)}
    index.apply(cleared(A))
    assert index.find(CHAIN) == {B: Overlap(1)}
    assert index.blocks(A) == 0


@pytest.mark.parametrize(
    "event",
    [
        stored(A, [1], domain=None),
        stored(A, [1], domain="elsewhere"),
        stored(A, [1], domain="cache_owner"),  # never of the device
        stored(A, [1], tier="tape"),
        cleared(A, None),
    ],
)
def test_an_event_of_an_unknown_domain_or_tier_changes_nothing(event: RouterEvent) -> None:
    index = index_of(stored(A, [1]))
    assert index.apply(event) == "unsupported_residency_domain"
    assert index.find(CHAIN) == {A: Overlap(1)}


def test_an_absent_domain_differs_from_null_on_the_wire() -> None:
    event = {"worker_id": 1, "storage_tier": "device", "event": {"event_id": 1, "data": "cleared", "dp_rank": 0}}
    (absent,) = read_events(msgspec.msgpack.encode([event]))
    (null,) = read_events(msgspec.msgpack.encode([{**event, "residency_domain": None}]))
    assert PrefixIndex().apply(absent) == "ok"
    assert PrefixIndex().apply(null) == "unsupported_residency_domain"


def test_a_rank_never_holds_more_than_its_worker_has() -> None:
    index = PrefixIndex()
    index.set_capacity(A, 2)
    assert index.apply(stored(A, [1, 2])) == "ok"
    assert index.apply(stored(A, [1, 2])) == "ok"  # nothing new
    assert not index.degraded
    assert index.apply(stored(A, [7])) == "capacity_exhausted"
    assert index.degraded == {A}
    assert index.blocks(A) == 2
    assert index.apply(stored(B, [7])) == "ok"
    index.apply(cleared(A))
    assert not index.degraded
    assert index.apply(stored(A, [5, 6, 7])) == "capacity_exhausted"
    index.forget(A.worker_id)
    assert not index.degraded
    assert index.apply(stored(A, [5, 6, 7])) == "ok"
    for unknown in (0, None):
        index.set_capacity(B, 1)
        assert index.apply(stored(B, [5, 6])) == "capacity_exhausted"
        index.set_capacity(B, unknown)
        assert index.apply(stored(B, [5, 6])) == "ok"
        index.apply(cleared(B))
    with pytest.raises(ValueError, match="blocks"):
        index.set_capacity(A, -1)


class UnreadBlocks(list[HeldBlock]):
    """More blocks than anybody should look at."""

    def __iter__(self) -> Iterator[HeldBlock]:
        raise AssertionError("the blocks of an event that cannot fit were read")


def test_an_event_that_cannot_fit_is_refused_by_its_size() -> None:
    blocks = UnreadBlocks([HeldBlock(1, 1)] * (MAX_CAPACITY + 1))
    for rank in (A, B):
        index = index_of(stored(A, [1, 2]))
        index.set_capacity(rank, 2**63)  # no worker has that many
        update = BlockUpdate(stored=BlocksAdded(blocks, CHAIN[0]))
        assert index.apply(RouterEvent(rank.worker_id, KvChange(1, update, rank.dp_rank))) == "capacity_exhausted"
        assert index.degraded == {rank}
        assert index.blocks() == 2


@each_case("number", [2**64, -(2**63) - 1, 10**400])
def test_a_hash_beyond_64_bits_costs_its_event_and_nothing_else(number: int) -> None:
    index = index_of(stored(A, [1, 2]))
    for event in (
        stored(A, [number], [7]),
        stored(A, [3, number], [7, 8], parent=CHAIN[1]),
        stored(A, [3], [number]),
        stored(B, [number], [7]),
    ):
        assert index.apply(event) == "invalid_block"
    assert index.apply(stored(A, [3], [7], parent=number)) == "parent_block_not_found"
    assert index.apply(removed(A, number)) == "block_not_found"
    assert index.find(CHAIN) == {A: Overlap(2)}
    assert index.blocks() == 2


def test_too_many_ranks_are_not_followed() -> None:
    index = PrefixIndex(max_ranks=1)
    assert index.apply(stored(A, [1])) == "ok"
    assert index.apply(stored(B, [1])) == "capacity_exhausted"
    assert index.find(CHAIN) == {A: Overlap(1)}
    index.forget(A.worker_id, A.dp_rank)
    assert index.apply(stored(B, [1])) == "ok"
    assert index.find(CHAIN) == {B: Overlap(1)}


def test_forgetting_a_worker_drops_all_its_ranks_and_no_other() -> None:
    ranks = [WorkerRank(1, 0), WorkerRank(1, 1), WorkerRank(2, 0)]
    index = index_of(*(stored(rank, [1, 2], [70, 71]) for rank in ranks))
    index.forget(1, 1)
    assert set(index.find(CHAIN)) == {ranks[0], ranks[2]}
    index.forget(1)
    assert set(index.find(CHAIN)) == {ranks[2]}
    index.forget(9)
    assert index.blocks() == 2


def test_a_dump_makes_an_equal_index_whatever_order_the_events_had() -> None:
    events = [
        stored(A, [1, 2, 3], [70, 71, 72]),
        stored(B, [1, 2]),
        stored(A, [2], [171], parent=70, tier="disk", domain="cache_owner"),
        removed(A, 71),
    ]
    index = index_of(*events)
    other = index_of(events[1], events[0], *events[2:])
    assert index.dump() == other.dump()
    again = index_of(*index.dump())
    assert again.dump() == index.dump()
    assert again.find(CHAIN) == index.find(CHAIN) == {A: Overlap(1, 0, 1), B: Overlap(2)}


# -- properties ---------------------------------------------------------------------------------------------------------


class Naive:
    """The same promises with no thought of speed: for each rank and place, a map from name to sequence hash."""

    def __init__(self) -> None:
        self.held: dict[WorkerRank, dict[tuple[str, str], dict[int, int]]] = {}
        self.capacities: dict[WorkerRank, int] = {}  # of the device
        self.degraded: set[WorkerRank] = set()

    def apply(self, event: RouterEvent) -> str:
        rank = WorkerRank(event.worker_id, event.event.dp_rank)
        places = self.held.setdefault(rank, {})
        domain = "worker" if event.residency_domain is msgspec.UNSET else event.residency_domain
        data = event.event.data
        if data == "cleared":
            self.degraded.discard(rank)
            for place in list(places):
                if event.residency_domain is msgspec.UNSET or place[1] == domain:
                    del places[place]
            return "ok"
        if event.storage_tier == "device" and domain == "cache_owner":
            return "unsupported_residency_domain"
        place = (event.storage_tier, str(domain))
        if data.removed is not None:
            names = data.removed.block_hashes
            found = [places.get(place, {}).pop(name, None) for name in names]
            return "block_not_found" if None in found else "ok"
        assert data.stored is not None
        names = [block.block_hash for block in data.stored.blocks]
        if self.exceeds(rank, place, names):
            self.degraded.add(rank)
            return "capacity_exhausted"
        if data.stored.parent_hash in names:
            return "invalid_block_sequence"
        chain: list[int] = []
        if names and data.stored.parent_hash is not None:
            known: dict[int, int] = {}
            for each in sorted(places, key=lambda each: (each != place, TIERS.index(each[0]), each[1] != "worker")):
                known = {**places[each], **known}
            if data.stored.parent_hash not in known:
                return "parent_block_not_found"
            chain = [known[data.stored.parent_hash]]
        if any(not -(2**63) <= each < 2**64 for block in data.stored.blocks for each in msgspec.structs.astuple(block)):
            return "invalid_block"
        if len(set(names)) < len(names):
            return "invalid_block_sequence"
        tokens = [block.tokens_hash for block in data.stored.blocks]
        sequence = sequence_hashes([*chain, *tokens])[len(chain) :]
        places.setdefault(place, {}).update(zip(names, sequence, strict=True))
        return "ok"

    def exceeds(self, rank: WorkerRank, place: tuple[str, str], names: list[int]) -> bool:
        if not names or place[0] != "device" or rank not in self.capacities:
            return False
        held = self.held[rank].get(place, {})
        limit = self.capacities[rank]
        return len(names) > limit or len(held) + sum(name not in held for name in names) > limit

    def forget(self, rank: WorkerRank) -> None:
        self.held.pop(rank, None)
        self.capacities.pop(rank, None)
        self.degraded.discard(rank)

    def find(self, sequence: Sequence[int]) -> dict[WorkerRank, Overlap]:
        found = {}
        for rank, places in self.held.items():
            at = 0
            depths = []
            for tiers in (("device",), ("host_pinned",), ("disk", "external")):
                blocks = {block for place, held in places.items() if place[0] in tiers for block in held.values()}
                begin = at
                while at < len(sequence) and sequence[at] in blocks:
                    at += 1
                depths.append(at - begin)
            if at:
                found[rank] = Overlap(*depths)
        return found

    def blocks(self, rank: WorkerRank) -> int:
        return sum(map(len, self.held.get(rank, {}).values()))


RANKS = [WorkerRank(1), WorkerRank(1, 1), WorkerRank(2)]
PATHS = [[first, second, third] for first in (1, 2) for second in (3, 4) for third in (5, 6)]


def probes() -> Iterable[list[int]]:
    return (sequence_hashes(path) for path in PATHS)


def random_event(rng: random.Random, naive: Naive, *, is_renamed: bool) -> RouterEvent:
    rank = rng.choice(RANKS)
    tier = rng.choice((*TIERS, "device", "device", "device"))
    domain = rng.choice((msgspec.UNSET, msgspec.UNSET, "worker", "cache_owner"))
    kind = rng.random()
    if kind < 0.03:
        return cleared(rank, domain)
    path = rng.choice(PATHS)
    start = rng.randrange(3)
    tokens = path[start : start + rng.randrange(4)]
    chain = sequence_hashes(path)
    names = [rng.randrange(12) for _ in tokens] if is_renamed else chain[start : start + len(tokens)]
    if kind < 0.4:
        return removed(rank, *names, tier=tier, domain=domain)
    parent = (rng.randrange(12) if is_renamed else chain[start - 1]) if start else None
    if tokens and rng.random() < 0.03:
        wrong = rng.choice((tokens, names))
        wrong[rng.randrange(len(wrong))] = rng.choice((2**64, -(2**63) - 1, 10**400))
    return stored(rank, tokens, names, parent=parent, tier=tier, domain=domain)


@given(st.integers(0, 2**32), st.booleans())
@examples(200, deadline=None)
def test_the_index_equals_a_naive_model_under_random_streams(seed: int, is_renamed: bool) -> None:
    rng = random.Random(seed)
    index, naive = PrefixIndex(), Naive()
    for _ in range(60):
        event = random_event(rng, naive, is_renamed=is_renamed and rng.random() < 0.9)
        assert index.apply(event) == naive.apply(event), event
        if rng.random() < 0.03:
            rank = rng.choice(RANKS)
            index.forget(*rank)
            naive.forget(rank)
        if rng.random() < 0.05:
            rank, limit = rng.choice(RANKS), rng.randrange(1, 12)
            index.set_capacity(rank, limit)
            naive.capacities[rank] = limit
        assert index.degraded == naive.degraded
        path = sequence_hashes(rng.choice(PATHS))
        assert index.find(path) == naive.find(path)
    for rank in RANKS:
        assert index.blocks(rank) == naive.blocks(rank)
    again = PrefixIndex()
    for event in index.dump():
        assert again.apply(event) == "ok"
    assert again.dump() == index.dump()
    for sequence in probes():
        assert again.find(sequence) == naive.find(sequence)


@given(st.integers(0, 2**32))
@examples(60, deadline=None)
def test_after_drops_duplicates_and_reordering_the_index_still_equals_the_model_and_forgetting_leaves_nothing(
    seed: int,
) -> None:
    """Long prompts of many ranks, so that masks and chunks of a lookup have all their cases."""
    rng = random.Random(seed)
    ranks = [WorkerRank(worker, rank) for worker in range(5) for rank in range(2)]
    tokens = [rng.getrandbits(64) for _ in range(rng.choice((40, 150, 400)))]
    chain = sequence_hashes(tokens)
    events: list[RouterEvent] = []
    for rank in ranks:
        depth, at = rng.randrange(len(tokens)), 0
        while at < depth:
            end = min(depth, at + rng.randrange(1, 60))
            events.append(stored(rank, tokens[at:end], chain[at:end], parent=chain[at - 1] if at else None))
            at = end
        events.append(removed(rank, *reversed(chain[depth - rng.randrange(depth + 1) : depth])))
        if rng.random() < 0.3:
            events.append(removed(rank, rng.choice(chain)))
    for _ in range(rng.choice((0, 0, 3, 30))):
        place = rng.randrange(len(events))
        match rng.randrange(3):
            case 0:
                del events[place]
            case 1:
                events.insert(rng.randrange(len(events)), events[place])
            case _:
                events.insert(rng.randrange(len(events)), events.pop(place))
    index, naive = PrefixIndex(), Naive()
    for event in events:
        assert index.apply(event) == naive.apply(event)
    assert index.find(chain) == naive.find(chain)
    other = [*chain[: len(chain) // 2], *sequence_hashes([5, 6, 7])]
    assert index.find(other) == naive.find(other)
    for rank in ranks:
        index.forget(*rank)
    assert index.find(chain) == {}
    assert index.blocks() == 0
    assert index.dump() == []
