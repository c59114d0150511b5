"""Whether the API server answers, and until when a missing record may be missing only because the server was."""

from __future__ import annotations

import asyncio
import logging
import math

from dynamo.errors import CannotConnect
from dynamo.runtime.discovery.kubernetes.api import KubernetesApi

logger = logging.getLogger(__name__)


class KubernetesHealth:
    """Takes every answer and every loss of the API server. Times are those of the running loop."""

    def __init__(self, api: KubernetesApi, *, keep_seconds: float) -> None:
        self.doubt_until = -math.inf  # before this time no missing record counts as gone
        self._api = api
        self._keep_seconds = keep_seconds
        self._is_lost = False

    def trouble(self) -> str | None:
        """Return why a view may be out of date; see `base.Discovery`."""
        return f"{self._api.where} does not answer" if self._is_lost else None

    def on_answer(self) -> None:
        """Note an answer of the server."""
        if self._is_lost:
            self._is_lost = False
            self._doubt()
            logger.info("%s is back", self._api.where)

    def on_lost(self, error: CannotConnect) -> None:
        """Note the loss of the server."""
        if not self._is_lost:
            self._is_lost = True
            logger.warning("%s; going on with what was last known", error)
        self._doubt()

    def _doubt(self) -> None:
        self.doubt_until = asyncio.get_running_loop().time() + self._keep_seconds
