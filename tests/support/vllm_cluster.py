"""Workers of vLLM behind a frontend, for tests over real processes. `DYNAMO_VLLM_PYTHON` is a Python that has vLLM."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

from openai import OpenAI

from dynamo.runtime.base.settings import RuntimeSettings
from dynamo.runtime.calls.context import Context
from dynamo.runtime.distributed import DistributedRuntime
from support.demo_model import FILES
from support.leftovers import cluster_apart
from support.patience import PATIENCE_SECONDS
from support.processes import Cluster, Frontend, Worker

PYTHON: Final = os.environ.get("DYNAMO_VLLM_PYTHON", "")
WHY_NOT: Final = "set DYNAMO_VLLM_PYTHON to a Python that has vLLM and this package (docs/engines.md)"
MODEL: Final = "demo"

# Small, and alike on every machine: float32, no compiler, a cache of 1 GiB.
FLAGS: Final = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--block-size", "32")
ENVIRONMENT: Final = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}


START_SECONDS: Final = 900.0  # three processes load torch; with others at work that takes minutes


class VllmCluster:
    """A frontend and the workers that serve, by name."""

    def __init__(self, cluster: Cluster, frontend: Frontend, client: OpenAI, temporary: Path) -> None:
        self.cluster, self.frontend, self.client = cluster, frontend, client
        self.temporary = temporary  # for the temporary files of all processes
        self.workers: dict[str, Worker] = {}

    def start(self, name: str, *flags: str, **env: str) -> None:
        """Start a worker; `wait_serving` waits for it."""
        self.workers[name] = start_worker(self.cluster, name, *flags, **env)

    def wait_serving(self) -> None:
        """Return when each worker has loaded its libraries and the model, and the frontend serves it."""
        until = time.monotonic() + START_SECONDS
        workers = self.workers.values()
        while not all("Serving demo on" in worker.log for worker in workers):
            assert not any(worker.has_ended for worker in workers), [worker.log for worker in workers]
            assert time.monotonic() < until, f"not ready: {[worker.log[-2000:] for worker in workers]}"
            time.sleep(0.2)
        for worker in workers:
            worker.wait_ready()
        self.frontend.wait_ready()
        while MODEL not in self.frontend.models():
            assert time.monotonic() < until, f"not served: {self.frontend.log[-2000:]}"
            time.sleep(0.05)

    def ask(self, text: str, *, stream: bool = False, model: str = MODEL, **more: Any) -> Any:
        """Send one chat request through the openai client."""
        return self.client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": text}], stream=stream, **more
        )

    def long(self, tokens: int = 300, text: str = "What is 27 + 15?") -> tuple[str, int]:
        """Stream an answer of exactly so many tokens; its text and what the usage says."""
        events = self.ask(
            text,
            stream=True,
            max_tokens=tokens,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, "nvext": {}},
        )
        said, counted = "", 0
        for event in events:
            if event.choices:
                said += event.choices[0].delta.content or ""
            if event.usage:
                counted = event.usage.completion_tokens
        return said, counted

    def post(self, name: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a body to the status server of a worker."""
        worker = self.workers[name]
        connection = http.client.HTTPConnection("127.0.0.1", worker.system_port, timeout=PATIENCE_SECONDS * 2)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
            return answer
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """The sum of a metric's samples at the frontend."""
        _, body = self.frontend.get("/metrics")
        samples = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", body.decode(), re.MULTILINE)
        return sum(map(float, samples))

    @asynccontextmanager
    async def straight(self, component: str = MODEL) -> AsyncIterator[Any]:
        """A client of the workers without a frontend: token ids in and out."""
        settings = RuntimeSettings(discovery_backend="file", file_root=self.cluster.root / "store")
        async with DistributedRuntime(asyncio.get_running_loop(), None, None, settings=settings) as runtime:
            client = await runtime.endpoint(f"dynamo.{component}.generate").client("round-robin")
            await client.wait_for_instances()
            yield client


@contextmanager
def serve(root: Path, *frontend_flags: str) -> Iterator[VllmCluster]:
    """Run a frontend, and no worker yet; everything is ended at the end."""
    with cluster_apart(root) as (cluster, temporary):
        frontend = cluster.frontend("frontend", *frontend_flags)
        frontend.wait_ready()
        with OpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0) as client:
            yield VllmCluster(cluster, frontend, client, temporary)


async def chunks_of(client: Any, body: dict[str, Any], context: Context | None = None) -> list[dict[str, Any]]:
    """One request's answer, as chunks of the contract."""
    context = context or Context()
    stream = await client.open(client.pick(context), body, context)
    found: list[dict[str, Any]] = []
    try:
        while batch := await asyncio.wait_for(stream.next_batch(), PATIENCE_SECONDS):
            found += [{"token_ids": item.token_ids, **(item.extra or {})} for item in batch]
    finally:
        stream.close()
    return found


async def tokens_of(client: Any, body: dict[str, Any], context: Context | None = None) -> list[int]:
    """The token ids of one request's answer."""
    return [token for chunk in await chunks_of(client, body, context) for token in chunk["token_ids"]]


def lives(number: int) -> bool:
    """Whether a process runs (a dead one that nobody has waited for does not)."""
    try:
        return Path(f"/proc/{number}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def start_worker(cluster: Cluster, name: str, *flags: str, **env: str) -> Worker:
    """Start a worker; `wait_ready` of it returns when it serves, which takes half a minute or more."""
    argv = [PYTHON, "-m", "dynamo.vllm", "--model", str(FILES), "--served-model-name", MODEL, "--component", MODEL]
    own = [*FLAGS, "--discovery-backend", "file", "--dyn-tool-call-parser", "hermes", "--dyn-reasoning-parser", "qwen3"]
    journal = cluster.root / f"{name}.journal"
    return cluster._worker(name, MODEL, [*argv, *own, *flags], ENVIRONMENT | env, journal)


def parts_of(worker: Worker) -> dict[str, int]:
    """The processes of one worker's engine: name -> number."""
    found: dict[str, int] = {}
    parents = [worker.pid]
    while parents:
        parent = parents.pop()
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                text = entry.read_text()
            except OSError:
                continue
            match = re.match(r"(\d+) \((.*)\) (\S) (\d+) ", text)
            if match is None or int(match[4]) != parent or match[3] == "Z":
                continue
            parents.append(int(match[1]))
            found[_title(int(match[1])) or match[2]] = int(match[1])
    return found


def _title(number: int) -> str:
    try:
        return Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""
