"""`make soak`: many requests with disconnects in every phase, and whether anything grew.

A real frontend and a bench worker run under `probe.py`. Before and after the load both are asked what lives in them; in
between their memory is sampled. Nothing that a request leaves behind may stay: the bars are at the top.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from model import make_model, prompt_text
from stack import end_on_sigterm

HERE = Path(__file__).parent

BYTES_PER_REQUEST = 50.0  # slope of the resident memory over the last 80 % of the requests
SKIPPED = 0.2  # the part of the requests in which allocators and caches fill
SLACK = {
    "tasks": 2,
    "timers": 4,
    "descriptors": 2,
    "dicts": 200,
    "objects": 2000,
}  # over the whole run, not per request
GAUGES = re.compile(
    r"^(dynamo_(?:frontend_(?:inflight|active|queued)_requests|request_plane_inflight_requests|engine_request"
    r"|request_queue|work_handler_(?:queue_depth|pool_active_tasks)|component_inflight_requests)(?:\{[^}]*\})?) (\S+)$",
    re.MULTILINE,
)
PHASES = ("connected", "half headers", "half body", "sent", "first bytes", "mid answer")


@dataclass
class Sample:
    """Both processes after some number of requests."""

    requests: int
    seconds: float
    rss: dict[str, int]  # bytes
    descriptors: dict[str, int]


@dataclass
class Tally:
    """What the clients saw."""

    done: int = 0
    errors: int = 0
    left: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)  # the first few

    def problem(self, text: str) -> None:
        self.errors += 1
        if len(self.problems) < 10:
            self.problems.append(text)


@dataclass
class Stack:
    """A running frontend and worker, each under the probe."""

    port: int
    worker_port: int
    processes: dict[str, subprocess.Popen[bytes]]
    folder: Path

    def counts(self, name: str) -> dict[str, Any]:
        """What lives in one process."""
        target = self.folder / f"{name}.json"
        target.unlink(missing_ok=True)
        os.kill(self.processes[name].pid, signal.SIGUSR2)
        deadline = time.monotonic() + 30
        while not target.exists():
            if time.monotonic() > deadline or self.processes[name].poll() is not None:
                raise RuntimeError(f"the {name} did not answer the probe:\n{self.log()}")
            time.sleep(0.05)
        return json.loads(target.read_text())  # type: ignore[no-any-return]

    def gauges(self) -> dict[str, float]:
        """The in-flight gauges of both."""
        found: dict[str, float] = {}
        for name, port in (("frontend", self.port), ("worker", self.worker_port)):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                text = answer.read().decode()
            found |= {f"{name} {series}": float(value) for series, value in GAUGES.findall(text)}
            found[f"{name} series"] = sum(1 for line in text.splitlines() if line and line[0] != "#")
        return found

    def log(self) -> str:
        return (self.folder / "log").read_text()[-3000:]


def rss_bytes(pid: int) -> int:
    """Resident memory of one process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def probed_stack(model: Path, log_level: str) -> Iterator[Stack]:
    """Our frontend and one burst worker under the probe; stopped at the end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        port, worker_port = free_port(), free_port()
        env = {
            **os.environ,
            "DYN_FILE_KV": str(folder / "store"),
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
            "DYN_LOG": log_level,
        }
        env.pop("DYN_SYSTEM_PORT", None)
        probe = [sys.executable, str(HERE / "probe.py")]
        commands = {
            "frontend": [
                *probe, str(folder / "frontend.json"),
                "-m", "dynamo.frontend", "--discovery-backend", "file", "--http-port", str(port),
            ],
            "worker": [*probe, str(folder / "worker.json"), str(HERE / "engine.py"), "--model", str(model)],
        }  # fmt: skip
        with (folder / "log").open("wb") as log:
            processes = {
                name: subprocess.Popen(
                    command,
                    env=env | ({"DYN_SYSTEM_PORT": str(worker_port)} if name == "worker" else {}),
                    stdout=log,
                    stderr=log,
                )
                for name, command in commands.items()
            }
            running = Stack(port, worker_port, processes, folder)
            try:
                _wait_until_serving(running)
                yield running
            finally:
                for process in processes.values():
                    process.send_signal(signal.SIGINT)
                for process in processes.values():
                    try:
                        process.wait(10)
                    except subprocess.TimeoutExpired:
                        process.kill()
                        process.wait()


def _wait_until_serving(running: Stack) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{running.port}/v1/models", timeout=5) as answer:
                if json.loads(answer.read())["data"]:
                    return
        except OSError:
            pass  # not listening yet
        if time.monotonic() > deadline or any(p.poll() is not None for p in running.processes.values()):
            raise RuntimeError(f"the stack did not come up:\n{running.log()}")
        time.sleep(0.05)


class Clients:
    """`streams` connections, each sending one request after the other; some leave in the middle of theirs."""

    def __init__(self, port: int, prompt: str, *, seed: int, disconnects: float, tokens: int) -> None:
        self._port, self._disconnects = port, disconnects
        self._rng = random.Random(seed)
        self._unary, self._streamed = (self._payload(prompt, tokens, stream) for stream in (False, True))
        self._long = [self._payload(prompt, 400, stream) for stream in (False, True)]
        self.tally = Tally()

    def _payload(self, prompt: str, tokens: int, stream: bool) -> bytes:
        body = json.dumps(
            {
                "model": "bench",
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": tokens,
                "stream": stream,
            }
        ).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    async def run(self, requests: int, streams: int) -> None:
        """Send `requests`; returns when the last is answered or left."""
        remaining = iter(range(requests))

        async def one() -> None:
            connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
            try:
                for _ in remaining:
                    if connection is None:
                        connection = await asyncio.open_connection("127.0.0.1", self._port)
                    if self._rng.random() < self._disconnects:
                        await self._leave(*connection)
                        connection = None
                    elif not await self._ask(*connection):
                        connection[1].close()
                        connection = None
                    self.tally.done += 1
            finally:
                if connection is not None:
                    connection[1].close()

        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(one())

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request to its end; False when the connection is of no more use."""
        stream = self._rng.random() < 0.5
        self.tally.kinds["streamed" if stream else "unary"] += 1
        writer.write(self._streamed if stream else self._unary)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if stream and head.startswith(b"HTTP/1.1 200"):
                await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
                return True
            length = re.search(rb"(?i)content-length: (\d+)", head)
            body = await reader.readexactly(int(length[1]) if length else 0)
        except (asyncio.IncompleteReadError, OSError) as error:
            self.tally.problem(f"{type(error).__name__}: {error}")
            return False
        if not head.startswith(b"HTTP/1.1 200"):
            self.tally.problem((head + body)[:200].decode("latin-1"))
        return True

    async def _leave(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Begin a long request and go away somewhere in it."""
        phase = self._rng.choice(PHASES)
        payload = self._rng.choice(self._long)
        self.tally.left[phase] += 1
        split = payload.index(b"\r\n\r\n")
        match phase:
            case "connected":
                pass
            case "half headers":
                writer.write(payload[: split // 2])
            case "half body":
                writer.write(payload[: split + 4 + (len(payload) - split) // 2])
            case _:
                writer.write(payload)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            if phase == "first bytes" and payload is self._long[1]:
                await reader.read(64)
            elif phase == "mid answer" and payload is self._long[1]:
                await reader.readexactly(self._rng.randrange(300, 1500))
            elif phase != "sent":
                await asyncio.sleep(self._rng.random() * 0.01)
        if self._rng.random() < 0.5:
            writer.transport.abort()  # a reset and not a close
        writer.close()


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Least squares: what y gains per x. 0.0 where there is nothing to fit."""
    count = len(points)
    if count < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


async def _sample(running: Stack, clients: Clients, every: int, samples: list[Sample]) -> None:
    """A sample at once and after every `every` requests, until cancelled."""
    begun = time.monotonic()
    due = 0
    while True:
        if clients.tally.done >= due:
            pids = {name: process.pid for name, process in running.processes.items()}
            samples.append(
                Sample(
                    clients.tally.done,
                    time.monotonic() - begun,
                    {name: rss_bytes(pid) for name, pid in pids.items()},
                    {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items()},
                )
            )
            due = clients.tally.done + every
            if sys.stderr.isatty():
                print(
                    f"\r{clients.tally.done:8d} requests  "
                    + "  ".join(f"{name} {samples[-1].rss[name] / 2**20:.1f} MB" for name in pids)
                    + f"  errors {clients.tally.errors}",
                    end="",
                    file=sys.stderr,
                    flush=True,
                )
        await asyncio.sleep(0.1)


async def _load(running: Stack, clients: Clients, requests: int, streams: int) -> list[Sample]:
    samples: list[Sample] = []
    sampling = asyncio.create_task(_sample(running, clients, max(1, requests // 200), samples))  # cancelled below
    try:
        await clients.run(requests, streams)
    finally:
        sampling.cancel()
    return samples


def _settled(running: Stack, before: dict[str, float]) -> dict[str, float]:
    """The gauges once they are back, or after ten seconds."""
    deadline = time.monotonic() + 10
    while True:
        now = running.gauges()
        if time.monotonic() > deadline or all(now.get(name) == value for name, value in before.items()):
            return now
        time.sleep(0.2)


def soak(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run it; what was seen, with the verdicts."""
    model = make_model(arguments.out / "model")
    prompt = prompt_text(model, 64, seed=7)
    options = {"disconnects": arguments.disconnects, "tokens": arguments.tokens}
    with probed_stack(model, arguments.log) as running:
        warm = Clients(running.port, prompt, seed=1, **options)
        asyncio.run(warm.run(500, arguments.streams))  # every path once, so that "before" has what is made lazily
        time.sleep(1)
        gauges_before = running.gauges()
        before = {name: running.counts(name) for name in running.processes}
        clients = Clients(running.port, prompt, seed=2, **options)
        began, used = time.monotonic(), time.process_time()
        samples = asyncio.run(_load(running, clients, arguments.requests, arguments.streams))
        seconds, used = time.monotonic() - began, time.process_time() - used
        gauges_after = _settled(running, gauges_before)
        time.sleep(6)  # streams left at their terminal chunk are given 5 s
        after = {name: running.counts(name) for name in running.processes}
    return _verdict(arguments, clients.tally, samples, seconds, used, before, after, gauges_before, gauges_after)


def _verdict(
    arguments: argparse.Namespace,
    tally: Tally,
    samples: list[Sample],
    seconds: float,
    used: float,
    before: dict[str, dict[str, Any]],
    after: dict[str, dict[str, Any]],
    gauges_before: dict[str, float],
    gauges_after: dict[str, float],
) -> dict[str, Any]:
    checks: list[dict[str, Any]] = []

    def check(name: str, value: float, bar: float) -> None:
        checks.append({"name": name, "value": round(value, 2), "bar": bar, "passed": value <= bar})

    tail = [sample for sample in samples if sample.requests >= arguments.requests * SKIPPED]
    growth: dict[str, dict[str, int]] = {}
    for name in before:
        check(
            f"{name}: RSS bytes per request, last 80 %",
            slope([(s.requests, s.rss[name]) for s in tail]),
            BYTES_PER_REQUEST,
        )
        for kind, slack in SLACK.items():
            check(f"{name}: {kind} more than at the start", after[name][kind] - before[name][kind], slack)
        types, old = after[name]["types"], before[name]["types"]
        grown = {key: types[key] - old.get(key, 0) for key in types}
        growth[name] = dict(sorted(grown.items(), key=lambda entry: -entry[1])[:15])
    for series, value in gauges_before.items():
        if not series.endswith(" series"):
            check(f"{series} back to {value:g}", abs(gauges_after.get(series, 0.0) - value), 0)
    for name in before:
        check(f"{name}: metric series more", gauges_after[f"{name} series"] - gauges_before[f"{name} series"], 60)
    check("requests that failed", tally.errors, 0)
    return {
        "machine": platform.platform(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "requests": tally.done,
        "seconds": round(seconds, 1),
        "soak_cpu_seconds": round(used, 1),
        "kinds": dict(tally.kinds),
        "left": dict(tally.left),
        "problems": tally.problems,
        "checks": checks,
        "growth_by_type": growth,
        "counts": {name: {k: [before[name][k], after[name][k]] for k in SLACK} for name in before},
        "samples": [asdict(sample) for sample in samples],
    }


def plot(report: dict[str, Any]) -> str:
    """The memory of both processes over the requests, as one SVG."""
    width, height, left, bottom = 860, 360, 70, 40
    samples = report["samples"]
    last = max(report["requests"], 1)
    top = max(max(s["rss"].values()) for s in samples) * 1.1

    def at(requests: float, rss: float) -> str:
        return f"{left + (width - left - 20) * requests / last:.1f},{(height - bottom) * (1 - rss / top):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for step in range(6):
        y = (height - bottom) * (1 - step / 5 / 1.1)
        parts.append(f'<line x1="{left}" x2="{width - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{top / 1.1 * step / 5 / 2**20:.0f} MB</text>'
        )
    for step in range(6):
        x = left + (width - left - 20) * step / 5
        parts.append(f'<text x="{x:.1f}" y="{height - bottom + 18}" text-anchor="middle">{last * step // 5:,}</text>')
    parts.append(f'<text x="{width / 2}" y="{height - 6}" text-anchor="middle">requests</text>')
    for number, (name, colour) in enumerate((("frontend", "#1f6fb2"), ("worker", "#c2571a"))):
        line = " ".join(at(s["requests"], s["rss"][name]) for s in samples)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        verdict = next(c for c in report["checks"] if c["name"].startswith(f"{name}: RSS"))
        parts.append(
            f'<text x="{left + 12}" y="{(height - bottom) - 30 + 16 * number}" fill="{colour}">{name}: '
            f"{verdict['value']:g} bytes per request over the last 80 % (bar {verdict['bar']:g})</text>"
        )
    return "\n".join([*parts, "</svg>\n"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--streams", type=int, default=32, help="connections at a time")
    parser.add_argument("--tokens", type=int, default=2, help="output tokens of a request that is not left")
    parser.add_argument("--disconnects", type=float, default=0.05, help="part of the requests that are left")
    parser.add_argument("--log", default="info", help="DYN_LOG of both processes")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="where soak.json and soak.svg go")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    end_on_sigterm()
    report = soak(arguments)
    (arguments.out / "soak.json").write_text(json.dumps(report, indent=1))
    (arguments.out / "soak.svg").write_text(plot(report))
    for entry in report["checks"]:
        print(f"{'pass' if entry['passed'] else 'MISS'}  {entry['value']:>10g} <= {entry['bar']:<6g} {entry['name']}")
    for problem in report["problems"]:
        print(f"      {problem}")
    print(
        f"{report['requests']} requests in {report['seconds']} s, {sum(report['left'].values())} left; this program used "
        f"{report['soak_cpu_seconds']} s of CPU. {arguments.out / 'soak.json'}, {arguments.out / 'soak.svg'}"
    )
    return 0 if all(entry["passed"] for entry in report["checks"]) else 1


if __name__ == "__main__":
    sys.exit(main())
