"""The encode workers beside the models that need them: they serve no client by themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Final

from dynamo.frontend.models.cards import CardBook, Group, GroupKey
from dynamo.frontend.models.prefill_pools import PrefillPools
from dynamo.frontend.models.served import ServedModel
from dynamo.placement import PlacementRequest
from dynamo.placement.policies.round_robin import RoundRobin
from dynamo.protocol.model_types import WorkerType
from dynamo.protocol.records import ENCODER_HANDOFF
from dynamo.protocol.worker_request import WorkerRequest
from dynamo.router.dispatch.encode import EncodeRouter, EncodeStage, OutcomeCounter, Receiver
from dynamo.router.dispatch.handoff import Handoff
from dynamo.router.dispatch.prefill import PrefillJob, PrefillRouter
from dynamo.router.dispatch.record import DispatchRecord
from dynamo.router.workers.pool import ModelPool, WorkerClient
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.calls.context import Context

logger = logging.getLogger(__name__)

ENCODE, PREFILL, DECODE = str(WorkerType.Encode), str(WorkerType.Prefill), str(WorkerType.Decode)

_Place = tuple[str, str]  # model, namespace


class EncodePools:
    """One router for every (model, namespace) that has, or had, encode workers."""

    def __init__(
        self,
        cards: CardBook,
        clients: Mapping[str, WorkerClient],
        prefill: PrefillPools,
        background: Background,
        count: OutcomeCounter,
    ) -> None:
        self._cards, self._clients, self._prefill = cards, clients, prefill
        self._background, self._count = background, count
        self._routers: dict[_Place, EncodeRouter] = {}
        self._warned: set[_Place] = set()  # of several endpoints

    def get(self, model: str, namespace: str) -> EncodeRouter | None:
        return self._routers.get((model, namespace))

    def is_reachable(self, key: GroupKey) -> bool:
        """Return whether an encode worker is there for a group's model."""
        router = self._routers.get((key.model, key.namespace))
        return router is not None and router.workers.is_reachable

    def stage(self, key: GroupKey, served: ServedModel) -> EncodeStage | None:
        """Return the stage before the workers that compute the prompts of a model; None: they need none.

        That is set by the card of the workers that get the media: the prefill workers of a disaggregated model.
        """
        takers = self._cards.group(GroupKey(key.model, key.namespace, PREFILL)) if key.role == DECODE else None
        card = served.card if takers is None else takers.card
        router = self._routers.get((key.model, key.namespace))
        if router is None or card.runtime_config.runtime_data.get(ENCODER_HANDOFF) is not True:
            return None
        needed = bool(card.needs) and all(ENCODE in alternative for alternative in card.needs)
        prefill = self._prefill.get(key.model, key.namespace) if key.role == DECODE else None
        receiver: Receiver = partial(_give, served) if prefill is None else partial(_give_to_prefill, prefill, served)
        return EncodeStage(router, receiver, is_required=needed)

    def pool(self, key: GroupKey) -> ModelPool | None:
        """Return the encode workers of a group; None: there are none."""
        router = self._routers.get((key.model, key.namespace))
        return None if router is None else router.workers

    def update(self, group: Group) -> None:
        """Take over the members of a group of encode workers."""
        place = group.key.model, group.key.namespace
        router = self._routers.get(place)
        if router is None:
            router = self._routers[place] = self._router(group.key.model)
            router.workers.holds = self._prefill.holds
        if len(group.endpoints) > 1 and place not in self._warned:
            self._warned.add(place)
            logger.warning(
                "model %s has encode workers at %d endpoints of namespace %s; all of them are used, each in turn",
                group.key.model, len(group.endpoints), group.key.namespace,
            )  # fmt: skip
        router.workers.runtime_config = group.card.runtime_config
        router.workers.set_members((entry.endpoint, entry.instance_id) for entry in group.accepted)

    def group_gone(self, key: GroupKey) -> None:
        """Take the loss of the last encode worker."""
        router = self._routers.get((key.model, key.namespace))
        if router is not None:
            router.workers.set_members(())
            logger.warning("model %s has no encode workers any more in namespace %s", key.model, key.namespace)

    def leave_all_but(self, keys: Iterable[GroupKey]) -> None:
        """Leave the encode workers of models that have no group any more."""
        for place in self._routers.keys() - {(key.model, key.namespace) for key in keys}:
            self._warned.discard(place)
            closing = self._routers.pop(place).aclose()
            if self._background.is_closed:
                closing.close()
            else:
                self._background.start(closing, f"frontend: leave the encode workers of {place[0]}")

    async def aclose(self) -> None:
        """End what still runs. Idempotent."""
        await asyncio.gather(*(router.aclose() for router in self._routers.values()))

    def _router(self, model: str) -> EncodeRouter:
        # In turn, whatever the router mode: no encode worker holds anything that another request could use.
        return EncodeRouter(ModelPool(model, self._clients, RoundRobin()), self._count)


async def _give(receivers: ModelPool, body: WorkerRequest, context: Context) -> None:
    """Send a request to one of `receivers` and read its answer to the end. Raises the error it ends with."""
    stream = await receivers.choose(PlacementRequest(token_ids=body.get("token_ids") or ())).open(body, context)
    try:
        while await stream.next_batch():
            pass
    finally:
        stream.close()


async def _give_to_prefill(prefill: PrefillRouter, decoders: ModelPool, body: WorkerRequest, context: Context) -> None:
    """Request the prefill, and have the blocks fetched, so that neither worker holds anything afterwards."""
    job = PrefillJob(body, context, _NO_TIMER, DispatchRecord())
    handoff = await prefill.prefill(job, job.course())
    if isinstance(handoff, Handoff):
        prefill.release_blocks(handoff, decoders, context)


class _NoTimer:
    """The times of a request that no client waits for."""

    def routed(self) -> None: ...

    def dispatched(self) -> None: ...

    def arrived(self, *, failed: bool = False) -> None: ...


_NO_TIMER: Final = _NoTimer()
