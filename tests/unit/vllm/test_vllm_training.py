"""What a trainer and a scaler do with vLLM, without vLLM: the calls that reach it, and the answers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dynamo.vllm.adapters import AdapterLimits
from dynamo.vllm.engine import VllmEngine
from dynamo.vllm.operations import VllmOperations
from dynamo.vllm.training import KEPT_ADAPTERS, MUST_PAUSE, NO_TENSORS, VllmTraining
from support.cases import each_case
from support.demo_model import FILES
from support.frontend_cluster import memory_runtime
from support.patience import PATIENCE_SECONDS

ELASTIC = {"enable_elastic_ep": True, "data_parallel_backend": "ray"}
PAUSE: tuple[str, dict[str, Any]] = ("pause_generation", {"mode": "keep", "clear_cache": False})
RESUME: tuple[str, dict[str, Any]] = ("resume_generation", {})


class Client:
    """Answers as `AsyncLLM` does, and writes down what it gets."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.errored = False
        self.is_in_use = False
        self.scaling: asyncio.Future[None] | None = None

    async def pause_generation(self, **given: Any) -> None:
        self.calls.append(("pause_generation", given))

    async def resume_generation(self) -> None:
        self.calls.append(("resume_generation", {}))

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.calls.append(("reset_prefix_cache", {"running": reset_running_requests}))
        return not self.is_in_use

    async def collective_rpc(self, method: str, *, kwargs: dict[str, Any]) -> None:
        self.calls.append((method, kwargs))
        if method == "unknown":
            raise AttributeError("no such method")

    async def abort(self, request_ids: list[str]) -> None:
        self.calls.append(("abort", {"ids": request_ids}))

    async def add_lora(self, _request: Any) -> bool:
        return True

    async def scale_elastic_ep(self, size: int) -> None:
        self.calls.append(("scale_elastic_ep", {"size": size}))
        if self.scaling is not None:
            await self.scaling


class Rig:
    """The routes of a trainer at one engine."""

    def __init__(self, model: str = "name") -> None:
        self.client, self.aborted = Client(), list[str]()
        self.operations = VllmOperations(
            self.client, self.step, model=model, limits=AdapterLimits(2, "--max-cpu-loras", 8)
        )
        self.routes = VllmTraining(self.client, self.operations, self.abort).routes()

    async def step(self) -> None:
        self.client.calls.append(("step", {}))

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def post(self, name: str, body: object) -> dict[str, Any]:
        return await self.routes[name](body)


def error(message: str) -> dict[str, Any]:
    return {"status": "error", "message": message}


@each_case(
    ("name", "body", "answer", "calls"),
    [
        ("liveness_probe", {}, {"status": "ok", "alive": True}, []),
        (
            "pause_generation", {},
            {"status": "ok", "message": "Engine paused", "mode": "keep", "clear_cache": False}, [PAUSE],
        ),
        (
            "pause_generation", {"mode": "abort", "clear_cache": True},
            {"status": "ok", "message": "Engine paused", "mode": "abort", "clear_cache": True},
            [("pause_generation", {"mode": "abort", "clear_cache": True})],
        ),
        ("pause_generation", {"mode": "x"}, error("mode must be one of keep, wait, abort, got 'x'"), []),
        ("pause_generation", {"clear_cache": 1}, error("clear_cache must be true or false, got 1"), []),
        ("pause_generation", {"level": 1}, error("unknown field 'level'; known are clear_cache, mode"), []),
        ("resume_generation", {}, {"status": "ok", "message": "Engine resumed"}, [RESUME]),
        (
            "flush_cache", {}, {"status": "ok", "message": "Cache flushed"},
            [("reset_prefix_cache", {"running": False}), ("step", {})],
        ),
        ("get_weight_version", {}, {"status": "ok", "version": None, "version_declared": False}, []),
        ("set_weight_version", {}, error("Missing required field: weight_version"), []),
        ("set_weight_version", {"weight_version": 7}, error("weight_version must be a string, got 7"), []),
        ("abort_request", {}, error("Missing required field: request_id"), []),
        ("update_weights_from_disk", {"model_path": "x"}, error(MUST_PAUSE), []),
        ("update_weights_from_distributed", {}, error(MUST_PAUSE), []),
        (
            "update_weights_from_distributed", {"allow_unpaused": True},
            error("allow_unpaused needs reset_prefix_cache false: requests that run use the cache"), [],
        ),
        (
            "update_weights_from_distributed",
            {"allow_unpaused": True, "reset_prefix_cache": False, "weight_version": "7", "path": "p"},
            {"status": "ok", "version": "7", "version_declared": True}, [("update_weights_from_path", {"path": "p"})],
        ),
        ("update_weights_from_tensor", {"anything": 1}, error(NO_TENSORS), []),
        ("init_weights_update_group", {"host": "h", "port": 1}, {"status": "ok"}, [("init_broadcaster", {"host": "h", "port": 1})]),
        ("destroy_weights_update_group", {}, {"status": "ok"}, [("destroy_broadcaster", {})]),
        ("init_weights_update_group", {"engine_rpc": "join", "rank": 2}, {"status": "ok"}, [("join", {"rank": 2})]),
        ("init_weights_update_group", {"engine_rpc": "unknown"}, error("AttributeError: no such method"), [("unknown", {})]),
        ("init_weights_update_group", {"engine_rpc": "_private"}, error("engine_rpc must be the name of a method, got '_private'"), []),
        ("init_weights_update_group", {"engine_rpc": "a.b"}, error("engine_rpc must be the name of a method, got 'a.b'"), []),
    ],
)  # fmt: skip
async def test_a_route_of_a_trainer_answers(name: str, body: Any, answer: Any, calls: Any) -> None:
    rig = Rig()
    assert await rig.post(name, body) == answer
    assert rig.client.calls == calls


async def test_every_route_needs_an_object() -> None:
    rig = Rig()
    for name in rig.routes:
        bodies: list[Any] = [None, [], "text", 1]
        for body in bodies:
            assert await rig.post(name, body) == error("request body must be a JSON object")
    assert (len(rig.routes), rig.client.calls) == (12, [])


async def test_a_request_is_ended_by_the_id_of_its_client_and_a_dead_engine_is_not_alive() -> None:
    rig = Rig()
    assert await rig.post("abort_request", {"request_id": "r"}) == {"status": "ok", "request_id": "r"}
    rig.client.errored = True
    assert await rig.post("liveness_probe", {}) == {"status": "ok", "alive": False}
    assert rig.aborted == ["r"]


async def test_a_cache_that_requests_use_is_not_flushed() -> None:
    rig = Rig()
    rig.client.is_in_use = True
    assert (await rig.post("flush_cache", {}))["status"] == "error"


async def test_weights_from_a_directory_need_a_pause_and_leave_no_block(tmp_path: Path) -> None:
    rig = Rig(str(FILES))
    await rig.post("pause_generation", {})
    body = {"model_path": str(FILES), "weight_version": "7", "engine_rpc": "read"}
    done = {"status": "ok", "version": "7", "version_declared": True}
    assert await rig.post("update_weights_from_disk", body) == done
    reset = ("reset_prefix_cache", {"running": True})
    assert rig.client.calls == [PAUSE, ("read", {"weights_path": str(FILES)}), reset]
    assert await rig.post("get_weight_version", {}) == done
    assert await rig.post("set_weight_version", {"weight_version": "8"}) == {"status": "ok", "version": "8"}
    assert (await rig.post("update_weights_from_disk", {"model_path": str(tmp_path)}))["status"] == "error"
    assert (await rig.post("get_weight_version", {}))["version"] == "8"  # nothing has changed
    undeclared = {"status": "ok", "version": None, "version_declared": False}
    assert await rig.post("update_weights_from_distributed", {}) == undeclared
    assert rig.client.calls[-2:] == [("update_weights_from_path", {}), reset]
    await rig.post("resume_generation", {})
    assert await rig.post("update_weights_from_disk", body) == error(MUST_PAUSE)


async def test_a_pause_that_keeps_requests_with_adapters_is_refused(tmp_path: Path) -> None:
    rig, place = Rig(), Place()
    adapters: Any = rig.operations.adapters
    adapters._make_request, adapters.endpoint = lambda *parts: parts, place
    (tmp_path / "adapter_config.json").write_text('{"r": 4}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    await adapters.load_lora({"lora_name": "A", "lora_path": str(tmp_path)})
    assert place.published == ["a"]
    with adapters.used(adapters.of({"model": "A"})):
        assert await rig.post("pause_generation", {}) == error(KEPT_ADAPTERS)
        assert (await rig.post("pause_generation", {"mode": "wait"}))["status"] == "ok"
    assert (await rig.post("pause_generation", {"mode": "keep"}))["status"] == "ok"


class Place:
    """A serving endpoint with a base model."""

    def __init__(self) -> None:
        self.published: list[str | None] = []

    async def published_model(self, suffix: str | None) -> dict[str, Any] | None:
        return {"display_name": "demo", "slug": "demo", "aliases": []} if suffix is None else None

    async def publish_model(self, _record: dict[str, Any], suffix: str | None) -> None:
        self.published.append(suffix)


async def test_the_routes_are_served_where_the_worker_is_one_for_a_trainer() -> None:
    for is_trained in (False, True):
        arguments: Any = SimpleNamespace(worker=SimpleNamespace(enable_rl=is_trained))
        engine: Any = VllmEngine(arguments)
        engine._started, engine._operations = SimpleNamespace(client=Client()), Rig().operations
        async with memory_runtime() as runtime:
            await engine.on_endpoint_ready(runtime.endpoint("ns.backend.generate"))
            assert ("pause_generation" in runtime.status_server.route_names) is is_trained


async def test_a_request_is_ended_under_the_ids_that_vllm_knows_it_by() -> None:
    arguments: Any = SimpleNamespace(worker=SimpleNamespace(enable_rl=True))
    engine: Any = VllmEngine(arguments)
    client = Client()
    engine._started, engine._running = SimpleNamespace(client=client), {"r": ["r-0", "r-1"]}
    await engine._abort_running("r")
    await engine._abort_running("unknown")
    assert client.calls == [("abort", {"ids": ["r-0", "r-1"]})]


# -- ranks --------------------------------------------------------------------------------------------------------------


def operations(client: Client, **parallel: Any) -> VllmOperations:
    async def nothing() -> None: ...

    return VllmOperations(client, nothing, parallel=SimpleNamespace(**parallel))


NOT_ENABLED = (
    "elastic EP scaling is not enabled on this worker; it requires enable_elastic_ep=true and data_parallel_backend=ray"
)


@each_case(
    ("body", "parallel", "answer"),
    [
        (
            {"new_data_parallel_size": 4}, ELASTIC,
            {"status": "ok", "message": "Scaled to data_parallel_size=4", "new_data_parallel_size": 4},
        ),
        ({}, ELASTIC, error("Missing required field: new_data_parallel_size")),
        ({"new_data_parallel_size": "4"}, ELASTIC, error("new_data_parallel_size must be an integer, got: 4")),
        ({"new_data_parallel_size": True}, ELASTIC, error("new_data_parallel_size must be an integer, got: True")),
        ({"new_data_parallel_size": 0}, ELASTIC, error("new_data_parallel_size must be >= 1, got: 0")),
        ({"new_data_parallel_size": 4}, {**ELASTIC, "enable_elastic_ep": False}, error(NOT_ENABLED)),
        ({"new_data_parallel_size": 4}, {**ELASTIC, "data_parallel_backend": "mp"}, error(NOT_ENABLED)),
        ({"new_data_parallel_size": 4}, {}, error(NOT_ENABLED)),
        ({"size": 4}, ELASTIC, error("unknown field 'size'; known are new_data_parallel_size")),
    ],
)  # fmt: skip
async def test_vllm_gets_more_ranks_where_it_was_started_for_it(body: Any, parallel: Any, answer: Any) -> None:
    made = operations(client := Client(), **parallel)
    assert await made.control("scale_elastic_ep", body) == answer
    assert client.calls == ([("scale_elastic_ep", {"size": 4})] if answer["status"] == "ok" else [])
    assert made.experts.failure == ""


async def test_a_second_scale_is_refused_while_one_runs() -> None:
    client = Client()
    client.scaling = asyncio.get_running_loop().create_future()
    made = operations(client, **ELASTIC)
    first = asyncio.create_task(made.control("scale_elastic_ep", {"new_data_parallel_size": 4}))
    while not client.calls:
        await asyncio.sleep(0)
    refused = await made.control("scale_elastic_ep", {"new_data_parallel_size": 8})
    assert refused == error(
        "A scale_elastic_ep operation is already in progress; rejecting concurrent request for new_data_parallel_size=8"
    )
    client.scaling.set_result(None)
    assert (await first)["status"] == "ok"
    client.scaling = None
    assert (await made.control("scale_elastic_ep", {"new_data_parallel_size": 8}))["status"] == "ok"


async def test_a_scale_that_fails_ends_the_worker() -> None:
    client = Client()
    arguments: Any = SimpleNamespace()
    client.scaling = asyncio.get_running_loop().create_future()
    client.scaling.set_exception(RuntimeError("no GPU left"))
    engine: Any = VllmEngine(arguments)
    engine._started, engine._operations = SimpleNamespace(client=client), operations(client, **ELASTIC)
    watch = asyncio.create_task(engine.wait_dead())
    answer = await engine.engine_control("scale_elastic_ep", {"new_data_parallel_size": 8})
    assert answer == error("RuntimeError: no GPU left")
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await watch == "scale_elastic_ep to 8 ranks failed: RuntimeError: no GPU left"


async def test_the_capacity_is_that_of_the_ray_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def node(name: str, gpus: float, is_alive: bool) -> dict[str, Any]:
        return {"NodeID": name, "NodeManagerAddress": "10.0.0.1", "Resources": {"GPU": gpus}, "Alive": is_alive}

    ray = ModuleType("ray")
    answers: dict[str, Callable[[], Any]] = {
        "cluster_resources": lambda: {"GPU": 8.0, "CPU": 2.0},
        "available_resources": lambda: {"GPU": 3.0},
        "nodes": lambda: [node("a", 8.0, True), node("b", 4.0, False)],
    }
    vars(ray).update(answers)
    monkeypatch.setitem(sys.modules, "ray", ray)
    made = operations(Client(), **ELASTIC, data_parallel_size=2, tensor_parallel_size=1)
    assert await made.control("ep_capacity", {}) == {
        "status": "ok", "data_parallel_size": 2, "tensor_parallel_size": 1, "data_parallel_backend": "ray",
        "data_parallel_external_lb": False, "total_gpus": 8, "available_gpus": 3, "used_gpus": 5,
        "nodes": [{"node_id": "a", "address": "10.0.0.1", "total_gpus": 8}],
    }  # fmt: skip
    assert await operations(Client()).control("ep_capacity", {}) == error(NOT_ENABLED)
