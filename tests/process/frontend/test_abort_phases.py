"""An operator's abort ends a request in whatever phase it is: its client reads a well-formed error, its engine stops, at once."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dynamo.runtime.http.inspector_token import find_access
from support.batch_client import FORM_HEADERS, chat_line, form, jsonl
from support.http_client import CHAT, COMPLETIONS, Exchange, Reply, ask, chat, exchange, script
from support.patience import PATIENCE_SECONDS, PROMPT_SECONDS
from support.processes import Cluster, Frontend, Worker, until, wait

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
REASON = "runs wild"

WAITS = (["wait"],)
SAYS_AND_WAITS = (["say", "x" * 8], ["wait"])
TALKS_ON = (["say", "x" * 5000, 0.02],)
FLOODS = (["flood"],)
DIES = (["say", "xx", 0.2], ["perish", "SIGKILL"])


# -- what clients read ------------------------------------------------------------------------------------------------


def _is_named(error: Mapping[str, Any], *names: str) -> None:
    assert [error[name] for name in names] == ["request_aborted"] * len(names), error
    assert REASON in error["message"]


def openai_event(answer: Reply) -> None:
    """A stream of chunks whose last event is the error."""
    assert answer.status == 200
    *chunks, last = answer.events
    assert list(last) == ["error"], last
    _is_named(last["error"], "type", "code")
    assert all("choices" in chunk for chunk in chunks)


def openai_status(answer: Reply) -> None:
    """An answer that had not begun."""
    body = answer.json()
    assert (answer.status, body["code"]) == (499, 499)
    _is_named(body["error"], "type", "code")


def responses_event(answer: Reply) -> None:
    assert answer.status == 200
    *others, last = answer.events
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    _is_named(last["response"]["error"], "code")
    numbers = [event["sequence_number"] for event in (*others, last)]
    assert numbers == list(range(len(numbers)))


def messages_event(answer: Reply) -> None:
    assert answer.status == 200
    *_, last = answer.body.decode().strip().split("\n\n")
    name, data = last.split("\n")
    assert name == "event: error"
    found = json.loads(data.removeprefix("data: "))
    assert found["type"] == "error"
    _is_named(found["error"], "type")


def messages_status(answer: Reply) -> None:
    assert answer.status == 499
    assert answer.json()["type"] == "error"
    _is_named(answer.json()["error"], "type")


# -- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """A request, the phase in which it is aborted, and what its client reads."""

    name: str
    ends: Callable[[Reply], None]
    steps: Sequence[Sequence[Any]] = WAITS
    shown: str = "decode"  # the phase that the inspector shows
    model: str = "aborted"
    path: str = CHAT
    is_streaming: bool = True
    at: str = "engine"  # the worker whose engine has it; "": none has
    is_queued: bool = False  # behind another request
    door: str = "plain"
    choices: int = 1

    @property
    def body(self) -> dict[str, Any]:
        if self.path == COMPLETIONS:
            return {"model": self.model, "prompt": "hi", "stream": self.is_streaming}
        if self.path == RESPONSES:
            return {"model": self.model, "input": "hi", "stream": self.is_streaming}
        limit = {"max_tokens": 200_000} if self.path == MESSAGES else {}
        return chat(self.model, stream=self.is_streaming, n=self.choices, **limit)


_IN_QUEUE: Mapping[str, Any] = {"model": "narrow", "is_queued": True, "at": "", "ends": openai_status}
CASES = [
    Case(name="queued by the router", door="queueing", shown="queued", **_IN_QUEUE),
    Case(name="queued by its worker", shown="prefill", **_IN_QUEUE),
    Case(name="queued, unary", shown="prefill", is_streaming=False, **_IN_QUEUE),
    Case(name="before its first token", shown="prefill", ends=openai_status),
    Case(name="before its first token, unary", shown="prefill", is_streaming=False, ends=openai_status),
    Case(name="prefill of a pair", model="pair", shown="prefill", at="prefill", ends=openai_status),
    Case(name="prefill of a pair, unary", model="pair", shown="prefill", at="prefill", is_streaming=False, ends=openai_status),
    Case(name="silent after some tokens", steps=SAYS_AND_WAITS, ends=openai_event),
    Case(name="streaming", steps=TALKS_ON, ends=openai_event),
    Case(name="streaming two choices", steps=TALKS_ON, choices=2, ends=openai_event),
    Case(name="streaming text", path=COMPLETIONS, steps=TALKS_ON, ends=openai_event),
    Case(name="generating, unary", steps=TALKS_ON, is_streaming=False, ends=openai_status),
    Case(name="streaming to a slow client", steps=FLOODS, shown="client slow", ends=openai_event),
    Case(name="waiting for another worker", model="mortal", steps=DIES, shown="route", at="", ends=openai_event),
    Case(name="responses", path=RESPONSES, steps=TALKS_ON, ends=responses_event),
    Case(name="responses, unary", path=RESPONSES, steps=TALKS_ON, is_streaming=False, ends=openai_status),
    Case(name="messages", path=MESSAGES, steps=TALKS_ON, ends=messages_event),
    Case(name="messages, unary", path=MESSAGES, steps=TALKS_ON, is_streaming=False, ends=messages_status),
]  # fmt: skip


class Rig:
    """Frontends before workers whose engines do what requests ask of them."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._folder = folder
        own = {"XDG_RUNTIME_DIR": str(folder), "DYN_REPLACEMENT_WAIT_SECS": str(4 * PATIENCE_SECONDS)}
        queue = ("--router-mode=kv", "--no-router-kv-events", "--router-queue-threshold=0.001")
        self.doors = {
            "plain": cluster.frontend("plain", DYN_FILES_DIR=str(folder / "files"), **own),
            "queueing": cluster.frontend("queueing", *queue, **own),
        }
        limits = {"DYN_ENGINE_REQUEST_LIMIT": "1", "DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "4"}
        self.workers = {
            "engine": cluster.worker("engine", "aborted"),
            "narrow": cluster.worker("narrow", "narrow", SCRIPTED_BATCH_TOKENS="100", **limits),
            "lined": cluster.worker("lined", "lined", SCRIPTED_SCRIPT=json.dumps(WAITS)),
            "mortal": cluster.worker("mortal", "mortal"),
        }
        for door in self.doors.values():
            cluster.wait_ready(door, *self.workers.values())
        pair = {role: cluster.worker(role, "pair", SCRIPTED_ROLE=role) for role in ("prefill", "decode")}
        for worker in pair.values():
            worker.wait_ready()
        for door in self.doors.values():
            wait(lambda door=door: door.roles("pair") == set(pair), lambda door=door: f"a pair; log:\n{door.log}")  # type: ignore[misc]
        self.workers |= pair
        self.took: dict[str, list[float]] = {"client": [], "engine": []}

    async def ask(self, door: Frontend, path: str, body: Any = None) -> Reply:
        found = find_access(door.port, {"XDG_RUNTIME_DIR": str(self._folder)})
        assert found is not None, door.log
        return await ask(door.port, f"/admin/v1/{path}", body, headers={"authorization": f"Bearer {found.token}"})

    async def reaches(self, door: Frontend, id: str, phase: str) -> None:
        """Wait until the inspector shows a request in a phase."""
        seen: Any = None
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while seen is None or seen["phase"] != phase:
                    reply = await self.ask(door, f"requests/{id}")
                    seen = reply.json()["stream"] if reply.status == 200 else None
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"it did not come to {phase}: {seen}; log:\n{door.log}") from None

    async def row(self, door: Frontend, id: str) -> Any:
        """The row of a request that has ended: it is written a moment after the last byte."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (found := (await self.ask(door, f"requests/{id}")).json()["recent"]) is None:
                await asyncio.sleep(0.01)
        return found

    async def abort(self, door: Frontend, id: str) -> float:
        """Abort a request; the time before."""
        began = time.monotonic()
        reply = await self.ask(door, f"requests/{id}/abort", {"reason": REASON})
        if reply.status == 429:  # there may be two a second
            await asyncio.sleep(1)
            return await self.abort(door, id)
        assert (reply.status, reply.json()["status"]) == (202, "aborting"), reply.body
        return began

    async def aborted(self, worker: Worker, tag: str, began: float) -> None:
        """The engine was told, once for each of its requests, and in time."""
        events = await worker.sees("abort", tag, max(1, worker.count("generate", tag)))
        self._note("engine", max(event["at"] for event in events) - began)

    def ended(self, began: float, at: float) -> None:
        """The client has had its last byte."""
        self._note("client", at - began)

    def _note(self, what: str, seconds: float) -> None:
        self.took[what].append(seconds)
        assert seconds < PROMPT_SECONDS, what  # the engines would go on for longer than that


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Cluster(tmp_path_factory.mktemp("aborting")) as cluster:
        found = Rig(cluster, tmp_path_factory.mktemp("run"))
        yield found
        for what, seconds in found.took.items():
            if not seconds:  # none of the tests that this process had comes to the engine
                continue
            took = sorted(one * 1000 for one in seconds)
            print(f"abort to {what}: n={len(took)} p50={statistics.median(took):.1f} ms max={took[-1]:.1f} ms")


@asynccontextmanager
async def occupied(rig: Rig, door: Frontend, is_wanted: bool) -> AsyncIterator[None]:
    """Where it is wanted, a request that takes the only place of a worker."""
    if not is_wanted:
        yield
        return
    tag = uuid.uuid4().hex
    async with exchange(door.port, CHAT, chat("narrow"), headers=script(*WAITS, tag=tag)) as one:
        await rig.workers["narrow"].sees("generate", tag)
        yield
        one.leave()
    await rig.workers["narrow"].sees("finally", tag)


async def whole(request: Exchange) -> tuple[Reply, float]:
    """An answer read to its end, and when that was."""
    reply = await request.reply()
    return reply, time.monotonic()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_an_abort_ends_a_request_in_whatever_phase(rig: Rig, case: Case) -> None:
    door, tag = rig.doors[case.door], uuid.uuid4().hex
    headers = script(*case.steps, tag=tag) | {"x-request-id": tag}
    is_slow = case.shown == "client slow"
    async with (
        occupied(rig, door, case.is_queued),
        exchange(door.port, case.path, case.body, headers=headers, small_buffers=is_slow) as request,
    ):
        if case.at:
            await rig.workers[case.at].sees("generate" if case.shown == "prefill" else "first", tag)
        if case.steps is DIES:
            await until(lambda: "waiting up to" in door.log, lambda: door.log)
        await rig.reaches(door, tag, case.shown)
        reading = None if is_slow else asyncio.create_task(whole(request))
        began = await rig.abort(door, tag)
        answer, at = await (whole(request) if reading is None else reading)
        case.ends(answer)
        if case.at:
            await rig.aborted(rig.workers[case.at], tag, began)
        if is_slow:  # it has all that was on its way to it still to read
            assert at - began < PATIENCE_SECONDS
        else:
            rig.ended(began, at)
    row = await rig.row(door, tag)
    assert (row["outcome"], row["status"], row["code"]) == ("aborted", 499, "request_aborted")
    if not case.at and case.is_queued:
        assert rig.workers[case.model].events(tag) == []


async def test_an_abort_ends_one_line_of_a_batch_and_no_other(rig: Rig) -> None:
    door, worker = rig.doors["plain"], rig.workers["lined"]
    lines = form(jsonl([chat_line(f"line-{number}", model="lined") for number in range(2)]), purpose="batch")
    file = (await ask(door.port, "/v1/files", lines, headers=FORM_HEADERS)).json()
    made = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    batch = (await ask(door.port, "/v1/batches", made)).json()
    for number, id in enumerate([one["id"] for one in await worker.sees("generate", "", 2)]):
        began = await rig.abort(door, id)
        events = await worker.sees("abort", "", number + 1)
        assert [event["id"] for event in events][-1] == id
        rig.took["engine"].append(events[-1]["at"] - began)
        await worker.sees("finally", "", number + 1)
        assert worker.count("finally", "") == number + 1  # the other line goes on
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (found := (await ask(door.port, f"/v1/batches/{batch['id']}")).json())["status"] != "completed":
            await asyncio.sleep(0.05)
    assert found["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
    content = (await ask(door.port, f"/v1/files/{found['error_file_id']}/content")).body
    for line in map(json.loads, content.splitlines()):
        assert line["response"]["status_code"] == 499
        _is_named(line["response"]["body"]["error"], "type", "code")
    assert worker.count("generate", "") == 2  # an aborted line is not tried again
