"""What serving adds to the reference engine: a worker process, called over its request plane, and whose CPU that was.

"engine" is the thread that computes steps; "framework" is all the rest of the process: contract, request plane, metrics,
interpreter. Used by `reference.py`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stack import cpu_seconds, end_on_sigterm
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dynamo.runtime.client import Client
from dynamo.runtime.distributed import DistributedRuntime

PATIENCE_SECONDS = 30.0
ENDPOINT = "dynamo.backend.generate"


@dataclass(frozen=True)
class Served:
    """CPU seconds of a worker that served one batch."""

    tokens: int
    engine_s: float
    total_s: float


def write_tokenizer(directory: Path) -> None:
    """A worker registers no model without one; nothing here is ever text."""
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


def serve(directory: Path, prompts: list[list[int]], tokens: int, repeats: int) -> list[Served]:
    """Start a worker for the model in `directory`, and let it answer `prompts` together, `repeats` times."""
    end_on_sigterm()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        env = {key: value for key, value in os.environ.items() if not key.startswith("DYN_")} | {
            "DYN_FILE_KV": str(folder / "store"),
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
            "DYN_LOG": "info",
        }
        command = [sys.executable, "-m", "dynamo.reference", "--model", str(directory), "--discovery-backend", "file"]
        log = stack.enter_context((folder / "log").open("wb"))
        worker = subprocess.Popen([*command, "--endpoint", f"dyn://{ENDPOINT}"], env=env, stdout=log, stderr=log)
        stack.callback(_stop, worker)
        os.environ["DYN_FILE_KV"] = env["DYN_FILE_KV"]
        try:
            return asyncio.run(_call(worker.pid, prompts, tokens, repeats))
        except TimeoutError:
            raise RuntimeError(f"the worker did not come up:\n{(folder / 'log').read_text()[-3000:]}") from None


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def _call(pid: int, prompts: list[list[int]], tokens: int, repeats: int) -> list[Served]:
    found = []
    async with DistributedRuntime(None, "file", "tcp") as runtime:
        client = await runtime.endpoint(ENDPOINT).client()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await client.wait_for_instances()
        await asyncio.gather(*(_one(client, prompt, 10) for prompt in prompts))  # warm
        for repeat in range(repeats):
            before, total = _thread_seconds(pid), cpu_seconds(pid)
            fresh = [[(token + repeat) % 1000 for token in prompt] for prompt in prompts]
            counts = await asyncio.gather(*(_one(client, prompt, tokens) for prompt in fresh))
            total, after = cpu_seconds(pid) - total, _thread_seconds(pid)
            found.append(Served(sum(counts), max(after[thread] - before.get(thread, 0.0) for thread in after), total))
    return found


async def _one(client: Client, prompt: list[int], tokens: int) -> int:
    body: dict[str, Any] = {
        "token_ids": prompt,
        "stop_conditions": {"max_tokens": tokens, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
    }
    count = 0
    async for item in await client.generate(body, annotated=False):
        count += len(item["token_ids"])
    return count


def _thread_seconds(pid: int) -> dict[str, float]:
    """CPU seconds of every thread so far. The busiest one computes steps: nothing else here takes a tenth of it."""
    seconds = {}
    for path in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it ended meanwhile
            # Nanoseconds on the CPU come first; /proc/PID/stat counts in ticks of 10 ms.
            seconds[path.name] = int((path / "schedstat").read_text().split()[0]) / 1e9
    assert seconds, f"there is no process {pid}"
    return seconds
