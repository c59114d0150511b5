"""Limits and budgets that several frontends share through a real etcd: never overspent, never stuck with who died."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.access import bearer, key, write_keys
from support.etcd_server import EtcdServer
from support.http_client import CHAT, ask, chat
from support.patience import PATIENCE_SECONDS
from support.processes import Cluster, Frontend, until

TTL_SECONDS = 3
LEADER = re.compile(r"this process \(pid (\d+)\) divides the limits")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path / "etcd") as server:
        yield server


@pytest.fixture
def cluster(tmp_path: Path, etcd: EtcdServer) -> Iterator[Cluster]:
    with Cluster(tmp_path, "etcd", ETCD_ENDPOINTS=etcd.url, ETCD_LEASE_TTL=str(TTL_SECONDS)) as cluster:
        yield cluster


async def start(cluster: Cluster, keys: Path, *names: str, flags: Sequence[str] = ()) -> list[Frontend]:
    """Frontends with one key file, and a worker that they all know."""
    cluster.sample("worker-of-" + names[0], "m", "--delay", "0.001")
    frontends = [cluster.frontend(name, "--keys", str(keys), *flags) for name in names]
    for frontend in frontends:
        frontend.wait_ready()
    models: list[bool] = []
    ends_at = time.monotonic() + PATIENCE_SECONDS
    while not models or not all(models):
        assert time.monotonic() < ends_at, frontends[0].log
        answers = [await ask(frontend.port, "/v1/models", headers=bearer("watch")) for frontend in frontends]
        models = ["m" in [model["id"] for model in answer.json()["data"]] for answer in answers]
        await asyncio.sleep(0.05)
    return frontends


async def ask_many(
    frontends: list[Frontend], id: str, count: int, *, model: str = "m", **fields: Any
) -> list[tuple[int, int, str]]:
    """Ask the frontends in turn, all at once; the status, the tokens and the error code of each."""

    async def one(number: int) -> tuple[int, int, str]:
        frontend = frontends[number % len(frontends)]
        answer = await ask(frontend.port, CHAT, chat(model, **fields), headers=bearer(id))
        body = answer.json()
        if answer.status != 200:
            return answer.status, 0, body["error"]["code"]
        return 200, body["usage"]["total_tokens"], ""

    return await asyncio.gather(*[one(number) for number in range(count)])


async def test_64_streams_at_two_frontends_never_overspend_a_budget_and_can_use_all_of_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    budget = 3_000
    keys = write_keys(tmp_path / "keys.toml", key("k", budget={"period": "total", "tokens": budget}), key("watch"))
    frontends = await start(cluster, keys, "one", "two")
    spent, codes = 0, Counter[str]()
    ends_at = time.monotonic() + PATIENCE_SECONDS
    while codes["insufficient_quota"] < 20 and time.monotonic() < ends_at:
        for _, tokens, code in await ask_many(frontends, "k", 64, max_tokens=20):
            spent += tokens
            codes[code] += 1
    assert spent <= budget  # each request names its `max_tokens`, so what it may need was reserved before
    assert spent > budget - 200  # what one frontend does not need goes to the other
    assert codes["insufficient_quota"] >= 20


async def test_a_rate_holds_over_two_frontends_and_a_busy_one_gets_what_the_other_does_not_use(
    cluster: Cluster, tmp_path: Path
) -> None:
    limit, frontends = 1_200, 2
    keys = write_keys(
        tmp_path / "keys.toml",
        key("k", limits={"requests_per_minute": limit, "burst": 0.01}),
        key("watch"),
    )
    both = await start(cluster, keys, "one", "two")

    async def passed(asked: list[Frontend], seconds: float) -> tuple[int, float]:
        began, count = time.monotonic(), 0
        while time.monotonic() < began + seconds:
            statuses = await ask_many(asked, "k", 8, max_tokens=1)
            count += sum(status == 200 for status, _, _ in statuses)
        return count, time.monotonic() - began

    count, seconds = await passed(both, 6.0)
    assert count <= limit / 60 * seconds + limit * 0.01 + frontends
    await passed(both[:1], 7.0)  # now the first one is busy, and the second one quiet
    count, seconds = await passed(both[:1], 6.0)
    assert count <= limit / 60 * seconds + limit * 0.01 + frontends
    assert count >= limit / 60 * seconds * 0.6  # much more than its half


async def test_a_frontend_that_is_killed_gives_its_slice_back_after_its_lease(cluster: Cluster, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.toml", key("k", budget={"period": "total", "tokens": 2_000}), key("watch"))
    one, two = await start(cluster, keys, "one", "two")
    (first,) = await ask_many([one], "k", 1, max_tokens=20)
    assert first[0] == 200
    await asyncio.sleep(1.5)  # what was spent is in the store a half second later
    one.kill()
    spent, code = first[1], ""
    ends_at = time.monotonic() + PATIENCE_SECONDS
    while code != "insufficient_quota" and time.monotonic() < ends_at:
        for _, tokens, found in await ask_many([two], "k", 4, max_tokens=20):
            spent += tokens
            code = found
    assert code == "insufficient_quota"
    assert 2_000 - 200 < spent <= 2_000


async def test_another_process_of_a_group_divides_its_limits_when_the_one_that_did_is_killed(
    cluster: Cluster, tmp_path: Path
) -> None:
    budget, places = 3_000, 6
    keys = write_keys(
        tmp_path / "keys.toml",
        key("k", budget={"period": "total", "tokens": budget}),
        key("few", limits={"concurrent": places}),
        key("watch"),
    )
    cluster.sample("slow", "slow", "--delay", "0.05")
    (group,) = await start(cluster, keys, "group", flags=("--workers=2",))
    (other,) = await start(cluster, keys, "other")
    await until(lambda: LEADER.search(group.log) is not None)
    spent = sum([tokens for _, tokens, _ in await ask_many([group, other], "k", 20, max_tokens=20)])
    leader = int(LEADER.findall(group.log)[-1])
    os.kill(leader, signal.SIGKILL)
    await until(lambda: LEADER.findall(group.log)[-1] != str(leader), lambda: f"another process; log:\n{group.log}")
    # The processes of the group still know what they have spent, and what of it is reported.
    code, ends_at = "", time.monotonic() + PATIENCE_SECONDS
    while code != "insufficient_quota" and time.monotonic() < ends_at:
        for _, tokens, found in await ask_many([other], "k", 4, max_tokens=20):
            spent += tokens
            code = found  # the group gives its slice on, which only its new leader can
    assert code == "insufficient_quota"
    assert budget - 200 < spent <= budget
    assert {found for _, _, found in await ask_many([group], "k", 8, max_tokens=200)} == {"insufficient_quota"}
    running = await ask_many([group, other], "few", 4 * places, model="slow", max_tokens=20)
    assert 0 < sum(status == 200 for status, _, _ in running) <= places


async def test_limits_hold_without_etcd_and_a_frontend_alone_gets_everything_after_a_restart(
    cluster: Cluster, etcd: EtcdServer, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys.toml", key("k", limits={"requests_per_day": 1_000}), key("watch"))
    one, two = await start(cluster, keys, "one", "two")
    etcd.kill()
    await until(lambda: "goes on with 1/2 of each limit" in one.log and "goes on with 1/2" in two.log)
    assert {status for status, _, _ in await ask_many([one, two], "k", 20, max_tokens=1)} == {200}
    counts = Counter(status for status, _, _ in await ask_many([one, two], "k", 300, max_tokens=1))
    assert counts[200] <= 1_000 / 6 - 20 + 3
    await asyncio.to_thread(etcd.start)
    await until(lambda: "the discovery store answers again" in one.log)
    two.kill()
    one.kill()
    again = await start(cluster, keys, "three")
    assert (await ask_many(again, "k", 1, max_tokens=1))[0][0] == 200
