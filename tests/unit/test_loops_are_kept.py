"""What runs for as long as its process is on the one helper (`Background.keep`, `forever`), or counts its failures with `counted`.

A new task that is on neither is noticed here. It is kept, or gets a line in `STARTED` with the reason why it ends by itself.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

SRC: Final = Path(__file__).parents[2] / "src"
WINGS: Final = ("kernel", "parts", "engines", "inspect", "compat")  # `lab` serves no requests
STARTERS: Final = frozenset({"start", "spawn", "_spawn", "create_task", "ensure_future"})

CALLER: Final = "a starter itself: its callers are in this table"
REQUEST: Final = "ends with one request, call or connection, which reports its failure"
ONCE: Final = "does one thing and ends; its failure is logged, or raised where it is awaited"
SHUTDOWN: Final = "runs at the end of the process"
PROCESS: Final = "ends with a child process or the command, and its failure ends the command"
FEED: Final = "its failure ends its block, and the loop around that block is kept"

STARTED: Final = {
    "cli/child.py:self._wait": SHUTDOWN,
    "cli/hangup.py:look": PROCESS,
    "cli/in_process.py:self._announce": ONCE,
    "cli/in_process.py:self._run": PROCESS,
    "cli/inspect/app.py:watch.run": "a command before a screen: the screen shows what failed",
    "cli/local.py:self._keep": PROCESS,
    "cli/local_processes.py:work": CALLER,
    "bindings/opened.py:self._hold": "a failure is what its caller gets, as in the native system",
    "engines/callable/engine.py:pump": REQUEST,
    "engines/sample/engine.py:self._publish_loop": "an example for authors: it logs the failure and goes on",
    "frontend/http/event_stream.py:self._comment": REQUEST,
    "frontend/http/inference_route.py:watch_client": REQUEST,
    "frontend/models/encode_pools.py:closing": ONCE,
    "frontend/models/endpoint_clients.py:self._reach": ONCE,
    "frontend/models/endpoint_clients.py:self.by_endpoint.pop(endpoint).close": ONCE,
    "frontend/models/endpoint_clients.py:work": CALLER,
    "frontend/models/loader.py:self._bring_up": "frontend/models/loader.py",
    "frontend/models/prefill_pools.py:closing": ONCE,
    "frontend/parts/batches/conductor.py:self._conduct": "one batch; what it does is under `forever`",
    "frontend/parts/batches/run.py:self._metered": REQUEST,
    "frontend/parts/group/member.py:peers.run": "ends with the parent process, and the member with it",
    "frontend/parts/group/member.py:self._connect": REQUEST,
    "frontend/parts/group/rounds.py:self._ask": REQUEST,
    "frontend/parts/group/rounds.py:self._gather": REQUEST,
    "frontend/parts/group/supervisor.py:self._keep": PROCESS,
    "frontend/parts/inspector/routes.py:_leaves": REQUEST,
    "frontend/parts/keys/usage_store.py:self._write": ONCE,
    "frontend/parts/media/fetcher.py:self._fetch": ONCE,
    "frontend/parts/media/intake.py:each": REQUEST,
    "frontend/parts/recording/trace_writer.py:self._run": "frontend/parts/recording/trace_writer.py",
    "frontend/parts/scaling/signals.py:self._share": ONCE,
    "router/dispatch/encode.py:_take_over": REQUEST,
    "router/dispatch/fan_out.py:self._read": REQUEST,
    "router/dispatch/handoff.py:first_items": REQUEST,
    "router/dispatch/prefill.py:work": REQUEST,
    "router/kv_events/feed.py:self._follow_events": FEED,
    "router/kv_events/feed.py:self._follow_sources": FEED,
    "router/kv_events/feed.py:self._ranks.recover_after_silence": FEED,
    "router/kv_events/feed.py:work": FEED,
    "runtime/base/process_guard.py:_keep": "a process of its own watches this one; the thread only waits",
    "runtime/base/tasks.py:each": CALLER,
    "runtime/base/tasks.py:make": CALLER,
    "runtime/base/tasks.py:work": CALLER,
    "runtime/base/tls_gate.py:self._shake": REQUEST,
    "runtime/calls/health.py:_serve": REQUEST,
    "runtime/calls/request_plane/core.py:request.run": REQUEST,
    "runtime/calls/request_plane/native/nats_server.py:self._subscribe": ONCE,
    "runtime/calls/request_plane/native/server.py:self._dial": REQUEST,
    "runtime/discovery/etcd/discovery.py:self._lease.keep": "runtime/discovery/etcd/lease.py",
    "runtime/discovery/etcd/discovery.py:self._open": ONCE,
    "runtime/discovery/etcd/discovery.py:self._run": "an event loop for what is listed here",
    "runtime/discovery/etcd/discovery.py:self.records.keep_repaired": "runtime/discovery/etcd/records.py",
    "runtime/discovery/etcd/views.py:bucket.follow": "runtime/discovery/etcd/views.py",
    "runtime/discovery/etcd/views.py:self._settle_when_sure": ONCE,
    "runtime/discovery/file/discovery.py:self._run": "runtime/discovery/file/discovery.py",
    "runtime/discovery/kubernetes/discovery.py:self._own.keep_repaired": "runtime/discovery/kubernetes/own.py",
    "runtime/discovery/kubernetes/discovery.py:self._readiness.follow": "runtime/discovery/kubernetes/collection.py",
    "runtime/discovery/kubernetes/discovery.py:self._resources.follow": "runtime/discovery/kubernetes/collection.py",
    "runtime/distributed.py:self._shut_down": SHUTDOWN,
    "runtime/http/service.py:cycle.run": REQUEST,
    "runtime/observe/loop_watchdog.py:self._watch": "it reads a clock and a stack: there is nothing that fails",
    "sglang/engine.py:vector_of": REQUEST,
    "sglang/engine_thread.py:self._run": "the event loop of the engine; its end ends the worker",
    "supervise/newcomer.py:newcomer.keep": PROCESS,
    "supervise/process.py:_read_lines": PROCESS,
    "supervise/scaling.py:self._start": ONCE,
    "supervise/scaling.py:self._stop": ONCE,
    "transformers/vectors.py:self._run": "ends when no input waits; each request of a batch that fails reports it",
    "vllm/adapters.py:self._remove_when_unused": ONCE,
    "vllm/pooling.py:vector": REQUEST,
    "vllm/starting.py:_progress": "ends with the start of the engine",
    "worker/cancellation.py:self._call_abort": REQUEST,
    "worker/controls.py:write": REQUEST,
    "worker/graceful_shutdown.py:graceful_shutdown_with_discovery": SHUTDOWN,
    "worker/hub.py:body": ONCE,
    "worker/run.py:_once_serving": ONCE,
    "worker/signals.py:log_exit": SHUTDOWN,
    "worker/signals.py:self._watch": SHUTDOWN,
}
"""What is started without the helper: the work, as it is written there, and why. A path: the loop in it uses `counted`."""

SWALLOWS: Final = {
    "engines/sample/engine.py:_publish_loop": "an example for authors",
    "frontend/parts/batches/line_pace.py:__await__": "raises it where the future is awaited",
}
"""Loops that go on after any exception, and count none: why that is right."""


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the wings, by its path below `dynamo`."""
    found = dict[str, ast.Module]()
    for wing in WINGS:
        root = SRC / wing / "dynamo"
        for path in root.rglob("*.py"):
            name = str(path.relative_to(root))
            assert name not in found or path.name == "__init__.py", f"two modules {name}"
            found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def work_of(call: ast.Call) -> str | None:
    """The work that a call starts beside its caller, as it is written there; None: it starts none, or keeps it."""
    name = ast.unparse(call.func).rpartition(".")[2]
    if name == "Thread":
        return next((ast.unparse(each.value) for each in call.keywords if each.arg == "target"), None)
    if name not in STARTERS or not call.args or (name in ("start", "spawn", "_spawn") and not is_named(call)):
        return None
    work = call.args[0]
    text = ast.unparse(work.func if isinstance(work, ast.Call) else work)
    return None if text == "forever" else text


def is_named(call: ast.Call) -> bool:
    """Whether a call of a method that other objects have, too, is one of `Background.start`: work, then its name."""
    return len(call.args) == 2 and (
        isinstance(call.args[1], ast.JoinedStr)
        or (isinstance(call.args[1], ast.Name) and call.args[1].id == "name")
        or (isinstance(call.args[1], ast.Constant) and isinstance(call.args[1].value, str))
    )


def started() -> Iterator[str]:
    for path, module in modules().items():
        for node in ast.walk(module):
            if isinstance(node, ast.Call) and (work := work_of(node)) is not None:
                yield f"{path}:{work}"


def swallowing() -> Iterator[str]:
    """Loops with a handler of any exception that neither ends them nor counts it."""
    for path, module in modules().items():
        for function in ast.walk(module):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            loops = [node for node in ast.walk(function) if isinstance(node, ast.While)]
            handlers = {node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.ExceptHandler)}
            if any(takes_all(handler) and not ends_or_counts(handler) for handler in handlers):
                yield f"{path}:{function.name}"


def takes_all(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or ast.unparse(handler.type) in ("Exception", "BaseException")


def ends_or_counts(handler: ast.ExceptHandler) -> bool:
    return any(
        isinstance(node, ast.Raise | ast.Return | ast.Break)
        or (isinstance(node, ast.Call) and ast.unparse(node.func) == "failed")
        for node in ast.walk(handler)
    )


def test_what_is_started_without_the_helper_is_listed_with_its_reason() -> None:
    found = set(started())
    assert sorted(found - STARTED.keys()) == [], "use Background.keep, or list it with the reason why it ends"
    assert sorted(STARTED.keys() - found) == [], "listed, and started no more"


def test_a_loop_with_a_rule_of_its_own_counts_its_failures() -> None:
    own = {reason for reason in STARTED.values() if reason.endswith(".py")}
    assert len(own) == 8
    for path in own:
        assert any(ast.unparse(node).startswith("counted(") for node in ast.walk(modules()[path])), path


def test_a_loop_that_goes_on_after_any_exception_counts_it() -> None:
    assert set(swallowing()) == SWALLOWS.keys()


def test_a_new_loop_is_noticed() -> None:
    source = """
class Follower:
    def start(self) -> None:
        self._work.start(self._follow(), "follow")
        self._work.keep(self._look, "look")
        group.create_task(forever(self._run, "run"), name="run")
        Thread(target=self._read).start()
"""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    assert {work for call in calls if (work := work_of(call)) is not None} == {"self._follow", "self._read"}
