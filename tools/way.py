"""The way of one chat request from the listener to the connection of its worker, traced: `python tools/way.py`.

A real frontend and a real worker run in this process, over TCP on the loopback. The second of two equal requests is traced,
from the first call in the task that serves it to the moment at which it was handed to the connection. What counts:

- A **stop** is a call of a function of ours that does work: at least `WORK_STATEMENTS` of its statements run. A function
  that runs fewer is a helper of its caller, and so is every constructor, lambda and comprehension.
- A **stay** is a run of stops in one module. Only calls are stops: a return to the caller is none.
- A **climb** is a stay in a room that stands higher in the architecture (`ROOMS`) than the room of the stay before.

`--calls` prints every call with the statements of it that ran, so that another rule can be tried.
"""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCE: Final = ROOT / "src" / "dynamo"

WORK_STATEMENTS: Final = 8
ROOMS: Final = ("frontend", "router", "placement", "runtime", "text", "kv", "protocol", "errors")
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

    @property
    def is_work(self) -> bool:
        """Whether it is more than a helper of its caller."""
        name = self.function.rpartition(".")[2]
        return name != "__init__" and not name.startswith("<") and self.statements >= WORK_STATEMENTS


class Tracer:
    """Notes the calls of one task, in order, until the first call of one function."""

    def __init__(self, task: asyncio.Task[Any], last: CodeType) -> None:
        self._task, self._last = task, last
        self._by_frame: dict[FrameType, Call] = {}  # holds the frames, so that none is taken for another one
        self.is_over = False

    @property
    def calls(self) -> list[Call]:
        return list(self._by_frame.values())

    def __call__(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if self.is_over or not code.co_filename.startswith(str(SOURCE)) or asyncio.current_task() is not self._task:
            return None
        if code is self._last:
            self.is_over = True
            return None
        call = self._by_frame.get(frame)
        if call is None:  # else a coroutine goes on
            module = code.co_filename.removeprefix(f"{SOURCE}/").removesuffix(".py")
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
    for node in ast.walk(ast.parse((SOURCE / f"{module}.py").read_text())):  # outer statements before the inner ones
        if isinstance(node, ast.stmt):
            first.update(dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), node.lineno))
    return first


async def trace() -> list[Call]:
    """Return every call of ours in the task of one request, in order."""
    from dynamo.frontend.app import Frontend
    from dynamo.frontend.http.offload import InlineOffload
    from dynamo.frontend.pipeline.stage_timer import StageTimer
    from dynamo.frontend.settings import FrontendSettings
    from dynamo.runtime.distributed import DistributedRuntime
    from dynamo.worker.registration import build_card

    async def answer(body: Any, context: Any, sink: Any) -> None:
        sink.send_tokens([104, 105], finish_reason="stop")

    loop = asyncio.get_running_loop()
    worker = DistributedRuntime(loop, "mem", "tcp")
    caller = DistributedRuntime(loop, "mem", "tcp")
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
    with tempfile.TemporaryDirectory() as cache:
        settings = FrontendSettings(model_cache_dir=Path(cache))
        async with Frontend(settings, caller, offload=InlineOffload()) as frontend:
            endpoint = worker.endpoint("ns.backend.generate")
            served = await endpoint.start_serving(answer)
            await endpoint.publish_model(build_card("m").to_json())
            await frontend.models.wait_for(lambda: frontend.models.lookup("m") is not None)
            await loop.create_task(request(frontend.asgi, body))  # connects
            task = loop.create_task(request(frontend.asgi, body))
            tracer = Tracer(task, StageTimer.dispatched.__code__)
            sys.settrace(tracer)
            try:
                await task
            finally:
                sys.settrace(None)
            del served
        await caller.aclose()
        await worker.aclose()
    return tracer.calls


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


def stays(calls: list[Call]) -> list[Stay]:
    """Return the stays of a way."""
    found: list[tuple[str, list[str]]] = []
    for call in calls:
        if not call.is_work:
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
    calls = asyncio.run(trace())
    if "--calls" in sys.argv:
        for call in calls:
            print(f"{call.statements:4} {call.module}: {call.function}", file=sys.stderr)
    print(json.dumps([asdict(stay) for stay in stays(calls)]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
