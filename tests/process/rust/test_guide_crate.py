"""A crate as the guide has it, with the native git repository as its dependency: it compiles unedited, and its spans arrive."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import uuid
from pathlib import Path

import pytest

from support.http_client import ask
from support.otlp_receiver import otlp_receiver
from support.processes import Cluster, wait

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PAGE = ROOT / "docs" / "writing-a-backend-in-rust.md"
FLAGS = os.environ.get("RUST_CARGO_FLAGS")

pytestmark = pytest.mark.skipif(
    FLAGS is None, reason="no crates to build with: `make test-rust` finds them (RUST_CARGO_FLAGS)"
)


def recipe() -> list[str]:
    """The commands that the page prints, with the place of this checkout in them."""
    section = PAGE.read_text().split("\n## A crate written for the guide\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```text\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 2
    assert "SDK=../dynamo/rust" in blocks[0]
    return [block.replace("SDK=../dynamo/rust", f"SDK={ROOT / 'rust'}") for block in blocks]


def registry(root: Path, flags: list[str]) -> list[str]:
    """The flags of cargo. The guide pins a tokio that Debian does not have: Debian's stands in under the pinned number."""
    given = re.search(r'directory="([^"]+)"', " ".join(flags))
    if given is None:
        return flags  # crates.io has it
    pinned = "1.48.0"
    root.mkdir()
    for crate in Path(given[1]).iterdir():
        if crate.name.rpartition("-")[0] != "tokio":
            (root / crate.name).symlink_to(crate)
            continue
        shutil.copytree(crate, root / f"tokio-{pinned}")
        manifest = root / f"tokio-{pinned}" / "Cargo.toml"
        version = crate.name.rpartition("-")[2]
        manifest.write_text(manifest.read_text().replace(f'version = "{version}"', f'version = "{pinned}"', 1))
    return [flag.replace(given[1], str(root)) for flag in flags]


def toolchain() -> dict[str, str]:
    """The installed toolchain in place of the one that the crate pins, which rustup would have to fetch."""
    rustup = shutil.which("rustup")
    if rustup is None:
        return {}
    shown = subprocess.run([rustup, "show", "active-toolchain"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {"RUSTUP_TOOLCHAIN": shown.stdout.split()[0]}


def build(tmp_path: Path) -> Path:
    """The program of the crate, after its own tests."""
    crate = tmp_path / "my-backend"
    shutil.copytree(HERE / "guide_crate", crate)
    before = {path: path.read_bytes() for path in crate.rglob("*.*") if path.is_file() and ".cargo" not in path.parts}
    for block in recipe():
        subprocess.run(["bash", "-eu", "-c", block], cwd=crate, check=True)
    flags = registry(tmp_path / "registry", json.loads(FLAGS or "[]"))
    for command in ("test", "build"):
        argv = ["cargo", command, *flags]
        done = subprocess.run(
            argv, cwd=crate, env=os.environ | toolchain(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        assert "was not used in the crate graph" not in done.stderr
    assert {path: path.read_bytes() for path in before} == before
    return Path(os.environ["CARGO_TARGET_DIR"]) / "debug" / "my-backend"


@pytest.mark.timeout(1800)
async def test_it_compiles_unedited_and_its_spans_arrive(tmp_path: Path) -> None:
    program = build(tmp_path)
    trace_id = uuid.uuid4().hex
    with otlp_receiver() as receiver, Cluster(tmp_path, **receiver.environment) as cluster:
        frontend = cluster.frontend("frontend", OTEL_SERVICE_NAME="frontend")
        worker = cluster.process(
            "worker", [str(program), "my-model"], OTEL_SERVICE_NAME="worker", DYN_DISCOVERY_BACKEND="file"
        )
        frontend.wait_ready()
        wait(lambda: "my-model" in frontend.models(), lambda: worker.log + frontend.log)
        body = {"model": "my-model", "prompt": "abc", "max_tokens": 5}
        headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
        reply = await ask(frontend.port, "/v1/completions", json.dumps(body).encode(), headers=headers)
        assert reply.status == 200, worker.log

        # Of the frontend: the request, its two stages and the call. Of the worker: the request, its submission, five steps.
        spans = receiver.wait_trace(trace_id, 4 + 1 + 1 + 5)
        (generate,) = [span for span in spans if span.name == "engine.generate"]
        (call,) = [span for span in spans if span.name == "dispatch"]
        assert (generate.service, generate.parent_id) == ("worker", call.span_id)
        assert generate.attributes["model"] == "my-model"
        assert (generate.attributes["output_tokens"], generate.attributes["finish_reason"]) == (5, "length")
        (submit,) = [span for span in spans if span.name == "submit_rank_0"]
        assert submit.parent_id == generate.span_id
        assert submit.attributes["blocks"] == 8
        assert submit.attributes["continues"] == f"00-{trace_id}-{generate.span_id}-01"
        steps = [span for span in spans if span.name == "engine.step"]
        assert {(step.parent_id, step.attributes["blocks_held"]) for step in steps} == {(generate.span_id, 8)}
        assert len(steps) == 5
        worker.terminate()
        assert await worker.ended() == 0
