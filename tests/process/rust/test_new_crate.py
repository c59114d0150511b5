"""`dynamo new --rust`: what it writes passes as written, and serves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from dynamo.cli.main import main
from support.http_client import ask
from support.processes import Cluster, wait

SDK = Path(__file__).parents[3] / "rust" / "dynamo-backend-common"
FLAGS = os.environ.get("RUST_CARGO_FLAGS")


def new(tmp_path: Path, *flags: str) -> Path:
    assert main(["new", "my-backend", "--rust", "--dir", str(tmp_path), *flags]) == 0
    return tmp_path / "my-backend"


def test_the_crate_names_the_sdk_of_this_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = new(tmp_path)
    manifest = tomllib.loads((root / "Cargo.toml").read_text())
    assert manifest["package"]["name"] == "my-backend"
    assert manifest["dependencies"]["dynamo-backend-common"] == {"path": str(SDK)}
    assert manifest["dev-dependencies"]["dynamo-backend-common"] == {"path": str(SDK), "features": ["testing"]}
    written = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    code = {"src/lib.rs", "src/main.rs", "tests/conformance.rs"}
    assert written == {".gitignore", "Cargo.toml", "README.md", "rustfmt.toml"} | code
    assert not [path for path in root.rglob("*") if path.is_file() and "@@" in path.read_text()]
    assert "  cargo test\n" in capsys.readouterr().out


def test_the_sdk_may_be_elsewhere_and_must_be_somewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = new(tmp_path, "--sdk", "https://example.org/dynamo.git")
    manifest = tomllib.loads((root / "Cargo.toml").read_text())
    assert manifest["dependencies"]["dynamo-backend-common"] == {"git": "https://example.org/dynamo.git"}
    for flags, words in (
        (["--rust", "--sdk", str(tmp_path)], "there is no crate dynamo-backend-common in"),
        (["--sdk", str(SDK)], "--sdk is about a crate in Rust"),
    ):
        assert main(["new", "other", *flags, "--dir", str(tmp_path)]) == 2
        assert words in capsys.readouterr().err
    assert main(["new", "a.b", "--rust", "--dir", str(tmp_path)]) == 2
    assert "cannot be the name of a crate" in capsys.readouterr().err


def built(root: Path) -> Path:
    """Hold the crate to what its tests and the linter say, and return its program."""
    cargo = shutil.which("cargo")
    assert cargo is not None
    flags = json.loads(FLAGS or "[]")
    lint = ["clippy", *flags, "--all-targets", "--", "-D", "warnings"]
    for command in (["fmt", "--check"], lint, ["test", *flags], ["build", *flags]):
        done = subprocess.run([cargo, *command], cwd=root, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return Path(os.environ["CARGO_TARGET_DIR"]) / "debug" / "my-backend"


@pytest.mark.timeout(1800)
@pytest.mark.skipif(FLAGS is None, reason="no crates to build with: `make test-rust` finds them (RUST_CARGO_FLAGS)")
async def test_the_crate_passes_as_written_and_serves(tmp_path: Path) -> None:
    program = built(new(tmp_path))
    with Cluster(tmp_path) as cluster:
        frontend = cluster.frontend("frontend")
        worker = cluster.process("worker", [str(program), "--discovery-backend", "file"])
        frontend.wait_ready()
        wait(lambda: "my-model" in frontend.models(), lambda: worker.log + frontend.log)
        body = {"model": "my-model", "prompt": "abc", "max_tokens": 7}
        reply = await ask(frontend.port, "/v1/completions", json.dumps(body).encode())
        assert reply.json()["choices"][0]["text"] == "abcabca"
