"""Gateways side by side: what each takes of the CPU for the same requests, in turn on the same machine.

    eval "$(tools/gateway_venvs.sh)"; .venv/bin/python benchmarks/gateways.py

Two kinds are compared. Ours, the native one and `smg` with workers over gRPC read a request, render its template, tokenise
it, call a worker with token ids and make text of what comes back. `smg` with workers over HTTP and `vllm-router` relay to a
worker that does all this: here it is `openai_worker.py`, which does none of it, and so the cheapest that there can be. What a
relay saves its worker has to do. So each is also measured in front of our frontend and its worker, where the tokenising is
part of the sum.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent))

from bench import machine, versions
from cases import PACE_SECONDS, PATH, Bench, Figures, driven, measured_load, prepared, streaming, warm
from model import make_model
from native import native_python, native_stack
from processes import Group
from stack import HERE, Stack, free_port, processes, stack

from dynamo.cli.bench.targets import Target

TOGETHER: Final = 64
ROUNDS: Final = 12  # of requests that arrive together
FIRST_TEXT: Final = re.compile(rb'"content": ?"[^"]')

Start = Callable[[Path, float, float], AbstractContextManager[Stack]]


@dataclass(frozen=True)
class Gateway:
    """One column. `start` takes the model, the delay and the step of the worker."""

    name: str
    start: Start


@dataclass(frozen=True)
class Load:
    """One row: so many requests of `tokens` tokens, so many at a time."""

    name: str
    streams: int
    requests: int
    tokens: int
    is_streamed: bool = True


@dataclass(frozen=True)
class Rhythm:
    """The loads that one start of a worker answers."""

    name: str
    delay: float
    step: float
    loads: tuple[Load, ...]


RHYTHMS: Final = (
    Rhythm(
        "burst", 0, 0,
        (Load("one-token requests, 64 at a time", 64, 3000, 1, is_streamed=False), Load("burst, 64 streams, 256 tokens", 64, 320, 256)),
    ),
    Rhythm("paced", PACE_SECONDS, 0, (Load("paced 20 ms, 64 streams, 128 tokens", 64, 128, 128), Load("paced 20 ms, 256 streams, 128 tokens", 256, 512, 128))),
    Rhythm("stepped", 0, PACE_SECONDS, (Load("stepped 20 ms, 64 streams, 128 tokens", 64, 128, 128), Load("stepped 20 ms, 256 streams, 128 tokens", 256, 512, 128))),
)  # fmt: skip


def relay(python: str, program: str, arguments: Sequence[str], behind: Start, scheme: str = "http") -> Start:
    """Return what starts `behind`, and a gateway that calls it."""

    @contextlib.contextmanager
    def start(model: Path, delay: float, step: float) -> Iterator[Stack]:
        with tempfile.TemporaryDirectory() as name, behind(model, delay, step) as worker:
            port = free_port()
            command = [
                str(Path(python).with_name(program)), *arguments, "--host", "127.0.0.1", "--port", str(port),
                "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()),
                "--worker-urls", f"{scheme}://127.0.0.1:{worker.port}", "--policy", "round_robin",
            ]  # fmt: skip
            if scheme == "grpc":
                command += ["--model-path", str(model.resolve())]
            env = {key: value for key, value in os.environ.items() if not key.startswith(("DYN_", "PYTHON"))}
            with processes({"gateway": command}, port, env | {"HOME": name}, Path(name), is_killed=True) as gateway:
                yield Stack(port, {**worker.pids, **gateway.pids}, gateway.seconds_to_first_answer)

    return start


def engine_of(python: str) -> Start:
    """Return what starts the worker that `smg` has behind it where it tokenises itself."""

    @contextlib.contextmanager
    def start(model: Path, delay: float, step: float) -> Iterator[Stack]:
        with tempfile.TemporaryDirectory() as name:
            port = free_port()
            command = [
                python, str(HERE / "grpc_worker.py"), "--model", str(model.resolve()), "--port", str(port),
                "--delay", str(delay), "--step", str(step),
            ]  # fmt: skip
            with processes({"worker": command}, port, os.environ, Path(name), is_up=partial(_listens, port)) as running:
                yield running

    return start


def _listens(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=1):
        return True


@contextlib.contextmanager
def mock(_model: Path, delay: float, step: float) -> Iterator[Stack]:
    """Start the worker that relays have behind them."""
    with tempfile.TemporaryDirectory() as name:
        port = free_port()
        command = [sys.executable, str(HERE / "openai_worker.py"), "--port", str(port), "--delay", str(delay), "--step", str(step)]  # fmt: skip
        with processes({"worker": command}, port, os.environ, Path(name)) as running:
            yield running


def ours(model: Path, delay: float, step: float) -> AbstractContextManager[Stack]:
    """Start our frontend and its worker."""
    return stack(model, delay, step=step)


@contextlib.contextmanager
def ours_twice(model: Path, delay: float, step: float) -> Iterator[Stack]:
    """Start our frontend as two processes, and its worker."""
    with stack(model, delay, step=step, frontend=("--workers", "2")) as running:
        group = Group(2, running)
        group.wait_for_all()
        serving = {f"frontend {number}": pid for number, pid in enumerate(group.pids, 1)}
        yield Stack(running.port, {**running.pids, **serving}, running.seconds_to_first_answer)


def native(model: Path, delay: float, step: float) -> AbstractContextManager[Stack]:
    """Start the native frontend and its worker."""
    return native_stack(native_python())(model, delay, step=step)


def gateways() -> list[Gateway]:
    """Return the gateways that this machine has."""
    found = [Gateway("none", mock), Gateway("ours", ours), Gateway("ours x2", ours_twice)]
    if os.environ.get("DYNAMO_NATIVE_PYTHON"):
        found.append(Gateway("native", native))
    relays: dict[str, Callable[[Start], Start]] = {}
    if smg := os.environ.get("DYNAMO_SMG_PYTHON"):
        relays["smg"] = partial(relay, smg, "smg", ("launch",))
        found.append(Gateway("smg grpc", relay(smg, "smg", ("launch",), engine_of(smg), "grpc")))
    if router := os.environ.get("DYNAMO_VLLM_ROUTER_PYTHON"):
        relays["vllm-router"] = partial(relay, router, "vllm-router", ())
    found += [Gateway(name, in_front_of(mock)) for name, in_front_of in relays.items()]
    found += [Gateway(f"{name} > ours", in_front_of(ours)) for name, in_front_of in relays.items()]
    return found


def between(figures: Mapping[str, float], unit: str = "us") -> float:
    """Return the CPU of all that stands between the client and the worker, in us per unit; with `MB`: its memory."""
    return sum(
        value
        for name, value in figures.items()
        if name.startswith(("gateway", "frontend")) and name.endswith(f" {unit}")
    )


# -- requests that arrive together -------------------------------------------------------------------------------------


class _Client(asyncio.Protocol):
    """A connection that notes when the first text of an answer came."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.first = 0.0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._seen = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._seen += data
        if not self.first and FIRST_TEXT.search(self._seen):
            self.first = time.perf_counter()
        if self._seen.endswith(b"0\r\n\r\n") and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(ConnectionError(f"lost after {self._seen[-200:]!r}"))


async def together(port: int, bodies: Sequence[dict[str, Any]]) -> list[float]:
    """Send all at one moment over open connections; return the seconds to the first token of each, sorted."""
    loop, target = asyncio.get_running_loop(), Target.of(f"http://127.0.0.1:{port}")
    data = [target.post(PATH, body) for body in bodies]
    clients = [(await loop.create_connection(_Client, "127.0.0.1", port))[1] for _ in bodies]
    begun = time.perf_counter()
    for client, request in zip(clients, data, strict=True):
        client.transport.write(request)
    async with asyncio.timeout(60):
        await asyncio.gather(*[client.ended for client in clients])
    for client in clients:
        client.transport.abort()
    if any(not client.first for client in clients):
        raise RuntimeError("an answer had no text")
    return sorted(client.first - begun for client in clients)


def first_tokens(bench: Bench, running: Stack) -> Figures:
    """Measure the first tokens of requests that arrive together; medians over the rounds."""
    rounds = []
    for _ in range(2 if bench.is_quick else ROUNDS):
        bodies = bench.bodies(TOGETHER, 8, **streaming())
        rounds.append(driven(together(running.port, bodies)))
    return {
        "first of 64 together, median ms": 1e3 * statistics.median(statistics.median(each) for each in rounds),
        "first of 64 together, last ms": 1e3 * statistics.median(each[-1] for each in rounds),
    }


# -- the table ---------------------------------------------------------------------------------------------------------


def measure(gateway: Gateway, rhythm: Rhythm, bench: Bench) -> dict[str, Figures]:
    """Start the gateway and its worker afresh; return the figures of each load."""
    found: dict[str, Figures] = {}
    with gateway.start(bench.model, rhythm.delay, rhythm.step) as running:
        for load in rhythm.loads:
            members = streaming() if load.is_streamed else {}
            warm(bench, running, load.streams, **members)
            count = max(load.requests // 8, load.streams) if bench.is_quick else load.requests
            requests = prepared(running.port, bench.bodies(count, load.tokens, **members))
            found[load.name] = measured_load(running, requests, load.streams, per_request=not load.is_streamed)
        if rhythm.name == "burst":
            found["first"] = first_tokens(bench, running)
        else:
            found[rhythm.loads[-1].name] |= {f"{name} MB": value for name, value in running.rss().items()}
    return found


def measured_again(gateway: Gateway, rhythm: Rhythm, bench: Bench) -> dict[str, Figures]:
    """Measure once more after a start that failed: a port that was free a moment ago may be another program's now."""
    try:
        return measure(gateway, rhythm, bench)
    except RuntimeError:
        return measure(gateway, rhythm, bench)


def middle(runs: Sequence[Figures]) -> Figures:
    """Return the median of every figure."""
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def table(names: Sequence[str], runs: Mapping[str, Mapping[str, Sequence[Figures]]]) -> list[str]:
    """Return the lines of the table, for a page: `runs` by load and gateway."""
    lines = ["| us of CPU | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]

    def row(title: str, figure: Callable[[Figures], float], of: Mapping[str, Sequence[Figures]], digits: int) -> str:
        cells = [f"{figure(middle(of[name])):.{digits}f}" if name in of else "-" for name in names]
        return f"| {title} | " + " | ".join(cells) + " |"

    for load, of in runs.items():
        if load == "first":
            lines += [row(key, itemgetter(key), of, 1) for key in next(iter(of.values()))[0]]
            continue
        digits = 0 if load.startswith("one-token") else 1
        lines.append(row(load, between, of, digits))
        lines.append(row("... and the worker", lambda figures: between(figures) + figures["worker us"], of, digits))
        if any("worker MB" in each[0] for each in of.values()):
            lines.append(row("... memory after it, MB", _megabytes, of, 0))
    return lines


def _megabytes(figures: Figures) -> float:
    return between(figures, "MB")


def remarks(runs: Mapping[str, Mapping[str, Sequence[Figures]]]) -> Iterator[str]:
    """Yield what would make a figure worthless."""
    for load, of in runs.items():
        for name, repeats in of.items():
            if failed := sum(figures.get("failed", 0) for figures in repeats):
                yield f"{failed:.0f} requests failed: {load!r} of {name} means nothing"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="fresh starts of each; the median counts (default 3)")
    parser.add_argument("--quick", action="store_true", help="an eighth of the requests")
    parser.add_argument("--gateways", default="", metavar="NAMES", help="only these, with commas between them")
    parser.add_argument("--only", default="", metavar="RHYTHM", help="burst, paced or stepped")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="where model and gateways.json go")
    arguments = parser.parse_args()
    known = {each.name: each for each in gateways()}
    names = [name for name in arguments.gateways.split(",") if name] or list(known)
    if unknown := sorted(set(names) - known.keys()):
        parser.error(f"not there: {', '.join(unknown)}; there are {', '.join(known)}")
    rhythms = [each for each in RHYTHMS if arguments.only in each.name]
    if not rhythms or arguments.repeats < 1:
        parser.error("nothing to run")
    bench = Bench(make_model(arguments.out / "model"), arguments.quick)
    runs: dict[str, dict[str, list[Figures]]] = {}
    broken: list[str] = []
    report = {"machine": machine(), "versions": versions(), "runs": runs, "broken": broken}
    for turn in range(arguments.repeats):
        for rhythm in rhythms:
            for name in names:  # in turn: a noisy minute of the machine hits all
                print(f"{turn + 1} of {arguments.repeats}: {rhythm.name}, {name}", file=sys.stderr, flush=True)
                try:
                    measured = measured_again(known[name], rhythm, bench)
                except (RuntimeError, OSError) as error:  # one start shall not take the others' figures with it
                    broken.append(f"{rhythm.name}, {name}, turn {turn + 1} could not be measured: {error}")
                    continue
                for load, figures in measured.items():
                    runs.setdefault(load, {}).setdefault(name, []).append(figures)
                (arguments.out / "gateways.json").write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join([*table(names, runs), "", *remarks(runs), *broken]))
    print(f"every repeat: {arguments.out / 'gateways.json'}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
