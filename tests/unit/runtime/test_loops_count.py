"""Each loop of a worker, a store, a plane or a router that fails once goes on, and its failure is counted and shown."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.frontend.base.settings.recording import RequestTraceSettings
from dynamo.frontend.parts.recording.trace_writer import TraceWriter
from dynamo.kv.index import PrefixIndex
from dynamo.placement.active_load import ActiveLoad
from dynamo.placement.policies.kv_policies import kv_policy
from dynamo.placement.session_affinity import SessionAffinity
from dynamo.router.kv.router import KvRouter
from dynamo.router.kv.settings import KvRouterSettings
from dynamo.router.peers.load_reports import LOAD_TOPIC, RouterLoadReports
from dynamo.router.peers.replica_sync import BINDINGS_TOPIC, BOOKINGS_TOPIC, ReplicaSync, SessionSync
from dynamo.router.standalone.routed_endpoint import routed_endpoint
from dynamo.router.standalone.worker_reports import busy_filter
from dynamo.router.workers.busy_workers import BusyThresholds
from dynamo.runtime.base.forever import FAILURES
from dynamo.runtime.base.settings import CanarySettings, EventPlaneSettings, KubernetesSettings
from dynamo.runtime.calls.event_plane.base import EventScope, NoCounts
from dynamo.runtime.calls.event_plane.nats import _Outbox
from dynamo.runtime.calls.event_plane.zmq import ZmqEventPlane
from dynamo.runtime.calls.health import Canary, HealthState
from dynamo.runtime.discovery import Put
from dynamo.runtime.discovery.base import EVENT_SOURCES
from dynamo.runtime.discovery.file import FileDiscovery
from dynamo.runtime.discovery.kubernetes import KubernetesDiscovery
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.testing.simulation.loop import run_virtual
from dynamo.worker.kv_publishing.publisher import KvEventPublisher
from support.discovery_rigs import collect
from support.fails_once import BrokenSteps, assert_shown
from support.fake_kubernetes import NAMESPACE, FakeKubernetes
from support.frontend_cluster import memory_runtime
from support.patience import PROMPT_SECONDS
from support.processes import until, wait

PATH = "ns.pool.generate"
KEY = "v1/instances/ns/c/e/1f"


@asynccontextmanager
async def runtimes(count: int = 1) -> AsyncIterator[list[DistributedRuntime]]:
    made = [memory_runtime() for _ in range(count)]
    try:
        yield made
    finally:
        for each in made:
            await each.aclose()


def test_the_health_check_of_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        steps = BrokenSteps(monkeypatch, "dynamo.runtime.calls.health:Canary._probe")
        health = HealthState(canary_enabled=True)
        health.register(PATH, has_payload=True)

        async def serve(body: Any, context: Any, sink: Any) -> None:
            sink.send_tokens([1])

        canary = Canary(PATH, serve, {}, health, CanarySettings(True, 10.0, 5.0))
        canary.start()
        await asyncio.sleep(30.0)
        assert not steps.not_again
        assert steps.counted == 1
        assert_shown([f"canary {PATH}"])
        assert health.is_ready(PATH)
        await canary.close()

    run_virtual(scenario())


async def test_the_sender_of_nats(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []

    async def connected() -> None:
        if not sent and not steps.counted:
            raise RuntimeError("for a test")

    async def publish(subject: str, envelope: bytes) -> None:
        sent.append(envelope)

    client = SimpleNamespace(publish=publish, pending_data_size=0)
    connection: Any = SimpleNamespace(client=client, wait_connected=connected)
    steps = BrokenSteps(monkeypatch)
    outbox = _Outbox(connection, NoCounts(), 10)
    outbox.put("subject", "topic", b"1")
    outbox.put("subject", "topic", b"2")
    await until(lambda: sent == [b"1", b"2"])
    assert steps.counted == 1
    assert_shown(["event plane: nats sender"])
    await outbox.close()


async def test_the_channels_of_zmq_and_their_announcements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = FileDiscovery(tmp_path, poll_seconds=0.005)
    await store.start()
    steps = BrokenSteps(
        monkeypatch,
        "dynamo.runtime.discovery.file:FileDiscovery.put",
        "dynamo.runtime.calls.event_plane.zmq:follow",
    )
    plane = ZmqEventPlane(store, EventPlaneSettings(host="127.0.0.1"))
    scope = EventScope("ns", "pool")
    publisher = await plane.publisher(scope, "loads")
    assert steps.counted == 1  # it is announced now: nothing is shown of that any more
    async with plane.subscribe(scope, "loads") as events:
        await steps.run_again("channels of loads")
        arrived = asyncio.ensure_future(anext(events))
        async with asyncio.timeout(PROMPT_SECONDS):
            while not arrived.done():  # a subscription takes a moment
                publisher.publish(b"beat")
                await asyncio.sleep(0.01)
        assert (await arrived).payload == b"beat"
    await plane.close()
    await store.close()


async def test_the_recovery_of_a_publisher_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = BrokenSteps(monkeypatch, "dynamo.worker.kv_publishing.recovery:KvRecovery.begin")
    async with runtimes() as (runtime,):
        endpoint = runtime.endpoint(PATH)
        publisher = KvEventPublisher(endpoint, kv_block_size=4, enable_local_indexer=True)
        await steps.run_again(f"kv recovery of {PATH}")
        async with asyncio.timeout(PROMPT_SECONDS), runtime.discovery.watch(EVENT_SOURCES) as changes:
            while not any(isinstance(each, Put) for each in await anext(changes)):
                pass
        publisher.shutdown()


async def test_the_load_reports_of_a_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.router.peers.load_reports.INTERVAL_SECONDS", 0.01)
    steps = BrokenSteps(monkeypatch, "dynamo.router.peers.load_reports:RouterLoadReports.report_changes")
    async with runtimes() as (runtime,), RouterLoadReports(runtime.endpoint(PATH), ActiveLoad(16)):
        await steps.run_again("load reports of the router")


async def test_what_routers_report_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.placement.session_affinity.MAX_REAP_SECONDS", 0.01)
    steps = BrokenSteps(
        monkeypatch,
        "dynamo.router.peers.replica_sync:SessionSync._reap",
        "dynamo.router.peers.replica_sync:decode_binding",
        "dynamo.router.peers.replica_sync:decode_bookings",
        "dynamo.router.peers.replica_sync:follow",
    )
    async with runtimes(2) as (here, there):
        endpoint, other = here.endpoint(PATH), there.endpoint(PATH)
        sessions = SessionAffinity(60.0, writer_id=1, is_known=lambda rank: True)
        async with (
            ReplicaSync(endpoint, ActiveLoad(16), router_id=1, block_size=16),
            SessionSync(endpoint, sessions),
        ):
            channels = [other.event_channel(topic) for topic in (BOOKINGS_TOPIC, BINDINGS_TOPIC)]
            async with asyncio.timeout(PROMPT_SECONDS):
                while steps.not_again:
                    for channel in channels:
                        channel.publish("of no router")
                    await asyncio.sleep(0.01)
            await steps.run_again("expiry of sessions", "bookings of other routers", "channels of other routers")
            for channel in channels:
                await channel.close()


async def test_a_client_of_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.runtime.client.WATCH_RETRY_SECONDS", 0.01)
    async with runtimes(2) as (here, there):
        client = await here.endpoint(PATH).client()
        steps = BrokenSteps(monkeypatch, "dynamo.runtime.client:Client._apply")

        async def generate(body: Any, context: Any, sink: Any) -> None:
            sink.end()

        await there.endpoint(PATH).start_serving(generate)
        await steps.run_again(f"watch {PATH}")
        assert client.instance_ids() == [there.endpoint(PATH).connection_id()]
        await client.close()


async def test_a_router_before_one_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.router.standalone.routed_endpoint.RETRY_SECONDS", 0.01)
    async with runtimes(2) as (here, there):
        endpoint, worker = here.endpoint(PATH), there.endpoint(PATH)
        router = KvRouter(block_size=16, policy=kv_policy("default"), rng=random.Random(1), index=PrefixIndex())
        async with routed_endpoint(endpoint, router, KvRouterSettings(), PrefixIndex()) as workers:
            thresholds = BusyThresholds("m", active_decode_blocks_threshold=0.5)
            async with busy_filter(workers, thresholds):
                steps = BrokenSteps(
                    monkeypatch,
                    "dynamo.router.standalone.routed_endpoint:RoutedEndpoint._take_card",
                    "dynamo.router.kv_events.feed:split_events",
                    "dynamo.router.workers.busy_workers:BusyWorkers.keep_only",
                )
                await worker.publish_model({"display_name": "m", "runtime_config": {"total_kv_blocks": 50}})
                loads, events = worker.event_channel(LOAD_TOPIC), worker.event_channel("kv-events")
                async with asyncio.timeout(PROMPT_SECONDS):
                    while steps.not_again:
                        loads.publish({"worker_id": worker.connection_id(), "dp_rank": 0})
                        events.publish("of no engine")
                        await asyncio.sleep(0.01)
                await steps.run_again("model cards of the workers", "load reports of the workers")
                assert any("KV events of the workers failed" in each for each in FAILURES.troubles())
                await loads.close()
                await events.close()


async def test_the_file_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = FileDiscovery(tmp_path, poll_seconds=0.005)
    await store.start()
    steps = BrokenSteps(monkeypatch, "dynamo.runtime.discovery.file.discovery:FileStore.poll")
    await steps.run_again("file discovery store")
    await store.close()


@pytest.mark.usefixtures("patient_requests")
async def test_the_kubernetes_store(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeKubernetes()
    await cluster.start()
    await cluster.set_pod("w-0")
    settings = KubernetesSettings("w-0", NAMESPACE, "uid-w-0", None, "pod")
    store = KubernetesDiscovery(
        settings, configuration=cluster.configuration(), debounce_seconds=0.005, keep_seconds=0.2
    )
    broken = "dynamo.runtime.discovery.kubernetes.api:KubernetesApi.watch"
    steps = BrokenSteps(monkeypatch, broken)
    await store.start()
    await steps.run_again()
    await store.put(KEY, b"{}")
    async with store.watch(KEY) as changes:
        assert Put(KEY, b"{}") in await collect(changes, Put(KEY, b"{}"))
    steps = BrokenSteps(monkeypatch, "dynamo.runtime.discovery.kubernetes.api:KubernetesApi.apply")
    await cluster.remove_workers()
    await steps.run_again("kubernetes: our DynamoWorkerMetadata")
    await store.close()
    await cluster.stop()


def test_the_writer_of_request_traces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dropped: list[tuple[str, int]] = []
    settings = RequestTraceSettings(is_on=True, path=str(tmp_path / "t"), format="jsonl", flush_seconds=0.001)
    writer = TraceWriter(settings, None, lambda reason, count: dropped.append((reason, count)))
    steps = BrokenSteps(monkeypatch, "dynamo.frontend.parts.recording.trace_writer:_Files.write")
    for number in range(2):
        writer.put(partial(list, [{"number": number}]))
        wait(partial(steps.have_run, number + 1), lambda: "a write")
    writer.close()
    assert steps.counted == 1
    assert dropped == [("unwritable", 1)]
    (file,) = tmp_path.glob("t.*")
    assert [json.loads(line)["event"]["number"] for line in file.read_text().splitlines()] == [1]
