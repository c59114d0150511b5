"""`make bench-vllm`: vLLM behind our frontend and worker, against `vllm serve`: same model, flags and load, in turns.

`serving`: both run side by side, one of them loaded at a time, round after round. CPU is what the processes before the
engine use: for `vllm serve` its API server, here frontend and worker; the engine's own processes are the same for both.
Of the time to the first token, "in the engine" is what vLLM itself counts: in its queue, and until the prompt is computed.
`routing`: prompts that share prefixes, over two engines whose caches hold them only together. Round-robin over two
`vllm serve`, then two workers of ours behind `--router-mode kv`. The hit rate is what the engines count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from bench import machine, versions
from cases import Figures, chat, driven, load, measured_load, prepared, streaming
from model import words
from stack import Stack, free_port, processes

MODEL = Path(__file__).parents[1] / "src" / "lab" / "dynamo" / "reference" / "demo" / "model"
FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--block-size", "32")
START_SECONDS = 900.0
WORDS = 16
TOKENS = 128
REQUESTS_PER_STREAM = {1: 6, 16: 4, 64: 4}

PREFIXES, REQUESTS_PER_PREFIX = 32, 8
PREFIX_TOKENS, SUFFIX_TOKENS = 512, 32
BLOCKS = 320  # of 32 tokens in each engine: 10,240 tokens, where all prefixes are 16,384
CONCURRENCY = 4


@dataclass(frozen=True)
class Bar:
    """What the ratio of ours to `vllm serve` must reach, or not exceed."""

    figure: str
    unit: str
    limits: Mapping[int, float]  # by the number of streams
    is_floor: bool = False


BARS = (
    Bar("tokens/s", "tokens/s", {1: 1.0, 16: 1.05, 64: 1.05}, is_floor=True),
    Bar("first token p50 ms", "ms", {16: 0.8, 64: 0.65}),
    Bar("in the engine ms", "ms, mean", {}),
    Bar("before the engine us", "us/token", {64: 0.6}),
)
ENGINE_TIMES = ("vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds")
ROUTING_BAR = 1.5


def environment(folder: Path, **more: str) -> dict[str, str]:
    """The variables of every process: the same engine on both sides."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}
    return kept | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "DYN_FILE_KV": str(folder / "store"),
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
        "DYN_LOG": "info",
        **more,
    }


def serve_command(python: str, port: int, *flags: str) -> list[str]:
    """`vllm serve`: the CPU build's console script does not start, its module does."""
    own = ["--model", str(MODEL), "--served-model-name", "bench", "--host", "127.0.0.1", "--port", str(port)]
    return [python, "-m", "vllm.entrypoints.openai.api_server", *own, *FLAGS, *flags]


def worker_command(python: str, *flags: str) -> list[str]:
    own = ["--model", str(MODEL), "--served-model-name", "bench", "--discovery-backend", "file"]
    return [python, "-m", "dynamo.vllm", *own, *FLAGS, *flags]


def frontend_command(port: int, *flags: str) -> list[str]:
    own = ["--discovery-backend", "file", "--http-host", "127.0.0.1", "--http-port", str(port)]
    return [sys.executable, "-m", "dynamo.frontend", *own, *flags]


# -- serving ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def both(python: str, folder: Path) -> Iterator[dict[str, tuple[Stack, int]]]:
    """Start the two stacks, one after the other. Yields each with the port of vLLM's metrics."""
    status = free_port()
    env = environment(folder, DYN_SYSTEM_PORT=str(status))
    with contextlib.ExitStack() as held:
        found = {}
        starts: dict[str, Callable[[int], dict[str, list[str]]]] = {
            "vllm serve": lambda port: {"serve": serve_command(python, port)},
            "ours": lambda port: {"worker": worker_command(python), "frontend": frontend_command(port)},
        }
        for name, commands in starts.items():
            port = free_port()
            home = folder / name.replace(" ", "-")
            home.mkdir()
            print(f"starting {name} ...", flush=True)
            running = processes(commands(port), port, env, home, patience_seconds=START_SECONDS)
            found[name] = held.enter_context(running), port if "serve" in name else status
        yield found


def bodies(count: int, seed: int, tokens: int = TOKENS) -> list[dict[str, Any]]:
    """Chat requests of 16 words, no two alike, each for exactly so many tokens."""
    members = streaming(ignore_eos=True)
    return [chat(" ".join(words(seed * 100_000 + number, WORDS)), tokens, **members) for number in range(count)]


def measure(running: Stack, metrics: int, streams: int, seed: int, share: float) -> Figures:
    """One load of so many streams; `share` shortens it. `metrics`: the port of vLLM's."""
    count = max(streams, round(streams * REQUESTS_PER_STREAM.get(streams, 4) * share))
    before = engine_seconds(metrics)
    figures = measured_load(running, prepared(running.port, bodies(count, seed)), streams)
    in_engine = 1000 * (engine_seconds(metrics) - before) / count
    return figures | {
        "in the engine ms": in_engine,
        "before the engine us": sum(figures[f"{name} us"] for name in running.pids),
    }


def engine_seconds(port: int) -> float:
    """How long requests have been in vLLM's engine until their first token, all together."""
    return sum(counted([port], f"{name}_sum") for name in ENGINE_TIMES)


def serving(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every round of every load; prints the medians beside the bars."""
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, both(arguments.python, Path(folder)) as stacks:
        for running, _ in stacks.values():
            driven(
                load(
                    running.port,
                    prepared(running.port, bodies(2 * max(arguments.streams), 1, 8)),
                    max(arguments.streams),
                )
            )
        idle = {name: running.cpu() for name, (running, _) in stacks.items()}
        time.sleep(2.0)  # a second of each process that has nothing to do, to be seen beside its figures
        for name, (running, _) in stacks.items():
            used = sum(running.cpu().values()) - sum(idle[name].values())
            print(f"{name}: started in {running.seconds_to_first_answer:.0f} s, idle {50 * used:.1f} % of a core")
        for number in range(arguments.rounds):
            for streams in arguments.streams:
                names = list(stacks) if number % 2 else list(reversed(stacks))
                for name in names:
                    seed = 10 + number * 1000 + streams
                    figures = measure(*stacks[name], streams, seed, arguments.share)
                    rounds.append({"round": number, "streams": streams, "stack": name, **figures})
                    if figures["failed"]:
                        print(
                            f"{name}, {streams} streams: {figures['failed']:.0f} requests failed: its figures mean nothing"
                        )
    for streams in arguments.streams:
        show(streams, [each for each in rounds if each["streams"] == streams])
    return rounds


def show(streams: int, rounds: list[dict[str, Any]]) -> None:
    """Print the medians of one load. The ratio is that of the medians; the bar is for the ratio."""
    print(
        f"\n{streams} streams{'':18} {'vllm serve':>12} {'ours':>12} {'ratio':>8} {'bar':>9}        ratios of the rounds"
    )
    for bar in BARS:
        values = {
            name: [each[bar.figure] for each in rounds if each["stack"] == name] for name in ("vllm serve", "ours")
        }
        theirs, ours = (statistics.median(values[name]) for name in ("vllm serve", "ours"))
        ratio, limit = ours / theirs, bar.limits.get(streams)
        verdict = "-"
        if limit is not None:
            verdict = "pass" if (ratio >= limit if bar.is_floor else ratio <= limit) else "MISS"
        asked = "" if limit is None else f"{'>=' if bar.is_floor else '<='} {limit:.2f}"
        each_round = [ours / theirs for theirs, ours in zip(values["vllm serve"], values["ours"], strict=True)]
        print(
            f"{bar.figure:28} {theirs:12.1f} {ours:12.1f} {ratio:8.2f} {asked:>9} {verdict:6} "
            f"{min(each_round):.2f} .. {max(each_round):.2f} ({bar.unit})"
        )
    parts = {
        name: statistics.median(each[f"{name} us"] for each in rounds if f"{name} us" in each)
        for name in ("frontend", "worker")
    }
    print(f"ours before the engine: {', '.join(f'{name} {value:.1f} us' for name, value in parts.items())}")


# -- routing ----------------------------------------------------------------------------------------------------------


def trace(seed: int) -> list[list[int]]:
    """Prompts as token ids: shared prefixes in random order, each time with another end."""
    generator = random.Random(seed)
    prefixes = [[generator.randrange(10, 800) for _ in range(PREFIX_TOKENS)] for _ in range(PREFIXES)]
    order = [number for number in range(PREFIXES) for _ in range(REQUESTS_PER_PREFIX)]
    generator.shuffle(order)
    return [prefixes[number] + [generator.randrange(10, 800) for _ in range(SUFFIX_TOKENS)] for number in order]


def complete(port: int, prompt: list[int]) -> None:
    body = {"model": "bench", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()


def counted(ports: list[int], name: str) -> float:
    """The sum of a counter of vLLM over several processes."""
    total = 0.0
    for port in ports:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        total += sum(map(float, re.findall(rf"^{re.escape(name)}{{.*}} (\S+)$", text, re.MULTILINE)))
    return total


def hit_rate(prompts: list[list[int]], ports: list[int], metrics: list[int]) -> float:
    """Send the trace, each prompt to the next of `ports`; the share of prompt tokens that the engines found cached."""
    names = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
    before = [counted(metrics, name) for name in names]
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        list(pool.map(lambda each: complete(ports[each[0] % len(ports)], each[1]), enumerate(prompts)))
    hits, queries = (counted(metrics, name) - was for name, was in zip(names, before, strict=True))
    return hits / queries


def routing(arguments: argparse.Namespace) -> dict[str, float]:
    """The hit rates of both; prints them beside the bar."""
    limits = ("--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", "4")
    prompts = trace(arguments.seed)
    rates = {}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as held:
        folder, ports = Path(name), [free_port(), free_port()]
        for port in ports:
            (home := folder / str(port)).mkdir()
            commands = {"serve": serve_command(arguments.python, port, *limits)}
            held.enter_context(processes(commands, port, environment(folder), home, patience_seconds=START_SECONDS))
        rates["round-robin over two vllm serve"] = hit_rate(prompts, ports, ports)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as held:
        folder, port, status = Path(name), free_port(), [free_port(), free_port()]
        (home := folder / "second").mkdir()
        second = environment(folder, DYN_SYSTEM_PORT=str(status[1]))
        commands = {
            "first": worker_command(arguments.python, *limits),
            "frontend": frontend_command(port, "--router-mode", "kv"),
        }
        held.enter_context(
            processes(
                commands,
                port,
                environment(folder, DYN_SYSTEM_PORT=str(status[0])),
                folder,
                patience_seconds=START_SECONDS,
            )
        )
        held.enter_context(
            processes(
                {"second": worker_command(arguments.python, *limits)},
                port,
                second,
                home,
                patience_seconds=START_SECONDS,
                is_up=lambda: is_serving(status[1]),
            )
        )
        rates["two workers of ours, --router-mode kv"] = hit_rate(prompts, [port], status)
    theirs, ours = rates.values()
    tokens = PREFIXES * PREFIX_TOKENS
    print(f"\n{len(prompts)} prompts, {PREFIXES} prefixes ({tokens} tokens), caches of {BLOCKS * 32} tokens each")
    for what, rate in rates.items():
        print(f"{what:40} {100 * rate:6.1f} % of the prompt tokens found cached")
    print(f"{'ratio':40} {ours / theirs:6.2f}   >= {ROUTING_BAR}  {'pass' if ours / theirs >= ROUTING_BAR else 'MISS'}")
    return rates


def is_serving(status_port: int) -> bool:
    """Whether a worker's status server reports that it serves."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{status_port}/health", timeout=5) as answer:
            return bool(json.loads(answer.read()).get("status") == "ready")
    except (OSError, ValueError):
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=os.environ.get("DYNAMO_VLLM_PYTHON", ""), help="a Python that has vLLM and this package (default: DYNAMO_VLLM_PYTHON)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, help="times that each load is put on each stack (default: 5)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64], help="default: 1 16 64")
    parser.add_argument("--share", type=float, default=1.0, help="of the requests of each load, to be done sooner")
    parser.add_argument("--only", choices=("serving", "routing"), help="one of the two parts")
    parser.add_argument("--seed", type=int, default=1, help="of the trace with shared prefixes")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="where vllm.json goes")
    arguments = parser.parse_args()
    if not arguments.python:
        parser.error("set DYNAMO_VLLM_PYTHON to a Python that has vLLM and this package (docs/engines.md)")
    results: dict[str, Any] = {"machine": machine(), "versions": versions()}
    if arguments.only != "routing":
        results["serving"] = serving(arguments)
    if arguments.only != "serving":
        results["routing"] = routing(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "vllm.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nevery round is in {arguments.out / 'vllm.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
