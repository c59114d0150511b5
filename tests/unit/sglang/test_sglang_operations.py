"""Controls of SGLang, without SGLang: what reaches its tokenizer manager, on the loop of its thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dynamo.errors import WorkerUnavailable
from dynamo.sglang.engine_thread import EngineThread
from dynamo.sglang.operations import SglangOperations
from support.cases import each_case
from support.demo_model import FILES


@dataclass
class PauseGenerationReqInput:
    mode: str = "abort"


@dataclass
class UpdateWeightFromDiskReqInput:
    model_path: str
    load_format: str | None = None
    weight_version: str | None = None


@dataclass
class ScaleElasticEPReqInput:
    new_ep_size: int


@dataclass
class MemoryRequest:
    tags: list[str] | None = None


class Manager:
    """Answers as SGLang's tokenizer manager does, and writes down what it gets and in which thread."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []
        self.threads: set[str] = set()
        self.rid_to_state: dict[str, Any] = {}

    def note(self, name: str, asked: Any) -> None:
        self.log.append((name, asked))
        self.threads.add(threading.current_thread().name)

    async def pause_generation(self, asked: Any) -> None:
        self.note("pause", asked.mode)

    async def continue_generation(self, _asked: Any) -> None:
        self.note("continue", None)

    async def release_memory_occupation(self, asked: Any, _request: None) -> None:
        self.note("release", asked.tags)

    async def resume_memory_occupation(self, asked: Any, _request: None) -> None:
        self.note("resume", asked.tags)

    async def flush_cache(self) -> Any:
        self.note("flush", None)
        return SimpleNamespace(success=not self.rid_to_state)

    async def stop_profile(self) -> None:
        self.note("profile", None)

    async def update_weights_from_disk(self, asked: Any, _request: None) -> tuple[bool, str, int]:
        self.note("weights", (asked.model_path, asked.weight_version))
        return asked.load_format != "wrong", "loaded" if asked.load_format != "wrong" else "no such format", 0


class ElasticManager(Manager):
    def get_elastic_ep_state(self) -> dict[str, Any]:
        self.note("state", None)
        return {"is_scaling_elastic_ep": False, "effective_ep_size": 4, "scale_phase": "idle", "last_error": None}

    async def scale_elastic_ep(self, asked: Any) -> Any:
        self.note("scale", asked.new_ep_size)
        if asked.new_ep_size == 6:
            return SimpleNamespace(success=False, message="joining", old_ep_size=4, new_ep_size=4, pending_ep_size=8)
        return SimpleNamespace(success=asked.new_ep_size > 4, message="", old_ep_size=4, new_ep_size=asked.new_ep_size)


class OlderManager(Manager):
    async def start_profile(self, output_dir: str | None = None, num_steps: int | None = None) -> None:
        self.note("profile", (output_dir, num_steps))


class NewerManager(Manager):
    async def start_profile(self, req: Any = None) -> None:
        self.note("profile", req.output_dir)


@dataclass
class Rig:
    thread: EngineThread
    manager: Manager
    structures: ModuleType
    operations: SglangOperations = field(init=False)

    async def open(
        self, manager: Manager, *, saves_memory: bool = True, model: str = "name", elastic: str | None = None
    ) -> SglangOperations:
        settings = SimpleNamespace(enable_memory_saver=saves_memory, elastic_ep_backend=elastic)
        self.manager = manager
        self.thread.engine.tokenizer_manager, self.thread.engine.server_args = manager, settings
        return SglangOperations(self.thread, model)


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    structures = ModuleType("sglang.srt.managers.io_struct")
    structures.__dict__.update(
        PauseGenerationReqInput=PauseGenerationReqInput,
        ContinueGenerationReqInput=SimpleNamespace,
        UpdateWeightFromDiskReqInput=UpdateWeightFromDiskReqInput,
        ReleaseMemoryOccupationReqInput=MemoryRequest,
        ResumeMemoryOccupationReqInput=MemoryRequest,
        ProfileReq=SimpleNamespace,
        ScaleElasticEPReqInput=ScaleElasticEPReqInput,
    )
    managers = ModuleType("sglang.srt.managers")
    managers.__dict__["io_struct"] = structures
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers", managers)
    monkeypatch.setitem(sys.modules, structures.__name__, structures)
    thread = EngineThread()
    await thread.start(lambda: SimpleNamespace(shutdown=lambda: None))
    yield Rig(thread, Manager(), structures)
    await thread.close()


@each_case("mode, theirs", [(None, "in_place"), ("keep", "in_place"), ("retract", "retract"), ("abort", "abort")])
async def test_a_pause_reaches_sglang_in_its_own_words(rig: Rig, mode: str | None, theirs: str) -> None:
    operations = (await rig.open(Manager())).table
    assert (await operations.control("pause_generation", {} if mode is None else {"mode": mode}))["status"] == "ok"
    with pytest.raises(WorkerUnavailable, match="resume_generation"):
        operations.check_serving()
    assert (await operations.control("resume_generation", {}))["status"] == "ok"
    operations.check_serving()
    assert rig.manager.log == [("pause", theirs), ("continue", None)]
    assert rig.manager.threads == {"sglang"}


async def test_a_mode_that_there_is_not_halts_nothing(rig: Rig) -> None:
    operations = (await rig.open(Manager())).table
    refused = await operations.control("pause_generation", {"mode": "wait"})
    assert refused == {"status": "error", "message": "mode must be one of keep, retract, abort, got 'wait'"}
    operations.check_serving()
    assert rig.manager.log == []


async def test_memory_is_given_back_where_sglang_was_started_for_it(rig: Rig) -> None:
    operations = (await rig.open(Manager(), saves_memory=False)).table
    assert "release_memory_occupation" not in operations.controls
    refused = await operations.control("release_memory_occupation", {})
    assert "--enable-memory-saver" in refused["message"]
    operations = (await rig.open(Manager())).table
    rig.manager.rid_to_state["one"] = object()
    assert "1 requests are running" in (await operations.control("release_memory_occupation", {}))["message"]
    operations.check_serving()  # SGLang's scheduler would have ended
    rig.manager.rid_to_state.clear()
    assert (await operations.control("release_memory_occupation", {"tags": ["weights"]}))["is_sleeping"] is True
    assert "only resume_memory_occupation" in (await operations.control("resume_generation", {}))["message"]
    assert (await operations.control("resume_memory_occupation", {}))["status"] == "ok"
    operations.check_serving()
    assert rig.manager.log == [("release", ["weights"]), ("resume", None)]


async def test_the_cache_is_cleared_between_requests(rig: Rig) -> None:
    operations = (await rig.open(Manager())).table
    cleared = {"status": "success", "message": "KV cache cleared"}
    assert await operations.control("clear_kv_blocks", {}) == cleared
    rig.manager.rid_to_state["one"] = object()
    refused = {"status": "error", "message": "Cannot clear KV cache while requests are active"}
    assert await operations.control("clear_kv_blocks", {}) == refused


@each_case("manager, expected", [(OlderManager, ("d", None)), (NewerManager, "d")])
async def test_a_profile_is_begun_in_either_release(rig: Rig, manager: type[Manager], expected: Any) -> None:
    operations = (await rig.open(manager())).table
    assert (await operations.control("start_profile", {"output_dir": "d"}))["status"] == "ok"
    assert (await operations.control("stop_profile", {}))["status"] == "ok"
    assert rig.manager.log == [("profile", expected), ("profile", None)]


async def test_weights_come_from_a_directory_of_the_same_shapes(rig: Rig, tmp_path: Path) -> None:
    operations = (await rig.open(Manager(), model=str(FILES))).table
    found = await operations.update("update_weights_from_disk", {"model_path": str(FILES), "weight_version": "2"})
    assert found == {"status": "ok", "model_path": str(FILES)}
    assert rig.manager.log == [("weights", (str(FILES), "2"))]
    for members, named in (
        ({"model_path": str(tmp_path)}, "config.json cannot be read"),
        ({"model_path": str(FILES), "load_format": "wrong"}, "no such format"),
        ({}, "model_path"),
    ):
        refused = await operations.update("update_weights_from_disk", members)
        assert refused["status"] == "error"
        assert named in refused["message"]


async def test_what_sglang_cannot_do_here_is_refused_with_the_reason(rig: Rig) -> None:
    operations = (await rig.open(Manager())).table
    for name, named in (("sleep", "release_memory_occupation"), ("ep_capacity", "is_scaling_elastic_ep")):
        assert named in (await operations.control(name, {}))["message"]
    assert "JSON body" in (await operations.update("update_weights_from_tensor", {}))["message"]


@each_case(
    "size, answer",
    [
        (8, {"status": "ok", "message": "Scaled to ep_size=8", "old_ep_size": 4, "new_ep_size": 8}),
        (4, {"status": "error", "message": "scale_elastic_ep failed", "old_ep_size": 4, "new_ep_size": 4}),
        (6, {"status": "error", "message": "joining", "old_ep_size": 4, "new_ep_size": 4, "pending_ep_size": 8}),
        (None, {"status": "error", "message": "Missing required field: new_ep_size"}),
        (True, {"status": "error", "message": "new_ep_size must be an integer, got: True"}),
        ("8", {"status": "error", "message": "new_ep_size must be an integer, got: '8'"}),
        (0, {"status": "error", "message": "new_ep_size must be a positive integer"}),
    ],
)
async def test_ranks_are_added_where_sglang_was_started_for_it(rig: Rig, size: Any, answer: dict[str, Any]) -> None:
    operations = (await rig.open(ElasticManager(), elastic="mooncake")).table
    assert await operations.control("scale_elastic_ep", {} if size is None else {"new_ep_size": size}) == answer
    assert rig.manager.log == ([("scale", size)] if "old_ep_size" in answer else [])
    state = await operations.control("is_scaling_elastic_ep", {})
    assert (state["status"], state["effective_ep_size"]) == ("ok", 4)
    assert rig.manager.threads == {"sglang"}


@each_case(
    "elastic, named", [(None, "elastic EP is not enabled (set --elastic-ep-backend)"), ("mooncake", "0.5.16 can")]
)
async def test_ranks_that_cannot_change_are_refused(rig: Rig, elastic: str | None, named: str) -> None:
    operations = (await rig.open(Manager(), elastic=elastic)).table
    for name in ("scale_elastic_ep", "is_scaling_elastic_ep"):
        assert name not in operations.controls
        assert named in (await operations.control(name, {"new_ep_size": 8}))["message"]
