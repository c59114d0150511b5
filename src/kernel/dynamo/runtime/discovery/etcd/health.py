"""Whether etcd answers and takes writes, and until when a missing record may be missing only because etcd was."""

from __future__ import annotations

import asyncio
import logging
import math

from dynamo.errors import CannotConnect
from dynamo.runtime.discovery.etcd.client import EtcdClient, EtcdError

logger = logging.getLogger(__name__)


class EtcdHealth:
    """Takes every answer and every loss of etcd. Times are those of the running loop."""

    def __init__(self, client: EtcdClient, *, lease_ttl_seconds: float) -> None:
        self._client = client
        self.lease_ttl_seconds = lease_ttl_seconds  # as granted last; the leases of other processes live as long
        self.doubt_until = -math.inf  # before this time no missing record counts as gone
        self.is_full = False  # out of space: etcd declines writes
        self._is_lost = False
        self._answered_at = math.inf  # before the first answer there is no silence

    @property
    def where(self) -> str:
        return ",".join(self._client.endpoints)

    def trouble(self) -> str | None:
        """Return why a view may be out of date; see `base.Discovery`."""
        if self._is_lost:
            return f"etcd at {self.where} does not answer"
        return f"etcd at {self.where} is out of space" if self.is_full else None

    @property
    def level_of_refusals(self) -> int:
        """The log level of a refused write: a store without space was reported once already."""
        return logging.DEBUG if self.is_full else logging.WARNING

    def on_answer(self) -> None:
        """Note an answer of etcd."""
        self.doubt_after_silence()
        self._answered_at = _now()
        if self._is_lost:
            self._is_lost = False
            logger.info("etcd at %s is back", self.where)

    def on_lost(self, error: CannotConnect) -> None:
        """Note the loss of etcd."""
        if not self._is_lost:
            self._is_lost = True
            logger.warning("%s; going on with what was last known", error)

    def doubt(self) -> None:
        """Let no missing record count as gone for one lease period: its owner may need that long to come back."""
        self.doubt_until = _now() + self.lease_ttl_seconds

    def doubt_after_silence(self) -> None:
        """Doubt what is missing when etcd was silent for long enough that the leases of others may have run out."""
        if _now() - self._answered_at > self.lease_ttl_seconds / 2:
            self.doubt()

    async def check_space(self) -> None:
        """Doubt what is missing while etcd is out of space: a lease that runs out then cannot be taken again."""
        try:
            is_full = await self._client.is_out_of_space()
        except (CannotConnect, EtcdError) as error:
            logger.debug("etcd does not give its status: %s", error)
            return
        if is_full or self.is_full:
            self.doubt()  # after the end of the alarm, too: the owners need a while to come back
        if is_full and not self.is_full:
            logger.warning(
                "etcd at %s is out of space (NOSPACE) and declines writes; records that vanish are kept. Compact and "
                "defragment it, then disarm the alarm (etcdctl alarm disarm)",
                self.where,
            )
        elif self.is_full and not is_full:
            logger.info("etcd at %s takes writes again", self.where)
        self.is_full = is_full


def _now() -> float:
    return asyncio.get_running_loop().time()
