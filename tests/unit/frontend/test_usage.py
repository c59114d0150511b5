"""What keys use: counted exactly, written once a second, kept over a restart, shown to admins and as metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from dynamo.cli.main import main
from dynamo.errors import InvalidArgument
from dynamo.frontend.base.metrics.families import FrontendFamilies
from dynamo.frontend.parts.keys.identity import Identity
from dynamo.frontend.parts.keys.limit_table import LimitTable
from dynamo.frontend.parts.keys.metrics import MAX_KEYS, KeyMetrics
from dynamo.frontend.parts.keys.quotas import Quotas, TokenDemand, TokenUse
from dynamo.frontend.parts.keys.rules.records import KeyRecord, KeyRing
from dynamo.frontend.parts.keys.usage_store import UsageMeter, UsageQuery, UsageStore
from dynamo.runtime.observe.metrics import MetricsRegistry
from support.access import bearer, closed_cluster, key
from support.frontend_cluster import fail, say


def meter_of(store: UsageStore | None, *records: KeyRecord, wall: float = 1.8e9) -> tuple[Quotas, UsageMeter]:
    ring = KeyRing(keys=records)
    spent, pledges = (None, None) if store is None else (store.spent(), store.pledges())
    quotas = Quotas(lambda: ring, LimitTable(), spent=spent, pledges=pledges, wall_clock=lambda: wall)
    metrics = KeyMetrics(FrontendFamilies(MetricsRegistry(), "x", {}))
    identities = [Identity(record) for record in records]
    return quotas, UsageMeter(quotas, metrics, store, keep_days=2, identities=lambda: identities)


def use(quotas: Quotas, record: KeyRecord, input: int, output: int, *, is_good: bool = True) -> None:
    charge = quotas.open(Identity(record), "chat_completions")
    charge.enter("m")
    charge.has_succeeded = is_good
    charge.close(TokenUse(input, 1, output), 0.5)


async def test_requests_of_a_minute_are_one_row_and_add_up_over_processes(tmp_path: Path) -> None:
    record = key("k", project="p")
    for _ in range(2):
        store = UsageStore(tmp_path / "usage.sqlite")
        quotas, meter = meter_of(store, record)
        use(quotas, record, 10, 5)
        use(quotas, record, 20, 0, is_good=False)
        await meter.write()
        use(quotas, record, 1, 1)
        await meter.aclose()
    with contextlib.closing(sqlite3.connect(tmp_path / "usage.sqlite")) as database:
        rows = database.execute("SELECT * FROM usage").fetchall()
    assert rows == [(30_000_000, "k", "p", "m", "chat_completions", 6, 2, 62, 6, 12, 0, 0, 3.0)]
    assert (tmp_path / "usage.sqlite").stat().st_mode & 0o777 == 0o600


async def test_old_minutes_go(tmp_path: Path) -> None:
    record, store = key("k"), UsageStore(tmp_path / "usage.sqlite")
    for days_ago in (5, 1, 0):
        quotas, meter = meter_of(store, record, wall=1.8e9 - days_ago * 86_400)
        use(quotas, record, 1, 1)
        await meter.write()
    assert [row["requests"] for row in await meter.rows(UsageQuery(("minute",)))] == [1, 1]
    await meter.aclose()


async def test_what_cannot_be_written_waits_and_is_written_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record, store = key("k", budget={"tokens": 1000, "period": "total"}), UsageStore(tmp_path / "usage.sqlite")
    quotas, meter = meter_of(store, record)
    store._database.execute("ALTER TABLE usage RENAME TO away")
    for _ in range(3):
        charge = quotas.open(Identity(record), "chat_completions")
        charge.enter("m")
        charge.reserve(TokenDemand(10, 10))
        charge.close(TokenUse(10, 0, 10))
        await meter.write()
    assert len([one for one in caplog.records if "kept in memory" in one.getMessage()]) == 1
    store._database.execute("ALTER TABLE away RENAME TO usage")
    await meter.write()
    (row,) = await meter.rows(UsageQuery())
    assert (row["requests"], row["input"], row["output"]) == (3, 30, 30)
    assert store.spent()["key k total tokens"].units == 60
    await meter.aclose()


async def test_usage_is_written_once_where_the_frontend_closes_during_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.frontend.parts.keys.usage_store.WRITE_SECONDS", 0.0)
    record, store = key("k"), UsageStore(tmp_path / "usage.sqlite")
    quotas, meter = meter_of(store, record)
    writing, release, add = asyncio.Event(), asyncio.Event(), store.add

    async def slow_add(*args: Any, **named: Any) -> None:
        writing.set()
        await release.wait()
        await add(*args, **named)

    monkeypatch.setattr(store, "add", slow_add)
    use(quotas, record, 10, 5)
    meter.start()
    await writing.wait()
    use(quotas, record, 1, 1)
    closing = asyncio.create_task(meter.aclose())
    await asyncio.sleep(0)
    release.set()
    await closing
    with contextlib.closing(sqlite3.connect(tmp_path / "usage.sqlite")) as database:
        assert database.execute("SELECT requests, input FROM usage").fetchall() == [(2, 11)]


async def test_a_budget_goes_on_after_a_restart(tmp_path: Path) -> None:
    record = key("k", budget={"tokens": 50, "period": "month"})
    statuses = []
    for _ in range(3):
        async with closed_cluster(tmp_path, record, usage_db=str(tmp_path / "usage.sqlite")) as found:
            await found.worker(say("ab"))
            answer = await found.client.chat("x", max_tokens=8, headers=bearer("k"))
            statuses.append(answer.status)
    assert statuses[0] == 200
    assert statuses[-1] == 429


def _die(path: Path, record: KeyRecord) -> None:
    """Use some of a budget, reserve more of it, and die before anything is written."""
    quotas, _ = meter_of(UsageStore(path), record)
    done, running, released = [quotas.open(Identity(record)) for _ in range(3)]
    for charge in (done, running, released):
        charge.enter("m")
        charge.reserve(TokenDemand(5, 10))
    done.close(TokenUse(5, 0, 3))
    released.close(TokenUse())
    os.kill(os.getpid(), signal.SIGKILL)


def files_of(folder: Path) -> int:
    """How many processes have a file of what they take."""
    return len([*folder.glob("usage.sqlite-pledges-*")])


async def test_what_a_killed_process_had_used_and_reserved_is_spent_once(tmp_path: Path) -> None:
    path, record = tmp_path / "usage.sqlite", key("k", budget={"tokens": 100, "period": "month"})
    living = UsageStore(path)
    others, meter = meter_of(living, record)
    charge = others.open(Identity(record))
    charge.enter("m")
    charge.reserve(TokenDemand(20, 20))
    for _ in range(2):
        process = multiprocessing.get_context("fork").Process(target=_die, args=(path, record))
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
    assert files_of(tmp_path) == 2  # the second one has read what the first one left
    for _ in range(2):  # once: those of the process that lives are its own
        (spent,) = living.spent().values()
        assert spent.units == 2 * (8 + 15)
    assert files_of(tmp_path) == 1
    charge.close(TokenUse(20, 0, 1))
    await meter.aclose()
    assert files_of(tmp_path) == 0
    last = UsageStore(path)
    assert [spent.units for spent in last.spent().values()] == [2 * (8 + 15) + 21]
    await last.aclose()


async def test_what_could_not_be_written_is_spent_after_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, record = tmp_path / "usage.sqlite", key("k", budget={"tokens": 100, "period": "month"})
    store = UsageStore(path)
    quotas, meter = meter_of(store, record)
    charge = quotas.open(Identity(record))
    charge.enter("m")
    charge.reserve(TokenDemand(5, 10))
    charge.close(TokenUse(5, 0, 3))

    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("disk full")

    monkeypatch.setattr(store, "_add", fail)
    await meter.aclose()
    again = UsageStore(path)
    assert [spent.units for spent in again.spent().values()] == [8]
    await again.aclose()


async def test_what_clients_are_told_is_what_is_counted(tmp_path: Path) -> None:
    records = key("a", project="p"), key("b"), key("boss", role="admin")
    async with closed_cluster(tmp_path, *records, usage_db=str(tmp_path / "usage.sqlite")) as found:
        worker = await found.worker(say("hello"))
        told = {"a": [0, 0], "b": [0, 0]}
        for id in ("a", "a", "b"):
            usage = (await found.client.chat(headers=bearer(id))).json["usage"]
            told[id][0] += usage["prompt_tokens"]
            told[id][1] += usage["completion_tokens"]
        worker.script = fail(ValueError("broken"))
        assert (await found.client.chat(headers=bearer("b"))).status == 500
        assert (await found.client.chat(headers=bearer("b"), model="nonsense")).status == 404

        async def rows(query: str) -> list[dict[str, Any]]:
            exchange = found.client.begin("GET", "/admin/usage", headers=bearer("boss"), query=query)
            found_rows: list[dict[str, Any]] = (await exchange.done()).json["data"]
            return found_rows

        by_key = {row["key"]: row for row in await rows("group_by=key")}
        assert (by_key["a"]["requests"], by_key["a"]["errors"]) == (2, 0)
        assert (by_key["b"]["requests"], by_key["b"]["errors"]) == (3, 2)
        assert [by_key["a"]["input"], by_key["a"]["output"]] == told["a"]
        assert {(row["project"], row["endpoint"]) for row in await rows("group_by=project,endpoint")} == {
            ("p", "chat_completions"),
            ("", "chat_completions"),
        }
        assert await rows("until=60") == []
        assert found.metric("dynamo_frontend_key_requests_total", key_id="a", model="m", status="success") == 2
        assert found.metric("dynamo_frontend_key_tokens_total", key_id="a", model="m", kind="output") == told["a"][1]
        assert (
            found.metric("dynamo_frontend_key_requests_total", key_id="b", model="unknown_model", status="error") == 1
        )
        await found.client.chat(headers={"authorization": "Bearer sk-nobody-has-this"})
        assert found.metric("dynamo_frontend_key_rejections_total", key_id="unknown", limit="invalid_api_key") == 1


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("group_by=secret", "not by 'secret'"),
        ("group_by=key,key", "twice"),
        ("since=yesterday", "seconds since the epoch"),
        ("untill=3", "untill is not a parameter"),
    ],
)
async def test_a_wrong_question_is_a_400_that_names_it(tmp_path: Path, query: str, words: str) -> None:
    record = key("boss", role="admin")
    async with closed_cluster(tmp_path, record, usage_db=str(tmp_path / "usage.sqlite")) as found:
        exchange = found.client.begin("GET", "/admin/usage", headers=bearer("boss"), query=query)
        answer = await exchange.done()
        assert answer.status == 400
        assert words in answer.json["error"]["message"]


async def test_without_a_file_usage_is_not_kept_and_says_so(tmp_path: Path) -> None:
    async with closed_cluster(tmp_path, key("boss", role="admin")) as found:
        answer = await found.client.call("GET", "/admin/usage", headers=bearer("boss"))
        assert answer.status == 503
        assert "DYN_USAGE_DB" in answer.json["error"]["message"]


def test_a_file_that_is_something_else_ends_the_start(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"
    path.write_text("not a database, and long enough to be none" * 10)
    with pytest.raises(InvalidArgument, match=r"usage\.sqlite"):
        UsageStore(path)


async def test_the_command_shows_what_was_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, store = key("k"), UsageStore(tmp_path / "usage.sqlite")
    quotas, meter = meter_of(store, record, wall=time.time())
    use(quotas, record, 10, 5)
    await meter.aclose()
    path = str(tmp_path / "usage.sqlite")
    assert main(["keys", "usage", "--usage-db", path, "--by", "key,model"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:6] == ["k", "m", "1", "0", "10", "1"]
    assert main(["keys", "usage", "--usage-db", path, "--by", "day", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["output"] == 5
    assert main(["keys", "usage", "--usage-db", path, "--by", "secret"]) == 2
    assert main(["keys", "usage", "--usage-db", str(tmp_path / "no"), "--by", "key"]) == 2
    assert main(["keys", "usage"]) == 2


def test_the_ids_of_few_keys_are_labels() -> None:
    registry = MetricsRegistry()
    metrics = KeyMetrics(FrontendFamilies(registry, "x", {}))
    for number in range(2 * MAX_KEYS):
        metrics.count(f"key{number}", "m", TokenUse(1, 0, 1), is_success=True)
        metrics.refused(f"key{number}", "budget")
    lines = registry.expose().decode().splitlines()
    assert (
        sum(line.startswith("x_key_requests_total{") and 'status="success"' in line for line in lines) == MAX_KEYS + 1
    )
    assert 'x_key_rejections_total{key_id="other",limit="budget"} 500' in [line.replace(".0", "") for line in lines]
