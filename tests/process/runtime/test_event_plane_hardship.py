"""Services that are not there, go and come back; brokers; sockets that nobody should reach."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path

import pytest
import zmq

from dynamo.errors import CannotConnect
from dynamo.runtime.base.settings import EventPlaneSettings, NatsSettings, ZmqBroker
from dynamo.runtime.calls.event_plane.base import EventScope
from dynamo.runtime.calls.event_plane.envelope import channel_record
from dynamo.runtime.calls.event_plane.nats import NatsEventPlane
from dynamo.runtime.calls.event_plane.zmq import ZmqEventPlane
from dynamo.runtime.calls.nats_connection import NatsConnection
from dynamo.runtime.discovery.base import EVENT_CHANNELS
from dynamo.runtime.discovery.file import FileDiscovery
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryHub
from dynamo.runtime.distributed import DistributedRuntime
from support.event_planes import Counted, World, heard, world, zmq_broker
from support.nats_server import nats_server, shared_nats
from support.patience import PATIENCE_SECONDS, PROMPT_SECONDS

__all__ = ["shared_nats"]

SCOPE = EventScope("ns", "c", "e")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def started() -> MemoryDiscovery:
    discovery = MemoryDiscovery(MemoryHub())
    await discovery.start()
    return discovery


# -- not there ------------------------------------------------------------------------------------------------------------


async def test_a_runtime_without_its_nats_says_where_it_looked_and_which_flag_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NATS_SERVER", f"nats://127.0.0.1:{free_port()}")
    monkeypatch.setenv("NATS_STARTUP_CONNECT_TIMEOUT_SECONDS", "0.3")
    began = time.monotonic()
    runtime = DistributedRuntime(None, "mem", "mem", event_plane="nats")
    with pytest.raises(CannotConnect, match=r"nats://127\.0\.0\.1:\d+ cannot be used .*--event-plane nats"):
        await runtime.start()
    await runtime.aclose()
    assert time.monotonic() - began < PROMPT_SECONDS


async def test_a_port_that_accepts_and_says_nothing_is_no_nats() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connection = NatsConnection(
        NatsSettings(servers=(f"nats://127.0.0.1:{port}",), connect_timeout_seconds=0.3), wanted_by="--event-plane nats"
    )
    with pytest.raises(CannotConnect, match="cannot be used"):
        await connection.start()
    await connection.close()
    server.close()


async def test_a_wrong_password_is_said_at_once() -> None:
    with nats_server("--user", "me", "--pass", "right") as server:
        wrong = NatsSettings(servers=(server.url,), username="me", password="wrong", connect_timeout_seconds=30)
        connection = NatsConnection(wrong, wanted_by="--event-plane nats")
        with pytest.raises(CannotConnect, match=r"(?i)authorization"):
            await connection.start()
        right = NatsSettings(servers=(server.url,), username="me", password="right")
        connection = NatsConnection(right, wanted_by="--event-plane nats")
        await connection.start()
        assert connection.is_connected
        await connection.close()


async def test_a_missing_broker_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_ZMQ_BROKER_URL", f"xsub=tcp://127.0.0.1:{free_port()},xpub=tcp://127.0.0.1:1")
    runtime = DistributedRuntime(None, "mem", "mem", event_plane="zmq")
    with pytest.raises(CannotConnect, match="DYN_ZMQ_BROKER_URL"):
        await runtime.start()
    await runtime.aclose()


async def test_an_unknown_plane_is_refused() -> None:
    with pytest.raises(ValueError, match="use one of zmq, nats, mem"):
        DistributedRuntime(None, "mem", "mem", event_plane="pigeon")


# -- lost and back --------------------------------------------------------------------------------------------------------


async def test_a_nats_that_dies_costs_the_events_of_the_gap_and_nothing_else() -> None:
    with nats_server() as server:
        discovery = await started()
        settings = NatsSettings(servers=(server.url,))
        counts = Counted()
        speaking, listening = (NatsConnection(settings, wanted_by="--event-plane nats") for _ in range(2))
        speaker = NatsEventPlane(discovery, speaking, counts=counts, max_outbox=8)
        listener = NatsEventPlane(discovery, listening)
        publisher = await speaker.publisher(SCOPE, "t")
        async with listener.subscribe(SCOPE, "t") as events:
            await heard(publisher, events)
            server.kill()
            async with asyncio.timeout(PATIENCE_SECONDS):
                while speaking.is_connected or listening.is_connected:
                    await asyncio.sleep(0.005)
            began = time.monotonic()
            for _ in range(1000):
                publisher.publish(b"into the void")
            assert time.monotonic() - began < PROMPT_SECONDS  # nobody waits for a server
            assert counts.found["dropped"] == 1000 - 8  # and nothing grows
            server.start()
            async with asyncio.timeout(PATIENCE_SECONDS):
                await speaking.wait_connected()
                await listening.wait_connected()
            after = await heard(publisher, events)
            publisher.publish(b"on")
            async with asyncio.timeout(PATIENCE_SECONDS):
                event = await anext(events)
        assert (event.payload, event.sequence, event.missed) == (b"on", after.sequence + 1, 0)
        for plane, connection in ((speaker, speaking), (listener, listening)):
            await plane.close()
            await connection.close()


async def test_the_gap_shows_on_the_first_event_behind_it() -> None:
    with nats_server() as server:
        async with world("nats", server.url) as there:
            speaker, listener = await there.plane(), await there.plane()
            publisher = await speaker.publisher(SCOPE, "t")
            async with listener.subscribe(SCOPE, "t") as events:
                before = await heard(publisher, events)
                publisher._sequence += 5  # type: ignore[attr-defined]  # as if they had been lost on the way
                publisher.publish(b"x")
                async with asyncio.timeout(PATIENCE_SECONDS):
                    event = await anext(events)
    assert (event.sequence, event.missed) == (before.sequence + 6, 5)


async def test_a_frozen_nats_neither_blocks_a_publisher_nor_lets_it_grow() -> None:
    with nats_server() as server:
        discovery = await started()
        connection = NatsConnection(NatsSettings(servers=(server.url,)), wanted_by="--event-plane nats")
        counts = Counted()
        plane = NatsEventPlane(discovery, connection, counts=counts, max_outbox=64)
        publisher = await plane.publisher(SCOPE, "t")
        server.freeze()
        try:
            block = bytes(256 * 1024)
            began = time.monotonic()
            for _ in range(200):  # 50 MB
                publisher.publish(block)
                await asyncio.sleep(0)
            assert time.monotonic() - began < PROMPT_SECONDS
            assert counts.found["dropped"] > 0
            assert connection.client.pending_data_size < 8 * 1024 * 1024
        finally:
            server.thaw()
        await plane.close()
        await connection.close()


async def test_an_event_too_large_for_nats_is_dropped_alone() -> None:
    with nats_server() as server:
        async with world("nats", server.url) as there:
            counts = Counted()
            speaker, listener = await there.plane(counts=counts), await there.plane()
            publisher = await speaker.publisher(SCOPE, "t")
            async with listener.subscribe(SCOPE, "t") as events:
                await heard(publisher, events)
                publisher.publish(bytes(2 * 1024 * 1024))
                publisher.publish(b"after")
                async with asyncio.timeout(PATIENCE_SECONDS):
                    event = await anext(events)
    assert (event.payload, event.missed) == (b"after", 1)
    assert counts.found["dropped"] == 1


async def test_a_zmq_subscriber_survives_a_peer_that_speaks_rubbish() -> None:
    async with world("zmq") as there:
        counts = Counted()
        speaker, listener = await there.plane(), await there.plane(counts=counts)
        publisher = await speaker.publisher(SCOPE, "t")
        store = MemoryDiscovery(there.hub)
        await store.start()
        context = zmq.Context()
        rude = context.socket(zmq.PUB)
        port = rude.bind_to_random_port("tcp://127.0.0.1")
        transport = {"kind": "Zmq", "config": {"endpoint": f"tcp://127.0.0.1:{port}"}}
        for number, record in enumerate((channel_record(SCOPE, "t", 9, transport), b"{}", b"\xff")):
            await store.put(f"{EVENT_CHANNELS}/{SCOPE.channel_key('t', number)}", record)
        async with listener.subscribe(SCOPE, "t") as events:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while counts.found.get("invalid", 0) < 3:
                    rude.send_multipart([b"t", b"rubbish"])
                    rude.send_multipart([b"t", bytes(8), bytes(8), b"\x01\x00\x00\x00\x01\xc0"])
                    await asyncio.sleep(0.01)
            assert (await heard(publisher, events)).payload == b"hello"
        rude.close(linger=0)
        context.term()
        await store.close()


async def test_a_publisher_that_leaves_discovery_is_disconnected_and_one_that_moves_is_followed() -> None:
    async with world("zmq") as there:
        speaker, listener = await there.plane(), await there.plane()
        async with listener.subscribe(SCOPE, "t") as events:
            for _ in range(3):
                publisher = await speaker.publisher(SCOPE, "t")
                await heard(publisher, events)
                await publisher.close()
        store = MemoryDiscovery(there.hub)
        await store.start()
        assert await store.get_prefix(EVENT_CHANNELS) == {}
        await store.close()


# -- brokers --------------------------------------------------------------------------------------------------------------


async def test_with_two_brokers_a_message_comes_once() -> None:
    with zmq_broker() as one, zmq_broker() as two:
        both = ZmqBroker(one.xsub + two.xsub, one.xpub + two.xpub)
        there = World("zmq broker", broker=both)
        try:
            speaker, listener = await there.plane(), await there.plane()
            publisher = await speaker.publisher(SCOPE, "t")
            async with listener.subscribe(SCOPE, "t") as events:
                begun = await heard(publisher, events)
                for _ in range(20):
                    publisher.publish(b"x")
                async with asyncio.timeout(PATIENCE_SECONDS):
                    seen = [(await anext(events)).sequence for _ in range(20)]
            assert seen == [begun.sequence + n for n in range(1, 21)]
        finally:
            await there.aclose()


async def test_a_broker_can_be_found_in_discovery() -> None:
    with zmq_broker() as broker:
        hub = MemoryHub()
        announcing = MemoryDiscovery(hub)
        await announcing.start()
        sides = {"xsub_endpoints": list(broker.xsub), "xpub_endpoints": list(broker.xpub)}
        scope = EventScope("ns", "zmq_broker")
        record = channel_record(scope, "broker", 1, {"kind": "ZmqBroker", "config": sides})
        await announcing.put(f"{EVENT_CHANNELS}/{scope.channel_key('broker', 1)}", record)
        discovery = MemoryDiscovery(hub)
        await discovery.start()
        plane = ZmqEventPlane(discovery, EventPlaneSettings(host="127.0.0.1", broker_enabled=True))
        publisher = await plane.publisher(SCOPE, "t")
        async with plane.subscribe(SCOPE, "t") as events:
            assert (await heard(publisher, events)).payload == b"hello"
        assert len(await discovery.get_prefix(EVENT_CHANNELS)) == 1  # publishers of a broker are not recorded
        await plane.close()
        await discovery.close()
        await announcing.close()


# -- where it listens ------------------------------------------------------------------------------------------------------


async def test_what_is_advertised_on_loopback_is_bound_there_only(tmp_path: Path) -> None:
    discovery = FileDiscovery(tmp_path)
    await discovery.start()
    plane = ZmqEventPlane(discovery, EventPlaneSettings(host="127.0.0.1"))
    await plane.publisher(SCOPE, "t")
    (record,) = (await discovery.get_prefix(EVENT_CHANNELS)).values()
    endpoint = json.loads(record)["transport"]["config"]["endpoint"]
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    assert host == "127.0.0.1"
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", int(port)))  # free: the publisher does not listen everywhere
    await plane.close()
    assert await discovery.get_prefix(EVENT_CHANNELS) == {}
    await discovery.close()


async def test_an_endpoints_events_cross_runtimes_over_every_plane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("DYN_EVENT_PLANE_HOST", "127.0.0.1")
    monkeypatch.setenv("NATS_SERVER", request.getfixturevalue("shared_nats").url)
    for name in ("zmq", "nats", "mem"):
        async with (
            DistributedRuntime(None, None, "mem", event_plane=name, discovery=FileDiscovery(tmp_path)) as speaking,
            DistributedRuntime(None, None, "mem", event_plane=name, discovery=FileDiscovery(tmp_path)) as listening,
        ):
            channel = speaking.endpoint("ns.c.e").event_channel("kv_metrics")
            scope = listening.endpoint("ns.c.e").event_scope
            async with listening.events.subscribe(scope, "kv_metrics") as events:
                waiting = asyncio.ensure_future(anext(events))
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while not waiting.done():
                        channel.publish({"worker_id": 1})
                        await asyncio.wait({waiting}, timeout=0.02)
            assert (await waiting).payload == b"\x81\xa9worker_id\x01"
            exposed = listening.metrics.expose().decode()
            assert ("dynamo_event_plane_received_total{" in exposed) == (name != "mem")
