"""The prefill and encode workers beside the models that need them: they serve no client by themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from dynamo.frontend.models.cards import CardBook, Group, GroupKey
from dynamo.frontend.models.served import ServedModel, ServingRules
from dynamo.placement import PlacementRequest
from dynamo.placement.policies.round_robin import RoundRobin
from dynamo.protocol.model_types import WorkerType
from dynamo.protocol.records import ENCODER_HANDOFF
from dynamo.protocol.worker_request import WorkerRequest
from dynamo.router.dispatch.encode import EncodeRouter, EncodeStage, OutcomeCounter, Receiver
from dynamo.router.dispatch.handoff import Handoff
from dynamo.router.dispatch.prefill import PrefillJob, PrefillRouter
from dynamo.router.dispatch.record import DispatchRecord
from dynamo.router.dispatch.stages import DispatchStage, PrefillStage
from dynamo.router.workers.pool import ModelPool, WorkerClient
from dynamo.router.workers.worker_holds import WorkerHolds
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.calls.context import Context

logger = logging.getLogger(__name__)

ENCODE, PREFILL, DECODE = str(WorkerType.Encode), str(WorkerType.Prefill), str(WorkerType.Decode)

_Place = tuple[str, str]  # model, namespace


class PrefillPools:
    """One router for every (model, namespace) that has, or had, prefill workers."""

    def __init__(self, rules: ServingRules, clients: Mapping[str, WorkerClient], background: Background) -> None:
        self._rules, self._clients, self._background = rules, clients, background
        self._routers: dict[_Place, PrefillRouter] = {}

    def get(self, model: str, namespace: str) -> PrefillRouter | None:
        return self._routers.get((model, namespace))

    @property
    def holds(self) -> WorkerHolds:
        """The drains and quarantines of workers."""
        return self._rules.holds

    @property
    def pools(self) -> Sequence[ModelPool]:
        """The prefill workers of every model."""
        return [router.workers for router in self._routers.values()]

    def by_role(self) -> dict[GroupKey, ModelPool]:
        """Return the same by what they are."""
        return {GroupKey(*place, str(WorkerType.Prefill)): router.workers for place, router in self._routers.items()}

    def is_reachable(self, key: GroupKey) -> bool:
        """Return whether a prefill worker is there for a group's model."""
        router = self._routers.get(_place(key))
        return router is not None and router.workers.is_reachable

    def stages(self, key: GroupKey, decoders: ServedModel) -> Sequence[PrefillStage]:
        """Return the stages before the workers that only decode."""
        router = self._routers.get(_place(key))
        if router is None or not (self._rules.enforce_disagg or router.workers.is_reachable):
            return ()
        bypass = None if decoders.kv is None else self._rules.bypass  # their card may set something else
        return (PrefillStage(router, decoders, bypass),)

    def update(self, group: Group) -> None:
        """Take over the members of a group of prefill workers."""
        key = group.key
        router = self._routers.get(_place(key))
        if router is None:
            workers = ModelPool(key.model, self._clients, self._rules.policy(group))
            self._rules.equip(group, workers)
            router = PrefillRouter(
                workers,
                enforced=self._rules.enforce_disagg,
                is_conditional=self._rules.bypass is not None,
                rng=self._rules.rng,
            )
            self._routers[_place(key)] = router
        elif router.workers.kv is not None:
            policy = self._rules.policy(group)
            if policy is not router.workers.kv:  # other workers may have blocks of another size
                router.workers.use(policy)
                self._rules.equip(group, router.workers)
        router.workers.runtime_config = group.card.runtime_config
        router.set_members({(entry.endpoint, entry.instance_id): entry.card.runtime_config for entry in group.accepted})

    def instances_changed(self) -> None:
        """Let requests that wait for a prefill worker check again."""
        for router in self._routers.values():
            if (gate := router.workers.gate) is not None:
                gate.changed()

    def group_gone(self, key: GroupKey) -> None:
        """Take the loss of the last prefill worker."""
        router = self._routers.get(_place(key))
        if router is None:
            return
        router.set_members({})
        logger.warning(
            "model %s has no prefill workers any more in namespace %s: %s",
            key.model,
            key.namespace,
            "its requests fail" if self._rules.enforce_disagg else "decode workers compute the prompts themselves",
        )

    def leave_all_but(self, keys: Iterable[GroupKey]) -> None:
        """Leave the prefill workers of models that have no group any more."""
        for place in self._routers.keys() - {_place(key) for key in keys}:
            self._rules.forget(GroupKey(*place, str(WorkerType.Prefill)))
            closing = self._routers.pop(place).aclose()
            if self._background.is_closed:
                closing.close()
            else:
                self._background.start(closing, f"frontend: leave the prefill workers of {place[0]}")

    async def aclose(self) -> None:
        """End the prefills that still run. Idempotent."""
        await asyncio.gather(*(router.aclose() for router in self._routers.values()))


def _place(key: GroupKey) -> _Place:
    return key.model, key.namespace


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


class StagePools:
    """The workers of the stages before those that answer."""

    def __init__(
        self,
        cards: CardBook,
        clients: Mapping[str, WorkerClient],
        rules: ServingRules,
        background: Background,
        count: OutcomeCounter,
    ) -> None:
        self.prefill = PrefillPools(rules, clients, background)
        self.encode = EncodePools(cards, clients, self.prefill, background, count)

    def before(self, key: GroupKey, served: ServedModel) -> Sequence[DispatchStage]:
        """Return the stages before the workers of a model."""
        prefill = self.prefill.stages(key, served) if key.role == DECODE else ()
        encode = self.encode.stage(key, served)
        return prefill if encode is None else (encode, *prefill)

    def pool(self, key: GroupKey) -> ModelPool | None:
        """Return the workers of a group; None: there are none."""
        if key.role == ENCODE:
            return self.encode.pool(key)
        router = self.prefill.get(key.model, key.namespace)
        return None if router is None else router.workers

    def update(self, group: Group) -> None:
        """Take over the members of a group."""
        (self.encode if group.key.role == ENCODE else self.prefill).update(group)

    def group_gone(self, key: GroupKey) -> None:
        """Take the loss of the last worker of a group."""
        (self.encode if key.role == ENCODE else self.prefill).group_gone(key)

    def leave_all_but(self, keys: Collection[GroupKey]) -> None:
        """Leave the workers of models that have no group any more."""
        self.prefill.leave_all_but(keys)
        self.encode.leave_all_but(keys)

    async def aclose(self) -> None:
        """End what still runs. Idempotent."""
        await self.encode.aclose()
        await self.prefill.aclose()
