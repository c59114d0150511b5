"""A frontend with a thousand workers on a real wire: real processes, a real etcd, sockets and event plane; figures and bars.

    python benchmarks/fleet.py                                  about six minutes
    python benchmarks/fleet.py --workers 100 --minutes 0.2      a small one
    python benchmarks/fleet.py --minutes 12                     the churn at full length

The workers are mock engines, many in one process (`fleet_workers.py`); each has a lease, records, a listener and publishers of its
own. Two frontends in KV mode follow them: one as it is deployed, which is timed and serves most requests; and one whose pieces of work
on the event loop are measured (`watched.py`), which serves the others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from model import make_model, prompt_text, words
from stack import cpu_seconds, free_port, rss_mb

from support.etcd_server import EtcdServer

HERE: Final = Path(__file__).parent
READY_SECONDS: Final = 10.0
IDLE_PART: Final = 0.03
LONGEST_PIECE_SECONDS: Final = 0.005
START: Final = "Task-1"  # the start of the process, before it listens
HUNG_SECONDS: Final = 60.0  # without a byte of an answer
PATIENCE_SECONDS: Final = 180.0
SETTLE_SECONDS: Final = 12.0  # an event is repeated for a while after it
WATCHED_PART: Final = 0.25  # of the requests
TOKENS: Final = 48
PROMPT_TOKENS: Final = 128  # the price of long ones is another question
MODEL: Final = "bench"


@dataclass
class Answers:
    """How requests ended."""

    ok: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    hung: int = 0
    slowest: float = 0.0

    @property
    def sent(self) -> int:
        return self.ok + self.lost.total() + self.hung


class WorkerProcess:
    """A process with mock workers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self.workers = process, 0

    @classmethod
    async def start(cls, flags: list[str], env: Mapping[str, str], log: Any) -> WorkerProcess:
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable, str(HERE / "fleet_workers.py"), *flags,
                env=dict(env), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
            )
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    async def order(self, verb: str, count: int) -> None:
        """Have workers join or leave, and wait for it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{verb} {count}\n".encode())
        async with asyncio.timeout(PATIENCE_SECONDS):
            answer = await self._process.stdout.readline()
        if not answer:
            raise RuntimeError("a process of workers has ended")
        self.workers = int(answer.split()[1])

    async def end(self, *, at_once: bool = False) -> None:
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL if at_once else signal.SIGTERM)
            await self._process.wait()
        self.workers = 0


class Workers:
    """All worker processes."""

    def __init__(self, each: int, flags: list[str], env: Mapping[str, str], log: Any) -> None:
        self._each, self._flags, self._env, self._log = each, flags, env, log
        self.processes: list[WorkerProcess] = []

    @property
    def count(self) -> int:
        return sum(each.workers for each in self.processes)

    async def grow(self, count: int) -> None:
        """Start processes until there are `count` workers more; one after another, as this machine is small."""
        goal = self.count + count
        while (missing := goal - self.count) > 0:
            process = await WorkerProcess.start(self._flags, self._env, self._log)
            self.processes.append(process)
            await process.order("join", min(self._each, missing))

    async def kill(self, count: int) -> int:
        """Kill processes until so many workers are gone; return how many were."""
        gone = 0
        victims = []
        while gone < count and len(self.processes) > 1:
            victims.append(self.processes.pop(0))
            gone += victims[-1].workers
        await asyncio.gather(*(each.end(at_once=True) for each in victims))
        return gone

    def usage(self) -> tuple[float, float]:
        """Return CPU seconds and megabytes of all of them so far."""
        return sum(cpu_seconds(each.pid) for each in self.processes), sum(rss_mb(each.pid) for each in self.processes)

    async def close(self) -> None:
        await asyncio.gather(*(each.end(at_once=True) for each in self.processes))


class FrontendProcess:
    """A frontend in KV mode; with `report`, one whose pieces of work are measured."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, report: Path | None) -> None:
        self._process, self.port, self._report = process, port, report
        self.http = aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=aiohttp.TCPConnector(limit=0))

    @classmethod
    async def start(cls, flags: list[str], env: Mapping[str, str], log: Any, report: Path | None) -> FrontendProcess:
        port = free_port()
        before = [] if report is None else [str(HERE / "watched.py"), str(report)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *before, "-m", "dynamo.frontend",
            "--http-host", "127.0.0.1", "--http-port", str(port), "--router-mode", "kv", *flags,
            env=dict(env), stdout=log, stderr=log,
        )  # fmt: skip
        return cls(process, port, report)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def settle(self, workers: int, began: float) -> tuple[float, float]:
        """Wait until it serves, and knows so many workers; return how long after `began` each was."""
        ready_at = 0.0
        shown = re.compile(rb"^dynamo_frontend_model_workers\{[^}]*\} (\S+)$", re.MULTILINE)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with self.http.get("/ready") as ready, self.http.get("/metrics") as metrics:
                        found = shown.findall(await metrics.read())
                        if ready.status == 200:
                            ready_at = ready_at or time.monotonic()
                            if [float(each) for each in found] == [workers]:
                                return ready_at - began, time.monotonic() - began
                if self._process.returncode is not None:
                    raise RuntimeError("a frontend has ended")
                await asyncio.sleep(0.1)

    async def pieces(self) -> dict[str, Any]:
        """Return what has run on its event loop since the last question."""
        assert self._report is not None
        self._report.unlink(missing_ok=True)
        self._process.send_signal(signal.SIGUSR2)
        async with asyncio.timeout(30):
            while not self._report.exists():
                await asyncio.sleep(0.05)
        return json.loads(self._report.read_text())  # type: ignore[no-any-return]

    async def end(self) -> None:
        await self.http.close()
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGINT)
            try:
                async with asyncio.timeout(30):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()


class Clients:
    """Sends requests and checks that each answer is whole."""

    def __init__(self, model: Path, frontends: list[FrontendProcess], seed: int = 1) -> None:
        self._frontends, self._rng = frontends, random.Random(seed)
        self._vocabulary = words(5, 4000)
        self._starts = [prompt_text(model, PROMPT_TOKENS // 2, seed=each) for each in range(16)]

    def _body(self, tokens: int) -> dict[str, Any]:
        start = self._rng.choice(self._starts)
        rest = " ".join(self._rng.choices(self._vocabulary, k=PROMPT_TOKENS // 4))
        return {
            "model": MODEL,
            "messages": [{"role": "user", "content": start + " " + rest}],
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def request(self, answers: Answers, tokens: int = TOKENS) -> None:
        """Send one and note how it ended."""
        frontend = self._frontends[len(self._frontends) > 1 and self._rng.random() < WATCHED_PART]
        began, finished, counted = time.monotonic(), False, 0
        try:
            limit = aiohttp.ClientTimeout(total=None, sock_read=HUNG_SECONDS)
            async with frontend.http.post("/v1/chat/completions", json=self._body(tokens), timeout=limit) as answer:
                if answer.status != 200:
                    answers.lost[f"{answer.status} {(await answer.text())[:200]}"] += 1
                    return
                async for line in answer.content:
                    if not line.startswith(b"data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        answers.lost[str(chunk["error"])[:200]] += 1
                        return
                    finished = finished or any(each.get("finish_reason") == "length" for each in chunk["choices"])
                    counted = (chunk.get("usage") or {}).get("completion_tokens", counted)
        except TimeoutError:
            answers.hung += 1
            return
        except aiohttp.ClientError as error:
            answers.lost[f"{type(error).__name__}: {error}"[:200]] += 1
            return
        if finished and counted == tokens:
            answers.ok += 1
            answers.slowest = max(answers.slowest, time.monotonic() - began)
        else:
            answers.lost[f"the answer ended after {counted} tokens"] += 1

    async def many(self, count: int, streams: int, tokens: int) -> Answers:
        """Send `count` of them, `streams` at a time."""
        answers, left = Answers(), count

        async def one_after_another() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await self.request(answers, tokens)

        await asyncio.gather(*(one_after_another() for _ in range(streams)))
        return answers

    async def spread(self, count: int, seconds: float) -> Answers:
        """Send `count` of them over a time."""
        answers, began = Answers(), time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                await asyncio.sleep(began + seconds * number / count - time.monotonic())
                group.create_task(self.request(answers))
        return answers


class Table:
    """Prints figures with their bars, and remembers whether one was missed."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str, str]] = []
        self.is_met = True

    def row(self, what: str, figure: str, bar: str = "", is_met: bool | None = None) -> None:
        verdict = "" if is_met is None else "pass" if is_met else "MISS"
        self.is_met = self.is_met and is_met is not False
        self.rows.append((what, figure, bar, verdict))
        print(f"{what:56} {figure:>34}  {bar:12} {verdict}", flush=True)

    def pieces(self, when: str, report: Mapping[str, Any]) -> None:
        """Print the longest pieces of work in a phase."""
        longest = [each for each in report["longest"] if each[1] != START]
        seconds = longest[0][0] if longest else 0.0
        is_met = seconds <= LONGEST_PIECE_SECONDS
        self.row(f"  longest piece of work, {when}", f"{1e3 * seconds:.1f} ms", "<= 5 ms", is_met)
        if seconds > 0.002:
            listed = ", ".join(f"{each} {1e3 * took:.1f} ({1e3 * part:.1f})" for took, each, part in longest[:6])
            print(f"    of {report['pieces']} (of it the collector): {listed}", flush=True)
        by_generation = ", ".join(f"{number} of {1e3 * took:.1f} ms" for number, took in report["collections"])
        print(f"    collections of the three generations, each with its longest: {by_generation}", flush=True)


async def idle(table: Table, what: str, pids: Mapping[str, int], seconds: float) -> None:
    """Measure processes while nothing happens."""
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    began = time.monotonic()
    await asyncio.sleep(seconds)
    took = time.monotonic() - began
    for name, pid in pids.items():
        part = (cpu_seconds(pid) - before[name]) / took
        has_bar = name == "frontend"
        table.row(
            f"{what}, {name}",
            f"{100 * part:.2f} % of a core, {rss_mb(pid):.0f} MB",
            f"<= {100 * IDLE_PART:g} %" if has_bar else "",
            part <= IDLE_PART if has_bar else None,
        )


async def churn(workers: Workers, joins: int, leaves: int, seconds: float, rng: random.Random) -> None:
    """Have single workers join and leave at random times, in processes of their own order."""
    moments = sorted([(rng.uniform(0, seconds), "join") for _ in range(joins)] + [(rng.uniform(0, seconds), "leave") for _ in range(leaves)])  # fmt: skip
    began, busy = time.monotonic(), {each.pid: asyncio.Lock() for each in workers.processes}

    async def do(process: WorkerProcess, verb: str) -> None:
        async with busy[process.pid]:
            await process.order(verb, 1)

    async with asyncio.TaskGroup() as group:
        for at, verb in moments:
            await asyncio.sleep(began + at - time.monotonic())
            group.create_task(do(rng.choice(workers.processes), verb))


async def measure(args: argparse.Namespace, etcd: EtcdServer, folder: Path, log: Any) -> Table:
    """Run every phase."""
    table, model = Table(), make_model(args.out / "model")
    env = {key: value for key, value in os.environ.items() if not key.startswith(("DYN_", "ETCD_", "NATS_"))} | {
        "ETCD_ENDPOINTS": etcd.url,
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
        "DYN_LOG": "info",
        "DYN_DISCOVERY_BACKEND": "etcd",
    }
    flags = [
        "--model-path", str(model), "--model-name", MODEL, "--num-gpu-blocks-override", "4096", "--block-size", "16",
        "--speedup-ratio", str(args.speedup),
    ]  # fmt: skip
    # Nothing of a worker's own is measured: its watchdog ticks ten times a second, for each of a thousand workers.
    # Its lease is renewed three times within its life; a thousand of them would keep a small machine busy.
    own = {"DYN_LOOP_BLOCK_THRESHOLD_SECS": "0", "ETCD_LEASE_TTL": str(args.lease_seconds)}
    workers = Workers(args.each, flags, env | own, log)
    frontends: list[FrontendProcess] = []
    try:
        began = time.monotonic()
        await workers.grow(args.workers)
        table.row(f"{workers.count} workers start", f"{time.monotonic() - began:.1f} s")
        cpu, size = workers.usage()
        table.row("  their processes so far", f"{cpu:.1f} s of CPU, {size:.0f} MB")

        began = time.monotonic()
        frontends.append(await FrontendProcess.start(args.frontend, env, log, None))
        ready, took = await frontends[0].settle(workers.count, began)
        table.row("a frontend is ready", f"{ready:.1f} s")
        table.row("  and knows them all", f"{took:.1f} s", f"<= {READY_SECONDS:g} s", took <= READY_SECONDS)
        table.row("  its CPU until then", f"{cpu_seconds(frontends[0].pid):.1f} s")
        frontends.append(await FrontendProcess.start(args.frontend, env, log, folder / "pieces.json"))
        await frontends[1].settle(workers.count, time.monotonic())
        await asyncio.sleep(3)
        table.pieces("a whole fleet is found", await frontends[1].pieces())

        clients = Clients(model, frontends)
        warm = await clients.many(2 * workers.count, 32, 1)
        table.row("requests of one token, until all publish", f"{warm.ok} of {warm.sent}", "", not warm.lost)
        _report(warm)
        table.pieces("requests, all workers idle", await frontends[1].pieces())
        await asyncio.sleep(SETTLE_SECONDS)
        await frontends[1].pieces()
        pids = {"frontend": frontends[0].pid, "watched frontend": frontends[1].pid, "etcd": _pid(etcd)}
        cpu, _ = workers.usage()
        at = time.monotonic()
        await idle(table, "idle", pids, args.idle_seconds)
        used, size = workers.usage()
        part = 100 * (used - cpu) / (time.monotonic() - at)
        table.row("idle, all worker processes", f"{part:.1f} % of a core, {size:.0f} MB")
        table.pieces("idle", await frontends[1].pieces())

        await killed(table, args, workers, clients, frontends)

        await workers.grow(max(0, args.workers - workers.count))
        for each in frontends:
            await each.settle(workers.count, time.monotonic())
        table.pieces("others come", await frontends[1].pieces())
        seconds = 60 * args.minutes
        table.row("joins, leaves, minutes", f"{args.joins}, {args.leaves}, {args.minutes:g}")
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(clients.spread(args.requests, seconds))
            group.create_task(churn(workers, args.joins, args.leaves, seconds, random.Random(9)))
        answers = sending.result()
        table.row("  requests hung", f"{answers.hung} of {answers.sent}", "0", not answers.hung)
        table.row("  requests lost", f"{answers.lost.total()}", "0", not answers.lost)
        table.row("  slowest answer", f"{answers.slowest:.1f} s")
        _report(answers)
        for each in frontends:
            await each.settle(workers.count, time.monotonic())
        table.pieces("joins and leaves", await frontends[1].pieces())
        table.row("  memory of the frontend", f"{rss_mb(frontends[0].pid):.0f} MB")
    finally:
        await asyncio.gather(*(each.end() for each in frontends))
        await workers.close()
    return table


async def killed(
    table: Table, args: argparse.Namespace, workers: Workers, clients: Clients, frontends: list[FrontendProcess]
) -> None:
    """Kill many workers at once in the middle of a load."""
    load = asyncio.create_task(clients.many(args.streams * 6, args.streams, TOKENS))
    await asyncio.sleep(2.5)
    gone = await workers.kill(args.kill)
    at = time.monotonic()
    answers = await load
    table.row(f"{gone} workers killed under load, requests lost", f"{answers.lost.total()} of {answers.sent}", "0", not answers.lost)  # fmt: skip
    table.row("  requests hung", f"{answers.hung}", "0", not answers.hung)
    table.row("  slowest answer", f"{answers.slowest:.1f} s")
    _report(answers)
    for each in frontends:
        _, took = await each.settle(workers.count, at)
    table.row("  until the frontends know it", f"{took:.1f} s")
    table.pieces("a load, and many are killed", await frontends[1].pieces())


def _report(answers: Answers) -> None:
    for why, count in answers.lost.most_common(5):
        print(f"    lost {count}: {why}", flush=True)


def _pid(etcd: EtcdServer) -> int:
    assert etcd._process is not None
    return etcd._process.pid


@contextlib.contextmanager
def etcd_server(folder: Path) -> Iterator[EtcdServer]:
    """A real etcd, from the development wheels."""
    with EtcdServer(folder / "etcd") as server:
        yield server


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--each", type=int, default=100, help="workers of one process (default 100)")
    parser.add_argument("--kill", type=int, default=100, help="workers killed at once (default 100)")
    parser.add_argument("--streams", type=int, default=128, help="requests at a time while workers are killed")
    parser.add_argument("--joins", type=int, default=248)
    parser.add_argument("--leaves", type=int, default=149)
    parser.add_argument("--requests", type=int, default=1536, help="during joins and leaves")
    parser.add_argument("--minutes", type=float, default=2.0, help="of joins and leaves (default 2)")
    parser.add_argument("--lease-seconds", type=int, default=30, help="of each worker (default 30)")
    parser.add_argument("--idle-seconds", type=float, default=20.0)
    parser.add_argument("--speedup", type=float, default=0.15, help="of the mock engines (default 0.15: 40 ms a token)")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="where the model goes")
    parser.add_argument("--log", type=Path, help="where the logs of all processes go")
    parser.add_argument("frontend", nargs="*", help="after --: more flags of the frontends")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as name,
        etcd_server(Path(name)) as etcd,
        (args.log or Path(name) / "log").open("wb") as log,
    ):
        table = asyncio.run(measure(args, etcd, Path(name), log))
    return 0 if table.is_met else 1


if __name__ == "__main__":
    sys.exit(main())
