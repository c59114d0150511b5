"""Several workers: taking turns, losing one, sending one home, and one written in another language."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from support.http_client import CHAT, COMPLETIONS, Reply, ask, chat, exchange, script
from support.patience import PATIENCE_SECONDS
from support.processes import Frontend, Stack, Worker, until

NODE = shutil.which("node")
SENTENCE = "abcdefghijklmnopqrst"


@dataclass
class Pair:
    """Two workers of one model behind a frontend of its own, with the quarantine that users have."""

    frontend: Frontend
    first: Worker
    second: Worker
    model: str

    @property
    def both(self) -> tuple[Worker, Worker]:
        return self.first, self.second

    def served_by(self, tag: str) -> Counter[str]:
        events = [event for worker in self.both for event in worker.events(tag)]
        return Counter(event["worker"] for event in events if event["event"] == "generate")


@pytest.fixture
def pair(stack: Stack, name: str) -> Pair:
    return pair_of(stack, name)


def pair_of(stack: Stack, name: str, **env: str) -> Pair:
    """`env`: the frontend's."""
    frontend = stack.cluster.frontend(f"{name}-frontend", **env)
    first, second = (stack.cluster.worker(f"{name}-{letter}", name) for letter in "ab")
    stack.cluster.wait_ready(frontend, first, second)
    return Pair(frontend, first, second, name)


@dataclass
class Load:
    """Clients that ask one thing after the other; every answer is kept."""

    replies: list[Reply] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)

    @property
    def good(self) -> int:
        return sum(reply.status == 200 and reply.text == SENTENCE for reply in self.replies)


@asynccontextmanager
async def load(pair: Pair, tag: str, clients: int = 6, pace: float = 0.01) -> AsyncIterator[Load]:
    """Run clients, half of them streaming, for as long as the block runs."""
    found, is_over = Load(), False

    async def one(streamed: bool) -> None:
        while not is_over:
            try:
                body = chat(pair.model, stream=streamed)
                found.replies.append(
                    await ask(pair.frontend.port, CHAT, body, headers=script(["say", SENTENCE, pace], tag=tag))
                )
            except Exception as error:  # judged by the test
                found.errors.append(error)

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(one(bool(number % 2)))
        try:
            yield found
        finally:
            is_over = True


async def test_two_workers_take_turns(pair: Pair, tag: str) -> None:
    for _ in range(10):
        assert (
            await ask(pair.frontend.port, CHAT, chat(pair.model), headers=script(["say", "a"], tag=tag))
        ).text == "a"
    assert sorted(pair.served_by(tag).values()) == [5, 5]
    await asyncio.gather(
        *(ask(pair.frontend.port, CHAT, chat(pair.model), headers=script(["say", "a"], tag=tag)) for _ in range(20))
    )
    assert sorted(pair.served_by(tag).values()) == [15, 15]
    choices = (await ask(pair.frontend.port, CHAT, chat(pair.model, n=4), headers=script(["say", "a"], tag=tag))).json()
    assert len(choices["choices"]) == 4
    assert sorted(pair.served_by(tag).values()) == [17, 17]  # the choices of one request are spread as well


async def test_the_streams_of_the_only_worker_go_on_at_its_replacement(stack: Stack, name: str, tag: str) -> None:
    frontend = stack.cluster.frontend(f"{name}-frontend", DYN_REPLACEMENT_WAIT_SECS="60")
    only = stack.cluster.worker(f"{name}-a", name)
    stack.cluster.wait_ready(frontend, only)
    request = asyncio.create_task(
        ask(frontend.port, CHAT, chat(name, stream=True), headers=script(["say", SENTENCE, 0.05], tag=tag))
    )
    await only.sees("first", tag)
    only.kill()
    await only.ended()
    late = asyncio.create_task(ask(frontend.port, CHAT, chat(name), headers=script(["say", SENTENCE], tag=tag)))
    await until(lambda: len(frontend.log.split("waiting up to 60.0 s for a replacement")) == 3)
    stack.cluster.worker(f"{name}-b", name)
    for reply in await asyncio.gather(request, late):
        assert (reply.status, reply.text) == (200, SENTENCE)
    assert frontend.log.count("moves to worker") == 2


async def test_a_request_that_kills_its_workers_is_moved_once_and_then_refused(
    stack: Stack, name: str, tag: str
) -> None:
    frontend = stack.cluster.frontend(f"{name}-frontend")
    workers = [stack.cluster.worker(f"{name}-{letter}", name) for letter in "abc"]
    stack.cluster.wait_ready(frontend, *workers)
    others = [
        asyncio.create_task(
            ask(
                frontend.port,
                CHAT,
                chat(name, stream=True),
                headers=script(["say", SENTENCE, 0.2], tag=f"{tag}-others"),
            )
        )
        for _ in range(6)
    ]
    await asyncio.gather(*(worker.sees("first", f"{tag}-others", 2) for worker in workers))
    lethal = chat(name, messages=[{"role": "user", "content": "die"}])
    reply = await ask(frontend.port, CHAT, lethal, headers=script(["perish", "SIGKILL"], tag=tag))
    assert (reply.status, reply.json()["message"]) == (
        422,
        "The request is refused because workers died while they served it",
    )
    assert sum(worker.count("die", tag) for worker in workers) == 2
    again = await ask(frontend.port, CHAT, lethal, headers=script(["perish", "SIGKILL"], tag=tag))
    assert again.status == 422
    assert sum(worker.count("generate", tag) for worker in workers) == 2
    for other in await asyncio.gather(*others):
        assert (other.status, other.text) == (200, SENTENCE)
    assert sum(worker.has_ended for worker in workers) == 2
    assert (await ask(frontend.port, CHAT, chat(name), headers=script(["say", "a"], tag=tag))).text == "a"


async def test_a_worker_killed_under_load_costs_nothing(pair: Pair, tag: str) -> None:
    def request(streamed: bool) -> Coroutine[Any, Any, Reply]:
        headers = script(["say", SENTENCE, 0.05], tag=tag)
        return ask(pair.frontend.port, CHAT, chat(pair.model, stream=streamed), headers=headers)

    before = [asyncio.create_task(request(bool(number // 2 % 2))) for number in range(8)]
    await asyncio.gather(pair.first.sees("first", tag, 4), pair.second.sees("first", tag, 4))
    pair.first.kill()
    await pair.first.ended()
    replies = await asyncio.gather(*before)
    assert {(reply.status, reply.text) for reply in replies} == {(200, SENTENCE)}

    # Its record is still there, for up to the lease's length; nobody must notice.
    later = [await ask(pair.frontend.port, CHAT, chat(pair.model)) for _ in range(6)]
    crowd = await asyncio.gather(*(ask(pair.frontend.port, CHAT, chat(pair.model, stream=True)) for _ in range(20)))
    assert {(reply.status, reply.text) for reply in [*later, *crowd]} == {(200, "Hello")}
    await pair.second.idle()
    assert pair.second.count("abort", tag) == 0


@pytest.mark.parametrize("streamed", [False, True], ids=["unary", "streamed"])
async def test_what_a_killed_worker_had_not_begun_is_begun_elsewhere(pair: Pair, tag: str, streamed: bool) -> None:
    # The worker waits before its first token, so nothing of an answer has been seen by anybody.
    headers = script(["say", "a", 0.5], ["say", "bc"], tag=tag)
    body = chat(pair.model, stream=streamed)
    requests = [asyncio.create_task(ask(pair.frontend.port, CHAT, body, headers=headers)) for _ in range(6)]
    await asyncio.gather(pair.first.sees("generate", tag, 3), pair.second.sees("generate", tag, 3))
    pair.first.kill()
    replies = await asyncio.gather(*requests)
    assert {(reply.status, reply.text) for reply in replies} == {(200, "abc")}
    assert pair.second.count("generate", tag) == 6
    assert pair.second.count("abort", tag) == 0


@pytest.mark.parametrize("streamed", [False, True], ids=["unary", "streamed"])
async def test_a_worker_killed_under_two_of_four_choices_costs_none(pair: Pair, tag: str, streamed: bool) -> None:
    headers = script(["say", SENTENCE, 0.05], tag=tag)
    body = chat(pair.model, n=4, stream=streamed, logprobs=True, max_tokens=len(SENTENCE))
    asked = asyncio.create_task(ask(pair.frontend.port, CHAT, body, headers=headers))
    await asyncio.gather(pair.first.sees("first", tag, 2), pair.second.sees("first", tag, 2))
    pair.first.kill()
    reply = await asked
    assert reply.status == 200
    said, logprobs = Counter[int](), Counter[int]()
    finish: dict[Any, Any] = {}
    texts: dict[int, str] = {}
    for message in reply.events if streamed else [reply.json()]:
        for choice in message["choices"]:
            part = choice["delta" if streamed else "message"].get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + part
            said[choice["index"]] += len(part)
            logprobs[choice["index"]] += len((choice["logprobs"] or {}).get("content") or ())
            finish[choice["index"]] = choice["finish_reason"] or finish.get(choice["index"])
    assert texts == dict.fromkeys(range(4), SENTENCE)
    assert finish == dict.fromkeys(range(4), "length")
    assert logprobs == said
    await pair.second.idle()
    assert pair.second.count("abort", tag) == 0


@pytest.mark.parametrize("streamed", [False, True], ids=["unary", "streamed"])
@pytest.mark.parametrize("said", ["", "abcd"], ids=["at once", "in the middle"])
async def test_a_frozen_worker_is_given_up_and_another_goes_on(
    stack: Stack, name: str, tag: str, streamed: bool, said: str
) -> None:
    pair = pair_of(stack, name, DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS="0.5")
    headers = script(["say", said], ["die", "SIGSTOP"], ["say", "efgh"], tag=tag)
    reply = await ask(pair.frontend.port, CHAT, chat(pair.model, stream=streamed), headers=headers)
    assert (reply.status, reply.text) == (200, f"{said}efgh")
    assert len(pair.served_by(tag)) == 2


async def test_a_worker_that_failed_mid_stream_is_left_alone_for_a_while(stack: Stack, name: str, tag: str) -> None:
    pair = pair_of(stack, name, DYN_MIGRATION_LIMIT="0")  # so that the error is seen
    headers = script(["say", "ab", 0.01], ["raise", "EngineShutdown", "out of memory"], tag=tag)
    failed = await ask(pair.frontend.port, CHAT, chat(pair.model, stream=True), headers=headers)
    assert failed.events[-1]["error"]["type"] == "service_unavailable"
    (culprit,) = pair.served_by(tag)
    for _ in range(6):
        reply = await ask(pair.frontend.port, CHAT, chat(pair.model), headers=script(["say", "a"], tag=f"{tag}-later"))
        assert reply.text == "a"
    assert pair.served_by(f"{tag}-later").keys().isdisjoint({culprit})


async def test_a_worker_sent_home_under_load_costs_nothing(pair: Pair, tag: str) -> None:
    async with load(pair, tag) as found:
        await asyncio.gather(pair.first.sees("first", tag, 3), pair.second.sees("first", tag, 3))
        pair.first.terminate()
        await until(lambda: "Endpoint unregistered from discovery" in pair.first.log)
        assert await pair.first.ended() == 0
        served = pair.first.count("generate", tag)
        so_far = found.good
        await until(lambda: found.good >= so_far + 12)
    assert found.errors == []
    assert found.good == len(found.replies)
    assert pair.first.count("generate", tag) == pair.first.count("finally", tag) == served
    assert pair.first.count("abort", tag) == pair.second.count("abort", tag) == 0
    names = [event["event"] for event in pair.first.events() if event["event"] in ("finally", "drain", "cleanup")]
    assert names[-2:] == ["drain", "cleanup"]  # no stream ended after them


async def test_a_worker_sent_home_serves_its_queue_first(stack: Stack, tag: str, name: str) -> None:
    limits = {"DYN_ENGINE_REQUEST_LIMIT": "1", "DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "4"}
    worker = stack.cluster.worker(name, name, **limits)
    stack.cluster.wait_ready(stack.frontend, worker)
    headers = script(["say", "abc", 0.1], tag=tag)
    requests = [
        asyncio.create_task(ask(stack.port, CHAT, chat(name, stream=bool(number % 2)), headers=headers))
        for number in range(4)
    ]
    await worker.sees("first", tag)
    await until(lambda: worker.metric("dynamo_work_handler_queue_depth") == 3)
    worker.terminate()
    assert {(reply.status, reply.text) for reply in await asyncio.gather(*requests)} == {(200, "abc")}
    assert await worker.ended() == 0
    assert worker.count("abort", tag) == 0


async def test_a_worker_out_of_time_cuts_what_still_runs(stack: Stack, tag: str, name: str) -> None:
    # All of the time is the reserve for the clean-up, so nothing is waited for.
    hasty = stack.cluster.worker(f"{name}-hasty", name, DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT="5")
    stack.cluster.wait_ready(stack.frontend, hasty)
    begun, waiting, hung = (f"{tag}-{word}" for word in ("begun", "waiting", "hung"))
    steps = {begun: [["say", "ab"], ["wait"]], waiting: [["stick"], ["say", "c"]], hung: [["say", "ab"], ["hang"]]}
    requests = {
        each: asyncio.create_task(ask(stack.port, CHAT, chat(name, stream=True), headers=script(*what, tag=each)))
        for each, what in steps.items()
    }
    await asyncio.gather(*(hasty.sees("generate", each) for each in steps))
    await asyncio.gather(hasty.sees("first", begun), hasty.sees("first", hung))
    other = stack.cluster.worker(f"{name}-other", name)
    stack.cluster.wait_ready(stack.frontend, hasty, other)
    hasty.terminate()
    assert await hasty.ended() == 0
    moved = await requests[waiting]
    assert (moved.status, moved.text) == (200, "c")
    assert other.count("generate", waiting) == 1
    # The others went on elsewhere, too: where the script waits and hangs as it did before.
    await asyncio.gather(*(other.sees("generate", each) for each in (begun, hung)))
    for each in (begun, hung):
        requests[each].cancel()
    await asyncio.gather(*requests.values(), return_exceptions=True)
    for each in steps:
        assert hasty.count("finally", each) == hasty.count("abort", each) == 1
    names = [event["event"] for event in hasty.events() if event["event"] in ("finally", "drain", "cleanup")]
    assert names[-1] == "cleanup"


async def test_a_worker_out_of_time_sends_its_queue_elsewhere(stack: Stack, tag: str, name: str) -> None:
    limits = {"DYN_ENGINE_REQUEST_LIMIT": "1", "DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "4"}
    hasty = stack.cluster.worker(f"{name}-hasty", name, DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT="5", **limits)
    stack.cluster.wait_ready(stack.frontend, hasty)
    async with exchange(stack.port, CHAT, chat(name), headers=script(["wait"], tag=f"{tag}-occupant")) as occupant:
        await hasty.sees("generate", f"{tag}-occupant")
        queued = [
            asyncio.create_task(ask(stack.port, CHAT, chat(name), headers=script(["say", "a"], tag=tag)))
            for _ in range(4)
        ]
        await until(lambda: hasty.metric("dynamo_work_handler_queue_depth") == 4)
        other = stack.cluster.worker(f"{name}-other", name)
        stack.cluster.wait_ready(stack.frontend, hasty, other)
        hasty.terminate()
        await other.sees("generate", f"{tag}-occupant")
        assert await hasty.ended() == 0
        occupant.leave()
    assert {(reply.status, reply.text) for reply in await asyncio.gather(*queued)} == {(200, "a")}
    assert (hasty.count("generate", tag), other.count("generate", tag)) == (0, 4)


async def test_a_frozen_worker_delays_nobody_else(pair: Pair, tag: str) -> None:
    headers = script(["say", "a"], ["wait"], tag=tag)
    pair.first.signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            stuck = [
                asyncio.create_task(ask(pair.frontend.port, CHAT, chat(pair.model), headers=headers)) for _ in range(2)
            ]
            await pair.second.sees("first", tag)
            replies = [asyncio.create_task(ask(pair.frontend.port, CHAT, chat(pair.model))) for _ in range(10)]
            done: set[asyncio.Task[Reply]] = set()
            while len(done) < 5:  # every other one
                done, _ = await asyncio.wait(replies, timeout=0.05)
        assert {task.result().text for task in done} == {"Hello"}
    finally:
        pair.first.signal(signal.SIGCONT)
    assert {(await reply).text for reply in replies} == {"Hello"}
    for task in stuck:
        task.cancel()
    await asyncio.wait(stuck)
    await asyncio.gather(pair.first.idle(), pair.second.idle())


@pytest.mark.skipif(NODE is None, reason="needs node")
async def test_a_worker_in_javascript_beside_one_in_python(stack: Stack, name: str) -> None:
    frontend = stack.frontend
    python = stack.cluster.sample(f"{name}-py", f"{name}-py", "--delay", "0.001")
    javascript = stack.cluster.node(f"{name}-js", NODE or "", f"{name}-js", "--delay", "0.001")
    models = {f"{name}-py", f"{name}-js"}
    await until(lambda: models <= frontend.models(), lambda: f"{models}\n{frontend.log}\n{javascript.log}")

    def request(model: str, number: int) -> Coroutine[Any, Any, Reply]:
        body = {"model": model, "prompt": "hi", "max_tokens": 1 + number % 7, "stream": bool(number % 2)}
        return ask(stack.port, COMPLETIONS, body)

    asked = [(model, number) for number in range(30) for model in sorted(models)]
    replies = await asyncio.gather(*(request(model, number) for model, number in asked))
    texts: dict[int, set[str]] = {}
    for (model, number), reply in zip(asked, replies, strict=True):
        assert reply.status == 200, (model, reply.body)
        last = reply.json() if number % 2 == 0 else reply.events[-1]
        assert (last["model"], last["choices"][0]["finish_reason"]) == (model, "length")
        texts.setdefault(number % 7, set()).add(reply.text)
    assert all(len(one) == 1 for one in texts.values())  # both speak the sample engine's language
    tokens = sum(1 + number % 7 for number in range(30))
    metrics = frontend.get("/metrics")[1].decode()
    for model in models:
        assert f'dynamo_frontend_output_tokens_total{{model="{model}"}} {tokens}' in metrics
    python.wait_ready()
    assert python.metric("dynamo_component_requests_total") == 30
    for process in (python, javascript):
        process.terminate()
    assert [await python.ended(), await javascript.ended()] == [0, 0]
    await until(lambda: not models & frontend.models())
