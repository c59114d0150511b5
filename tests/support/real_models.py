"""Real models that come as packages, for tests: where they are, llama.cpp's own server over one.

`make test-models` makes the environments, whose Pythons are named by DYNAMO_LLAMACPP_PYTHON and DYNAMO_TRANSFORMERS_PYTHON.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from support.http_client import Reply, ask
from support.serve_command import serve_command

__all__ = [
    "LLAMA",
    "PROMPTS",
    "TRANSFORMERS",
    "Answer",
    "Server",
    "bare_llama",
    "located",
    "served_llama",
]

PROMPTS: Final = int(os.environ.get("MODEL_PROMPTS") or 500)
LLAMA: Final = "DYNAMO_LLAMACPP_PYTHON"
TRANSFORMERS: Final = "DYNAMO_TRANSFORMERS_PYTHON"
LOCATE: Final = "import sys; from dynamo.cli.packaged_models import packaged; print(packaged(sys.argv[1]).locate())"
BARE: Final = """
import json, sys, xllamacpp
parameters = xllamacpp.CommonParams()
for name, value in json.loads(sys.argv[1]).items():
    *holders, attribute = name.split(".")
    holder = parameters
    for each in holders:
        holder = getattr(holder, each)
    setattr(holder, attribute, value)
server = xllamacpp.Server(parameters)
print(server.listening_address, flush=True)
sys.stdin.read()
"""
CONTEXT: Final = 2048  # tokens of one request
UNFINISHED: Final = "\ufffd"  # stands for a character whose last token was not generated


def located(variable: str, name: str) -> tuple[str, Path] | str:
    """The Python and the model of a short name; else why there is none."""
    python = os.environ.get(variable, "")
    if not python:
        return f"set {variable} to a Python that has the engine, the model and this package (make test-models)"
    ended = subprocess.run([python, "-c", LOCATE, name], capture_output=True, text=True)
    if ended.returncode:
        return ended.stderr.strip().rpartition("\n")[2]
    return python, Path(ended.stdout.strip())


class Answer(NamedTuple):
    """What two servers must agree on."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int

    @classmethod
    def of(cls, reply: Reply) -> Self:
        """Read a reply, streamed or not. A stream must have had its usage asked for."""
        assert reply.status == 200, (reply.status, reply.body)
        is_stream = reply.headers["content-type"].startswith("text/event-stream")
        parts = reply.events if is_stream else [reply.json()]
        (reason,) = {c["finish_reason"] for part in parts for c in part["choices"] if c.get("finish_reason")}
        (usage,) = (part["usage"] for part in parts if part.get("usage"))
        return cls(reply.text, reason, usage["prompt_tokens"], usage["completion_tokens"])

    def agrees_with(self, other: Answer) -> bool:
        """Whether two answers are the same.

        Where the limit cuts within a character, some answers have a sign for it, some nothing, and those that llama.cpp streams
        also lose a blank that belongs to the same token.
        """
        return self == other or (self.finish_reason == "length" and self._uncut() == other._uncut())

    def _uncut(self) -> Self:
        return self._replace(text=self.text.rstrip(UNFINISHED).removesuffix(" "))


@dataclass(frozen=True)
class Server:
    """A server that takes OpenAI's requests: ours, or llama.cpp's own."""

    port: int
    model: str

    async def reply(self, path: str, body: dict[str, Any], **more: Any) -> Reply:
        return await ask(self.port, path, {"model": self.model, **body, **more})

    async def answer(self, path: str, body: dict[str, Any], *, stream: bool = False, **more: Any) -> Answer:
        streamed: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return Answer.of(await self.reply(path, body, **streamed, **more))


@contextmanager
def bare_llama(python: str, file: Path, slots: int, **more: Any) -> Iterator[Server]:
    """llama.cpp's own server, and nothing of ours. `more`: its parameters."""
    threads = {"cpuparams.n_threads": 1, "cpuparams_batch.n_threads": 1}
    settings = {"model.path": str(file), "n_ctx": CONTEXT * slots, "n_parallel": slots, **threads, **more}
    argv = [python, "-c", BARE, json.dumps({"verbosity": 1, "port": 0, **settings})]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Server(int(process.stdout.readline().rpartition(":")[2]), "bare")
        finally:
            process.kill()


@contextmanager
def served(root: Path, python: str, model: str, *flags: str, engine: str = "") -> Iterator[Server]:
    """`dynamo serve MODEL`. `flags`: those of the engine."""
    root.mkdir(parents=True)
    chosen, named = (["--engine", engine] if engine else []), ["--served-model-name", "real"]
    argv = ["--http-port", "0", *chosen, "--", *named, *flags]
    with serve_command(root, model, *argv, python=python) as command:
        command.wait_ready()
        yield Server(command.port, "real")


@contextmanager
def served_llama(root: Path, python: str, model: str, slots: int, *more: str, engine: str = "") -> Iterator[Server]:
    """`dynamo serve MODEL` with llama.cpp, with as many threads as `bare_llama`. `more`: flags of the engine."""
    flags = ["--slots", str(slots), "--context-length", str(CONTEXT), "--threads", "1"]
    with served(root, python, model, *flags, *more, engine=engine) as server:
        yield server
