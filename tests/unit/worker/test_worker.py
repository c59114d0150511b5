"""The worker over the memory planes: order of calls, what discovery sees, how streams end."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from dynamo.common.backend import run as run_module
from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import EngineConfig, LLMEngine, RawEngine
from dynamo.contract.modes import DisaggregationMode
from dynamo.errors import CannotConnect, DynamoException, EngineShutdown, InvalidArgument, Unknown
from dynamo.protocol.model_types import ModelInput, WorkerType
from dynamo.protocol.records import decode_model_record
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseStream
from dynamo.runtime.discovery.base import INSTANCES, MODEL_CARDS
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryHub
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.worker.kv_publishing.publisher import ComponentSnapshot, PushSource
from dynamo.worker.lifecycle import ShutdownTimes, State
from dynamo.worker.worker import Worker, _coerce_disagg_mode, _to_rust_disaggregation_mode, shutdown_times
from support.cases import each_case
from support.patience import PATIENCE_SECONDS

QUICK = ShutdownTimes(grace_seconds=0.0, timeout_seconds=30)


class Hooks:
    """What both kinds of engine share: writes every call down, fails where it is told to."""

    def __init__(self, **plan: Any) -> None:
        self.calls: list[str] = []
        self.fail: dict[str, BaseException] = plan.pop("fail", {})
        self.give: dict[str, Any] = plan.pop("give", {})
        self.hold: dict[str, asyncio.Event] = plan.pop("hold", {})
        self.engine_config = EngineConfig(**({"model": "m"} | plan))
        self.entered: dict[str, asyncio.Event] = {}
        self.on: dict[str, Callable[..., Any]] = {}

    def inside(self, hook: str) -> asyncio.Event:
        return self.entered.setdefault(hook, asyncio.Event())

    def play(self, hook: str, *args: Any) -> Any:
        self.calls.append(hook)
        self.inside(hook).set()
        if hook in self.on:
            self.on[hook](*args)
        if hook in self.fail:
            raise self.fail[hook]
        return self.give.get(hook)

    async def act(self, hook: str, *args: Any) -> Any:
        if hook in self.hold:
            self.inside(hook).set()
            await self.hold[hook].wait()
        return self.play(hook, *args)

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        return cls(), config()

    async def start(self, worker_id: int) -> EngineConfig:
        self.worker_id = worker_id
        await self.act("start")
        return self.engine_config

    async def register_prometheus(self, metrics: Any) -> None:
        await self.act("register_prometheus", metrics)

    def component_metrics_dp_ranks(self) -> list[int]:
        return self.play("component_metrics_dp_ranks") or []

    async def kv_event_sources(self) -> list[Any]:
        return await self.act("kv_event_sources") or []

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self.play("attach_snapshot_publisher", publisher)

    async def on_endpoint_ready(self, endpoint: Any) -> None:
        await self.act("on_endpoint_ready", endpoint)

    def supported_controls(self) -> set[str]:
        return self.play("supported_controls") or set()

    def supported_updates(self) -> set[str]:
        return self.play("supported_updates") or set()

    async def engine_control(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        await self.act(f"control {name}")
        return {"status": "ok"}

    async def health_check_payload(self) -> dict[str, Any] | None:
        return await self.act("health_check_payload")

    async def abort(self, context: Context) -> None:
        self.play("abort")

    async def drain(self) -> None:
        await self.act("drain")

    async def cleanup(self) -> None:
        await self.act("cleanup")


class Recorder(Hooks, LLMEngine):
    """Streams the numbers from 0, one whenever `step` says so (or freely)."""

    step: asyncio.Semaphore | None = None

    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        self.play("generate")
        count = request["stop_conditions"]["max_tokens"]
        try:
            for number in range(count):
                if self.step is not None:
                    await self.step.acquire()
                last = {"finish_reason": "length"} if number == count - 1 else {}
                yield {"token_ids": [number], "index": 0, **last}
        finally:
            self.play("closed")


class QuiescenceRecorder(Recorder):
    async def is_quiescent(self) -> bool | None:
        return await self.act("is_quiescent")


class RawRecorder(Hooks, RawEngine):
    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        self.play("generate")
        yield {"echo": request}


UP = [
    "start",
    "register_prometheus",
    "component_metrics_dp_ranks",
    "kv_event_sources",
    "on_endpoint_ready",
    "supported_controls",
    "supported_updates",
    "health_check_payload",
]
DOWN = ["drain", "cleanup"]


def config(**members: Any) -> WorkerConfig:
    return WorkerConfig(**({"namespace": "ns", "discovery_backend": "mem", "request_plane": "mem"} | members))


@asynccontextmanager
async def mem_runtime(**options: Any) -> AsyncIterator[DistributedRuntime]:
    async with DistributedRuntime(asyncio.get_running_loop(), "mem", "mem", **options) as runtime:
        yield runtime


def make(
    engine: Any, *, times: ShutdownTimes = QUICK, runtime: DistributedRuntime | None = None, **members: Any
) -> Worker:
    return Worker(engine, config(**members), runtime=runtime, times=times, embedded=True)


@asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[asyncio.Task[None]]:
    """The worker, serving; on the way out it is stopped if it still runs, and must have ended well."""
    task = asyncio.create_task(worker.run())
    serving = asyncio.create_task(worker.wait_serving())
    await asyncio.wait({task, serving}, timeout=PATIENCE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    serving.cancel()
    if task.done():
        await task
    assert worker.state is State.SERVING
    try:
        yield task
    finally:
        worker.request_stop()
        await asyncio.wait_for(task, PATIENCE_SECONDS)


async def keys(runtime: DistributedRuntime) -> list[str]:
    found: dict[str, bytes] = {}
    for bucket in (INSTANCES, MODEL_CARDS):
        found |= await runtime.discovery.get_prefix(bucket)
    return sorted(found)


async def open_stream(runtime: DistributedRuntime, tokens: int) -> ResponseStream:
    client = await runtime.endpoint("ns.backend.generate").client("round-robin")
    await client.wait_for_instances()
    context = Context()
    body = {"token_ids": [1], "stop_conditions": {"max_tokens": tokens}}
    return await client.open(client.pick(context), body, context)


async def read(stream: ResponseStream) -> list[int]:
    found: list[int] = []
    while batch := await asyncio.wait_for(stream.next_batch(), PATIENCE_SECONDS):
        for item in batch:
            found += item.token_ids
    stream.close()
    return found


# -- the order of calls -----------------------------------------------------------------------------------------------


async def test_every_hook_is_called_once_and_in_order() -> None:
    engine = Recorder(
        give={"component_metrics_dp_ranks": [0], "kv_event_sources": [PushSource(lambda _publisher: None)]},
        kv_cache_block_size=16,
    )
    async with running(make(engine)):
        pass
    expected = [*UP, *DOWN]
    expected.insert(expected.index("on_endpoint_ready"), "attach_snapshot_publisher")
    assert engine.calls == expected


async def test_the_worker_id_is_the_instance_id() -> None:
    engine = Recorder()
    async with mem_runtime() as observer, running(make(engine)):
        assert await keys(observer) == [
            f"{INSTANCES}/ns/backend/generate/{engine.worker_id:x}",
            f"{MODEL_CARDS}/ns/backend/generate/{engine.worker_id:x}",
        ]


async def test_run_is_single_shot() -> None:
    worker = make(Recorder())
    async with running(worker):
        pass
    with pytest.raises(RuntimeError, match=r"^Worker\.run\(\) can only be called once per Worker instance"):
        await worker.run()


@each_case("hook", UP[:-1])
async def test_a_failure_before_serving_is_cleaned_up_once_and_leaves_nothing(hook: str) -> None:
    engine = Recorder(fail={hook: RuntimeError("no luck")})
    async with mem_runtime() as observer:
        with pytest.raises(Unknown, match="RuntimeError: no luck") as raised:
            await make(engine).run()
        assert isinstance(raised.value.__cause__, RuntimeError)
        assert await keys(observer) == []
    assert engine.calls == [*UP[: UP.index(hook) + 1], "cleanup"]


async def test_a_typed_failure_stays_what_it_is() -> None:
    engine = Recorder(fail={"start": EngineShutdown("out of memory"), "cleanup": RuntimeError("and this")})
    with pytest.raises(EngineShutdown, match="out of memory"):
        await make(engine).run()
    assert engine.calls == ["start", "cleanup"]


async def test_nothing_is_registered_when_on_endpoint_ready_is_called() -> None:
    engine = Recorder(hold={"on_endpoint_ready": asyncio.Event()})
    async with mem_runtime() as observer:
        task = asyncio.create_task(make(engine).run())
        await engine.inside("on_endpoint_ready").wait()
        assert await keys(observer) == []
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert engine.calls[-1] == "cleanup"


class BrokenDiscovery(MemoryDiscovery):
    """Refuses to write into one bucket."""

    def __init__(self, bucket: str) -> None:
        super().__init__(MemoryHub())
        self._bucket = bucket

    async def put(self, key: str, value: bytes) -> None:
        if key.startswith(self._bucket):
            raise OSError("the store is full")
        await super().put(key, value)


async def test_a_failed_model_registration_is_cleaned_up_without_a_drain() -> None:
    engine = Recorder()
    async with mem_runtime(discovery=BrokenDiscovery(MODEL_CARDS)) as runtime:
        with pytest.raises(Unknown, match="model attach: the store is full"):
            await make(engine, runtime=runtime).run()
    assert engine.calls == [*UP[:5], "cleanup"]


async def test_a_failed_instance_registration_goes_the_long_way_down() -> None:
    engine = Recorder()
    async with mem_runtime(discovery=BrokenDiscovery(INSTANCES)) as runtime:
        with pytest.raises(Unknown, match="serve: the store is full"):
            await make(engine, runtime=runtime).run()
        assert await keys(runtime) == []
    assert engine.calls == [*UP, *DOWN]


@each_case(
    ("engine", "members"),
    [
        (Recorder(), {"model_input": ModelInput.Text}),
        (Recorder(), {"model_input": ModelInput.Tensor}),
        (RawRecorder(), {"model_input": ModelInput.Tokens}),
        (Recorder(), {"disaggregation_mode": DisaggregationMode.DECODE, "route_to_encoder": True}),
        (Recorder(), {"disaggregation_mode": DisaggregationMode.ENCODE, "route_to_encoder": True}),
        (object(), {}),
        (Recorder(), {"namespace": "a.b"}),
        (Recorder(), {"endpoint": ""}),
        (Recorder(), {"tool_call_parser": "zeus"}),
        (Recorder(), {"reasoning_parser": "hermes"}),
    ],
)
async def test_a_configuration_that_does_not_fit_touches_nothing(engine: Any, members: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        await make(engine, **members).run()
    assert getattr(engine, "calls", []) == []


@each_case("name", ["tekken.json", "tokenizer.model"])
async def test_a_tokenizer_that_is_not_read_is_refused_before_the_engine_starts(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name.partition(".")[0]
    folder.mkdir()
    (folder / name).touch()
    engine = Recorder()
    with pytest.raises(InvalidArgument, match=f"{re.escape(repr(str(folder)))} has its tokenizer in {name} alone"):
        await make(engine, model_name=str(folder)).run()
    assert engine.calls == []


async def test_an_unknown_parser_is_told_those_there_are() -> None:
    with pytest.raises(InvalidArgument, match=r"tool_call_parser must be one of .*hermes, .*got 'zeus'"):
        await make(Recorder(), tool_call_parser="zeus").run()


async def test_a_mistyped_parser_is_told_near_names() -> None:
    with pytest.raises(InvalidArgument, match=r"got 'deepseek_v31'; did you mean .*deepseek_v3_1"):
        await make(Recorder(), reasoning_parser="deepseek_v31").run()


@pytest.mark.process  # computes for seconds
async def test_what_cannot_be_reached_is_said_before_the_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_SERVER", "nats://127.0.0.1:1")
    engine = Recorder()
    with pytest.raises(CannotConnect, match="--request-plane nats"):
        await make(engine, request_plane="nats").run()
    assert engine.calls == []


async def test_an_unknown_plane_is_the_operators_mistake() -> None:
    with pytest.raises(InvalidArgument, match="request plane"):
        await make(Recorder(), request_plane="pigeon").run()


async def test_deprecated_fields_warn() -> None:
    with pytest.warns(DeprecationWarning, match="use_kv_events"):
        async with running(make(Recorder(), use_kv_events=True)):
            pass


# -- stops at every moment --------------------------------------------------------------------------------------------


class SlowDiscovery(MemoryDiscovery):
    def __init__(self) -> None:
        super().__init__(MemoryHub())
        self.entered = asyncio.Event()

    async def start(self) -> None:
        self.entered.set()
        await asyncio.Event().wait()


async def test_a_stop_before_the_runtime_is_there_never_starts_the_engine() -> None:
    engine, discovery = Recorder(), SlowDiscovery()
    runtime = DistributedRuntime(asyncio.get_running_loop(), "mem", "mem", discovery=discovery)
    worker = make(engine, runtime=runtime)
    task = asyncio.create_task(worker.run())
    await discovery.entered.wait()
    worker.request_stop()
    await asyncio.wait_for(task, PATIENCE_SECONDS)
    assert engine.calls == []
    assert worker.state is State.CLOSED
    await asyncio.wait_for(runtime.aclose(), PATIENCE_SECONDS)


class ParentRecorder(Recorder):
    """Has processes of its own."""

    has_child_processes = True


class AdapterRecorder(Recorder):
    """Loads adapters."""

    async def engine_update(self, update: str, body: dict[str, Any]) -> dict[str, Any]:
        await self.act("load")
        return {"status": "success"}


async def test_a_stop_while_the_guard_of_child_processes_starts_never_starts_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, entered, release = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def slow_guard() -> None:
        loop.call_soon_threadsafe(entered.set)
        release.wait(PATIENCE_SECONDS)

    monkeypatch.setattr("dynamo.worker.worker.guard_this_process", slow_guard)
    engine = ParentRecorder()
    worker = make(engine)
    task = asyncio.create_task(worker.run())
    await entered.wait()
    worker.request_stop()
    try:
        await asyncio.wait_for(task, PATIENCE_SECONDS)
    finally:
        release.set()
    assert engine.calls == []
    assert worker.state is State.CLOSED


async def test_a_stop_while_an_adapter_loads_ends_the_load_and_drains() -> None:
    engine = AdapterRecorder(give={"supported_updates": {"load_lora"}}, hold={"load": asyncio.Event()})
    worker = make(engine, loras=("a=file:///a",))
    task = asyncio.create_task(worker.run())
    await engine.inside("load").wait()
    worker.request_stop()
    await asyncio.wait_for(task, PATIENCE_SECONDS)
    assert engine.calls[-2:] == DOWN
    assert "load" not in engine.calls  # it did not return
    assert worker.state is State.CLOSED


@each_case("hook", ["start", "register_prometheus", "kv_event_sources", "on_endpoint_ready"])
async def test_a_stop_during_start_or_set_up_lets_the_step_finish_and_never_serves(hook: str) -> None:
    engine = Recorder(hold={hook: asyncio.Event()})
    worker = make(engine)
    async with mem_runtime() as observer:
        task = asyncio.create_task(worker.run())
        await engine.inside(hook).wait()
        worker.request_stop()
        worker.request_stop()
        await asyncio.sleep(0)
        assert not task.done()
        engine.hold[hook].set()
        await asyncio.wait_for(task, PATIENCE_SECONDS)
        assert await keys(observer) == []
    assert hook in engine.calls
    assert engine.calls[-2:] == DOWN
    assert "health_check_payload" not in engine.calls
    assert worker.state is State.CLOSED


async def test_a_start_that_hangs_after_a_stop_is_cancelled_in_time_for_the_cleanup(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Recorder(hold={"start": asyncio.Event()})
    worker = make(engine, times=ShutdownTimes(grace_seconds=0.0, timeout_seconds=1))
    task = asyncio.create_task(worker.run())
    await engine.inside("start").wait()
    worker.request_stop()
    with pytest.raises(EngineShutdown, match=r"start\(\) had not returned 0.5s after"):
        await asyncio.wait_for(task, PATIENCE_SECONDS)
    assert engine.calls == ["cleanup"]
    assert worker.state is State.CLOSED
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING or record.exc_info]


async def test_a_timeout_of_the_engines_own_start_is_its_own_failure() -> None:
    engine = Recorder(fail={"start": TimeoutError("no answer from the device")})
    with pytest.raises(DynamoException, match="no answer from the device"):
        await make(engine).run()
    assert engine.calls == ["start", "cleanup"]


async def test_a_start_that_fails_after_a_stop_reports_its_failure() -> None:
    engine = Recorder(hold={"start": asyncio.Event()}, fail={"start": RuntimeError("no luck")})
    worker = make(engine)
    task = asyncio.create_task(worker.run())
    await engine.inside("start").wait()
    worker.request_stop()
    engine.hold["start"].set()
    with pytest.raises(Unknown, match="no luck"):
        await task
    assert engine.calls == ["start", "cleanup"]


@pytest.mark.parametrize("hook", ["start", "on_endpoint_ready", "serving"])
async def test_a_cancelled_run_is_cleaned_up_once(hook: str) -> None:
    engine = Recorder(hold={hook: asyncio.Event()})
    worker = make(engine)
    async with mem_runtime() as observer:
        task = asyncio.create_task(worker.run())
        await (worker.wait_serving() if hook == "serving" else engine.inside(hook).wait())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await keys(observer) == []
    assert engine.calls.count("cleanup") == 1
    assert worker.state is State.CLOSED


@pytest.mark.parametrize("moment", ["grace", "drain"])
async def test_a_run_that_is_cancelled_on_its_way_down_still_cleans_up_once(
    moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Recorder(hold={moment: asyncio.Event()})
    grace = 60.0 if moment == "grace" else 0.0
    worker = make(engine, times=ShutdownTimes(grace_seconds=grace))
    async with mem_runtime() as observer:
        with caplog.at_level(logging.INFO):
            task = asyncio.create_task(worker.run())
            await worker.wait_serving()
            worker.request_stop()
            if moment == "drain":
                await engine.inside("drain").wait()
            while moment == "grace" and "Grace period" not in caplog.text:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, PATIENCE_SECONDS)
        assert await keys(observer) == []
    assert engine.calls.count("cleanup") == 1
    assert ("drain" in engine.calls) is (moment == "grace")  # the one that was cancelled had begun
    assert worker.state is State.CLOSED


@each_case("hook", ["start", "on_endpoint_ready", "health_check_payload", "drain", "cleanup"])
async def test_a_cancellation_of_the_engines_own_is_a_failure_like_any_other(
    hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    # `task.cancel(); await task` is what many an engine's hook ends with.
    engine = Recorder(fail={hook: asyncio.CancelledError()})
    if hook in ("start", "on_endpoint_ready"):
        with pytest.raises(Unknown, match="CancelledError: the engine awaited a task that was cancelled"):
            await make(engine).run()
    else:
        async with running(make(engine)):
            pass
        assert f"{hook}() failed" in caplog.text or f"engine {hook} failed" in caplog.text
        assert engine.calls[-2:] == DOWN
    assert engine.calls.count("cleanup") == 1


async def test_a_stop_during_the_last_question_publishes_no_instance() -> None:
    engine = Recorder(hold={"health_check_payload": asyncio.Event()})
    seen: list[list[str]] = []
    async with mem_runtime() as observer, observer.discovery.watch(INSTANCES) as changes:
        worker = make(engine)
        task = asyncio.create_task(worker.run())
        await engine.inside("health_check_payload").wait()
        worker.request_stop()
        engine.hold["health_check_payload"].set()
        await asyncio.wait_for(task, PATIENCE_SECONDS)
        await observer.discovery.put(f"{INSTANCES}/end", b"{}")
        async for batch in changes:
            seen.append([change.key for change in batch])
            if f"{INSTANCES}/end" in seen[-1]:
                break
    assert seen == [[], [f"{INSTANCES}/end"]]
    assert engine.calls[-2:] == DOWN


async def test_a_stop_that_comes_before_a_failing_connection_is_not_a_failure() -> None:
    engine = Recorder()
    worker = make(engine, discovery_backend="kubernetes")
    worker.request_stop()
    await worker.run()
    assert (engine.calls, worker.state) == ([], State.CLOSED)


async def test_the_end_of_the_runtime_is_the_end_of_the_worker() -> None:
    engine, opened = Recorder(), list[asyncio.Task[dict[str, bytes]]]()
    runtime = DistributedRuntime(asyncio.get_running_loop(), "mem", "mem")
    async with running(make(engine, runtime=runtime)) as task:
        # The clean-up may still want to write: discovery stays until it is over.
        engine.on["cleanup"] = lambda: opened.append(asyncio.create_task(runtime.discovery.get_prefix(INSTANCES)))
        runtime.shutdown()
        await asyncio.wait_for(task, PATIENCE_SECONDS)
    assert engine.calls == [*UP, *DOWN]
    assert await opened[0] == {}
    await asyncio.wait_for(runtime.aclose(), PATIENCE_SECONDS)


async def test_a_runtime_that_is_shut_down_while_its_worker_starts_serves_nothing() -> None:
    engine = Recorder(hold={"start": asyncio.Event()})
    runtime = DistributedRuntime(asyncio.get_running_loop(), "mem", "mem")
    task = asyncio.create_task(make(engine, runtime=runtime).run())
    await engine.inside("start").wait()
    runtime.shutdown()
    engine.hold["start"].set()
    with pytest.raises(Unknown, match="the runtime is shutting down"):
        await asyncio.wait_for(task, PATIENCE_SECONDS)
    assert engine.calls[-2:] == DOWN
    await asyncio.wait_for(runtime.aclose(), PATIENCE_SECONDS)


async def test_a_shared_runtime_outlives_the_worker_and_keeps_nothing_of_it() -> None:
    async with mem_runtime() as runtime:
        for _ in range(2):  # the second one finds every place free again
            engine = Recorder(give={"supported_controls": {"sleep"}})
            async with running(make(engine, runtime=runtime)):
                assert len(await keys(runtime)) == 2
                assert "control/sleep" in runtime.status_server.route_names
            assert await keys(runtime) == []
            assert runtime.status_server.route_names == []
        async with running(make(Recorder(), runtime=runtime)):
            assert runtime.health.system_ready()


# -- the way down -----------------------------------------------------------------------------------------------------


async def test_streams_in_flight_are_finished_before_drain_and_cleanup() -> None:
    engine = Recorder()
    engine.step = asyncio.Semaphore(2)
    async with mem_runtime() as runtime:
        worker = make(engine)
        async with running(worker) as task:
            stream = await open_stream(runtime, tokens=6)
            await engine.inside("generate").wait()
            worker.request_stop()
            while await runtime.discovery.get_prefix(INSTANCES):
                await asyncio.sleep(0.005)
            for _ in range(4):
                engine.step.release()
            assert await read(stream) == [0, 1, 2, 3, 4, 5]
            await asyncio.wait_for(task, PATIENCE_SECONDS)
    assert engine.calls[-4:] == ["generate", "closed", *DOWN]
    assert "abort" not in engine.calls


async def test_a_request_that_was_routed_before_is_served_during_the_grace_period() -> None:
    engine = Recorder()
    async with mem_runtime() as runtime:
        worker = make(engine, times=ShutdownTimes(grace_seconds=0.4, timeout_seconds=30))
        async with running(worker):
            client = await runtime.endpoint("ns.backend.generate").client("round-robin")
            await client.wait_for_instances()
            context = Context()
            instance = client.pick(context)
            worker.request_stop()
            while await runtime.discovery.get_prefix(INSTANCES):
                await asyncio.sleep(0.005)
            assert "drain" not in engine.calls
            body = {"token_ids": [1], "stop_conditions": {"max_tokens": 3}}
            assert await read(await client.open(instance, body, context)) == [0, 1, 2]
            assert "drain" not in engine.calls


async def test_what_outlives_the_wait_is_cut_as_engine_shutdown_and_aborted_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Recorder()
    engine.step = asyncio.Semaphore(1)  # one token, then nothing
    async with mem_runtime() as runtime:
        worker = make(engine, times=ShutdownTimes(grace_seconds=0.0, timeout_seconds=5))
        async with running(worker) as task:
            stream = await open_stream(runtime, tokens=6)
            assert (await stream.next_batch())[0].token_ids == [0]
            worker.request_stop()
            with pytest.raises(EngineShutdown):
                await asyncio.wait_for(stream.next_batch(), PATIENCE_SECONDS)
            stream.close()
            await asyncio.wait_for(task, PATIENCE_SECONDS)
    assert engine.calls.count("abort") == 1
    assert engine.calls.count("cleanup") == 1
    assert "1 streams were still running and were cut" in caplog.text


class Interrupted(Recorder):
    """An engine whose processes end with the worker's: what runs raises then."""

    ends: asyncio.Event

    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        self.play("generate")
        yield {"token_ids": [0], "index": 0}
        await self.ends.wait()
        raise RuntimeError("the core of the engine is gone")

    async def abort(self, context: Context) -> None:
        self.ends.set()


@pytest.mark.parametrize("is_cut", [False, True])
async def test_what_a_planned_stop_interrupts_is_no_error_in_the_log(
    is_cut: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = Interrupted()
    engine.ends = asyncio.Event()
    async with mem_runtime() as runtime:
        worker = make(engine, times=ShutdownTimes(grace_seconds=0.0, timeout_seconds=5 if is_cut else 60))
        async with running(worker) as task:
            stream = await open_stream(runtime, tokens=6)
            assert (await stream.next_batch())[0].token_ids == [0]
            worker.request_stop()
            if not is_cut:
                engine.ends.set()
            with pytest.raises(EngineShutdown if is_cut else Unknown):
                await asyncio.wait_for(stream.next_batch(), PATIENCE_SECONDS)
            stream.close()
            await asyncio.wait_for(task, PATIENCE_SECONDS)
    assert "was interrupted: RuntimeError: the core of the engine is gone" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]


async def test_failures_on_the_way_down_do_not_stop_it(caplog: pytest.LogCaptureFixture) -> None:
    engine = Recorder(fail={"drain": RuntimeError("no"), "cleanup": RuntimeError("no")})
    async with running(make(engine)):
        pass
    assert engine.calls[-2:] == DOWN
    assert "engine drain failed" in caplog.text
    assert "engine cleanup failed" in caplog.text


async def test_a_store_that_is_gone_does_not_stop_the_way_down(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Recorder()
    async with mem_runtime() as runtime:

        async def gone(key: str) -> None:
            raise OSError("the store is gone")

        async with running(make(engine, runtime=runtime)):
            monkeypatch.setattr(runtime.discovery, "delete", gone)
        monkeypatch.undo()
        assert runtime.served("ns.backend.generate") is None  # a shared runtime must not keep a dead engine
    assert engine.calls[-2:] == DOWN
    assert "discovery unregister failed: the store is gone" in caplog.text


@each_case("mode", DisaggregationMode)
async def test_quiescence_is_asked_of_prefill_workers_only(mode: DisaggregationMode) -> None:
    engine = QuiescenceRecorder(give={"is_quiescent": True})
    async with running(make(engine, disaggregation_mode=mode)):
        pass
    assert engine.calls.count("is_quiescent") == (1 if mode is DisaggregationMode.PREFILL else 0)
    assert engine.calls.count("drain") == 1


async def test_an_engine_that_does_not_override_it_is_not_polled(caplog: pytest.LogCaptureFixture) -> None:
    engine = Recorder()
    async with running(make(engine, disaggregation_mode=DisaggregationMode.PREFILL)):
        pass
    assert "quiescent" not in caplog.text


@each_case("answer", [False, None, 1, RuntimeError("unknown")])
async def test_an_engine_that_is_never_quiescent_uses_up_its_budget(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plan = {"fail" if isinstance(answer, Exception) else "give": {"is_quiescent": answer}}
    engine = QuiescenceRecorder(**plan)
    times = ShutdownTimes(grace_seconds=0.0, prefill_drain_seconds=0.05)
    with caplog.at_level(logging.INFO):
        async with running(make(engine, times=times, disaggregation_mode=DisaggregationMode.PREFILL)):
            pass
    assert engine.calls.count("is_quiescent") == 2  # at once, and when the time is up
    assert caplog.text.count("not quiescent") == 1
    assert "drain: timed out at 0.1s" in caplog.text or "drain: timed out at 0.0s" in caplog.text


# -- what others see --------------------------------------------------------------------------------------------------


async def test_the_card_says_what_engine_and_operator_said() -> None:
    engine = Recorder(context_length=4096, kv_cache_block_size=32, total_kv_blocks=7, model_aliases=["alias"])
    async with mem_runtime() as observer, running(make(engine, served_model_name="served", reasoning_parser="qwen3")):
        (record,) = (await observer.discovery.get_prefix(MODEL_CARDS)).values()
    card = decode_model_record(record).card
    assert (card.display_name, card.aliases, card.source_path) == ("served", ["alias"], "m")
    assert (card.context_length, card.kv_cache_block_size, card.runtime_config.total_kv_blocks) == (4096, 32, 7)
    assert card.role is WorkerType.Aggregated
    assert card.runtime_config.reasoning_parser == "qwen3"


@each_case(
    ("operator", "engine_name", "expected"),
    [("a", "b", "a"), (None, "b", "b"), (None, None, "m"), ("", "", "m"), ("", "b", "b")],
)
async def test_the_served_name_is_the_operators_then_the_engines_then_the_models(
    operator: str | None, engine_name: str | None, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Recorder(served_model_name=engine_name)
    with caplog.at_level(logging.INFO):
        async with mem_runtime() as observer, running(make(engine, served_model_name=operator)):
            (record,) = (await observer.discovery.get_prefix(MODEL_CARDS)).values()
    assert decode_model_record(record).card.display_name == expected
    assert f"Serving {expected} on ns.backend.generate" in caplog.text


async def test_lifecycle_gauges_need_no_help_of_the_engine() -> None:
    engine = Recorder(give={"component_metrics_dp_ranks": [0, 1]}, served_model_name="served")
    publishers: list[Any] = []
    engine.on["attach_snapshot_publisher"] = publishers.append
    async with mem_runtime() as runtime:
        async with running(make(engine, runtime=runtime)):
            text = runtime.metrics.expose().decode()
            labels = f'worker_id="{engine.worker_id:x}",model="m",model_name="served"'
            for name in ("model_load", "drain", "cleanup"):
                assert f"dynamo_component_{name}_time_seconds{{" in text
            assert labels in text
            assert f'{labels},dp_rank="1"}} 0' in text
            assert "kv_cache_hit_rate" not in text
            publishers[0].publish(1, ComponentSnapshot(1, 9, 0.5, 1, 0.0))
            text = runtime.metrics.expose().decode()
            assert 'dynamo_component_total_blocks{dynamo_namespace="ns"' in text
            assert f'{labels},dp_rank="1"}} 9' in text
        text = runtime.metrics.expose().decode()
        for name in ("drain", "cleanup"):
            (line,) = [each for each in text.splitlines() if f"{name}_time_seconds{{" in each]
            assert float(line.rpartition(" ")[2]) > 0


async def test_readiness_goes_first_and_does_not_come_back() -> None:
    engine, ready = Recorder(), list[bool]()

    def watch(endpoint: Any) -> None:
        for hook in ("health_check_payload", "drain", "cleanup"):
            engine.on[hook] = lambda: ready.append(endpoint.runtime.health.system_ready())
        # A word of the engine's own does not outlast the stop either.
        endpoint.runtime.set_health_status(True)

    engine.on["on_endpoint_ready"] = watch
    async with running(make(engine)):
        pass
    assert ready == [True, False, False]


async def test_without_kv_routing_only_the_metrics_are_connected() -> None:
    engine = Recorder(give={"component_metrics_dp_ranks": [0], "kv_event_sources": ["never asked"]})
    async with running(make(engine, enable_kv_routing=False)):
        pass
    assert "register_prometheus" in engine.calls
    assert not {"kv_event_sources", "attach_snapshot_publisher"} & set(engine.calls)


async def test_kv_sources_without_a_block_size_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    ready: list[Any] = []
    engine = Recorder(give={"kv_event_sources": [PushSource(ready.append)]})
    async with running(make(engine)):
        pass
    assert ready == []
    assert "kv_cache_block_size is not set" in caplog.text


async def test_a_push_source_gets_its_publisher_and_keeps_it_until_after_the_cleanup() -> None:
    ready: list[Any] = []
    engine = Recorder(give={"kv_event_sources": [PushSource(ready.append, dp_rank=3)]}, kv_cache_block_size=4)
    closed_at_cleanup: list[bool] = []
    engine.on["cleanup"] = lambda: closed_at_cleanup.append(ready[0]._outbox._is_closed)
    async with running(make(engine)):
        assert len(ready) == 1
        ready[0].publish_stored([1, 2, 3, 4], [4], [1])
    assert closed_at_cleanup == [False]
    assert ready[0]._outbox._is_closed


@each_case("sources", [(), {"a": 1}, [object()], ["x"]])
async def test_sources_that_are_none_fail_the_start_up(sources: Any) -> None:
    engine = Recorder(give={"kv_event_sources": sources or ("not a list",)})
    with pytest.raises(Unknown, match=r"TypeError: kv_event_sources\(\)"):
        await make(engine).run()
    assert engine.calls[-1] == "cleanup"


async def test_controls_take_the_worker_out_of_discovery_and_bring_it_back() -> None:
    engine = Recorder(give={"supported_controls": {"sleep", "wake_up"}})
    async with mem_runtime() as runtime:
        async with running(make(engine, runtime=runtime)):

            async def post(route: str, body: Any) -> tuple[int, Any]:
                reply = await runtime.status_server.answer("POST", f"/engine/{route}", json.dumps(body).encode())
                return reply.status, json.loads(reply.body)

            assert await post("control/sleep", {}) == (200, {"status": "ok"})
            assert await runtime.discovery.get_prefix(INSTANCES) == {}
            assert await post("control/wake_up", {}) == (200, {"status": "ok"})
            assert len(await runtime.discovery.get_prefix(INSTANCES)) == 1
            assert await post("update/model_taints", {"taints": ["b", "a"]}) == (
                200,
                {"status": "ok", "taints": ["a", "b"]},
            )
            (record,) = (await runtime.discovery.get_prefix(MODEL_CARDS)).values()
            assert decode_model_record(record).card.runtime_config.taints == {"a", "b"}
            status, body = await post("control/sleep", [])
            assert (status, body["status"]) == (200, "error")
            assert runtime.health.system_ready()
        assert engine.calls.count("control sleep") == 1


async def test_admin_routes_are_refused_while_the_worker_comes_up_and_goes_down() -> None:
    engine = Recorder(
        give={"supported_controls": {"sleep"}}, hold={"health_check_payload": asyncio.Event(), "drain": asyncio.Event()}
    )
    async with mem_runtime() as runtime:
        worker = make(engine, runtime=runtime)

        async def sleep() -> str:
            reply = await runtime.status_server.answer("POST", "/engine/control/sleep", b"")
            return str(json.loads(reply.body).get("message"))

        task = asyncio.create_task(worker.run())
        await engine.inside("health_check_payload").wait()
        assert (await sleep()).endswith("starting")
        engine.hold["health_check_payload"].set()
        await worker.wait_serving()
        worker.request_stop()
        await engine.inside("drain").wait()
        assert (await sleep()).endswith("shutting down")
        engine.hold["drain"].set()
        await task
    assert "control sleep" not in engine.calls


async def test_a_raw_engine_has_a_name_a_stream_and_no_routes_of_its_own() -> None:
    engine = RawRecorder()
    async with (
        mem_runtime() as runtime,
        running(
            make(engine, runtime=runtime, model_input=ModelInput.Text, endpoint_types="images", model_name="not/asked")
        ),
    ):
        assert runtime.status_server.route_names == ["drain", "resume", "status"]
        (record,) = (await runtime.discovery.get_prefix(MODEL_CARDS)).values()
        card = decode_model_record(record).card
        assert (card.is_name_only, card.model_type, card.model_input) == (True, "Images", "Text")
        client = await runtime.endpoint("ns.backend.generate").client("round-robin")
        answer = await client.generate({"prompt": "x"}, annotated=False)
        assert [item async for item in answer] == [{"echo": {"prompt": "x"}}]
    assert "kv_event_sources" not in engine.calls


async def test_the_canary_comes_from_operator_environment_or_engine_in_that_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def probe_of(**members: Any) -> tuple[Any, list[str]]:
        engine = Recorder(give={"health_check_payload": {"from": "engine"}})
        async with mem_runtime() as runtime, running(make(engine, runtime=runtime, **members)):
            served = runtime.served("ns.backend.generate")
            assert served is not None
            return served.health_check_payload, engine.calls

    marked = {"_HEALTH_CHECK": True}
    payload, calls = await probe_of()
    assert payload == {"from": "engine"} | marked
    assert "health_check_payload" in calls
    monkeypatch.setenv("DYN_HEALTH_CHECK_PAYLOAD", '{"from": "environment"}')
    payload, calls = await probe_of()
    assert payload == {"from": "environment"} | marked
    assert "health_check_payload" not in calls
    payload, calls = await probe_of(health_check_payload={"from": "operator"})
    assert payload == {"from": "operator"} | marked


async def test_the_rl_directory_needs_the_status_server_and_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Recorder(give={"supported_updates": {"weights"}})
    with pytest.raises(InvalidArgument, match="DYN_SYSTEM_PORT"):
        await make(engine, enable_rl=True).run()
    assert engine.calls[-2:] == DOWN
    monkeypatch.setenv("DYN_SYSTEM_PORT", "0")
    monkeypatch.setenv("DYN_SYSTEM_HOST", "127.0.0.1")
    async with mem_runtime() as runtime:
        async with running(make(engine := Recorder(), runtime=runtime, enable_rl=True)):
            client = await runtime.endpoint("ns.backend.rl").client("round-robin")
            answer = [item async for item in await client.generate({"method": "routes"}, annotated=False)]
            assert answer[0]["base_url"] == runtime.system_status_server_url()
            assert answer[0]["routes"] == ["/engine/update/model_taints"]
        assert await keys(runtime) == []


async def test_the_rl_directory_names_the_admin_port_and_is_refused_where_no_engine_route_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DYN_SYSTEM_PORT", "0")
    monkeypatch.setenv("DYN_SYSTEM_HOST", "0.0.0.0")
    with pytest.raises(InvalidArgument, match="DYN_ADMIN_PORT"):
        await make(Recorder(), enable_rl=True).run()
    monkeypatch.setenv("DYN_ADMIN_PORT", "0")
    async with mem_runtime() as runtime, running(make(Recorder(), runtime=runtime, enable_rl=True)):
        client = await runtime.endpoint("ns.backend.rl").client("round-robin")
        answer = [item async for item in await client.generate({"method": "routes"}, annotated=False)]
        assert answer[0]["base_url"] == runtime.status_server.admin_url != runtime.system_status_server_url()


# -- signals, run and the environment ---------------------------------------------------------------------------------


@pytest.fixture
def _own_logging() -> Iterator[None]:
    """A worker that is a process of its own configures the root logger; put it back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.mark.usefixtures("_own_logging")
async def test_an_engine_may_not_take_sigterm_while_its_worker_runs() -> None:
    loop = asyncio.get_running_loop()
    engine = Recorder()
    engine.on["start"] = lambda: loop.add_signal_handler(signal.SIGTERM, engine.calls.append, "engine's handler")
    worker = Worker(engine, config(), times=QUICK, force_exit=lambda _: None)
    task = asyncio.create_task(worker.run())
    await worker.wait_serving()
    signal.raise_signal(signal.SIGTERM)
    await asyncio.wait_for(task, PATIENCE_SECONDS)
    assert "engine's handler" not in engine.calls
    assert engine.calls[-2:] == DOWN


@each_case(
    ("value", "grace"), [("", 5.0), ("0", 0.0), ("1.5", 1.5), ("-3", 0.0), ("soon", 5.0), ("nan", 5.0), (None, 5.0)]
)
def test_the_grace_period_is_read_leniently(value: str | None, grace: float) -> None:
    env = {} if value is None else {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": value}
    assert shutdown_times(env).grace_seconds == grace


@each_case(("value", "timeout"), [("", 30), ("7", 7), ("7.5", 30), ("x", 30)])
def test_the_timeout_is_a_whole_number_of_seconds(value: str, timeout: int) -> None:
    assert shutdown_times({"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": value}).timeout_seconds == timeout


@each_case(("value", "budget"), [("", 30.0), ("inf", 30.0), ("-1", 0.0), ("2.5", 2.5)])
def test_the_prefill_drain_budget_is_read_leniently(value: str, budget: float) -> None:
    assert shutdown_times({"DYN_PREFILL_DRAIN_TIMEOUT_S": value}).prefill_drain_seconds == budget


def test_a_factory_replaces_from_args_and_gets_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Recorder()
    seen: list[Any] = []

    class StandIn:
        def __init__(self, *args: Any, **_options: Any) -> None:
            seen.append(args)

        async def run(self, *args: Any) -> None:
            seen.append(args)

    async def factory(argv: list[str] | None) -> tuple[Any, WorkerConfig]:
        seen.append(argv)
        return engine, wanted

    wanted = config()
    monkeypatch.setattr(run_module, "Worker", StandIn)
    run_module.run(Recorder, ["--x"], factory)
    assert seen == [["--x"], (engine, wanted), ()]


def test_a_failed_worker_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class StandIn:
        def __init__(self, *args: Any, **_options: Any) -> None:
            pass

        async def run(self) -> None:
            raise CannotConnect("no store at x")

    monkeypatch.setattr(run_module, "Worker", StandIn)
    with pytest.raises(SystemExit) as left:
        run_module.run(Recorder)
    assert left.value.code == 1
    assert capsys.readouterr().err == "CannotConnect: no store at x\n"


def test_run_warns_about_threads_that_keep_the_process_alive(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import threading

    release = threading.Event()

    class StandIn:
        def __init__(self, *args: Any, **_options: Any) -> None:
            pass

        async def run(self) -> None:
            threading.Thread(target=release.wait, name="forgotten").start()

    monkeypatch.setattr(run_module, "Worker", StandIn)
    run_module.run(Recorder)
    release.set()
    assert "forgotten" in caplog.text


def test_names_that_tests_of_the_native_system_import() -> None:
    assert _coerce_disagg_mode(None) is DisaggregationMode.AGGREGATED
    assert _to_rust_disaggregation_mode(DisaggregationMode.DECODE) == 3


async def test_a_raw_engines_controls_are_served() -> None:
    class Administered(RawRecorder):
        def supported_controls(self) -> set[str]:
            return {"flush"}

        async def engine_control(self, control: str, body: dict[str, Any]) -> dict[str, Any]:
            return {"status": "ok", "done": control}

    async with mem_runtime() as runtime, running(make(Administered(), runtime=runtime, model_input=ModelInput.Text)):
        assert "control/flush" in runtime.status_server.route_names
        reply = await runtime.status_server.answer("POST", "/engine/control/flush", b"{}")
        assert json.loads(reply.body) == {"status": "ok", "done": "flush"}
