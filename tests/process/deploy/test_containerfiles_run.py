"""What the Containerfiles for engines of users do, done on this machine: no container engine is needed to know that it works."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from dynamo.cli.main import main
from oci_image.containerfile import read_containerfile, texts
from support.http_client import ask
from support.processes import Cluster, wait

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


def write_wheel(package: Path, folder: Path) -> Path:
    """Write the wheel of a package that `dynamo new` made, without the build tools, which a test would have to download."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    stem = f"{project['name'].replace('-', '_')}-{project['version']}"
    files = {path.relative_to(package / "src").as_posix(): path.read_bytes() for path in package.glob("src/*/*.py")}
    requirements = "".join(f"Requires-Dist: {each}\n" for each in project["dependencies"])
    scripts = "".join(f"{name} = {target}\n" for name, target in project["scripts"].items())
    files |= {
        f"{stem}.dist-info/METADATA": (
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n{requirements}".encode()
        ),
        f"{stem}.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{stem}.dist-info/entry_points.txt": f"[console_scripts]\n{scripts}".encode(),
    }
    record = f"{stem}.dist-info/RECORD"
    lines = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    folder.mkdir()
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(record, "\n".join([*lines, f"{record},,"]) + "\n")
    return wheel


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


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
    command, *arguments = [word for each in BACKEND if each.name in ("ENTRYPOINT", "CMD") for word in each.words]
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
