"""One account with a native frontend in kv mode: its bookings show in our router, and ours in its choices."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from dynamo.kv.overlap import WorkerRank
from dynamo.placement.kv_query import KvQuery, RankInfo
from dynamo.placement.policies.kv_policies import kv_policy
from dynamo.placement.replica_events import BookedPrompt, BookingEvent
from dynamo.router.kv.router import KvRouter
from dynamo.router.peers.replica_sync import ReplicaSync
from dynamo.runtime.discovery.file import FileDiscovery
from dynamo.runtime.distributed import DistributedRuntime
from support.interop_cluster import services
from support.native_frontend import NATIVE_PYTHON, environment, frontend_process, process, why_not
from support.processes import until
from support.tiny_model import write_tiny_model

REASON = why_not()
pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.timeout(180),
]

MOCKER = ["-m", "dynamo.mocker", "--model-name", "mock", "--num-workers", "2", "--speedup-ratio", "1", "--model-path"]
BLOCK = 64  # the mocker's own
ROUNDS = 6


class Watched(ReplicaSync):
    """Remembers what came."""

    def __init__(self, *arguments: object, **more: object) -> None:
        super().__init__(*arguments, **more)  # type: ignore[arg-type]
        self.seen: list[BookingEvent] = []

    def take(self, event: BookingEvent, now: float, publisher_id: int | None = None) -> None:
        self.seen.append(event)
        super().take(event, now, publisher_id)


@pytest.mark.parametrize("events", ["zmq", "nats"])
async def test_bookings_are_shared_with_a_native_frontend(
    events: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = write_tiny_model(tmp_path / "model")
    options = ["--discovery-backend", "file", "--request-plane", "tcp"]
    with services(tmp_path, plane="tcp", discovery="file", events=events) as found:
        env = environment(tmp_path, tmp_path / "store", **found)
        for name in ("DYN_EVENT_PLANE", "NATS_SERVER"):
            if name in found:
                monkeypatch.setenv(name, found[name])
        async with (
            process([NATIVE_PYTHON, *MOCKER, str(model_dir), *options], tmp_path / "mocker.log", env),
            frontend_process(
                NATIVE_PYTHON, tmp_path, env, *options, "--router-mode", "kv", "--router-replica-sync"
            ) as frontend,
            DistributedRuntime(None, None, "tcp", discovery=FileDiscovery(tmp_path / "store")) as runtime,
        ):
            await frontend.model_appears()
            endpoint = runtime.endpoint("dynamo.backend.generate")
            client = await endpoint.client()
            await until(lambda: len(client.instance_ids()) == 2)
            ranks = [WorkerRank(each) for each in client.instance_ids()]
            router = KvRouter(block_size=BLOCK, policy=kv_policy("default"), rng=random.Random(1))
            router.set_ranks({rank: RankInfo() for rank in ranks})
            async with Watched(endpoint, router.load, router_id=runtime.connection_id(), block_size=BLOCK) as sync:
                router.observer = sync
                number = 0

                async def ask(tokens: int) -> None:
                    nonlocal number
                    number += 1
                    body = {"model": "mock", "prompt": [5 + number] * 200, "max_tokens": tokens, "ignore_eos": True}
                    reply = await frontend.ask_when_ready("/v1/completions", body)
                    assert reply.status == 200, reply.body

                def placed() -> list[BookingEvent]:
                    return [each for each in sync.seen if isinstance(each.data, BookedPrompt)]

                while not placed():  # the publisher of the frontend is found after a moment
                    await ask(2)
                await until(lambda: len(router.load) == 0)

                # What it books shows in ours: three complete blocks of 64 in 200 tokens, until its answer ends.
                long = asyncio.ensure_future(ask(60))
                await until(lambda: len(router.load) == 1 and sync.seen[-1].data == "MarkPrefillCompleted")
                rank = WorkerRank(placed()[-1].worker.worker_id)
                load = router.load
                assert (load.prefill_tokens(rank), load.decode_blocks(rank), load.requests(rank)) == (0, 3, 1)
                await long
                await until(lambda: len(router.load) == 0)
                assert sync.invalid == 0

                # What ours books shows in its choices: it avoids the worker that ours has filled, whichever that is.
                for busy, free in (ranks, ranks[::-1]):
                    now = asyncio.get_running_loop().time()
                    query = KvQuery(token_ids=range(20_000), pinned_worker_id=busy.worker_id)
                    router.book(f"ours {busy.worker_id}", router.select(query, now), now)
                    await asyncio.sleep(0.3)  # nothing of ours shows when it has arrived there
                    before = len(placed())
                    for _ in range(ROUNDS):
                        await ask(2)
                    await until(lambda before=before: len(placed()) == before + ROUNDS)  # type: ignore[misc]
                    assert {each.worker.worker_id for each in placed()[before:]} == {free.worker_id}
                    router.free(f"ours {busy.worker_id}", asyncio.get_running_loop().time())
                router.observer = None
            await client.close()
