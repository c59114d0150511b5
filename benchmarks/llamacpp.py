"""`make bench-models`: SmolLM2 by llama.cpp behind our frontend and worker, against llama.cpp's own server on the same file.

All run side by side with the same slots and threads, one of them loaded at a time, round after round, each round in another
order. `text`: llama.cpp tokenizes and has the template, as with `--engine llamacpp-text`; `tokens`: our frontend does, as with `dynamo serve smollm2`.
Tokens per second are judged by the median of the ratios. First tokens are judged by bursts of as many requests as there are streams,
the same ones to each server in turn: by how much later they come in the mean of a burst, the median over the bursts.
Their prompts are short (`--first-words`), and each burst is sent twice, of which the second one counts: llama.cpp has computed the
prompts then, all but the last token. What we add does not depend on the prompt, and the time of a prompt in the engine varies by more
than that from burst to burst. Loads are short, too, and many: a shared machine changes its speed from minute to minute.
"At work" is the share of a load's time in which llama.cpp's process ran: where it is no less behind us, it did not lack work from us,
and the tokens' rates differ by how fast it ran.
With `--without-model` a llama.cpp that answers at once stands in its place (`null_llama`): what is left is what we add, to a tenth of
a millisecond. Requests that come together then wait for each other; beside a model they wait while it computes.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1] / "tests"))

from bench import machine, versions
from cases import Figures, chat, driven, load, measured_load, prepared, streaming
from model import words
from stack import Stack, free_port, processes

from support.real_models import BARE, CONTEXT, LLAMA, located

START_SECONDS = 120.0
ENGINES = {"text": "engine:LlamaCppTextEngine", "tokens": "engine:LlamaCppEngine"}
RUN = "from dynamo.llamacpp.{} import {} as Engine; from dynamo.worker.run import run; run(Engine)"
NULL_LLAMA = Path(__file__).parent / "null_llama"
SLOTS = 8
WORDS = 16
REQUESTS_PER_STREAM = 1
LEAST_REQUESTS = 4  # of a load
RATIO_BAR = 0.98
FIRST_TOKEN_BAR_MS = 2.0
LLAMA_CPP = "llama.cpp"
TOKENS_OF_BURST = 2
SENT = 2  # times that each burst is sent


@contextlib.contextmanager
def stacks(python: str, file: Path, folder: Path, *, has_model: bool = True) -> Iterator[dict[str, Stack]]:
    """Start llama.cpp's own server, and ours in both modes."""
    with contextlib.ExitStack() as held:
        found = {}
        for name in ("bare", "text", "tokens"):
            port, home = free_port(), folder / name
            home.mkdir()
            kept = {key: value for key, value in os.environ.items() if not key.startswith("DYN_")}
            env = kept | {
                "DYN_FILE_KV": str(home / "store"),
                "DYN_TCP_RPC_HOST": "127.0.0.1",
                "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
                "DYN_LOG": "info",
            }
            if not has_model:
                env["PYTHONPATH"] = str(NULL_LLAMA)
            commands = bare(python, file, port) if name == "bare" else ours(python, file, port, ENGINES[name])
            started = held.enter_context(processes(commands, port, env, home, patience_seconds=START_SECONDS))
            found[name] = started if name == "bare" else with_llama(started, started.pids["worker"])
        yield found


def with_llama(running: Stack, worker: int) -> Stack:
    """Add llama.cpp's process, which the worker has started, to the processes that are measured."""
    children = Path(f"/proc/{worker}/task").glob("*/children")
    found = [int(pid) for each in children for pid in each.read_text().split()]
    llama = [pid for pid in found if b"dynamo.llamacpp.server" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return replace(running, pids={**running.pids, LLAMA_CPP: llama[0]})


def bare(python: str, file: Path, port: int) -> dict[str, list[str]]:
    """The command of llama.cpp's own server, with the settings that a worker of ours gives it."""
    threads = {"cpuparams.n_threads": 1, "cpuparams_batch.n_threads": 1, "n_threads_http": SLOTS + 4}
    batch = {"n_ctx": CONTEXT * SLOTS, "n_parallel": SLOTS, "warmup": False, "verbosity": 1}
    settings = json.dumps({"model.path": str(file), "port": port, **batch, **threads})
    return {LLAMA_CPP: [python, "-c", f"{BARE}\nimport signal; signal.pause()", settings]}


def ours(python: str, file: Path, port: int, engine: str) -> dict[str, list[str]]:
    """The commands of worker and frontend."""
    own = ["--model", str(file), "--served-model-name", "bench", "--discovery-backend", "file"]
    size = ["--slots", str(SLOTS), "--threads", "1", "--context-length", str(CONTEXT)]
    http = ["--discovery-backend", "file", "--http-host", "127.0.0.1", "--http-port", str(port)]
    return {
        "worker": [python, "-c", RUN.format(*engine.split(":")), *own, *size],
        "frontend": [sys.executable, "-m", "dynamo.frontend", *http],
    }


def bodies(count: int, seed: int, tokens: int, length: int = WORDS) -> list[dict[str, Any]]:
    """Chat requests of `length` words, no two alike, each for exactly so many tokens."""
    members = streaming(ignore_eos=True, temperature=0.0)
    return [chat(" ".join(words(seed * 100_000 + number, length)), tokens, **members) for number in range(count)]


def measure(running: Stack, streams: int, seed: int, tokens: int) -> Figures:
    """One load of so many streams."""
    count = max(streams * REQUESTS_PER_STREAM, LEAST_REQUESTS)
    figures = measured_load(running, prepared(running.port, bodies(count, seed, tokens)), streams)
    return figures | {"at work": figures[f"{LLAMA_CPP} us"] / 1e6 * figures["tokens/s"]}


def first_token_ms(port: int, body: dict[str, Any]) -> float:
    """Milliseconds from sending a request to the first event with text."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.connect()
        began = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise RuntimeError(f"{reply.status}: {reply.read()!r}")
        for line in reply:
            choices = json.loads(line[6:])["choices"] if line.startswith(b"data: {") else ()
            if choices and choices[0]["delta"].get("content"):
                took = 1e3 * (time.perf_counter() - began)
                reply.read()  # so that nothing of it runs beside the next
                return took
    raise RuntimeError("the answer has no text")


def bursts(running: dict[str, Stack], streams: int, count: int, length: int) -> dict[str, list[float]]:
    """The mean first token of each of `count` bursts, by server: every server gets the same bursts, one of them at a time.

    The mean, as llama.cpp computes the first prompt of a burst alone or with the others, by chance: the first one then comes
    three times sooner and the others a third later, which moves the median by that third and the mean by a twentieth.
    """
    found: dict[str, list[float]] = {name: [] for name in running}
    for number in range(count):
        sent = bodies(streams, 500_000 + 1_000 * streams + number, TOKENS_OF_BURST, length)
        names = list(running)
        for name in names[number % 3 :] + names[: number % 3]:
            with ThreadPoolExecutor(streams) as pool:
                for _ in range(SENT):
                    times = list(pool.map(partial(first_token_ms, running[name].port), sent))
            found[name].append(statistics.fmean(times))
    return found


def show(streams: int, rounds: list[dict[str, Any]], firsts: dict[str, list[float]]) -> None:
    """Print the medians of one load beside their bars, and of each round the ratio."""
    rates = {name: [each["tokens/s"] for each in rounds if each["stack"] == name] for name in firsts}
    work = {name: [each["at work"] for each in rounds if each["stack"] == name] for name in firsts}
    print(
        f"\n{streams} streams: llama.cpp's own server {statistics.median(rates['bare']):.1f} tokens/s, "
        f"{statistics.median(work['bare']):.1%} at work, "
        f"first token {statistics.median(firsts['bare']):.1f} ms"
    )
    for name in ("text", "tokens"):
        ratios = sorted(mine / theirs for mine, theirs in zip(rates[name], rates["bare"], strict=True))
        later = sorted(mine - theirs for mine, theirs in zip(firsts[name], firsts["bare"], strict=True))
        ratio, delay, quarter = statistics.median(ratios), statistics.median(later), len(later) // 4
        print(
            f"  {name:7} {statistics.median(rates[name]):7.1f} tokens/s, ratio {ratio:6.3f} ({ratios[0]:.2f} .. {ratios[-1]:.2f}) "
            f">= {RATIO_BAR} {'pass' if ratio >= RATIO_BAR else 'MISS'}, llama.cpp {statistics.median(work[name]):.1%} at work; "
            f"first token {delay:+.1f} ms ({later[quarter]:+.1f} .. {later[-1 - quarter]:+.1f}) <= +{FIRST_TOKEN_BAR_MS:.0f} "
            f"{'pass' if delay <= FIRST_TOKEN_BAR_MS else 'MISS'}"
        )


def show_added(running: dict[str, Stack], streams: int, count: int, length: int) -> None:
    """Print what we add to the first token where the engine takes no time, and what of it is processor time."""
    before = {name: each.cpu() for name, each in running.items()}
    found = bursts(running, streams, count, length)
    print(f"\n{streams} streams: a server that answers at once {statistics.median(found['bare']):.1f} ms")
    for name in ("text", "tokens"):
        later = sorted(mine - theirs for mine, theirs in zip(found[name], found["bare"], strict=True))
        used = running[name].cpu()
        shares = ", ".join(
            f"{who} {1e6 * (used[who] - before[name][who]) / SENT / count / streams:,.0f}" for who in used
        )
        print(
            f"  {name:7} first token {statistics.median(later):+.1f} ms ({later[len(later) // 4]:+.1f} .. "
            f"{later[-1 - len(later) // 4]:+.1f}); CPU us per request of {TOKENS_OF_BURST} tokens: {shares}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="times that each load is put on each server (default: 5)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8], help="default: 1 4 8")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (default: 64)")
    parser.add_argument(
        "--bursts", type=int, default=60, help="for the first tokens of each number of streams (default: 60)"
    )
    parser.add_argument("--first-words", type=int, default=2, help="of the prompts of these bursts (default: 2)")
    parser.add_argument("--without-model", action="store_true", help="only what we add to the first token")
    parser.add_argument(
        "--file", type=Path, help="with --without-model: a GGUF file for its tokenizer (default: SmolLM2)"
    )
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="where models.json goes")
    arguments = parser.parse_args()
    if arguments.file is not None and not arguments.without_model:
        parser.error("--file goes with --without-model: the other figures are those of SmolLM2")
    found = located(LLAMA, "smollm2") if arguments.file is None else (sys.executable, arguments.file)
    if isinstance(found, str):
        parser.error(found)
    python, file = found
    rounds: list[dict[str, Any]] = []
    firsts: dict[int, dict[str, list[float]]] = {}
    print(f"load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    has_model = not arguments.without_model
    with tempfile.TemporaryDirectory() as folder, stacks(python, file, Path(folder), has_model=has_model) as running:
        for each in running.values():
            driven(load(each.port, prepared(each.port, bodies(2 * SLOTS, 1, 8)), SLOTS))
        if not has_model:
            for streams in arguments.streams:
                show_added(running, streams, arguments.bursts, arguments.first_words)
            return 0
        for streams in arguments.streams:
            print(f"first tokens of {streams} streams ...", file=sys.stderr)
            firsts[streams] = bursts(running, streams, arguments.bursts, arguments.first_words)
        for number in range(arguments.rounds):
            print(f"round {number + 1} of {arguments.rounds} ...", file=sys.stderr)
            for streams in arguments.streams:
                names = list(running)[number % 3 :] + list(running)[: number % 3]
                for name in names:
                    figures = measure(running[name], streams, 10 + number * 1000 + streams, arguments.tokens)
                    rounds.append({"round": number, "streams": streams, "stack": name, **figures})
                    if figures["failed"]:
                        print(
                            f"{name}, {streams} streams: {figures['failed']:.0f} requests failed: its figures mean nothing"
                        )
    for streams in arguments.streams:
        show(streams, [each for each in rounds if each["streams"] == streams], firsts[streams])
    print(f"load of the machine after: {os.getloadavg()[0]:.1f}")
    results = {"machine": machine(), "versions": versions(), "rounds": rounds, "first tokens": firsts}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "models.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"every round is in {arguments.out / 'models.json'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
