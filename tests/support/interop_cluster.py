"""Clusters of both systems' real processes: one frontend, any number of workers that run the same engine."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from support.etcd_server import EtcdServer
from support.interop_engine import SENTENCE
from support.native_frontend import NATIVE_PYTHON, Frontend, Reply, environment, frontend_process, process
from support.nats_server import nats_server
from support.tiny_model import write_tiny_model

ENGINE = Path(__file__).parent / "interop_engine.py"
PYTHONS = {"native": NATIVE_PYTHON, "ours": sys.executable}
RUST_ENGINE = os.environ.get("RUST_INTEROP_ENGINE", "")
"""The same engine in Rust (`make test-rust` builds it): a worker of the system "rust"."""
IN_RUST = pytest.mark.skipif(
    not RUST_ENGINE, reason="no Rust engine: `make test-rust` builds one (RUST_INTEROP_ENGINE)"
)


@dataclass
class Worker:
    """One worker process and what its engine wrote down."""

    system: str
    process: asyncio.subprocess.Process
    journal: Path

    def lines(self) -> list[str]:
        return self.journal.read_text().split("\n")[:-1] if self.journal.exists() else []

    def forget(self) -> None:
        self.journal.unlink(missing_ok=True)

    def served(self) -> int:
        return self.lines().count("request")

    async def wrote(self, *expected: str) -> None:
        """Return when the journal holds these lines, in any order: `abort` and the generator's end race each other."""
        for _ in range(500):
            if sorted(self.lines()) == sorted(expected):
                return
            await asyncio.sleep(0.02)
        assert self.lines() == list(expected)


@dataclass
class Cluster:
    frontend: Frontend
    model_dir: Path
    workers: list[Worker] = field(default_factory=list)

    async def chat(self, **options: Any) -> Reply:
        return await self.frontend.ask("/v1/chat/completions", chat_body(**options))

    async def ready(self) -> None:
        """Return when a request is answered."""
        reply = await self.frontend.ask_when_ready("/v1/chat/completions", chat_body())
        assert reply.status == 200, reply.body


def chat_body(**options: Any) -> dict[str, Any]:
    body = {"model": "tiny-model", "messages": [{"role": "user", "content": "count"}], "max_tokens": 64}
    return {**body, **options}


@contextmanager
def services(root: Path, *, plane: str, discovery: str, events: str = "zmq") -> Iterator[dict[str, str]]:
    """The environment that names what these need, running: NATS for requests or events, etcd for discovery."""
    with ExitStack() as stack:
        found = {"DYN_REQUEST_PLANE": plane, "DYN_DISCOVERY_BACKEND": discovery, "DYN_EVENT_PLANE": events}
        if "nats" in (plane, events):
            found["NATS_SERVER"] = stack.enter_context(nats_server()).url
        if discovery == "etcd":
            found["ETCD_ENDPOINTS"] = stack.enter_context(EtcdServer(root / "etcd")).url
        yield found


@asynccontextmanager
async def interop_cluster(
    root: Path,
    *,
    frontend: str,
    workers: Sequence[str],
    plane: str = "tcp",
    discovery: str = "file",
    events: str = "zmq",
    more: dict[str, str] | None = None,
    everywhere: dict[str, str] | None = None,
) -> AsyncIterator[Cluster]:
    """`frontend` is "native" or "ours", each of `workers` may also be "rust"; `more` is added to every worker's environment, `everywhere` to
    that of every process."""
    model_dir = write_tiny_model(root / "model")
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 40_000}))
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    answer = ",".join(map(str, tokenizer.encode(SENTENCE, add_special_tokens=False).ids))
    options = ("--discovery-backend", discovery, "--request-plane", plane)
    async with AsyncExitStack() as stack:
        found = stack.enter_context(services(root, plane=plane, discovery=discovery, events=events))
        env = environment(root, root / "store", **found, **(everywhere or {}))
        front = await stack.enter_async_context(frontend_process(PYTHONS[frontend], root, env, *options))
        cluster = Cluster(front, model_dir)
        for number, system in enumerate(workers):
            journal = root / f"worker-{number}.journal"
            program = [RUST_ENGINE] if system == "rust" else [PYTHONS[system], str(ENGINE)]
            argv = [*program, str(model_dir), str(journal), *options]
            own = {**env, "INTEROP_TOKENS": answer, **(more or {})}
            started = await stack.enter_async_context(process(argv, root / f"worker-{number}.log", own))
            cluster.workers.append(Worker(system, started, journal))
        await front.model_appears()
        await cluster.ready()
        yield cluster
