"""Models that have just lost their last worker: for a while their requests wait for a replacement instead of failing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from dynamo.frontend.models.cards import GroupKey
from dynamo.router.workers.pool import ModelPool

logger = logging.getLogger(__name__)


class ReplacementWaits:
    """Follows which models have a worker, and for how long a model without one may still get requests."""

    def __init__(self, seconds: float, on_expiry: Callable[[], None], *, is_endless: bool = False) -> None:
        """`seconds`: how long such a wait is; 0: there is none. `on_expiry`: called when one is over in vain.

        `is_endless`: it never is, as workers are started when a request for the model comes.
        """
        self.seconds = seconds
        self._is_endless = is_endless
        self._started_on_demand: set[GroupKey] = set()  # models without a worker, where that is as it should be
        self._on_expiry = on_expiry
        self._reachable: set[GroupKey] = set()  # the models that had a worker when that was last checked
        self._expiries: dict[GroupKey, asyncio.TimerHandle] = {}  # of models without a worker, at most one each

    def __contains__(self, key: GroupKey) -> bool:
        return key in self._expiries or key in self._started_on_demand

    def update(self, served: Mapping[GroupKey, ModelPool]) -> None:
        """Check every model again. To be called after each change of members or instances."""
        for key, pool in served.items():
            was_reachable = key in self._reachable
            pool.members_changed(was_reachable)
            if pool.emptied_at is None:
                if pool.is_reachable:
                    self._reachable.add(key)
                self._cancel(key)
                continue
            self._reachable.discard(key)
            if self._is_endless:
                if key not in self._started_on_demand:
                    self._started_on_demand.add(key)
                    logger.info(
                        "model %s has no worker in namespace %s; a request for it waits for one",
                        key.model,
                        key.namespace,
                    )
                continue
            if was_reachable and self.seconds > 0:
                logger.warning(
                    "model %s has lost its last worker in namespace %s; its requests wait up to %g s for a replacement",
                    key.model,
                    key.namespace,
                    self.seconds,
                )
                self._expiries[key] = asyncio.get_running_loop().call_later(self.seconds, self._expire, key)

    def forget(self, key: GroupKey) -> None:
        """Forget a model that is not served any more. An unknown key is fine."""
        self._reachable.discard(key)
        self._cancel(key)

    def close(self) -> None:
        """Stop every timer. Idempotent."""
        for key in list(self._expiries):
            self._cancel(key)

    def _cancel(self, key: GroupKey) -> None:
        self._started_on_demand.discard(key)
        if (timer := self._expiries.pop(key, None)) is not None:
            timer.cancel()

    def _expire(self, key: GroupKey) -> None:
        self._expiries.pop(key, None)
        self._on_expiry()
