"""The tables that pictures are made from."""

from __future__ import annotations

from dynamo.frontend.models.busy_threshold import LoadFollower
from dynamo.frontend.parts.inspector.caches import CacheTable
from dynamo.frontend.parts.inspector.clock import InspectorClock
from dynamo.frontend.parts.inspector.content import ContentReader
from dynamo.frontend.parts.inspector.events import EventLog
from dynamo.frontend.parts.inspector.lifecycle import WorkerLifecycle
from dynamo.frontend.parts.inspector.recent import RecentRequests
from dynamo.frontend.parts.inspector.routing import RoutingLog
from dynamo.frontend.parts.inspector.streams import StreamTable
from dynamo.frontend.parts.inspector.token_rates import TokenRates
from dynamo.frontend.parts.inspector.workers import ClusterTable
from dynamo.frontend.parts.recording.failures import FailureRing
from dynamo.frontend.parts.recording.redaction import load_redaction
from dynamo.frontend.pipeline.inference import Pipeline

__all__ = ["Tables"]


class Tables:
    """One table for each kind of row, over the parts of one frontend."""

    def __init__(
        self,
        pipeline: Pipeline,
        loads: LoadFollower,
        clock: InspectorClock,
        frontend_id: str,
        failures: FailureRing | None,
    ) -> None:
        """`failures`: those of this process; None: they are not kept."""
        self.failures = failures
        self.frontend_id = frontend_id
        self.events = EventLog(clock, frontend_id)
        self.streams = StreamTable(pipeline.register, clock, frontend_id)
        self.recent = RecentRequests(clock, frontend_id)
        self.lifecycle = WorkerLifecycle(pipeline.models, self.events, clock)
        self.routing = RoutingLog(pipeline.models.desk, clock, frontend_id)
        self.token_rates = TokenRates()
        self.contents = ContentReader(pipeline.models, load_redaction(pipeline.settings.request_trace.redact))
        self.caches = CacheTable(pipeline.models, clock)
        self.cluster = ClusterTable(
            pipeline.models,
            pipeline.settings,
            clock,
            loads,
            self.lifecycle.first_seen,
            self.caches.hit_share,
        )
