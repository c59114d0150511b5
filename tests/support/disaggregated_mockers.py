"""Prefill and decode mockers as processes behind a frontend, and what one mocker alone answers to the same requests."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from dynamo.mocker.configuration import MockOptions
from dynamo.mocker.engine import MockEngine
from dynamo.runtime.calls.context import Context
from support.http_client import COMPLETIONS, DONE, exchange
from support.processes import Cluster, Frontend, Worker, until

MODEL = "m"
ROLES = ("prefill", "decode")


class Mockers:
    """Some prefill and decode workers, each a process of its own."""

    def __init__(self, cluster: Cluster, each: int, *flags: str, bootstrap: bool = False) -> None:
        """Start `each` workers of either role. `flags`: of all of them. `bootstrap`: the two of a request meet by themselves."""
        self._cluster, self._flags, self._bootstrap = cluster, flags, bootstrap
        self._started = 0
        self.frontend: Frontend = cluster.frontend("frontend")
        self.living: dict[str, list[Worker]] = {role: [self.start(role) for _ in range(each)] for role in ROLES}

    def start(self, role: str) -> Worker:
        """Start a worker; it is not served yet."""
        self._started += 1
        meeting = ["--bootstrap-ports", "0"] if self._bootstrap and role == "prefill" else []
        flags = ["--disaggregation-mode", role, *meeting, *self._flags]
        return self._cluster.mocker(f"{role}{self._started}", MODEL, *flags)

    async def ready(self) -> None:
        """Return when the frontend serves all that live."""
        self.frontend.wait_ready()
        for workers in self.living.values():
            for worker in workers:
                worker.wait_ready()
        await until(
            lambda: all(self._known(role) >= len(workers) for role, workers in self.living.items()),
            lambda: f"all mockers to be known; log:\n{self.frontend.log}",
        )

    def kill(self, worker: Worker) -> None:
        """Kill a worker with SIGKILL."""
        worker.kill()
        worker.exit_code()
        for workers in self.living.values():
            if worker in workers:
                workers.remove(worker)

    async def replace(self, role: str) -> None:
        """Start another worker of a role, and return when the frontend knows its instance."""
        known = self._instances()
        worker = self.start(role)
        self.living[role].append(worker)
        worker.wait_ready()
        await until(lambda: not self._instances() <= known, lambda: f"a replacement; log:\n{self.frontend.log}")

    async def busy(self, role: str, is_so: Callable[[Worker], bool]) -> Worker:
        """Return the first worker of a role for which `is_so` holds, once it does."""
        found: list[Worker] = []

        def look() -> bool:
            found.extend(worker for worker in self.living[role] if is_so(worker))
            return bool(found)

        await until(look, lambda: f"a busy {role} worker; log:\n{self.frontend.log}")
        return found[0]

    def logged(self, pattern: str) -> int:
        """Count what the frontend has logged."""
        return len(re.findall(pattern, self.frontend.log))

    def _instances(self) -> set[int]:
        return {one["instance_id"] for one in json.loads(self.frontend.get("/health")[1])["instances"]}

    def _known(self, role: str) -> int:
        status, body = self.frontend.get(f"/v1/models/{MODEL}/ready")
        if status != 200:
            return 0
        (namespace,) = json.loads(body)["namespaces"].values()
        return int(namespace["worker_types"].get(role, {}).get("workers", 0))


def requests(count: int, prompt_tokens: int, output_tokens: int, seed: int = 0) -> list[dict[str, Any]]:
    """Make requests that have no prompt and no answer in common."""
    return [
        {
            "model": MODEL,
            "prompt": [1 + (number * 7919 + seed * 104_729 + at * (number + 3)) % 250 for at in range(prompt_tokens)],
            "max_tokens": output_tokens,
            "seed": seed * 1000 + number,
            "stream": True,
            "nvext": {"extra_fields": ["completion_token_ids"]},
        }
        for number in range(count)
    ]


async def ask_ids(frontend: Frontend, body: dict[str, Any], began: Callable[[], None] = lambda: None) -> list[int]:
    """Return the token ids of an answer; `began` is called with its first token."""
    ids: list[int] = []
    async with exchange(frontend.port, COMPLETIONS, body) as asked:
        assert await asked.head() == 200, (await asked.reply()).body
        while (event := await asked.event()) != DONE:
            assert "error" not in event, event
            found = (event.get("nvext") or {}).get("completion_token_ids") or ()
            if found and not ids:
                began()
            ids += found
    return ids


async def aggregated(bodies: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Return what one worker alone answers."""
    engine = MockEngine(MODEL, MockOptions())
    await engine.start(1)
    try:
        return list(await asyncio.gather(*(_alone(engine, body) for body in bodies)))
    finally:
        await engine.cleanup()


async def _alone(engine: MockEngine, body: dict[str, Any]) -> list[int]:
    request: Any = {
        "token_ids": body["prompt"],
        "stop_conditions": {"max_tokens": body["max_tokens"]},
        "sampling_options": {"seed": body["seed"]},
    }
    return [token async for chunk in engine.generate(request, Context()) for token in chunk["token_ids"]]
