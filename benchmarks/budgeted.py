"""The gateways of the benchmark of budgets: each with one key that has a budget of tokens, before the counted upstream."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final, Protocol

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(2, str(Path(__file__).parents[1] / "tools"))

from client_environments import python_of
from stack import free_port

from dynamo.frontend.parts.keys.usage_store import UsageStore
from support.access import bearer, key, write_keys
from support.counted_upstream import MODEL
from support.http_client import CHAT, ask
from support.processes import Cluster, Frontend, Process, get, wait

KEY_ID: Final = "k"
DOLLARS: Final = 1e-6  # of a token at LiteLLM, whose budgets are of money
KEYS: Final = {"BUDGET_KEY": "sk-bench", "BUDGET_BOOKED_KEY": "sk-booked"}
FILES: Final = "files"


class NotInstalled(Exception):
    """A gateway cannot be started here; the message is the reason."""


class Running(Protocol):
    """A gateway that serves."""

    @property
    def ports(self) -> Sequence[int]:
        """Return the ports of its processes, or the one of them all."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Return what the requests of the key carry."""

    async def kill_one(self) -> None:
        """Kill one of its serving processes, as by `kill -9`, and see it serve again."""

    async def booked(self) -> int:
        """Return the tokens that it has booked. Nothing is called after it, and the gateway may be stopped for it."""


@dataclass(frozen=True)
class Task:
    """What a gateway is started for."""

    home: Path
    upstream: int
    budget: int
    processes: int = 1


@dataclass(frozen=True)
class Gateway:
    """One column of the table."""

    name: str
    version: Callable[[], str]
    """Return its version. Raises NotInstalled."""
    start: Callable[[Task], AbstractContextManager[Running]]
    has_batches: bool = False


# -- ours --------------------------------------------------------------------------------------------------------------


class Ours:
    """Our frontend with a worker that asks the upstream."""

    def __init__(self, cluster: Cluster, task: Task) -> None:
        self._cluster, self._task = cluster, task
        self.headers = bearer(KEY_ID)
        record = key(KEY_ID, budget={"period": "total", "tokens": task.budget})
        self._keys = write_keys(task.home / "keys.toml", record)
        self._frontend = self._start()

    @property
    def ports(self) -> list[int]:
        return [self._frontend.port]

    def _start(self) -> Frontend:
        files = ["--keys", str(self._keys), "--usage-db", str(self._task.home / "usage.sqlite")]
        more = ["--workers", str(self._task.processes), "--files-dir", str(self._task.home / FILES)]
        return self._cluster.frontend("frontend", *files, *more)

    def wait_ready(self) -> None:
        """Return when the model is served."""
        self._frontend.wait_ready()
        wait(lambda: self._status() == 200, lambda: f"the model to be served; log:\n{self._frontend.log}")

    def _status(self) -> int:
        return get(self._frontend.port, f"/v1/models/{MODEL}/ready", headers=self.headers)[0]

    async def kill_one(self) -> None:
        if self._task.processes > 1:
            busiest = max(children_of(self._frontend.pid), key=lambda pid: len(os.listdir(f"/proc/{pid}/fd")))
            os.kill(busiest, signal.SIGKILL)
            return  # its parent starts it again
        self._frontend.kill()
        self._frontend.exit_code()
        self._frontend = self._start()
        await asyncio.to_thread(self.wait_ready)

    async def booked(self) -> int:
        self._frontend.terminate()
        await asyncio.to_thread(self._frontend.exit_code)
        store = UsageStore(self._task.home / "usage.sqlite")  # as the next start reads it
        try:
            return sum(spent.units for spent in store.spent().values())
        finally:
            await store.aclose()


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started and that still run."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextmanager
def ours(task: Task) -> Iterator[Running]:
    """Start our frontend and its worker."""
    with Cluster(task.home) as cluster:
        upstream = ["--upstream", f"http://127.0.0.1:{task.upstream}/v1", "--model", MODEL]
        cluster.process("worker", [sys.executable, "-m", "dynamo.upstream", "--discovery-backend", "file", *upstream])
        running = Ours(cluster, task)
        running.wait_ready()
        yield running


# -- LiteLLM -----------------------------------------------------------------------------------------------------------


class LiteLLM:
    """Its proxy, one process on each port, with Redis for what they share."""

    def __init__(self, task: Task, python: str, store: int, settings: Mapping[str, object]) -> None:
        self._task, self._python = task, python
        self.ports = [free_port() for _ in range(task.processes)]
        self.headers = {"authorization": f"Bearer {KEYS['BUDGET_KEY']}"}
        self._running: dict[int, Process] = {}
        shutil.copy(Path(__file__).with_name("litellm_auth.py"), task.home)
        served = {
            "model_name": MODEL,
            "litellm_params": {
                "model": f"openai/{MODEL}",
                "api_base": f"http://127.0.0.1:{task.upstream}/v1",
                "api_key": "none",
            },
            "model_info": {"input_cost_per_token": DOLLARS, "output_cost_per_token": DOLLARS},
        }
        general = {
            "master_key": "sk-master-0123456789abcdef",
            "custom_auth": "litellm_auth.authenticate",
            "custom_auth_run_common_checks": True,
            "coordination_redis": {"host": "127.0.0.1", "port": store},
        }
        config = {
            "model_list": [served],
            "litellm_settings": {"num_retries": 0, "callbacks": ["litellm_auth.spending"]},
            "general_settings": {**general, **settings},
        }
        (task.home / "config.yaml").write_text(json.dumps(config))

    def start(self, port: int) -> None:
        """Start the process of a port."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DYN_", "PYTHON"))}
        own = {"HOME": str(self._task.home), "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"}
        budget = {"BUDGET_USD": repr(self._task.budget * DOLLARS)}
        # By the interpreter: the first line of a script has the path at which its environment was made.
        argv = [
            self._python,
            str(Path(self._python).with_name("litellm")),
            "--config",
            str(self._task.home / "config.yaml"),
        ]
        log = self._task.home / f"proxy-{port}.log"
        self._running[port] = Process(
            "proxy", [*argv, "--host", "127.0.0.1", "--port", str(port)], kept | own | budget | KEYS, log
        )

    def wait_ready(self, port: int) -> None:
        """Return when the process of a port answers."""
        proxy = self._running[port]

        def is_up() -> bool:
            if proxy.has_ended:
                raise RuntimeError(f"LiteLLM ended:\n{proxy.log[-3000:]}")
            try:
                return get(port, "/health/liveliness")[0] == 200
            except OSError:
                return False

        wait(is_up, lambda: f"LiteLLM to answer; log:\n{proxy.log[-3000:]}")

    async def kill_one(self) -> None:
        port = self.ports[0]
        self._running[port].kill()
        self._running[port].exit_code()
        self.start(port)
        await asyncio.to_thread(self.wait_ready, port)

    async def booked(self) -> int:
        headers = {"authorization": f"Bearer {KEYS['BUDGET_BOOKED_KEY']}"}
        answer = await ask(self.ports[-1], CHAT, {"model": MODEL, "messages": []}, headers=headers)
        found = re.search(rb"booked=([^\s\"]+)\.", answer.body)
        if found is None:
            raise RuntimeError(f"LiteLLM does not report what it booked: {answer.body!r}")
        return round(float(found[1]) / DOLLARS)

    def close(self) -> None:
        """End all processes."""
        for each in self._running.values():
            each.close()


@contextmanager
def litellm(settings: Mapping[str, object], task: Task) -> Iterator[Running]:
    """Start Redis and the proxies. `settings`: further general settings."""
    with redis(task.home) as store:
        running = LiteLLM(task, litellm_python(), store, settings)
        try:
            for port in running.ports:
                running.start(port)
            for port in running.ports:
                running.wait_ready(port)
            yield running
        finally:
            running.close()


@contextmanager
def redis(home: Path) -> Iterator[int]:
    """Start a Redis in memory; its port."""
    port = free_port()
    argv = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    server = Process("redis", argv, os.environ, home / "redis.log")
    try:
        server.wait_log("[Rr]eady to accept connections")
        yield port
    finally:
        server.close()


def litellm_python() -> str:
    """Return the interpreter of its environment."""
    return os.environ.get("DYNAMO_LITELLM_PYTHON") or str(python_of("litellm"))


def litellm_version() -> str:
    """Return the version of LiteLLM. Raises NotInstalled."""
    if shutil.which("redis-server") is None:
        raise NotInstalled(
            "there is no redis-server, which its proxies need to share a budget and to keep it (Debian: redis-server)"
        )
    code = "from importlib.metadata import version; print(version('litellm'))"
    try:
        done = subprocess.run([litellm_python(), "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        raise NotInstalled(f"{error} (tools/client_environments.py --only litellm)") from None
    if done.returncode:
        raise NotInstalled(done.stderr.strip().rpartition("\n")[2])
    return done.stdout.strip()


GATEWAYS: Final = (
    Gateway("ours", lambda: version("dynamo-unified"), ours, has_batches=True),
    Gateway("LiteLLM", litellm_version, partial(litellm, {})),
    Gateway("LiteLLM, strict", litellm_version, partial(litellm, {"fail_closed_budget_enforcement": True})),
)
