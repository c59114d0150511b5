"""The native mocker's KV events, heard by our router's feed: over ZMQ and over NATS."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo.kv.events import RouterEvent
from dynamo.router import KvEventFeed
from dynamo.runtime.discovery.file import FileDiscovery
from dynamo.runtime.distributed import DistributedRuntime
from support.interop_cluster import PYTHONS, services
from support.native_frontend import NATIVE_PYTHON, environment, frontend_process, process, why_not
from support.processes import until
from support.tiny_model import write_tiny_model

REASON = why_not()
pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.timeout(120),
]

MOCKER = ["-m", "dynamo.mocker", "--model-name", "mock", "--speedup-ratio", "10", "--model-path"]
PROMPTS = 4
BLOCKS = 3  # whole blocks of each prompt, at least


class Heard:
    """What came, by worker."""

    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}
        self.stored: set[int] = set()

    def apply(self, event: RouterEvent) -> None:
        self.ids.setdefault(event.worker_id, []).append(event.event.event_id)
        data = event.event.data
        if data != "cleared" and data.stored is not None:
            self.stored.update(block.block_hash for block in data.stored.blocks)

    def forget(self, worker_id: int, dp_rank: int) -> None:
        self.ids.setdefault(worker_id, [])


@pytest.mark.parametrize("events", ["zmq", "nats"])
async def test_what_the_native_mocker_caches_is_heard_by_our_feed(
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
            frontend_process(PYTHONS["ours"], tmp_path, env, *options) as frontend,
            process([NATIVE_PYTHON, *MOCKER, str(model_dir), *options], tmp_path / "mocker.log", env),
        ):
            await frontend.model_appears()
            heard = Heard()
            store = FileDiscovery(tmp_path / "store")
            async with (
                DistributedRuntime(None, None, "tcp", discovery=store) as runtime,
                KvEventFeed(runtime.endpoint("dynamo.backend.generate"), heard),
            ):
                await until(lambda: len(heard.ids) == 1, lambda: f"the mocker to be known: {heard.ids}")
                for number in range(PROMPTS):
                    body = {"model": "mock", "prompt": [5 + number] * 400, "max_tokens": 4}
                    reply = await frontend.ask_when_ready("/v1/completions", body)
                    assert reply.status == 200, reply.body
                await until(
                    lambda: len(heard.stored) >= PROMPTS * BLOCKS, lambda: f"blocks: {len(heard.stored)}, {heard.ids}"
                )
            (ids,) = heard.ids.values()
            assert ids == sorted(set(ids))  # each once, in order
