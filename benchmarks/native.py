"""The same cases against us and against the native system, in turn on the same machine; prints the ratios.

    DYNAMO_NATIVE_PYTHON=/path/to/venv/bin/python .venv/bin/python benchmarks/native.py

`native.md` tells how to make that venv. The engine is the same Python code in both workers; what differs is everything else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cases import PACE_SECONDS, Bench, Figures, measured_load, prepared, streaming, warm
from model import make_model
from stack import Stack, free_port, processes, stack

HERE = Path(__file__).parent
NATIVE_VERSION = "1.6.1"

Start = Callable[..., AbstractContextManager[Stack]]


@dataclass(frozen=True)
class Case:
    """One row: requests of `tokens` tokens, `streams` at a time, and how much less CPU than theirs we mean to use."""

    name: str
    delay: float
    streams: int
    requests: int
    tokens: int
    bar: float | None  # theirs / ours, frontend + worker together
    is_streaming: bool = True
    step: float = 0.0  # seconds; all streams get their token at the same moment

    @property
    def unit(self) -> str:
        return "token" if self.is_streaming else "request"


CASES = (
    Case("burst, 64 streams, 256 tokens", 0, 64, 320, 256, 5.0),
    Case("paced 20 ms, 64 streams, 128 tokens", PACE_SECONDS, 64, 192, 128, 4.5),
    Case("stepped 20 ms, 64 streams, 128 tokens", 0, 64, 128, 128, 5.0, step=PACE_SECONDS),
    Case("stepped 20 ms, 256 streams, 128 tokens", 0, 256, 512, 128, 5.0, step=PACE_SECONDS),
    Case("one-token requests, 64 at a time, unary", 0, 64, 3000, 1, None, is_streaming=False),
)


def native_python() -> str:
    """The python of the native venv. Exits with what to do when there is none."""
    path = os.environ.get("DYNAMO_NATIVE_PYTHON", "")
    if not path:
        sys.exit("set DYNAMO_NATIVE_PYTHON to the python of a venv with ai-dynamo 1.6.1 (benchmarks/native.md)")
    asked = "from importlib.metadata import version; print(version('ai-dynamo'))"
    try:
        found = subprocess.run([path, "-c", asked], capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        sys.exit(f"DYNAMO_NATIVE_PYTHON={path} does not run: {error}")
    if found.stdout.strip() != NATIVE_VERSION:
        sys.exit(
            f"DYNAMO_NATIVE_PYTHON={path} holds ai-dynamo {found.stdout.strip() or '(none)'}, not {NATIVE_VERSION}"
        )
    return path


def native_stack(python: str, engine: str = "native_engine.py") -> Start:
    """Starts the native frontend and one worker with our engine, as `stack.stack` does with ours."""

    @contextlib.contextmanager
    def start(model: Path, delay: float, *, step: float = 0.0) -> Iterator[Stack]:
        with tempfile.TemporaryDirectory() as name:
            port = free_port()
            env = {key: value for key, value in os.environ.items() if not key.startswith(("DYN_", "PYTHON"))} | {
                "TMPDIR": name,  # the native processes leave their logging configuration there
                "DYN_FILE_KV": str(Path(name) / "store"),
                "DYN_TCP_RPC_HOST": "127.0.0.1",
                "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
                "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
                "DYN_LOG": "info",
                "HF_HUB_OFFLINE": "1",
                "HOME": name,
            }
            commands = {
                "frontend": [
                    python, "-m", "dynamo.frontend",
                    "--discovery-backend", "file", "--http-host", "127.0.0.1", "--http-port", str(port),
                ],
                "worker": [
                    python, str(HERE / engine), "--model", str(model.resolve()), "--delay", str(delay), "--step", str(step),
                ],
            }  # fmt: skip
            with processes(commands, port, env, Path(name)) as running:
                yield running

    return start


def measure(case: Case, bench: Bench, start: Start) -> Figures:
    """One fresh start of one case."""
    members: dict[str, Any] = streaming() if case.is_streaming else {}
    with start(bench.model, case.delay, step=case.step) as running:
        warm(bench, running, case.streams, **members)
        requests = prepared(running.port, bench.bodies(case.requests, case.tokens, **members))
        figures = measured_load(running, requests, case.streams, per_request=not case.is_streaming)
        return figures | {f"{name} MB": value for name, value in running.rss().items()}


def middle(runs: list[Figures]) -> Figures:
    """The median of every figure."""
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def both_us(figures: Figures) -> float:
    """Frontend and worker together, per unit."""
    return figures["frontend us"] + figures["worker us"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="fresh starts of each stack per case (default 3)")
    parser.add_argument("--only", default="", help="run the cases whose name contains this text")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="where model and native.json go")
    arguments = parser.parse_args()
    python = native_python()
    bench = Bench(make_model(arguments.out / "model"), is_quick=False)
    stacks: dict[str, Start] = {"ours": stack, "theirs": native_stack(python)}
    report: dict[str, Any] = {
        "machine": platform.platform(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "native": NATIVE_VERSION,
        "cases": {},
    }
    print(
        f"{'us of CPU':42} {'':8} {'frontend':>9} {'worker':>9} {'both':>9} {'tokens/s':>9} {'first token':>12}  failed"
    )
    passed = True
    for case in CASES:
        if arguments.only not in case.name:
            continue
        runs: dict[str, list[Figures]] = {name: [] for name in stacks}
        for _ in range(arguments.repeats):
            for name, start in stacks.items():  # in turn: a noisy minute of the machine hits both
                runs[name].append(measure(case, bench, start))
        report["cases"][case.name] = runs
        medians = {name: middle(found) for name, found in runs.items()}
        for name, figures in medians.items():
            print(
                f"{case.name if name == 'ours' else '  per ' + case.unit:42} {name:8} {figures['frontend us']:9.1f} "
                f"{figures['worker us']:9.1f} {both_us(figures):9.1f} {figures['tokens/s']:9.0f} "
                f"{figures['first token p50 ms']:9.2f} ms  {figures['failed']:g}",
                flush=True,
            )
        ours, theirs = medians["ours"], medians["theirs"]
        ratio = both_us(theirs) / both_us(ours)
        verdict = "" if case.bar is None else f"  (>= {case.bar:g}: {'pass' if ratio >= case.bar else 'MISS'})"
        passed = passed and (case.bar is None or ratio >= case.bar) and not ours["failed"]
        print(
            f"  theirs / ours: frontend {theirs['frontend us'] / ours['frontend us']:.1f}, worker "
            f"{theirs['worker us'] / ours['worker us']:.1f}, both {ratio:.1f}{verdict}",
            flush=True,
        )
    (arguments.out / "native.json").write_text(json.dumps(report, indent=1))
    print(f"every repeat: {arguments.out / 'native.json'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
