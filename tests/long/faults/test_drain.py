"""R2, R3, R16 and rolling restarts: processes are told to end under load, and nobody must notice."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from dynamo.worker.lifecycle import ShutdownTimes
from support.etcd_server import EtcdServer
from support.http_client import CHAT, ask, chat
from support.load import ALPHABET, Load, load
from support.ports import free_ports
from support.processes import SUPPORT, Cluster, Worker, get, until
from support.scenario_table import Say, record
from support.serve_command import is_running, left_behind, serve_command

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif("FAULTS" not in os.environ, reason="make test-faults"),
    pytest.mark.timeout(1500),
]

PATIENCE_SECONDS = 180.0
CLIENTS = 8
WORKERS = 3
GRACE_SECONDS = 1.0
HEARD_SECONDS = 0.5  # a worker that left the store may be asked for so long: the news has to travel
MARGIN_SECONDS = 3.0  # between the moment a worker should cut its streams and the moment it does, on a loaded machine
CUT = "streams were still running and were cut"
LEAVING = "Endpoint unregistered from discovery"


def recorded(scenario: str, found: Load, recovery_ms: list[float], note: str, say: Say) -> None:
    """The row, also of a run that the asserts will not like."""
    counts = {"sent": found.begun, "lost": len(found.lost), "doubled": len(found.doubled), "hung": found.hung}
    record(scenario, **counts, recovery_ms=recovery_ms, note=note)
    say(
        f"{scenario}: {counts}, {len(recovery_ms)} recoveries, the longest {max(recovery_ms, default=0):.0f} ms; {note}"
    )


async def answers_asked_after(found: Load, moment: float) -> None:
    """Return when requests that began after `moment` have ended."""
    await until(
        lambda: sum(each.asked_at > moment for each in found.answers) >= CLIENTS,
        lambda: "answers",
        patience=PATIENCE_SECONDS,
    )


# -- R2 ------------------------------------------------------------------------------------------------------------------


def logged_at(worker: Worker, text: str) -> float:
    """When a line was logged, on the clock of the journals."""
    found = re.search(rf"^(\S+Z) .*{re.escape(text)}", worker.log, re.MULTILINE)
    assert found is not None, worker.log
    written = datetime.fromisoformat(found[1].replace("Z", "+00:00")).timestamp()
    return written - time.time() + time.monotonic()


@pytest.mark.parametrize(
    ("name", "clients", "pace", "timeout", "cut_per_worker"),
    [("streams end in time", CLIENTS, 0.005, 15, 0), ("streams outlive the limit", 3 * CLIENTS, 0.15, 6, 2)],
)
async def test_workers_sent_home_in_turn_cost_nothing(
    etcd: EtcdServer,
    tmp_path: Path,
    say: Say,
    name: str,
    clients: int,
    pace: float,
    timeout: int,
    cut_per_worker: int,
) -> None:
    env = {
        "ETCD_ENDPOINTS": etcd.url,
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": str(GRACE_SECONDS),
        "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": str(timeout),
    }
    # A stream that has as much before it when its worker is told to end is still there when the rest is cut.
    certain = ShutdownTimes(GRACE_SECONDS, timeout).streams_until_seconds + MARGIN_SECONDS
    late: list[float] = []
    exits: list[float] = []
    doomed: set[str] = set()
    with Cluster(tmp_path, "etcd", **env) as cluster:
        frontend = cluster.frontend("frontend")
        everyone = [cluster.worker(f"w{number}", "m", SCRIPTED_DISCOVERY="etcd") for number in range(WORKERS)]
        living = list(everyone)
        await asyncio.to_thread(cluster.wait_ready, frontend, *living)
        async with load([frontend.port], "m", clients=clients, pace=pace) as found:
            for number in range(WORKERS):
                fresh = cluster.worker(f"w{WORKERS + number}", "m", SCRIPTED_DISCOVERY="etcd")
                everyone.append(fresh)
                living.append(fresh)
                await asyncio.to_thread(cluster.wait_ready, frontend, *living)
                old = living.pop(0)
                if cut_per_worker:
                    await until(
                        lambda old=old: len(outliving(old, everyone, pace, certain)) >= cut_per_worker,  # type: ignore[misc]
                        lambda old=old: f"streams that outlive {old.name}",  # type: ignore[misc]
                        patience=PATIENCE_SECONDS,
                    )
                    doomed |= outliving(old, everyone, pace, certain)
                else:
                    await answers_asked_after(found, time.monotonic())
                began = time.monotonic()
                old.terminate()
                await until(lambda old=old: old.has_ended, lambda old=old: old.log, patience=PATIENCE_SECONDS)  # type: ignore[misc]
                exits.append(time.monotonic() - began)
                assert old.exit_code() == 0, old.log
                left_at = logged_at(old, LEAVING)
                late += [
                    event["at"] - left_at
                    for event in old.events()
                    if event["event"] == "generate" and event["at"] > left_at
                ]
            await answers_asked_after(found, time.monotonic())
        left = set(etcd.keys())
    moves = moves_between(everyone)
    # Not since the old generator ended: a frontend hears of the cut before that.
    waits = [1e3 * (each.at - logged_at(each.before, CUT)) for each in moves if CUT in each.before.log]
    since = " (recovery: from the cut until they do)" if waits else ""
    note = (
        f"{WORKERS} workers; gone after {max(exits):.1f} s at most; {len(moves)} answers went on elsewhere{since}; "
        + (
            f"{len(late)} came while the news travelled, the last after {1e3 * max(late):.0f} ms"
            if late
            else "none came after it left"
        )
    )
    recorded(f"R2 SIGTERM to workers in turn, {name}", found, waits, note, say)
    found.check()
    assert max(late, default=0.0) < HEARD_SECONDS
    assert max(exits) < timeout + GRACE_SECONDS
    moved = {each.tag for each in moves}
    assert doomed <= moved if cut_per_worker else not moved
    assert len([key for key in left if "/instances/" in key]) == WORKERS


def outliving(worker: Worker, everyone: list[Worker], pace: float, seconds: float) -> set[str]:
    """Answers that `worker` computes from their first token on and that take at least so long from now."""
    now, answers = time.monotonic(), {each["tag"]: each for each in worker.events() if each["event"] == "generate"}
    elsewhere = {each["tag"] for other in everyone if other is not worker for each in other.events()}
    return {
        tag
        for tag, each in answers.items()
        if each["at"] + pace * len(ALPHABET) > now + seconds and tag not in elsewhere
    }


@dataclass(frozen=True)
class Move:
    """An answer that another worker went on with."""

    tag: str
    before: Worker
    at: float


def moves_between(workers: list[Worker]) -> list[Move]:
    """Every change of the worker that computes an answer."""
    named = {worker.name: worker for worker in workers}
    begun = [event for worker in workers for event in worker.events() if event["event"] == "generate"]
    owner: dict[str, Worker] = {}
    found = []
    for event in sorted(begun, key=lambda event: float(event["at"])):
        tag, worker = event["tag"], named[event["worker"]]
        if owner.setdefault(tag, worker) is not worker:
            found.append(Move(tag, owner[tag], event["at"]))
            owner[tag] = worker
    return found


# -- R3 ------------------------------------------------------------------------------------------------------------------


async def test_a_frontend_sent_home_ends_what_it_has_and_another_takes_the_rest(tmp_path: Path, say: Say) -> None:
    # A balancer asks for /health five times a second and gives a frontend up at the first 503.
    env = {"DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "30", "DYN_HTTP_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1"}
    with Cluster(tmp_path, **env) as cluster:
        leaving, staying = cluster.frontend("leaving"), cluster.frontend("staying")
        workers = [cluster.worker(f"w{number}", "m") for number in range(2)]
        for frontend in (leaving, staying):
            await asyncio.to_thread(cluster.wait_ready, frontend, *workers)
        ports = [leaving.port, staying.port]
        async with load(ports, "m", clients=CLIENTS, pace=0.03) as found:
            await until(lambda: in_flight(leaving.port) >= 3, lambda: "requests in flight", patience=PATIENCE_SECONDS)
            began = time.monotonic()
            leaving.terminate()
            await until(lambda: leaving.has_ended or get(leaving.port, "/health")[0] == 503, lambda: leaving.log)
            off_after = time.monotonic() - began
            assert not leaving.has_ended, "there were requests in flight"
            await asyncio.sleep(0.2)
            ports[:] = [staying.port]
            await until(lambda: leaving.has_ended or stage_of(leaving.port) == "draining", lambda: leaving.log)
            refusal = await ask(leaving.port, CHAT, chat("m"))
            await until(lambda: leaving.has_ended, lambda: leaving.log, patience=PATIENCE_SECONDS)
            gone_after = time.monotonic() - began
            await answers_asked_after(found, time.monotonic())
    finished = [
        each for each in found.answers if each.port == leaving.port and each.ended_at > began and not each.trouble
    ]
    note = (
        f"not ready after {1e3 * off_after:.0f} ms; {len(finished)} answers in flight ended, gone after {gone_after:.1f} s, "
        f"status {leaving.exit_code()}; {found.refused} were refused and asked the other frontend"
    )
    recorded("R3 SIGTERM to a frontend", found, [], note, say)
    found.check()
    assert not found.refused
    assert len(finished) >= 3
    assert (refusal.status, leaving.exit_code()) == (503, 0)
    assert {each.port for each in found.answers if each.asked_at > began + gone_after} == {staying.port}
    assert "were cut" not in leaving.log


def stage_of(port: int) -> str:
    return str(json.loads(get(port, "/health")[1]).get("stage"))


def in_flight(port: int) -> float:
    body = get(port, "/metrics")[1].decode()
    return sum(map(float, re.findall(r"^dynamo_frontend_inflight_requests(?:{[^}]*})? (\S+)$", body, re.MULTILINE)))


# -- R16 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "plan", "is_stopped", "status", "cleanups"),
    [
        ("fails", {"fail": {"start": "RuntimeError: no luck"}}, False, 1, 1),
        ("fails after SIGTERM", {"sleep": {"start": 2.0}, "fail": {"start": "RuntimeError: no luck"}}, True, 1, 1),
        ("hangs, SIGTERM", {"sleep": {"start": 600.0}}, True, 1, 1),
        ("blocks the loop, SIGTERM", {"block": {"start": 600.0}}, True, 143, 0),
    ],
)
async def test_a_start_that_comes_to_nothing_leaves_nothing(
    etcd: EtcdServer,
    tmp_path: Path,
    say: Say,
    name: str,
    plan: dict[str, Any],
    is_stopped: bool,
    status: int,
    cleanups: int,
) -> None:
    timeout = 8
    journal, ports = tmp_path / "calls", free_ports(2)
    plan = plan | {"journal": str(journal), "config": {"discovery_backend": "etcd"}}
    env = {
        "FAILING_ENGINE": json.dumps(plan),
        "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": str(timeout),
        "DYN_SYSTEM_HOST": "127.0.0.1",
        **dict(zip(("DYN_SYSTEM_PORT", "DYN_TCP_RPC_PORT"), map(str, ports), strict=True)),
    }
    with Cluster(tmp_path, "etcd", ETCD_ENDPOINTS=etcd.url, ETCD_LEASE_TTL="2") as cluster:
        argv = [sys.executable, str(SUPPORT / "failing_engine.py")]
        process = cluster.process("worker", argv, **env)
        began = time.monotonic()
        if is_stopped:
            entered = "start..." if "sleep" in plan else "start"
            await until(lambda: entered in calls_of(journal), lambda: process.log, patience=PATIENCE_SECONDS)
            began = time.monotonic()
            process.terminate()
        await until(lambda: process.has_ended, lambda: process.log, patience=PATIENCE_SECONDS)
        seconds = time.monotonic() - began
        calls, code = calls_of(journal), process.exit_code()
        # A process that was cut says nothing to etcd: its lease ends by itself.
        await until(lambda: not etcd.keys() and not etcd.leases(), lambda: f"{etcd.keys()}, {etcd.leases()}")
        free = [port for port in ports if is_free(port)]
    ended = f"{seconds:.1f} s after SIGTERM" if is_stopped else "at once"
    note = f"cleanup() {calls.count('cleanup')} times, status {code}, {ended}; no record, lease, port or process left"
    record(f"R16 start() {name}", sent=0, note=note)
    say(f"R16 start() {name}: {note}")
    assert (code, calls.count("cleanup"), calls.count("drain")) == (status, cleanups, 0), process.log
    assert free == list(ports)
    assert not is_running(process.pid)
    if is_stopped:
        assert seconds < timeout + 3


def calls_of(journal: Path) -> list[str]:
    return journal.read_text().splitlines() if journal.exists() else []


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


# -- SIGHUP of dynamo serve ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "frontends"), [(1, 1), (2, 1), (2, 2)])
async def test_a_rolling_restart_costs_nothing(tmp_path: Path, say: Say, workers: int, frontends: int) -> None:
    journal = tmp_path / "journal"
    env = {
        "PYTHONPATH": str(SUPPORT),
        "SCRIPTED_MODEL": "m",
        "SCRIPTED_NAME": "any",
        "SCRIPTED_JOURNAL": str(journal),
    }
    flags = ("--engine", "scripted_engine:ScriptedEngine", "--http-host", "127.0.0.1", "--http-port", "0")
    counts = ("--workers", str(workers), "--frontend-workers", str(frontends))
    with serve_command(tmp_path, *flags, *counts, **env) as command:
        command.patience = PATIENCE_SECONDS
        await asyncio.to_thread(command.wait_ready)
        await until(lambda: command.out.count("serves e2e") == workers, lambda: command.out, patience=PATIENCE_SECONDS)
        async with load([command.port], "m", clients=CLIENTS) as found:
            for turn in range(1, 4):
                command.process.send_signal(signal.SIGHUP)
                await until(
                    lambda turn=turn: len(re.findall(r"(was|were) replaced in", command.out)) == turn,  # type: ignore[misc]
                    lambda: command.out + command.err,
                    patience=PATIENCE_SECONDS,
                )
            await answers_asked_after(found, time.monotonic())
        command.process.send_signal(signal.SIGTERM)
        status = await asyncio.to_thread(command.wait_ended)
    times = [float(each) for each in re.findall(r"^worker \d of \d: replaced in (\S+) s", command.out, re.MULTILINE)]
    pids = {json.loads(line)["pid"] for line in journal.read_text().splitlines()}
    note = f"3 restarts, {len(times)} workers replaced, {max(times):.1f} s for one at most"
    plural = "s" if workers > 1 else ""
    scenario = (
        f"SIGHUP of dynamo serve, {workers} worker{plural}, {frontends} frontend process{'es' if frontends > 1 else ''}"
    )
    recorded(scenario, found, [], note, say)
    found.check()
    assert len(times) == 3 * workers
    assert len(pids) == 4 * workers  # every one of them was asked something
    assert not any(map(is_running, pids))
    assert (status, left_behind(tmp_path)) == (0, [])
