"""What a store of responses promises. It keeps bytes and knows nothing of what is in them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from msgspec import Struct

from dynamo.protocol.responses.output import ItemIds

__all__ = [
    "ResponseStore",
    "StoreLimits",
    "StoreUnavailable",
    "StoreUsage",
    "StoredResponse",
    "scoped_owner",
    "stem_of",
]


def scoped_owner(key_owner: str | None, tenant: str) -> str:
    """Return the owner of a response: the tenant that a client names, within the owner of its key where there is one."""
    return tenant if key_owner is None else f"{key_owner}\n{tenant}"


class StoreUnavailable(Exception):
    """The store cannot be read or written now; its text says why."""


class StoreLimits(Struct, frozen=True):
    """How much is kept. What was used longest ago goes first."""

    entries: int
    bytes: int
    ttl_seconds: float


class StoreUsage(NamedTuple):
    """What is kept now."""

    entries: int
    bytes: int


class StoredResponse(Struct, frozen=True):
    """One response and what it answered."""

    id: str
    response: bytes  # the response object, as JSON
    input_items: bytes  # the items of its input, each with an id, as a JSON array
    previous_id: str | None = None  # of the response whose conversation it goes on with
    owner: str = ""  # only who names the same owner finds it

    @property
    def size(self) -> int:
        return len(self.response) + len(self.input_items)


class ResponseStore(Protocol):
    """Keeps responses within its limits.

    Reading or writing one counts as use. A response is gone after `ttl_seconds` without use, or earlier where others need its
    room. All methods raise `StoreUnavailable`, and may be called concurrently.
    """

    async def put(self, stored: StoredResponse) -> StoreUsage | None:
        """Keep a response, in place of one with the same id; return what is kept then.

        None, and nothing changed, when the response alone is larger than the limit.
        """

    async def get(self, id: str, owner: str = "") -> StoredResponse | None:
        """Return the response with this id, or the one that an item with this id belongs to; None when there is none."""

    async def delete(self, id: str, owner: str = "") -> bool:
        """Forget a response; False when there is none with this id."""

    async def usage(self) -> StoreUsage:
        """Return what is kept."""

    async def aclose(self) -> None:
        """Let go of what the store holds open; idempotent."""


def stem_of(id: str) -> str:
    """Return what the ids of a response and of its items have in common."""
    return id.partition("_")[2][: -ItemIds.NUMBER_DIGITS]
