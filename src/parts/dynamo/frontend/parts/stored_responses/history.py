"""Conversations out of stored responses: what a request goes on with, and the items it names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from dynamo.frontend.apis.history import StoredResponse
from dynamo.frontend.base.offload import LARGE_BODY_BYTES, Offload
from dynamo.frontend.parts.stored_responses.base import ResponseStore, StoreUnavailable, StoreUsage
from dynamo.protocol.openai.errors import RequestRejected, response_not_found

logger = logging.getLogger(__name__)

_decode: Final = msgspec.json.decode


class ResponseHistory:
    """Reads and writes one store for the API. Its failures are answers to clients."""

    def __init__(
        self,
        store: ResponseStore,
        offload: Offload,
        *,
        max_items: int,
        max_bytes: int,
        report: Callable[[StoreUsage], None] = lambda _usage: None,
    ) -> None:
        """`max_items`, `max_bytes`: of one conversation; `report` is called with what is kept, after each change."""
        self._store, self._offload, self._report = store, offload, report
        self._max_items, self._max_bytes = max_items, max_bytes

    async def keep(self, stored: StoredResponse) -> None:
        """Keep a response. One that cannot be kept was answered all the same: that is logged."""
        try:
            usage = await self._store.put(stored)
        except StoreUnavailable as error:
            logger.error("response %s was not stored: %s", stored.id, error)
            return
        if usage is not None:
            self._report(usage)
        else:
            logger.warning("response %s was not stored: its %d bytes exceed the limit", stored.id, stored.size)

    async def find(self, id: str, owner: str) -> StoredResponse:
        """Return a response. Raises RequestRejected: 404, or 503 when the store fails."""
        found = await self._get(id, owner)
        if found is None or found.id != id:
            raise response_not_found(id)
        return found

    async def delete(self, id: str, owner: str) -> None:
        """Forget a response. Raises as `find`."""
        try:
            is_gone = await self._store.delete(id, owner)
            self._report(await self._store.usage())
        except StoreUnavailable as error:
            raise _unavailable(error) from error
        if not is_gone:
            raise response_not_found(id)

    async def items_before(self, previous_id: str, owner: str) -> tuple[list[Any], int]:
        """Return the items of the conversation that ends with a response, its output included, and their bytes.

        Raises:
            RequestRejected: 400 when a response of it is not kept (any more), or the conversation is too long.
        """
        turns: list[list[Any]] = []
        id: str | None = previous_id
        count = size = 0
        while id is not None:
            found = await self._get(id, owner)
            if found is None or found.id != id:
                raise RequestRejected(
                    400,
                    f"Previous response with id '{id[:64]}' not found.",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            size += found.size
            if size > self._max_bytes:
                text = f"the conversation has more than {self._max_bytes} bytes (DYN_HTTP_BODY_LIMIT_MB)"
                raise RequestRejected(400, f"Validation: {text}", param="previous_response_id")
            turns.append(await self._items_of(found))
            count += len(turns[-1])
            if count > self._max_items:
                text = f"the conversation has more than {self._max_items} items (DYN_HTTP_MESSAGES_LIMIT)"
                raise RequestRejected(400, f"Validation: {text}", param="previous_response_id", limit="messages")
            id = found.previous_id
        return [item for turn in reversed(turns) for item in turn], size

    async def items(self, references: Mapping[str, str], owner: str) -> dict[str, Any]:
        """Return items by their ids; `references` holds where each was named.

        Raises:
            RequestRejected: 400 for an item that is not kept (any more).
        """
        found: dict[str, Any] = {}
        for id, path in references.items():
            stored = await self._get(id, owner)
            items = [] if stored is None else await self._items_of(stored)
            item = next((item for item in items if item.get("id") == id), None)
            if item is None:
                raise RequestRejected(400, f"Item with id '{id[:64]}' not found.", param=path)
            found[id] = item
        return found

    async def _items_of(self, stored: StoredResponse) -> list[Any]:
        """Return the items of one response: of its input, and of its output."""

        def read() -> list[Any]:
            return [*_decode(stored.input_items), *_decode(stored.response)["output"]]

        return await self._offload(read) if stored.size > LARGE_BODY_BYTES else read()

    async def _get(self, id: str, owner: str) -> StoredResponse | None:
        try:
            return await self._store.get(id, owner)
        except StoreUnavailable as error:
            raise _unavailable(error) from error


def _unavailable(error: StoreUnavailable) -> RequestRejected:
    logger.error("%s", error)
    return RequestRejected(503, "The store of responses is not available", retry_after_seconds=1)
