"""Failure scenarios R5, R7, R15, R17 and R18 on real processes, each a row of `docs/faults.md`.

Workers fail by chaos plans where one can say what is to happen. CHURN is how many workers come and go (200), SOAK_MINUTES
how long the soak is (3), STOPPED_SECONDS for how long a process stands still (24).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import resource
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.etcd_server import EtcdServer
from support.http_client import CHAT, DONE, Reply, ask, chat, exchange, script
from support.judged_load import ANSWER, PACE_SECONDS, Tally, load, one
from support.nursery import Nursery
from support.processes import Cluster, Frontend, Worker, until
from support.scenario_table import Say, record

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif("FAULTS" not in os.environ, reason="make test-faults"),
    pytest.mark.timeout(3000),
]

CHURN = int(os.environ.get("CHURN") or 200)
SOAK_SECONDS = 60 * float(os.environ.get("SOAK_MINUTES") or 3)
MODEL = "m"


@contextmanager
def cluster_on(store: str, root: Path, **env: str) -> Iterator[tuple[Cluster, EtcdServer | None]]:
    """A cluster on files or on a real etcd."""
    with ExitStack() as stack:
        etcd = stack.enter_context(EtcdServer(root / "etcd")) if store == "etcd" else None
        if etcd is not None:
            env |= {"ETCD_ENDPOINTS": etcd.url, "SCRIPTED_DISCOVERY": "etcd"}
        yield stack.enter_context(Cluster(root, store, **env)), etcd


def plan(root: Path, *faults: str) -> dict[str, str]:
    """The variables that give a process these faults."""
    text = "".join(f"[[fault]]\n{fault}\n" for fault in faults)
    file = root / f"plan-{abs(hash(text)):x}.toml"
    file.write_text(text)
    return {"DYN_CHAOS": str(file), "DYN_ALLOW_CHAOS": "1"}


async def settled(*processes: Worker) -> None:
    for process in processes:
        await until(lambda process=process: "Serving " in process.log or process.has_ended)  # type: ignore[misc]
        assert not process.has_ended, process.log


# -- R5: churn ----------------------------------------------------------------------------------------------------------

KEPT, REPLACED = 8, 4  # workers at any time, and how many of them are replaced at once


def touched(tally: Tally, everyone: list[Worker]) -> list[float]:
    """The longest pause, in ms, of each streamed request that more than one worker had in hand."""
    begun: dict[str, int] = {}
    for worker in everyone:
        for event in worker.events():
            if event["event"] == "generate":
                begun[event["tag"]] = begun.get(event["tag"], 0) + 1
    return [1000 * gap for tag, gap in tally.gaps.items() if begun.get(tag, 0) > 1]


@pytest.mark.parametrize("store", ["file", "etcd"])
async def test_workers_that_come_and_go_by_the_hundred_cost_nothing(tmp_path: Path, say: Say, store: str) -> None:
    # A killed worker stays listed until its lease ends; at this rate dozens of them are.
    with cluster_on(store, tmp_path, DYN_MIGRATION_LIMIT="50") as (cluster, _), Nursery(cluster) as nursery:
        frontend = cluster.frontend("frontend")
        crashing = plan(tmp_path, 'kind = "crash"\nrequest = 1\npoint = 7')
        names = (f"w{number}" for number in itertools.count())
        living = [nursery.worker(next(names), MODEL) for _ in range(KEPT)]
        everyone = list(living)
        await settled(*living)
        frontend.wait_ready()
        await until(lambda: frontend.workers(MODEL) == KEPT)
        ends = {"crashed by plan": 0, "SIGKILL": 0, "SIGTERM": 0}
        began = time.monotonic()
        async with load(frontend.port, MODEL, clients=8) as tally:
            for _ in range(max(1, CHURN // REPLACED)):
                # Of four that come one will crash in the middle of its second answer.
                fresh = [nursery.worker(next(names), MODEL, **(crashing if n == 0 else {})) for n in range(REPLACED)]
                everyone += fresh
                await settled(*fresh)
                leaving, living = living[:REPLACED], [*living[REPLACED:], *fresh]
                for position, worker in enumerate(leaving):
                    if worker.has_ended:
                        ends["crashed by plan"] += 1
                    elif position == 1:
                        worker.kill()
                        ends["SIGKILL"] += 1
                    else:
                        worker.terminate()
                        ends["SIGTERM"] += 1
                for worker in leaving:
                    await worker.ended()
        pauses = touched(tally, everyone)
        note = f"{store} store, {len(everyone)} joins, leaves: {', '.join(f'{n} {how}' for how, n in ends.items())}"
        record(f"R5 churn, {store} store", **dict[str, Any](tally.counts), recovery_ms=pauses, note=note)
        say(f"{note}: {tally.counts} in {time.monotonic() - began:.0f} s; {len(pauses)} moved")
        tally.assert_nothing_noticed()
        assert ends["crashed by plan"] > 0
        assert not frontend.has_ended


# -- R7: a lease is lost, and the process is well ---------------------------------------------------------------------

LOSSES = 10


def instance_keys(etcd: EtcdServer) -> dict[str, int]:
    """Record -> lease."""
    return {key: lease for key, (_, lease) in etcd.keys("v1/instances/").items() if "/generate/" in key}


async def test_a_revoked_lease_is_taken_again_under_its_old_id(tmp_path: Path, say: Say) -> None:
    with cluster_on("etcd", tmp_path) as (cluster, etcd):
        assert etcd is not None
        frontend = cluster.frontend("frontend")
        workers = [cluster.worker(name, MODEL, SCRIPTED_DISCOVERY="etcd") for name in ("one", "two")]
        cluster.wait_ready(frontend, *workers)
        records = await asyncio.to_thread(instance_keys, etcd)
        back: list[float] = []
        async with load(frontend.port, MODEL, clients=4) as tally:
            for number in range(LOSSES):
                lease = sorted(records.values())[number % 2]
                began = time.monotonic()
                await asyncio.to_thread(etcd.call, "lease/revoke", {"ID": str(lease)})
                while await asyncio.to_thread(instance_keys, etcd) != records:
                    assert time.monotonic() - began < 60, "it did not come back"
                    await asyncio.sleep(0.02)
                back.append(1000 * (time.monotonic() - began))
                await until(lambda: frontend.workers(MODEL) == 2)
        record(
            "R7 lease revoked in etcd, process well",
            **dict[str, Any](tally.counts),
            recovery_ms=back,
            note=f"{LOSSES} revocations; recovery: until the same record is there under the same lease",
        )
        say(f"{LOSSES} leases revoked: {tally.counts}; back after {max(back):.0f} ms at most")
        tally.assert_nothing_noticed()
        assert not any(worker.has_ended for worker in workers)
        assert all(milliseconds < 20_000 for milliseconds in back)  # two lease periods


def fired(workers: list[Worker]) -> int:
    return sum(worker.log.count("CHAOS: lease fires") for worker in workers)


async def test_records_that_vanish_from_the_file_store_are_put_again(tmp_path: Path, say: Say) -> None:
    with cluster_on("file", tmp_path) as (cluster, _):
        frontend = cluster.frontend("frontend")
        fault = 'kind = "lease"\nmetadata = { tag = "lose" }\ntimes = 1000'
        workers = [cluster.worker(name, MODEL, **plan(tmp_path, fault)) for name in ("one", "two")]
        cluster.wait_ready(frontend, *workers)
        before = {each["instance_id"] for each in json.loads(frontend.get("/health")[1])["instances"]}
        async with load(frontend.port, MODEL, clients=4) as tally:
            for number in range(LOSSES):
                await one(tally, frontend.port, MODEL, "lose", stream=bool(number % 2))
                await until(lambda most=number: fired(workers) > most)  # type: ignore[misc]
            await until(lambda: all("writing it again" in worker.log for worker in workers))
            await until(lambda: frontend.workers(MODEL) == 2)
        after = {each["instance_id"] for each in json.loads(frontend.get("/health")[1])["instances"]}
        record(
            "R7 records vanish from the file store, process well",
            **dict[str, Any](tally.counts),
            note=f"chaos plan: lease, {LOSSES} times; the worker ids stay",
        )
        say(f"{LOSSES} leases lost: {tally.counts}")
        tally.assert_nothing_noticed()
        assert after == before


# -- R15: an engine that raises, or yields rubbish ----------------------------------------------------------------------

SAID = ["say", "abc", 0.005]
RUBBISH: dict[str, list[list[Any]]] = {
    "raises at once": [["raise", "RuntimeError", "secret"]],
    "raises in the middle": [SAID, ["raise", "KeyError", "secret"]],
    "yields None": [SAID, ["yield", None]],
    "yields a number": [["yield", 7]],
    "yields a text": [SAID, ["yield", "abc"]],
    "yields a list": [["yield", [65]]],
    "no token_ids": [["yield", {"index": 0}]],
    "token_ids is a text": [SAID, ["yield", {"token_ids": "abc"}]],
    "a token is a float": [["yield", {"token_ids": [65.5]}]],
    "a token is negative": [SAID, ["yield", {"token_ids": [-1]}]],
    "a token is too large": [["yield", {"token_ids": [2**32]}]],
    "a choice that is not there": [SAID, ["yield", {"token_ids": [65], "index": 3}]],
    "a finish reason that is none": [SAID, ["yield", {"token_ids": [65], "finish_reason": 5}]],
    "tokens after the end": [["yield", {"token_ids": [65], "finish_reason": "stop"}], ["yield", {"token_ids": [66]}]],
    "no end": [SAID, ["return"]],
    "usage that is none": [["yield", {"token_ids": [65], "finish_reason": "stop", "completion_usage": "much"}]],
    "a huge chunk without an end": [["yield", {"token_ids": [65] * 200_000, "index": 0}], ["return"]],
}
ROUNDS = 4


def well_formed(status: int, body: bytes, *, stream: bool) -> str:
    """Why an answer is none that a client can deal with; "" for a good one. Whole answers are good, too."""
    try:
        if stream and status == 200:
            datas = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
            if datas[-1:] != [DONE]:
                return "the stream has no [DONE]"
            events = [json.loads(data) for data in datas[:-1]]
            ended = [event for event in events if "error" in event or event["choices"][0]["finish_reason"]]
            return "" if len(ended) == 1 else f"{len(ended)} events end it"
        answer = json.loads(body)
        if status == 200:
            return "" if answer["choices"][0]["finish_reason"] else "no finish reason"
        return "" if status >= 400 and answer["error"]["message"] and answer["error"]["type"] else "an empty error"
    except (ValueError, LookupError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


async def test_an_engine_that_yields_rubbish_harms_nobody_else(tmp_path: Path, say: Say) -> None:
    with cluster_on("file", tmp_path) as (cluster, _):
        # With a quarantine one bad request would take the only worker from all others; here the worker is judged.
        frontend = cluster.frontend("frontend", DYN_RUNTIME_INHIBITED_DURATION_SECS="0")
        fault = 'kind = "engine-error"\nmetadata = { fault = "engine-error" }\npoint = 2\ntimes = 1000'
        worker = cluster.worker("worker", MODEL, DYN_BACKEND_VALIDATE="1", **plan(tmp_path, fault))
        cluster.wait_ready(frontend, worker)
        bad = hung = failed = 0
        wrong: list[str] = []

        async def ask_for_rubbish(what: str, steps: list[list[Any]], stream: bool, number: int) -> None:
            nonlocal bad, hung, failed
            bad += 1
            tag = f"rubbish-{number}"
            headers = script(*steps, tag=tag)
            if what == "chaos: engine-error":
                headers["x-dynamo-meta-fault"] = "engine-error"
            try:
                reply = await ask(frontend.port, CHAT, chat(MODEL, stream=stream), headers=headers)
            except TimeoutError:
                hung += 1
                wrong.append(f"{what}: no end")
                return
            if complaint := well_formed(reply.status, reply.body, stream=stream):
                wrong.append(f"{what}, {'streamed' if stream else 'unary'}: {complaint}: {reply.body[-300:]!r}")
            failed += reply.status >= 400 or b'"error"' in reply.body
            assert b"secret" not in reply.body, what

        cases = {**RUBBISH, "chaos: engine-error": [["say", ANSWER, 0.005]]}
        async with load(frontend.port, MODEL, clients=4, tokens=16, name="good") as tally:
            number = itertools.count()
            for _ in range(ROUNDS):
                for what, steps in cases.items():
                    await asyncio.gather(
                        *(ask_for_rubbish(what, steps, stream, next(number)) for stream in (True, False))
                    )
        record(
            "R15 an engine that raises or yields rubbish, beside good requests",
            **dict[str, Any](tally.counts),
            note=f"the good requests; beside them {bad} bad ones of {len(cases)} kinds, {failed} typed errors, "
            f"{len(wrong)} malformed, {hung} hung",
        )
        say(f"{bad} bad requests: {failed} errors, {len(wrong)} malformed, {hung} hung; beside: {tally.counts}")
        assert wrong == []
        assert bad >= 100
        tally.assert_nothing_noticed()
        assert not worker.has_ended
        # Each breach is named.
        for named in (
            "RuntimeError: secret",
            "KeyError: 'secret'",
            "expected a mapping, got NoneType",
            "expected a mapping, got int",
            "expected a mapping, got str",
            "expected a mapping, got list",
            "no token_ids (keys: ['index'])",
            "token_ids must be a list of integers, got str",
            "token_ids[0] must be an integer, got float",
            "token_ids[0] must be an unsigned 32-bit integer, got -1",
            "token_ids[0] must be an unsigned 32-bit integer, got 4294967296",
            "invalid choice index 3: this request has 1 choice(s)",
            "item yielded after terminal item",
            "ended without a terminal chunk",
            "the engine failed, as the chaos plan says",
        ):
            assert named in worker.log, named


# -- R17: a soak with cancels and churn -----------------------------------------------------------------------------------

PROBE = Path(__file__).parents[3] / "benchmarks" / "probe.py"
RSS_SLACK_BYTES = 6 * 1024 * 1024  # between the averages of the second and the last quarter: allocators breathe
SLACK = {"tasks": 3, "timers": 6, "descriptors": 4}


def counts(frontend: Frontend, target: Path) -> dict[str, Any]:
    """What lives in the frontend."""
    target.unlink(missing_ok=True)
    frontend.signal(signal.SIGUSR2)
    ends_at = time.monotonic() + 60
    while not target.exists():
        assert time.monotonic() < ends_at, frontend.log
        time.sleep(0.02)
    found: dict[str, Any] = json.loads(target.read_text())
    return found


async def leave_half_way(port: int, rng: random.Random, number: int) -> None:
    headers = script(["say", ANSWER, PACE_SECONDS], tag=f"leave-{number}")
    with contextlib.suppress(TimeoutError, OSError, EOFError):
        async with exchange(port, CHAT, chat(MODEL, stream=True, max_tokens=64), headers=headers) as opened:
            for _ in range(rng.choice((0, 0, 1, 5, 20))):
                if not opened.status:
                    await opened.head()
                await opened.event()
            opened.leave(politely=rng.random() < 0.5)


async def test_a_soak_with_cancels_and_churn_leaves_nothing_behind(tmp_path: Path, say: Say) -> None:
    rng = random.Random(17)
    with cluster_on("file", tmp_path, DYN_MIGRATION_LIMIT="50") as (cluster, _), Nursery(cluster) as nursery:
        target = tmp_path / "counts.json"
        frontend = cluster.frontend("frontend", within=[str(PROBE), str(target)])
        names = (f"w{number}" for number in itertools.count())
        living = [nursery.worker(next(names), MODEL) for _ in range(4)]
        await settled(*living)
        frontend.wait_ready()
        await until(lambda: frontend.workers(MODEL) == 4)
        left = churned = 0
        samples: list[int] = []

        async def leavers() -> None:
            nonlocal left
            while time.monotonic() < ends_at:
                left += 1
                await leave_half_way(frontend.port, rng, left)

        async with load(frontend.port, MODEL, clients=6, tokens=24, name="first"):
            await asyncio.sleep(min(10.0, SOAK_SECONDS / 10))
        before = await asyncio.to_thread(counts, frontend, target)  # what is made once is there, and no request
        async with load(frontend.port, MODEL, clients=6, tokens=24) as tally:
            ends_at = time.monotonic() + SOAK_SECONDS
            async with asyncio.TaskGroup() as group:
                for _ in range(2):
                    group.create_task(leavers())
                while time.monotonic() < ends_at:
                    fresh = nursery.worker(next(names), MODEL)
                    await settled(fresh)
                    living.append(fresh)
                    (worker := living.pop(0)).signal(signal.SIGKILL if churned % 4 == 0 else signal.SIGTERM)
                    await worker.ended()
                    churned += 1
                    samples.append(frontend.resident_bytes())
        # The records of the last killed ones run out first, so that the same number of connections is left.
        await until(lambda: frontend.workers(MODEL) == 4, patience=60)
        await asyncio.sleep(2)
        after = await asyncio.to_thread(counts, frontend, target)
        quarter = max(1, len(samples) // 4)
        early, late = (
            sum(part) / len(part) for part in (samples[quarter : 2 * quarter] or samples, samples[-quarter:])
        )
        grown = {name: after[name] - before[name] for name in SLACK}
        record(
            "R17 soak with cancels and churn",
            **dict[str, Any](tally.counts),
            note=f"{SOAK_SECONDS / 60:g} min, {left} more left half-way, {churned} workers replaced; frontend: RSS "
            f"{(late - early) / 1e6:+.1f} MB from the second quarter to the last, {grown['tasks']:+d} tasks, "
            f"{grown['descriptors']:+d} descriptors, {grown['timers']:+d} timers",
        )
        say(f"{tally.counts}, {left} left, {churned} replaced; RSS {(late - early) / 1e6:+.1f} MB; {grown}")
        tally.assert_nothing_noticed()
        assert all(grown[name] <= most for name, most in SLACK.items()), grown
        assert late - early < RSS_SLACK_BYTES


# -- R18: no descriptors left, and timers that are late -----------------------------------------------------------------


@contextmanager
def starved(process: Frontend | Worker, spare: int) -> Iterator[None]:
    """Let a process open `spare` more descriptors, and no more than these."""
    used = len(os.listdir(f"/proc/{process.pid}/fd"))
    soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (used + spare, hard))
    try:
        yield
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.asynccontextmanager
async def crowd(port: int, count: int) -> AsyncIterator[list[socket.socket]]:
    """Connections that say nothing. The kernel takes them, whether the process can or not."""
    found: list[socket.socket] = []
    try:
        for _ in range(count):
            sock = socket.socket()
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(("127.0.0.1", port))
            found.append(sock)
            await asyncio.sleep(0)
        yield found
    finally:
        for sock in found:
            sock.close()


def worker_port(frontend: Frontend) -> int:
    """Where the one worker listens."""
    (instance,) = [
        each for each in json.loads(frontend.get("/health")[1])["instances"] if each["endpoint"] == "generate"
    ]
    return int(str(instance["transport"]["tcp"]).partition("/")[0].rpartition(":")[2])


@pytest.mark.parametrize("role", ["frontend", "worker"])
async def test_a_process_without_descriptors_serves_again_when_it_has_some(tmp_path: Path, say: Say, role: str) -> None:
    with cluster_on("file", tmp_path) as (cluster, _):
        frontend, worker = cluster.frontend("frontend"), cluster.worker("worker", MODEL)
        cluster.wait_ready(frontend, worker)
        victim, port = (frontend, frontend.port) if role == "frontend" else (worker, worker_port(frontend))
        tally, refused = Tally(), 0
        await one(tally, frontend.port, MODEL, "before", stream=True)
        under_way = asyncio.create_task(one(tally, frontend.port, MODEL, "during", stream=True, pace=0.1))
        await worker.sees("first", "during")
        with starved(victim, 12):
            async with crowd(port, 60):
                await asyncio.sleep(3)  # longer than the pause after an accept that failed
                # Clients that come now get an answer, or none: what matters is that they are not half served.
                for number in range(5):
                    try:
                        async with asyncio.timeout(3):
                            reply = await ask(frontend.port, CHAT, chat(MODEL, max_tokens=4), headers=script(SAID))
                        refused += reply.status != 200
                        assert reply.status in (200, 500, 502, 503, 529), (number, reply.body)
                    except (TimeoutError, OSError, EOFError):
                        refused += 1
                await under_way
                assert not victim.has_ended, victim.log
            began = time.monotonic()  # the connections are gone, the limit is not
            again = Tally(tokens=8)
            while not again.whole:
                assert time.monotonic() - began < 60, (again.problems, victim.log[-2000:])
                await one(again, frontend.port, MODEL, "again", stream=False)
            back = 1000 * (time.monotonic() - began)
        for number in range(20):
            await one(tally, frontend.port, MODEL, f"after-{number}", stream=bool(number % 2))
        await until(lambda: frontend.workers(MODEL) == 1)
        record(
            f"R18 no descriptors left at the {role}",
            **dict[str, Any](tally.counts),
            recovery_ms=[back],
            note=f"60 connections, room for 12; a stream under way is finished; {refused} of 5 requests meanwhile refused "
            "or not accepted; recovery: from the end of the connections to an answer",
        )
        say(f"{role}: {tally.counts}, {refused} of 5 refused meanwhile, back after {back:.0f} ms")
        tally.assert_nothing_noticed()
        assert victim.log.count("Traceback") < 5, victim.log[-3000:]


STOPPED_SECONDS = float(os.environ.get("STOPPED_SECONDS") or 24)  # leases last 10 s, pings come every 20 s
SILENCE_SECONDS = 15  # of a caller, at its worker; 90 unless set
SERVED_AGAIN_SECONDS = 5.0
SLOWLY = 0.1


@pytest.mark.parametrize("who", ["frontend", "only worker", "one of two workers"])
async def test_a_process_that_stood_still_for_longer_than_every_timer_goes_on(
    tmp_path: Path, say: Say, who: str
) -> None:
    # A real clock jump needs privileges. To a process that was stopped all timers are late in the same way.
    with cluster_on("file", tmp_path, DYN_TCP_SILENCE_SECS=str(SILENCE_SECONDS)) as (cluster, _):
        frontend = cluster.frontend("frontend")
        workers = [cluster.worker(name, MODEL) for name in ("one", "two")[: 1 + (who == "one of two workers")]]
        cluster.wait_ready(frontend, *workers)
        stopped = frontend if who == "frontend" else workers[0]
        ids = {each["instance_id"] for each in json.loads(frontend.get("/health")[1])["instances"]}

        async def under_way(tag: str, *, stream: bool) -> Reply | None:
            """An answer, however long it takes; None for no end."""
            steps, body = script(["say", ANSWER, SLOWLY], tag=tag), chat(MODEL, stream=stream, max_tokens=len(ANSWER))
            try:
                async with (
                    asyncio.timeout(STOPPED_SECONDS + 60),
                    exchange(frontend.port, CHAT, body, headers=steps) as it,
                ):
                    return await it.reply(patience=STOPPED_SECONDS + 60)
            except TimeoutError:
                return None

        async with asyncio.TaskGroup() as group:
            tags = [f"under-way-{number}" for number in range(4)]
            begun = [group.create_task(under_way(tag, stream=n % 2 == 0)) for n, tag in enumerate(tags)]
            for tag in tags:
                await until(lambda tag=tag: any(w.events(tag) for w in workers))  # type: ignore[misc]
            stopped.signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(STOPPED_SECONDS / 2)
                meanwhile = [group.create_task(under_way(f"meanwhile-{n}", stream=n % 2 == 0)) for n in range(2)]
                await asyncio.sleep(STOPPED_SECONDS / 2)
            finally:
                stopped.signal(signal.SIGCONT)
            thawed = time.monotonic()
            first = Tally(tokens=8)
            while not first.whole:
                assert time.monotonic() - thawed < 60, (first.problems, stopped.log[-2000:])
                await one(first, frontend.port, MODEL, "again", stream=False)
            back = time.monotonic() - thawed
        tally = Tally()
        for number in range(20):
            await one(tally, frontend.port, MODEL, f"after-{number}", stream=bool(number % 2))
        await until(lambda: frontend.workers(MODEL) == len(workers))
        ended = [task.result() for task in (*begun, *meanwhile)]
        whole = sum(reply is not None and reply.status == 200 and b"error" not in reply.body for reply in ended)
        hung = sum(reply is None for reply in ended)
        wrong = [
            complaint
            for n, reply in enumerate(ended)
            if reply is not None and (complaint := well_formed(reply.status, reply.body, stream=n % 2 == 0))
        ]
        for reply in ended:
            if reply is not None and reply.status == 200 and b"error" not in reply.body:
                tally.judge("under way", reply.text, "said only")
        after = {each["instance_id"] for each in json.loads(frontend.get("/health")[1])["instances"]}
        record(
            f"R18 all timers late at the {who}",
            sent=20 + len(ended),
            lost=tally.lost + len(ended) - whole - hung,
            doubled=tally.doubled,
            hung=tally.hung + hung,
            recovery_ms=[1000 * back],
            note=f"SIGSTOP for {STOPPED_SECONDS:g} s; {len(begun)} requests under way, {len(meanwhile)} sent meanwhile, "
            f"{whole} of these whole, the others end with a typed error; 20 afterwards; recovery: from SIGCONT to an answer",
        )
        say(f"{who}: {whole} of {len(ended)} whole, {hung} hung, {wrong}; back after {back:.2f} s; then {tally.counts}")
        assert (hung, wrong) == (0, [])
        assert (tally.lost, tally.doubled, tally.hung) == (0, 0, 0), tally.problems
        assert tally.whole == 20 + whole
        assert back < SERVED_AGAIN_SECONDS
        assert after == ids
        assert not any(process.has_ended for process in (frontend, *workers))
