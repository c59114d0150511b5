"""The prefill workers beside the models that need them: they serve no client by themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence

from dynamo.frontend.models.cards import Group, GroupKey
from dynamo.frontend.models.served import ServedModel, ServingRules
from dynamo.protocol.model_types import WorkerType
from dynamo.router.dispatch.prefill import PrefillRouter
from dynamo.router.dispatch.stages import PrefillStage
from dynamo.router.workers.pool import ModelPool, WorkerClient
from dynamo.router.workers.worker_holds import WorkerHolds
from dynamo.runtime.base.tasks import Background

logger = logging.getLogger(__name__)

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
