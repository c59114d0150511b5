"""Workers of real engines behind a frontend, for tests over real processes.

Each engine has a Python of its own, named by a variable (`DYNAMO_LLAMACPP_PYTHON` and so on); `make test-engines` makes those
that this machine can have.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from openai import OpenAI

from dynamo.runtime.base.settings import RuntimeSettings
from dynamo.runtime.calls.context import Context
from dynamo.runtime.distributed import DistributedRuntime
from support.demo_model import FILES
from support.gguf_model import write_gguf
from support.leftovers import cluster_apart
from support.patience import PATIENCE_SECONDS
from support.processes import Cluster, Frontend, Worker

MODEL: Final = "demo"
SUM: Final = "What is 27 + 15?"
START_SECONDS: Final = 900.0  # SGLang loads its libraries for minutes on a busy machine
PARSERS: Final = ("--dyn-tool-call-parser", "hermes", "--dyn-reasoning-parser", "qwen3")


@dataclass(frozen=True)
class EngineCase:
    """One engine, how it is started here, and what it has."""

    name: str  # for `--engine`, and `python -m dynamo.NAME`
    variable: str
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    lacks: frozenset[str] = frozenset()  # guided, logprobs, seed, logit_bias, min_tokens
    is_gguf: bool = False
    aborts: int = 1000
    workers: tuple[str, ...] = ("a", "b")  # at the beginning
    core: str = ""  # in the command line of the process without which the engine is dead; "": it has none

    @property
    def python(self) -> str:
        """The Python that has the engine; "" where there is none."""
        return os.environ.get(self.variable, "")

    @property
    def why_not(self) -> str:
        return f"set {self.variable} to a Python that has the engine and this package (docs/engines.md)"

    def arguments(self, directory: Path) -> list[str]:
        """Flags that name the demonstration model; a GGUF file is written to `directory`."""
        if not self.is_gguf:
            return ["--model", str(FILES), *self.flags]
        file = directory / "demo.gguf"
        if not file.exists():
            write_gguf(FILES, file)
        return ["--model", str(file), "--tokenizer", str(FILES), *self.flags]


SGLANG: Final = EngineCase(
    "sglang",
    "DYNAMO_SGLANG_PYTHON",
    (
        *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
        *("--sampling-backend", "pytorch", "--grammar-backend", "xgrammar", "--disable-overlap-schedule"),
        *("--disable-cuda-graph", "--max-total-tokens", "20000", "--page-size", "16", "--log-level", "warning"),
    ),
    {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"},
    lacks=frozenset({"behind_thoughts"}),
    aborts=100,
    core="sglang::scheduler",
)
"""SGLang on a CPU, with what `tools/sglang_rig.py` puts in the place of its kernels."""


@dataclass
class ServedEngine:
    """A frontend and the workers that still serve, by name."""

    case: EngineCase
    cluster: Cluster
    frontend: Frontend
    workers: dict[str, Worker]
    client: OpenAI
    temporary: Path  # for the temporary files of all processes

    def ask(self, text: str, *, stream: bool = False, **more: Any) -> Any:
        return self.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text}], stream=stream, **more
        )

    def long(self, tokens: int = 300) -> tuple[str, int]:
        """Stream an answer of at most so many tokens; its text and what the usage says."""
        events = self.ask(
            SUM,
            stream=True,
            max_tokens=tokens,
            temperature=0,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        text, counted = "", 0
        for event in events:
            if event.choices:
                text += event.choices[0].delta.content or ""
            if event.usage:
                counted = event.usage.completion_tokens
        return text, counted

    def add_worker(self, name: str) -> Worker:
        """Start a further worker and wait until the frontend has it."""
        worker = _start(self.cluster, self.case, name)
        self.workers[name] = worker
        _wait_started(worker)
        self.cluster.wait_ready(self.frontend, *self.workers.values())
        return worker

    @asynccontextmanager
    async def straight(self) -> AsyncIterator[Any]:
        """A client of the workers without a frontend: token ids in and out."""
        settings = RuntimeSettings(discovery_backend="file", file_root=self.cluster.root / "store")
        async with DistributedRuntime(asyncio.get_running_loop(), None, None, settings=settings) as runtime:
            client = await runtime.endpoint(f"dynamo.{MODEL}.generate").client("round-robin")
            await client.wait_for_instances()
            yield client


@contextmanager
def served_engine(case: EngineCase, root: Path, router_mode: str = "round-robin") -> Iterator[ServedEngine]:
    """A frontend and workers of one engine with the demonstration model."""
    with cluster_apart(root) as (cluster, temporary):
        frontend = cluster.frontend("frontend", "--router-mode", router_mode)
        workers = {name: _start(cluster, case, name) for name in case.workers}
        _wait_started(*workers.values())
        cluster.wait_ready(frontend, *workers.values())
        with OpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0) as client:
            yield ServedEngine(case, cluster, frontend, workers, client, temporary)


def _start(cluster: Cluster, case: EngineCase, name: str) -> Worker:
    argv = [case.python, "-m", f"dynamo.{case.name}", *case.arguments(cluster.root)]
    own = ["--served-model-name", MODEL, "--component", MODEL, "--discovery-backend", "file", *PARSERS]
    return cluster._worker(name, MODEL, [*argv, *own], case.environment, cluster.root / f"{name}.journal")


def _wait_started(*workers: Worker) -> None:
    """Return when each of them has loaded its libraries and the model."""
    until = time.monotonic() + START_SECONDS
    while not all("Serving demo on" in worker.log for worker in workers):
        assert not any(worker.has_ended for worker in workers), [worker.log for worker in workers]
        assert time.monotonic() < until, f"not ready: {[worker.log[-2000:] for worker in workers]}"
        time.sleep(0.05)


async def tokens_of(client: Any, body: dict[str, Any], context: Context | None = None) -> list[int]:
    """The tokens of one request, straight from a worker."""
    context = context or Context()
    stream = await client.open(client.pick(context), body, context)
    found: list[int] = []
    try:
        while batch := await asyncio.wait_for(stream.next_batch(), PATIENCE_SECONDS):
            for item in batch:
                found += item.token_ids
    finally:
        stream.close()
    return found
