"""What happened: workers that came and went, requests that moved, actions of operators. The last thousand of it."""

from __future__ import annotations

from collections import deque
from typing import Final

from dynamo.frontend.parts.inspector.clock import InspectorClock
from dynamo.protocol.inspector.views import EventView

MAX_EVENTS: Final = 1000


class EventLog:
    """A bounded list of events, the newest last. Used on the event loop only."""

    def __init__(self, clock: InspectorClock, frontend_id: str) -> None:
        self._clock, self._frontend_id = clock, frontend_id
        self._events: deque[EventView] = deque(maxlen=MAX_EVENTS)
        self._number = 0

    def add(
        self,
        kind: str,
        text: str,
        *,
        worker: str | None = None,
        model: str | None = None,
        request_id: str | None = None,
        by: str | None = None,
    ) -> EventView:
        """Note an event that happens now."""
        self._number += 1
        event = EventView(
            id=f"{self._frontend_id}/{self._number}",
            at_ms=self._clock.now_ms(),
            kind=kind,
            text=text,
            worker=worker,
            model=model,
            request_id=request_id,
            by=by,
        )
        self._events.append(event)
        return event

    def last(self, limit: int) -> list[EventView]:
        """Return the last events, the newest first."""
        found = list(self._events)
        return found[::-1][:limit]

    def of_request(self, id: str) -> list[EventView]:
        """Return the events of one request, in order."""
        return [event for event in self._events if event.request_id == id]

    def __len__(self) -> int:
        return len(self._events)
