"""Cache salts before an engine that has one cache for all requests."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


class CacheScope:
    """Decides which requests may use the cache of an engine that cannot keep salts apart: those of its only salt.

    From the second salt on no request may: what any of them leaves in the cache, another one would find.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._only: str | None = None
        self._is_mixed = False

    def admits(self, salt: str | None) -> bool:
        """Return whether a request with this salt may use what others have left in the cache."""
        if salt is not None and self._only is None:
            self._only = salt
        elif salt is not None and salt != self._only and not self._is_mixed:
            self._is_mixed = True
            logger.warning(
                "prefix cache of %s off: requests have several cache salts (owners of keys, or tenants), which it cannot "
                "keep apart; --share-caches at the frontend shares it among owners", self._engine,
            )  # fmt: skip
        return not self._is_mixed and salt == self._only
