"""`make bench`: start each stack afresh, load it, and print CPU per token of each process against the bars.

CPU is user + system time of a process over the load window, from /proc; wall time on a shared machine is noise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from load import Outcome, run_load
from model import make_model, prompt_text

HERE = Path(__file__).parent
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Stack:
    """A running frontend and worker."""

    port: int
    frontend: int  # pid
    worker: int  # pid
    seconds_to_first_answer: float


def cpu_seconds(pid: int) -> float:
    """User + system seconds of one process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def rss_mb(pid: int) -> float:
    """Resident memory of one process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def post(port: int, body: dict[str, Any], timeout: float = 10) -> dict[str, Any]:
    """One unary chat request."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.loads(answer.read())  # type: ignore[no-any-return]


@contextlib.contextmanager
def stack(model: Path, delay: float) -> Iterator[Stack]:
    """Our frontend and one bench worker, fresh; stopped at the end."""
    with tempfile.TemporaryDirectory() as store:
        port = free_port()
        env = {
            **os.environ,
            "DYN_FILE_KV": store,
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
            "DYN_LOG": "info",
        }
        env.pop("DYN_SYSTEM_PORT", None)
        log = (Path(store) / "log").open("w")
        begun = time.perf_counter()
        frontend = subprocess.Popen(
            [sys.executable, "-m", "dynamo.frontend", "--discovery-backend", "file", "--http-port", str(port)],
            env=env, stdout=log, stderr=log,
        )  # fmt: skip
        worker = subprocess.Popen(
            [sys.executable, str(HERE / "engine.py"), "--model", str(model), "--delay", str(delay)],
            env=env, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            body = {"model": "bench", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
            while True:
                try:
                    post(port, body)
                    break
                except Exception:
                    if time.perf_counter() - begun > 30 or frontend.poll() is not None or worker.poll() is not None:
                        tail = (Path(store) / "log").read_text()[-3000:]
                        raise RuntimeError(f"the stack did not come up:\n{tail}") from None
                    time.sleep(0.01)
            yield Stack(port, frontend.pid, worker.pid, time.perf_counter() - begun)
        finally:
            for process in (frontend, worker):
                process.send_signal(signal.SIGINT)
            for process in (frontend, worker):
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            log.close()


@dataclass
class Case:
    """One row of the table."""

    name: str
    delay: float
    streams: int
    requests: int
    tokens: int
    bars: tuple[float, float]
    unit: str = "token"
    stream: bool = True
    extra: dict[str, Any] | None = None


CASES = [
    Case("burst, 64 streams, 256 tokens", 0, 64, 640, 256, (4.0, 2.5)),
    Case("burst, 256 streams, 256 tokens", 0, 256, 1024, 256, (5.0, 3.2)),
    Case("paced 20 ms, 64 streams, 128 tokens", 0.02, 64, 192, 128, (18, 10)),
    Case("paced 20 ms, 256 streams, 128 tokens", 0.02, 256, 512, 128, (15, 7)),
    Case(
        "paced, 64 streams, stop strings + logprobs", 0.02, 64, 128, 128, (22, 12),
        extra={"stop": ["zzqqzz", "\n\n\n\n"], "logprobs": True},
    ),
    Case("one-token requests, 64 at a time, unary", 0, 64, 6000, 1, (300, 80), unit="request", stream=False),
]  # fmt: skip


def measure(case: Case, model: Path, prompt: str) -> dict[str, Any]:
    """One fresh start of one case."""
    body: dict[str, Any] = {
        "model": "bench",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": case.tokens,
        "stream": case.stream,
        **(case.extra or {}),
    }
    if case.stream:
        body["stream_options"] = {"include_usage": True}
    with stack(model, case.delay) as running:
        warm = {**body, "max_tokens": min(case.tokens, 8)}
        asyncio.run(run_load(running.port, [warm], streams=case.streams, requests=case.streams * 2, stream=case.stream))
        before = cpu_seconds(running.frontend), cpu_seconds(running.worker), time.process_time()
        outcome: Outcome = asyncio.run(
            run_load(running.port, [body], streams=case.streams, requests=case.requests, stream=case.stream)
        )
        after = cpu_seconds(running.frontend), cpu_seconds(running.worker), time.process_time()
        units = outcome.tokens if case.unit == "token" else outcome.requests
        return {
            "frontend_us": 1e6 * (after[0] - before[0]) / units,
            "worker_us": 1e6 * (after[1] - before[1]) / units,
            "load_us": 1e6 * (after[2] - before[2]) / units,
            "tokens_per_second": outcome.tokens / outcome.seconds,
            "events_per_token": outcome.events / max(outcome.tokens, 1),
            "first_token_p50_ms": 1e3 * statistics.median(outcome.first_token or [0]),
            "errors": outcome.errors,
            "start_seconds": running.seconds_to_first_answer,
            "rss_mb": (rss_mb(running.frontend), rss_mb(running.worker)),
        }


def measure_quiet(model: Path, prompt: str) -> dict[str, Any]:
    """First token on a kept-alive connection, memory and CPU at rest."""
    with stack(model, 0) as running:
        body: dict[str, Any] = {
            "model": "bench", "messages": [{"role": "user", "content": prompt}], "max_tokens": 1, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        outcome = asyncio.run(run_load(running.port, [body], streams=1, requests=300))
        time.sleep(1)
        before = cpu_seconds(running.frontend), cpu_seconds(running.worker)
        time.sleep(10)
        idle = [
            100 * (cpu_seconds(p) - b) / 10 for p, b in zip((running.frontend, running.worker), before, strict=True)
        ]
        return {
            "first_token_p50_ms": 1e3 * statistics.median(outcome.first_token),
            "start_seconds": running.seconds_to_first_answer,
            "rss_mb": (rss_mb(running.frontend), rss_mb(running.worker)),
            "idle_percent": tuple(idle),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="fresh starts per case; the median is shown (default 3)")
    parser.add_argument("--only", default="", help="run the cases whose name contains this text")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="where model and JSON go")
    args = parser.parse_args()
    model = make_model(args.out / "model")
    prompt = prompt_text(model, 64, seed=7)
    results: dict[str, Any] = {"machine": platform.platform(), "python": platform.python_version(), "cases": {}}
    print(f"{'case':46} {'frontend':>16} {'worker':>16} {'load gen':>9} {'tokens/s':>9}  errors")
    for case in CASES:
        if args.only not in case.name:
            continue
        runs = [measure(case, model, prompt) for _ in range(args.repeats)]
        results["cases"][case.name] = runs
        mid = {
            k: statistics.median(r[k] for r in runs)
            for k in ("frontend_us", "worker_us", "load_us", "tokens_per_second")
        }
        cells = [
            f"{mid[key]:6.1f} <= {bar:<4g}{'pass' if mid[key] <= bar else 'MISS'}"
            for key, bar in zip(("frontend_us", "worker_us"), case.bars, strict=True)
        ]
        errors = sum(r["errors"] for r in runs)
        print(
            f"{case.name:46} {cells[0]:>16} {cells[1]:>16} {mid['load_us']:9.1f} {mid['tokens_per_second']:9.0f}  {errors}",
            flush=True,
        )
    if args.only in "quiet":
        runs = [measure_quiet(model, prompt) for _ in range(args.repeats)]
        results["cases"]["quiet"] = runs
        first = statistics.median(r["first_token_p50_ms"] for r in runs)
        start = statistics.median(r["start_seconds"] for r in runs)
        print(
            f"first token, 1 stream, kept alive: {first:.2f} ms (<= 1.5)   start to first answer: {start:.2f} s (<= 1.2)"
        )
        memory = [statistics.median(r["rss_mb"][i] for r in runs) for i in (0, 1)]
        idle = [statistics.median(r["idle_percent"][i] for r in runs) for i in (0, 1)]
        print(
            f"RSS: {memory[0]:.0f} / {memory[1]:.0f} MB (<= 90 / 60)   idle CPU: {idle[0]:.2f} / {idle[1]:.2f} % (<= 0.3)"
        )
    (args.out / "results.json").write_text(json.dumps(results, indent=1))
    print(f"every repeat: {args.out / 'results.json'}")


if __name__ == "__main__":
    main()
