from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.frontend.args import parse_args
from dynamo.frontend.models import busy_threshold
from dynamo.frontend.models.busy_threshold import LOAD_TOPIC
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.router.workers import busy_workers
from dynamo.router.workers.busy_workers import BusyThresholds, LoadReport
from support.cases import each_case
from support.frontend_cluster import Cluster, ScriptedWorker, cluster
from support.inspecting import Lens
from support.patience import PATIENCE_SECONDS

BLOCKS = 100


class Reporter:
    """A worker that says how full it is."""

    def __init__(self, house: Cluster, worker: ScriptedWorker) -> None:
        self._house = house
        self.worker = worker
        self.id = worker.endpoint.connection_id()
        self._publisher = worker.runtime.events.new_publisher(worker.endpoint.event_scope, LOAD_TOPIC)

    @classmethod
    async def joins(cls, house: Cluster) -> Reporter:
        config = ModelRuntimeConfig(total_kv_blocks=BLOCKS, max_num_batched_tokens=1000)
        return cls(house, await house.worker(runtime_config=config))

    @property
    def is_avoided(self) -> bool:
        return any(self.id in model.busy for model in self._house.frontend.models.served())

    async def says(
        self, blocks: int | None, *, is_avoided: bool, rank: int = 0, tokens: int | None = None, used: int | None = None
    ) -> None:
        """Report, and wait until the frontend has drawn its conclusion."""
        report = {
            "worker_id": self.id,
            "dp_rank": rank,
            "active_decode_blocks": blocks,
            "active_prefill_tokens": tokens,
            "kv_used_blocks": used,
        }

        def heard() -> bool:
            self._publisher.publish(msgspec.msgpack.encode(report))  # again: it may listen later
            return self.is_avoided == is_avoided

        await until(heard)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.002)


async def change(house: Cluster, **members: Any) -> tuple[int | None, Any]:
    exchange = await house.client.call("POST", "/busy_threshold", {"model": "m", **members})
    return exchange.status, exchange.json


async def test_a_busy_worker_gets_no_requests_and_a_busy_model_is_529(tmp_path: Path) -> None:
    async with cluster(tmp_path, active_decode_blocks_threshold=0.9) as house:
        first, second = await Reporter.joins(house), await Reporter.joins(house)
        await first.says(91, is_avoided=True)
        for _ in range(6):
            assert (await house.client.chat()).status == 200
        assert (len(first.worker.requests), len(second.worker.requests)) == (0, 6)
        await second.says(100, is_avoided=True)
        assert (await house.client.chat()).status == 529
        assert house.metric("dynamo_frontend_model_rejection_total", model="m", endpoint="chat_completions") == 1
        await first.says(90, is_avoided=False)
        assert (await house.client.chat()).status == 200
        assert len(first.worker.requests) == 1


async def test_a_worker_is_busy_when_all_its_ranks_are(tmp_path: Path) -> None:
    async with cluster(tmp_path, active_decode_blocks_threshold=0.5) as house:
        worker = await Reporter.joins(house)
        await worker.says(60, is_avoided=True)
        await worker.says(40, rank=1, is_avoided=False)
        await worker.says(60, rank=1, is_avoided=True)


async def test_the_blocks_of_routers_and_of_the_worker_each_keep_it_busy(tmp_path: Path) -> None:
    async with cluster(tmp_path, active_decode_blocks_threshold=0.5) as house:
        worker = await Reporter.joins(house)
        await worker.says(None, used=60, is_avoided=True)
        await worker.says(10, is_avoided=True)  # a router's count, which says nothing of the worker's
        await worker.says(70, used=10, is_avoided=True)
        await worker.says(None, used=20, is_avoided=True)
        await worker.says(50, is_avoided=False)


def test_a_report_says_nothing_about_the_figures_that_it_leaves_out() -> None:
    worker, router = LoadReport(1, 0, kv_used_blocks=60), LoadReport(1, 0, 10, 0)
    assert router.over(worker) == worker.over(router) == LoadReport(1, 0, 10, 0, 60)
    assert LoadReport(1, 0, 11).over(router) == LoadReport(1, 0, 11, 0)
    assert router.over(None) is router


async def test_a_worker_that_says_no_more_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy_workers, "BUSY_SECONDS", 0.05)
    async with cluster(tmp_path, active_decode_blocks_threshold=0.5) as house:
        worker = await Reporter.joins(house)
        await worker.says(60, is_avoided=True)
        await until(lambda: not worker.is_avoided)
        assert (await house.client.chat()).status == 200


async def test_thresholds_can_be_changed_while_it_runs(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        worker = await Reporter.joins(house)
        assert (await house.client.get("/busy_threshold")).json == {"thresholds": []}
        expected = {
            "model": "m",
            "active_decode_blocks_threshold": 0.5,
            "active_prefill_tokens_threshold": None,
            "active_prefill_tokens_threshold_frac": None,
        }
        assert await change(house, active_decode_blocks_threshold=0.5) == (200, expected)
        assert (await house.client.get("/busy_threshold")).json == {"thresholds": [expected]}
        await worker.says(60, is_avoided=True)
        expected["active_prefill_tokens_threshold"] = 7
        assert await change(house, active_prefill_tokens_threshold=7) == (200, expected)  # the other one stays
        assert await change(house) == (200, expected)  # nothing given: only asked
        await change(house, active_decode_blocks_threshold=0.7)
        assert not worker.is_avoided  # what was heard before is judged again
        await worker.says(60, tokens=8, is_avoided=True)


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"model": "nope"}, 404, "Model 'nope' not found. Thresholds can only be set for discovered models."),
        (
            {"model": "m", "active_decode_blocks_threshold": 2},
            400,
            "active_decode_blocks_threshold must be between 0.0 and 1.0, got 2",
        ),
        (
            {"model": "m", "active_prefill_tokens_threshold": -1},
            400,
            "active_prefill_tokens_threshold must be at least 0",
        ),
        ({"model": "m", "active_prefill_tokens_threshold_frac": -0.5}, 400, "_frac must be at least 0, got -0.5"),
        ({"model": "m", "active_decode_blocks_threshold": "much"}, 422, "active_decode_blocks_threshold"),
        ({}, 422, "model"),
    ],
)
async def test_a_threshold_that_cannot_be_is_refused_by_name(
    tmp_path: Path, body: dict[str, Any], status: int, text: str
) -> None:
    async with cluster(tmp_path) as house:
        await Reporter.joins(house)
        answer = await house.client.call("POST", "/busy_threshold", body)
        assert answer.status == status
        assert text in answer.json["error"]


async def test_the_route_can_be_left_out(tmp_path: Path) -> None:
    async with cluster(tmp_path, disable_admin_api=True) as house:
        assert (await house.client.get("/busy_threshold")).status == 404


@given(
    st.none() | st.floats(0, 1), st.none() | st.integers(0, 100), st.none() | st.floats(0, 2),
    st.none() | st.integers(0, 100), st.none() | st.integers(0, 2000), st.none() | st.integers(1, 100),
    st.none() | st.integers(1, 1000), st.none() | st.integers(0, 100),
)  # fmt: skip
def test_busy_is_any_threshold_that_is_passed(
    part: float | None, most: int | None, share: float | None,
    blocks: int | None, tokens: int | None, total: int | None, step: int | None, used: int | None,
) -> None:  # fmt: skip
    passed = [
        None not in (part, blocks, total) and blocks / total > part,  # type: ignore[operator]
        None not in (part, used, total) and used / total > part,  # type: ignore[operator]
        None not in (most, tokens) and tokens > most,  # type: ignore[operator]
        None not in (share, tokens, step) and tokens > share * step,  # type: ignore[operator]
    ]
    load = LoadReport(1, 0, blocks, tokens, used)
    found = BusyThresholds("m", part, most, share).is_busy(load, total_kv_blocks=total, max_batched_tokens=step)
    assert found == any(passed)


@each_case(
    "argv",
    [
        ["--active-decode-blocks-threshold", "1.5"],
        ["--active-decode-blocks-threshold", "nan"],
        ["--active-prefill-tokens-threshold", "0.5"],
        ["--active-prefill-tokens-threshold-frac", "-1"],
    ],
)
def test_a_flag_with_a_threshold_that_cannot_be_is_an_error_of_use(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        parse_args(argv, env={})
    assert left.value.code == 2
    assert argv[0] in capsys.readouterr().err


async def test_loads_are_followed_for_who_looks_at_them_and_exclude_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(busy_threshold, "LOOKED_SECONDS", 0.2)
    async with cluster(tmp_path) as house:
        reporter = await Reporter.joins(house)
        loads, lens = house.frontend.kernel.loads, Lens(house)
        assert not loads._followers.tasks

        async def look() -> Any:
            (row,) = (await lens.get("snapshot", views="workers"))["workers"]
            return row

        async def heard() -> Any:
            """Look until the load is shown. A look that comes too late after the last one is a first one again."""
            async with asyncio.timeout(PATIENCE_SECONDS):
                while (row := await look())["kv_blocks_used"] is None:
                    await reporter.says(99, is_avoided=False, used=99)
                    await asyncio.sleep(0.01)
            return row

        row = await heard()
        assert not reporter.is_avoided
        assert (row["kv_blocks_used"], row["kv_blocks_total"], row["note"]) == (99, BLOCKS, "")
        # A gauge would stay at its last value when nobody looks any more.
        assert "worker_active_decode_blocks" not in house.frontend.metrics.expose().decode()
        # Nobody looks any more.
        await until(lambda: not loads._followers.tasks and not loads.busy_workers.reports_of(reporter.id))
        assert (await look())["kv_blocks_used"] is None
        await heard()  # somebody looks again
        await loads.set(BusyThresholds("m", active_decode_blocks_threshold=0.5))
        await reporter.says(99, is_avoided=True)
        await until(lambda: [needs_loads for _, needs_loads in loads._followers.tasks] == [True])
        await reporter.says(99, is_avoided=True)
        await until(lambda: "worker_active_decode_blocks" in house.frontend.metrics.expose().decode())
