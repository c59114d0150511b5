"""The ways of a chat request and of a token, traced: `python tools/way.py` and `python tools/way.py --token`.

A real frontend and a real worker run in this process, over TCP on the loopback. The way of a request leads from the listener to
the connection of its worker: the second of two equal requests is traced, from the first call in the task that serves it to the
moment at which it was handed to the connection. The way of a token leads from the worker, where the engine yields its chunk, to the
socket of the client. It is that of a token in the middle of an answer, as nearly all are. What counts:

- A **stop** is a call of a function of ours that does work: at least `WORK_STATEMENTS` of its statements run. A function
  that runs fewer is a helper of its caller, and so is every constructor, lambda and comprehension.
- A **stay** is a run of stops in one module. Only calls are stops: a return to the caller is none.
- A **climb** is a stay in a room that stands higher in the architecture (`ROOMS`) than the room of the stay before.
- On the way of a token every function of ours that begins or goes on, and runs a statement, is a stop: there are few.

`--calls` prints every call with the statements of it that ran, `--count` only how many there are, and `--least N` counts
functions from N statements on as stops.
"""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final

from wings import ROOTS, located, name_in_package

if TYPE_CHECKING:
    from dynamo.frontend.app import Frontend
    from dynamo.runtime.calls.request_plane.base import Handler

SOURCES: Final = tuple(f"{root}/dynamo/" for root in ROOTS)

WORK_STATEMENTS: Final = 8
TOKEN: Final = ord("a")  # always the same one: its text is known after the first time
TOKENS: Final = 12  # of the traced answer; the way of each of the later ones is traced, and the shortest is the way
ROOMS: Final = ("frontend", "worker", "router", "placement", "runtime", "text", "kv", "protocol", "errors")
"""From the top of the architecture to its bottom."""


@dataclass(frozen=True)
class Stay:
    """A run of work in one module."""

    module: str
    functions: tuple[str, ...]
    is_climb: bool


@dataclass
class Call:
    """One call of a function of ours, and the lines of it that ran."""

    module: str
    function: str
    lines: set[int]

    @property
    def statements(self) -> int:
        """How many of its statements ran: a count that does not depend on how the code is broken into lines."""
        first = _statements(self.module)
        return len({first.get(line, line) for line in self.lines})

    def does_work(self, least: int) -> bool:
        """Return whether at least so many statements ran, of no constructor, lambda or comprehension."""
        name = self.function.rpartition(".")[2]
        return name != "__init__" and not name.startswith("<") and self.statements >= least


class Tracer:
    """Notes the calls of one task, or of all that runs, in order, until the first call of one function."""

    def __init__(self, last: CodeType, task: asyncio.Task[Any] | None = None) -> None:
        self._task, self._last = task, last
        self._by_frame: dict[FrameType, Call] = {}  # holds the frames, so that none is taken for another one
        self.is_over = False

    @property
    def calls(self) -> list[Call]:
        return list(self._by_frame.values())

    def __call__(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if self.is_over or not code.co_filename.startswith(SOURCES):
            return None
        if self._task is not None and asyncio.current_task() is not self._task:
            return None
        if code is self._last:
            self.is_over = True
            return None
        call = self._by_frame.get(frame)
        if call is None:  # else a coroutine goes on
            module = name_in_package(Path(code.co_filename)).removesuffix(".py")
            call = self._by_frame[frame] = Call(module, code.co_qualname, set())
        lines = call.lines

        def line(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
            if self.is_over:
                return None
            if event == "line":
                lines.add(frame.f_lineno)
            return line

        return line


@cache
def _statements(module: str) -> dict[int, int]:
    """Return the first line of the innermost statement for each line of a module."""
    first: dict[int, int] = {}
    source = located(f"{module}.py")
    assert source is not None, module
    for node in ast.walk(ast.parse(source.read_text())):  # outer statements before the inner ones
        if isinstance(node, ast.stmt):
            first.update(dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), node.lineno))
    return first


@asynccontextmanager
async def cluster(answer: Handler) -> AsyncIterator[Frontend]:
    """Run a frontend, and a worker for the model `m` in the same process; `answer` handles its requests."""
    from dynamo.frontend.app import Frontend
    from dynamo.frontend.base.offload import InlineOffload
    from dynamo.frontend.settings import FrontendSettings
    from dynamo.runtime.distributed import DistributedRuntime
    from dynamo.worker.registration import build_card

    loop = asyncio.get_running_loop()
    worker = DistributedRuntime(loop, "mem", "tcp")
    caller = DistributedRuntime(loop, "mem", "tcp")
    with tempfile.TemporaryDirectory() as cache:
        settings = FrontendSettings(model_cache_dir=Path(cache), http_host="127.0.0.1", http_port=0)
        async with Frontend(settings, caller, offload=InlineOffload()) as frontend:
            endpoint = worker.endpoint("ns.backend.generate")
            served = await endpoint.start_serving(answer)
            await endpoint.publish_model(build_card("m").to_json())
            await frontend.models.wait_for(lambda: frontend.models.lookup("m") is not None)
            yield frontend
            del served
        await caller.aclose()
        await worker.aclose()


def chat(tokens: int) -> bytes:
    """Return the body of a streamed chat request."""
    messages = [{"role": "user", "content": "hi"}]
    return json.dumps({"model": "m", "messages": messages, "stream": True, "max_tokens": tokens}).encode()


async def trace() -> list[Call]:
    """Return every call of ours in the task of one request, in order."""
    from dynamo.frontend.base.stage_timer import StageTimer

    async def answer(body: Any, context: Any, sink: Any) -> None:
        sink.send_tokens([104, 105], finish_reason="stop")

    body = chat(2)
    async with cluster(answer) as frontend:
        loop = asyncio.get_running_loop()
        await loop.create_task(request(frontend.asgi, body))  # connects
        task = loop.create_task(request(frontend.asgi, body))
        tracer = Tracer(StageTimer.dispatched.__code__, task)
        sys.settrace(tracer)
        try:
            await task
        finally:
            sys.settrace(None)
    return tracer.calls


async def trace_token() -> list[Call]:
    """Return every call of ours between the chunk of an engine and the arrival of its event at the client, in order."""
    from dynamo.contract.engine import LLMEngine
    from dynamo.frontend.http.server import HttpServer
    from dynamo.worker.serving import TokenServing

    class Engine(LLMEngine):
        """Yields a token whenever it is told to."""

        def __init__(self) -> None:
            self.wanted = asyncio.Semaphore(0)

        @classmethod
        async def from_args(cls, argv: Any = None) -> Any:
            raise NotImplementedError("this engine is made here")

        async def start(self, worker_id: int) -> Any:
            raise NotImplementedError("this engine needs no start")

        async def generate(self, request: Any, context: Any) -> Any:
            for _ in range(TOKENS):
                await self.wanted.acquire()
                yield {"token_ids": [TOKEN]}
            yield {"token_ids": [], "finish_reason": "length"}

        async def cleanup(self) -> None:
            pass

    engine = Engine()
    ways: list[list[Call]] = []
    async with cluster(TokenServing(engine).handle) as frontend:
        server = HttpServer(frontend)
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        body = chat(TOKENS)
        head = ("POST /v1/chat/completions HTTP/1.1", "host: localhost", "content-type: application/json")
        writer.write("\r\n".join((*head, f"content-length: {len(body)}", "", "")).encode() + body)
        for number in range(TOKENS):
            is_traced = number > TOKENS // 2  # the first events take another way
            tracer = Tracer(HttpServer.close.__code__)
            if is_traced:
                sys.settrace(tracer)
            engine.wanted.release()
            await reader.readuntil(b'"content":"' + bytes([TOKEN]))
            sys.settrace(None)
            if is_traced:
                ways.append(tracer.calls)
        await reader.readuntil(b"[DONE]")
        writer.close()
        await server.close()
    return min(ways, key=len)


async def request(asgi: Any, body: bytes) -> None:
    """Send one chat request to the application."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    gone = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        assert message.get("status", 200) == 200, message

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": ("127.0.0.1", 1),
        "extensions": {},
    }
    await asgi(scope, receive, send)


def stays(calls: list[Call], least: int = WORK_STATEMENTS) -> list[Stay]:
    """Return the stays of a way; `least`: how many statements of a function run where it is a stop."""
    found: list[tuple[str, list[str]]] = []
    for call in calls:
        if not call.does_work(least):
            continue
        if not found or found[-1][0] != call.module:
            found.append((call.module, []))
        if call.function not in found[-1][1]:
            found[-1][1].append(call.function)
    way: list[Stay] = []
    for module, functions in found:
        is_climb = bool(way) and _height(module) < _height(way[-1].module)
        way.append(Stay(module, tuple(functions), is_climb))
    return way


def _height(module: str) -> int:
    room = module.split("/", maxsplit=1)[0]
    return ROOMS.index(room) if room in ROOMS else len(ROOMS)


def main() -> int:
    """Print the stays as JSON."""
    logging.disable(logging.CRITICAL)  # the trace blocks the loop, which a worker would report
    is_token = "--token" in sys.argv
    calls = asyncio.run(trace_token() if is_token else trace())
    if "--calls" in sys.argv:
        for call in calls:
            print(f"{call.statements:4} {call.module}: {call.function}", file=sys.stderr)
    if "--count" in sys.argv:
        print(json.dumps(len(calls)))
        return 0
    least = int(sys.argv[sys.argv.index("--least") + 1]) if "--least" in sys.argv else WORK_STATEMENTS
    way = stays(calls, 1 if is_token else least)
    print(json.dumps([asdict(stay) for stay in way]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
