"""A worker of the reference engine that is frozen when its engine is warm, and goes on with another identity.

In the place of CRIU stands SIGSTOP: the process keeps its memory, runs no instruction, and goes on at SIGCONT. What CRIU
does besides, which is to write the memory to a file and to begin the process elsewhere, is not tested here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from openai import OpenAI

from support.demo_model import FILES
from support.processes import Cluster, Worker, wait

MODEL = "frozen"
STANDBY = "from dynamo.common.snapshot import maybe_run_restore_standby_mode as wait; wait(); raise SystemExit(3)"


def internet_sockets(worker: Worker) -> set[str]:
    """The sockets of a process that another machine could see."""
    known = {
        line.split()[9]
        for kind in ("tcp", "tcp6", "udp", "udp6")
        for line in Path(f"/proc/{worker.pid}/net/{kind}").read_text().splitlines()[1:]
    }
    own = {os.readlink(each) for each in Path(f"/proc/{worker.pid}/fd").iterdir()}
    return {name for name in own if name.removeprefix("socket:[").removesuffix("]") in known}


def state_of(worker: Worker) -> str:
    return Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[0]


def write_context(cluster: Cluster, control: Path, **env: str) -> None:
    """What the pod does that the process goes on in: it writes its variables, and waits in a program without Python."""
    standby = subprocess.Popen(
        [sys.executable, "-c", STANDBY],
        env={**cluster.environment, **env, "DYN_SNAPSHOT_CONTROL_DIR": str(control), "SNAPSHOT_RESTORE_STANDBY": "1"},
    )
    try:
        name = Path(f"/proc/{standby.pid}/comm")
        wait(lambda: name.read_text().strip() == "sleep", lambda: "a pod that waits")
        assert (control / "restore-context.json").exists()
    finally:
        standby.kill()
        standby.wait()


def test_a_frozen_worker_goes_on_with_the_identity_of_another_pod(tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.mkdir()
    with Cluster(tmp_path) as cluster:
        worker = cluster.reference(
            "frozen", MODEL, FILES, DYN_NAMESPACE="before", DYN_SNAPSHOT_CONTROL_DIR=str(control), DYN_LOG="debug"
        )
        ready = control / "ready-for-snapshot"
        wait(ready.exists, lambda: f"a halted engine; its log:\n{worker.log}")
        assert ready.read_text() == "ready"
        worker.signal(signal.SIGSTOP)
        wait(lambda: state_of(worker) == "T", lambda: "a frozen process")
        assert internet_sockets(worker) == set()  # no connection and no port is in its image
        assert not list((tmp_path / "store").rglob("*.json"))  # and the cluster does not know it
        write_context(cluster, control, DYN_NAMESPACE="after", DYN_SYSTEM_PORT="0", DYN_SYSTEM_HOST="127.0.0.1")
        (control / "restore-complete").touch()
        worker.signal(signal.SIGCONT)
        worker.wait_ready()
        frontend = cluster.frontend("frontend", "--namespace", "after")
        cluster.wait_ready(frontend, worker)
        _, body = frontend.get(f"/v1/models/{MODEL}/ready")
        assert list(json.loads(body)["namespaces"]) == ["after"]
        with OpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "What is 27 + 15?"}], temperature=0
            )
        assert answer.choices[0].message.content == "42"
        assert sorted(os.listdir(control)) == ["restore-complete", "restore-context.json"]
        worker.terminate()
        assert worker.exit_code() == 0


def test_the_process_of_which_a_snapshot_was_made_ends(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        worker = cluster.reference("frozen", MODEL, FILES, DYN_SNAPSHOT_CONTROL_DIR=str(tmp_path))
        wait((tmp_path / "ready-for-snapshot").exists, lambda: f"a halted engine; its log:\n{worker.log}")
        (tmp_path / "snapshot-complete").touch()
        assert worker.exit_code() == 0
        assert "Serving" not in worker.log


def test_a_restored_process_without_its_context_ends_with_a_sentence(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        (tmp_path / "restore-complete").touch()
        worker = cluster.reference("frozen", MODEL, FILES, DYN_SNAPSHOT_CONTROL_DIR=str(tmp_path))
        assert worker.exit_code() == 1
        assert f"snapshot restore context file not found: {tmp_path}" in worker.log
