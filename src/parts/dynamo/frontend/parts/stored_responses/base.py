"""What a store of responses promises. It keeps bytes and knows nothing of what is in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from dynamo.frontend.apis.history import StoredResponse
from dynamo.protocol.responses.output import ItemIds


class StoreUnavailable(Exception):
    """The store cannot be read or written now; its text gives the reason."""


class StoreUsage(NamedTuple):
    """What is kept now."""

    entries: int
    bytes: int


class ResponseStore(Protocol):
    """Keeps responses within its limits.

    Reading or writing one counts as use. A response is gone after `ttl_seconds` without use, or earlier where others need its
    room: then the one goes that was used longest ago of the project that has most, so that a project below its share loses
    nothing to the others. All methods raise `StoreUnavailable`, and may be called concurrently.
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

    async def projects(self) -> Mapping[str, int]:
        """Return the bytes of each project, by `project_of` the owners."""

    async def aclose(self) -> None:
        """Let go of what the store holds open; idempotent."""


def stem_of(id: str) -> str:
    """Return what the ids of a response and of its items have in common."""
    return id.partition("_")[2][: -ItemIds.NUMBER_DIGITS]
