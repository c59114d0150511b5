"""Each loop of a frontend and its parts that fails once runs again: no key file, batch or load goes unfollowed for good."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.frontend.base.metrics.families import FrontendFamilies
from dynamo.frontend.base.settings.inspector import InspectorSettings
from dynamo.frontend.parts.residency.part import ResidencyPart
from dynamo.router.kv.settings import KvRouterSettings
from dynamo.runtime.observe.metrics import MetricsRegistry
from support.access import bearer, closed_cluster, key
from support.batch_client import FORM_HEADERS, chat_line, form, jsonl
from support.fails_once import BrokenSteps
from support.patience import PATIENCE_SECONDS

PARTS = "dynamo.frontend.parts"
STEPS = (
    "dynamo.frontend.models.adapters:AdapterKeeper._missing",
    "dynamo.frontend.models.busy_threshold:LoadFollower._reconcile",
    "dynamo.frontend.models.busy_threshold:_Followers._follow",
    "dynamo.frontend.models.directory:ModelDirectory._take_cards",
    "dynamo.frontend.models.directory:ModelDirectory._take_instances",
    "dynamo.frontend.models.loader:ModelLoader._hosts_of",
    "dynamo.router.kv_events.feed:KvEventFeed.__aenter__",
    "dynamo.router.peers.replica_sync:ReplicaSync.__aenter__",
    "dynamo.router.peers.replica_sync:SessionSync.__aenter__",
    f"{PARTS}.keys.key_store:KeyStore.refresh",
    f"{PARTS}.keys.usage_store:UsageMeter.write",
    f"{PARTS}.keys.line_file:LineFile._write",
    f"{PARTS}.batches.conductor:BatchConductor._sweep",
    f"{PARTS}.batches.conductor:BatchConductor._follow",
    f"{PARTS}.batches.conductor:BatchConductor._show",
    f"{PARTS}.batches.conductor:BatchConductor._carry_out",
    f"{PARTS}.batches.journal:ResultJournal.append",
    f"{PARTS}.batches.stored_files:StoredFiles.remove_expired",
    f"{PARTS}.inspector.tables:WorkerLifecycle.look",
    f"{PARTS}.inspector.workers:ClusterTable.kv_use",
    f"{PARTS}.inspector.other_frontends:OtherFrontends._take",
)
"""One step of each loop: the module, and the method that raises when it is first called."""


async def test_each_loop_that_fails_once_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        ("key_store", "LOOK_SECONDS"),
        ("usage_store", "WRITE_SECONDS"),
        ("line_file", "WRITE_SECONDS"),
    ):
        monkeypatch.setattr(f"{PARTS}.keys.{module}.{name}", 0.02)
    monkeypatch.setattr(f"{PARTS}.batches.conductor.REAP_SECONDS", 0.02)
    monkeypatch.setattr("dynamo.frontend.models.directory.WATCH_RETRY_SECONDS", 0.01)
    monkeypatch.setattr("dynamo.frontend.models.loader.RETRY_SECONDS", (0.01,))
    monkeypatch.setattr("dynamo.router.kv.domains.RETRY_SECONDS", 0.01)
    steps = BrokenSteps(monkeypatch, *STEPS)
    settings: dict[str, Any] = {
        "files_dir": tmp_path / "files",
        "usage_db": str(tmp_path / "usage.sqlite"),
        "access_log": str(tmp_path / "access.log"),
        "inspector": InspectorSettings(peer_key="k" * 32),
        "router_mode": "kv",
        "kv_router": KvRouterSettings(router_replica_sync=True, router_session_affinity_ttl_secs=60.0),
    }
    boss = bearer("boss")
    async with closed_cluster(
        tmp_path, key("boss", role="admin", budget={"tokens": 1_000_000, "period": "day"}), **settings
    ) as house:
        await house.worker()
        await house.client.call(
            "POST", "/busy_threshold", {"model": "m", "active_decode_blocks_threshold": 0.9}, headers=boss
        )
        sent = house.client.begin(
            "POST", "/v1/files", form(jsonl([chat_line("a")]), purpose="batch"), headers={**boss, **FORM_HEADERS}
        )
        file = (await sent.done()).json
        body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = (await house.client.call("POST", "/v1/batches", body, headers=boss)).json
        status = ""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while status != "completed" or steps.not_again:
                    status = (await house.client.get(f"/v1/batches/{batch['id']}", **boss)).json["status"]
                    await asyncio.sleep(0.02)
        except TimeoutError:
            pytest.fail(f"the batch is {status}; these were not run again: {steps.not_again}")
        degraded = (await house.client.get("/health", **boss)).json["degraded"]
        assert "frontend: key files failed (RuntimeError) and begins again; the log has the error" in degraded
    assert steps.counted == len(STEPS)


async def test_the_models_in_memory_are_followed_after_a_report_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = BrokenSteps(monkeypatch, "dynamo.residency.machine:Residency.measured")
    models = SimpleNamespace(names=SimpleNamespace(on_demand=frozenset()))
    metrics = SimpleNamespace(families=FrontendFamilies(MetricsRegistry(), "dynamo_frontend", {}))
    kernel: Any = SimpleNamespace(pipeline=SimpleNamespace(hooks=SimpleNamespace(), models=models, metrics=metrics))
    ours, theirs = socket.socketpair()
    part = ResidencyPart(kernel, ours.detach(), 1.0)
    reader, writer = await asyncio.open_connection(sock=theirs)
    absent = {"name": "m", "bytes": 1, "measured": False, "pinned": False, "state": "absent"}
    for said in (
        {"event": "setup", "models": [absent], "budget_bytes": 9, "idle_seconds": 9, "presets": {}},
        {"event": "measured", "model": "m", "bytes": 2},
        {"event": "measured", "model": "m", "bytes": 3},
    ):
        writer.write(json.dumps(said).encode() + b"\n")
    await part.start()
    await steps.run_again("frontend: residency")
    await part.aclose()
    assert json.loads(await reader.readline()) == {"order": "hello"}
    writer.close()
