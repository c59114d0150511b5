"""Prefill and decode workers as processes behind a frontend: the same answers, and what a killed worker costs."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from dynamo.contract.conformance import mock_context
from dynamo.errors import InvalidArgument
from dynamo.reference import Options, ReferenceEngine
from dynamo.reference.kv_transfer import TransferOptions, check_installed
from support.http_client import COMPLETIONS, DONE, ask, exchange
from support.processes import Cluster, Frontend, Worker, get, until
from support.scenario_table import record
from support.tiny_model import write_tiny_model

MODEL = "pair"
USED = "dynamo_component_gpu_cache_usage_percent"
SIZES = ("--block-size", "4", "--kv-cache-mb", "4", "--max-num-seqs", "8")

# The process is gone with the first frame of a transfer: nothing is flushed, nobody is told.
DIES_IN_TRANSFER = """
import os, signal
from dynamo.reference.kv_transfer.frames import TransferKind
from dynamo.reference.kv_transfer.tcp import Peer
write = Peer.write
async def last(self, data):
    await write(self, data)
    if data[5] in (TransferKind.PAGE, TransferKind.DIRECT):
        os.kill(os.getpid(), signal.SIGKILL)
Peer.write = last
"""


def transport() -> str:
    """NIXL where it is installed: between processes is what it is for; TCP has all the other tests."""
    try:
        check_installed(TransferOptions("nixl"))
    except InvalidArgument:
        return "tcp"
    return "nixl"


@pytest.fixture(scope="module")
def directory(
    tmp_path_factory: pytest.TempPathFactory, save_model: Callable[..., Path], tensors_of: Callable[..., Any]
) -> Path:
    """A random model with a real tokenizer."""
    found = write_tiny_model(tmp_path_factory.mktemp("disagg") / "model")
    config = {**json.loads((found / "config.json").read_text()), "rms_norm_eps": 1e-5}
    return save_model(found, config, tensors_of(config))


class Pair:
    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster, self._directory = cluster, directory
        self.prefill = self.worker("prefill")
        self.decode = self.worker("decode")
        self.frontend: Frontend = cluster.frontend("frontend")
        cluster.wait_ready(self.frontend, self.prefill, self.decode)

    def worker(self, role: str, name: str = "", **more: str) -> Worker:
        # Blocks that no decode worker ever hears of (a client left between the legs) are freed after this long.
        hold = ("--kv-hold-seconds", "8")
        flags = ("--disaggregation-mode", role, "--kv-transfer", transport(), *hold, *SIZES)
        return self.cluster.reference(name or role, MODEL, self._directory, *flags, **more)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, directory: Path) -> Iterator[Pair]:
    with Cluster(tmp_path_factory.mktemp("disagg-stack")) as cluster:
        yield Pair(cluster, directory)


def completion(prompt: list[int], max_tokens: int = 24, **more: Any) -> dict[str, Any]:
    nvext = {"extra_fields": ["completion_token_ids", "worker_id"]}
    plain = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {**plain, "nvext": nvext, **more}


async def expected(directory: Path, prompt: list[int], max_tokens: int = 24) -> list[int]:
    """What one worker alone says."""
    engine = ReferenceEngine(directory, Options(block_size=4, kv_cache_mb=4, max_num_seqs=8))
    await engine.start(1)
    body: Any = {
        "token_ids": prompt,
        "stop_conditions": {"max_tokens": max_tokens, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
    }
    try:
        async with aclosing(engine.generate(body, mock_context())) as stream:
            return [token async for chunk in stream for token in chunk["token_ids"]]
    finally:
        await engine.cleanup()


def ids_of(events: list[dict[str, Any]]) -> list[int]:
    return [one for event in events for one in (event.get("nvext") or {}).get("completion_token_ids") or ()]


async def freed(worker: Worker) -> None:
    """Wait until no block of this worker is held."""
    assert worker.metric("dynamo_component_total_blocks") > 0
    await until(lambda: worker.metric(USED) == 0, lambda: f"{worker.name} to free its blocks; log:\n{worker.log}")


def outcomes(worker: Worker) -> dict[str, int]:
    """`reference_kv_transfers_total` of a worker, by outcome."""
    text = get(worker.system_port, "/metrics")[1].decode()
    found = re.findall(r'^reference_kv_transfers_total\{.*outcome="(\w+)".*\} (\d+)', text, re.MULTILINE)
    return {outcome: int(count) for outcome, count in found}


@pytest.mark.parametrize("length", [1, 30, 200])
async def test_the_answer_is_that_of_one_worker_streamed_or_not(length: int, stack: Pair, directory: Path) -> None:
    prompt = [(7 * n) % 400 + 10 for n in range(length)]
    alone = await expected(directory, prompt)
    whole = (await ask(stack.frontend.port, COMPLETIONS, completion(prompt))).json()
    assert whole["nvext"]["completion_token_ids"] == alone
    assert whole["usage"]["prompt_tokens"] == length
    ids = whole["nvext"]["worker_id"]
    assert ids["prefill_worker_id"] != ids["decode_worker_id"]
    streamed = await ask(stack.frontend.port, COMPLETIONS, completion(prompt, stream=True))
    assert ids_of(streamed.events) == alone
    await freed(stack.prefill)
    await freed(stack.decode)
    assert "is computed here" not in stack.decode.log
    for worker in (stack.prefill, stack.decode):
        assert outcomes(worker)["fetched"] >= 2
    assert stack.prefill.metric("reference_kv_offers") == 0


async def test_a_client_that_leaves_leaves_no_block_behind(stack: Pair) -> None:
    prompt = [n % 400 + 11 for n in range(150)]

    async def leave(after_events: int) -> None:
        body = completion(prompt, 400, stream=True)
        async with exchange(stack.frontend.port, COMPLETIONS, body) as request:
            for _ in range(after_events):
                await request.event()

    await asyncio.gather(*(leave(n % 3) for n in range(12)))
    await freed(stack.prefill)
    await freed(stack.decode)


async def test_a_decode_worker_killed_in_the_middle_of_an_answer_is_replaced(stack: Pair, directory: Path) -> None:
    spare = stack.worker("decode", "spare")
    spare.wait_ready()
    await until(lambda: stack.frontend.workers(MODEL) == 3, lambda: f"three workers; log:\n{stack.frontend.log}")
    prompt = [n % 300 + 14 for n in range(40)]
    alone = await expected(directory, prompt, 800)
    async with exchange(stack.frontend.port, COMPLETIONS, completion(prompt, 800, stream=True)) as request:
        events = [await request.event()]
        await until(lambda: any(worker.metric(USED) > 0 for worker in (stack.decode, spare)))
        lost, stays = (stack.decode, spare) if stack.decode.metric(USED) > 0 else (spare, stack.decode)
        lost.kill()
        while events[-1] != DONE:
            events.append(await request.event())
    assert ids_of(events[:-1]) == alone
    stack.decode = stays
    assert outcomes(stays)["fetched"] >= 1  # what had been said was computed by the prefill worker, too
    await freed(stays)
    await freed(stack.prefill)


async def test_a_prefill_worker_killed_at_any_time_costs_no_answer(stack: Pair, directory: Path) -> None:
    prompt = [n % 300 + 12 for n in range(60)]
    alone = await expected(directory, prompt, 100)
    body = completion(prompt, 100, stream=True)
    async with exchange(stack.frontend.port, COMPLETIONS, body) as request:
        events = [await request.event()]
        stack.prefill.kill()  # after the hand-over: the blocks have arrived
        while events[-1] != DONE:
            events.append(await request.event())
    assert ids_of(events[:-1]) == alone
    assert "is computed here" not in stack.decode.log
    # Before: it is dead, and the store still lists it.
    assert ids_of((await ask(stack.frontend.port, COMPLETIONS, body)).events) == alone
    assert "decode workers compute it themselves" in stack.frontend.log
    # During.
    doomed = stack.worker("prefill", "doomed", program=DIES_IN_TRANSFER)
    doomed.wait_ready()
    fresh = [n % 300 + 13 for n in range(60)]
    alone = await expected(directory, fresh, 100)
    for _ in range(50):  # the frontend may not have seen it yet
        if doomed.has_ended:
            break
        reply = await ask(stack.frontend.port, COMPLETIONS, completion(fresh, 100, stream=True))
        assert ids_of(reply.events) == alone
        fresh = [fresh[0] + 1, *fresh[1:]]
        alone = await expected(directory, fresh, 100)
    assert doomed.has_ended
    assert "its prompt is computed here" in stack.decode.log
    await freed(stack.decode)


# -- R14, at length -----------------------------------------------------------------------------------------------------

ROUNDS = int(os.environ.get("HAND_OVERS") or 10)
PHASES = {
    "after": "the prefill worker is killed after the hand-over",
    "before": "the prefill worker is dead, and the store still lists it",
    "during": "the prefill worker dies with the first frame of the transfer",
    "never": "the decode worker dies before its engine is asked (chaos plan), so nobody fetches the blocks",
}


@pytest.mark.faults
@pytest.mark.skipif("FAULTS" not in os.environ, reason="make test-faults")
@pytest.mark.timeout(1800)
async def test_a_hand_over_that_breaks_at_any_point_costs_no_answer(tmp_path: Path, directory: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('[[fault]]\nkind = "crash"\n')
    numbers = itertools.count()
    sent, lost, doubled = Counter[str](), Counter[str](), Counter[str]()
    with Cluster(tmp_path, DYN_MIGRATION_LIMIT="20") as cluster:
        pair = Pair(cluster, directory)

        async def whole(phase: str, while_it_runs: Callable[[], None] = lambda: None) -> None:
            """One request; its answer is counted."""
            prompt = [(n + next(numbers)) % 300 + 12 for n in range(60)]
            alone = await expected(directory, prompt, 60)
            sent[phase] += 1
            async with exchange(pair.frontend.port, COMPLETIONS, completion(prompt, 60, stream=True)) as request:
                events = [await request.event()]
                while_it_runs()
                while events[-1] != DONE and "error" not in events[-1]:
                    events.append(await request.event())
            said = ids_of([event for event in events if event != DONE and "error" not in event])
            lost[phase] += said != alone
            doubled[phase] += len(said) > len(alone)

        async def until_ended(worker: Worker, phase: str) -> None:
            worker.wait_ready()
            for _ in range(100):  # until its turn has come
                await whole(phase)
                if worker.has_ended:
                    return
            raise AssertionError(f"{worker.name} never had its turn:\n{worker.log}\n{pair.frontend.log}")

        for number in range(ROUNDS):
            await whole("after", pair.prefill.kill)
            await whole("before")
            await until_ended(pair.worker("prefill", f"doomed-{number}", program=DIES_IN_TRANSFER), "during")
            pair.prefill = pair.worker("prefill", f"prefill-{number}")
            pair.prefill.wait_ready()
            chaos = {"DYN_CHAOS": str(plan), "DYN_ALLOW_CHAOS": "1"}
            await until_ended(pair.worker("decode", f"mortal-{number}", **chaos), "never")
            await freed(pair.decode)
            await freed(pair.prefill)  # also of what nobody fetched
        for phase, what in PHASES.items():
            note = f"{what}; {ROUNDS} times; no block is held afterwards"
            record(f"R14 hand-over, {phase}", sent=sent[phase], lost=lost[phase], doubled=doubled[phase], note=note)
        assert lost.total() == doubled.total() == 0
        assert min(sent[phase] for phase in PHASES) >= ROUNDS
