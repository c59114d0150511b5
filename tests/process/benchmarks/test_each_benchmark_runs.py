"""Every benchmark runs to its end with its smallest setting. What it measures then means nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from support.demo_model import FILES
from support.gguf_model import write_gguf

FOLDER: Final = Path(__file__).parents[3] / "benchmarks"
ENDED: Final = (0, 1)  # 1: a bar was missed

SMALLEST: Final = {
    "batch_waits": ["--turns", "1"],
    "batches": ["--lines", "20", "--tokens", "1", "--delay", "0"],
    "budgets": ["--gateways", "ours", "--only", "at once", "--clients", "6"],
    "bench": ["--quick", "--only", "one-token"],
    "dispatch": ["--repeats", "1"],
    "fleet": [
        "--workers",
        "6",
        "--each",
        "2",
        "--kill",
        "2",
        "--streams",
        "4",
        "--joins",
        "2",
        "--leaves",
        "1",
        "--requests",
        "8",
        "--minutes",
        "0.05",
        "--idle-seconds",
        "1",
        "--lease-seconds",
        "5",
    ],
    "gateways": ["--quick", "--repeats", "1", "--only", "burst", "--gateways", "none,ours"],
    "idle_sources": ["--sources", "1", "--seconds", "0.1"],
    "index": ["--quick"],
    "inspector": ["--only", "viewer", "--streams", "4", "--turns", "1", "--seconds", "1", "--delay", "0.01"],
    "key_checks": [],
    "choices": ["--repeats", "1", "--sizes", "3"],
    "processes": ["--turns", "1", "--only", "one-token requests, kv"],
    "sampled": ["/dev/null", "platform"],
    "parsing": ["--rounds", "1"],
    "peers": ["--peers", "ours"],
    "picker": ["--rate", "20", "--seconds", "0.5", "--rounds", "1"],
    "reference": ["--tokens", "2", "--repeats", "1", "--layers", "1", "--hidden", "64", "--vocabulary", "1024"],
    "routing_table": ["--requests", "20", "--workers", "4", "--loads", "1", "--jobs", "1"],
    "request_calls": ["--requests", "5", "--tokens", "4"],
    "soak": ["--requests", "60", "--streams", "2"],
    "upkeep": ["fleet", "--workers", "120", "--adapters", "1", "--runs", "1"],
    "together": ["--together", "3", "--rounds", "1"],
    "token_path": ["--streams", "2", "--steps", "2", "--repeats", "1"],
}
# They leave files, in the folder of `--out`.
WITH_OUT: Final = frozenset({"bench", "budgets", "fleet", "gateways", "peers", "processes", "routing_table", "soak"})
# They measure what is not installed here.
HELP: Final = frozenset({"against_vllm", "llamacpp", "native", "native_routing"})
PARTS: Final = frozenset(
    [
        "budgeted",
        "cases",
        "engine",
        "envoy_calls",
        "fault_table",
        "fleet_workers",
        "floor",
        "grpc_worker",
        "ladder",
        "litellm_auth",
        "model",
        "native_engine",
        "openai_worker",
        "peer_engine",
        "probe",
        "reference_worker",
        "stack",
        "watched",
    ]
)
"""Files that are no benchmark by themselves: others run them, and `test_fault_table.py` one."""


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("DYN_", "ETCD_", "NATS_"))}
    command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


def test_each_file_is_run_by_a_test() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == SMALLEST.keys() | HELP | PARTS


@pytest.mark.parametrize("name", SMALLEST)
def test_a_benchmark_runs_to_its_end(tmp_path: Path, name: str) -> None:
    out = ["--out", str(tmp_path)] if name in WITH_OUT else []
    done = run(name, *SMALLEST[name], *out)
    assert done.returncode in ENDED, done.stdout[-1000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    assert done.stdout


@pytest.mark.parametrize("name", sorted(HELP))
def test_a_benchmark_beside_another_system_shows_its_help(name: str) -> None:
    done = run(name, "--help")
    assert (done.returncode, "--out" in done.stdout) == (0, True), done.stderr


def test_what_we_add_to_a_first_token_is_measured_without_a_model(tmp_path: Path) -> None:
    file = write_gguf(FILES, tmp_path / "demo.gguf")
    done = run("llamacpp", "--without-model", "--file", str(file), "--streams", "1", "2", "--bursts", "1")
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert done.stdout.count("text    first token ") == done.stdout.count("tokens  first token ") == 2, done.stdout


def test_a_file_beside_a_model_is_a_mistake() -> None:
    done = run("llamacpp", "--file", "demo.gguf")
    assert (done.returncode, "--without-model" in done.stderr) == (2, True), done.stderr
