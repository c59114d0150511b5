"""The records that accompany one request at a worker: received, cancelled, completed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from dynamo.errors import kind_of
from dynamo.runtime.calls.context import Context
from dynamo.runtime.observe.logging import annotate_log_span, close_log_span, enter_request_span, request_level

logger = logging.getLogger(__name__)

RECEIVED: Final = "request received"
COMPLETED: Final = "request completed"
CANCELLATION: Final = "request cancellation received"


class WorkerRequestLog:
    """Logs one request of an endpoint; it belongs to the task that serves the request.

    What the engine's stream was like is added with `annotate_log_span` by the code that read it.
    """

    __slots__ = ("_context", "_level", "_withdraw")

    def __init__(self, endpoint_fields: Mapping[str, object], context: Context, body: object) -> None:
        """Begin: from here on the task's own records carry the request's ids."""
        enter_request_span(endpoint_fields, context)
        self._context, self._level, self._withdraw = context, request_level(), _nothing
        if logger.isEnabledFor(self._level):
            if isinstance(body, dict):
                tokens = body.get("token_ids")
                annotate_log_span(
                    model=body.get("model"), input_tokens=len(tokens) if isinstance(tokens, list | bytes) else None
                )
            logger.log(self._level, RECEIVED)
            self._withdraw = context.on_cancel(self._cancelled)

    def _cancelled(self, is_kill: bool) -> None:
        fields = {"request_id": self._context.id(), "cancellation.signal": "kill" if is_kill else "stop"}
        logger.log(self._level, CANCELLATION, extra=fields)

    def completed(self, seconds: float, error: BaseException | None) -> None:
        """Log the end, after `seconds`; `error` is what the caller was given, if it was not an answer."""
        self._withdraw()
        if logger.isEnabledFor(self._level):
            fields: dict[str, object] = {"status": "success", "elapsed_ms": round(seconds * 1000, 3)}
            if self._context.is_stopped():
                fields |= {"status": "error", "error_type": "cancelled"}
            elif error is not None:
                fields |= {"status": "error", "error_type": kind_of(error).__name__}
            logger.log(self._level, COMPLETED, extra=fields)
        close_log_span(seconds)


def _nothing() -> None:
    return
