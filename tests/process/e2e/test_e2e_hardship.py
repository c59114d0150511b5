"""Engines that hang or flood, clients that do not read, and the end of a frontend: nobody else is harmed."""

from __future__ import annotations

import asyncio
import json
import re
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from support.http_client import CHAT, COMPLETIONS, DONE, ask, chat, exchange, script
from support.patience import PATIENCE_SECONDS, PROMPT_SECONDS
from support.processes import Stack, get, until

MEBIBYTE = 1024 * 1024

# About a KiB on the wire for each token: buffers are counted in bytes.
LARGE = chat("scripted", stream=True, logprobs=True, top_logprobs=10)


async def settled(stack: Stack) -> float:
    """Return the engine's token count once it has stopped growing.

    Between two looks a request without a token passes through both processes: however slow the machine is, a stream that
    could go on would have had its turn there.
    """
    count, unchanged = stack.scripted.metric("scripted_tokens_total"), 0
    async with asyncio.timeout(PATIENCE_SECONDS):
        while unchanged < 5:  # a fast engine makes a whole window at once, then waits until its caller has read it
            await asyncio.sleep(0.1)  # for the sockets: the kernel takes its time to report that a peer has taken data
            reply = await ask(stack.port, CHAT, chat("scripted"), headers=script(["end", "stop"]))
            assert (reply.status, reply.text) == (200, "")
            before, count = count, stack.scripted.metric("scripted_tokens_total")
            unchanged = unchanged + 1 if before == count else 0
    return count


async def test_hung_engines_hold_nobody_up_and_are_freed_by_their_clients(stack: Stack, tag: str) -> None:
    async with AsyncExitStack() as connections:
        hung = [
            await connections.enter_async_context(
                exchange(stack.port, CHAT, chat("scripted", stream=bool(n % 2)), headers=script(["hang"], tag=tag))
            )
            for n in range(10)
        ]
        await stack.scripted.sees("generate", tag, 10)
        began = time.monotonic()
        others = await asyncio.gather(*(ask(stack.port, CHAT, chat("scripted", stream=bool(n % 2))) for n in range(20)))
        assert {reply.text for reply in others} == {"Hello"}
        assert time.monotonic() - began < PROMPT_SECONDS
        for one in hung:
            one.leave()
        await stack.scripted.sees("abort", tag, 10)
        await stack.scripted.sees("finally", tag, 10)
        await stack.scripted.idle()
    assert stack.scripted.count("abort", tag) == 10


@pytest.mark.parametrize("rubbish", ["text", 7, None, [], {}, {"token_ids": "x"}, {"token_ids": [2**32]}, {"index": 0}])
@pytest.mark.parametrize("after", ["", "ab"])
async def test_an_engine_that_yields_rubbish_harms_only_its_own_stream(
    stack: Stack, tag: str, rubbish: object, after: str
) -> None:
    headers = script(["say", "abcdef", 0.01], tag=f"{tag}-neighbour")
    async with exchange(stack.port, CHAT, chat("scripted", stream=True), headers=headers) as neighbour:
        await stack.scripted.sees("first", f"{tag}-neighbour")
        steps = script(["say", after], ["yield", rubbish], ["hang"], tag=tag)
        reply = await ask(stack.port, CHAT, chat("scripted"), headers=steps)
        assert reply.status == 500
        assert "the engine's chunk is invalid" in stack.scripted.log
        await stack.scripted.sees("finally", tag)
        assert (await neighbour.reply()).text == "abcdef"
    assert not stack.scripted.has_ended


async def test_unknown_keys_of_a_chunk_are_nobodys_business(stack: Stack) -> None:
    odd = {"token_ids": [97], "index": 0, "mine": {"deep": [1, None]}, "finish_reason": None}
    assert (await ask(stack.port, CHAT, chat("scripted"), headers=script(["yield", odd]))).text == "a"


async def test_a_client_that_never_reads_stops_its_engine_and_nobody_else(stack: Stack, tag: str) -> None:
    baseline = stack.frontend.resident_bytes()
    start = await settled(stack)
    async with exchange(stack.port, CHAT, LARGE, headers=script(["flood"], tag=tag), small_buffers=True) as deaf:
        await stack.scripted.sees("first", tag)
        produced = await settled(stack) - start
        assert produced < 100_000
        assert stack.scripted.count("finally", tag) == 0  # it waits; it has not failed
        assert stack.frontend.resident_bytes() - baseline < 64 * MEBIBYTE

        others = await asyncio.gather(*(ask(stack.port, CHAT, chat("scripted", stream=bool(n % 2))) for n in range(10)))
        assert {reply.text for reply in others} == {"Hello"}
        assert await settled(stack) - start - produced == 50  # what the others got, and not one token more

        left_at = time.monotonic()
        deaf.leave(politely=False)
        (abort,) = await stack.scripted.sees("abort", tag)
        assert abort["at"] - left_at < PROMPT_SECONDS
        await stack.scripted.idle()


async def test_a_client_that_reads_again_gets_every_token(stack: Stack, tag: str) -> None:
    count = 20_000
    start = stack.scripted.metric("scripted_tokens_total")
    request, headers = LARGE | {"max_tokens": count}, script(["flood"], tag=tag)
    async with exchange(stack.port, CHAT, request, headers=headers, small_buffers=True) as slow:
        await stack.scripted.sees("first", tag)
        assert await settled(stack) - start < count  # it is held back
        reply = await slow.reply()
    assert len(reply.text) == count
    assert reply.events[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_worker_whose_requests_all_stand_still_is_not_ready_and_says_why(
    stack: Stack, tag: str, name: str
) -> None:
    guest = stack.cluster.worker(name, name, DYN_HEALTH_PROGRESS_TIMEOUT_SECS="3")
    guest.wait_ready()
    await until(lambda: name in stack.frontend.models())

    def answer() -> tuple[int, dict[str, Any]]:
        status, body = get(guest.system_port, "/health")
        return status, json.loads(body)

    assert set(answer()[1]) == {"status", "uptime", "endpoints"}
    async with exchange(stack.port, CHAT, chat(name), headers=script(["hang"], tag=tag)) as stuck:
        await guest.sees("generate", tag)
        await until(lambda: answer()[0] == 503, lambda: f"a 503: {answer()}")
        body = answer()[1]
        assert re.fullmatch(r"1 request\(s\), none of them has had a token for \d+ s", body["reason"])
        assert (body["status"], body["load"]["running"], body["load"]["silent_seconds"] >= 3) == ("notready", 1, True)
        assert guest.metric("dynamo_work_handler_silence_seconds") >= 3
        slow = await ask(stack.port, CHAT, chat(name), headers=script(["say", "x" * 16, 0.25], tag=f"{tag}-slow"))
        assert (slow.status, answer()[0]) == (200, 200)  # one that moves is enough, and the other is still stuck
        stuck.leave()
        await guest.sees("abort", tag)
    await until(lambda: "load" not in answer()[1])
    assert answer()[0] == 200


async def test_a_full_frontend_declines_at_once(stack: Stack, tag: str, name: str) -> None:
    frontend = stack.cluster.frontend(name, DYN_HTTP_MAX_REQUESTS_IN_FLIGHT="2", DYN_HTTP_OVERLOAD_STATUS_CODE="429")
    stack.cluster.wait_ready(frontend, stack.scripted)
    headers = script(["wait"], tag=tag)
    async with (
        exchange(frontend.port, CHAT, chat("scripted", stream=True), headers=headers) as first,
        exchange(frontend.port, CHAT, chat("scripted"), headers=headers),
    ):
        await stack.scripted.sees("generate", tag, 2)
        for streamed in (False, True):
            began = time.monotonic()
            reply = await ask(frontend.port, CHAT, chat("scripted", stream=streamed))
            assert (reply.status, reply.json()["message"]) == (429, "Service temporarily overloaded")
            assert reply.headers["retry-after"] == "1"
            assert time.monotonic() - began < PROMPT_SECONDS
        assert (await ask(frontend.port, "/health")).status == 200
        first.leave()
        await stack.scripted.sees("abort", tag)
        assert (await ask(frontend.port, CHAT, chat("scripted"))).text == "Hello"
    await stack.scripted.idle()


async def test_a_prompt_larger_than_any_frame_arrives_whole(stack: Stack, tag: str) -> None:
    request = {"model": "scripted", "prompt": "ü" * 200_000}
    reply = await ask(stack.port, COMPLETIONS, request, headers=script(["say", "a"], tag=tag))
    assert reply.status == 200, reply.body
    (seen,) = await stack.scripted.sees("generate", tag)
    assert seen["prompt"] == reply.json()["usage"]["prompt_tokens"] == 400_000


async def test_a_frontend_sent_home_finishes_what_it_has_begun(
    stack: Stack, tag: str, name: str, tmp_path: Path
) -> None:
    leaving = stack.cluster.frontend(name, DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS=str(PATIENCE_SECONDS))
    stack.cluster.wait_ready(leaving, stack.scripted)
    seen = tmp_path / "seen"
    headers = script(["say", "abcde"], ["until", str(seen)], ["say", "fghij"], tag=tag)
    async with (
        exchange(leaving.port, CHAT, chat("scripted", stream=True), headers=headers) as streamed,
        exchange(leaving.port, CHAT, chat("scripted"), headers=headers) as unary,
    ):
        await stack.scripted.sees("first", tag, 2)
        leaving.terminate()
        await until(lambda: leaving.get("/health")[0] == 503)
        health = await ask(leaving.port, "/health")
        assert health.json() == {"status": "not_ready", "stage": "draining", "message": "Service is not ready"}
        assert (await ask(leaving.port, "/live")).status == 200
        refused = await ask(leaving.port, CHAT, chat("scripted"), headers={"x-request-id": "late"})
        assert (refused.status, refused.json()["message"]) == (503, "Service is not ready")
        assert refused.headers["x-request-id"] == "late"
        seen.touch()
        assert (await streamed.reply()).text == "abcdefghij"
        assert (await unary.reply()).text == "abcdefghij"
    assert await leaving.ended() == 0
    assert stack.scripted.count("abort", tag) == 0
    assert "Traceback" not in leaving.log


async def test_what_does_not_end_in_time_is_cut_with_an_error_and_the_engine_is_told(
    stack: Stack, tag: str, name: str
) -> None:
    leaving = stack.cluster.frontend(name, DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS="0.2")
    stack.cluster.wait_ready(leaving, stack.scripted)
    headers = script(["say", "ab"], ["wait"], tag=tag)
    async with (
        exchange(leaving.port, CHAT, chat("scripted", stream=True), headers=headers) as streamed,
        exchange(leaving.port, CHAT, chat("scripted"), headers=headers) as unary,
    ):
        await stack.scripted.sees("first", tag, 2)
        leaving.terminate()
        events = (await streamed.reply()).events  # a whole stream, with `[DONE]`
        assert events[-1]["error"]["type"] == "service_unavailable"
        assert (await unary.reply()).status == 503
    assert await leaving.ended() == 0
    await stack.scripted.sees("finally", tag, 2)
    await stack.scripted.idle()
    assert stack.scripted.count("abort", tag) == 2


async def test_a_second_signal_ends_a_frontend_at_once(stack: Stack, tag: str, name: str) -> None:
    leaving = stack.cluster.frontend(name, DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS="60")
    stack.cluster.wait_ready(leaving, stack.scripted)
    async with exchange(leaving.port, CHAT, chat("scripted"), headers=script(["wait"], tag=tag)):
        await stack.scripted.sees("generate", tag)
        leaving.terminate()
        await until(lambda: leaving.get("/health")[0] == 503)
        leaving.terminate()
        assert await leaving.ended() != 0
        await stack.scripted.sees("abort", tag)
    await stack.scripted.idle()


async def test_a_stream_is_fed_while_hundreds_of_others_run(stack: Stack, tag: str) -> None:
    async with asyncio.TaskGroup() as group:
        crowd = [
            group.create_task(
                ask(stack.port, CHAT, chat("scripted", stream=True), headers=script(["say", "x" * 20, 0.005]))
            )
            for _ in range(200)
        ]
        async with exchange(
            stack.port, CHAT, chat("scripted", stream=True), headers=script(["say", "y" * 10, 0.005], tag=tag)
        ) as one:
            events = [await one.event()]
            while events[-1] != DONE:
                events.append(await one.event())
    assert {task.result().text for task in crowd} == {"x" * 20}
    await stack.scripted.idle()
