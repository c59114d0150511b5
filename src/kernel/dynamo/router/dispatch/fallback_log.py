"""Requests that skip a stage whose workers are missing: logged once when that begins, and once when it is over."""

from __future__ import annotations

import logging

from dynamo.errors import DynamoException

logger = logging.getLogger(__name__)


class FallbackLog:
    """Logs once when the requests of a model begin to bypass a stage, and once when they no longer do."""

    __slots__ = ("_away", "_back", "_is_taken", "_model")

    def __init__(self, model: str, *, away: str, back: str) -> None:
        """`away` and `back`: what is logged when the first request bypasses the stage, and when one no longer does."""
        self._model, self._away, self._back = model, away, back
        self._is_taken = False

    def note(self, failure: DynamoException | None) -> None:
        """Log a change: a request bypassed the stage because of `failure`, or (None) did not."""
        if failure is None:
            if self._is_taken:
                self._is_taken = False
                logger.info("model %s: %s", self._model, self._back)
        elif not self._is_taken:
            self._is_taken = True
            logger.warning("model %s: %s (%s: %s)", self._model, self._away, type(failure).__name__, failure)
