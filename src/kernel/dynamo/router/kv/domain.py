"""The workers of one domain: their cards, what is known of their caches, and the placement among them."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from itertools import islice
from typing import Final, Protocol

from dynamo.kv.approximate_index import ApproximateIndex
from dynamo.kv.events import RouterEvent
from dynamo.kv.index import PrefixIndex
from dynamo.kv.overlap import WorkerRank
from dynamo.placement.kv_query import RankInfo, Trust
from dynamo.placement.kv_state import Selection
from dynamo.placement.kv_transfer import topology_taints
from dynamo.placement.rank_states import RankInfos
from dynamo.protocol.records import ModelCard
from dynamo.router.kv.fetch_hints import fetch_terms
from dynamo.router.kv.indexes import EventlessGuesses
from dynamo.router.kv.metrics import KvMetrics
from dynamo.router.kv.placement import KvPlacement
from dynamo.router.kv.sessions import SessionRelay
from dynamo.router.peers.replica_sync import ReplicaSync


class KvMember(Protocol):
    """What is needed of a worker that registered a model."""

    @property
    def endpoint(self) -> str:
        """Where it is: "namespace.component.endpoint"."""

    @property
    def instance_id(self) -> int: ...

    @property
    def card(self) -> ModelCard: ...


RENEWED_AT_ONCE: Final = 128  # ranks of which one choice takes what is new; the next choices go on: 1,000 take 20 ms


def _publishes(card: ModelCard) -> bool:
    """Return whether a worker may publish KV events; a worker whose card has no such member may."""
    return card.runtime_config.kv_event_publishing_enabled is not False


class DomainMembers:
    """The workers of one domain by the models that they belong to: their cards, and where they are."""

    __slots__ = ("_claims", "_endpoints", "_owners", "cards", "changed", "infos", "places")

    def __init__(self) -> None:
        self._owners: dict[Hashable, dict[int, KvMember]] = {}  # by identity: a member that has changed is another one
        self._claims: dict[int, dict[tuple[Hashable, int], KvMember]] = {}  # of each worker: by owner and identity
        self._endpoints: Tally[str] = Tally()
        self.cards: dict[WorkerRank, ModelCard] = {}
        self.infos = RankInfos()  # as they were when they were last read
        self.changed: dict[WorkerRank, None] = {}  # ranks of which `infos` is out of date, or has nothing
        self.places: dict[int, str] = {}  # the endpoint of each worker

    @property
    def endpoints(self) -> frozenset[str]:
        return frozenset(self._endpoints)

    def update(self, owner: Hashable, members: Iterable[KvMember]) -> tuple[set[WorkerRank], set[WorkerRank]]:
        """Take over the workers of one owner; return the ranks that are gone now, and those that are new or have another card."""
        known, now = self._owners.pop(owner, {}), {id(each): each for each in members}
        if now:
            self._owners[owner] = now
        lost = [known[each] for each in known.keys() - now.keys()]
        fresh = now.keys() - known.keys()
        new = [each for key, each in now.items() if key in fresh] if fresh else []
        former, found = dict[WorkerRank, ModelCard](), dict[WorkerRank, ModelCard]()
        for worker in dict.fromkeys(each.instance_id for each in (*lost, *new)):
            former |= self._cards_of(worker)
        for each in lost:
            del self._claims[each.instance_id][owner, id(each)]
        for each in new:
            self._claims.setdefault(each.instance_id, {})[owner, id(each)] = each
        self._endpoints.update(each.endpoint for each in new)
        self._endpoints = self._endpoints - Tally(each.endpoint for each in lost)
        for worker in dict.fromkeys(each.instance_id for each in (*lost, *new)):
            found |= self._cards_of(worker)
            if claims := self._claims[worker]:
                self.places[worker] = next(reversed(claims.values())).endpoint
            else:
                del self._claims[worker], self.places[worker]
        gone = former.keys() - found.keys()
        for rank in gone:
            del self.cards[rank]
        self.cards |= found
        return gone, {rank for rank, card in found.items() if former.get(rank) is not card}

    def _cards_of(self, worker: int) -> dict[WorkerRank, ModelCard]:
        """Return the card of each rank of a worker: that of the first model which names the rank."""
        cards: dict[WorkerRank, ModelCard] = {}
        for each in self._claims.get(worker, {}).values():
            for dp_rank in each.card.runtime_config.ranks:
                cards.setdefault(WorkerRank(worker, dp_rank), each.card)
        return cards


class KvDomain:
    """The workers of one domain: their cards, what is known of their caches, and the placement among them."""

    __slots__ = (
        "__weakref__", "_degraded", "_members", "_metrics", "_trusts", "guesses", "index", "placement", "relay",
    )  # fmt: skip

    def __init__(
        self,
        placement: KvPlacement,
        index: PrefixIndex | None,
        metrics: KvMetrics,
        *,
        guesses: ApproximateIndex | EventlessGuesses | None = None,
    ) -> None:
        """`index`: fed by events; None: events are not read. `guesses`: of what workers hold, by where prompts went."""
        self.guesses = guesses
        self.placement, self.index, self._metrics = placement, index, metrics
        self._members = DomainMembers()
        self._trusts: dict[WorkerRank, Trust] = {}  # what the events of a rank are worth; absent: none have come
        self._degraded: frozenset[WorkerRank] = frozenset()  # ranks that the index has no room for, as last seen
        self.relay = BookingRelay(self._members.places.get)
        placement.read_ranks = self._ranks

    @property
    def ranks(self) -> Collection[WorkerRank]:
        """The ranks that its workers' cards name."""
        return self._members.cards.keys()

    @property
    def endpoints(self) -> frozenset[str]:
        """Where its workers are."""
        return self._members.endpoints

    def is_live(self, rank: WorkerRank) -> bool:
        """Return whether a card names the rank."""
        return rank in self._members.cards

    def update(self, owner: Hashable, members: Iterable[KvMember]) -> set[WorkerRank] | None:
        """Take over the workers that one owner, such as a model, has here now; return the ranks that have changed with that.
        None: no rank has, and no endpoint."""
        endpoints = self.endpoints
        gone, changed = self._members.update(owner, members)
        if not gone and not changed:
            return set() if endpoints != self.endpoints else None
        if self.guesses is not None:
            for rank in gone:
                self.guesses.forget(*rank)
        if isinstance(self.guesses, EventlessGuesses):
            silent = {rank for rank in changed if not _publishes(self._members.cards[rank])}
            self.guesses.ranks = self.guesses.ranks - gone - changed | silent
        for rank in changed:
            self._set_capacity(rank)
        for rank in gone:
            self.forget(*rank)
        self._changed(gone | changed)
        self.placement.router.load.relieved()  # what waits may wait for one of these
        return gone | changed

    # -- a sink of events (`index_feed.KvSink`) ----------------------------------------------------------------------

    def apply(self, event: RouterEvent) -> str:
        """Apply one event; return what became of it."""
        if self.index is None:
            return "ok"
        status = self.index.apply(event)
        if self.index.degraded is not self._degraded:
            self._see_degraded(self.index)
        return status

    def forget(self, worker_id: int, dp_rank: int) -> None:
        """Drop all blocks of a rank."""
        if self.index is not None:
            self.index.forget(worker_id, dp_rank)
            self._set_capacity(WorkerRank(worker_id, dp_rank))
            self._see_degraded(self.index)

    def _see_degraded(self, index: PrefixIndex) -> None:
        if index.degraded is not self._degraded:
            former, self._degraded = self._degraded, index.degraded
            self._changed(former ^ self._degraded)

    def set_trust(self, rank: WorkerRank, trust: Trust) -> None:
        """Take what the events of a rank are worth from now on."""
        if trust is Trust.NONE:
            self._trusts.pop(rank, None)
        else:
            self._trusts[rank] = trust
        self._changed((rank,))

    def _changed(self, ranks: Iterable[WorkerRank]) -> None:
        """Let the next choice read these ranks anew, and the metric follow in a moment, choice or not."""
        members = self._members
        for rank in ranks:
            if rank in members.cards:
                members.changed[rank] = None
            else:
                members.changed.pop(rank, None)
                if rank in members.infos:
                    del members.infos[rank]
        self.placement.is_stale = True
        self._metrics.ranks_changed(lambda: (self._trust(rank, card) for rank, card in self._members.cards.items()))

    def _set_capacity(self, rank: WorkerRank) -> None:
        """Bound what the index keeps of a rank by what its worker has."""
        card = self._members.cards.get(rank)
        if card is None:
            return
        if self.index is not None:
            self.index.set_capacity(rank, card.runtime_config.total_kv_blocks)
        if isinstance(self.guesses, ApproximateIndex):
            self.guesses.set_capacity(rank, card.runtime_config.total_kv_blocks)

    def _ranks(self) -> Mapping[WorkerRank, RankInfo]:
        cards, infos, changed = self._members.cards, self._members.infos, self._members.changed
        for rank in [*islice(changed, RENEWED_AT_ONCE)]:
            del changed[rank]
            infos[rank] = self._info(rank, cards[rank])
        self.placement.is_stale = bool(changed)
        return infos

    def _trust(self, rank: WorkerRank, card: ModelCard) -> Trust:
        trust = self._trusts.get(rank)
        if trust is not None:
            return Trust.DEGRADED if rank in self._degraded else trust
        if self.guesses is None or (self.index is not None and _publishes(card)):
            return Trust.NONE
        return Trust.PREDICTED

    def _info(self, rank: WorkerRank, card: ModelCard) -> RankInfo:
        runtime = card.runtime_config
        return RankInfo(
            total_kv_blocks=runtime.total_kv_blocks,
            max_num_batched_tokens=runtime.max_num_batched_tokens,
            max_num_seqs=runtime.max_num_seqs,
            taints=frozenset(runtime.taints) | topology_taints(runtime),
            topology=runtime.topology_domains,
            trust=self._trust(rank, card),
            fetches=fetch_terms(runtime.runtime_data, rank.dp_rank),
        )


class BookingRelay:
    """Passes the bookings of a domain on to the sync of the endpoint that the worker is at (`BookingObserver`)."""

    __slots__ = ("_endpoint_of", "sessions", "syncs")

    def __init__(self, endpoint_of: Callable[[int], str | None]) -> None:
        """`endpoint_of`: from a worker's id to its endpoint; None: the worker has gone."""
        self._endpoint_of = endpoint_of
        self.syncs: dict[str, ReplicaSync] = {}  # by endpoint
        self.sessions = SessionRelay(endpoint_of)  # where sessions are bound is shared as well

    def booked(self, request_id: str, selection: Selection) -> None:
        """Report a request that was booked."""
        if (sync := self._sync(selection.rank)) is not None:
            sync.booked(request_id, selection)

    def prefill_completed(self, request_id: str, rank: WorkerRank) -> None:
        """Report the first token of a request."""
        if (sync := self._sync(rank)) is not None:
            sync.prefill_completed(request_id, rank)

    def freed(self, request_id: str, rank: WorkerRank) -> None:
        """Report the end of a request."""
        if (sync := self._sync(rank)) is not None:
            sync.freed(request_id, rank)

    def _sync(self, rank: WorkerRank) -> ReplicaSync | None:
        endpoint = self._endpoint_of(rank.worker_id)
        return None if endpoint is None else self.syncs.get(endpoint)
