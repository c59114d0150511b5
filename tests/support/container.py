"""Containers of an image of ours: unpacked by umoci, run by runc, in a network of their own. Neither knows the code that made it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

import pytest

from support.patience import PATIENCE_SECONDS
from support.processes import wait

PROGRAMS: Final = {
    "umoci": "umoci",
    "runc": "runc",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "curl": "curl",
}
"""What runs and examines containers, and the packages of Debian that have it."""

PORT: Final = 8000
_SPECIAL: Final = ("/proc", "/dev", "/dev/pts", "/dev/shm", "/dev/mqueue", "/sys")


def skip_without(programs: Mapping[str, str]) -> None:
    """Skip the test where it cannot run, and name what is missing."""
    missing = sorted({package for program, package in programs.items() if shutil.which(program) is None})
    if missing:
        pytest.skip(f"apt-get install {' '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("runc is run as root here")


def unpack(layout: Path, tag: str, target: Path) -> dict[str, Any]:
    """Unpack an image. Return what umoci makes of its settings: the configuration of a container."""
    argv = ["umoci", "unpack", "--image", f"{layout}:{tag}", str(target)]
    subprocess.run(argv, check=True, capture_output=True)
    found: dict[str, Any] = json.loads((target / "config.json").read_text())
    return found


class Network:
    """A network namespace with an address that this machine reaches, and that reaches nothing else."""

    def __init__(self, name: str) -> None:
        # 198.18.0.0/15 is for tests of networks; four addresses of it by the number of this process.
        number = os.getpid() % 16384
        prefix = f"198.18.{number // 64}.{number % 64 * 4}".rpartition(".")
        low = int(prefix[2])
        self.name, self.host, self.address = name, f"{prefix[0]}.{low + 1}", f"{prefix[0]}.{low + 2}"
        self.path = f"/run/netns/{name}"
        self._link = f"v{number}"

    def __enter__(self) -> Self:
        try:
            _run("ip", "netns", "add", self.name)
            _run("ip", "link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
            _run("ip", "addr", "add", f"{self.host}/30", "dev", self._link)
            _run("ip", "link", "set", self._link, "up")
            for words in (
                ("addr", "add", f"{self.address}/30", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
                ("link", "set", "lo", "up"),
            ):
                _run("ip", "-n", self.name, *words)
        except AssertionError as error:
            self.__exit__()
            pytest.skip(f"no network for a container can be made here: {error}")
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self._link], check=False, capture_output=True)


class Container:
    """One container with a read-only root, no capability and no way to get one; /tmp is in memory. Closed by its block."""

    def __init__(self, folder: Path, config: Mapping[str, Any], root: Path, network: Network) -> None:
        self._folder, self._root, self._network = folder, root, network
        self._config = json.loads(json.dumps(config))
        self.name = f"dynamo-test-{os.getpid()}-{folder.name}"
        self._process: subprocess.Popen[bytes] | None = None
        self.address = network.address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def start(self, *command: str, shared: Path | None = None, **env: str) -> None:
        """Start process 1: what the image starts, or its init with `command`; `shared` is a folder that lies at /shared."""
        process = self._config["process"]
        if command:
            assert process["args"][:2] == ["tini", "--"]
            process["args"] = [*process["args"][:2], *command]
        process["env"] += [f"{name}={value}" for name, value in env.items()]
        process |= {"terminal": False, "capabilities": {}, "noNewPrivileges": True, "rlimits": []}
        self._config["root"] = {"path": str(self._root), "readonly": True}
        self._config["hostname"] = "image"
        for each in self._config["linux"]["namespaces"]:
            if each["type"] == "network":
                each["path"] = self._network.path
        memory = {
            "destination": "/tmp",
            "type": "tmpfs",
            "source": "tmpfs",
            "options": ["nosuid", "nodev", "mode=1777"],
        }
        mounts = [each for each in self._config["mounts"] if each["destination"] in _SPECIAL] + [memory]
        if shared is not None:
            mounts.append({"destination": "/shared", "type": "bind", "source": str(shared), "options": ["bind", "rw"]})
        self._config["mounts"] = mounts
        self._folder.mkdir(parents=True)
        (self._folder / "config.json").write_text(json.dumps(self._config))
        with (self._folder / "log").open("wb") as log:
            argv = [*self._runc(), "run", "--bundle", str(self._folder), self.name]
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in it to its end."""
        argv = [*self._runc(), "exec", self.name, *command]
        return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS * 2)

    def signal(self, name: str) -> None:
        """Send a signal to process 1."""
        _run(*self._runc(), "kill", self.name, name)

    def pid(self) -> int:
        """Return the number of process 1 outside of it."""
        return int(json.loads(_run(*self._runc(), "state", self.name))["pid"])

    def states(self) -> dict[int, tuple[str, str]]:
        """Return the state and the command of every process in it, by the number that it has there."""
        script = 'for each in /proc/[0-9]*; do read -r line < $each/stat && echo "$line"; done; exit 0'
        found = {}
        for line in self.execute("bash", "-c", script).stdout.splitlines():
            number, _, rest = line.partition(" (")
            command, _, fields = rest.rpartition(") ")
            found[int(number)] = (fields[0], command)
        return found

    def inside(self, *command: str) -> str:
        """Run a program of this machine in the container's network."""
        return _run("nsenter", "--target", str(self.pid()), "--net", *command)

    def exit_code(self) -> int:
        """Wait for the end of process 1."""
        assert self._process is not None
        return self._process.wait(PATIENCE_SECONDS)

    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def wait_ready(self) -> float:
        """Wait until a frontend in it has a model. Return the seconds."""
        begun = time.monotonic()

        def is_ready() -> bool:
            assert not self.has_ended(), self.log
            done = subprocess.run(
                ["curl", "-sf", f"http://{self.address}:{PORT}/ready"], check=False, capture_output=True
            )
            return done.returncode == 0

        wait(is_ready, lambda: f"a model; log:\n{self.log}")
        return time.monotonic() - begun

    def close(self) -> None:
        if not self.has_ended():
            subprocess.run([*self._runc(), "kill", self.name, "KILL"], check=False, capture_output=True)
            self.exit_code()
        subprocess.run([*self._runc(), "delete", "--force", self.name], check=False, capture_output=True)

    def _runc(self) -> list[str]:
        return ["runc", "--root", str(self._folder.parent / "runc")]


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr.strip()}"
    return done.stdout
