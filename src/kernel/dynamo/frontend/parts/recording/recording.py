"""What one frontend keeps of its requests: those that failed, and where it was asked for all of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from dynamo.frontend.parts.recording.bundles import FailureNotes
from dynamo.frontend.parts.recording.recorder import RequestRecorder

if TYPE_CHECKING:
    from dynamo.frontend.pipeline.exchange import Exchange
    from dynamo.protocol.openai.errors import RequestRejected

__all__ = ["Recording"]


class Recording(NamedTuple):
    """Both of its parts."""

    failures: FailureNotes
    recorder: RequestRecorder | None = None  # None: nothing is recorded

    def holds(self, body: bytes) -> bool:
        """Return whether a body is to be held until its request ends."""
        return self.failures.holds(body) or (self.recorder is not None and len(body) <= self.recorder.held_bytes)

    def failed(
        self, exchange: Exchange, endpoint: str, error: BaseException, rejected: RequestRejected, error_type: str
    ) -> None:
        """Note a request that failed; call it before the exchange ends."""
        self.failures.failed(exchange, endpoint, error, rejected, error_type)
        if self.recorder is not None:
            self.recorder.ended(exchange, endpoint, rejected.status, error_type, rejected.message)

    def start(self) -> None:
        """Begin to gather the log lines of requests."""
        self.failures.log_lines.attach()

    async def aclose(self) -> None:
        """Write what is still to be written."""
        self.failures.log_lines.detach()
        if self.recorder is not None:
            await asyncio.get_running_loop().run_in_executor(None, self.recorder.close)
