"""What the Responses API needs of a store of its answers; the part `stored_responses` is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct

from dynamo.protocol.openai.shapes import JsonObject


def scoped_owner(key_owner: str | None, tenant: str) -> str:
    """Return the owner of a response: the tenant that a client names, within the owner of its key where there is one."""
    return tenant if key_owner is None else f"{key_owner}\n{tenant}"


def project_of(owner: str) -> str:
    """Return whose share of a store a response takes: the tenants that clients name are no owners of their own."""
    return owner.partition("\n")[0] if "\n" in owner else ""


class StoredResponse(Struct, frozen=True):
    """One response and what it answered."""

    id: str
    response: bytes  # the response object, as JSON
    input_items: bytes  # the items of its input, each with an id, as a JSON array
    previous_id: str | None = None  # of the response whose conversation it goes on with
    owner: str = ""  # only a request of the same owner finds it

    @property
    def size(self) -> int:
        return len(self.response) + len(self.input_items)


class AnswerHistory(Protocol):
    """Keeps answers, and gives back the conversations that they are part of."""

    async def keep(self, stored: StoredResponse) -> None:
        """Keep a response. One that cannot be kept was answered all the same: that is logged."""

    async def items_before(self, previous_id: str, owner: str) -> tuple[list[JsonObject], int]:
        """Return the items of the conversation that ends with a response, and their bytes. Raises RequestRejected (400)."""

    async def items(self, references: Mapping[str, str], owner: str) -> dict[str, JsonObject]:
        """Return items by their ids; `references` gives where each was named. Raises RequestRejected (400)."""
