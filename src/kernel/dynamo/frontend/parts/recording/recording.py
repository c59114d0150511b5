"""What one frontend keeps of its requests: those that failed, and where it was asked for all of them."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from dynamo.frontend.parts.recording.bundles import FailureNotes, KeptBody
from dynamo.frontend.parts.recording.recorder import RequestRecorder
from dynamo.frontend.pipeline.exchange import Exchange, PartSlot
from dynamo.frontend.pipeline.outcome import Outcome, Reached, RequestListener
from dynamo.frontend.pipeline.plan import Plan
from dynamo.frontend.pipeline.reading import Resolved
from dynamo.frontend.pipeline.tap import TAP

__all__ = ["Recording"]

logger = logging.getLogger(__name__)

_BODY: Final[PartSlot[KeptBody]] = PartSlot("body")
_NO_BODY: Final = KeptBody(0, b"")


class Recording(RequestListener):
    """Listens to each request, and hands it to those that keep it."""

    def __init__(self, failures: FailureNotes, recorder: RequestRecorder | None = None) -> None:
        """`recorder`: None where only failures are kept."""
        self.failures, self.recorder = failures, recorder

    def arrived(self, exchange: Exchange) -> None:
        """Hold the body until the request ends, where it is short enough."""
        body = exchange.arrival.body
        is_held = self.failures.holds(body) or (self.recorder is not None and len(body) <= self.recorder.held_bytes)
        exchange.keep(_BODY, KeptBody(len(body), body if is_held else b""))

    def planned(self, exchange: Exchange, resolved: Resolved, plan: Plan) -> None:
        """Begin to note the answer, where the request is in the sample."""
        if self.recorder is not None:
            tap = self.recorder.begin(exchange, resolved.request, resolved.effects)
            if tap is not None:
                exchange.keep(TAP, tap)

    def ended(self, exchange: Exchange, outcome: Outcome) -> None:
        """Note a failure, and record the request."""
        rejected, body = outcome.rejected, exchange.of(_BODY) or _NO_BODY
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

    def start(self) -> None:
        """Begin to gather the log lines of requests."""
        self.failures.log_lines.attach()

    async def aclose(self) -> None:
        """Write what is still to be written."""
        self.failures.log_lines.detach()
        if self.recorder is not None:
            await asyncio.get_running_loop().run_in_executor(None, self.recorder.close)
