"""The tables that pictures are made from."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

from dynamo.frontend.base.failures import FailureRing
from dynamo.frontend.base.redaction import load_redaction
from dynamo.frontend.http.settings import HttpSettings
from dynamo.frontend.models.busy_threshold import LoadFollower
from dynamo.frontend.parts.inspector.caches import CacheTable
from dynamo.frontend.parts.inspector.clock import InspectorClock
from dynamo.frontend.parts.inspector.content import ContentReader
from dynamo.frontend.parts.inspector.events import EventLog
from dynamo.frontend.parts.inspector.lifecycle import WorkerLifecycle
from dynamo.frontend.parts.inspector.recent import RecentRequests
from dynamo.frontend.parts.inspector.routing import RoutingLog
from dynamo.frontend.parts.inspector.streams import StreamTable
from dynamo.frontend.parts.inspector.workers import ClusterTable
from dynamo.frontend.pipeline.inference import Pipeline


class Tables:
    """One table for each kind of row, over the parts of one frontend."""

    def __init__(
        self,
        pipeline: Pipeline,
        settings: HttpSettings,
        loads: LoadFollower,
        clock: InspectorClock,
        frontend_id: str,
        failures: FailureRing | None,
    ) -> None:
        """`failures`: those of this process; None: they are not kept."""
        self.failures, self.settings = failures, settings
        self.frontend_id = frontend_id
        self.events = EventLog(clock, frontend_id)
        self.streams = StreamTable(pipeline.register, clock, frontend_id)
        self.recent = RecentRequests(clock, frontend_id)
        self.lifecycle = WorkerLifecycle(pipeline.models, self.events, clock)
        self.routing = RoutingLog(pipeline.models.holds, clock, frontend_id)
        self.token_rates = TokenRates()
        self.contents = ContentReader(pipeline.models, load_redaction(settings.request_trace.redact))
        self.caches = CacheTable(pipeline.models, clock)
        self.cluster = ClusterTable(
            pipeline.models,
            settings,
            clock,
            loads,
            self.lifecycle.first_seen,
            self.caches.hit_share,
        )


KEPT_SECONDS: Final = 60
MAX_REQUESTS: Final = 32  # the one that was looked at longest ago goes first
SPAN_SECONDS: Final = 0.9  # a viewer looks each second, not quite


class _Seen:
    """How far a request had come at each look."""

    __slots__ = ("at", "rates", "tokens")

    def __init__(self, tokens: int, at: float) -> None:
        self.tokens, self.at = tokens, at
        self.rates: deque[float] = deque(maxlen=KEPT_SECONDS)


class TokenRates:
    """The rates of some requests by id. Bounded; used on the event loop only."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, _Seen] = OrderedDict()

    def look(self, id: str, tokens: int, now: float) -> list[float]:
        """Take how many tokens a request has made; return its tokens per second since the first look, an entry each second."""
        seen = self._seen.get(id)
        if seen is None:
            seen = self._seen[id] = _Seen(tokens, now)
            if len(self._seen) > MAX_REQUESTS:
                self._seen.popitem(last=False)
        self._seen.move_to_end(id)
        if now - seen.at >= SPAN_SECONDS:
            self._note(seen, tokens, now)
        return list(seen.rates)

    def of(self, id: str) -> list[float]:
        """Return what is known of a request that has ended."""
        seen = self._seen.get(id)
        return [] if seen is None else list(seen.rates)

    def _note(self, seen: _Seen, tokens: int, now: float) -> None:
        """Note the rate since the last look, once for each second: nobody may have looked for some of them."""
        seconds = now - seen.at
        rate = round(max(0, tokens - seen.tokens) / seconds, 2)
        seen.rates.extend([rate] * min(KEPT_SECONDS, max(1, round(seconds))))
        seen.tokens, seen.at = tokens, now
