"""What several processes of one frontend cost: the CPU of a request beside that of one process, and how even the load is.

    .venv/bin/python benchmarks/processes.py --counts 1,2,4

All frontends run at once, each with a worker of its own, and are asked in turn for a moment each, so that a noisy minute of
the machine hits all. The ratios are medians of those pairs. CPU is that of all processes of a frontend, its parent included.
The last lines open connections to listeners that share a port by SO_REUSEPORT, which the frontend does not use, and print
how evenly the kernel deals them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import socket
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent))

from cases import PACE_SECONDS, PATH, Bench, Figures, driven, load, prepared, streaming
from model import make_model
from stack import PATIENCE_SECONDS, POLL_SECONDS, Stack, cpu_seconds, rss_mb, stack

from dynamo.cli.bench.connections import Prepared
from dynamo.cli.bench.targets import Target

CONNECTIONS: Final = 64
TRIALS: Final = 200


@dataclass(frozen=True)
class Case:
    """One row: so many requests of `tokens` tokens in each turn."""

    name: str
    requests: int
    tokens: int
    step: float = 0.0
    is_streamed: bool = True
    keeps_alive: bool = True
    mode: str = "round-robin"
    connections: int = CONNECTIONS


CASES: Final = (
    Case("one-token requests", 512, 1, is_streamed=False),
    Case("one-token requests, kv", 512, 1, is_streamed=False, mode="kv"),
    Case("one-token requests, a connection each", 512, 1, is_streamed=False, keeps_alive=False),
    Case("burst, 256 tokens", 128, 256),
    Case("stepped 20 ms, 64 streams, 128 tokens", 64, 128, step=PACE_SECONDS),
    Case("stepped 20 ms, 256 streams, 128 tokens", 256, 128, step=PACE_SECONDS, connections=256),
)


def members(parent: int) -> list[int]:
    """Return the processes that serve: the children of `parent`, or itself where it has none."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in children] or [parent]


def keep_to(pid: int, cores: set[int]) -> None:
    """Let all threads of a process run on these cores only."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


@dataclass(frozen=True)
class Group:
    """A frontend of so many processes."""

    count: int
    running: Stack

    @property
    def pids(self) -> list[int]:
        """The processes that serve."""
        return members(self.running.pids["frontend"])

    def cpu(self) -> tuple[float, list[float]]:
        """Return the seconds of all its processes so far, and of each that serves."""
        each = [cpu_seconds(pid) for pid in self.pids]
        parent = self.running.pids["frontend"]
        return sum(each) + (cpu_seconds(parent) if parent not in self.pids else 0.0), each

    def wait_for_all(self) -> None:
        """Return when all its processes serve. Raises RuntimeError where they do not."""
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.running.port}/health", timeout=10) as answer:
                serving = json.loads(answer.read()).get("processes", {}).get("serving", 1)
            if serving == self.count:
                return
            if time.monotonic() > until:
                raise RuntimeError(f"{serving} of {self.count} processes serve")
            time.sleep(POLL_SECONDS)


def requests_of(case: Case, bench: Bench, port: int, count: int) -> list[Prepared]:
    """Return requests of a case, as bytes."""
    bodies = bench.bodies(count, case.tokens, **(streaming() if case.is_streamed else {}))
    if case.keeps_alive:
        return prepared(port, bodies)
    target = Target.of(f"http://127.0.0.1:{port}", headers={"Connection": "close"})
    return [Prepared(target.post(PATH, body), bool(body.get("stream"))) for body in bodies]


def turn(case: Case, bench: Bench, group: Group) -> Figures:
    """Load one frontend once."""
    requests = requests_of(case, bench, group.running.port, case.requests)
    before, each = group.cpu()
    recorder = driven(load(group.running.port, requests, case.connections))
    after, each_after = group.cpu()
    if recorder.failed:
        raise RuntimeError(f"{recorder.failed} requests failed: {recorder.failures}")
    spent = [end - begin for begin, end in zip(each, each_after, strict=True)]
    units = recorder.output_tokens if case.is_streamed else recorder.answered
    return {
        "us": 1e6 * (after - before) / units,
        "parent us": 1e6 * (after - before - sum(spent)) / units,
        "events per token": recorder.text_events / max(recorder.output_tokens, 1),
        "requests/s": recorder.answered / recorder.seconds,
        "least share": min(spent) / sum(spent) * group.count,
        "most share": max(spent) / sum(spent) * group.count,
    }


def measure(
    case: Case, bench: Bench, counts: Sequence[int], turns: int, *, is_apart: bool = False
) -> dict[int, list[Figures]]:
    """Return the figures of each turn, by the number of processes. `is_apart`: all frontends on a core of their own."""
    found: dict[int, list[Figures]] = {count: [] for count in counts}
    with contextlib.ExitStack() as stacks:
        groups = []
        for count in counts:
            flags = ("--workers", str(count), "--router-mode", case.mode)
            groups.append(Group(count, stacks.enter_context(stack(bench.model, 0, step=case.step, frontend=flags))))
        for group in groups:  # every path once, over connections that are spread over all processes
            group.wait_for_all()
            if is_apart:
                for pid in {group.running.pids["frontend"], *group.pids}:
                    keep_to(pid, {0})
                keep_to(group.running.pids["worker"], set(range(1, os.cpu_count() or 2)))
            driven(
                load(
                    group.running.port,
                    requests_of(case, bench, group.running.port, 2 * case.connections),
                    case.connections,
                )
            )
        for _ in range(turns):
            for group in groups:
                found[group.count].append(turn(case, bench, group))
        for group in groups:
            found[group.count][-1] |= {"MB": sum(rss_mb(pid) for pid in group.pids)}
    return found


def lines(case: Case, found: dict[int, list[Figures]]) -> Iterator[str]:
    """Yield the rows of a case."""
    first = next(iter(found))
    for count, turns in found.items():
        ratio = statistics.median(a["us"] / b["us"] for a, b in zip(turns, found[first], strict=True))
        middle = {key: statistics.median(each[key] for each in turns) for key in turns[0]}
        shares = f"{middle['least share']:.2f} .. {middle['most share']:.2f}"
        memory = turns[-1]["MB"]
        yield (
            f"| {case.name} | {count} | {middle['us']:.1f} | {ratio:.2f} | {middle['parent us']:.1f} | {shares} | {memory:.0f} |"
        )


# -- how evenly the kernel deals connections ---------------------------------------------------------------------------


def dealt_by_the_kernel(processes: int) -> list[int]:
    """Connect `CONNECTIONS` times to listeners that share a port; return how many each has."""
    with contextlib.ExitStack() as sockets:
        listeners: list[socket.socket] = []
        for _ in range(processes):
            listener = sockets.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(("127.0.0.1", listeners[0].getsockname()[1] if listeners else 0))
            listeners.append(listener)
        for listener in listeners:
            listener.listen(CONNECTIONS)
            listener.setblocking(False)
        address = listeners[0].getsockname()
        for _ in range(CONNECTIONS):
            sockets.enter_context(socket.create_connection(address))
        found = [0] * processes
        with selectors.DefaultSelector() as ready:
            for index, listener in enumerate(listeners):
                ready.register(listener, selectors.EVENT_READ, index)
            while sum(found) < CONNECTIONS:
                for key, _ in ready.select():
                    connection, _ = listeners[key.data].accept()
                    connection.close()
                    found[key.data] += 1
    return found


def kernel_line(processes: int) -> str:
    """Return a row: how uneven connections are that the kernel deals."""
    trials = [dealt_by_the_kernel(processes) for _ in range(TRIALS)]
    fullest = sorted(max(trial) / CONNECTIONS * processes for trial in trials)
    least = sorted(min(trial) / CONNECTIONS * processes for trial in trials)
    beyond = sum(max(trial) > 0.6 * CONNECTIONS for trial in trials) / TRIALS if processes == 2 else 0.0
    return (
        f"SO_REUSEPORT, {processes} listeners, {CONNECTIONS} connections: the fullest has {statistics.median(fullest):.2f} of its share "
        f"(1 in 20: {fullest[len(fullest) * 19 // 20]:.2f}), the emptiest {statistics.median(least):.2f} (1 in 20: {least[len(least) // 20]:.2f})"
        + (f"; beyond 40 to 60: {100 * beyond:.0f} % of {TRIALS} trials" if processes == 2 else "")
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", default="1,2", help="numbers of processes; ratios are to the first (default 1,2)")
    parser.add_argument("--turns", type=int, default=12, help="how often each is asked (default 12)")
    parser.add_argument("--only", default="", metavar="TEXT", help="run the cases whose name contains it")
    parser.add_argument(
        "--apart", action="store_true", help="keep the frontends to the first core, and all else off it"
    )
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="where model and processes.json go")
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.counts.split(",")]
    chosen = [case for case in CASES if arguments.only in case.name]
    if not chosen or arguments.turns < 1 or min(counts) < 1:
        parser.error("nothing to run: " + ", ".join(repr(case.name) for case in CASES))
    bench = Bench(make_model(arguments.out / "model"), is_quick=False)
    if arguments.apart:
        keep_to(os.getpid(), set(range(1, os.cpu_count() or 2)))
    report: dict[str, Any] = {}
    print(
        "| Case | Processes | us | Ratio | Parent, us | Least and most of an even share | MB |\n|---|---|---|---|---|---|---|"
    )
    for case in chosen:
        found = measure(case, bench, counts, arguments.turns, is_apart=arguments.apart)
        report[case.name] = found
        print("\n".join(lines(case, found)), flush=True)
    for count in counts:
        if count > 1:
            print(kernel_line(count))
    (arguments.out / "processes.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"every turn: {arguments.out / 'processes.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
