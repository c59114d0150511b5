"""`dynamo conformance worker` over workers of this repository, in processes of their own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.patience import PATIENCE_SECONDS
from support.processes import Cluster

NODE = shutil.which("node")
SECRET_CHECKS = {f"mux.secret.{name}" for name in ("proof", "right", "wrong", "absent", "first")}


def judged(cluster: Cluster, endpoint: str, *flags: str) -> dict[str, str]:
    """The checks that did not pass, each with its reason. Core holds, and none failed."""
    file = cluster.root / "report.json"
    argv = [sys.executable, "-m", "dynamo.cli.main", "conformance", "worker", endpoint, "--discovery-backend", "file"]
    limits = ("--timeout", str(PATIENCE_SECONDS), "--limit", str(2 * PATIENCE_SECONDS))
    ran = subprocess.run(
        [*argv, "--json", str(file), *limits, *flags],
        env=dict(cluster.environment),
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    checks = json.loads(file.read_text())["checks"]
    assert [(one["id"], one["reason"]) for one in checks if one["outcome"] == "failed"] == []
    return {one["id"]: one["reason"] for one in checks if one["outcome"] != "passed"}


def test_the_sample_engine_passes_every_check_of_both_wires(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.sample("sample", "sample").wait_ready()
        assert set(judged(cluster, "dynamo.sample.generate", "--wire", "mux,native")) == SECRET_CHECKS


def test_the_mocker_passes_every_check_of_both_wires(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.mocker("mocker", "mocker").wait_log("Serving ")
        assert set(judged(cluster, "dynamo.backend.generate", "--wire", "mux,native")) == SECRET_CHECKS


def test_a_worker_with_a_secret_passes_its_checks_and_has_no_native_wire(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret of this test\n")
    with Cluster(tmp_path, DYN_TCP_SECRET_PATH=str(secret)) as cluster:
        cluster.sample("sample", "sample").wait_ready()
        others = judged(cluster, "dynamo.sample.generate", "--secret-file", str(secret))
    assert {name for name in others if name.startswith("mux")} == {"mux.hello.not-awaited"}
    assert all("shared secret" in others[name] for name in others)


def test_an_engine_without_tokens_is_judged_by_a_request_of_its_own(tmp_path: Path) -> None:
    request = tmp_path / "request.json"
    request.write_text('{"prompt": "a cat", "size": "64x64"}')
    with Cluster(tmp_path) as cluster:
        cluster.raw("raw", "raw", "dynamo.engines.sample.diffusion_main").wait_ready()
        others = set(judged(cluster, "dynamo.raw.generate", "--model-request", str(request)))
    assert {"mux.items.finish", "mux.credits.end-free", "mux.error.wrong-type", "native.error.item"} <= others
    assert not others & {"mux.open", "mux.credits.window", "mux.cancel.kill", "native.answer.items"}


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_worker_in_node_passes_every_check_of_mux(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.node("node", NODE or "", "node").wait_log("Serving ")
        others = judged(cluster, "dynamo.node.generate", "--wire", "mux")
    assert {name for name in others if name.startswith("mux")} == SECRET_CHECKS | {"mux.steps.columns"}
