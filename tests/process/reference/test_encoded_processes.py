"""Encode, prefill and decode workers as processes: the same answers with media, and what a worker lost in each phase costs.

The requests go in behind the HTTP side: through the frontend's own directory and dispatcher, with parts that no model sees.
`test_seen_processes` has images over HTTP.
"""

from __future__ import annotations

import asyncio
import base64
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from dynamo.contract.conformance import mock_context
from dynamo.errors import InvalidArgument, WorkerUnavailable
from dynamo.frontend.app import Frontend
from dynamo.frontend.settings import FrontendSettings
from dynamo.protocol.worker_request import WorkerRequest
from dynamo.reference import Options, ReferenceEngine
from dynamo.reference.media import MediaOptions
from dynamo.router.dispatch.failover import DispatchLimits, DispatchRequest
from dynamo.router.dispatch.record import DispatchRecord
from dynamo.runtime.calls.context import Context
from dynamo.runtime.distributed import DistributedRuntime
from support.patience import PATIENCE_SECONDS
from support.processes import Cluster, Worker, until
from support.tiny_model import write_tiny_model

MODEL = "trio"
SIZES = ("--block-size", "4", "--kv-cache-mb", "4", "--max-num-seqs", "8")
TOKENS = ("--media-tokens", "16")

# The process is gone with the first request that its engine is asked.
DIES_WHEN_ASKED = """
import os, signal
from dynamo.reference import {module}
def die(self, request, context):
    if not (request.get("extra_args") or {{}}).get("probe") and request.get("multi_modal_data"):
        os.kill(os.getpid(), signal.SIGKILL)
    return asked(self, request, context)
asked = {module}.{name}.generate
{module}.{name}.generate = die
"""
# What a request is answered with, by the number of the request, goes wrong: the list `wrong` says how.
MISTAKES = """
import os, signal
from pathlib import Path
from dynamo.reference.handover import EncodedSender
wrong = ["gone", None, "another shape", "too large", "killed"]
well = EncodedSender.result
async def result(self, found):
    how = wrong.pop(0) if wrong else None
    files = self._sender._files
    if how == "too large":
        bound, files._max_bytes = files._max_bytes, 10
        try:
            return await well(self, found)
        finally:
            files._max_bytes = bound
    made = await well(self, found)
    if how == "gone":
        for name in files.waiting():
            files.remove(name)
    if how == "another shape":
        made["embedding"]["embeddings_shape"] = [4, 4]
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return made
EncodedSender.result = result
"""
DYING_ENCODER = DIES_WHEN_ASKED.format(module="encoder", name="ReferenceEncoder")
DYING_ENGINE = DIES_WHEN_ASKED.format(module="engine", name="ReferenceEngine")


@pytest.fixture(scope="module")
def directory(
    tmp_path_factory: pytest.TempPathFactory, save_model: Callable[..., Path], tensors_of: Callable[..., Any]
) -> Path:
    found = write_tiny_model(tmp_path_factory.mktemp("encoded") / "model")
    config = {**json.loads((found / "config.json").read_text()), "rms_norm_eps": 1e-5}
    return save_model(found, config, tensors_of(config))


AtToken = Callable[[int, int | None], None]


class Untimed:
    def routed(self) -> None: ...

    def dispatched(self) -> None: ...

    def arrived(self, *, failed: bool = False) -> None: ...


class Stack:
    """The processes, and a frontend in this one."""

    def __init__(self, cluster: Cluster, directory: Path, frontend: Frontend) -> None:
        self.cluster, self._directory, self.frontend = cluster, directory, frontend

    def worker(self, role: str, name: str, *flags: str, program: str = "") -> Worker:
        mode = ("--disaggregation-mode", role, "--component", role)
        files = self.cluster.root / "files"
        files.mkdir(exist_ok=True)
        argv = (*mode, *SIZES, *TOKENS, *flags)
        return self.cluster.reference(name, MODEL, self._directory, *argv, program=program, TMPDIR=str(files))

    def left_by(self, *processes: Worker) -> list[str]:
        """What processes have left where embeddings are handed over."""
        places = (self.cluster.root / "files", Path("/dev/shm"))
        marks = [f".{process.pid}-" for process in processes]
        return [path.name for place in places for path in place.iterdir() if any(mark in path.name for mark in marks)]

    async def knows(self, workers: int) -> None:
        """Wait until the frontend has seen this many workers, and serves the model."""

        def instances() -> int:
            found = self.frontend.models.readiness(MODEL) or {"namespaces": {}}
            roles = [role for each in found["namespaces"].values() for role in each["worker_types"].values()]
            return sum(len(role["instance_ids"]) for role in roles)

        await until(lambda: instances() == workers and bool(self.frontend.models.serving(MODEL)))

    def instance_ids(self, role: str) -> set[int]:
        found = self.frontend.models.readiness(MODEL)
        assert found is not None
        (namespace,) = found["namespaces"].values()
        found = namespace["worker_types"].get("aggregated" if role == "agg" else role)
        return set(found["instance_ids"]) if found else set()

    async def ask(
        self, body: WorkerRequest, at_token: AtToken = lambda count, worker: None
    ) -> tuple[list[int], DispatchRecord]:
        """The tokens of one answer. After each batch `at_token` is called with their number so far and who sent them."""
        (served,) = self.frontend.models.serving(MODEL)
        record, context = DispatchRecord(), Context()
        request = DispatchRequest(
            body, body["token_ids"], record=record, timer=Untimed(), limits=DispatchLimits(retries=5)
        )
        stream = served.dispatcher.open(request, context)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                async for items in stream:
                    sender = stream.instance_id
                    for item in items:
                        request.answer.generated += item.token_ids
                        if item.finish_reason is not None:
                            request.answer.is_complete = True
                            stream.finish()
                    at_token(len(request.answer.generated), sender)
        finally:
            stream.close()
        return request.answer.generated, record


def body_of(number: int, max_tokens: int = 60) -> WorkerRequest:
    picture = base64.b64encode(b"picture %d" % number).decode()
    body: Any = {
        "model": MODEL,
        "token_ids": [(number + n) % 300 + 12 for n in range(30)],
        "stop_conditions": {"max_tokens": max_tokens, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
        "multi_modal_data": {"image_url": [{"Url": f"data:image/png;base64,{picture}"}]},
    }
    return body


async def expected(directory: Path, body: Any) -> list[int]:
    """What one worker alone says, which encodes for itself."""
    engine = ReferenceEngine(directory, Options(block_size=4, kv_cache_mb=4, max_num_seqs=8), media=MediaOptions(16))
    await engine.start(1)
    try:
        async with aclosing(engine.generate(body, mock_context())) as stream:
            return [token async for chunk in stream for token in chunk["token_ids"]]
    finally:
        await engine.cleanup()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with Cluster(tmp_path) as found:
        for name, value in found.environment.items():
            if name.startswith("DYN_"):
                monkeypatch.setenv(name, value)
        yield found


@pytest.fixture
async def stack(cluster: Cluster, directory: Path) -> AsyncIterator[Stack]:
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    try:
        async with Frontend(FrontendSettings(), runtime) as frontend:
            yield Stack(cluster, directory, frontend)
    finally:
        await runtime.aclose()


@pytest.mark.parametrize("routed", [("agg",), ("prefill", "decode")], ids="-".join)
async def test_a_worker_lost_in_any_phase_costs_no_answer(
    routed: tuple[str, ...], stack: Stack, directory: Path
) -> None:
    first, last = routed[0], routed[-1]
    encode = stack.worker("encode", "encode")
    takers = {role: stack.worker(role, role, *(["--route-to-encoder"] if role == first else [])) for role in routed}
    for worker in (encode, *takers.values()):
        worker.wait_ready()
    await stack.knows(1 + len(routed))
    numbers = iter(range(1000))

    async def whole(at_token: AtToken = lambda count, worker: None) -> DispatchRecord:
        body = body_of(next(numbers))
        alone = await expected(directory, body)
        said, record = await stack.ask(body, at_token)
        assert said == alone
        assert record.encode_instance_id is not None
        return record

    async def until_dead(doomed: Worker, others: int) -> None:
        doomed.wait_ready()
        await stack.knows(others + 1)
        for _ in range(50):  # until its turn has come
            await whole()
            if doomed.has_ended:
                await stack.knows(others)  # its record is gone, too
                return
        raise AssertionError(f"{doomed.name} never had its turn:\n{doomed.log}")

    for _ in range(2):
        await whole()
    # While it encodes.
    await until_dead(stack.worker("encode", "dying-encoder", program=DYING_ENCODER), 1 + len(routed))
    # While the prompt is computed: what was encoded for it is lost with it.
    dying = stack.worker(first, "dying-taker", "--route-to-encoder", program=DYING_ENGINE)
    await until_dead(dying, 1 + len(routed))
    # In the middle of the answer.
    before = stack.instance_ids(last)
    spare = stack.worker(last, "spare", *(["--route-to-encoder"] if last == first else []))
    spare.wait_ready()
    await stack.knows(2 + len(routed))
    (spare_id,) = stack.instance_ids(last) - before
    originals = stack.instance_ids(last) - {spare_id}
    for _ in range(50):

        def kill(count: int, worker: int | None) -> None:
            if count >= 10 and worker in originals:
                takers[last].kill()
                originals.clear()

        record = await whole(kill)
        if not originals:
            break
    assert any(move.is_ongoing and move.outcome == "success" for move in record.moves)
    # Dead, and the store may still list it.
    await whole()


@pytest.mark.parametrize(("routed", "mode"), [(("agg",), "local"), (("prefill", "decode"), "shared-memory")])
async def test_an_embedding_reaches_the_next_worker_and_no_mistake_leaves_it_anywhere(
    routed: tuple[str, ...], mode: str, stack: Stack, directory: Path
) -> None:
    first, transfer = routed[0], ("--embedding-transfer-mode", mode)
    encode = stack.worker("encode", "encode", *transfer, program=MISTAKES)
    takers = [stack.worker(first, f"{first}-{name}", "--route-to-encoder") for name in "ab"]
    takers += [stack.worker(role, role) for role in routed[1:]]
    for worker in (encode, *takers):
        worker.wait_ready()
    await stack.knows(len(takers) + 1)
    numbers = iter(range(1000))

    async def whole() -> DispatchRecord:
        """A request is answered as one worker alone answers it."""
        body = body_of(next(numbers), max_tokens=8)
        alone = await expected(directory, body)
        said, record = await stack.ask(body)
        assert said == alone
        assert record.encode_instance_id is not None
        assert [name for name in stack.left_by(encode) if not name.endswith(".lock")] == []
        return record

    await whole()  # it was gone when the worker came for it, so that it was encoded again for the other one
    assert any("is not there: its sender is gone" in taker.log for taker in takers)
    for said in (r"int32 \[4, 4\]", "bytes are to be handed over, more than the bound of 10"):
        with pytest.raises(InvalidArgument, match=said):
            await stack.ask(body_of(next(numbers), max_tokens=8))
        assert [name for name in stack.left_by(encode) if not name.endswith(".lock")] == []
    dead = stack.instance_ids("encode")
    # Killed when the embedding is written and nobody knows of it: another encode worker takes its place, and its files.
    with pytest.raises(WorkerUnavailable, match="no encode worker"):
        await stack.ask(body_of(next(numbers), max_tokens=8))
    assert encode.exit_code() == -signal.SIGKILL
    assert len(stack.left_by(encode)) == 2
    spare = stack.worker("encode", "spare", *transfer)
    spare.wait_ready()
    assert stack.left_by(encode) == []
    await until(lambda: bool(stack.instance_ids("encode") - dead))
    # Killed before it takes the embedding: that waits for a while, and leaves with its sender.
    before = stack.instance_ids(first)
    dying = stack.worker(first, "dying-taker", "--route-to-encoder", program=DYING_ENGINE)
    dying.wait_ready()
    await until(lambda: bool(stack.instance_ids(first) - before))
    for _ in range(50):
        await whole()
        if dying.has_ended:
            break
    assert dying.has_ended
    spare.terminate()
    assert spare.exit_code() == 0
    assert stack.left_by(encode, spare, dying, *takers) == []
