"""Runtimes, endpoints and clients together, over the real planes."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import random
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import (
    CannotConnect,
    Disconnected,
    DynamoException,
    EngineShutdown,
    HttpError,
    InvalidArgument,
    RouterQueueLimitExceeded,
    StreamIncomplete,
    Unknown,
    WorkerUnavailable,
    rule_of,
)
from dynamo.runtime import Client, Context, DistributedRuntime, UnaryClient, serve_unary_endpoint
from dynamo.runtime.base.settings import RuntimeSettings
from dynamo.runtime.calls.handler import serve_python
from dynamo.runtime.calls.request_plane.base import ResponseSink
from dynamo.runtime.calls.request_plane.memory import MemoryPlane
from dynamo.runtime.discovery import INSTANCES, MODEL_CARDS, FileDiscovery, MemoryDiscovery, MemoryHub
from dynamo.runtime.distributed import create_runtime
from dynamo.runtime.served_endpoint import ServedEndpoint
from support.cases import each_case
from support.frontend_cluster import memory_runtime
from support.patience import PATIENCE_SECONDS, PROMPT_SECONDS

PATH = "ns.c.e"

Open = Callable[..., DistributedRuntime]


@pytest.fixture(params=["mem", "tcp"])
async def open_runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Open]:
    """Makes runtimes that see each other, on one request plane; closes them."""
    monkeypatch.setenv("DYN_TCP_RPC_HOST", "127.0.0.1")
    hub, plane = MemoryHub(), MemoryPlane()
    async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_SECONDS):

        def make(**settings: Any) -> DistributedRuntime:
            runtime = DistributedRuntime(
                asyncio.get_running_loop(),
                None,
                request.param,
                settings=replace(RuntimeSettings.from_env(), **settings),
                discovery=MemoryDiscovery(hub),
                memory_plane=plane,
                rng=random.Random(1),
            )
            stack.push_async_callback(runtime.aclose)
            return runtime

        yield make


@pytest.fixture
async def mem_runtime(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DistributedRuntime]:
    async with DistributedRuntime(
        None, None, "mem", discovery=MemoryDiscovery(MemoryHub()), memory_plane=MemoryPlane()
    ) as runtime:
        yield runtime


def stored(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


async def serve(runtime: DistributedRuntime, handler: Callable[..., Any], **options: Any) -> ServedEndpoint:
    return await runtime.endpoint(PATH).start_serving(serve_python(handler), **options)


async def connect(runtime: DistributedRuntime, path: str = PATH) -> Client:
    client = await runtime.endpoint(path).client()
    await client.wait_for_instances()
    return client


async def values(call: Awaitable[Any]) -> list[Any]:
    return [value async for value in await call]


async def echo(request: Any) -> AsyncIterator[Any]:
    yield request


# -- names and records --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["a.b.c", "dyn://a.b.c"])
async def test_an_endpoint_has_three_parts(mem_runtime: DistributedRuntime, path: str) -> None:
    endpoint = mem_runtime.endpoint(path)
    assert (endpoint.namespace, endpoint.component, endpoint.name, endpoint.path) == ("a", "b", "c", "a.b.c")


@each_case("path", ["", "a", "a.b", "a.b.c.d", "a..c", "dyn://", "dyn://a.b", "a.b.c/d"])
async def test_any_other_path_is_a_value_error(mem_runtime: DistributedRuntime, path: str) -> None:
    with pytest.raises(ValueError, match="endpoint path"):
        mem_runtime.endpoint(path)


async def test_serving_puts_exactly_one_record_of_the_native_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_TCP_RPC_HOST", "127.0.0.1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("NVIDIA_VISIBLE_DEVICES", raising=False)
    async with DistributedRuntime(None, None, "tcp", discovery=FileDiscovery(tmp_path)) as runtime:
        await serve(runtime, echo)
        hexadecimal = f"{runtime.connection_id():x}"
        files = stored(tmp_path)
        assert files == [tmp_path / "v1" / "instances" / f"ns%2Fc%2Fe%2F{hexadecimal}"]
        text = files[0].read_text()
        record = json.loads(text)
        address = record["transport"]["tcp"].partition("/")[0]
        assert text == (
            '{"type":"Endpoint","component":"c","endpoint":"e","namespace":"ns",'
            f'"instance_id":{runtime.connection_id()},'
            f'"transport":{{"tcp":"{address}/{hexadecimal}/ns/c/e"}},'
            '"device_type":"cuda","request_plane_codec":"msgpack","mux":1}'
        )
    assert stored(tmp_path) == []


async def test_model_records_have_the_native_shape_and_can_be_read_and_withdrawn(
    mem_runtime: DistributedRuntime,
) -> None:
    endpoint = mem_runtime.endpoint(PATH)
    hexadecimal = f"{mem_runtime.connection_id():x}"
    await endpoint.publish_model({"display_name": "m"})
    await endpoint.publish_model({"display_name": "lora"}, "lora_slug")
    found = await mem_runtime.discovery.get_prefix(MODEL_CARDS)
    assert list(found) == [f"v1/mdc/ns/c/e/{hexadecimal}", f"v1/mdc/ns/c/e/{hexadecimal}/lora_slug"]
    assert json.loads(next(iter(found.values()))) == {
        "type": "Model",
        "namespace": "ns",
        "component": "c",
        "endpoint": "e",
        "instance_id": mem_runtime.connection_id(),
        "card_json": {"display_name": "m"},
    }
    assert json.loads(found[f"v1/mdc/ns/c/e/{hexadecimal}/lora_slug"])["model_suffix"] == "lora_slug"
    assert await endpoint.published_model("lora_slug") == {"display_name": "lora"}
    await endpoint.withdraw_model("lora_slug")
    await endpoint.withdraw_model("lora_slug")
    assert await endpoint.published_model("lora_slug") is None
    assert await endpoint.published_model() == {"display_name": "m"}


# -- instances ----------------------------------------------------------------------------------------------------------


async def test_a_client_sees_instances_come_and_go(open_runtime: Open) -> None:
    one, two, caller = open_runtime(), open_runtime(), open_runtime()
    await serve(one, echo)
    client = await connect(caller)
    assert client.instance_ids() == [one.connection_id()]
    changed = asyncio.Event()
    forget = client.on_change(changed.set)
    await serve(two, echo)
    await changed.wait()
    assert client.instance_ids() == sorted([one.connection_id(), two.connection_id()])
    changed.clear()
    await one.aclose()
    await changed.wait()
    assert client.instance_ids() == [two.connection_id()]
    forget()
    (instance,) = client.instances()
    assert str(instance) == f"ns/c/e/{two.connection_id()}"
    assert instance.transport.kind in ("tcp", "mem")


async def test_an_unregistered_instance_is_invisible_and_keeps_its_streams(open_runtime: Open) -> None:
    worker, caller = open_runtime(), open_runtime()
    go_on = asyncio.Event()

    async def handler(request: Any) -> AsyncIterator[int]:
        yield 1
        await go_on.wait()
        yield 2

    served = await serve(worker, handler)
    client = await connect(caller)
    stream = await client.generate(None, annotated=False)
    assert await anext(stream) == 1
    endpoint = worker.endpoint(PATH)
    await endpoint.unregister_endpoint_instance()
    while client.instance_ids():
        await asyncio.sleep(0)
    with pytest.raises(WorkerUnavailable, match=r"^Unavailable: No workers available for endpoint ns/c/e$"):
        await client.generate(None)
    await endpoint.register_endpoint_instance()
    assert await client.wait_for_instances() == [worker.connection_id()]
    assert served.inflight == 1
    go_on.set()
    assert [value async for value in stream] == [2]


async def test_a_withdrawal_during_an_advertisement_is_not_undone_by_its_end(
    mem_runtime: DistributedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await serve(mem_runtime, echo)
    await served.withdraw()
    put, written, slow = mem_runtime.discovery.put, asyncio.Event(), asyncio.Event()

    async def put_slowly(key: str, value: bytes) -> None:
        await put(key, value)
        written.set()
        await slow.wait()

    monkeypatch.setattr(mem_runtime.discovery, "put", put_slowly)
    advertising = asyncio.create_task(served.advertise())
    await written.wait()
    await served.withdraw()
    slow.set()
    await advertising
    assert not mem_runtime.health.is_ready(PATH)
    await served.advertise()
    assert mem_runtime.health.is_ready(PATH)


async def test_whoever_starts_a_client_waits_until_it_knows_the_instances(mem_runtime: DistributedRuntime) -> None:
    await serve(mem_runtime, echo)
    client = Client(mem_runtime.endpoint(PATH))

    async def known() -> list[int]:
        await client.start()
        return client.instance_ids()

    assert await asyncio.gather(known(), known()) == [[mem_runtime.connection_id()]] * 2
    await client.close()


async def test_a_client_whose_first_start_failed_can_be_started_again(
    mem_runtime: DistributedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> None:
        raise CannotConnect("not yet")

    client = Client(mem_runtime.endpoint(PATH))
    monkeypatch.setattr(mem_runtime, "start", fail)
    with pytest.raises(CannotConnect, match="not yet"):
        await client.start()
    monkeypatch.undo()
    await serve(mem_runtime, echo)
    await client.start()
    assert client.instance_ids() == [mem_runtime.connection_id()]
    await client.close()


async def test_a_closed_client_starts_nothing_again(mem_runtime: DistributedRuntime) -> None:
    await serve(mem_runtime, echo)
    client = await connect(mem_runtime)
    await client.close()
    with pytest.raises(CannotConnect, match="is closed"):
        await client.generate("x")


async def test_an_endpoint_can_be_advertised_before_it_is_served(open_runtime: Open) -> None:
    worker, caller = open_runtime(), open_runtime()
    endpoint = worker.endpoint(PATH)
    await endpoint.register_endpoint_instance()
    client = await connect(caller)
    assert await client.wait_for_instances() == [worker.connection_id()]
    with pytest.raises((DynamoException, ValueError)) as declined:  # a stream's failure comes as a ValueError
        await values(client.generate("x"))
    assert rule_of(declined.value.__cause__ or declined.value).retryable
    await serve(worker, echo)
    assert await values(client.generate("x", annotated=False))
    await endpoint.unregister_endpoint_instance()
    while client.instance_ids():
        await asyncio.sleep(0)


async def test_what_was_advertised_and_not_served_can_be_taken_back(mem_runtime: DistributedRuntime) -> None:
    endpoint = mem_runtime.endpoint(PATH)
    await endpoint.register_endpoint_instance()
    assert await mem_runtime.discovery.get_prefix(INSTANCES)
    await endpoint.unregister_endpoint_instance()
    await endpoint.unregister_endpoint_instance()
    assert await mem_runtime.discovery.get_prefix(INSTANCES) == {}


async def test_an_endpoint_is_served_once_by_a_runtime(open_runtime: Open) -> None:
    runtime = open_runtime()
    first = await serve(runtime, echo)
    with pytest.raises(ValueError, match="already served"):
        await serve(runtime, echo)
    await first.close()
    await serve(runtime, echo)


async def test_rubbish_in_the_store_is_ignored_and_what_was_known_stays(
    mem_runtime: DistributedRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    await serve(mem_runtime, echo)
    client = await connect(mem_runtime)
    key = next(iter(await mem_runtime.discovery.get_prefix(INSTANCES)))
    await mem_runtime.discovery.put(key, b"{rubbish")
    await mem_runtime.discovery.put(f"{INSTANCES}/ns/c/e/zz", b"[]")
    while len([r for r in caplog.records if "ignored the record" in r.message]) < 2:
        await asyncio.sleep(0)
    assert client.instance_ids() == [mem_runtime.connection_id()]


async def test_instances_can_be_awaited_by_their_runtime_data(mem_runtime: DistributedRuntime) -> None:
    client = await mem_runtime.endpoint(PATH).client()
    with pytest.raises(TimeoutError, match=r"^0 instance\(s\) of ns\.c\.e had \{'role': 'x'\} as runtime_data after"):
        await client.wait_for_instance_by_runtime_data("role", "x", timeout_s=0.01)
    waiting = asyncio.create_task(client.wait_for_instance_by_runtime_data("role", "x", timeout_s=5))
    endpoint = mem_runtime.endpoint(PATH)
    await endpoint.publish_model({"runtime_config": {"runtime_data": {"role": "y"}}})
    await endpoint.publish_model({"runtime_config": {"runtime_data": {"role": "x"}}})
    assert await waiting == mem_runtime.connection_id()


async def test_the_one_instance_of_a_runtime_data_is_waited_for_while_several_have_it() -> None:
    workers = [memory_runtime() for _ in range(2)]
    runtime = memory_runtime()
    for each in workers:
        await each.endpoint(PATH).publish_model({"runtime_config": {"runtime_data": {"role": "x"}}})
    client = await runtime.endpoint(PATH).client()
    ids = sorted(each.connection_id() for each in workers)
    assert await client.wait_for_instances_by_runtime_data("role", "x", 1, timeout_s=5) == ids
    with pytest.raises(TimeoutError, match=rf"^2 instance.*exactly 1 must have it: \[{ids[0]}, {ids[1]}\]$"):
        await client.wait_for_instance_by_runtime_data("role", "x", timeout_s=0.01)
    waiting = asyncio.create_task(client.wait_for_instance_by_runtime_data("role", "x", timeout_s=5))
    await workers[0].aclose()
    assert await waiting == workers[1].connection_id()
    for each in (workers[1], runtime):
        await each.aclose()


@pytest.mark.parametrize(("count", "seconds"), [(0, 1.0), (-1, 1.0), (1, -1.0), (1, float("inf")), (1, float("nan"))])
async def test_waiting_for_no_instance_or_for_no_time_is_refused(
    mem_runtime: DistributedRuntime, count: int, seconds: float
) -> None:
    client = await mem_runtime.endpoint(PATH).client()
    with pytest.raises(
        ValueError, match=r"^(min_count must be positive|timeout_s must be a finite non-negative number)$"
    ):
        await client.wait_for_instances_by_runtime_data("role", "x", count, timeout_s=seconds)


@pytest.mark.process  # starts processes
async def test_a_killed_process_disappears_within_its_ttl(tmp_path: Path) -> None:
    code = """
import asyncio, sys
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.discovery import FileDiscovery

async def handler(request):
    yield 1
    print("streaming", flush=True)
    await asyncio.sleep(60)
    yield 2

async def main():
    store = FileDiscovery(sys.argv[1], ttl_seconds=1.5)
    runtime = DistributedRuntime(None, None, "tcp", discovery=store)
    await runtime.endpoint("ns.c.e").serve_endpoint(handler)

asyncio.run(main())
"""
    store = FileDiscovery(tmp_path, ttl_seconds=1.5, poll_seconds=0.02)
    async with asyncio.timeout(PATIENCE_SECONDS), DistributedRuntime(None, None, "tcp", discovery=store) as runtime:
        child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)  # noqa: ASYNC220
        try:
            client = await connect(runtime)
            stream = await client.generate(None, annotated=False)
            assert await anext(stream) == 1
            child.kill()
            killed = time.monotonic()
            with pytest.raises(ValueError, match="Unavailable: Stream ended before generation completed"):
                await anext(stream)
            with pytest.raises(WorkerUnavailable, match="No workers"):  # quarantined long before its record expires
                client.pick(Context(), healthy_only=True)
            with pytest.raises((CannotConnect, ValueError)):  # and asked all the same: there is nobody else
                await values(client.generate(None))
            while client.instance_ids():
                await asyncio.sleep(0.01)
            assert time.monotonic() - killed < PROMPT_SECONDS
        finally:
            child.kill()
            child.communicate()


# -- requests and answers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["text", 7, None, [1, "a"], {"k": [None]}, True, 1.5])
async def test_requests_and_items_of_any_kind_survive(open_runtime: Open, value: Any) -> None:
    worker, caller = open_runtime(), open_runtime()
    await serve(worker, echo)
    client = await connect(caller)
    assert await values(client.generate(value, annotated=False)) == [value]
    assert [item.data() for item in await values(client.generate(value))] == [value]


async def test_a_set_arrives_as_a_list(mem_runtime: DistributedRuntime) -> None:
    async def handler(request: Any) -> AsyncIterator[Any]:
        yield {3}

    await serve(mem_runtime, handler)
    assert await values((await connect(mem_runtime)).generate(None, annotated=False)) == [[3]]


async def test_an_annotated_dict_is_the_envelope_itself(open_runtime: Open) -> None:
    worker = open_runtime()

    async def handler(request: Any) -> AsyncIterator[Any]:
        yield {"_dynamo_annotated": True, "event": "note", "comment": ["a"], "id": "7", "data": {"x": 1}}
        yield {"_dynamo_annotated": True, "comment": ["only"]}
        yield {"_dynamo_annotated": False}

    await serve(worker, handler)
    items = await values((await connect(worker)).generate(None))
    assert [(i.event(), i.comments(), i.id(), i.data()) for i in items] == [
        ("note", ["a"], "7", {"x": 1}),
        (None, ["only"], None, None),
        (None, None, None, {"_dynamo_annotated": False}),
    ]


async def test_an_error_event_is_raised(mem_runtime: DistributedRuntime) -> None:
    async def handler(request: Any) -> AsyncIterator[Any]:
        yield {"_dynamo_annotated": True, "event": "error", "comment": ["it", "broke"]}

    await serve(mem_runtime, handler)
    with pytest.raises(ValueError, match=r"^Internal: it; broke$"):
        await values((await connect(mem_runtime)).generate(None))


async def test_token_items_become_chunks(mem_runtime: DistributedRuntime) -> None:
    async def handler(body: Any, context: Context, sink: ResponseSink) -> None:
        sink.send_tokens([1, 2])
        sink.send_tokens([3], 1, "stop", {"text": "x"})

    await mem_runtime.endpoint(PATH).start_serving(handler)
    assert await values((await connect(mem_runtime)).generate(None, annotated=False)) == [
        {"token_ids": [1, 2], "index": 0},
        {"token_ids": [3], "index": 1, "finish_reason": "stop", "text": "x"},
    ]


@pytest.mark.parametrize("kind", ["generator", "coroutine", "callable"])
async def test_every_form_of_a_handler_is_understood(mem_runtime: DistributedRuntime, kind: str) -> None:
    async def generator(request: Any, context: Context) -> AsyncIterator[Any]:
        yield context.id()

    async def coroutine(request: Any, context: Context) -> AsyncIterator[Any]:
        return generator(request, context)

    class Callable_:
        def __call__(self, request: Any, context: Context) -> AsyncIterator[Any]:
            return generator(request, context)

    handlers: dict[str, Any] = {"generator": generator, "coroutine": coroutine, "callable": Callable_()}
    await serve(mem_runtime, handlers[kind])
    assert await values((await connect(mem_runtime)).generate(1, annotated=False, context=Context("id-1"))) == ["id-1"]


async def test_a_handler_that_is_no_generator_is_named(mem_runtime: DistributedRuntime) -> None:
    async def handler(request: Any) -> int:
        return 1

    with pytest.raises(TypeError, match="async generator"):
        serve_python(3)  # type: ignore[arg-type]
    await serve(mem_runtime, handler)
    with pytest.raises(ValueError, match="must be an async generator function; it returned int"):
        await values((await connect(mem_runtime)).generate(None))


async def test_a_plain_handler_gets_where_the_prompt_of_a_moved_request_ends(mem_runtime: DistributedRuntime) -> None:
    seen: list[int | None] = []

    async def handler(request: Any, context: Context) -> AsyncIterator[Any]:
        seen.append(context.prompt_tokens)
        yield 1

    await serve(mem_runtime, handler)
    client = await connect(mem_runtime)
    for prompt_tokens in (None, 17):
        context = Context()
        context.prompt_tokens = prompt_tokens
        stream = await client.open(client.named(client.instance_ids()[0]), None, context)
        await stream.next_batch()
        stream.close()
    assert seen == [None, 17]


RAISED: list[tuple[BaseException, str, str]] = [
    # raised by the handler; class and text in the caller's ValueError
    (ValueError("boom"), "InvalidRequest", "ValueError: boom"),
    (TypeError("boom"), "InvalidRequest", "TypeError: boom"),
    (TimeoutError("slow"), "DeadlineExceeded", "TimeoutError: slow"),
    (ConnectionError("gone"), "Unavailable", "ConnectionError: gone"),
    (ConnectionResetError("gone"), "Unavailable", "ConnectionResetError: gone"),
    (Disconnected("gone"), "Unavailable", "gone"),
    (asyncio.CancelledError("stop"), "Cancelled", "CancelledError: stop"),
    (GeneratorExit(), "Unavailable", "engine shutting down"),
    (CannotConnect("there"), "Unavailable", "there"),
    (EngineShutdown("down"), "Unavailable", "down"),
    (StreamIncomplete("short"), "Unavailable", "short"),
    (Unknown("u"), "Internal", "u"),
    (WorkerUnavailable("not here"), "Unavailable", "not here"),
    (HttpError(418, "teapot"), "InvalidRequest", '{"message": "teapot", "code": 418}'),
    (KeyError("k"), "Internal", "KeyError: 'k'"),
    (RouterQueueLimitExceeded("p", "depth", 1, 1), "Internal", "router policy class"),
    (RuntimeError("boom"), "Internal", "RuntimeError: boom"),
]


@pytest.mark.parametrize(("raised", "name", "text"), RAISED, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("after", [0, 1])
async def test_what_a_handler_raises_arrives_by_the_table(
    mem_runtime: DistributedRuntime, raised: BaseException, name: str, text: str, after: int
) -> None:
    async def handler(request: Any) -> AsyncIterator[int]:
        for number in range(after):
            yield number
        raise raised

    await serve(mem_runtime, handler)
    stream = await (await connect(mem_runtime)).generate(None, annotated=False)
    for number in range(after):  # what came before the error counts
        assert await anext(stream) == number
    with pytest.raises(ValueError, match=rf"^{name}: ") as caught:
        await anext(stream)
    assert text in str(caught.value)
    assert [value async for value in stream] == []


async def test_an_invalid_argument_arrives_as_itself(open_runtime: Open) -> None:
    async def handler(request: Any) -> AsyncIterator[int]:
        raise InvalidArgument("the prompt is too long")
        yield 1

    worker = open_runtime()
    await serve(worker, handler)
    with pytest.raises(InvalidArgument, match=r"^the prompt is too long$"):
        await values((await connect(worker)).generate(None))


async def test_a_direct_call_reaches_the_one_that_was_named(open_runtime: Open) -> None:
    workers = [open_runtime() for _ in range(3)]
    for number, worker in enumerate(workers):

        async def who(request: Any, number: int = number) -> AsyncIterator[int]:
            yield number

        await worker.endpoint(PATH).start_serving(serve_python(who))
    client = await connect(workers[0])
    for number, worker in enumerate(workers):
        assert await values(client.direct(None, worker.connection_id(), annotated=False)) == [number]
    with pytest.raises(WorkerUnavailable, match=r"^Unavailable: instance_id=12345 not found for endpoint ns/c/e$"):
        await client.direct(None, 12345)
    seen = [(await values(client.round_robin(None, annotated=False)))[0] for _ in range(6)]
    assert sorted(seen) == [0, 0, 1, 1, 2, 2]
    assert {(await values(client.random(None, annotated=False)))[0] for _ in range(40)} == {0, 1, 2}


async def test_least_loaded_counts_the_streams_that_are_open(open_runtime: Open) -> None:
    release = asyncio.Event()

    async def handler(request: Any, context: Context) -> AsyncIterator[int]:
        await release.wait()
        yield 1

    workers = [open_runtime(), open_runtime()]
    served = [await serve(worker, handler) for worker in workers]
    client = await workers[0].endpoint(PATH).client("least-loaded")
    while len(client.instance_ids()) < 2:
        await asyncio.sleep(0)
    streams = [await client.generate(None) for _ in range(6)]
    while sum(each.inflight for each in served) < 6:
        await asyncio.sleep(0)
    assert [each.inflight for each in served] == [3, 3]
    for stream in streams:
        await stream.aclose()
    release.set()


async def test_metadata_reaches_the_handler_and_edits_do_not_leak_back(open_runtime: Open) -> None:
    worker = open_runtime()

    async def handler(request: Any, context: Context) -> AsyncIterator[Any]:
        seen = context.metadata.copy()
        context.metadata["edited"] = "yes"
        yield seen

    await serve(worker, handler)
    context = Context(metadata={"tenant": "t"})
    client = await connect(worker)
    assert await values(client.generate(None, annotated=False, context=context)) == [{"tenant": "t"}]
    assert context.metadata.copy() == {"tenant": "t"}


async def test_unary_endpoints_answer_with_one_value(mem_runtime: DistributedRuntime) -> None:
    async def double(request: int) -> int:
        return request * 2

    endpoint = mem_runtime.endpoint(PATH)
    serving = asyncio.create_task(serve_unary_endpoint(endpoint, double))
    client = await connect(mem_runtime)
    assert await UnaryClient(client).generate(21) == await UnaryClient(client).complete(21) == 42
    assert await UnaryClient(client).direct(4, mem_runtime.connection_id()) == 8
    mem_runtime.shutdown()
    await serving


async def test_a_unary_handler_may_take_its_context_by_name(mem_runtime: DistributedRuntime) -> None:
    async def name(_request: object, *, context: Context) -> str | None:
        return context.id()

    serving = asyncio.create_task(serve_unary_endpoint(mem_runtime.endpoint(PATH), name))
    client = await connect(mem_runtime)
    assert await UnaryClient(client).complete(None, context=Context("mine")) == "mine"
    mem_runtime.shutdown()
    await serving


# -- cancellation -------------------------------------------------------------------------------------------------------


class Watcher:
    """A handler that streams until it is stopped, and remembers what it saw."""

    def __init__(self) -> None:
        self.seen: asyncio.Future[tuple[bool, bool]] = asyncio.get_running_loop().create_future()
        self.closed = asyncio.Event()
        self.calls = 0

    async def __call__(self, request: Any, context: Context) -> AsyncIterator[int]:
        self.calls += 1
        try:
            yield 1
            await context.async_killed_or_stopped()
            self.seen.set_result((context.is_stopped(), context.is_killed()))
            yield 2
        finally:
            self.closed.set()


async def test_a_stop_is_seen_as_a_stop_and_the_iteration_ends_cleanly(open_runtime: Open) -> None:
    worker, caller = open_runtime(), open_runtime()
    watcher = Watcher()
    await serve(worker, watcher.__call__)
    client = await connect(caller)
    context = Context()
    stream = await client.generate(None, annotated=False, context=context)
    assert await anext(stream) == 1
    context.stop_generating()
    assert [value async for value in stream] in ([2], [])
    assert await watcher.seen == (True, False)
    await watcher.closed.wait()
    assert client.pick(Context()).instance_id == worker.connection_id()  # nobody was quarantined for it


@pytest.mark.parametrize("how", ["dropped", "aclose", "kill"])
async def test_leaving_a_half_read_stream_kills_the_request(open_runtime: Open, how: str) -> None:
    worker, caller = open_runtime(), open_runtime()
    watcher = Watcher()
    served = await serve(worker, watcher.__call__)
    client = await connect(caller)
    context = Context()
    stream = await client.generate(None, annotated=False, context=context)
    assert await anext(stream) == 1
    match how:
        case "dropped":
            del stream
            gc.collect()
        case "aclose":
            await stream.aclose()
        case "kill":
            context.kill()
            assert [value async for value in stream] == []
    assert await watcher.seen == (True, True)
    await watcher.closed.wait()
    while served.inflight:
        await asyncio.sleep(0)
    counted = [line for line in worker.metrics.expose().decode().splitlines() if "cancellation_total{" in line]
    assert counted[0].endswith(" 1")


async def test_a_stream_that_was_never_read_is_killed_when_dropped(open_runtime: Open) -> None:
    worker = open_runtime()
    watcher = Watcher()
    await serve(worker, watcher.__call__)
    client = await connect(worker)
    stream = await client.generate(None)
    while not watcher.calls:
        await asyncio.sleep(0)
    del stream
    gc.collect()
    await watcher.closed.wait()


async def test_a_killed_handler_that_does_not_look_is_closed_where_it_stands(open_runtime: Open) -> None:
    worker = open_runtime()
    closed = asyncio.Event()

    async def handler(request: Any) -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            closed.set()

    served = await serve(worker, handler)
    client = await connect(worker)
    stream = await client.generate(None, annotated=False)
    assert await anext(stream) == 1
    await stream.aclose()
    await closed.wait()
    assert await served.wait_idle(5)


@pytest.mark.parametrize("yields", [False, True])
async def test_a_handler_whose_caller_has_gone_may_look_and_clean_up(open_runtime: Open, yields: bool) -> None:
    """It polls more slowly than an engine of our contract would be allowed to."""
    worker = open_runtime()
    cleaned = asyncio.get_running_loop().create_future()

    async def handler(request: Any, context: Context) -> AsyncIterator[int]:
        try:
            yield 1
            while not context.is_stopped():
                await asyncio.sleep(0.1)  # longer than the 50 ms it had
                if yields:
                    yield 2
            await asyncio.sleep(0)
            cleaned.set_result("looked")
        finally:
            if not cleaned.done():
                cleaned.set_result("cancelled")

    served = await serve(worker, handler)
    client = await connect(worker)
    stream = await client.generate(None, annotated=False)
    assert await anext(stream) == 1
    await stream.aclose()
    assert await cleaned == "looked"
    assert await served.wait_idle(5)


async def test_the_grace_of_a_handler_is_a_setting() -> None:
    assert RuntimeSettings.from_env({"DYN_HANDLER_CANCEL_GRACE_SECS": "0.25"}).cancel_grace_seconds == 0.25
    assert RuntimeSettings.from_env({}).cancel_grace_seconds == 1.0


async def test_a_context_that_is_stopped_already_yields_nothing(open_runtime: Open) -> None:
    worker = open_runtime()
    watcher = Watcher()
    await serve(worker, watcher.__call__)
    client = await connect(worker)
    context = Context()
    context.stop_generating()
    assert await values(client.generate(None, context=context)) == []
    assert watcher.calls == 0


async def test_a_handler_that_stops_itself_leaves_an_error(open_runtime: Open) -> None:
    async def handler(request: Any, context: Context) -> AsyncIterator[int]:
        yield 1
        context.stop_generating()

    worker = open_runtime()
    await serve(worker, handler)
    stream = await (await connect(worker)).generate(None, annotated=False)
    assert await anext(stream) == 1
    with pytest.raises(ValueError, match="Unavailable: Stream ended before generation completed"):
        await anext(stream)


@pytest.mark.parametrize("killed", [False, True])
async def test_a_stop_of_the_outer_call_reaches_the_inner_one(open_runtime: Open, killed: bool) -> None:
    """Caller -> middle -> inner."""
    worker, middle, caller = open_runtime(), open_runtime(), open_runtime()
    watcher = Watcher()
    await serve(worker, watcher.__call__)
    inner = await connect(middle)

    async def relay(request: Any, context: Context) -> AsyncIterator[Any]:
        async for value in await inner.generate(request, annotated=False, context=context):
            yield value

    await middle.endpoint("ns.c.middle").start_serving(serve_python(relay))
    outer = await connect(caller, "ns.c.middle")
    context = Context()
    stream = await outer.generate(None, annotated=False, context=context)
    assert await anext(stream) == 1
    (context.kill if killed else context.stop_generating)()
    async for _ in stream:
        pass
    assert (await watcher.seen)[0]
    await watcher.closed.wait()


# -- failures -----------------------------------------------------------------------------------------------------------


async def test_an_instance_that_failed_is_left_out_for_a_while(open_runtime: Open) -> None:
    async def broken(request: Any) -> AsyncIterator[int]:
        raise EngineShutdown("going away")
        yield 1

    bad, good, caller = open_runtime(), open_runtime(), open_runtime(inhibit_seconds=60.0)
    await serve(bad, broken)
    await serve(good, echo)
    client = await caller.endpoint(PATH).client("round-robin")
    while len(client.instance_ids()) < 2:
        await asyncio.sleep(0)
    outcomes: list[bool] = []
    for _ in range(6):
        try:
            outcomes.append(await values(client.generate(7, annotated=False)) == [7])
        except ValueError:
            outcomes.append(False)
    assert outcomes.count(False) == 1
    assert len(client.instance_ids()) == 2  # discovered all the same
    await bad.endpoint(PATH).register_endpoint_instance()  # it appears again: forgiven
    while any(each.is_circuit_open for each in client._set.candidates(0.0)):
        await asyncio.sleep(0)


async def test_a_bad_request_does_not_count_against_its_worker(open_runtime: Open) -> None:
    async def picky(request: Any) -> AsyncIterator[int]:
        raise InvalidArgument("no")
        yield 1

    worker = open_runtime()
    await serve(worker, picky)
    client = await connect(worker)
    for _ in range(3):
        with pytest.raises(InvalidArgument):
            await values(client.generate(None))


async def test_cutting_ends_every_stream_with_the_error_given(open_runtime: Open) -> None:
    worker, caller = open_runtime(), open_runtime()
    watcher = Watcher()
    served = await serve(worker, watcher.__call__)
    client = await connect(caller)
    streams = [await client.open(client.pick(Context()), None, Context())]
    assert len(await streams[0].next_batch()) == 1
    assert served.cut(EngineShutdown("the worker is shutting down")) == 1
    with pytest.raises(EngineShutdown, match="shutting down"):
        await streams[0].next_batch()
    streams[0].close()
    assert await watcher.seen == (True, True)
    assert await served.wait_idle(5)
    assert served.cut(EngineShutdown("")) == 0


async def test_waiting_for_idle_gives_up_in_time(open_runtime: Open) -> None:
    worker = open_runtime()
    watcher = Watcher()
    served = await serve(worker, watcher.__call__)
    assert await served.wait_idle(0.01)
    stream = await (await connect(worker)).generate(None)
    await anext(stream)
    assert not await served.wait_idle(0.01)
    await stream.aclose()
    assert await served.wait_idle(5)


# -- the end ------------------------------------------------------------------------------------------------------------


async def test_a_shutdown_finishes_the_streams_and_then_serving_returns(open_runtime: Open) -> None:
    worker, caller = open_runtime(), open_runtime()
    go_on = asyncio.Event()

    async def handler(request: Any) -> AsyncIterator[int]:
        for number in range(8):
            yield number
            if number == 0:
                await go_on.wait()

    serving = asyncio.create_task(worker.endpoint(PATH).serve_endpoint(handler))
    client = await connect(caller)
    stream = await client.generate(None, annotated=False)
    assert await anext(stream) == 0
    worker.shutdown()
    worker.shutdown()
    while client.instance_ids():
        await asyncio.sleep(0)
    assert not worker.health.system_ready()
    assert not serving.done()
    with pytest.raises(WorkerUnavailable, match="No workers available"):
        await client.generate(None)
    go_on.set()
    assert [value async for value in stream] == list(range(1, 8))
    await serving
    await worker.aclose()
    with pytest.raises(CannotConnect, match="closed"):
        await worker.start()


async def test_a_shutdown_cuts_what_does_not_end_in_time(open_runtime: Open) -> None:
    worker, caller = open_runtime(shutdown_seconds=0.05), open_runtime()
    await serve(worker, Watcher().__call__)
    stream = await (await connect(caller)).generate(None)
    await anext(stream)
    worker.shutdown()
    with pytest.raises(ValueError, match="Unavailable"):
        await anext(stream)
    await worker.aclose()


async def test_an_endpoint_that_is_not_graceful_is_cut_at_once(open_runtime: Open) -> None:
    worker, caller = open_runtime(), open_runtime()
    serving = asyncio.create_task(worker.endpoint(PATH).serve_endpoint(Watcher().__call__, graceful_shutdown=False))
    stream = await (await connect(caller)).generate(None)
    await anext(stream)
    worker.shutdown()
    with pytest.raises(ValueError, match="Unavailable"):
        await anext(stream)
    await serving


async def test_a_shutdown_may_come_from_another_thread(open_runtime: Open) -> None:
    worker = open_runtime()
    serving = asyncio.create_task(worker.endpoint(PATH).serve_endpoint(echo))
    await connect(worker)
    thread = threading.Thread(target=worker.shutdown)
    thread.start()
    await serving
    thread.join()


async def test_cancelling_serve_endpoint_takes_the_instance_back(open_runtime: Open) -> None:
    worker, caller = open_runtime(), open_runtime()
    serving = asyncio.create_task(worker.endpoint(PATH).serve_endpoint(echo))
    client = await connect(caller)
    serving.cancel()
    with suppress(asyncio.CancelledError):
        await serving
    while client.instance_ids():
        await asyncio.sleep(0)


async def test_closing_leaves_no_task_behind(open_runtime: Open) -> None:
    before = asyncio.all_tasks()
    worker, caller = open_runtime(), open_runtime()
    await serve(worker, echo)
    client = await connect(caller)
    assert await values(client.generate(1, annotated=False)) == [1]
    await caller.aclose()
    await worker.aclose()
    await worker.aclose()
    for _ in range(5):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() - before == set()


# -- construction -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (("kubernetes", "tcp"), InvalidArgument, "needs POD_NAME, POD_NAMESPACE, POD_UID"),
        (("consul", "tcp"), ValueError, "unknown discovery backend 'consul'"),
        (("mem", "http"), ValueError, "unknown request plane 'http'"),
    ],
)
async def test_what_is_not_built_says_which_flag_to_use(
    arguments: tuple[str, str], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        DistributedRuntime(asyncio.get_running_loop(), *arguments)


async def test_auto_is_file_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("ETCD_ENDPOINTS", raising=False)
    monkeypatch.delenv("DYN_DISCOVERY_BACKEND", raising=False)
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    with caplog.at_level(logging.INFO):
        runtime = create_runtime()
    assert isinstance(runtime.discovery, FileDiscovery)
    (line,) = [record.getMessage() for record in caplog.records if "discovery" in record.getMessage()]
    assert str(tmp_path) in line
    assert "--discovery-backend" in line
    await runtime.aclose()


async def test_auto_is_etcd_when_its_endpoints_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_ENDPOINTS", "http://127.0.0.1:1")
    monkeypatch.setenv("ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS", "0.2")
    monkeypatch.delenv("DYN_DISCOVERY_BACKEND", raising=False)
    runtime = create_runtime()
    with pytest.raises(CannotConnect, match=r"http://127\.0\.0\.1:1 "):
        await runtime.start()
    await runtime.aclose()


def test_settings_follow_the_environment() -> None:
    assert RuntimeSettings.from_env({}) == RuntimeSettings()
    found = RuntimeSettings.from_env(
        {
            "DYN_DISCOVERY_BACKEND": "FILE",
            "TMPDIR": "/scratch",
            "DYN_REQUEST_PLANE": "http",
            "DYN_RUNTIME_INHIBITED_DURATION_SECS": "0",
            "DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "x",
        }
    )
    assert found.discovery_backend == "file"
    assert found.file_root == Path("/scratch/dynamo_store_kv")
    assert (found.request_plane, found.inhibit_seconds, found.shutdown_seconds) == ("tcp", 0.0, 900.0)


async def test_enable_nats_is_deprecated() -> None:
    with pytest.warns(DeprecationWarning, match="enable_nats"):
        runtime = DistributedRuntime(asyncio.get_running_loop(), "mem", "mem", False)
    await runtime.aclose()


async def test_runtimes_of_one_loop_share_the_memory_planes() -> None:
    loop = asyncio.get_running_loop()
    async with DistributedRuntime(loop, "mem", "mem") as worker, DistributedRuntime(loop, "mem", "mem") as caller:
        await serve(worker, echo)
        assert await values((await connect(caller)).generate(5, annotated=False)) == [5]


async def test_a_start_that_fails_can_be_tried_again(tmp_path: Path) -> None:
    blocker = tmp_path / "root"
    blocker.write_text("")
    runtime = DistributedRuntime(None, None, "mem", discovery=FileDiscovery(blocker / "store"))
    with pytest.raises(CannotConnect, match="DYN_FILE_KV"):
        await runtime.start()
    blocker.unlink()
    await runtime.start()
    await runtime.aclose()


async def test_the_detached_runtime_is_the_only_open_one(mem_runtime: DistributedRuntime) -> None:
    assert DistributedRuntime.detached() is mem_runtime
    async with DistributedRuntime(None, "mem", "mem"):
        with pytest.raises(RuntimeError, match="2 runtimes"):
            DistributedRuntime.detached()


async def test_metrics_count_requests_by_endpoint_and_user_labels(open_runtime: Open) -> None:
    worker = open_runtime()
    await serve(worker, echo, metrics_labels=[("team", "a")])
    client = await connect(worker)
    await values(client.generate({"n": 2}))
    text = worker.metrics.expose().decode()
    (line,) = [line for line in text.splitlines() if line.startswith("dynamo_component_requests_total{")]
    assert f'worker_id="{worker.connection_id():x}"' in line
    assert 'team="a"' in line
    assert line.endswith(" 1")
    (line,) = [line for line in text.splitlines() if line.startswith("dynamo_component_request_bytes_total{")]
    assert line.endswith(" 4")
    with pytest.raises(ValueError, match="worker_id"):
        await worker.endpoint("ns.c.other").start_serving(serve_python(echo), metrics_labels={"worker_id": "x"})


@pytest.mark.parametrize("backend", ["etcd", "auto"])
async def test_etcd_endpoints_that_are_set_are_not_ignored(backend: str) -> None:
    settings = RuntimeSettings.from_env({"ETCD_ENDPOINTS": "http://etcd:2379,nonsense://"})
    with pytest.raises(InvalidArgument, match="ETCD_ENDPOINTS: 'nonsense://'"):
        DistributedRuntime(asyncio.get_running_loop(), backend, "tcp", settings=settings)


async def test_etcd_without_endpoints_is_the_file_store_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = RuntimeSettings.from_env({"DYN_FILE_KV": str(tmp_path)})
    runtime = DistributedRuntime(asyncio.get_running_loop(), "etcd", "mem", settings=settings)
    assert isinstance(runtime.discovery, FileDiscovery)
    assert "ETCD_ENDPOINTS is not set" in caplog.text
    await runtime.aclose()
