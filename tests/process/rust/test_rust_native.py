"""A worker in Rust on the native wire, spoken to by a caller that shares no code with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.mux.client import MuxClient
from support.native_caller import Answer, NativeCaller, native_caller, request_frame, two_part
from support.patience import PATIENCE_SECONDS
from support.processes import until
from support.rust_worker import NEEDS_ENGINE, RustWorker, body
from support.streams import read_all

pytestmark = NEEDS_ENGINE
FOREVER = 10**6


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[RustWorker]:
    worker = RustWorker.start(tmp_path)
    yield worker
    worker.close()


@asynccontextmanager
async def calling(worker: RustWorker) -> AsyncIterator[tuple[NativeCaller, str]]:
    address, _, path = worker.instance().transport["tcp"].partition("/")
    async with native_caller(address) as caller:
        yield caller, path


def tokens(items: list[Any]) -> list[int]:
    chunks = [item["data"]["data"] for item in items if isinstance(item, dict) and "data" in item]
    return [token for chunk in chunks for token in chunk["token_ids"]]


async def idle(worker: RustWorker) -> None:
    name = "dynamo_component_inflight_requests"
    await until(lambda: worker.metric(name) == 0, lambda: f"the worker to be idle; log:\n{worker.log}")


@pytest.mark.parametrize("codec", ["msgpack", "json", None])
async def test_a_stream_is_prologue_items_final_and_sentinel(worker: RustWorker, codec: str | None) -> None:
    async with calling(worker) as (caller, path):
        answer = await caller.call(path, body(3), codec=codec)
        prologue, *items, final, sentinel = await answer.everything()
        assert (prologue, final, sentinel) == ({"error": None}, {"complete_final": True}, "sentinel")
        assert tokens(items) == [1, 2, 3]
        assert all(item["complete_final"] is False for item in items)
        last = items[-1]["data"]["data"]
        usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
        assert (last["index"], last["finish_reason"], last["completion_usage"]) == (0, "length", usage)
        assert [item["data"]["data"].get("finish_reason") for item in items[:-1]] == [None] * (len(items) - 1)


async def test_both_wires_are_served_on_one_listener(worker: RustWorker) -> None:
    client = MuxClient()
    try:
        async with calling(worker) as (caller, path):
            answers = [await caller.call(path, body(20)) for _ in range(20)]
            streams = [await client.open(worker.instance(), body(20), Context()) for _ in range(20)]
            native = await asyncio.gather(*(answer.everything() for answer in answers))
            mux = await asyncio.gather(*map(read_all, streams))
        assert [tokens(items) for items in native] == [list(range(1, 21))] * 20
        assert [[token for item in items for token in item.token_ids] for items in mux] == [list(range(1, 21))] * 20
    finally:
        await client.close()


async def test_pipelined_requests_get_their_acks_in_order_one_byte_at_a_time(worker: RustWorker) -> None:
    async with calling(worker) as (caller, path):
        first, answer = caller.frame(path, body(2))
        second, _ = caller.frame("nowhere", body(2))
        for byte in first + second:
            caller.writer.write(bytes([byte]))
            await caller.writer.drain()
        assert await caller.ack() == ""
        assert await caller.ack() == "Server unavailable: unknown endpoint nowhere"
        assert tokens(await answer.everything()) == [1, 2]


async def test_stop_is_graceful_and_the_rest_still_arrives(worker: RustWorker) -> None:
    async with calling(worker) as (caller, path):
        answer = await caller.call(path, body(FOREVER))
        assert await answer.prologue() == {"error": None}
        await answer.item()
        await answer.say("stop")
        items = [await answer.item()]
        while items[-1] != "sentinel":
            items.append(await answer.item())
        assert items[-3]["data"]["data"]["finish_reason"] == "cancelled"
        assert items[-2] == {"complete_final": True}


async def kill(answer: Answer) -> None:
    await answer.say("kill")


async def close(answer: Answer) -> None:
    await answer.leave()


async def reset(answer: Answer) -> None:
    await answer.leave(abort=True)


async def rave(answer: Answer) -> None:
    await answer.say("sentinel")


@pytest.mark.parametrize("leave", [kill, close, reset, rave])
async def test_a_caller_that_leaves_kills_its_request_and_no_other(worker: RustWorker, leave: Any) -> None:
    async with calling(worker) as (caller, path):
        answer, other = await caller.call(path, body(FOREVER)), await caller.call(path, body(300))
        await answer.prologue()
        await answer.item()
        await leave(answer)
        assert tokens(await other.everything()) == list(range(1, 301))
        await idle(worker)
        assert worker.metric("dynamo_component_cancellation_total") == 1


async def test_a_caller_that_leaves_after_the_finish_reason_is_no_cancellation(worker: RustWorker) -> None:
    async with calling(worker) as (caller, path):
        for _ in range(20):
            answer = await caller.call(path, body(1))
            await answer.prologue()
            while (await answer.item())["data"]["data"].get("finish_reason") is None:
                pass
            await answer.leave(abort=True)
        await idle(worker)
        assert worker.metric("dynamo_component_cancellation_total") == 0
        assert worker.metric("dynamo_component_errors_total") == 0


async def test_a_request_that_cannot_be_served_is_declined_with_the_reason(worker: RustWorker) -> None:
    async with calling(worker) as (caller, path):
        elsewhere = json.dumps({"address": "192.0.2.1:9", "subject": "s", "context": "r", "stream_type": "response"})
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"request_type": "many_in"}, "many_in"),
            ({"payload_codec": "xml"}, "payload_codec"),
            ({"connection_info": {"transport": "nats", "info": "{}"}}, "transport"),
            ({"id": "another"}, "context"),
            (
                {"id": "r", "connection_info": {"transport": "tcp_server", "info": elsewhere}},
                "DYN_TCP_CALL_HOME_NETWORKS",
            ),
        ]
        for control, text in wrong:
            caller.writer.write(caller.frame(path, body(1), **control)[0])
            ack = await caller.ack()
            assert ack.startswith("Server unavailable: malformed request: ")
            assert text in ack
        caller.writer.write(request_frame(path, {}, b"no frame"))
        assert "not one two-part frame" in await caller.ack()
        caller.writer.write(request_frame(path, {}, caller.payload("{", codec="json")[0][:-3]))
        assert "Server unavailable: malformed" in await caller.ack()
        assert tokens(await (await caller.call(path, body(2))).everything()) == [1, 2]


@pytest.mark.parametrize("codec", ["msgpack", "json"])
async def test_an_error_is_the_last_item_before_the_final(worker: RustWorker, codec: str) -> None:
    async with calling(worker) as (caller, path):
        answer = await caller.call(path, {"token_ids": ["a"]}, codec=codec)
        _, item, final, sentinel = await answer.everything()
        assert (item["data"]["event"], final, sentinel) == ("error", {"complete_final": True}, "sentinel")
        assert item["data"]["error"]["error_type"] == {"Backend": "InvalidArgument"}
        assert item["data"]["error"]["public"]["message"].startswith("the request is not valid")


async def test_a_large_body_is_declined_by_what_it_takes_once_decoded(tmp_path: Path) -> None:
    worker = RustWorker.start(tmp_path, DYN_TCP_MAX_DECODED_MB="1")
    try:
        async with calling(worker) as (caller, path):
            caller.writer.write(caller.frame(path, {"token_ids": [], "x": [[]] * 100_000}, codec="json")[0])
            assert "DYN_TCP_MAX_DECODED_MB" in await caller.ack()
            answer = await caller.call(path, {"token_ids": [], "x": [[]] * 100_000})
            _, item, *_ = await answer.everything()
            assert "DYN_TCP_MAX_DECODED_MB" in item["data"]["error"]["message"]
    finally:
        worker.close()


async def test_a_call_home_that_cannot_connect_is_a_kill(worker: RustWorker) -> None:
    async with calling(worker) as (caller, path):
        with socket.socket() as taken:  # bound, and nobody accepts there
            taken.bind(("127.0.0.1", 0))
            caller.port = taken.getsockname()[1]
            await caller.call(path, body(FOREVER))
            worker.wait_log("cannot connect back to a caller at 127.0.0.1")
        await idle(worker)


async def test_a_full_worker_declines_in_its_ack(tmp_path: Path) -> None:
    worker = RustWorker.start(tmp_path, DYN_ENGINE_REQUEST_LIMIT="1", DYN_DYNAMO_REQUEST_QUEUE_LIMIT="1")
    try:
        async with calling(worker) as (caller, path):
            running, waiting = await caller.call(path, body(FOREVER)), await caller.call(path, body(2))
            caller.writer.write(caller.frame(path, body(1))[0])
            assert await caller.ack() == "Server overloaded: worker at capacity"
            await running.say("kill")
            assert tokens(await waiting.everything()) == [1, 2]
    finally:
        worker.close()


async def test_a_caller_that_reads_slowly_stops_its_producer_and_gets_everything_in_the_end(tmp_path: Path) -> None:
    worker = RustWorker.start(tmp_path, delay="0")
    try:
        async with calling(worker) as (caller, path):
            for listening in caller.listening:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            count = 100_000  # 7 MB of items, and the sockets hold less
            answer = await caller.call(path, body(count))
            await answer.prologue()
            other = await caller.call(path, body(1000))
            assert len(tokens(await other.everything())) == 1000
            assert worker.metric("dynamo_component_inflight_requests") == 1
            items = [await answer.item()]
            while items[-1] != "sentinel":
                items.append(await answer.item())
            vocabulary = 32_000
            assert [token % vocabulary for token in range(1, count + 1)] == tokens(items)
    finally:
        worker.close()


async def test_a_caller_that_reads_nothing_is_cut_and_held_in_little_memory(tmp_path: Path) -> None:
    worker = RustWorker.start(tmp_path, delay="0", DYN_TCP_WRITE_STALL_SECS="0.5")
    try:
        async with calling(worker) as (caller, path):
            await (await caller.call(path, body(10))).everything()
            before = worker.resident_bytes()
            answer = await caller.call(path, body(FOREVER * 10))
            await answer.prologue()
            worker.wait_log("its caller reads nothing; its stream is dropped")
            assert worker.resident_bytes() - before < 8 * 1024 * 1024
            await idle(worker)
    finally:
        worker.close()


@pytest.mark.parametrize("wire", ["a secret", "half a frame", "a long frame", "garbage"])
async def test_a_connection_that_cannot_go_on_is_told_why(tmp_path: Path, wire: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of sixteen bytes and more\n")
    cases: dict[str, tuple[dict[str, str], bytes, str]] = {
        "a secret": ({"DYN_TCP_SECRET_PATH": str(secret)}, b"\x00\x01p", "Server unavailable: this worker asks for"),
        "half a frame": ({"DYN_TCP_MESSAGE_TIMEOUT_SECS": "0.2"}, b"\x00\x01p", "DYN_TCP_MESSAGE_TIMEOUT_SECS"),
        "a long frame": ({}, b"\x00\x01p\x00\x00\xff\xff\xff\xff", "exceeds the limit"),
        "garbage": ({}, b"GET / HTTP/1.1\r\n" * 6000, "Read error"),
    }
    env, sent, text = cases[wire]
    worker = RustWorker.start(tmp_path, **env)  # type: ignore[arg-type]
    try:
        reader, writer = await asyncio.open_connection(*worker.address())
        writer.write(sent)
        async with asyncio.timeout(PATIENCE_SECONDS):
            (length,) = struct.unpack(">I", await reader.readexactly(4))
            assert text in (await reader.readexactly(length)).decode()
        writer.close()
    finally:
        worker.close()


async def test_what_does_not_end_in_time_is_cut_with_an_error_that_moves_it(tmp_path: Path) -> None:
    worker = RustWorker.start(tmp_path, DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT="6")
    try:
        async with calling(worker) as (caller, path):
            endless, short = await caller.call(path, body(FOREVER)), await caller.call(path, body(100))
            await endless.prologue()
            worker.signal(signal.SIGTERM)
            assert tokens(await short.everything()) == list(range(1, 101))
            items = [await endless.item()]
            while items[-1] != "sentinel":
                items.append(await endless.item())
            assert items[-3]["data"]["error"]["error_type"] == {"Backend": "EngineShutdown"}
            await endless.leave()
            assert await worker.ended() == 0
    finally:
        worker.close()


async def test_fuzzed_frames_end_their_connection_and_nothing_else(worker: RustWorker) -> None:
    chance = random.Random(14)
    async with calling(worker) as (caller, path):
        await (await caller.call(path, body(1))).everything()
        before = worker.resident_bytes()
        good, _ = caller.frame(path, body(1))
        for round_number in range(600):
            stranger = bytearray(good)
            match round_number % 4:
                case 0:  # a few bytes differ
                    for _ in range(chance.randrange(1, 6)):
                        stranger[chance.randrange(len(stranger))] = chance.randrange(256)
                case 1:  # it ends early, or goes on
                    stranger = stranger[: chance.randrange(1, len(stranger))] + chance.randbytes(chance.randrange(50))
                case 2:  # a control message of noise
                    stranger = bytearray(request_frame(path, {}, two_part(chance.randbytes(chance.randrange(200)))))
                case 3:
                    stranger = bytearray(chance.randbytes(chance.choice([1, 8, 100, 5000])))
            with (
                socket.create_connection(worker.address(), timeout=PATIENCE_SECONDS) as connection,
                contextlib.suppress(OSError),  # it may be closed before all was sent
            ):
                connection.sendall(stranger)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65_536):
                    pass
        assert tokens(await (await caller.call(path, body(3))).everything()) == [1, 2, 3]
        await idle(worker)
    assert "panicked" not in worker.log
    assert worker.resident_bytes() - before < 16 * 1024 * 1024


async def test_fuzzed_words_on_an_answer_kill_it_and_nothing_else(worker: RustWorker) -> None:
    chance = random.Random(15)
    async with calling(worker) as (caller, path):
        for round_number in range(100):
            answer = await caller.call(path, body(FOREVER))
            await answer.prologue()
            _, writer = await answer.streams()
            noise = chance.randbytes(chance.randrange(24, 200))
            writer.write(noise if round_number % 2 else two_part(noise, noise[:5]))
        await idle(worker)
        assert tokens(await (await caller.call(path, body(3))).everything()) == [1, 2, 3]
    assert "panicked" not in worker.log
