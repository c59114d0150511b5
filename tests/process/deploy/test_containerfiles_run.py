"""What the Containerfiles for engines of users do, done on this machine: no container engine is needed to know that it works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from oci_image.containerfile import read_containerfile, texts

from dynamo.cli.main import main
from support.http_client import ask
from support.processes import Cluster, wait
from support.wheels import write_wheel

ROOT = Path(__file__).parents[3]
BACKEND = read_containerfile(ROOT / "deploy" / "Containerfile.backend")
RUST = read_containerfile(ROOT / "deploy" / "Containerfile.rust")
FLAGS = os.environ.get("RUST_CARGO_FLAGS")


def run(script: str, cwd: Path, **env: str) -> str:
    """Run a RUN line as the builder does."""
    done = subprocess.run(
        ["/bin/sh", "-euc", script], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
    return done.stdout


async def test_a_user_s_wheel_is_installed_and_its_command_serves(tmp_path: Path) -> None:
    assert main(["new", "my-backend", "--dir", str(tmp_path)]) == 0
    wheels, target = tmp_path / "wheels", tmp_path / "installed"
    write_wheel(tmp_path / "my-backend", wheels)
    (install,) = texts(BACKEND, "RUN")
    assert "/tmp/wheels" in install
    run(
        install.replace("/tmp/wheels", str(wheels)),
        tmp_path,
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        PIP_TARGET=str(target),  # an image has an environment of its own, this machine only the tests'
        PIP_NO_INDEX="1",
    )
    assert not wheels.exists()
    tini, end, command, *arguments = [
        word for each in BACKEND if each.name in ("ENTRYPOINT", "CMD") for word in each.words
    ]
    assert (tini, end) == ("tini", "--")  # it starts the command and reaps what that one leaves behind
    with Cluster(tmp_path) as cluster:
        frontend = cluster.frontend("frontend")
        argv = [sys.executable, str(target / "bin" / command), *arguments, "--discovery-backend", "file"]
        worker = cluster.process("worker", argv, PYTHONPATH=str(target))
        frontend.wait_ready()
        wait(lambda: "my-model" in frontend.models(), lambda: worker.log + frontend.log)
        body = json.dumps({"model": "my-model", "prompt": "abc", "max_tokens": 3}).encode()
        assert (await ask(frontend.port, "/v1/completions", body)).json()["usage"]["completion_tokens"] == 3


@pytest.mark.timeout(1800)
@pytest.mark.skipif(FLAGS is None, reason="no crates to build with: `make test-rust` finds them (RUST_CARGO_FLAGS)")
async def test_a_rust_worker_is_built_and_serves(tmp_path: Path) -> None:
    (build,) = texts(RUST, "RUN", 0)
    arguments = dict(text.split("=", 1) for text in texts(RUST, "ARG", 0))
    program = tmp_path / "out" / "backend"
    run(
        build.replace("/out/backend", str(program)),
        ROOT / "rust",
        **{**arguments, "CARGO_FLAGS": " ".join(json.loads(FLAGS or "[]"))},
        # Whether it builds does not depend on how far it is optimized, which takes minutes.
        CARGO_PROFILE_RELEASE_LTO="off",
        CARGO_PROFILE_RELEASE_OPT_LEVEL="0",
        CARGO_PROFILE_RELEASE_CODEGEN_UNITS="16",
    )
    start = [word for each in RUST if each.name == "CMD" for word in each.words]
    with Cluster(tmp_path) as cluster:
        frontend = cluster.frontend("frontend")
        worker = cluster.process("worker", [str(program), *start, "--discovery-backend", "file"])
        frontend.wait_ready()
        wait(lambda: "my-model" in frontend.models(), lambda: worker.log + frontend.log)
        body = json.dumps({"model": "my-model", "prompt": "abc", "max_tokens": 3}).encode()
        assert (await ask(frontend.port, "/v1/completions", body)).json()["usage"]["completion_tokens"] == 3
