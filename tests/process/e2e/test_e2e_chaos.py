"""A chaos plan fires in real processes: every kind that a worker can have, at the item it names, and nobody else suffers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.http_client import CHAT, Reply, ask, chat, exchange, script
from support.processes import Cluster, Worker, until

ANSWER = "abcdefgh"
PACE_SECONDS = 0.01

# Each fault is for the requests that bring its kind as a tag. Two workers serve `pair`, and only one of them breaks.
PLAN = "\n".join(
    f'[[fault]]\nkind = "{kind}"\npoint = {point}\nmetadata = {{ tag = "{kind}" }}\ntimes = 1000\n{more}'
    for kind, point, more in (
        ("engine-error", 3, ""),
        ("stall", 3, ""),
        ("cut", 3, ""),
        ("duplicate", 3, ""),
        ("reorder", 3, ""),
        ("drop", 3, ""),
        ("delay", 3, "seconds = 0.3"),
        ("partition", 3, 'seconds = 0.3\nway = "down"'),
        ("freeze", 3, "seconds = 0.3"),
        ("lease", 0, ""),
    )
)


class Pair:
    """One frontend; `wild` follows the plan, `calm` serves the same model, `lonely` follows the plan alone."""

    def __init__(self, root: Path, cluster: Cluster) -> None:
        self.root, self.cluster = root, cluster
        plan = root / "plan.toml"
        plan.write_text(PLAN)
        chaos = {"DYN_CHAOS": str(plan), "DYN_ALLOW_CHAOS": "1"}
        # No quarantine: each test begins with all workers. By chance: in turn, the one that follows a dead one in the list
        # would never have its own, as the second attempt takes it from there.
        self.frontend = cluster.frontend("frontend", "--router-mode", "random", DYN_RUNTIME_INHIBITED_DURATION_SECS="0")
        self.wild = cluster.worker("wild", "pair", **chaos)
        self.calm = cluster.worker("calm", "pair")
        self.lonely = cluster.worker("lonely", "lonely", **chaos)
        cluster.wait_ready(self.frontend, self.wild, self.calm, self.lonely)

    def mortal(self, name: str, fault: str) -> Worker:
        """A third worker of `pair`, with a fault of its own."""
        plan = self.root / f"{name}.toml"
        plan.write_text(f"[[fault]]\n{fault}\n")
        return self.cluster.worker(name, "pair", DYN_CHAOS=str(plan), DYN_ALLOW_CHAOS="1")

    async def ask_until(self, has_fired: Callable[[], bool], tag: str) -> None:
        """Ask `pair` until a worker's turn has come: every answer is whole."""
        for _ in range(100):
            reply = await self.ask("pair", tag, stream=True)
            assert (reply.status, reply.text) == (200, ANSWER)
            if has_fired():
                return
        raise AssertionError("its turn never came")

    async def ask(self, model: str, tag: str, *, stream: bool = False) -> Reply:
        body = chat(model, stream=stream, max_tokens=len(ANSWER))
        return await ask(self.frontend.port, CHAT, body, headers=script(["say", ANSWER, PACE_SECONDS], tag=tag))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    root = tmp_path_factory.mktemp("chaos")
    with Cluster(root) as cluster:
        yield Pair(root, cluster)


@pytest.mark.parametrize("kind", ["cut", "duplicate", "reorder", "drop"])
async def test_what_is_done_to_an_item_or_a_connection_costs_nobody_anything(pair: Pair, kind: str) -> None:
    fires = f"CHAOS: {kind} fires: item 3 of request "
    await pair.ask_until(lambda: fires in pair.wild.log, kind)
    assert "cannot be done" not in pair.wild.log


@pytest.mark.parametrize("kind", ["delay", "partition", "freeze"])
async def test_what_ends_by_itself_is_waited_for(pair: Pair, kind: str) -> None:
    began = time.monotonic()
    reply = await pair.ask("lonely", kind)
    assert (reply.status, reply.text) == (200, ANSWER)
    assert time.monotonic() - began > 0.3
    pair.lonely.wait_log(f"CHAOS: {kind} fires: item 3 ")


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_an_engine_error_reaches_the_client_as_one(pair: Pair, is_streamed: bool) -> None:
    reply = await pair.ask("lonely", "engine-error", stream=is_streamed)
    assert reply.status == (200 if is_streamed else 500)
    assert b"EngineFailed" in reply.body or b"error" in reply.body
    assert (await pair.ask("lonely", "calm")).text == ANSWER


async def test_a_stalled_request_is_left_when_its_client_leaves(pair: Pair) -> None:
    body = chat("lonely", stream=True, max_tokens=len(ANSWER))
    headers = script(["say", ANSWER, PACE_SECONDS], tag="stall")
    async with exchange(pair.frontend.port, CHAT, body, headers=headers) as opened:
        assert await opened.head() == 200
        await until(lambda: "CHAOS: stall fires: item 3 " in pair.lonely.log)
        assert (await pair.ask("lonely", "calm")).text == ANSWER  # the others go on
        assert pair.lonely.count("finally", "stall") == 0
        opened.leave()
    await pair.lonely.sees("finally", "stall")


async def test_a_lost_lease_is_taken_again(pair: Pair) -> None:
    assert (await pair.ask("lonely", "lease")).text == ANSWER
    pair.lonely.wait_log(r"was removed by another process; writing it again")
    await until(lambda: pair.frontend.workers("lonely") == 1)
    assert (await pair.ask("lonely", "calm")).text == ANSWER


async def test_a_worker_that_goes_takes_no_answer_with_it(pair: Pair, name: str) -> None:
    """Killed before the engine was asked, killed in the middle, and asked to stop."""
    for kind, point, status in (("crash", 0, -9), ("crash", 3, -9), ("drain", 3, 0)):
        mortal = pair.mortal(f"{name}-{kind}-{point}", f'kind = "{kind}"\npoint = {point}')
        mortal.wait_ready()
        fires = f"CHAOS: {kind} fires: item {point} of request 0 "
        await pair.ask_until(lambda mortal=mortal, fires=fires: fires in mortal.log, "calm")  # type: ignore[misc]
        assert await mortal.ended() == status


@pytest.mark.parametrize(("kind", "status"), [("frontend-crash", -9), ("frontend-drain", 0)])
async def test_a_frontend_follows_the_plan_too(pair: Pair, tmp_path: Path, kind: str, status: int) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(f'[[fault]]\nkind = "{kind}"\npoint = 3\nrequest = 1\n')
    frontend = pair.cluster.frontend(kind, "--chaos", str(plan), "--allow-chaos")
    frontend.wait_ready()
    await until(lambda: frontend.workers("lonely") == 1)
    headers = script(["say", ANSWER, PACE_SECONDS])
    body = chat("lonely", stream=True, max_tokens=len(ANSWER))
    assert (await ask(frontend.port, CHAT, body, headers=headers)).text == ANSWER
    async with exchange(frontend.port, CHAT, body, headers=headers) as opened:
        assert await opened.head() == 200
        assert (b"[DONE]" in await opened.rest()) == (kind == "frontend-drain")
    assert await frontend.ended() == status
    assert f"CHAOS: {kind} fires: item 3 of request 1 " in frontend.log
