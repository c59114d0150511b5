"""A visitor of the inspector of a frontend in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

from support.asgi_client import Exchange
from support.frontend_cluster import Cluster

__all__ = ["Lens", "Patches", "messages_of"]


class Lens:
    """Calls the inspector's routes with its token."""

    def __init__(self, house: Cluster, *, headers: dict[str, str] | None = None) -> None:
        self._client = house.client
        inspector = house.frontend.parts["inspector"].inspector
        assert inspector is not None
        self.headers = {"authorization": f"Bearer {inspector.token}"} if headers is None else headers

    def begin(self, method: str, path: str, body: Any = None, *, query: str = "", **headers: str) -> Exchange:
        given = {**self.headers, **{name.replace("_", "-"): value for name, value in headers.items()}}
        return self._client.begin(method, "/admin/v1/" + path, body, headers=given, query=query)

    async def get(self, path: str, **query: Any) -> Any:
        found = await self.begin("GET", path, query=urlencode(query)).done()
        assert found.status == 200, found.body
        return found.json

    async def post(self, path: str, body: Any = None) -> Exchange:
        return await self.begin("POST", path, body).done()

    def watch(self, *, last: str | None = None, **query: Any) -> Exchange:
        headers = {} if last is None else {"last_event_id": last}
        return self.begin("GET", "watch", query=urlencode(query), **headers)


def messages_of(watch: Exchange) -> list[tuple[str, str, Any]]:
    """The messages of a watch so far: (event, id, data)."""
    found = []
    for block in watch.events:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields["event"], fields["id"], json.loads(fields["data"])))
    return found


class Patches:
    """The patches of a watch, each looked at once.

    The clock says when one is made, so what a request does in a moment may be told in one or in several, and a rate by itself.
    """

    def __init__(self, watch: Exchange) -> None:
        self._watch = watch
        self._seen = len(watch.events)

    async def until(self, is_wanted: Callable[[Any], bool]) -> Any:
        """Wait for the next patch that is wanted."""
        while True:
            await self._watch.until(lambda each: len(each.events) > self._seen)
            name, id, patch = messages_of(self._watch)[self._seen]
            self._seen += 1
            assert (name, id) == ("patch", str(patch["seq"]))
            if is_wanted(patch):
                return patch
