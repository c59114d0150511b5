"""Stored responses as a part: the answers of the Responses API are kept, and served again."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final
from urllib.parse import parse_qs

import msgspec

from dynamo.frontend.apis.history import StoredResponse, scoped_owner
from dynamo.frontend.base.access import Access, identity_of
from dynamo.frontend.base.asgi import Receive, Scope, Send, first_headers, reply, reply_rejected
from dynamo.frontend.base.metrics.families import FrontendFamilies
from dynamo.frontend.base.offload import LARGE_BODY_BYTES, Offload
from dynamo.frontend.base.settings.stored_responses import OFF, SQLITE, StoredResponseSettings, StoreLimits
from dynamo.frontend.http.routes import GuardedRoute
from dynamo.frontend.parts.part import Kernel, Part
from dynamo.frontend.parts.stored_responses.base import ResponseStore, StoreUnavailable, StoreUsage
from dynamo.frontend.parts.stored_responses.memory import MemoryResponseStore
from dynamo.protocol.openai.errors import RequestRejected, not_built, response_not_found
from dynamo.protocol.openai.escaping import json_line
from dynamo.protocol.openai.shapes import JsonObject
from dynamo.runtime.observe.metrics import Family

_decode: Final = msgspec.json.decode

DEFAULT_PAGE: Final = 20
LARGEST_PAGE: Final = 100
TENANT: Final = b"x-tenant-id"  # a response that was stored with it is found with it
Query = dict[str, list[str]]
FAMILIES: Final = (
    Family("stored_responses", "gauge", "[Responses](responses.md#stored-responses) that are kept"),
    Family("stored_response_bytes", "gauge", "What they take, their inputs included"),
)
logger = logging.getLogger(__name__)


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

    async def items_before(self, previous_id: str, owner: str) -> tuple[list[JsonObject], int]:
        """Return the items of the conversation that ends with a response, its output included, and their bytes.

        Raises:
            RequestRejected: 400 when a response of it is not kept (any more), or the conversation is too long.
        """
        turns: list[list[JsonObject]] = []
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

    async def items(self, references: Mapping[str, str], owner: str) -> dict[str, JsonObject]:
        """Return items by their ids; `references` holds where each was named.

        Raises:
            RequestRejected: 400 for an item that is not kept (any more).
        """
        found: dict[str, JsonObject] = {}
        for id, path in references.items():
            stored = await self._get(id, owner)
            items = [] if stored is None else await self._items_of(stored)
            item = next((item for item in items if item.get("id") == id), None)
            if item is None:
                raise RequestRejected(400, f"Item with id '{id[:64]}' not found.", param=path)
            found[id] = item
        return found

    async def _items_of(self, stored: StoredResponse) -> list[JsonObject]:
        """Return the items of one response: of its input, and of its output."""

        def read() -> list[JsonObject]:
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


class _StoredRoute:
    """A route for one stored response."""

    def __init__(self, history: ResponseHistory, *, knows_tenants: bool = True) -> None:
        """`knows_tenants`: as the requests whose answers are stored."""
        self._history, self._knows_tenants = history, knows_tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        id: str = scope["path_params"]["response_id"]
        query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        identity = identity_of(scope)
        tenant = first_headers(scope).get(TENANT, b"").decode("latin-1") if self._knows_tenants else ""
        owner = scoped_owner(None if identity is None else identity.owner, tenant)
        try:
            body = await self._answer(self._history, scope["method"], id, owner, query)
        except RequestRejected as error:
            await reply_rejected(send, error)
        else:
            await reply(send, 200, body)

    @abstractmethod
    async def _answer(self, history: ResponseHistory, method: str, id: str, owner: str, query: Query) -> bytes:
        """Return the body. Raises RequestRejected."""


class StoredResponseRoute(_StoredRoute):
    """GET and DELETE `/v1/responses/{id}`."""

    async def _answer(self, history: ResponseHistory, method: str, id: str, owner: str, query: Query) -> bytes:
        if method == "DELETE":
            await history.delete(id, owner)
            return json_line({"id": id, "object": "response", "deleted": True})
        if _one(query, "stream") in ("true", "1"):
            raise not_built("Validation: `stream` is not supported: the events of a response are not kept", "stream")
        return (await history.find(id, owner)).response


class InputItemsRoute(_StoredRoute):
    """GET `/v1/responses/{id}/input_items`, in pages."""

    async def _answer(self, history: ResponseHistory, method: str, id: str, owner: str, query: Query) -> bytes:
        order, after = _one(query, "order") or "desc", _one(query, "after")
        if order not in ("asc", "desc"):
            raise _refused(f"order must be asc or desc, got '{order[:64]}'", "order")
        limit = _one(query, "limit") or str(DEFAULT_PAGE)
        if not limit.isdecimal() or len(limit) > 4 or not 1 <= int(limit) <= LARGEST_PAGE:
            raise _refused(f"limit must be between 1 and {LARGEST_PAGE}, got '{limit[:64]}'", "limit")
        stored = await history.find(id, owner)
        items: Sequence[JsonObject] = msgspec.json.decode(stored.input_items)
        if order == "desc":
            items = items[::-1]
        if after:
            place = next((place for place, item in enumerate(items) if item["id"] == after), None)
            if place is None:
                raise _refused(f"there is no input item '{after[:64]}'", "after")
            items = items[place + 1 :]
        page = items[: int(limit)]
        return json_line(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": len(items) > len(page),
            }
        )


class CancelRoute(_StoredRoute):
    """POST `/v1/responses/{id}/cancel`: what is stored here has ended."""

    async def _answer(self, history: ResponseHistory, method: str, id: str, owner: str, query: Query) -> bytes:
        await history.find(id, owner)
        raise RequestRejected(
            400, "Only a response that runs in the background can be cancelled, and this one has ended"
        )


def _one(query: Query, name: str) -> str | None:
    return query[name][-1] if name in query else None


def _refused(message: str, param: str) -> RequestRejected:
    return RequestRejected(400, f"Validation: {message}", param=param)


class StoredResponseMetrics:
    """How many responses are kept, and their bytes."""

    def __init__(self, families: FrontendFamilies) -> None:
        families = families.of(FAMILIES)
        self._entries, self._bytes = families.gauge("stored_responses"), families.gauge("stored_response_bytes")

    def show(self, usage: StoreUsage) -> None:
        """Take over what is kept now."""
        self._entries.set(usage.entries)
        self._bytes.set(usage.bytes)


class StoredResponses(Part):
    """A store, and the routes that show what is in it."""

    name: ClassVar[str] = "stored_responses"
    families = FAMILIES
    outlives_models: ClassVar[bool] = True

    def __init__(self, kernel: Kernel, store: ResponseStore, limits: StoreLimits) -> None:
        settings = kernel.settings
        kernel.shares.show("stored responses", limits.bytes, limits.bytes, store.projects)
        self._path, self._store = settings.paths["responses"], store
        self._knows_tenants = not settings.disable_nvext  # a POST ignores the header without it
        self.history = ResponseHistory(
            store,
            kernel.offload,
            max_bytes=settings.limits.body_limit_bytes,
            max_items=settings.messages_limit,
            report=StoredResponseMetrics(kernel.pipeline.metrics.families).show,
        )

    def routes(self) -> Sequence[GuardedRoute]:
        one = self._path + "/{response_id}"
        stored, items, cancel = [
            route(self.history, knows_tenants=self._knows_tenants)
            for route in (StoredResponseRoute, InputItemsRoute, CancelRoute)
        ]
        return (
            GuardedRoute(one, stored, "GET", "DELETE", access=Access.INFERENCE),
            GuardedRoute(one + "/input_items", items, "GET", access=Access.INFERENCE),
            GuardedRoute(one + "/cancel", cancel, "POST", access=Access.INFERENCE),
        )

    async def aclose(self) -> None:
        await self._store.aclose()


def open_stored_responses(settings: StoredResponseSettings, kernel: Kernel) -> StoredResponses | None:
    """Open the store; None where nothing is kept. Raises InvalidArgument for a file that cannot be opened."""
    place, limits = settings.responses_store, settings.response_limits
    store = open_response_store(place, limits, is_shared_port=kernel.peers is not None)
    return None if store is None else StoredResponses(kernel, store, limits)


def open_response_store(place: str, limits: StoreLimits, *, is_shared_port: bool) -> ResponseStore | None:
    """Open the store; None where nothing is kept. `is_shared_port`: other processes take requests on the same port.

    Raises InvalidArgument for a file that cannot be opened.
    """
    if place.startswith(SQLITE):
        from dynamo.frontend.parts.stored_responses.sqlite import (
            SqliteResponseStore,  # a frontend without a file does without
        )

        return SqliteResponseStore(Path(place.removeprefix(SQLITE)).expanduser(), limits)
    if place == OFF:
        return None
    if is_shared_port:
        logger.info(
            "responses are not stored: each of several processes would find only its own (DYN_RESPONSES_STORE=sqlite:FILE)"
        )
        return None
    return MemoryResponseStore(limits)
