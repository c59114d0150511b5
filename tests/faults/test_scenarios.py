"""Failure scenarios R5, R7, R15 and R18 on real processes, each a row of `docs/faults.md`.

Workers fail by chaos plans where one can say what is to happen. CHURN is how many workers come and go (200).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.etcd_server import EtcdServer
from support.http_client import CHAT, DONE, ask, chat, script
from support.judged_load import ANSWER, Tally, load, one
from support.nursery import Nursery
from support.processes import Cluster, Frontend, Worker, until
from support.scenario_table import record

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif("FAULTS" not in os.environ, reason="make test-faults"),
    pytest.mark.timeout(3000),
]

CHURN = int(os.environ.get("CHURN") or 200)
MODEL = "m"

Say = Callable[[str], None]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Print a figure past pytest."""

    def show(text: str) -> None:
        with capsys.disabled():
            print(f"\n  {text}", end="", flush=True)

    return show


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
        await until(lambda process=process: "Serving " in process.log or process.has_ended)
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
        record(f"R5 churn, {store} store", **tally.counts, recovery_ms=pauses, note=note)
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
            **tally.counts,
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
                await until(lambda most=number: fired(workers) > most)
            await until(lambda: all("writing it again" in worker.log for worker in workers))
            await until(lambda: frontend.workers(MODEL) == 2)
        after = {each["instance_id"] for each in json.loads(frontend.get("/health")[1])["instances"]}
        record(
            "R7 records vanish from the file store, process well",
            **tally.counts,
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
            **tally.counts,
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


# -- R18: no descriptors left -------------------------------------------------------------------


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
            **tally.counts,
            recovery_ms=[back],
            note=f"60 connections, room for 12; a stream under way is finished; {refused} of 5 requests meanwhile refused "
            "or not accepted; recovery: from the end of the connections to an answer",
        )
        say(f"{role}: {tally.counts}, {refused} of 5 refused meanwhile, back after {back:.0f} ms")
        tally.assert_nothing_noticed()
        assert victim.log.count("Traceback") < 5, victim.log[-3000:]
