"""The listeners of the frontend itself: each request is counted, and logged."""

from __future__ import annotations

import logging

from dynamo.errors import DynamoException
from dynamo.frontend.admission.model import Shed
from dynamo.frontend.base.metrics import FrontendMetrics
from dynamo.frontend.base.metrics.requests import UNKNOWN_MODEL, RequestMetrics
from dynamo.frontend.pipeline.exchange import Exchange
from dynamo.frontend.pipeline.outcome import Outcome, Reached, RequestListener
from dynamo.frontend.pipeline.request_records import end_record, record_declined
from dynamo.protocol.openai.errors import RequestRejected

logger = logging.getLogger(__name__)


class RequestCounts(RequestListener):
    """Counts each request, and what its answer shows of the worker that made it."""

    def __init__(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics

    def ended(self, exchange: Exchange, outcome: Outcome) -> None:
        requests, counters, usage = self._metrics.requests, exchange.counters, outcome.usage
        if outcome.is_answered:
            if counters is None:
                requests.counted(exchange.model or UNKNOWN_MODEL, outcome.endpoint)
            else:
                counters.finish(
                    outcome.at,
                    prompt_tokens=usage.prompt_tokens,
                    output_tokens=usage.output_tokens,
                    cached_tokens=usage.cached_tokens,
                )
                requests.observe_stages(exchange.timer)
                self._note_pace(counters, outcome)
        elif outcome.failure is not None:
            if counters is None:
                counters = requests.begin(UNKNOWN_MODEL, outcome.endpoint, "unary", exchange.arrival.at)
                if outcome.rejected is not None and outcome.rejected.limit is not None:
                    self._metrics.refused(outcome.rejected.limit)
            elif isinstance(outcome.why, Shed) and exchange.model is not None:
                requests.shed(exchange.model, outcome.why.reason)
            counters.fail(
                outcome.at,
                **outcome.failure._asdict(),
                prompt_tokens=usage.prompt_tokens,
                output_tokens=usage.output_tokens,
            )
        elif counters is not None:  # else its client left before anything was counted of it
            counters.cancel(outcome.at, prompt_tokens=usage.prompt_tokens, output_tokens=usage.output_tokens)
        if outcome.moves and exchange.model is not None:
            requests.moved(exchange.model, outcome.moves)

    def _note_pace(self, counters: RequestMetrics, outcome: Outcome) -> None:
        """Learn how quick the worker is that answered."""
        first, usage = counters.first_token_seconds, outcome.usage
        if outcome.instances and first is not None and usage.output_tokens:
            gaps = usage.output_tokens - 1 if usage.output_tokens > 1 else 1
            pace = counters.generating_seconds / gaps
            worker_id = outcome.instances[-1].instance_id
            self._metrics.workers.answered(worker_id, first, usage.prompt_tokens, pace)


class RequestLog(RequestListener):
    """Logs the end of each request, and ends its span.

    What was turned away for lack of room has no line: it must cost next to nothing.
    """

    def __init__(self, overload_status: int) -> None:
        """`overload_status`: of answers that are no failure of the frontend, whatever it is."""
        self._overload_status = overload_status

    def ended(self, exchange: Exchange, outcome: Outcome) -> None:
        why, status = outcome.why, outcome.status
        if why is not None and not isinstance(why, DynamoException | RequestRejected):
            logger.error("request %s failed inside the frontend", exchange.name, exc_info=why)
        elif outcome.reached is Reached.ADMITTED and status >= 500 and status != self._overload_status:
            logger.error("request %s failed with %d: %s: %s", exchange.name, status, type(why).__name__, why)
        if outcome.reached is Reached.ADMITTED:
            if exchange.counters is not None:
                end_record(exchange, outcome.at, status, outcome.error_type, outcome.message)
        elif outcome.reached is Reached.READ and outcome.rejected is not None:
            record_declined(exchange, outcome, outcome.rejected.message)
