"""What each worker of a request gets that is lost by one after the other: its prompt, its limits, and where the prompt ends."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, cast

import pytest

from dynamo.errors import Disconnected, DynamoException, EngineShutdown, Overloaded
from dynamo.placement import Candidate
from dynamo.placement.policies.round_robin import RoundRobin
from dynamo.router.dispatch.failover import DispatchLimits, DispatchRequest
from dynamo.router.dispatch.record import DispatchRecord
from dynamo.router.dispatch.stream import Dispatcher, RoutedStream
from dynamo.router.workers.pool import ModelPool, WorkerClient
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import Instance, StreamItem

PROMPT = [1, 2, 3]
ENDPOINT = "ns.c.e"

Answer = Sequence[list[int] | DynamoException]


class Stream:
    """Sends the parts of an answer, or fails."""

    def __init__(self, parts: Answer) -> None:
        self.parts = list(parts)

    async def next_batch(self) -> list[StreamItem]:
        part = self.parts.pop(0)
        if isinstance(part, DynamoException):
            raise part
        return [StreamItem(0, 0, 0, part, None if self.parts else "stop")]

    def finish(self) -> None: ...

    def close(self) -> None: ...

    def stop(self) -> None: ...


class Workers:
    """One endpoint with a worker for each answer; notes what each gets."""

    def __init__(self, *answers: Answer) -> None:
        self.instances = [
            Instance(namespace="ns", component="c", endpoint="e", instance_id=number, transport={"mem": str(number)})
            for number, _ in enumerate(answers)
        ]
        self.answers = answers
        self.got: list[tuple[dict[str, Any], int | None]] = []  # the body, and the context's `prompt_tokens`
        self.failed: list[int] = []

    def instance_ids(self) -> list[int]:
        return [each.instance_id for each in self.instances]

    def candidates(self, *, members: Container[int] | None = None, busy: Container[int] = ()) -> list[Candidate]:
        return [Candidate(each.instance_id, ENDPOINT) for each in self.instances]

    def named(self, instance_id: int) -> Instance:
        return self.instances[instance_id]

    async def open(self, instance: Instance, body: dict[str, Any], context: Context) -> Stream:
        self.got.append((body, context.prompt_tokens))
        return Stream(self.answers[len(self.got) - 1])

    def record_failure(self, instance: Instance, error: DynamoException) -> bool:
        self.failed.append(instance.instance_id)
        return False


class Timer:
    def routed(self) -> None: ...

    def dispatched(self) -> None: ...

    def arrived(self, *, failed: bool = False) -> None: ...


def opened(workers: Workers, context: Context | None = None, **limits: Any) -> tuple[RoutedStream, DispatchRequest]:
    pool = ModelPool("m", {ENDPOINT: cast(WorkerClient, workers)}, RoundRobin())
    pool.set_members([(ENDPOINT, each) for each in workers.instance_ids()])
    body: Any = {"token_ids": PROMPT, "stop_conditions": {"max_tokens": 10}}
    request = DispatchRequest(body, PROMPT, record=DispatchRecord(), timer=Timer(), limits=DispatchLimits(**limits))
    return Dispatcher(pool).open(request, context or Context("r")), request


async def read(stream: RoutedStream, request: DispatchRequest) -> list[int]:
    while items := await stream.next_batch():
        for item in items:
            request.answer.generated += item.token_ids
            if item.finish_reason is not None:
                stream.finish()
                stream.close()
                return request.answer.generated
    return request.answer.generated


async def test_every_later_worker_is_sent_where_the_clients_own_prompt_ends() -> None:
    workers = Workers([[7, 8], Disconnected("gone")], [[9], EngineShutdown("going")], [[5]])
    context = Context("r")
    assert await read(*opened(workers, context)) == [7, 8, 9, 5]
    assert [prompt_tokens for _, prompt_tokens in workers.got] == [None, 3, 3]
    assert [body["token_ids"] for body, _ in workers.got] == [[1, 2, 3], [1, 2, 3, 7, 8], [1, 2, 3, 7, 8, 9]]
    assert [body["stop_conditions"]["max_tokens"] for body, _ in workers.got] == [10, 8, 7]
    assert context.prompt_tokens == 3


async def test_a_worker_that_is_tried_before_the_first_token_gets_the_request_as_it_was() -> None:
    workers = Workers([Disconnected("gone")], [Overloaded()], [[5]])
    stream, request = opened(workers)
    assert await read(stream, request) == [5]
    assert [(body["token_ids"], prompt_tokens) for body, prompt_tokens in workers.got] == [(PROMPT, None)] * 3
    assert [(move.is_ongoing, move.outcome) for move in request.record.moves] == [
        (False, "failure"),
        (False, "success"),
    ]
    assert sorted(set(workers.failed)) == [0, 1]


async def test_an_answer_that_is_whole_when_its_worker_is_lost_needs_no_other_one() -> None:
    workers = Workers([list(range(10)), Disconnected("gone")], [[5]])
    stream, request = opened(workers)
    assert len(await read(stream, request)) == 10
    assert len(workers.got) == 1
    assert request.record.moves == []


async def test_a_request_without_another_attempt_ends_with_what_the_last_worker_said() -> None:
    stream, request = opened(Workers([[7], Disconnected("first")], [Disconnected("last")]), retries=1)
    with pytest.raises(Disconnected, match="last"):
        await read(stream, request)
    assert [each.error_message for each in request.record.failed_attempts] == ["first", "last"]
    (course,) = request.record.courses
    assert course.state == "failed"
    course.validate()
