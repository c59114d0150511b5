"""Bytes that no decoder reads, from any process of the cluster: each costs itself, and what follows is read."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import zmq

from dynamo.frontend.models.busy_threshold import LOAD_TOPIC
from dynamo.kv.engine_events import BadPayload, read_payload
from dynamo.kv.events import BadEvents, read_events
from dynamo.placement.replica_events import BadReplicaEvents, decode_binding, decode_bookings
from dynamo.router.workers.busy_workers import MAX_RANKS, BusyThresholds, BusyWorkers, LoadReport
from dynamo.runtime.calls.event_plane.envelope import BadEvent, decode_parts, zmq_broker, zmq_endpoint
from dynamo.runtime.calls.event_plane.zmq import SocketReader
from support.cases import each_case
from support.frontend_cluster import cluster, memory_runtime
from support.patience import PATIENCE_SECONDS

DEEP: Final = b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"  # a map whose one member nests 100,000 lists
DEEP_JSON: Final = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
NOT_UTF8: Final = b"\x81\xa4\xff\xff\xff\xff\x01"
READERS: Final[list[tuple[Callable[[bytes], object], type[Exception]]]] = [
    (read_events, BadEvents),
    (lambda payload: read_events(b"\x91" + payload), BadEvents),
    (decode_bookings, BadReplicaEvents),
    (decode_binding, BadReplicaEvents),
    (read_payload, BadPayload),
    (lambda payload: decode_parts([b"t", b"", b"", struct.pack(">BI", 1, len(payload)) + payload]), BadEvent),
]


@each_case("payload", [DEEP, NOT_UTF8])
def test_a_message_that_nests_too_deep_is_refused_as_others_are(payload: bytes) -> None:
    for read, error in READERS:
        with pytest.raises(error):
            read(payload)


def test_so_is_a_record_of_an_event_channel() -> None:
    with pytest.raises(BadEvent):
        zmq_endpoint(DEEP_JSON)
    assert zmq_broker(DEEP_JSON) is None


async def test_a_load_report_that_nests_too_deep_leaves_the_reports_of_others_to_be_read(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        worker = await house.worker()
        worker_id = worker.endpoint.connection_id()
        loads = house.frontend.kernel.loads
        await loads.set(
            BusyThresholds(next(iter(house.frontend.models.served())).name, active_prefill_tokens_threshold=1)
        )
        publisher = worker.runtime.events.new_publisher(worker.endpoint.event_scope, LOAD_TOPIC)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while worker_id not in loads.busy_workers._reports:
                for payload in (
                    DEEP,
                    NOT_UTF8,
                    msgspec.msgpack.encode({"worker_id": worker_id, "active_prefill_tokens": 9}),
                ):
                    publisher.publish(payload)
                await asyncio.sleep(0.01)


@each_case("record", [DEEP_JSON, b'{"instance_id":"\xff\xfe"}'])
async def test_a_poisoned_instance_record_leaves_the_others_to_be_found(record: bytes) -> None:
    working, calling = memory_runtime(), memory_runtime()
    try:
        await calling.discovery.put("v1/instances/ns/c/e/1", record)
        client = await calling.endpoint("ns.c.e").client()

        async def serve(*_: Any) -> None: ...

        await working.endpoint("ns.c.e").start_serving(serve)
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await client.wait_for_instances() == [working.endpoint("ns.c.e").connection_id()]
        await client.close()
    finally:
        await working.aclose()
        await calling.aclose()


async def test_a_message_that_breaks_its_reader_does_not_end_the_reading() -> None:
    context: zmq.Context[Any] = zmq.Context()
    sending, receiving = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    sending.bind("inproc://poisoned")
    receiving.connect("inproc://poisoned")
    taken: list[bytes] = []
    is_done = asyncio.Event()

    def take(parts: Any) -> None:
        if parts[0] == b"poison":
            raise RecursionError
        taken.append(parts[0])
        is_done.set()

    reader = SocketReader(receiving, take)
    try:
        sending.send(b"poison")
        sending.send(b"good")
        reader.start()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await is_done.wait()
        assert taken == [b"good"]
    finally:
        reader.close()
        sending.close(linger=0)
        context.term()


def test_the_ranks_that_reports_name_are_bounded() -> None:
    workers = BusyWorkers(list, BusyThresholds)
    for rank in range(MAX_RANKS + 100):
        workers.report(LoadReport(1, rank))
    assert len(workers._reports[1]) == MAX_RANKS
