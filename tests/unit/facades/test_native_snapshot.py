"""`dynamo.common.snapshot`: the lifecycle of a process that is frozen and goes on with another identity."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.common import snapshot
from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import BaseEngine
from dynamo.engines.sample.engine import SampleLLMEngine
from dynamo.errors import EngineShutdown, InvalidArgument
from support.cases import each_case


class Pause:
    """Writes down what it is called for."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.paused = asyncio.Event()

    async def pause(self, *args: Any) -> None:
        self.log.append(("pause", *args))
        self.paused.set()

    async def resume(self) -> None:
        self.log.append("resume")

    def mark_resumed(self) -> None:
        self.log.append("resumed")


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in snapshot.constants.SUPPORTED_ENV_NAMES | {"HF_HUB_OFFLINE", "NCCL_IB_DISABLE"}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(snapshot.SNAPSHOT_CONTROL_DIR_ENV, str(tmp_path))
    return tmp_path


def test_the_names_are_those_of_the_native_system() -> None:
    assert snapshot.SNAPSHOT_CONTROL_DIR == "/snapshot-control"
    assert snapshot.SNAPSHOT_CONTROL_DIR_ENV == "DYN_SNAPSHOT_CONTROL_DIR"
    assert snapshot.READY_FOR_SNAPSHOT_FILE == "ready-for-snapshot"
    assert snapshot.SNAPSHOT_COMPLETE_FILE == "snapshot-complete"
    assert snapshot.RESTORE_COMPLETE_FILE == "restore-complete"
    assert snapshot.SNAPSHOT_RESTORE_CONTEXT_FILE == "restore-context.json"
    assert snapshot.SNAPSHOT_RESTORE_STANDBY_ENV == "SNAPSHOT_RESTORE_STANDBY"
    assert snapshot.SENTINEL_POLL_INTERVAL_SEC == 0.1
    assert len(snapshot.KUBERNETES_REQUIRED_ENV_NAMES) == 7
    assert {"DYN_NAMESPACE_WORKER_SUFFIX"} == snapshot.KUBERNETES_OPTIONAL_ENV_NAMES
    assert {"ETCD_ENDPOINTS", "NATS_SERVER", "ENGINE_ID"} <= snapshot.RESTORE_RUNTIME_ENV_NAMES


def test_a_process_is_one_of_a_snapshot_by_its_variable(control: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert snapshot.is_snapshot_enabled()
    found = snapshot.SnapshotConfig.from_env()
    assert found == snapshot.SnapshotConfig(str(control))
    assert found.ready_file == str(control / "ready-for-snapshot")
    monkeypatch.setenv(snapshot.SNAPSHOT_CONTROL_DIR_ENV, str(control / "none"))
    with pytest.raises(InvalidArgument, match=r"DYN_SNAPSHOT_CONTROL_DIR=.*none' is not a directory"):
        snapshot.SnapshotConfig.from_env()
    monkeypatch.delenv(snapshot.SNAPSHOT_CONTROL_DIR_ENV)
    assert (snapshot.is_snapshot_enabled(), snapshot.SnapshotConfig.from_env()) == (False, None)


@each_case(
    "end, is_restored, left", [("restore-complete", True, ["restore-complete"]), ("snapshot-complete", False, [])]
)
async def test_the_lifecycle_ends_as_the_file_says(
    end: str, is_restored: bool, left: list[str], control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in os.listdir(control):
        (control / name).unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (control / "snapshot-complete").write_text("")  # of an earlier process
    pause = Pause()
    controller = snapshot.EngineSnapshotController(
        object(), pause, snapshot.SnapshotConfig(str(control)), ({"level": 2},)
    )
    waiting = asyncio.ensure_future(controller.wait_for_restore())
    await pause.paused.wait()
    while not (control / "ready-for-snapshot").exists():
        await asyncio.sleep(0)
    assert not waiting.done()
    (control / end).write_text("")
    assert await waiting is is_restored
    assert sorted(os.listdir(control)) == left
    assert pause.log == [("pause", {"level": 2}), *(["resume", "resumed"] if is_restored else [])]
    assert ("HF_HUB_OFFLINE" in os.environ) is not is_restored


async def test_an_engine_that_does_not_halt_reports_nothing(control: Path) -> None:
    class Failing(Pause):
        async def pause(self, *args: Any) -> None:
            raise EngineShutdown("no")

    with pytest.raises(EngineShutdown):
        await snapshot.SnapshotConfig(str(control)).run_lifecycle(Failing())
    assert os.listdir(control) == []


@dataclass
class Controls:
    """An engine with these controls; one named in `failing` answers with an error."""

    names: set[str]
    failing: str = ""

    def __post_init__(self) -> None:
        self.log: list[Any] = []

    def supported_controls(self) -> set[str]:
        return self.names

    async def engine_control(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        self.log.append((name, body))
        return {"status": "error", "message": "busy"} if name == self.failing else {"status": "ok"}


def pause_of(engine: Controls) -> snapshot.ControlPause:
    as_engine: Any = engine
    found: BaseEngine = as_engine
    return snapshot.ControlPause(found)


async def test_an_engine_is_halted_by_the_control_that_gives_most_memory_back() -> None:
    pauses = {"pause_generation", "resume_generation"}
    engine = Controls({*pauses, "sleep", "wake_up", "clear_kv_blocks"})
    pause = pause_of(engine)
    await pause.pause({"level": 2})
    assert pause.is_paused
    await pause.resume()
    pause.mark_resumed()
    assert (engine.log, pause.is_paused) == ([("sleep", {"level": 2}), ("wake_up", {})], False)
    only = Controls(pauses)
    await pause_of(only).pause()
    assert only.log == [("pause_generation", {})]
    with pytest.raises(EngineShutdown, match="pause_generation failed: busy"):
        await pause_of(Controls(pauses, failing="pause_generation")).pause()
    with pytest.raises(InvalidArgument, match="SampleLLMEngine cannot be halted for a snapshot"):
        snapshot.ControlPause(SampleLLMEngine())


def test_what_a_frozen_process_cannot_have_is_switched_off(
    control: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    for name in ("NCCL_RAS_ENABLE", "TORCH_NCCL_ENABLE_MONITORING", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")  # so that it is put back after the test
        monkeypatch.delenv(name)
    snapshot.configure_snapshot_capture_env()
    assert (os.environ["NCCL_IB_DISABLE"], os.environ["HF_HUB_OFFLINE"]) == ("1", "1")
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"  # only a default
    assert [record.getMessage() for record in caplog.records] == [
        "NCCL_IB_DISABLE=0 is overridden with 1 for a snapshot"
    ]


def test_the_variables_of_the_new_pod_are_taken_over(
    control: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DYN_NAMESPACE", "there")
    path = Path(snapshot.write_snapshot_restore_context())
    written = json.loads(path.read_bytes())["env"]
    assert (path, written["DYN_NAMESPACE"], written["ETCD_ENDPOINTS"]) == (
        control / "restore-context.json",
        "there",
        None,
    )
    assert set(written) == snapshot.constants.SUPPORTED_ENV_NAMES
    assert os.listdir(control) == ["restore-context.json"]
    monkeypatch.setenv("DYN_NAMESPACE", "here")
    monkeypatch.setenv("ETCD_ENDPOINTS", "http://here")
    path.write_text(json.dumps({"env": {**written, "PATH": "/none"}}))
    before = os.environ["PATH"]
    snapshot.apply_snapshot_restore_env()
    assert (os.environ["DYN_NAMESPACE"], "ETCD_ENDPOINTS" in os.environ, os.environ["PATH"]) == ("there", False, before)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "PATH is not supported" in caplog.text


@each_case(
    "text, named",
    [
        (None, "^snapshot restore context file not found: .*restore-context.json$"),
        ("{", "cannot be read"),
        ("[]", "env must be an object"),
        ('{"env": {"DYN_NAMESPACE": 1}}', r"env\.DYN_NAMESPACE must be a string or null"),
    ],
)
def test_a_context_that_cannot_be_used_is_named(text: str | None, named: str, control: Path) -> None:
    if text is not None:
        (control / "restore-context.json").write_text(text)
    with pytest.raises(RuntimeError, match=named):
        snapshot.apply_snapshot_restore_env()


async def test_a_configuration_gets_the_place_of_the_new_pod(control: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_NAMESPACE", "there")
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")
    snapshot.write_snapshot_restore_context()
    monkeypatch.setenv("DYN_NAMESPACE", "here")
    config, runtime = WorkerConfig("here", model_name="kept"), SimpleNamespace(namespace="here", request_plane="nats")
    found = await snapshot.refresh_snapshot_restore_config(
        config, lambda _argv: snapshot.parse_snapshot_restore_runtime_config(["--an-engines-flag", "7"]), runtime
    )
    assert found is config
    assert (config.namespace, config.discovery_backend, config.model_name) == ("there", "file", "kept")
    assert (runtime.namespace, runtime.request_plane) == ("there", config.request_plane)
    assert config.runtime_settings is None  # they are read again


async def test_discovery_in_kubernetes_needs_the_names_of_the_pod(
    control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "kubernetes")
    monkeypatch.setenv("POD_NAME", "p")
    snapshot.write_snapshot_restore_context()
    with pytest.raises(RuntimeError, match=r"needs DYN_COMPONENT, DYN_NAMESPACE, .*POD_NAMESPACE, POD_UID"):
        await snapshot.refresh_snapshot_restore_config(
            WorkerConfig("here"), lambda _argv: snapshot.parse_snapshot_restore_runtime_config(())
        )


async def test_one_of_several_copies_serves_until_its_lock_is_free(
    control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, waits = Pause(), Pause(), list[float]()
    monkeypatch.setenv("FAILOVER_LOCK_PATH", str(control / "lock"))
    held = await snapshot.elect_and_wake(first)
    waiting = asyncio.ensure_future(
        snapshot.elect_and_wake(second, lock_path=str(control / "lock"), failover_metrics=waits.append)
    )
    done, _ = await asyncio.wait({waiting}, timeout=snapshot.SENTINEL_POLL_INTERVAL_SEC * 2)
    assert (done, first.log, second.log) == (set(), ["resume", "resumed"], [])
    held.close()  # as the end of its process does
    (await waiting).close()
    assert (second.log, len(waits)) == (["resume", "resumed"], 1)
    monkeypatch.delenv("FAILOVER_LOCK_PATH")
    with pytest.raises(InvalidArgument, match="set FAILOVER_LOCK_PATH"):
        await snapshot.elect_and_wake(first)
