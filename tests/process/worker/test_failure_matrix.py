"""Every way a worker can end, over real processes: exit code, clean-ups, what the log says, what discovery keeps."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import DynamoException
from dynamo.runtime.base.settings import RuntimeSettings
from dynamo.runtime.calls.context import Context
from dynamo.runtime.distributed import DistributedRuntime
from support.patience import PATIENCE_SECONDS

ENGINE = Path(__file__).parents[2] / "support" / "failing_engine.py"
AT_ONCE = 3  # processes at a time: two cores are shared by many tests

FAST = {
    "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
    "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "30",
    "HF_HUB_OFFLINE": "1",
}
ALL_HOOKS = [
    "from_args",
    "start",
    "register_prometheus",
    "component_metrics_dp_ranks",
    "kv_event_sources",
    "on_endpoint_ready",
    "supported_controls",
    "supported_updates",
    "health_check_payload",
    "drain",
    "cleanup",
]


class Process:
    """One worker process under a plan."""

    def __init__(self, home: Path, plan: dict[str, Any], env: dict[str, str], argv: list[str]) -> None:
        home.mkdir()
        self.outcome: str | None = None  # of the stream that was read meanwhile
        self.journal = home / "journal"
        self.store = home / "store"
        self.stderr = home / "stderr"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DYN_", "FAILING_"))}
        own = {"DYN_FILE_KV": str(self.store), "FAILING_ENGINE": json.dumps(plan | {"journal": str(self.journal)})}
        with self.stderr.open("w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, str(ENGINE), *argv],
                env=inherited | FAST | own | env,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )

    @property
    def log(self) -> str:
        return self.stderr.read_text()

    @property
    def calls(self) -> list[str]:
        return self.journal.read_text().splitlines() if self.journal.exists() else []

    @property
    def records(self) -> list[str]:
        """What discovery holds."""
        return [path.name for path in self.store.glob("v1/*/*") if not path.name.startswith(".")]

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, until: Callable[[], bool], what: str) -> None:
        ends_at = time.monotonic() + PATIENCE_SECONDS
        while not until():
            if self.ended or time.monotonic() > ends_at:
                raise AssertionError(f"waited in vain for {what}; calls {self.calls}, log:\n{self.log}")
            time.sleep(0.02)

    def wait_log(self, text: str) -> None:
        self.wait(lambda: text in self.log, text)

    def wait_call(self, hook: str) -> None:
        self.wait(lambda: hook in self.calls, hook)

    def wait_serving(self) -> None:
        self.wait(lambda: any("instances" in str(path) for path in self.store.glob("v1/instances/*")), "the instance")

    def signal(self, number: int = signal.SIGTERM) -> None:
        self._process.send_signal(number)

    def exit_code(self) -> int:
        return self._process.wait(PATIENCE_SECONDS)

    def close(self) -> None:
        if not self.ended:
            self._process.kill()
            self._process.wait()


def ends_by_itself(process: Process) -> None:
    pass


def terminate(process: Process) -> None:
    process.wait_serving()
    process.signal()


def interrupt(process: Process) -> None:
    process.wait_serving()
    process.signal(signal.SIGINT)


def terminate_during_start(process: Process) -> None:
    process.wait_call("start...")
    process.signal()


def terminate_during_blocking_start(process: Process) -> None:
    process.wait_call("start")
    process.signal()


def terminate_during_setup(process: Process) -> None:
    process.wait_call("register_prometheus...")
    process.signal()


def terminate_three_times(process: Process) -> None:
    process.wait_serving()
    process.signal()
    process.wait_log("Grace period")
    process.signal()
    process.signal(signal.SIGINT)


def terminate_under_a_stream(process: Process) -> None:
    """The stream that was running when the signal came is read to its end, which is written into the journal."""

    def halfway() -> None:
        process.signal()
        process.wait_log("Endpoint unregistered from discovery")

    process.wait_serving()
    process.outcome = asyncio.run(read_stream(process, tokens=12, at=(4, halfway)))


def terminate_and_cut_a_stream(process: Process) -> None:
    process.wait_serving()
    process.outcome = asyncio.run(read_stream(process, tokens=100_000, at=(4, process.signal)))


async def read_stream(process: Process, *, tokens: int, at: tuple[int, Callable[[], None]]) -> str:
    """ "N tokens" and how the stream ended; the second part of `at` is called after that many tokens."""
    settings = RuntimeSettings(discovery_backend="file", file_root=process.store)
    count, (when, then) = 0, at
    async with DistributedRuntime(asyncio.get_running_loop(), None, None, settings=settings) as runtime:
        client = await runtime.endpoint("ns.backend.generate").client("round-robin")
        await client.wait_for_instances()
        context = Context()
        body = {"token_ids": [1], "stop_conditions": {"max_tokens": tokens}}
        stream = await client.open(client.pick(context), body, context)
        try:
            while batch := await asyncio.wait_for(stream.next_batch(), PATIENCE_SECONDS):
                before, count = count, count + sum(len(item.token_ids) for item in batch)
                if before < when <= count:
                    await asyncio.to_thread(then)
        except DynamoException as error:
            return f"some tokens, {type(error).__name__}" if count else f"no tokens, {type(error).__name__}"
        finally:
            stream.close()
    return f"{count} tokens, clean"


@dataclass(frozen=True)
class Row:
    """One way to end, and what must be true afterwards."""

    name: str
    exit_code: int
    fail: dict[str, str] = field(default_factory=dict)
    give: dict[str, Any] = field(default_factory=dict)
    sleep: dict[str, float] = field(default_factory=dict)
    block: dict[str, float] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    argv: tuple[str, ...] = ()
    act: Callable[[Process], None] = ends_by_itself
    cleanups: int = 1
    drains: int = 0
    starts: int = 1
    says: tuple[str, ...] = ()
    never_says: tuple[str, ...] = ()
    served: bool = False
    calls: list[str] | None = None
    seconds: tuple[float, float] | None = None  # from the last signal to the end
    pace: float = 0.0  # seconds between the tokens of a stream
    linger: float | None = None  # seconds a job of the engine's goes on
    stream: str | None = None  # what its reader saw
    keeps_records: bool = False  # a process that was cut leaves its records to the lease


def start_fails(name: str, hook: str, **more: Any) -> Row:
    return Row(name, 1, fail={hook: "RuntimeError: no luck"}, says=("Unknown: RuntimeError: no luck",), **more)


ROWS = [
    # -- before start() was entered: nothing is cleaned up
    Row(
        "from_args raises",
        1,
        fail={"from_args": "RuntimeError: no luck"},
        starts=0,
        cleanups=0,
        says=("Traceback", "RuntimeError: no luck"),
    ),
    Row(
        "from_args raises one of ours",
        2,
        fail={"from_args": "InvalidArgument: no luck"},
        starts=0,
        cleanups=0,
        says=("InvalidArgument: no luck",),
        never_says=("Traceback",),
    ),
    Row("a flag is unknown", 2, argv=("--no-such-flag",), starts=0, cleanups=0, says=("--no-such-flag",)),
    Row(
        "the configuration does not fit the engine",
        2,
        config={"model_input": "Text"},
        starts=0,
        cleanups=0,
        says=("InvalidArgument: model_input must be Tokens",),
        never_says=("Traceback",),
    ),
    Row(
        "a decode worker routes to an encoder",
        2,
        config={"disaggregation_mode": "decode", "route_to_encoder": True},
        starts=0,
        cleanups=0,
        says=("InvalidArgument: route_to_encoder",),
    ),
    Row(
        "discovery cannot be reached",
        1,
        env={"DYN_FILE_KV": "/dev/null/store"},
        starts=0,
        cleanups=0,
        says=("CannotConnect: ",),
        never_says=("Traceback",),
    ),
    # -- start() raises
    start_fails("start raises", "start"),
    Row(
        "start raises one of ours",
        1,
        fail={"start": "EngineShutdown: out of memory"},
        says=("EngineShutdown: out of memory",),
    ),
    Row(
        "start and cleanup raise",
        1,
        fail={"start": "RuntimeError: the first", "cleanup": "RuntimeError: the second"},
        says=("Unknown: RuntimeError: the first", "engine cleanup failed"),
    ),
    Row(
        "start returns rubbish",
        2,
        engine={"context_length": "x"},
        says=("InvalidArgument: EngineConfig.context_length",),
    ),
    # -- the set-up raises
    start_fails("register_prometheus raises", "register_prometheus"),
    start_fails("component_metrics_dp_ranks raises", "component_metrics_dp_ranks"),
    start_fails("kv_event_sources raises", "kv_event_sources"),
    Row(
        "kv_event_sources returns rubbish",
        1,
        give={"kv_event_sources": [1]},
        engine={"kv_cache_block_size": 16},
        says=("kv_event_sources",),
    ),
    start_fails(
        "attach_snapshot_publisher raises", "attach_snapshot_publisher", give={"component_metrics_dp_ranks": [0]}
    ),
    start_fails("on_endpoint_ready raises", "on_endpoint_ready"),
    start_fails("supported_controls raises", "supported_controls"),
    start_fails("supported_updates raises", "supported_updates"),
    Row(
        "a reserved update",
        2,
        give={"supported_updates": ["model_taints"]},
        says=("InvalidArgument: supported_updates(): 'model_taints' is reserved",),
    ),
    Row(
        "bad endpoint types",
        2,
        config={"endpoint_types": "chat,nonsense"},
        starts=0,
        cleanups=0,
        says=("InvalidArgument: unknown endpoint type 'nonsense'",),
    ),
    Row(
        "the model's path does not exist",
        2,
        config={"model_name": "/nowhere/at/all"},
        says=("InvalidArgument: model path '/nowhere/at/all' does not exist",),
    ),
    # -- serving, and a signal
    Row("SIGTERM", 0, act=terminate, drains=1, served=True, calls=ALL_HOOKS, says=("SIGTERM received",)),
    Row("SIGINT", 0, act=interrupt, drains=1, served=True, calls=ALL_HOOKS, says=("SIGINT received",)),
    Row(
        "a name that leads nowhere",
        0,
        config={"model_name": "test-model-that-nobody-cached"},
        act=terminate,
        drains=1,
        served=True,
        says=("is a name only",),
    ),
    Row(
        "health_check_payload raises",
        0,
        fail={"health_check_payload": "RuntimeError: no luck"},
        act=terminate,
        drains=1,
        served=True,
        says=("serving without a canary",),
    ),
    Row(
        "drain raises",
        0,
        fail={"drain": "RuntimeError: no luck"},
        act=terminate,
        drains=1,
        served=True,
        says=("engine drain failed", "Engine cleanup complete"),
    ),
    Row(
        "is_quiescent raises on a prefill worker",
        0,
        fail={"is_quiescent": "RuntimeError: no luck"},
        config={"disaggregation_mode": "prefill"},
        env={"DYN_PREFILL_DRAIN_TIMEOUT_S": "0.2"},
        act=terminate,
        drains=1,
        served=True,
        says=("drain: timed out at", "Engine cleanup complete"),
    ),
    Row(
        "cleanup raises",
        0,
        fail={"cleanup": "RuntimeError: no luck"},
        act=terminate,
        drains=1,
        served=True,
        says=("engine cleanup failed",),
        never_says=("Engine cleanup complete",),
    ),
    Row(
        "more signals during the grace period",
        0,
        env={"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0.7"},
        act=terminate_three_times,
        drains=1,
        served=True,
        says=("Grace period 0.70s before drain",),
        never_says=("SIGINT received",),
    ),
    Row(
        "a signal during start",
        0,
        sleep={"start": 0.5},
        act=terminate_during_start,
        drains=1,
        calls=["from_args", "start...", "start", "drain", "cleanup"],
        never_says=("Serving failing",),
    ),
    Row(
        "a signal during a start that fails",
        1,
        sleep={"start": 0.5},
        fail={"start": "RuntimeError: no luck"},
        act=terminate_during_start,
        says=("Unknown: RuntimeError: no luck",),
    ),
    Row(
        "a signal during the set-up",
        0,
        sleep={"register_prometheus": 0.5},
        act=terminate_during_setup,
        drains=1,
        never_says=("Serving failing",),
    ),
    # -- serving a stream, and a signal
    Row(
        "a stream is running",
        0,
        pace=0.05,
        act=terminate_under_a_stream,
        drains=1,
        served=True,
        stream="12 tokens, clean",
        calls=[*ALL_HOOKS[:-2], "generate", "generated", *ALL_HOOKS[-2:]],
        says=("Waiting for 1 streams in flight",),
        never_says=("were cut",),
    ),
    Row(
        "a stream outlives the wait",
        0,
        pace=0.01,
        env={"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "6"},
        act=terminate_and_cut_a_stream,
        drains=1,
        served=True,
        stream="some tokens, EngineShutdown",
        says=("1 streams were still running and were cut", "Engine cleanup complete"),
    ),
    # -- the deadline
    Row(
        "cleanup hangs",
        143,
        sleep={"cleanup": 600.0},
        env={"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "1"},
        act=terminate,
        cleanups=0,
        drains=1,
        served=True,
        says=("Graceful shutdown exceeded 1s; force-exiting with code 911.",),
        seconds=(0.9, 6.0),
        keeps_records=True,
    ),
    Row(
        "cleanup blocks the loop",
        143,
        block={"cleanup": 600.0},
        env={"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "1"},
        act=terminate,
        drains=1,
        served=True,
        says=("code 911",),
        keeps_records=True,
    ),
    Row(
        "a job of the engine outlives its clean-up",
        143,
        linger=600.0,
        env={"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "1"},
        act=terminate,
        drains=1,
        served=True,
        says=("Engine cleanup complete", "code 911"),
    ),
    Row(
        "start hangs beyond the time of the end",
        1,
        sleep={"start": 600.0},
        env={"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "4"},
        act=terminate_during_start,
        calls=["from_args", "start...", "cleanup"],
        starts=0,
        says=("EngineShutdown: start() had not returned 2s after the request to stop, and was cancelled",),
        never_says=("code 911",),
    ),
    Row(
        "start blocks the loop beyond the deadline",
        143,
        block={"start": 600.0},
        env={"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "1"},
        act=terminate_during_blocking_start,
        cleanups=0,
        says=("code 911",),
    ),
    Row(
        "the grace is longer than the timeout",
        0,
        env={"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "1", "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1.6"},
        act=terminate,
        drains=1,
        served=True,
        never_says=("code 911",),
        seconds=(1.5, 6.0),
    ),
]


@dataclass
class Outcome:
    process: Process
    exit_code: int
    seconds: float


def play(row: Row, home: Path) -> Outcome:
    plan = {
        "fail": row.fail,
        "give": row.give,
        "sleep": row.sleep,
        "block": row.block,
        "config": row.config,
        "engine": row.engine,
        "pace": row.pace,
        "linger": row.linger,
    }
    process = Process(home, plan, row.env, list(row.argv))
    try:
        row.act(process)
        began = time.monotonic()
        exit_code = process.exit_code()
        return Outcome(process, exit_code, time.monotonic() - began)
    finally:
        process.close()


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[str, Future[Outcome]]]:
    """All selected rows, a few at a time, so that their waiting overlaps."""
    home = tmp_path_factory.mktemp("workers")
    items: list[Any] = [item for item in request.session.items if _row_of(item) is not None]
    selected = {item.callspec.params["row"].name for item in items}
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="row") as pool:
        yield {
            row.name: pool.submit(play, row, home / f"row-{number}")
            for number, row in enumerate(ROWS)
            if row.name in selected
        }
        pool.shutdown(cancel_futures=True)


def _row_of(item: pytest.Item) -> Row | None:
    found = getattr(item, "callspec", None)
    row = found.params.get("row") if found is not None else None
    return row if isinstance(row, Row) else None


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_worker_ends_as_the_matrix_says(row: Row, outcomes: dict[str, Future[Outcome]]) -> None:
    outcome = outcomes[row.name].result()
    process, log = outcome.process, outcome.process.log
    assert outcome.exit_code == row.exit_code, log
    calls = process.calls
    assert (calls.count("start"), calls.count("drain"), calls.count("cleanup")) == (
        row.starts,
        row.drains,
        row.cleanups,
    ), calls
    if row.calls is not None:
        assert calls == row.calls
    for text in row.says:
        assert text in log
        if text.startswith("InvalidArgument: "):
            assert log.count(text.removeprefix("InvalidArgument: ")) == 1, log  # one sentence, once
    for text in row.never_says:
        assert text not in log
    assert ("Serving failing on ns.backend.generate" in log) == row.served
    if row.drains and row.served:
        assert "Endpoint unregistered from discovery" in log
    if row.exit_code == 1 and "never" not in row.name and not row.fail.get("from_args", "").startswith("Runtime"):
        last = log.strip().splitlines()[-1]
        assert last.split(":")[0].isidentifier(), f"the last line is for the operator: {last!r}"
    assert process.outcome == row.stream
    if row.seconds is not None:
        assert row.seconds[0] <= outcome.seconds <= row.seconds[1]
    if not row.keeps_records:
        assert process.records == []
