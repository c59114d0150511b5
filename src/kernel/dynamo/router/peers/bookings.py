"""The bookings of other routers in this router's account, each peer within its bounds, and gone with its peer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from dynamo.kv.overlap import WorkerRank
from dynamo.placement.active_load import ActiveLoad
from dynamo.placement.replica_events import BookedPrompt

MAX_PEERS: Final = 1_024  # the one that was silent for longest goes first, with its bookings
MAX_PEER_REQUESTS: Final = 20_000  # of one peer; beyond that its oldest one ends
MAX_REQUESTS: Final = 100_000  # of all peers: half of the account, so that no peer pushes out what this router booked
MAX_PEER_BLOCKS: Final = 1_000_000  # of one peer's bookings; beyond that a booking counts by its tokens alone
MAX_BLOCKS: Final = 4_000_000  # of all peers
MAX_RANKS: Final = 65_536  # that are counted because a peer named them, while the ranks of the workers are unknown
SWEEP_SECONDS: Final = 30.0
SILENT_SECONDS: Final = 300.0  # after which a peer without a booking is forgotten


class _Peer:
    """What one peer has booked, oldest first."""

    __slots__ = ("blocks", "bookings", "heard_at")

    def __init__(self) -> None:
        self.bookings: OrderedDict[str, tuple[str, int]] = OrderedDict()  # by name here: request id and counted blocks
        self.blocks = 0
        self.heard_at = 0.0


class PeerBookings:
    """Counts what peers book. A peer is the publisher of its messages, whichever routers it names."""

    def __init__(self, load: ActiveLoad, block_size: int, is_live: Callable[[WorkerRank], bool] | None = None) -> None:
        """`is_live`: whether a rank is there; bookings of others do not count. None: all do, within a bound."""
        self._load, self._block_size, self._is_live = load, block_size, is_live
        self._peers: OrderedDict[int, _Peer] = OrderedDict()  # the latest last
        self._owners: dict[str, _Peer] = {}  # by name of the booking
        self._names: dict[str, list[str]] = {}  # by request id: peers may use the same one
        self._blocks = 0
        self._next_sweep = 0.0

    def __len__(self) -> int:
        """Return how many bookings there are."""
        return len(self._owners)

    def __contains__(self, publisher_id: object) -> bool:
        """Return whether a peer is known."""
        return publisher_id in self._peers

    def add(
        self, publisher_id: int, request: tuple[int, str], rank: WorkerRank, prompt: BookedPrompt, now: float
    ) -> None:
        """Count a request that a peer booked. `request`: the id of the router that it names, and of the request."""
        self._sweep(now)
        if not self._counts(rank):
            return
        name = _name(*request)
        if name in self._load:
            return
        peer = self._peer(publisher_id, now)
        if len(peer.bookings) >= MAX_PEER_REQUESTS:
            self._end_oldest(peer, now)
        if len(self._owners) >= MAX_REQUESTS:
            self._end_oldest(max(self._peers.values(), key=lambda each: len(each.bookings)), now)
        sequence = prompt.token_sequence or ()
        hint = prompt.prefill_load_hint
        uncached = 0 if hint is None else hint.initial_effective_prefill_tokens
        tokens = max(uncached, len(sequence) * self._block_size)  # a report has not the length of the prompt
        if peer.blocks + len(sequence) > MAX_PEER_BLOCKS or self._blocks + len(sequence) > MAX_BLOCKS:
            sequence = ()
        self._load.add(
            name,
            rank,
            sequence,
            prompt_tokens=tokens,
            cached_tokens=tokens - uncached,
            now=now,
            expected_output=prompt.expected_output_tokens,
            counts_prefill=prompt.track_prefill_tokens and hint is not None,
        )
        peer.bookings[name] = request[1], len(sequence)
        peer.blocks += len(sequence)
        self._blocks += len(sequence)
        self._owners[name] = peer
        self._names.setdefault(request[1], []).append(name)

    def free(self, request: tuple[int, str], rank: WorkerRank, now: float) -> None:
        """End a request that was booked on a rank; unknown is fine."""
        name = _name(*request)
        if name in self._owners and self._load.free(name, now, rank) is not None:
            self._forget(name)

    def prefill_completed(self, request: tuple[int, str], now: float) -> bool:
        """Count the first token of a request; False: no peer has booked it under this router."""
        name = _name(*request)
        if name not in self._owners:
            return False
        self._load.prefill_completed(name, now)
        return True

    def prefill_completed_anywhere(self, request_id: str, now: float) -> None:
        """Count the first token of a request that any peer may have booked."""
        for name in self._names.get(request_id, ()):
            self._load.prefill_completed(name, now)

    def forget(self, publisher_id: int, now: float) -> None:
        """End everything that a peer has booked: it has gone. Unknown is fine."""
        peer = self._peers.pop(publisher_id, None)
        if peer is not None:
            while peer.bookings:
                self._end_oldest(peer, now)

    def _counts(self, rank: WorkerRank) -> bool:
        if self._is_live is not None:
            return self._is_live(rank)
        return self._load.knows(rank) or len(self._load.ranks()) < MAX_RANKS

    def _peer(self, publisher_id: int, now: float) -> _Peer:
        peer = self._peers.get(publisher_id)
        if peer is None:
            if len(self._peers) >= MAX_PEERS:
                self.forget(next(iter(self._peers)), now)
            peer = self._peers[publisher_id] = _Peer()
        self._peers.move_to_end(publisher_id)
        peer.heard_at = now
        return peer

    def _end_oldest(self, peer: _Peer, now: float) -> None:
        name = next(iter(peer.bookings))
        self._load.free(name, now)
        self._forget(name)

    def _forget(self, name: str) -> None:
        """Drop a booking that the account no longer has."""
        peer = self._owners.pop(name)
        request_id, blocks = peer.bookings.pop(name)
        peer.blocks -= blocks
        self._blocks -= blocks
        names = self._names[request_id]
        names.remove(name)
        if not names:
            del self._names[request_id]

    def _sweep(self, now: float) -> None:
        """Forget, from time to time, what the account has ended by itself, and peers of which nothing is left."""
        if now < self._next_sweep:
            return
        self._next_sweep = now + SWEEP_SECONDS
        for name in [name for name in self._owners if name not in self._load]:
            self._forget(name)
        for publisher_id in [
            each for each, peer in self._peers.items() if not peer.bookings and peer.heard_at <= now - SILENT_SECONDS
        ]:
            del self._peers[publisher_id]


def _name(router_id: int, request_id: str) -> str:
    """Return the name of another router's booking: a client may send the same request id to two routers."""
    return f"{router_id:x}/{request_id}"
