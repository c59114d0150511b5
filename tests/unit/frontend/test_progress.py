"""Streams without progress: moved to another worker, or ended with an error; deadlines. Under virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import EngineShutdown
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from dynamo.testing.simulation.loop import VirtualLoop, run_virtual
from support.asgi_client import Exchange
from support.frontend_cluster import Cluster, Script, cluster, fail, say

TEXT = "abcdefghijklmnopqrstuvwxyz"


def talk(
    *, until: int | None = None, gap: float = 0.1, before: float = 0.0, pause: tuple[int, float] = (-1, 0.0)
) -> Script:
    """Says TEXT a letter at a time, from where an earlier worker stood; silent for ever after letter `until`."""

    async def script(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        begins = 0 if context.prompt_tokens is None else len(body["token_ids"]) - context.prompt_tokens
        await asyncio.sleep(before)
        for number in range(begins, len(TEXT)):
            if number == until:
                await context.async_killed_or_stopped()
                return
            await asyncio.sleep(gap + (pause[1] if number == pause[0] else 0.0))
            is_last = number == len(TEXT) - 1
            sink.send_tokens([ord(TEXT[number])], finish_reason="stop" if is_last else None)

    return script


def virtually(tmp_path: Path, scene: Callable[[Cluster], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        async with cluster(tmp_path, **settings) as house:
            await scene(house)
            assert len(house.frontend.pipeline.stalls) == 0
            assert house.frontend.pipeline.stalls._timer is None

    run_virtual(main())


async def ask(house: Cluster, **fields: Any) -> Any:
    return await house.client.begin_chat("hi", **fields).done(10_000.0)


def now() -> float:
    return asyncio.get_running_loop().time()


def text_of(answer: Any) -> str:
    return "".join(
        choice["delta"].get("content") or "" for chunk in answer.chunks for choice in chunk.get("choices", ())
    )


def stalled(house: Cluster, finding: str) -> float:
    return house.metric("dynamo_frontend_stalled_streams_total", finding=finding)


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_that_falls_silent_goes_on_at_another_worker_and_no_other_choice_moves(tmp_path: Path, n: int) -> None:
    async def scene(house: Cluster) -> None:
        scripts = [talk(until=5)]

        async def script(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
            await (scripts.pop() if scripts else talk())(body, context, sink)

        workers = [await house.worker(script) for _ in range(2)]
        began = now()
        answer = await ask(house, stream=True, n=n)
        said = dict.fromkeys(range(n), "")
        for chunk in answer.chunks:
            for choice in chunk["choices"]:
                said[choice["index"]] += choice["delta"].get("content") or ""
        assert set(said.values()) == {TEXT}
        assert 10.0 <= now() - began <= 16.0
        assert stalled(house, "frozen") == 1
        contexts = [context for worker in workers for context in worker.contexts]
        assert [len(contexts), sum(context.is_killed() for context in contexts)] == [n + 1, 1]

    virtually(tmp_path, scene)


def test_where_nobody_else_is_the_request_ends_with_a_typed_error_much_later(tmp_path: Path) -> None:
    async def scene(house: Cluster) -> None:
        worker = await house.worker(talk(until=5))
        began = now()
        answer = await ask(house, stream=True)
        assert answer.chunks[-1]["error"] == {
            "message": "Request deadline exceeded",
            "type": "gateway_timeout",
            "code": 504,
        }
        assert 60.0 <= now() - began <= 62.0
        assert worker.contexts[0].is_killed()

    virtually(tmp_path, scene)


def test_a_worker_that_wakes_up_in_time_is_not_left(tmp_path: Path) -> None:
    async def scene(house: Cluster) -> None:
        await house.worker(talk(pause=(9, 8.5)))
        await house.worker(talk(pause=(9, 8.5)))
        answer = await ask(house, stream=True)
        assert text_of(answer) == TEXT
        assert stalled(house, "frozen") == stalled(house, "stuck") == 0

    virtually(tmp_path, scene)


def test_a_slow_stream_may_pause_longer_than_a_fast_one(tmp_path: Path) -> None:
    async def scene(house: Cluster) -> None:
        for _ in range(2):
            await house.worker(talk(gap=3.0, pause=(9, 50.0)))
        answer = await ask(house, stream=True)
        assert text_of(answer) == TEXT
        assert stalled(house, "frozen") == 0

    virtually(tmp_path, scene)


def test_only_the_stuck_stream_is_moved_and_its_worker_stays_in_use(tmp_path: Path) -> None:
    async def scene(house: Cluster) -> None:
        stuck = talk(until=5)
        slow = talk(gap=2.0)
        turns = iter([slow, stuck])

        async def script(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
            await next(turns)(body, context, sink)

        worker = await house.worker(script)
        others = asyncio.ensure_future(ask(house, stream=True))
        await asyncio.sleep(6.5)
        victim = asyncio.ensure_future(ask(house, stream=True))
        await asyncio.sleep(2.0)
        spare = await house.worker(talk())
        assert text_of(await victim) == TEXT
        assert text_of(await others) == TEXT
        assert (stalled(house, "stuck"), stalled(house, "frozen")) == (1, 0)
        assert [len(worker.requests), len(spare.requests)] == [2, 1]
        assert house.metric("dynamo_request_plane_quarantines_total") == 0

    virtually(tmp_path, scene)


def test_requests_that_wait_at_a_frozen_worker_go_elsewhere_too(tmp_path: Path) -> None:
    async def scene(house: Cluster) -> None:
        frozen = await house.worker(talk(until=5))
        first = asyncio.ensure_future(ask(house, stream=True))
        await asyncio.sleep(3.0)
        frozen.script = frozen.hold
        second = asyncio.ensure_future(ask(house, stream=True))
        await asyncio.sleep(1.0)
        await house.worker(talk())
        assert [text_of(one) for one in await asyncio.gather(first, second)] == [TEXT, TEXT]
        assert stalled(house, "frozen") == 2
        assert house.metric("dynamo_request_plane_quarantines_total") == 1
        assert house.metric("dynamo_request_plane_quarantined_instances") == 1
        # The probe of a worker that is still frozen need not wait for ever, either.
        await asyncio.sleep(6.0)
        began = now()
        for answer in await asyncio.gather(*(ask(house, stream=True) for _ in range(4))):
            assert text_of(answer) == TEXT
        assert house.metric("dynamo_request_plane_probes_total") == 1
        assert now() - began <= 16.0
        frozen.script = talk()
        await asyncio.sleep(61.0)
        for answer in await asyncio.gather(*(ask(house, stream=True) for _ in range(4))):
            assert text_of(answer) == TEXT
        assert house.metric("dynamo_request_plane_quarantined_instances") == 0

    virtually(tmp_path, scene)


def test_a_suspended_frontend_takes_nobody_for_stalled(tmp_path: Path) -> None:
    async def scene(house: Cluster) -> None:
        for _ in range(2):
            await house.worker(talk(gap=0.5))
        pending = asyncio.ensure_future(ask(house, stream=True))
        await asyncio.sleep(5.0)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        for _ in range(5):
            loop.jump(120.0)
            await asyncio.sleep(0.7)
        assert text_of(await pending) == TEXT
        assert stalled(house, "frozen") == 0

    virtually(tmp_path, scene)


class SlowReader(Exchange):
    """A client that takes its time with every message after the headers."""

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(40.0)
        await super()._send(message)


def test_a_client_that_reads_slowly_is_no_stall_of_its_engine(tmp_path: Path) -> None:
    async def scene(house: Cluster) -> None:
        for _ in range(2):
            await house.worker(talk())
        body = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}'
        headers = {"content-type": "application/json"}
        slow = SlowReader(house.frontend.asgi, "POST", "/v1/chat/completions", body, headers)
        assert text_of(await slow.done(10_000.0)) == TEXT
        assert stalled(house, "frozen") == stalled(house, "stuck") == 0

    virtually(tmp_path, scene)


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    async def scene(house: Cluster) -> None:
        await house.worker(talk(pause=(9, 5000.0)))
        await house.worker(talk(pause=(9, 5000.0)))
        assert text_of(await ask(house, stream=True)) == TEXT

    virtually(tmp_path, scene, stall_floor_seconds=0.0)


def test_a_worker_that_misses_the_first_token_deadline_is_left_but_not_left_out(tmp_path: Path) -> None:
    async def scene(house: Cluster) -> None:
        for _ in range(2):
            worker = await house.worker(talk(before=30.0))
        began = now()
        answer = await ask(house)
        assert (answer.status, answer.json["message"]) == (504, "Request deadline exceeded")
        assert 4.0 <= now() - began <= 4.5  # two workers, two seconds each
        assert stalled(house, "first_token") == 2
        assert worker.contexts[0].is_killed()
        assert house.metric("dynamo_request_plane_quarantines_total") == 0
        worker.script = talk(before=1.0)
        assert (await ask(house)).json["choices"][0]["message"]["content"] == TEXT

    virtually(tmp_path, scene, first_token_timeout_seconds=2.0)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_misses_the_inter_token_deadline_is_left_for_another(tmp_path: Path, workers: int) -> None:
    async def scene(house: Cluster) -> None:
        for _ in range(workers):
            worker = await house.worker(talk(pause=(9, 4.0)))
        began = now()
        answer = await ask(house, stream=True)
        if workers == 1:
            assert answer.chunks[-1]["error"]["code"] == 504
            assert text_of(answer) == TEXT[:9]
            assert 2.8 <= now() - began <= 3.2
            assert worker.contexts[0].is_killed()
        else:  # which begins with the pause: that is its first token
            assert text_of(answer) == TEXT
        assert stalled(house, "inter_token") == 1
        assert house.metric("dynamo_request_plane_quarantines_total") == 0

    virtually(tmp_path, scene, inter_token_timeout_seconds=2.0)


def test_a_request_past_its_own_deadline_ends_and_its_engine_is_told(tmp_path: Path) -> None:
    async def scene(house: Cluster) -> None:
        worker = await house.worker(talk())
        other = await house.worker(talk())
        began = now()
        answer = await ask(house)
        assert (answer.status, now() - began) == (504, pytest.approx(1.5, abs=0.01))
        assert len(worker.contexts + other.contexts) == 1  # nobody else is asked
        (context,) = worker.contexts + other.contexts
        assert context.deadline == pytest.approx(began + 1.5, abs=0.01)
        assert context.is_killed()
        assert house.metric("dynamo_request_plane_quarantines_total") == 0
        labels = {"model": "m", "endpoint": "chat_completions", "request_type": "unary"}
        failures = house.metric(
            "dynamo_frontend_requests_total", **labels, status="error", error_type="response_timeout"
        )
        assert failures == 1

    virtually(tmp_path, scene, request_timeout_seconds=1.5)


def test_where_all_are_in_quarantine_a_request_is_tried_all_the_same(tmp_path: Path) -> None:
    async def scene(house: Cluster) -> None:
        worker = await house.worker(fail(EngineShutdown("for a moment")))
        assert (await ask(house)).status == 503
        worker.script = say("back")
        answer = await ask(house)
        assert (answer.status, answer.json["choices"][0]["message"]["content"]) == (200, "back")
        assert house.metric("dynamo_request_plane_quarantined_instances") == 0

    virtually(tmp_path, scene)


@pytest.mark.parametrize("kind", ["Disconnected", "ResponseTimeout", "Overloaded", "InvalidArgument", "Unknown"])
def test_what_an_engine_says_of_a_request_leaves_its_worker_in_use(tmp_path: Path, kind: str) -> None:
    import dynamo.errors as errors

    async def scene(house: Cluster) -> None:
        worker = await house.worker(fail(getattr(errors, kind)("of its own")))
        for _ in range(5):
            assert (await ask(house)).status >= 400
        assert len(worker.requests) == 5
        assert house.metric("dynamo_request_plane_quarantines_total") == 0

    virtually(tmp_path, scene)
