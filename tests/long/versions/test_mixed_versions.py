"""The last release and this tree in one cluster: whoever is old and whoever is new, no request is lost.

Every case has kills, workers that are told to end, drains, and clients that leave, all under load. ROUNDS is how often.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.etcd_server import EtcdServer
from support.http_client import CHAT, ask, chat, exchange, script
from support.last_release import Release, install, last_release
from support.load import Load, load
from support.nats_server import nats_server
from support.processes import Cluster, Frontend, Worker, until
from support.scenario_table import Say

RELEASE = last_release() if "VERSIONS" in os.environ else "make test-versions"
pytestmark = [
    pytest.mark.versions,
    pytest.mark.skipif(isinstance(RELEASE, str), reason=str(RELEASE)),
    pytest.mark.timeout(900),
]

ROUNDS = int(os.environ.get("ROUNDS") or 3)
CLIENTS, LEAVERS, ANSWERS_PER_STEP = 8, 4, 16
MODEL = "m"
PATIENCE_SECONDS = 180.0
OLD, NEW = "old", "new"


@pytest.fixture(scope="module")
def old_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert isinstance(RELEASE, Release)
    return install(RELEASE, tmp_path_factory.mktemp("release") / "environment")


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Print a figure past pytest."""

    def show(text: str) -> None:
        with capsys.disabled():
            print(f"\n  {text}", end="", flush=True)

    return show


@dataclass
class Mixture:
    """A cluster whose frontends and workers each have a version."""

    cluster: Cluster
    pythons: dict[str, str]
    frontends: list[Frontend] = field(default_factory=list)
    living: list[tuple[str, Worker]] = field(default_factory=list)
    everyone: list[tuple[str, Worker]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def frontend(self, version: str, *flags: str) -> None:
        name = f"frontend-{next(self.numbers)}-{version}"
        self.frontends.append(self.cluster.frontend(name, *flags, python=self.pythons[version]))

    async def join(self, version: str) -> None:
        """Start a worker; return when every frontend has it."""
        name = f"w{next(self.numbers)}-{version}"
        worker = self.cluster.worker(name, MODEL, python=self.pythons[version])
        self.living.append((version, worker))
        self.everyone.append((version, worker))
        await self.settled()

    async def settled(self) -> None:
        for frontend in self.frontends:
            workers = [worker for _, worker in self.living]
            await asyncio.to_thread(self.cluster.wait_ready, frontend, *workers)

    @property
    def ports(self) -> list[int]:
        return [frontend.port for frontend in self.frontends]

    def served(self, version: str) -> int:
        """How many answers the workers of a version began."""
        workers = [worker for each, worker in self.everyone if each == version]
        return sum(event["event"] == "generate" for worker in workers for event in worker.events())


@asynccontextmanager
async def mixture(
    root: Path, old_python: Path, *, store: str, plane: str, frontends: list[str], workers: list[str]
) -> AsyncIterator[Mixture]:
    with ExitStack() as stack:
        env = {"DYN_REQUEST_PLANE": plane, "DYN_MIGRATION_LIMIT": "50"}
        if store == "etcd":
            etcd = stack.enter_context(EtcdServer(root / "etcd"))
            # A killed worker is listed until its lease ends.
            env |= {"ETCD_ENDPOINTS": etcd.url, "SCRIPTED_DISCOVERY": "etcd", "ETCD_LEASE_TTL": "2"}
        if plane == "nats":
            env["NATS_SERVER"] = stack.enter_context(nats_server()).url
        cluster = stack.enter_context(Cluster(root, store, **env))
        found = Mixture(cluster, {OLD: str(old_python), NEW: sys.executable})
        for version in frontends:
            found.frontend(version)
        for version in workers:
            await found.join(version)
        yield found


async def leave(found: Mixture, name: str) -> list[str]:
    """Clients that leave in the middle of a stream. Return the tags of theirs."""
    tags = [f"{name}-{number}" for number in range(LEAVERS)]

    async def one(number: int, tag: str) -> None:
        port = found.ports[number % len(found.ports)]
        body, headers = chat(MODEL, stream=True), script(["say", "a", 0.0], ["wait"], tag=tag)
        async with exchange(port, CHAT, body, headers=headers) as opened:
            assert await opened.head() == 200
            await opened.event()
            opened.leave(politely=bool(number % 2))

    async with asyncio.TaskGroup() as group:
        for number, tag in enumerate(tags):
            group.create_task(one(number, tag))
    return tags


async def end_one(found: Mixture, how: str) -> str:
    """End the oldest worker in this way, and start one of the same version. Return that version."""
    version, worker = found.living.pop(0)
    match how:
        case "kill":
            worker.kill()
        case "drain":
            reply = await ask(worker.system_port, "/engine/drain", {})
            if reply.status == 200:
                await safe_to_delete(worker)
                worker.kill()
            else:  # a release without these routes
                assert version == OLD, reply.body
                worker.terminate()
        case _:
            worker.terminate()
    await worker.ended()
    await found.join(version)
    return version


async def more_answers(answers: Load) -> None:
    """Return when some more requests have ended."""
    wanted = len(answers.answers) + ANSWERS_PER_STEP
    await until(lambda: len(answers.answers) >= wanted, lambda: "answers", patience=PATIENCE_SECONDS)


async def safe_to_delete(worker: Worker) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (await ask(worker.system_port, "/engine/status")).json()["safe_to_delete"]:
            await asyncio.sleep(0.02)


MIXTURES = {
    "an old frontend and new workers": ([OLD], [NEW, NEW, NEW]),
    "a new frontend and old workers": ([NEW], [OLD, OLD, OLD]),
    "half and half": ([OLD, NEW], [OLD, NEW, OLD, NEW]),
}


@pytest.mark.parametrize(("store", "plane"), [("file", "tcp"), ("etcd", "tcp"), ("etcd", "nats")])
@pytest.mark.parametrize("name", MIXTURES)
async def test_two_versions_in_one_cluster_lose_nothing(
    tmp_path: Path, old_python: Path, say: Say, name: str, store: str, plane: str
) -> None:
    frontends, workers = MIXTURES[name]
    ended: list[str] = []
    left: list[str] = []
    mix = mixture(tmp_path, old_python, store=store, plane=plane, frontends=frontends, workers=workers)
    async with mix as found:
        async with load(found.ports, MODEL, clients=CLIENTS) as answers:
            for turn in range(ROUNDS):
                for how in ("kill", "drain", "SIGTERM"):
                    left += await leave(found, f"leaver-{turn}-{how}")
                    await more_answers(answers)
                    ended.append(f"{await end_one(found, how)} by {how}")
        begun = {
            event["tag"]: worker
            for _, worker in found.everyone
            for event in worker.events()
            if event["event"] == "generate" and event["tag"] in left
        }
        for tag, worker in begun.items():
            if not worker.has_ended:
                await worker.sees("finally", tag)  # the engine was told that the client had left
        served = {version: found.served(version) for version in set(workers)}
    say(
        f"{name}, {store}, {plane}: {answers.begun} requests, {len(answers.lost)} lost, {len(answers.doubled)} doubled, "
        f"{answers.hung} hung; {len(left)} clients left; {len(ended)} workers ended; begun by {served}"
    )
    answers.check()
    assert begun.keys() == set(left)
    assert all(served.values())


async def test_a_cluster_is_upgraded_under_load_and_back_without_a_loss(
    tmp_path: Path, old_python: Path, say: Say
) -> None:
    """Workers first, then the frontends, as docs/upgrading.md has it; and the other way round to go back."""
    mix = mixture(tmp_path, old_python, store="etcd", plane="tcp", frontends=[OLD, OLD], workers=[OLD, OLD])
    async with mix as found:
        ports = list(found.ports)
        async with load(ports, MODEL, clients=CLIENTS) as answers:
            for version, order in ((NEW, ("workers", "frontends")), (OLD, ("frontends", "workers"))):
                for what in order:
                    for _ in range(2):
                        if what == "workers":
                            await found.join(version)
                            _, worker = found.living.pop(0)
                            worker.terminate()
                            assert await worker.ended() == 0
                        else:
                            found.frontend(version)
                            await found.settled()
                            frontend = found.frontends.pop(0)
                            ports[:] = found.ports  # a balancer hears of it first: preStop
                            frontend.signal(signal.SIGTERM)
                            await frontend.ended()
                        await more_answers(answers)
        served = {version: found.served(version) for version in (OLD, NEW)}
    say(f"upgrade and back: {answers.begun} requests, {len(answers.lost)} lost, {answers.hung} hung; begun by {served}")
    answers.check()
    assert all(served.values())
