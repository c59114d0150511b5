"""Measures, once a second, how full the workers of each model and role are, and decides how many there should be.

It starts and stops no worker: an autoscaler outside reads the decision, as metrics or at `/autoscale/v1/{model}`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from dynamo.frontend.base.peers import Peers
from dynamo.frontend.models.cards import GroupKey
from dynamo.frontend.models.directory import ModelDirectory
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.parts.scaling.gauges import AutoscaleGauges
from dynamo.placement import Candidate
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.router.workers.busy_workers import LoadReport
from dynamo.router.workers.pool import ModelPool
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.observe.metrics import MetricsRegistry
from dynamo.scaling.decide import Decision, ScaleReason, ScaleRules
from dynamo.scaling.follower import RoleLoad, Saturation, ScaleFollower, Smoothed, saturation_of

logger = logging.getLogger(__name__)

MAX_ROLES: Final = 4096  # of models; more are not followed, and a warning reports it
ACT_SECONDS: Final = 900.0
"""How long an autoscaler outside may take to follow a decision; after that the workers there are count as what is aimed at."""
MEMBER_SECONDS: Final = 5.0  # how long what another process of the group reported of its requests holds
MANY: Final = 100_000  # the most workers is what the autoscaler outside sets


NewDecision = tuple[GroupKey, int, Decision]
"""A role whose load needs another number of workers, the number before, and the decision."""


class WorkerStreams(msgspec.Struct, frozen=True):
    """One worker, and how many requests it has."""

    id: str
    running: int


class RoleSignal(msgspec.Struct, frozen=True, kw_only=True):
    """The signal of one role of one model, as `/autoscale/v1/{model}` gives it."""

    model: str
    namespace: str
    role: str
    value: float  # saturation now
    average: float  # over 15 s
    part: str  # which part of the load is the largest
    desired: int
    ready: int
    reason: str
    text: str  # the reason with its figures
    running: int
    waiting: int
    limit: int | None
    queue_age_seconds: float
    workers: list[WorkerStreams] = []


class _OwnLoad(msgspec.Struct, frozen=True, array_like=True):
    """What one process of a group reports of its requests."""

    key: tuple[str, str, str]
    running: int
    waiting: int
    queue_age_seconds: float
    by_worker: dict[int, int]


class _Shares(msgspec.Struct, frozen=True, array_like=True):
    member: str
    loads: list[_OwnLoad]


class _Role:
    """One role of one model over time."""

    def __init__(self, registry: MetricsRegistry, key: GroupKey, rules: ScaleRules, ready: int) -> None:
        self.follower = ScaleFollower(rules, ready)
        self.average = Smoothed()
        self.gauges = AutoscaleGauges(registry, (key.model, key.namespace, key.role))
        self.load = RoleLoad(0)
        self.saturation = Saturation(0.0, "none")
        self.decision = Decision(ready, ScaleReason.HOLD, "no load is known yet")
        self.decided_at = 0.0  # when the decision was last another number
        self.streams: dict[int, int] = {}
        self._noted: int | None = None  # the last number that was noted; None: it has been reached since

    def show(self, load: RoleLoad, streams: dict[int, int]) -> None:
        self.load, self.streams, self.saturation = load, streams, saturation_of(load)

    def take(self, now: float) -> tuple[int, Decision] | None:
        """Decide; return a decision for another number of workers, and the number before. None: there is no new one."""
        follower, load = self.follower, self.load
        follower.sample(self.saturation.value * max(1, load.ready), now)
        average = self.average.take(self.saturation.value, now)
        if load.ready == follower.aimed or now - self.decided_at > ACT_SECONDS:
            follower.aim(load.ready, now)
        if load.ready == self._noted:
            self._noted = None
        decision, before, news = follower.decide(load.ready, now), follower.aimed, None
        if decision.target != before:
            self.decided_at = now
            follower.aim(decision.target, now)
            if decision.target != self._noted:
                self._noted, news = decision.target, (before, decision)
        if (
            decision.reason is not ScaleReason.HOLD or load.ready == follower.aimed
        ):  # until it was acted on, the reason stays
            self.decision = decision
        self.gauges.show(average, follower.aimed, load.ready, self.decision.reason)
        return news


class _OtherProcesses:
    """The requests that the other processes of a group have."""

    def __init__(self, peers: Peers, member: str) -> None:
        self._peers, self._member = peers, member
        self._loads: dict[str, tuple[float, dict[GroupKey, _OwnLoad]]] = {}
        self._now = 0.0
        self._background = Background()
        self._is_sharing = False
        peers.on_shared(self._take)

    def add_to(self, key: GroupKey, load: RoleLoad, streams: dict[int, int], now: float) -> RoleLoad:
        """Return the load of a role in all processes; their streams are added to `streams`."""
        for came_at, loads in self._loads.values():
            other = loads.get(key)
            if other is None or now - came_at > MEMBER_SECONDS:
                continue
            load += RoleLoad(load.ready, other.running, None, other.waiting, other.queue_age_seconds)
            for worker, count in other.by_worker.items():
                if worker in streams:
                    streams[worker] += count
        return load

    def share(self, own: list[_OwnLoad], now: float) -> None:
        """Report the requests of this process, unless that is still under way."""
        self._now = now
        if not self._is_sharing:
            self._is_sharing = True
            self._background.start(self._share(own), "frontend: autoscale signals")

    async def _share(self, own: list[_OwnLoad]) -> None:
        try:
            await self._peers.share(f"autoscale/{self._member}", msgspec.msgpack.encode(_Shares(self._member, own)))
        except TimeoutError:
            logger.warning("the other processes of the group have no load report of this one; they count without it")
        finally:
            self._is_sharing = False

    def _take(self, key: str, value: bytes) -> None:
        if key.startswith("autoscale/"):
            shared = msgspec.msgpack.decode(value, type=_Shares)
            if shared.member != self._member:
                self._loads[shared.member] = self._now, {GroupKey(*each.key): each for each in shared.loads}

    async def aclose(self) -> None:
        await self._background.close()


class AutoscaleSignals:
    """The signals of all roles. Call `measure` once a second."""

    def __init__(
        self,
        models: ModelDirectory,
        registry: MetricsRegistry,
        reports_of: Callable[[int], Iterable[LoadReport]],
        rules: ScaleRules,
        peers: Peers | None = None,
        *,
        member: str = "",
    ) -> None:
        """`reports_of`: the newest load reports of a worker. `rules`: without limits of its own. `member`: the name of this
        process among its peers.
        """
        self._models, self._registry, self._reports_of, self._rules = models, registry, reports_of, rules
        self._others = None if peers is None else _OtherProcesses(peers, member)
        self._roles: dict[GroupKey, _Role] = {}
        self._is_full = False

    async def aclose(self) -> None:
        """Report nothing more to the other processes. Idempotent."""
        if self._others is not None:
            await self._others.aclose()

    def measure(self, now: float) -> list[NewDecision]:
        """Check every role, and decide; return what is new."""
        own: list[_OwnLoad] = []
        found: list[NewDecision] = []
        pools = self._models.roles()
        for key, pool in pools.items():
            load, streams, own_load = self._look(key, pool, now)
            own.append(own_load)
            role = self._roles.get(key)
            if role is None:
                if len(self._roles) >= MAX_ROLES:
                    self._say_full()
                    continue
                role = self._roles[key] = _Role(self._registry, key, self._rules, load.ready)
            role.show(load, streams)
            news = role.take(now)
            if news is not None:
                found.append((key, *news))
        for key in self._roles.keys() - pools.keys():
            self._roles.pop(key).gauges.remove()
        if self._others is not None:
            self._others.share(own, now)
        return found

    def signals(self, model: str) -> list[RoleSignal]:
        """Return the signals of a model, one for each namespace and role, as they are at this moment."""
        found = {key: role for key, role in self._roles.items() if key.model == model}
        pools = self._models.roles() if found else {}
        for key in found.keys() & pools.keys():
            load, streams, _ = self._look(key, pools[key], asyncio.get_running_loop().time())
            found[key].show(load, streams)
        return [_signal(key, role) for key, role in found.items()]

    def all(self) -> list[RoleSignal]:
        """Return the signals of every model."""
        return [_signal(key, role) for key, role in self._roles.items()]

    def _look(self, key: GroupKey, pool: ModelPool, now: float) -> tuple[RoleLoad, dict[int, int], _OwnLoad]:
        """Return the load of a role and the streams of each of its workers, of all processes of the group, and of this one."""
        candidates = pool.candidates()
        load = role_load(pool, candidates, self._reports_of, now)
        streams = {each.instance_id: each.in_flight for each in candidates}
        own = _own_load(key, load, candidates)
        return load if self._others is None else self._others.add_to(key, load, streams, now), streams, own

    def _say_full(self) -> None:
        if not self._is_full:
            self._is_full = True
            logger.warning("more than %d models and roles: some have no autoscale signal", MAX_ROLES)


def _own_load(key: GroupKey, load: RoleLoad, workers: Iterable[Candidate]) -> _OwnLoad:
    by_worker = {each.instance_id: each.in_flight for each in workers if each.in_flight}
    place = key.model, key.namespace, key.role
    return _OwnLoad(place, load.running, load.waiting, load.queue_age_seconds, by_worker)


def _signal(key: GroupKey, role: _Role) -> RoleSignal:
    load = role.load
    return RoleSignal(
        model=key.model,
        namespace=key.namespace,
        role=key.role,
        value=round(role.saturation.value, 4),
        average=round(role.average.value, 4),
        part=role.saturation.part,
        desired=role.follower.aimed,
        ready=load.ready,
        reason=role.decision.reason.value,
        text=role.decision.text,
        running=load.running,
        waiting=load.waiting,
        limit=load.limit,
        queue_age_seconds=round(load.queue_age_seconds, 3),
        workers=[WorkerStreams(f"{worker:x}", count) for worker, count in sorted(role.streams.items())],
    )


def role_load(
    pool: ModelPool, workers: Iterable[Candidate], reports_of: Callable[[int], Iterable[LoadReport]], now: float
) -> RoleLoad:
    """Return the load of a pool; `workers` are its members that are there, `reports_of` gives the newest reports of one."""
    streams = blocks = tokens = count = 0
    has_blocks = has_tokens = False
    for worker in workers:
        count += 1
        streams += worker.in_flight
        for report in reports_of(worker.instance_id):
            if report.active_decode_blocks is not None:
                blocks, has_blocks = blocks + report.active_decode_blocks, True
            if report.active_prefill_tokens is not None:
                tokens, has_tokens = tokens + report.active_prefill_tokens, True
    config = pool.runtime_config
    running, waiting, age = streams, 0, 0.0
    if isinstance(pool, ServedModel):  # requests come to it, and wait in it while no worker is there
        admission = pool.admission
        running, waiting, age = max(streams, admission.in_flight), admission.waiting, admission.queue_age_seconds(now)
    return RoleLoad(
        count,
        running,
        _together(config.max_num_seqs, config, count),
        waiting,
        age,
        blocks if has_blocks else None,
        _together(config.total_kv_blocks, config, count),
        tokens if has_tokens else None,
        _together(config.max_num_batched_tokens, config, count),
    )


def _together(of_a_rank: int | None, config: ModelRuntimeConfig, workers: int) -> int | None:
    """Return what all workers have together; None: they did not report it."""
    return of_a_rank * max(1, config.data_parallel_size) * workers if of_a_rank else None
