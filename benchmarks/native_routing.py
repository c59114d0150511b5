"""One trace to the native frontend with its KV router and to ours, in turns, each before native mock workers; prints hits, times, CPU.

    DYNAMO_NATIVE_PYTHON=/path/to/venv/bin/python .venv/bin/python benchmarks/native_routing.py

`native.md` tells how to make that venv. The traces are those of `dynamo bench replay`; the hit rate is what the workers report. Beside
it stands what one cache as large as all of them together would reuse: no placing can do better.

`waited us` is how long the frontend's threads were ready to run while other programs had the CPUs, for each request. Ours is one
thread: what it waits delays its first tokens, and on a busy machine that is most of the difference. Compare runs where it is small.
`--policy` is the policy of our router; with `default`, both frontends place by the same formula.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

sys.path.insert(0, str(Path(__file__).parent))

from model import make_model
from native import native_python
from stack import free_port, processes

from dynamo.cli.bench.replay.command import replay_live
from dynamo.cli.bench.targets import Target
from dynamo.replay.presets import Preset, preset_of
from dynamo.replay.run import pooled_hit_rate
from dynamo.replay.trace import StretchTree, Trace

MODEL: Final = "bench"
HITS: Final = 1.08  # ours / theirs
FIRST_TOKEN: Final = 0.9
CPU: Final = 1.0

Figures = dict[str, float]


def measure(frontend: Sequence[str], mocker: str, model: Path, preset: Preset, trace: Trace, speedup: float) -> Figures:
    """Send the trace to fresh processes. `frontend`: its python, and flags after those of both; `mocker`: its python."""
    with tempfile.TemporaryDirectory() as name:
        port, options = free_port(), preset.options
        env = {key: value for key, value in os.environ.items() if not key.startswith(("DYN_", "PYTHON"))} | {
            "TMPDIR": name,  # the native processes leave their logging configuration there
            "DYN_FILE_KV": str(Path(name) / "store"),
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
            "DYN_LOG": "warn",
            "HF_HUB_OFFLINE": "1",
            "HOME": name,
        }
        commands = {
            "frontend": [
                frontend[0], "-m", "dynamo.frontend", "--discovery-backend", "file", "--http-port", str(port),
                "--router-mode", "kv", *frontend[1:],
            ],
            "workers": [
                mocker, "-m", "dynamo.mocker", "--discovery-backend", "file", "--model-path", str(model.resolve()),
                "--model-name", MODEL, "--num-workers", str(preset.setup.workers), "--block-size", str(options.block_size),
                "--num-gpu-blocks-override", str(options.num_gpu_blocks), "--max-num-seqs", str(options.max_num_seqs),
                "--max-num-batched-tokens", str(options.max_num_batched_tokens),
            ],
        }  # fmt: skip
        with processes(commands, port, env, Path(name), patience_seconds=90) as running:
            before, waited_before = running.cpu(), running.waited()
            figures = dict(replay_live(trace, Target.of(f"http://127.0.0.1:{port}"), MODEL, speedup))
            after, waited = running.cpu(), running.waited()
        return {
            "hits": figures["prefix_cache_reused_ratio"],
            "first token, ms": figures["mean_ttft_ms"],
            "p99 of it, ms": figures["p99_ttft_ms"],
            "whole, ms": figures["mean_e2e_latency_ms"],
            "frontend us": 1e6 * (after["frontend"] - before["frontend"]) / figures["requests"],
            "waited us": 1e6 * (waited["frontend"] - waited_before["frontend"]) / figures["requests"],
            "failed": figures["requests"] - figures["finished"],
            "late, ms": figures["p99_late_ms"],
        }


def compare(name: str, arguments: argparse.Namespace, pythons: dict[str, str], model: Path) -> tuple[bool, Any]:
    """Measure both systems on a preset, in turns; print the medians and what the bars make of them."""
    preset = preset_of(name)
    setup, options = preset.setup, preset.options
    speedup = setup.arrival_speedup_ratio * arguments.speedup
    runs: dict[str, list[Figures]] = {system: [] for system in pythons}
    flags = {"ours": [f"--router-policy={arguments.policy}"], "theirs": []}
    ratios = []
    for turn in range(arguments.repeats):
        trace = preset.make_trace(arguments.seed + turn, arguments.requests)
        order = [*pythons] if turn % 2 == 0 else [*reversed(pythons)]
        for system in order:
            runs[system].append(
                measure([pythons[system], *flags[system]], pythons["theirs"], model, preset, trace, speedup)
            )
        pooled = pooled_hit_rate(trace, setup.workers * options.num_gpu_blocks, StretchTree(options.block_size))
        ours, theirs = runs["ours"][-1], runs["theirs"][-1]
        ratios.append({key: ours[key] / theirs[key] if theirs[key] else 0.0 for key in ours})
        for system in pythons:
            shown = "  ".join(f"{key} {value:.3f}" if key == "hits" else f"{key} {value:.0f}" for key, value in runs[system][-1].items())  # fmt: skip
            print(f"{name}, seed {arguments.seed + turn}, {system:7} {shown}  (pooled {pooled:.3f})", flush=True)
    middle = {key: statistics.median(each[key] for each in ratios) for key in ratios[0]}
    bars = (
        ("hits", middle["hits"] >= HITS, f">= {HITS:g}"),
        ("first token, ms", middle["first token, ms"] <= FIRST_TOKEN, f"<= {FIRST_TOKEN:g}"),
        ("frontend us", middle["frontend us"] <= CPU, f"<= {CPU:g}"),
    )
    for what, is_met, bar in bars:
        print(
            f"  {name}, ours / theirs, {what}: {middle[what]:.3f}  ({bar}: {'pass' if is_met else 'MISS'})", flush=True
        )
    failed = sum(each["failed"] for each in runs["ours"])
    return all(is_met for _, is_met, _ in bars) and not failed, {"runs": runs, "ratios": ratios}


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["4k"], help="of `dynamo bench replay` (default 4k)")
    parser.add_argument("--requests", type=int, default=600, help="the first so many of each trace (default 600)")
    parser.add_argument("--repeats", type=int, default=3, help="traces of each preset, each to both (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the first trace")
    parser.add_argument("--speedup", type=float, default=1.0, help="the traces, so many times as fast")
    parser.add_argument("--policy", default="time", help="--router-policy of our frontend (default time)")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="where the model and the figures go")
    arguments = parser.parse_args()
    pythons = {"ours": sys.executable, "theirs": native_python()}
    model = make_model(arguments.out / "model")
    report, is_met = {}, True
    for name in arguments.presets:
        met, report[name] = compare(name, arguments, pythons, model)
        is_met = is_met and met
    (arguments.out / "native_routing.json").write_text(json.dumps(msgspec.to_builtins(report), indent=1))
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
