"""The queue of the kv router mode from the door: who waits, who goes, and what a client sees when it is full."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from dynamo.errors import EngineShutdown
from dynamo.kv.overlap import WorkerRank
from dynamo.placement.timing import DEFAULT_TIMING, RankTiming, TimeCurve
from dynamo.placement.timing_learner import TimingLearner
from dynamo.protocol.model_types import ModelType, WorkerType
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.protocol.worker_request import WorkerRequest
from dynamo.router.dispatch.record import DispatchRecord
from dynamo.router.kv import metrics as kv_metrics
from dynamo.router.kv.placement import KvPlacement
from dynamo.router.kv.settings import KvRouterSettings
from dynamo.runtime.base.tasks import first_of
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from dynamo.settings.table import read_settings
from support.asgi_client import Exchange
from support.frontend_cluster import Cluster, ScriptedWorker, cluster
from support.patience import PATIENCE_SECONDS

BLOCK = 4
BATCH = 100
PROMPT = list(range(1, 61))  # 60 tokens: one of them makes a worker busy at a threshold of 0.5

POLICY = """
default_policy_family: rest
uncached_isl_buckets: [{min_tokens: 0, bucket: all}]
policy_classes:
  - {name: rest, policy_family: rest, cache_bucket: all, quantum: 60, prefill_busy_threshold: 0}
  - {name: gold, quantum: 240, prefill_busy_threshold: 0, request_queue_limit_per_worker: 3}
"""


class Gated:
    """Workers that answer the requests one at a time, whenever the test says so; the order in which they came."""

    def __init__(self) -> None:
        self.arrived: list[str] = []
        self._permits = asyncio.Semaphore(0)

    async def script(self, body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        self.arrived.append(str(body["token_ids"][0]))
        await first_of(self._permits.acquire(), context.async_killed_or_stopped())
        sink.send_tokens(list(b"z"), finish_reason="stop")

    def answer(self, requests: int = 1) -> None:
        for _ in range(requests):
            self._permits.release()


@asynccontextmanager
async def queued(tmp_path: Path, **settings: Any) -> AsyncIterator[Cluster]:
    settings = {"policy": "default", "use_kv_events": False, "router_queue_threshold": 0.5, **settings}
    made = KvRouterSettings(**settings).settle({})
    async with cluster(tmp_path, router_mode="kv", kv_router=made) as found:
        yield found


async def add(house: Cluster, script: Any, **members: Any) -> ScriptedWorker:
    config = ModelRuntimeConfig(total_kv_blocks=1000, max_num_batched_tokens=BATCH)
    return await house.worker(script, kv_cache_block_size=BLOCK, runtime_config=config, **members)


def ask(
    house: Cluster, first: int = 1, *, policy_class: str | None = None, target_ms: int | None = None, **fields: Any
) -> Exchange:
    headers = {} if policy_class is None else {"x-dynamo-meta-policy-class": policy_class}
    if target_ms is not None:
        headers["x-dynamo-slo-ttft-ms"] = str(target_ms)
    prompt = [first, *PROMPT[1:]]
    return house.client.begin("POST", "/v1/completions", {"model": "m", "prompt": prompt, **fields}, headers=headers)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


def waiting(house: Cluster, policy_class: str = "default", worker_type: str = "decode") -> float:
    labels = {"model": "m", "worker_type": worker_type, "policy_class": policy_class}
    return house.metric("dynamo_frontend_router_queue_pending_requests", **labels)


def placements(house: Cluster) -> list[KvPlacement]:
    domains = house.frontend.models._rules.kv
    assert domains is not None
    return [each.placement for each in domains._domains.values()]


def booked(house: Cluster) -> int:
    return sum(len(each.router.load) for each in placements(house))


def targets(house: Cluster, outcome: str) -> float:
    labels = {"model": "m", "worker_type": "decode", "policy_class": "default", "outcome": outcome}
    return house.metric("dynamo_frontend_router_ttft_targets_total", **labels)


async def test_requests_wait_for_a_worker_and_go_as_prefills_end(tmp_path: Path) -> None:
    async with queued(tmp_path) as house:
        work = Gated()
        await add(house, work.script)
        asked = [ask(house, number) for number in range(4)]
        await until(lambda: waiting(house) == 3)
        assert work.arrived == ["0"]
        for number in range(4):
            work.answer()
            assert (await asked[number].done()).status == 200
            expected = min(4, number + 2)
            await until(lambda: len(work.arrived) == expected)  # noqa: B023 - called in here
        assert work.arrived == ["0", "1", "2", "3"]
        assert (waiting(house), booked(house)) == (0, 0)


async def test_a_full_class_answers_529_with_its_figures_and_when_to_come_back(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY)
    async with queued(tmp_path, router_policy_config=str(file)) as house:
        work = Gated()
        await add(house, work.script)
        asked = [ask(house, 0)]
        await until(lambda: len(work.arrived) == 1)
        asked += [ask(house, number, policy_class="gold") for number in range(1, 4)]
        await until(lambda: waiting(house, "gold") == 3)
        refused = await ask(house, 4, policy_class="gold").done()
        assert refused.status == 529
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json["details"] == {"policy_class": "gold", "limit_kind": "requests", "current": 3, "limit": 3}
        assert 'router policy class "gold" queue requests limit reached' in refused.json["message"]
        other = ask(house, 5)  # another class has room
        await until(lambda: waiting(house, "rest") == 1)
        work.answer(5)
        for each in [*asked, other]:
            assert (await each.done()).status == 200
        reason = {"model": "m", "worker_type": "decode", "policy_class": "gold", "reason": "request_limit"}
        assert house.metric("dynamo_frontend_router_queue_backpressure_total", **reason) == 1
        assert booked(house) == 0


async def test_requests_go_by_their_targets_which_are_kept_missed_or_refused(tmp_path: Path) -> None:
    async with queued(tmp_path) as house:
        work = Gated()
        await add(house, work.script)
        asked = [ask(house, 0)]
        await until(lambda: len(work.arrived) == 1)
        for number, target_ms in enumerate((None, 3_600_000, 1), start=1):
            asked.append(ask(house, number, target_ms=target_ms))
            await until(lambda: waiting(house) == number)  # noqa: B023 - called in here
        asked.append(ask(house, 4, nvext={"slo_ttft_ms": 1_800_000}))
        await until(lambda: waiting(house) == 4)
        work.answer(5)
        for each in asked:
            assert (await each.done()).status == 200
        assert work.arrived == ["0", "3", "4", "2", "1"]
        assert [targets(house, outcome) for outcome in ("kept", "missed", "refused")] == [2, 1, 0]


async def test_a_target_that_cannot_be_kept_is_answered_with_529_and_when_to_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = RankTiming(TimeCurve(10_000.0, 0.0), DEFAULT_TIMING.decode)  # a prompt takes 10 s
    monkeypatch.setattr(TimingLearner, "timing", lambda learner, rank: shown)
    async with queued(tmp_path) as house:
        work = Gated()
        await add(house, work.script)
        running = ask(house, 5)
        await until(lambda: len(work.arrived) == 1)
        refused = await ask(house, 6, target_ms=5000).done()
        assert (refused.status, refused.json["details"]["limit_kind"]) == (529, "ttft_target_ms")
        assert 10 <= int(refused.headers["retry-after"]) <= 20
        assert targets(house, "refused") == 1
        work.answer()
        assert (await running.done()).status == 200


async def test_a_target_that_cannot_be_meant_is_named(tmp_path: Path) -> None:
    async with queued(tmp_path) as house:
        await add(house, Gated().script)
        answer = await ask(house, target_ms=0).done()
        assert (answer.status, "x-dynamo-slo-ttft-ms" in answer.json["message"]) == (400, True)


async def test_the_owner_of_a_key_is_the_tenant_in_the_queue(tmp_path: Path) -> None:
    async with queued(tmp_path) as house:
        work = Gated()
        await add(house, work.script)
        work.answer()
        assert (await ask(house).done()).status == 200
        (placement,) = placements(house)
        record = DispatchRecord()
        record.tenant = "owner"
        for body in (WorkerRequest(token_ids=PROMPT), WorkerRequest(token_ids=PROMPT, routing={"priority": 1})):
            assert (await placement.query(body, record, pinned=None)).tenant == "owner"


async def test_a_client_that_leaves_gives_its_place_away(tmp_path: Path) -> None:
    async with queued(tmp_path) as house:
        work = Gated()
        worker = await add(house, work.script)
        first = ask(house, 0)
        await until(lambda: len(work.arrived) == 1)
        leaving, staying = ask(house, 1, stream=True), ask(house, 2)
        await until(lambda: waiting(house) == 2)
        leaving.disconnect()
        await until(lambda: waiting(house) == 1)
        work.answer(2)
        assert (await first.done()).status == (await staying.done()).status == 200
        assert work.arrived == ["0", "2"]
        assert len(worker.requests) == 2


async def test_a_deadline_passes_in_the_queue(tmp_path: Path) -> None:
    made = KvRouterSettings(policy="default", use_kv_events=False, router_queue_threshold=0.5)
    async with cluster(tmp_path, router_mode="kv", kv_router=made, request_timeout_seconds=0.3) as house:
        worker = await add(house, Gated().script)
        domains = house.frontend.models._rules.kv
        assert domains is not None
        (domain,) = domains._domains.values()
        rank = WorkerRank(worker.endpoint.connection_id())
        domain.placement.router.load.add(
            "b0b/theirs", rank, (), prompt_tokens=60, cached_tokens=0, now=0, expires=False
        )
        assert (await ask(house).done()).status == 504
        assert (waiting(house), worker.requests) == (0, [])
        late = {"model": "m", "worker_type": "decode", "policy_class": "default", "reason": "due_time_passed"}
        assert house.metric("dynamo_frontend_router_admission_rejected_total", **late) == 1


async def test_when_the_workers_are_gone_what_waits_fails_and_a_new_worker_takes_it(tmp_path: Path) -> None:
    async with queued(tmp_path) as house:
        work = Gated()
        lost = await add(house, work.script)
        asked = [ask(house, number) for number in range(3)]
        await until(lambda: waiting(house) == 2)
        await lost.served.drain(0)
        assert [(await each.done()).status for each in asked] == [503, 503, 503]
        assert waiting(house) == 0
        work.answer(9)
        await add(house, work.script)
        assert (await ask(house, 4).done()).status == 200


async def test_a_worker_that_joins_takes_what_waits(tmp_path: Path) -> None:
    async with queued(tmp_path) as house:
        first, second = Gated(), Gated()
        await add(house, first.script)
        asked = [ask(house, number) for number in range(2)]
        await until(lambda: waiting(house) == 1)
        await add(house, second.script)
        await until(lambda: second.arrived == ["1"])
        first.answer()
        second.answer()
        assert [(await each.done()).status for each in asked] == [200, 200]


async def test_an_answer_that_lost_its_worker_does_not_wait_again(tmp_path: Path) -> None:
    async with queued(tmp_path) as house:
        work, broken = Gated(), asyncio.Event()

        async def breaks(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
            sink.send_tokens(list(b"a"))
            await broken.wait()
            raise EngineShutdown("gone")

        await add(house, breaks)
        moved = ask(house, 0)
        await until(lambda: booked(house) == 1)
        await add(house, work.script)
        first = ask(house, 1, nvext={"backend_instance_id": house.workers[1].endpoint.connection_id()})
        await until(lambda: work.arrived == ["1"])
        broken.set()
        await until(lambda: work.arrived == ["1", "0"])  # although that worker is above the threshold
        work.answer(2)
        assert (await moved.done()).status == (await first.done()).status == 200


async def test_draining_serves_what_waits_and_a_cut_ends_it(tmp_path: Path) -> None:
    async with queued(tmp_path) as house:
        work = Gated()
        await add(house, work.script)
        asked = [ask(house, number) for number in range(3)]
        await until(lambda: waiting(house) == 2)
        draining = asyncio.ensure_future(house.frontend.drain(PATIENCE_SECONDS))
        work.answer(1)
        await until(lambda: len(work.arrived) == 2)
        assert house.frontend.cut() == 2
        assert [(await each.done()).status for each in asked] == [200, 503, 503]
        assert await draining
        assert (waiting(house), booked(house)) == (0, 0)


async def test_prompts_of_a_disaggregated_model_wait_for_its_prefill_workers(tmp_path: Path) -> None:
    async with queued(tmp_path) as house:
        prefills = Gated()

        async def prefill(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
            prefills.arrived.append(str(body["token_ids"][0]))
            await prefills._permits.acquire()
            sink.send_tokens([1], finish_reason="length", extra={"disaggregated_params": {"at": 1}})

        decodes = Gated()
        decodes.answer(9)
        await add(
            house,
            prefill,
            component="prefill",
            model_type=ModelType.Prefill,
            worker_type=WorkerType.Prefill,
            wait=False,
        )
        await add(house, decodes.script, worker_type=WorkerType.Decode, needs=[[WorkerType.Prefill]])
        asked = [ask(house, number) for number in range(3)]
        await until(lambda: waiting(house, worker_type="prefill") == 2)
        assert prefills.arrived == ["0"]
        leaving = ask(house, 3, stream=True)
        await until(lambda: waiting(house, worker_type="prefill") == 3)
        leaving.disconnect()
        await until(lambda: waiting(house, worker_type="prefill") == 2)
        prefills.answer(3)
        assert [(await each.done()).status for each in asked] == [200, 200, 200]
        assert (prefills.arrived, sorted(decodes.arrived)) == (["0", "1", "2"], ["0", "1", "2"])
        assert (waiting(house, worker_type="prefill"), booked(house)) == (0, 0)


def test_the_threshold_is_read_from_its_variable() -> None:
    made = read_settings(KvRouterSettings, {"DYN_ROUTER_QUEUE_THRESHOLD": "0.5"})
    assert made.profile("m").parks
    assert not read_settings(KvRouterSettings, {"DYN_ROUTER_QUEUE_THRESHOLD": "nan"}).profile("m").parks


async def in_session(house: Cluster, work: Gated, first: int, **fields: Any) -> Exchange:
    """Begin a request of a session, and return once a worker has it or it waits."""
    before, waited = len(work.arrived), waiting(house)
    headers = {"x-dynamo-session-id": "s"}
    body = {"model": "m", "prompt": [first, *PROMPT[1:]], **fields}
    asked = house.client.begin("POST", "/v1/completions", body, headers=headers)
    await until(lambda: len(work.arrived) > before or waiting(house) > waited)
    return asked


async def test_a_hard_session_waits_for_its_worker_while_another_one_is_free(tmp_path: Path) -> None:
    async with queued(tmp_path, router_session_affinity_ttl_secs=60) as house:
        work = Gated()
        await add(house, work.script)
        await add(house, work.script)
        first = await in_session(house, work, 1)
        second = await in_session(house, work, 2)
        assert (work.arrived, waiting(house)) == (["1"], 1)
        other = ask(house, 3)  # of no session: the free worker takes it at once
        await until(lambda: work.arrived == ["1", "3"])
        work.answer(3)
        assert [(await each.done()).status for each in (first, second, other)] == [200, 200, 200]
        counts = sorted(len(worker.requests) for worker in house.workers)
        assert (counts, waiting(house), booked(house)) == ([1, 2], 0, 0)


async def test_a_soft_session_moves_to_a_free_worker_instead_of_waiting(tmp_path: Path) -> None:
    settings = {"router_session_affinity_ttl_secs": 60, "router_session_affinity_mode": "soft"}
    async with queued(tmp_path, **settings) as house:
        work = Gated()
        await add(house, work.script)
        await add(house, work.script)
        asked = [await in_session(house, work, number) for number in (1, 2)]
        assert (sorted(work.arrived), waiting(house)) == (["1", "2"], 0)
        moved = next(worker for worker in house.workers if worker.requests[0]["token_ids"][0] == 2)
        asked.append(await in_session(house, work, 3))  # and waits where both are busy
        assert waiting(house) == 1
        work.answer(3)
        assert [(await each.done()).status for each in asked] == [200, 200, 200]
        (model,) = house.frontend.models.serving("m")
        assert model.sessions is not None
        rank = model.sessions.bound_rank({"agent_context": {"session_id": "s"}})
        assert rank is not None
        last = next(worker for worker in house.workers if worker.requests[-1]["token_ids"][0] == 3)
        assert rank.worker_id == last.endpoint.connection_id()
        assert moved.requests


async def test_a_session_whose_worker_leaves_while_it_waits_goes_elsewhere(tmp_path: Path) -> None:
    async with queued(tmp_path, router_session_affinity_ttl_secs=60) as house:
        work = Gated()
        await add(house, work.script)
        first = await in_session(house, work, 1)
        await add(house, work.script)
        second = await in_session(house, work, 2)
        assert waiting(house) == 1
        await house.workers[0].served.drain(0)
        await until(lambda: "2" in work.arrived)
        work.answer(2)
        assert (await second.done()).status == 200
        assert (await first.done()).status == 200  # it was tried again there


async def test_prefill_and_decode_workers_are_bound_apart(tmp_path: Path) -> None:
    settings = KvRouterSettings(policy="default", use_kv_events=False, router_session_affinity_ttl_secs=60)
    async with cluster(tmp_path, router_mode="kv", kv_router=settings) as house:

        async def prefill(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
            sink.send_tokens([1], finish_reason="length", extra={"disaggregated_params": {"at": 1}})

        decodes = Gated()
        decodes.answer(99)
        for _ in range(3):
            await add(
                house,
                prefill,
                component="prefill",
                model_type=ModelType.Prefill,
                worker_type=WorkerType.Prefill,
                wait=False,
            )
        for _ in range(3):
            await add(house, decodes.script, worker_type=WorkerType.Decode, needs=[[WorkerType.Prefill]])
        for number in range(6):
            before = len(decodes.arrived)
            asked = await in_session(house, decodes, number)
            assert (await asked.done()).status == 200
            assert len(decodes.arrived) == before + 1
        assert sorted(len(worker.requests) for worker in house.workers[:3]) == [0, 0, 6]
        assert sorted(len(worker.requests) for worker in house.workers[3:]) == [0, 0, 6]
        assert booked(house) == 0


async def test_busy_prefill_workers_are_shed_as_those_of_other_models_are(tmp_path: Path) -> None:
    made = KvRouterSettings(policy="default", use_kv_events=False)
    settings: dict[str, Any] = {"router_mode": "kv", "kv_router": made, "active_prefill_tokens_threshold": 20}
    async with cluster(tmp_path, **settings) as house:
        work = Gated()

        async def prefill(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
            await work.script(body, context, cast("ResponseSink", Swallowed()))
            sink.send_tokens([1], finish_reason="length", extra={"disaggregated_params": {"at": 1}})

        decodes = Gated()
        decodes.answer(9)
        types = {"model_type": ModelType.Prefill, "worker_type": WorkerType.Prefill}
        await add(house, prefill, component="prefill", wait=False, **types)
        await add(house, decodes.script, worker_type=WorkerType.Decode, needs=[[WorkerType.Prefill]])
        first = ask(house, 0)  # 60 tokens to prefill
        await until(lambda: any(pool.busy for pool in house.frontend.models.pools()))
        refused = await ask(house, 1).done()
        assert (refused.status, "retry-after" in refused.headers) == (529, True)
        work.answer()
        assert (await first.done()).status == 200
        await until(lambda: not any(pool.busy for pool in house.frontend.models.pools()))
        work.answer()
        assert (await ask(house, 2).done()).status == 200


class Swallowed:
    """A sink for what is not to be sent."""

    def send_tokens(self, *_: object, **__: object) -> None: ...


async def test_the_series_of_a_queue_go_with_their_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_metrics, "MAX_GONE", 0)
    async with queued(tmp_path) as house:
        work = Gated()
        work.answer()
        worker = await add(house, work.script)
        assert (await ask(house, 1).done()).status == 200

        def names() -> list[str]:
            return [line for line in house.frontend.metrics.expose().decode().splitlines() if "router_queue_" in line]

        assert names()
        await worker.stop()
        await house.gone("m")

        def is_forgotten() -> bool:
            gc.collect()  # what is forgotten is forgotten with the pool
            return names() == []

        await until(is_forgotten)


async def test_a_prompt_is_not_computed_while_every_decode_worker_is_busy(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        prefills = Gated()
        types = {"model_type": ModelType.Prefill, "worker_type": WorkerType.Prefill}
        await add(house, prefills.script, component="prefill", wait=False, **types)
        decode = await add(house, Gated().script, worker_type=WorkerType.Decode, needs=[[WorkerType.Prefill]])
        (served,) = house.frontend.models.served()
        served.busy = frozenset({decode.endpoint.connection_id()})
        assert (await ask(house, 1).done()).status == 529
        assert prefills.arrived == []
