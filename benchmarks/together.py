"""How long requests that arrive together wait for their first token.

    python benchmarks/together.py                                      64 and 256 at once
    python benchmarks/together.py --beside /other/.venv/bin/python     another version in turn, by its interpreter

A real frontend and the bench's worker, which answers at once; every prompt is different. Times are from the moment at which
the client has sent nothing yet.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from model import Prompts, make_model
from stack import HERE, Stack, free_port, processes

PROMPT_TOKENS = 64
ANSWER_TOKENS = 8
WARMING_ROUNDS = 2
COLUMNS = ("first", "median", "last", "answered")

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.contextmanager
def version(python: str, model: Path) -> Iterator[Stack]:
    """Start a frontend and a worker with an interpreter, which determines the version of the package."""
    with tempfile.TemporaryDirectory() as name:
        port = free_port()
        env = {key: value for key, value in os.environ.items() if not key.startswith("DYN_")} | {
            "DYN_FILE_KV": str(Path(name) / "store"),
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
        }
        commands = {
            "frontend": [python, "-m", "dynamo.frontend", "--discovery-backend", "file", "--http-host", "127.0.0.1"],
            "worker": [python, str(HERE / "engine.py"), "--model", str(model), "--delay", "0"],
        }
        commands["frontend"] += ["--http-port", str(port)]
        with processes(commands, port, env, Path(name)) as running:
            yield running


def request(text: str) -> bytes:
    """Return one streamed chat request as it goes over the wire."""
    messages = [{"role": "user", "content": text}]
    body = json.dumps({"model": "bench", "stream": True, "max_tokens": ANSWER_TOKENS, "messages": messages}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


async def ask(connection: Connection, data: bytes, began: float) -> tuple[float, float]:
    """Send a request; return the seconds until its first text and until its end. Raises RuntimeError for an error."""
    reader, writer = connection
    writer.write(data)
    got, first = b"", 0.0
    while b"[DONE]" not in got:
        more = await reader.read(65_536)
        got += more
        if not more or b'"error"' in got:
            raise RuntimeError(f"no answer: {got[:300]!r}")
        if not first and b'"content":"' in got.replace(b'"content":""', b""):
            first = time.perf_counter() - began
    return first, time.perf_counter() - began


class Asked:
    """The figures of one version."""

    def __init__(self, running: Stack) -> None:
        self.running = running
        self.rounds: list[tuple[float, ...]] = []  # ms, as COLUMNS
        self.cpu = 0.0  # seconds of the frontend

    async def round(self, together: int, texts: list[str], *, counts: bool) -> None:
        """Send one request over each of `together` connections, at once."""
        connections = [await asyncio.open_connection("127.0.0.1", self.running.port) for _ in range(together)]
        data = [request(text) for text in texts]
        before, began = self.running.cpu()["frontend"], time.perf_counter()
        times = await asyncio.gather(*[ask(*each, began) for each in zip(connections, data, strict=True)])
        for _, writer in connections:
            writer.close()
        if counts:
            self.cpu += self.running.cpu()["frontend"] - before
            first = [each[0] * 1000 for each in times]
            ended = statistics.median([each[1] * 1000 for each in times])
            self.rounds.append((min(first), statistics.median(first), max(first), ended))

    def row(self, name: str, together: int) -> str:
        """Return the medians of the rounds as a line."""
        columns = [statistics.median(column) for column in zip(*self.rounds, strict=True)]
        cpu = self.cpu / len(self.rounds) / together * 1e6
        return f"{together:5} {name:8}" + "".join(f"{value:10.1f}" for value in columns) + f"{cpu:10.0f}"


async def measure(running: dict[str, Stack], prompts: Prompts, together: int, rounds: int) -> None:
    """Ask all versions in turn, and print a row for each."""
    asked = {name: Asked(each) for name, each in running.items()}
    seed = 1_000_000 * together
    for number in range(WARMING_ROUNDS + rounds):
        for name in list(asked) if number % 2 else reversed(asked):
            texts = [prompts.text(PROMPT_TOKENS, seed + each) for each in range(together)]
            seed += together
            await asked[name].round(together, texts, counts=number >= WARMING_ROUNDS)
    for name, each in asked.items():
        print(each.row(name, together), flush=True)


def main() -> None:
    """Start the versions, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--beside", default="", metavar="PYTHON", help="the interpreter of another version, asked in turn"
    )
    parser.add_argument(
        "--together", default="64,256", metavar="COUNTS", help="with commas between them (default 64,256)"
    )
    parser.add_argument("--rounds", type=int, default=12, help="of each count (default 12)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as open_stacks:
        model = make_model(Path(folder) / "model")
        pythons = {"this": sys.executable} | ({"beside": arguments.beside} if arguments.beside else {})
        running = {name: open_stacks.enter_context(version(python, model)) for name, python in pythons.items()}
        print("together      ms:" + "".join(f"{name:>10}" for name in COLUMNS) + "    CPU us, frontend, per request")
        for count in arguments.together.split(","):
            asyncio.run(measure(running, Prompts(model), int(count), arguments.rounds))


if __name__ == "__main__":
    main()
