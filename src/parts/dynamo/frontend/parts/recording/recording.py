"""What one frontend keeps of its requests: those that failed, and where it is enabled all of them."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import dynamo
from dynamo.frontend.base.failures import FailureRing
from dynamo.frontend.base.metrics.families import FrontendFamilies
from dynamo.frontend.base.redaction import load_redaction
from dynamo.frontend.http.settings import HttpSettings
from dynamo.frontend.parts.part import Part
from dynamo.frontend.parts.recording.bundles import FailureNotes, KeptBody
from dynamo.frontend.parts.recording.recorder import RequestRecorder
from dynamo.frontend.pipeline.exchange import Exchange, PartSlot
from dynamo.frontend.pipeline.outcome import Outcome, Reached, RequestListener
from dynamo.frontend.pipeline.plan import Plan
from dynamo.frontend.pipeline.reading import Resolved
from dynamo.frontend.pipeline.tap import TAP
from dynamo.runtime.observe.metrics import Family
from dynamo.settings.table import without_secrets

logger = logging.getLogger(__name__)

_BODY: Final[PartSlot[KeptBody]] = PartSlot("body")
_NO_BODY: Final = KeptBody(0, b"")


FAMILIES: Final = (
    Family(
        "request_trace_dropped_total",
        "counter",
        "Records of the [request trace](recording.md#recordings) that were not written; `reason` is `full` (too many waited), `redaction` (the operator's function failed), `failed` or `unwritable`",
        ("reason",),
    ),
)


class RecordingMetrics:
    """Counts the records that are not written."""

    def __init__(self, families: FrontendFamilies) -> None:
        self._dropped = families.of(FAMILIES).counters("request_trace_dropped_total")

    def dropped(self, reason: str, count: int) -> None:
        """Count records that were not written; `reason` is one of a fixed set. May be called in any thread."""
        self._dropped.labels(reason).inc(count)


class Recording(Part):
    """Listens to each request, and hands it to those that keep it."""

    name: ClassVar[str] = "recording"
    families = FAMILIES
    outlives_models: ClassVar[bool] = True

    def __init__(self, failures: FailureNotes, recorder: RequestRecorder | None = None) -> None:
        """`recorder`: None where only failures are kept."""
        self.failures, self.recorder = failures, recorder
        self._held_bytes = max(failures.held_bytes, 0 if recorder is None else recorder.held_bytes)

    def listeners(self) -> Sequence[RequestListener]:
        return (self,) if self.recorder is None else (self, _Sampling(self.recorder))

    def arrived(self, exchange: Exchange) -> None:
        """Hold the body until the request ends, where it is short enough."""
        body = exchange.arrival.body
        exchange.arrival.kept[_BODY] = KeptBody(len(body), body if len(body) <= self._held_bytes else b"")

    def ended(self, exchange: Exchange, outcome: Outcome) -> None:
        """Note a failure, and record the request."""
        rejected = outcome.rejected
        if rejected is None and self.recorder is None:
            return
        body = exchange.of(_BODY) or _NO_BODY
        if rejected is not None:
            if outcome.reached in (Reached.DOOR, Reached.RESOLVED):
                self.failures.declined(outcome, rejected, exchange.model or "")
                return
            try:
                self.failures.failed(exchange, outcome, rejected, body)
            except Exception:  # its record is still to be written
                logger.exception("no bundle was made of the failed request %s", exchange.name)
        if self.recorder is not None and (rejected is not None or outcome.reached is Reached.ADMITTED):
            self.recorder.ended(exchange, outcome, body.held)

    async def start(self) -> None:
        """Begin to gather the log lines of requests."""
        self.failures.log_lines.attach()

    async def aclose(self) -> None:
        """Write what is still to be written."""
        self.failures.log_lines.detach()
        if self.recorder is not None:
            await asyncio.get_running_loop().run_in_executor(None, self.recorder.close)


class _Sampling(RequestListener):
    """Begins to note the answers to the requests of the sample."""

    def __init__(self, recorder: RequestRecorder) -> None:
        self._recorder = recorder

    def planned(self, exchange: Exchange, resolved: Resolved, plan: Plan) -> None:
        tap = self._recorder.begin(exchange, resolved.request, resolved.effects)
        if tap is not None:
            exchange.keep(TAP, tap)


def open_recording(settings: HttpSettings, families: FrontendFamilies) -> Recording:
    """Return what keeps requests.

    Raises InvalidArgument for a redaction that cannot be imported.
    """
    given, trace = settings.recording, settings.request_trace
    redact = load_redaction(trace.redact)
    ring = FailureRing(given.keep_failed, given.keep_failed_bytes, process=lambda: _process(settings))
    failures = FailureNotes(ring, redact, keeps_content=given.keep_failed_content)
    return Recording(
        failures, RequestRecorder(trace, redact, RecordingMetrics(families).dropped) if trace.is_on else None
    )


def _process(settings: HttpSettings) -> Mapping[str, Any]:
    """Return what all bundles of this process share: its versions, and the settings that are not the defaults."""
    defaults = without_secrets(type(settings)())
    return {
        "pid": os.getpid(),
        "version": dynamo.__version__,
        "python": platform.python_version(),
        "settings": _differing(without_secrets(settings), defaults),
    }


def _differing(value: Any, default: Any) -> Any:
    """Return the members of nested dictionaries that differ, as JSON values."""
    if not isinstance(value, dict) or not isinstance(default, dict):
        return value if isinstance(value, bool | int | float | str | None) else str(value)
    return {name: _differing(found, default.get(name)) for name, found in value.items() if found != default.get(name)}
