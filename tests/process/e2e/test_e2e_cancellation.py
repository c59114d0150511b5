"""A client that leaves reaches the engine, whatever the request was doing; a clean end never looks like a cancellation."""

from __future__ import annotations

import asyncio
import logging
import signal
import statistics
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest

from support.http_client import CHAT, COMPLETIONS, DONE, Exchange, ask, chat, exchange, script
from support.patience import PROMPT_SECONDS
from support.processes import Stack, Worker, until

logger = logging.getLogger("e2e")

TOLD_WITHIN_SECONDS = 5.0  # half of what the script below lasts: without an abort, its end is later
SLOWLY = ["say", "x" * 5000, 0.002]
POLITELY = pytest.mark.parametrize("politely", [True, False], ids=["fin", "reset"])


async def told(worker: Worker, tag: str, left_at: float, times: int = 1) -> None:
    """The engine heard of it once per stream and in time, its generators were closed, and nothing is left."""
    aborts = await worker.sees("abort", tag, times)
    ends = await worker.sees("finally", tag, times)
    await worker.idle()
    assert worker.count("abort", tag) == worker.count("finally", tag) == worker.count("generate", tag) == times
    assert len({one["id"] for one in aborts}) == len({one["id"] for one in ends}) == times
    assert max(one["at"] for one in aborts) - left_at < TOLD_WITHIN_SECONDS
    assert max(one["at"] for one in ends) - left_at < TOLD_WITHIN_SECONDS


async def still_serves(stack: Stack, model: str) -> None:
    reply = await ask(stack.port, CHAT, chat(model))
    assert (reply.status, reply.text) == (200, "Hello")


@POLITELY
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "unary"])
async def test_before_the_first_token(stack: Stack, tag: str, streamed: bool, politely: bool) -> None:
    async with exchange(stack.port, CHAT, chat("scripted", stream=streamed), headers=script(["wait"], tag=tag)) as one:
        await stack.scripted.sees("generate", tag)
        left_at = time.monotonic()
        one.leave(politely=politely)
        await told(stack.scripted, tag, left_at)
    await still_serves(stack, "scripted")


@POLITELY
async def test_after_the_headers_and_before_the_first_token(stack: Stack, tag: str, politely: bool) -> None:
    headers = script(["say", "x", 1.2], ["wait"], tag=tag)  # longer than HTTP 200 is held back
    async with exchange(stack.port, CHAT, chat("scripted", stream=True), headers=headers) as one:
        assert await one.head() == 200
        left_at = time.monotonic()
        one.leave(politely=politely)
        await told(stack.scripted, tag, left_at)


@POLITELY
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_mid_stream(stack: Stack, tag: str, path: str, politely: bool) -> None:
    request = chat("scripted") if path == CHAT else {"model": "scripted", "prompt": "hi"}
    async with exchange(stack.port, path, request | {"stream": True}, headers=script(SLOWLY, tag=tag)) as one:
        for _ in range(3):
            await one.event()
        left_at = time.monotonic()
        one.leave(politely=politely)
        await told(stack.scripted, tag, left_at)
    await still_serves(stack, "scripted")


@POLITELY
async def test_mid_generation_of_an_answer_in_one_piece(stack: Stack, tag: str, politely: bool) -> None:
    async with exchange(stack.port, CHAT, chat("scripted"), headers=script(SLOWLY, tag=tag)) as one:
        await stack.scripted.sees("first", tag)
        left_at = time.monotonic()
        one.leave(politely=politely)
        await told(stack.scripted, tag, left_at)


@POLITELY
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "unary"])
async def test_every_one_of_n_choices(stack: Stack, tag: str, streamed: bool, politely: bool) -> None:
    request = chat("scripted", stream=streamed, n=3)
    async with exchange(stack.port, CHAT, request, headers=script(SLOWLY, tag=tag)) as one:
        await stack.scripted.sees("first", tag, 3)
        left_at = time.monotonic()
        one.leave(politely=politely)
        await told(stack.scripted, tag, left_at, 3)


async def test_every_prompt_of_a_batch(stack: Stack, tag: str) -> None:
    request = {"model": "scripted", "prompt": ["a", "b"], "n": 2, "stream": True}
    async with exchange(stack.port, COMPLETIONS, request, headers=script(SLOWLY, tag=tag)) as one:
        await stack.scripted.sees("first", tag, 4)
        left_at = time.monotonic()
        one.leave()
        await told(stack.scripted, tag, left_at, 4)


@POLITELY
async def test_a_queued_request_leaves_the_queue_and_never_reaches_the_engine(
    stack: Stack, tag: str, politely: bool
) -> None:
    occupant = script(["wait"], tag=f"{tag}-occupant")
    async with exchange(stack.port, CHAT, chat("narrow"), headers=occupant) as running:
        await stack.narrow.sees("generate", f"{tag}-occupant")
        async with exchange(stack.port, CHAT, chat("narrow"), headers=script(["wait"], tag=tag)) as queued:
            await until(lambda: stack.narrow.metric("dynamo_work_handler_queue_depth") == 1)
            left_at = time.monotonic()
            queued.leave(politely=politely)
            await until(lambda: stack.narrow.metric("dynamo_work_handler_queue_depth") == 0)
            assert time.monotonic() - left_at < PROMPT_SECONDS
        async with exchange(stack.port, CHAT, chat("narrow")) as following:  # its place in the queue is free again
            await until(lambda: stack.narrow.metric("dynamo_work_handler_queue_depth") == 1)
            left_at = time.monotonic()
            running.leave(politely=politely)
            assert (await following.reply()).text == "Hello"
    await told(stack.narrow, f"{tag}-occupant", left_at)
    assert stack.narrow.events(tag) == []


async def test_a_frontend_that_is_killed(stack: Stack, tag: str, name: str) -> None:
    doomed = stack.cluster.frontend(name)
    stack.cluster.wait_ready(doomed, stack.scripted)
    bodies = [chat("scripted", stream=True), chat("scripted"), chat("scripted", n=2)]
    async with AsyncExitStack() as connections:
        for body in bodies:
            headers = script(SLOWLY, tag=tag)
            await connections.enter_async_context(exchange(doomed.port, CHAT, body, headers=headers))
        await stack.scripted.sees("first", tag, 4)
        left_at = time.monotonic()
        doomed.kill()
        await told(stack.scripted, tag, left_at, 4)
    await still_serves(stack, "scripted")


async def test_a_frontend_that_is_killed_empties_the_queue_it_had_filled(stack: Stack, tag: str, name: str) -> None:
    doomed = stack.cluster.frontend(name)
    stack.cluster.wait_ready(doomed, stack.narrow)
    occupant = script(["wait"], tag=f"{tag}-occupant")
    async with exchange(doomed.port, CHAT, chat("narrow"), headers=occupant):
        await stack.narrow.sees("generate", f"{tag}-occupant")
        async with exchange(doomed.port, CHAT, chat("narrow"), headers=script(["wait"], tag=tag)):
            await until(lambda: stack.narrow.metric("dynamo_work_handler_queue_depth") == 1)
            left_at = time.monotonic()
            doomed.kill()
            await told(stack.narrow, f"{tag}-occupant", left_at)
    assert stack.narrow.events(tag) == []
    await still_serves(stack, "narrow")


@pytest.mark.parametrize("steps", [[["wait"]], [["say", "ab"], ["wait"]], [["hang"]]], ids=["wait", "later", "deaf"])
async def test_an_engine_that_is_silent_for_too_long(
    stack: Stack, impatient: int, tag: str, steps: list[list[str]]
) -> None:
    reply = await ask(impatient, CHAT, chat("scripted"), headers=script(*steps, tag=tag))
    at = time.monotonic()
    assert (reply.status, reply.json()["message"]) == (504, "Request deadline exceeded")
    await told(stack.scripted, tag, at)


async def test_a_stream_that_is_silent_for_too_long_ends_with_an_error_event(
    stack: Stack, impatient: int, tag: str
) -> None:
    headers = script(["say", "ab"], ["wait"], tag=tag)
    reply = await ask(impatient, CHAT, chat("scripted", stream=True), headers=headers)
    at = time.monotonic()
    assert reply.status == 200
    assert reply.events[-1] == {
        "error": {"message": "Request deadline exceeded", "type": "gateway_timeout", "code": 504}
    }
    await told(stack.scripted, tag, at)


async def test_a_worker_frozen_mid_stream_ends_in_an_error_and_hears_of_it_once_it_wakes(
    stack: Stack, impatient: int, tag: str
) -> None:
    headers = script(["say", "x" * 5000, 0.02], tag=tag)
    async with exchange(impatient, CHAT, chat("scripted", stream=True), headers=headers) as one:
        await one.event()
        stack.scripted.signal(signal.SIGSTOP)
        try:
            rest = await one.rest()
        finally:
            stack.scripted.signal(signal.SIGCONT)
        assert b'"error":{"message":"Request deadline exceeded"' in rest
        assert f"data: {DONE}".encode() in rest
        await told(stack.scripted, tag, time.monotonic())
    await still_serves(stack, "scripted")


@pytest.fixture(scope="module")
def impatient(stack: Stack) -> int:
    """The port of a frontend that gives an engine little time between two tokens."""
    frontend = stack.cluster.frontend("impatient", DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS="0.3")
    stack.cluster.wait_ready(frontend, stack.scripted)
    return frontend.port


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "unary"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("limit", [None, 2, 5], ids=["stop", "length", "both"])
async def test_a_clean_end_never_aborts(stack: Stack, tag: str, streamed: bool, n: int, limit: int | None) -> None:
    request = chat("scripted", stream=streamed, n=n) | ({} if limit is None else {"max_tokens": limit})
    reply = await ask(stack.port, CHAT, request, headers=script(["say", "Hello"], tag=tag))
    assert reply.status == 200
    await stack.scripted.sees("finally", tag, n)
    await stack.scripted.idle()
    assert stack.scripted.count("abort", tag) == 0


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "unary"])
async def test_a_stop_string_ends_an_engine_that_would_go_on(stack: Stack, tag: str, streamed: bool) -> None:
    request = chat("scripted", stream=streamed, stop=["c"])
    reply = await ask(stack.port, CHAT, request, headers=script(["say", "abc"], ["wait"], tag=tag))
    at = time.monotonic()
    assert reply.text == "ab"
    await told(stack.scripted, tag, at)


async def test_a_client_that_leaves_after_the_whole_answer_is_no_cancellation(stack: Stack, tag: str) -> None:
    async with exchange(stack.port, CHAT, chat("scripted", stream=True), headers=script(["say", "a"], tag=tag)) as one:
        while await one.event() != DONE:
            pass
        one.leave(politely=False)
        await stack.scripted.sees("finally", tag)
        await stack.scripted.idle()
    assert stack.scripted.count("abort", tag) == 0


async def test_the_engine_is_told_within_a_tenth_of_a_second(
    stack: Stack, tag: str, record_property: Callable[[str, object], None]
) -> None:
    delays = []
    for number in range(20):
        each = f"{tag}-{number}"
        async with exchange(stack.port, CHAT, chat("scripted", stream=True), headers=script(SLOWLY, tag=each)) as one:
            await one.event()
            left_at = time.monotonic()
            one.leave(politely=bool(number % 2))
            (abort,) = await stack.scripted.sees("abort", each)
            delays.append(abort["at"] - left_at)
    p50, worst = statistics.median(delays) * 1000, max(delays) * 1000
    logger.info("client gone to engine.abort: p50 %.1f ms, max %.1f ms of %d", p50, worst, len(delays))
    record_property("abort_delay_ms", {"p50": p50, "max": worst})
    assert worst < TOLD_WITHIN_SECONDS * 1000


async def test_a_crowd_that_leaves_at_once_leaves_nothing_behind(stack: Stack, tag: str) -> None:
    async with AsyncExitStack() as connections:
        crowd: list[Exchange] = [
            await connections.enter_async_context(
                exchange(stack.port, CHAT, chat("scripted", stream=True), headers=script(SLOWLY, tag=tag))
            )
            for _ in range(50)
        ]
        await stack.scripted.sees("first", tag, 50)
        await asyncio.gather(*(one.event() for one in crowd))
        left_at = time.monotonic()
        for one in crowd:
            one.leave(politely=False)
        await told(stack.scripted, tag, left_at, 50)
    assert stack.frontend.get("/metrics")[1].count(b'dynamo_frontend_inflight_requests{model="scripted"} 0') == 1
