"""All pods of a list: each is followed while it is on the list."""

from __future__ import annotations

import asyncio
import logging
from asyncio import Task
from collections.abc import Sequence

from dynamo.picker.addresses import Addresses
from dynamo.picker.pods.listing import PodRecord
from dynamo.picker.pods.sources import PodSource
from dynamo.picker.pods.worker import PodTools, PodWorker
from dynamo.picker.prefill import PrefillWorker
from dynamo.router.workers.pool import ChosenWorker
from dynamo.runtime.base.forever import forever
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.calls.request_plane.base import Instance

logger = logging.getLogger(__name__)


async def _follow(worker: PodWorker, former: Task[None] | None) -> None:
    """Follow a pod. `former`: what followed it under another record, and must have left before."""
    if former is not None:
        await asyncio.wait({former})
    await forever(worker.run, f"pod {worker.record.address}")


class FollowedPods(Addresses):
    """Follows the pods of a source, and names their addresses. Use as `async with`."""

    def __init__(self, source: PodSource, tools: PodTools) -> None:
        super().__init__(0)
        self._source, self._tools = source, tools
        self._background = Background()
        self._followed: dict[int, tuple[PodWorker, Task[None]]] = {}

    async def __aenter__(self) -> FollowedPods:
        try:
            await self._source.start(self.set_pods)
        except BaseException:
            await self._tools.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._source.aclose()
        await self._background.close()
        await self._tools.aclose()

    def set_pods(self, pods: Sequence[PodRecord]) -> None:
        """Follow these pods, and no others. One whose role or ports have changed is followed anew."""
        wanted, former = {each.instance_id: each for each in pods}, dict[int, Task[None]]()
        for instance_id, (worker, task) in list(self._followed.items()):
            if wanted.get(instance_id) != worker.record:
                del self._followed[instance_id]
                former[instance_id] = task
                task.cancel()
        added = [record for instance_id, record in wanted.items() if instance_id not in self._followed]
        for record in added:
            worker = PodWorker(record, self._tools, self._changed)
            task = self._background.start(_follow(worker, former.get(record.instance_id)), f"pod {record.address}")
            self._followed[record.instance_id] = worker, task
        self.changes += 1
        if former or added:
            logger.info("%d pod(s) are followed", len(self._followed))

    def _changed(self) -> None:
        self.changes += 1

    def of(self, instance: Instance | None) -> str | None:
        """Return the address of a pod by its record as a worker."""
        found = None if instance is None else self._followed.get(instance.instance_id)
        return None if found is None else found[0].record.address

    def headers_for(self, worker: ChosenWorker) -> list[tuple[str, str]]:
        """Return none: a pod of plain vLLM knows no workers."""
        return []

    def headers_of_prefill(self, worker: PrefillWorker) -> list[tuple[str, str]]:
        """Return the address of the prefill pod alone."""
        return self.prefill_address(worker)

    def is_full(self, instance_id: int) -> bool:
        """Return whether more requests wait in a pod than the limit allows."""
        found = self._followed.get(instance_id)
        return found is not None and found[0].is_full

    @property
    def trouble(self) -> str | None:
        """See `Addresses.trouble`."""
        return self._source.trouble()
