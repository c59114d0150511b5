"""Limits and budgets that several frontends share through a real etcd: never overspent, never stuck with who died."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import pytest

from support.access import bearer, key, write_keys
from support.etcd_server import EtcdServer
from support.http_client import CHAT, ask, chat, script
from support.patience import PATIENCE_SECONDS
from support.processes import Cluster, Frontend, until

TTL_SECONDS = 3
UNITS, SPENT = 0, 4  # where they stand in what a frontend holds of a limit
LEADER = re.compile(r"this process \(pid (\d+)\) divides the limits")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path / "etcd") as server:
        yield server


@pytest.fixture
def cluster(tmp_path: Path, etcd: EtcdServer) -> Iterator[Cluster]:
    with Cluster(tmp_path, "etcd", ETCD_ENDPOINTS=etcd.url, ETCD_LEASE_TTL=str(TTL_SECONDS)) as cluster:
        yield cluster


async def start(
    cluster: Cluster, keys: Path, *names: str, flags: Sequence[str] = (), models: Set[str] = frozenset({"m"})
) -> list[Frontend]:
    """Frontends with one key file, and a worker of `m`; they all know these models."""
    cluster.sample("worker-of-" + names[0], "m", "--delay", "0.001")
    frontends = [cluster.frontend(name, "--keys", str(keys), *flags) for name in names]
    for frontend in frontends:
        frontend.wait_ready()
    ends_at = time.monotonic() + PATIENCE_SECONDS
    while True:
        assert time.monotonic() < ends_at, frontends[0].log
        asked = [*frontends, *frontends]  # both processes of a group
        answers = await asyncio.gather(*[ask(each.port, "/v1/models", headers=bearer("watch")) for each in asked])
        if all(models <= {model["id"] for model in answer.json()["data"]} for answer in answers):
            return frontends
        await asyncio.sleep(0.05)


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

    async def passed(asked: list[Frontend], seconds: float) -> tuple[int, int, float]:
        """How many were let through, and how many were not, in so many seconds or a little more."""
        began, statuses = time.monotonic(), Counter[int]()
        while time.monotonic() < began + seconds:
            statuses.update(status for status, _, _ in await ask_many(asked, "k", 8, max_tokens=1))
        took = time.monotonic() - began
        assert statuses[200] <= limit / 60 * took + limit * 0.01 + frontends
        return statuses[200], statuses[429], took

    await passed(both, 6.0)
    ends_at = time.monotonic() + PATIENCE_SECONDS
    while True:  # now the first one is busy, and the second one quiet, which shows after some seconds
        count, refused, seconds = await passed(both[:1], 6.0)
        # Much more than its half, or all that a slow machine could ask for.
        if count >= limit / 60 * seconds * 0.6 or not refused:
            break
        assert time.monotonic() < ends_at, f"{count} in {seconds:.1f} s, and {refused} refused"


def divisions(etcd: EtcdServer) -> list[dict[str, Any]]:
    """The records of the limits in the store."""
    pages = [value for key, (value, _) in etcd.keys().items() if "/pages/" in key]
    return [one for page in pages for one in json.loads(page).values()]


async def test_a_frontend_that_is_killed_gives_its_slice_back_after_its_lease(
    cluster: Cluster, etcd: EtcdServer, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys.toml", key("k", budget={"period": "total", "tokens": 2_000}), key("watch"))
    one, two = await start(cluster, keys, "one", "two")
    (first,) = await ask_many([one], "k", 1, max_tokens=20)
    assert first[0] == 200

    def reported() -> int:
        return sum(holding[SPENT] for one in divisions(etcd) for holding in one["members"].values())

    await until(lambda: reported() == first[1], lambda: f"{first[1]} tokens in {divisions(etcd)}")
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
    go_on = tmp_path / "go on"
    waits = script(["until", str(go_on)], ["say", "x"])
    cluster.worker("held", "held", SCRIPTED_DISCOVERY="etcd")
    (group,) = await start(cluster, keys, "group", flags=("--workers=2",), models={"m", "held"})
    (other,) = await start(cluster, keys, "other", models={"m", "held"})
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
    async with asyncio.timeout(PATIENCE_SECONDS):  # until the group has heard what the other one has spent
        codes: set[str] = set()
        while codes != {"insufficient_quota"}:
            found_codes = [code for _, _, code in await ask_many([group], "k", 8, max_tokens=200)]
            assert "" not in found_codes
            codes = set(found_codes)
    many, done = 4 * places, 0

    async def hold(number: int) -> int:
        nonlocal done
        answer = await ask((group, other)[number % 2].port, CHAT, chat("held"), headers=bearer("few") | waits)
        done += 1
        return answer.status

    async with asyncio.TaskGroup() as asked:
        running = [asked.create_task(hold(number)) for number in range(many)]
        await until(lambda: done >= many - places, lambda: f"{places} requests at most; {done} have ended")
        go_on.touch()
    assert 0 < sum(task.result() == 200 for task in running) <= places


async def test_limits_hold_without_etcd_and_a_frontend_alone_gets_everything_after_a_restart(
    cluster: Cluster, etcd: EtcdServer, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys.toml", key("k", limits={"requests_per_day": 1_000}), key("watch"))
    one, two = await start(cluster, keys, "one", "two")

    def halves() -> bool:
        return any([each[UNITS] for each in found["members"].values()] == [500, 500] for found in divisions(etcd))

    await until(halves, lambda: f"two halves: {divisions(etcd)}")
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
    async with asyncio.timeout(PATIENCE_SECONDS):  # until the leases of those that were killed have ended
        while (await ask_many(again, "k", 1, max_tokens=1))[0][0] != 200:
            await asyncio.sleep(0.1)
