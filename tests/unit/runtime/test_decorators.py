"""`dynamo_worker` and `dynamo_endpoint`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import dynamo.runtime
from dynamo.runtime import Context, DistributedRuntime, dynamo_endpoint, dynamo_worker
from dynamo.runtime.discovery import FileDiscovery
from support.cases import each_case


class Question(BaseModel):
    text: str


class Answer(BaseModel):
    text: str


@dynamo_endpoint(Question, Answer)
async def ask(request: Question) -> AsyncIterator[Answer]:
    assert isinstance(request, Question)
    yield Answer(text=request.text.upper())


class Service:
    @dynamo_endpoint(Question, Answer)
    async def ask(self, request: Question, context: Context) -> AsyncIterator[str]:
        yield request.text + context.id()


@pytest.mark.parametrize("request_", [{"text": "hi"}, '{"text": "hi"}', Question(text="hi")])
async def test_a_request_is_parsed_and_an_answer_is_plain(request_: Any) -> None:
    assert [item async for item in ask(request_)] == [{"text": "HI"}]


async def test_methods_with_a_context_are_understood() -> None:
    assert [item async for item in Service().ask({"text": "hi "}, Context("there"))] == ["hi there"]


@each_case("request_", [{}, {"text": []}, "not json", '{"other": 1}', 7])
async def test_a_request_that_does_not_fit_is_a_value_error(request_: Any) -> None:
    with pytest.raises(ValueError, match=r"^Invalid request: "):
        [item async for item in ask(request_)]


async def test_a_decorated_endpoint_is_served_like_any_other() -> None:
    async with DistributedRuntime(None, "mem", "mem") as runtime:
        from dynamo.runtime.calls.handler import serve_python

        await runtime.endpoint("ns.c.e").start_serving(serve_python(Service().ask))
        client = await runtime.endpoint("ns.c.e").client()
        await client.wait_for_instances()
        stream = await client.generate({"text": "a"}, annotated=False, context=Context("b"))
        assert [item async for item in stream] == ["ab"]


@pytest.mark.parametrize("parentheses", [True, False])
async def test_a_worker_gets_a_runtime_as_the_environment_says_and_it_is_closed_after(
    parentheses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    monkeypatch.setenv("DYN_REQUEST_PLANE", "mem")
    seen: list[DistributedRuntime] = []

    async def work(runtime: DistributedRuntime, *args: int, extra: int) -> int:
        assert isinstance(runtime.discovery, FileDiscovery)
        seen.append(runtime)
        return sum(args) + extra

    worker: Any = (dynamo_worker() if parentheses else dynamo_worker)(work)
    assert await worker(1, 2, extra=3) == 6
    with pytest.raises(Exception, match="closed"):
        await seen[0].start()


def test_the_public_names_are_the_native_ones() -> None:
    assert set(dynamo.runtime.__all__) == {
        "Client",
        "Context",
        "DistributedRuntime",
        "Endpoint",
        "PyAsyncRequestStream",
        "UnaryClient",
        "dynamo_endpoint",
        "dynamo_worker",
        "serve_unary_endpoint",
    }
    for name in dynamo.runtime.__all__:
        assert getattr(dynamo.runtime, name) is not None
