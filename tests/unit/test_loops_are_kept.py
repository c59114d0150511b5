"""What runs for as long as its process is on the one helper (`Background.keep`, `forever`), or counts its failures with `counted`.

A new task that is on neither is noticed here. It is kept, or gets a line in `STARTED` with the reason why it ends by itself.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

SRC: Final = Path(__file__).parents[2] / "src"
WINGS: Final = ("kernel", "parts", "engines", "inspect", "compat")  # `lab` serves no requests
TELLING: Final = re.compile(
    r"\b(?:start|_?spawn|create_task|ensure_future|Thread|counted|forever|keep)\(|\bwhile\b(?s:.*)\bexcept(?::| Exception| BaseException| \()"
)
STARTERS: Final = frozenset({"start", "spawn", "_spawn", "create_task", "ensure_future"})

CALLER: Final = "a starter itself: its callers are in this table"
REQUEST: Final = "ends with one request, call or connection, which reports its failure"
ONCE: Final = "does one thing and ends; its failure is logged, or raised where it is awaited"
SHUTDOWN: Final = "runs at the end of the process"
PROCESS: Final = "ends with a child process or the command, and its failure ends the command"
COUNTED: Final = "a loop with a rule of its own for trying again, which uses `counted`"
FEED: Final = "its failure ends its block, and the loop around that block is kept"

# fmt: off
STARTED: Final = {
    **{
        work: reason
        for reason, works in (
            (PROCESS, """
                cli:look cli:self._keep cli:self._measure_load cli:self._run frontend/parts/group:self._keep
                supervise:_read_lines supervise:newcomer.keep
            """),
            (SHUTDOWN, """
                cli:model.process.stop cli:self._wait runtime:self._shut_down common/utils:graceful_shutdown_with_discovery
                worker:log_exit worker:self._watch
            """),
            (ONCE, """
                cli:self._announce frontend/models:closing frontend/models:self._reach
                frontend/models:self.by_endpoint.pop(endpoint).close frontend/parts/keys:self._write
                frontend/parts/media:self._fetch frontend/parts/residency:self._accept frontend/parts/scaling:self._share
                runtime/calls/request_plane/native:self._subscribe runtime/discovery/etcd:self._open
                runtime/discovery/etcd:self._settle_when_sure supervise:self._start supervise:self._stop
                vllm:self._remove_when_unused worker:_once_serving worker:body worker:self._drain
            """),
            (CALLER, """
                cli:work frontend/models:work picker/grpc:work runtime/base:each runtime/base:make runtime/base:work
            """),
            (REQUEST, """
                engines/callable:pump frontend/http:self._send_data frontend/http:watch_client
                frontend/parts/batches:self._metered frontend/parts/group:self._ask frontend/parts/group:self._connect
                frontend/parts/group:self._gather frontend/parts/inspector:_leaves frontend/parts/media:each picker:self._answer
                router/dispatch:_take_over router/dispatch:first_items router/dispatch:self._read router/dispatch:work
                runtime/base:self._shake runtime/calls/request_plane/native:self._dial runtime/calls/request_plane:request.run
                runtime/calls:_serve runtime/http:cycle.run sglang:vector_of vllm:vector worker:self._call_abort worker:write
            """),
            (COUNTED, """
                frontend/models:self._bring_up frontend/parts/recording:self._run runtime/discovery/etcd:bucket.follow
                runtime/discovery/etcd:self._lease.keep runtime/discovery/etcd:self.records.keep_repaired
                runtime/discovery/file:self._run runtime/discovery/kubernetes:self._own.keep_repaired
                runtime/discovery/kubernetes:self._readiness.follow runtime/discovery/kubernetes:self._resources.follow
            """),
            (FEED, """
                router/kv_events:self._follow_events router/kv_events:self._follow_sources
                router/kv_events:self._ranks.recover_after_silence router/kv_events:work
            """),
        )
        for work in works.split()
    },
    "bindings:self._hold": "a failure is what its caller gets, as in the native system",
    "bindings:work": "its failure ends its block, and with it the task above, which logs it",
    "cli/inspect:watch.run": "a command before a screen: the screen shows what failed",
    "engines/sample:self._publish_loop": "an example for authors: it logs the failure and goes on",
    "frontend/base:run": "loads once, and logs what it could not load",
    "frontend/parts/batches:self._conduct": "one batch; what it does is under `forever`",
    "frontend/parts/group:peers.run": "ends with the parent process, and the member with it",
    "picker/pods:self._pods.follow": "the loop of discovery in Kubernetes, which uses `counted`",
    "picker/pods:_follow": "waits for the task before it, and then is under `forever`",
    "runtime/base:_keep": "a process of its own watches this one; the thread only waits",
    "runtime/discovery/etcd:self._run": "an event loop for what is listed here",
    "runtime/observe:self._watch": "it reads a clock and a stack: there is nothing that fails",
    "sglang:self._run": "the event loop of the engine; its end ends the worker",
    "transformers:hold": "holds a pause until its end; a failure is the answer of the control that waits for it",
    "transformers:self._run": "ends when no input waits; each request of a batch that fails reports it",
    "vllm:_progress": "ends with the start of the engine",
}
# fmt: on
"""What is started without the helper: its folder, the work as it is written there, and why."""

SWALLOWS: Final = {
    "engines/sample:_publish_loop": "an example for authors",
    "frontend/parts/batches:__await__": "raises it where the future is awaited",
}
"""Loops that go on after any exception, and count none: why that is right."""

COUNT: Final = "unit/runtime/test_loops_count.py"
GO_ON: Final = "unit/frontend/test_loops_go_on.py"
SERVE: Final = "unit/cli/test_serve_loops.py"
ETCD: Final = "process/runtime/test_etcd_loops.py"
PICKER: Final = "unit/picker/test_pods.py"
LIMITS: Final = "unit/frontend/test_cluster_limits.py"

# fmt: off
KILLED: Final = {
    "announce {key}": (COUNT, "FileDiscovery.put"), "batch {id}": (GO_ON, "BatchConductor._carry_out"),
    "batch: results to the disk": (GO_ON, "ResultJournal.append"), "batches": (GO_ON, "BatchConductor._sweep"),
    "batches: expired files": (GO_ON, "StoredFiles.remove_expired"), "batches: their counts": (GO_ON, "BatchConductor._show"),
    "batches: those that begin and end": (GO_ON, "BatchConductor._follow"),
    "bindings of other routers": (COUNT, "decode_binding"), "bookings of other routers": (COUNT, "decode_bookings"),
    "canary {self._probed.path}": (COUNT, "Canary._probe"), "channels of other routers": (COUNT, "replica_sync:follow"),
    "channels of {topic}": (COUNT, "zmq:follow"), "etcd: follow {self._name}": (ETCD, "_FollowedBucket._read"),
    "etcd: lease": (ETCD, "keep_alive"), "etcd: own records": (ETCD, "OwnRecords._until_other"),
    "etcd: repair": (ETCD, "leased_keys"), "event plane: nats sender": (COUNT, "connected"),
    "expiry of sessions": (COUNT, "SessionSync._reap"), "file discovery store": (COUNT, "FileStore.poll"),
    "frontend: adapters": (GO_ON, "AdapterKeeper._missing"), "frontend: instances": (GO_ON, "ModelDirectory._take_instances"),
    "frontend: key files": (GO_ON, "KeyStore.refresh"), "frontend: limits of the cluster": (LIMITS, "_Seen.apply"),
    "frontend: load {key.model}": (GO_ON, "ModelLoader._hosts_of"),
    "frontend: loads of {key[0]}": (GO_ON, "_Followers._follow"), "frontend: loads": (GO_ON, "LoadFollower._reconcile"),
    "frontend: model cards": (GO_ON, "ModelDirectory._take_cards"), "frontend: request trace": (COUNT, "_Files.write"),
    "frontend: residency": (GO_ON, "Residency.measured"), "frontend: slices of limits": (LIMITS, "ClusterLimits._tick"),
    "frontend: usage of keys": (GO_ON, "UsageMeter.write"), "frontend: {self._path}": (GO_ON, "LineFile._write"),
    "inspector: figures": (GO_ON, "ClusterTable.kv_use"), "inspector: other frontends": (GO_ON, "OtherFrontends._take"),
    "inspector: workers": (GO_ON, "WorkerLifecycle.look"), "kubernetes: our {KIND}": (COUNT, "KubernetesApi.apply"),
    "kubernetes: {self.path}": (COUNT, "KubernetesApi.watch"), "KV events of the workers": (COUNT, "split_events"),
    "kv events {endpoint}": (GO_ON, "KvEventFeed.__aenter__"), "kv recovery of {endpoint.path}": (COUNT, "KvRecovery.begin"),
    "load reports of the router": (COUNT, "RouterLoadReports.report_changes"),
    "load reports of the workers": (COUNT, "BusyWorkers.keep_only"),
    "model cards of the workers": (COUNT, "RoutedEndpoint._take_card"), "readiness": (SERVE, "Announcement._announce"),
    "pod {worker.record.address}": (PICKER, "PodWorker._look"), "the file of pods": (PICKER, "PodsOfFile._changed"),
    "reload": (SERVE, "source_times"), "replica sync {endpoint}": (GO_ON, "ReplicaSync.__aenter__"),
    "residents: memory": (SERVE, "Residents._measure"), "rolling restart": (SERVE, "RollingRestart._replace_all"),
    "scaling": (SERVE, "Scaling._look"), "sessions {endpoint}": (GO_ON, "SessionSync.__aenter__"),
    "watch {self._endpoint.path}": (COUNT, "Client._apply"),
}
# fmt: on
"""What is kept, or counts its own failures, by its name: the test that lets it fail, and the step that fails there."""


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the wings, by its path below `dynamo`."""
    found = dict[str, ast.Module]()
    for wing in WINGS:
        root = SRC / wing / "dynamo"
        for path in root.rglob("*.py"):
            name = str(path.relative_to(root))
            assert name not in found or path.name == "__init__.py", f"two modules {name}"
            text = path.read_text(encoding="utf-8")
            if TELLING.search(text):  # a third of them: to read all takes seconds
                found[name] = ast.parse(text)
    return found


@cache
def nodes() -> dict[str, list[ast.AST]]:
    """Every call, function and context of those modules: to walk through all that they consist of takes a second."""
    kinds = (ast.Call, ast.FunctionDef, ast.AsyncFunctionDef, ast.withitem)
    return {path: [node for node in ast.walk(module) if isinstance(node, kinds)] for path, module in modules().items()}


def folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def work_of(call: ast.Call) -> str | None:
    """The work that a call starts beside its caller, as it is written there; None: it starts none, or keeps it."""
    name = called(call)
    if name == "Thread":
        return next((ast.unparse(each.value) for each in call.keywords if each.arg == "target"), None)
    if name not in STARTERS or not call.args or (name in ("start", "spawn", "_spawn") and not is_named(call)):
        return None
    work = call.args[0]
    text = ast.unparse(work.func if isinstance(work, ast.Call) else work)
    return None if text == "forever" else text


def called(call: ast.Call) -> str:
    """The last part of the name of what is called; "" where it has none."""
    func = call.func
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def is_named(call: ast.Call) -> bool:
    """Whether a call of a method that other objects have, too, is one of `Background.start`: work, then its name."""
    return len(call.args) == 2 and (
        isinstance(call.args[1], ast.JoinedStr)
        or (isinstance(call.args[1], ast.Name) and call.args[1].id == "name")
        or (isinstance(call.args[1], ast.Constant) and isinstance(call.args[1].value, str))
    )


def started() -> Iterator[str]:
    for path, found in nodes().items():
        for node in found:
            if isinstance(node, ast.Call) and (work := work_of(node)) is not None:
                yield f"{folder_of(path)}:{work}"


def swallowing() -> Iterator[str]:
    """Loops with a handler of any exception that neither ends them nor counts it."""
    for path, found in nodes().items():
        for function in found:
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            loops = [node for node in ast.walk(function) if isinstance(node, ast.While)]
            handlers = {node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.ExceptHandler)}
            if any(takes_all(handler) and not ends_or_counts(handler) for handler in handlers):
                yield f"{folder_of(path)}:{function.name}"


def takes_all(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or ast.unparse(handler.type) in ("Exception", "BaseException")


def ends_or_counts(handler: ast.ExceptHandler) -> bool:
    return any(
        isinstance(node, ast.Raise | ast.Return | ast.Break)
        or (isinstance(node, ast.Call) and called(node) == "failed")
        for node in ast.walk(handler)
    )


def test_what_is_started_without_the_helper_is_listed_with_its_reason() -> None:
    found = set(started())
    assert sorted(found - STARTED.keys()) == [], "use Background.keep, or list it with the reason why it ends"
    assert sorted(STARTED.keys() - found) == [], "listed, and started no more"


def test_a_loop_with_a_rule_of_its_own_counts_its_failures() -> None:
    own = {each.partition(":")[0] for each, reason in STARTED.items() if reason is COUNTED}
    counting = {folder_of(path) for path, found in nodes().items() for node in found if is_counted(node)}
    assert counting - {"runtime/base"} == own


def is_counted(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.withitem)
        and isinstance(node.context_expr, ast.Call)
        and called(node.context_expr) == "counted"
    )


def test_a_loop_that_goes_on_after_any_exception_counts_it() -> None:
    assert set(swallowing()) == SWALLOWS.keys()


def kept() -> Iterator[str]:
    """Yield the name of each loop on the helper, as it is written there; but for the helper's own."""
    for path, found in nodes().items():
        if not path.startswith("runtime/base/"):
            names = (name_of(node) for node in found if isinstance(node, ast.Call))
            yield from (ast.unparse(name).removeprefix("f")[1:-1] for name in names if name is not None)


def name_of(call: ast.Call) -> ast.expr | None:
    """Return the name that a call gives to a loop; None: it keeps none."""
    match call.func:
        case ast.Name("counted"):
            return call.args[0]
        case ast.Name("forever"):
            return call.args[1]
        case ast.Attribute(attr="keep") if len(call.args) in (2, 3) and isinstance(
            call.args[1], ast.Constant | ast.JoinedStr
        ):
            return call.args[1]
    return None


def test_a_test_kills_each_loop() -> None:
    found = set(kept())
    assert found - KILLED.keys() == set(), "let it fail in a test, and list that here"
    assert KILLED.keys() - found == set(), "listed, and kept no more"
    tests = {name: (SRC.parent / "tests" / name).read_text(encoding="utf-8") for name, _ in KILLED.values()}
    assert [loop for loop, (name, step) in KILLED.items() if step not in tests[name]] == []


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
