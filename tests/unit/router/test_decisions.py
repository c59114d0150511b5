"""Recorded decisions come out the same again, and another policy can be asked about them."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from dynamo.cli.explain import main
from dynamo.errors import InvalidArgument
from dynamo.kv.events import BlocksAdded, BlockUpdate, HeldBlock, KvChange, RouterEvent
from dynamo.kv.hashing import block_hashes, sequence_hashes
from dynamo.kv.index import PrefixIndex
from dynamo.kv.overlap import WorkerRank
from dynamo.placement.kv_query import KvQuery, RankInfo
from dynamo.placement.kv_state import KvChoice, Selection
from dynamo.placement.policies.kv_policies import kv_policy
from dynamo.replay.generated import TraceShape, generate
from dynamo.replay.modes import KvFrontend
from dynamo.replay.run import run_replay
from dynamo.replay.setup import ReplaySetup, Restart
from dynamo.router.kv.decisions import DecisionHeader, DecisionLog, read_decisions, recompute
from dynamo.router.kv.domains import policy_of
from dynamo.router.kv.router import KvRouter
from dynamo.router.kv.settings import KvRouterSettings
from dynamo.scheduling import SchedulerOptions
from support.patience import PATIENCE_SECONDS
from support.properties import examples

BLOCK, WORKERS = 16, 6


def record(log: DecisionLog, settings: KvRouterSettings, decisions: int) -> None:
    """Route a random load over workers that hold some of its prompts, and record every decision."""
    rng, now, index = random.Random(7), 0.0, PrefixIndex()
    policy, _ = policy_of(settings)
    router = KvRouter(block_size=BLOCK, policy=policy, rng=rng, index=index)
    router.set_ranks({WorkerRank(each): RankInfo(total_kv_blocks=2000) for each in range(WORKERS)})
    documents = [[rng.randrange(1000) for _ in range(BLOCK * rng.randrange(1, 12))] for _ in range(20)]
    for number, document in enumerate(documents):
        names = sequence_hashes(block_hashes(document, BLOCK))
        blocks = [HeldBlock(*pair) for pair in zip(names, block_hashes(document, BLOCK), strict=True)]
        for worker in rng.sample(range(WORKERS), 2):
            index.apply(RouterEvent(worker, KvChange(number, BlockUpdate(stored=BlocksAdded(blocks)))))
    running: list[str] = []
    for number in range(decisions):
        now += rng.expovariate(20)
        prompt = [*rng.choice(documents), *(rng.randrange(1000) for _ in range(rng.randrange(40)))]
        selection = router.select(KvQuery(token_ids=prompt), now)
        request_id = f"request-{number}"
        router.book(request_id, selection, now)
        log.record(request_id, "m", selection)
        running.append(request_id)
        if len(running) > 30:
            router.first_token(running[10], now)
            router.free(running.pop(0), now)


async def recorded(path: Path, policy: str, decisions: int, *, limit: int = 1 << 30) -> Path:
    settings = KvRouterSettings(policy=policy)
    log = DecisionLog(str(path), policy_of(settings)[1], limit_bytes=limit)
    record(log, settings, decisions)
    log.close()
    return path


class Recording:
    """Writes down what a router of a replay books (`BookingObserver`)."""

    def __init__(self, log: DecisionLog) -> None:
        self._log = log
        self.choices: list[KvChoice] = []

    def booked(self, request_id: str, selection: Selection) -> None:
        self._log.record(request_id, "m", selection)
        self.choices.append(selection.choice)

    def prefill_completed(self, request_id: str, rank: WorkerRank) -> None: ...

    def freed(self, request_id: str, rank: WorkerRank) -> None: ...


async def replayed(path: Path, policy: str, temperature: float, requests: int) -> list[KvChoice]:
    """Replay a trace in virtual time over workers with small caches, with two frontends of which one is started again,
    lost events and a lost worker; record every decision. Return the decisions as they were made."""
    parameters: dict[str, float] = {} if policy == "two-tier" else {"router_temperature": temperature}
    log = DecisionLog(str(path), DecisionHeader(policy, parameters), limit_bytes=1 << 30)
    options = SchedulerOptions(num_gpu_blocks=300, block_size=BLOCK)
    recording = Recording(log)

    def frontend(seed: int) -> KvFrontend:
        made = KvFrontend(kv_policy(policy, parameters), options, random.Random(seed))
        made.router.observer = recording
        return made

    shape = TraceShape(requests=requests, rate=120.0, prompt_tokens=160, output_tokens=3, document_count=30)
    setup = ReplaySetup(
        workers=4, frontends=2, event_loss=0.02, restarts=(Restart(0.4, "worker", 1), Restart(0.6, "router"))
    )
    run_replay(generate(shape, 5), setup, options, frontend, mode=policy, pooled=0.0)
    log.close()
    return recording.choices


# Together 10,000 of each policy: where chance has a part, half with it and half without.
RECORDED = [
    ("default", 0.0, 5_000),
    ("default", 0.5, 5_000),
    ("time", 0.0, 5_000),
    ("time", 0.5, 5_000),
    ("two-tier", 0.0, 10_000),
]


@pytest.mark.parametrize(("policy", "temperature", "requests"), RECORDED)
async def test_every_recorded_decision_comes_out_the_same(
    policy: str, temperature: float, requests: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, count = tmp_path / "decisions", examples(requests).max_examples
    made = await replayed(path, policy, temperature, count)
    assert len(made) >= count  # a request of the worker that was lost is placed twice
    again = kv_policy(policy, {} if policy == "two-tier" else {"router_temperature": temperature})
    coldly = kv_policy(policy)
    others = 0
    with path.open("rb") as lines:
        for choice, (_, one) in zip(made, read_decisions(lines), strict=True):
            found = recompute(again, one)
            assert (found.rank, found.cost, found.tied, found.reason) == (
                choice.rank, choice.cost, choice.tied, choice.reason
            )  # fmt: skip
            assert found.cost == one.cost
            others += recompute(coldly, one).rank != found.rank
    assert len({choice.rank for choice in made}) == 5  # the worker that was lost came back as another one
    assert (others > count / 50) == (temperature > 0)  # chance does decide, and is on record
    assert main([str(path)]) == 0
    assert f"{len(made)} come out as recorded." in capsys.readouterr().out


async def test_another_policy_is_asked_about_the_same_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = await recorded(tmp_path / "decisions", "default", 200)
    assert main([str(path), "--policy", "default", "--json"]) == 0
    same = json.loads(capsys.readouterr().out)
    assert (same["decisions"], same["equal"], same["other"]) == (200, 200, 0)
    assert same["other_cached_tokens"] == same["cached_tokens"] > 0
    assert main([str(path), "--policy", "default", "--set", "overlap_score_credit=0", "--json"]) == 0
    blind = json.loads(capsys.readouterr().out)
    assert blind["other"] > 0
    assert blind["other_cached_tokens"] < blind["cached_tokens"]


async def test_the_decisions_of_a_request_are_shown_with_their_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = await recorded(tmp_path / "decisions", "default", 20)
    assert main([str(path), "--request", "request-7"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("request-7 (m), default: Chose worker ")
    assert len([line for line in shown if line.startswith("  * ")]) == 1
    assert len([line for line in shown if " blocks = " in line]) == WORKERS


async def test_a_full_file_is_moved_aside_and_both_can_be_read(tmp_path: Path) -> None:
    path = await recorded(tmp_path / "decisions", "default", 100, limit=40_000)
    before = path.with_name("decisions.1")
    assert 0 < path.stat().st_size <= 40_000
    assert 0 < before.stat().st_size <= 40_000
    ids = [one.request_id for each in (before, path) for _, one in read_decisions(each.read_bytes().splitlines())]
    assert ids[-1] == "request-99"
    assert ids == [f"request-{number}" for number in range(100 - len(ids), 100)]


async def test_what_is_recorded_is_in_the_file_within_a_moment(tmp_path: Path) -> None:
    log = DecisionLog(str(tmp_path / "decisions"), DecisionHeader("time"), limit_bytes=1 << 20)
    record(log, KvRouterSettings(), 1)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while b"request-0" not in (tmp_path / "decisions").read_bytes():
            await asyncio.sleep(0.02)
    log.close()


def test_a_line_that_breaks_off_at_the_end_is_passed_over_and_any_other_is_named() -> None:
    header = b'{"kind":"header","policy":"default"}'
    assert list(read_decisions([header, b'{"kind":"deci'])) == []
    for lines, named in (
        ([header, b"rubbish", header], "line 2 is not"),
        ([b"rubbish"], "line 1 is not"),
        ([b'{"kind":"header","policy":"default","version":9}'], "version 9"),
    ):
        with pytest.raises(InvalidArgument, match=named):
            list(read_decisions(lines, "f"))


def test_a_policy_or_a_parameter_that_does_not_exist_is_an_error_of_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "decisions"
    path.write_bytes(b'{"kind":"header","policy":"default"}\n')
    for argv in (["--policy", "default", "--set", "x=1"], ["--policy", "default", "--set", "x"], ["--policy", "best"]):
        with pytest.raises(SystemExit) as left:
            main([str(path), *argv])
        assert left.value.code == 2
    assert main([str(path)]) == 0
    assert "holds no decision" in capsys.readouterr().out


def test_a_recorded_policy_keeps_its_weights() -> None:
    policy, header = policy_of(KvRouterSettings(policy="default", overlap_score_credit=0.5, router_temperature=0.25))
    assert kv_policy(header.policy, header.parameters).name == policy.name
    assert (header.parameters["overlap_score_credit"], header.parameters["router_temperature"]) == (0.5, 0.25)
