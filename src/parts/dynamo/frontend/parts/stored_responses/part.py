"""Stored responses as a part: the answers of the Responses API are kept, and served again."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final

from dynamo.frontend.base.access import Access
from dynamo.frontend.base.metrics.families import FrontendFamilies
from dynamo.frontend.base.settings.stored_responses import OFF, SQLITE, StoredResponseSettings, StoreLimits
from dynamo.frontend.http.routes import GuardedRoute
from dynamo.frontend.parts.part import Kernel, Part
from dynamo.frontend.parts.stored_responses.base import ResponseStore, StoreUsage
from dynamo.frontend.parts.stored_responses.history import ResponseHistory
from dynamo.frontend.parts.stored_responses.memory import MemoryResponseStore
from dynamo.frontend.parts.stored_responses.routes import CancelRoute, InputItemsRoute, StoredResponseRoute
from dynamo.runtime.observe.metrics import Family

FAMILIES: Final = (
    Family("stored_responses", "gauge", "[Responses](responses.md#stored-responses) that are kept"),
    Family("stored_response_bytes", "gauge", "What they take, their inputs included"),
)


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


logger = logging.getLogger(__name__)


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
