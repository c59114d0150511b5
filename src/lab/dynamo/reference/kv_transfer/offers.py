"""What a prefill worker holds for others: each offer opens with its secret, and ends exactly once."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Callable, Sequence
from typing import Final

from dynamo.errors import Overloaded, StreamIncomplete
from dynamo.reference.kv_transfer.base import Ended

MAX_OFFERS: Final = 10_000  # each holds a block at least, so the cache is full long before


class Claim:
    """One attempt to fetch an offer."""

    __slots__ = ("offer", "revoke")

    def __init__(self, offer: Offer, revoke: Callable[[], object]) -> None:
        self.offer, self.revoke = offer, revoke


class Offer:
    """Blocks that a peer may fetch."""

    __slots__ = ("blocks", "claim", "ended", "expires_at", "secret", "timer", "transfer_id")

    def __init__(self, blocks: tuple[int, ...], ended: Ended, expires_at: float) -> None:
        """`expires_at`: time of the running loop."""
        self.blocks, self.ended, self.expires_at = blocks, ended, expires_at
        self.transfer_id, self.secret = secrets.token_hex(16), secrets.token_hex(16)
        self.claim: Claim | None = None  # of the peer that is fetching it
        self.timer: asyncio.TimerHandle | None = None


class Offers:
    """On one event loop."""

    def __init__(self, hold_seconds: float) -> None:
        self._hold_seconds = hold_seconds
        self._offers: dict[str, Offer] = {}
        self._idle = asyncio.Event()  # no peer is pulling
        self._idle.set()
        self._claims = 0

    def __len__(self) -> int:
        return len(self._offers)

    def add(self, blocks: Sequence[int], ended: Ended) -> Offer:
        """Hold `blocks` until they are fetched or the time is over. Raises Overloaded beyond `MAX_OFFERS`."""
        if len(self._offers) >= MAX_OFFERS:
            raise Overloaded(f"this worker holds {MAX_OFFERS} computed prompts that nobody has fetched")
        loop = asyncio.get_running_loop()
        offer = Offer(tuple(blocks), ended, loop.time() + self._hold_seconds)
        offer.timer = loop.call_at(offer.expires_at, self._expire, offer)
        self._offers[offer.transfer_id] = offer
        return offer

    def claim(self, transfer_id: str, secret: str, revoke: Callable[[], object]) -> Claim:
        """Begin to fetch: the offer does not expire until `unclaim` or `end`. Raises StreamIncomplete.

        The fetch before gets its `revoke` and may not go on: with the same ticket, the later one is of the process
        that still lives.
        """
        offer = self._offers.get(transfer_id)
        # One sentence for both: a peer that guesses ids must not learn which exist.
        if offer is None or not hmac.compare_digest(offer.secret.encode(), secret.encode()):
            raise StreamIncomplete("there is no such transfer (any more): it was fetched, or it expired")
        if offer.claim is not None:
            offer.claim.revoke()
        else:
            self._claims += 1
            self._idle.clear()
        claim = offer.claim = Claim(offer, revoke)
        return claim

    def unclaim(self, claim: Claim) -> None:
        """Drop the claim of a fetcher that has gone. Others may try until the offer expires; after `end` this does
        nothing.
        """
        offer = claim.offer
        if offer.claim is not claim:
            return
        self._release_claim(offer)
        if offer.expires_at <= asyncio.get_running_loop().time():
            self.end(offer, "expired")

    def fetched(self, claim: Claim) -> None:
        """Record the arrival of all blocks. Raises StreamIncomplete when the blocks were not held until now: then
        their content may be anything.
        """
        if claim.offer.claim is not claim or not self.end(claim.offer, "fetched"):
            raise StreamIncomplete("the transfer ended while it was fetched")

    def end(self, offer: Offer, reason: str) -> bool:
        """Release the offer's blocks; return whether the blocks were held until now."""
        if self._offers.pop(offer.transfer_id, None) is None:
            return False
        if offer.timer is not None:
            offer.timer.cancel()
        self._release_claim(offer)
        offer.ended(reason)
        return True

    def end_all(self) -> None:
        for offer in list(self._offers.values()):
            self.end(offer, "closed")

    async def wait_unclaimed(self) -> None:
        """Wait until no peer is fetching."""
        await self._idle.wait()

    def _release_claim(self, offer: Offer) -> None:
        if offer.claim is not None:
            offer.claim = None
            self._claims -= 1
            if self._claims == 0:
                self._idle.set()

    def _expire(self, offer: Offer) -> None:
        if offer.claim is None:  # else the peer that fetches it ends it, or `unclaim` does
            self.end(offer, "expired")
