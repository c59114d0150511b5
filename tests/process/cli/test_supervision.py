from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.cli.console import Console
from dynamo.cli.local_processes import programs
from dynamo.cli.readiness import Address, ready_text
from dynamo.cli.serve import read_options
from dynamo.cli.usage import UsageError
from dynamo.supervise.backoff import RestartPolicy
from dynamo.supervise.lines import CUT, LineSplitter
from dynamo.supervise.process import GaveUp, Program, SupervisedProcess, exit_words
from support.cases import each_case
from support.patience import PATIENCE_SECONDS

# -- lines --------------------------------------------------------------------------------------------------------------


@given(st.lists(st.text(alphabet="ab \u00e9", max_size=6)), st.integers(1, 5))
def test_lines_survive_any_split(lines: list[str], step: int) -> None:
    wire = "".join(f"{line}\n" for line in lines).encode()
    splitter = LineSplitter(limit=64)
    found = [line for at in range(0, len(wire), step) for line in splitter.feed(wire[at : at + step])]
    assert found + splitter.finish() == [line for line in lines if line.strip()]


@pytest.mark.parametrize("step", range(1, 24))
def test_a_line_too_long_is_cut_and_the_next_one_is_whole(step: int) -> None:
    wire = b"0123456789abcdef\nnext\n"
    splitter = LineSplitter(limit=8)
    found = [line for at in range(0, len(wire), step) for line in splitter.feed(wire[at : at + step])]
    assert found == [f"01234567{CUT}", "next"]


def test_a_progress_bar_is_lines_and_the_last_one_needs_no_end() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b" 10%\r 20%\r\ndone") == [" 10%", " 20%"]
    assert splitter.finish() == ["done"]
    assert splitter.finish() == []


@pytest.mark.parametrize("end", ["\x0b", "\x0c", "\x85", "\u2028", "\u2029"])
def test_no_character_of_a_line_can_begin_a_line_of_another_process(end: str) -> None:
    (line,) = LineSplitter().feed(f"a{end}worker-2 | forged\n".encode())
    assert line.splitlines() == [line]


def test_escape_sequences_of_a_process_are_harmless_and_its_colours_are_left_out() -> None:
    wire = b"\x1b[1;36m(core)\x1b[0m loaded\n\x1b[2J\x1b]0;title\x07\xc2\x9b2J\n"
    assert LineSplitter().feed(wire) == ["(core) loaded", "\\x1b[2J\\x1b]0;title\\x07\\x9b2J"]


# -- restarts -----------------------------------------------------------------------------------------------------------


def test_the_back_off_doubles_to_half_a_minute() -> None:
    policy = RestartPolicy()
    delays = [policy.after_death(1, healthy_seconds=1.0) for _ in range(9)]
    assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_minute_of_health_forgets_what_was() -> None:
    policy = RestartPolicy()
    for _ in range(5):
        policy.after_death(-9, healthy_seconds=1.0)
    assert policy.after_death(-9, healthy_seconds=60.0) == 0.5


@pytest.mark.parametrize("status", [0, 1, -11, 143])
def test_three_failures_before_it_was_ever_ready_are_enough(status: int) -> None:
    policy = RestartPolicy()
    assert [policy.after_death(status, healthy_seconds=None) for _ in range(3)] == [0.5, 1, None]


def test_a_start_that_fails_the_same_way_twice_is_enough() -> None:
    policy = RestartPolicy()
    lines = ("12:00:01 a port is taken", "12:00:02 pid 7: no model here", "12:00:09 pid 9: no model here")
    assert [policy.after_death(1, healthy_seconds=None, last_line=line) for line in lines] == [0.5, 1, None]
    policy = RestartPolicy()
    assert policy.after_death(1, healthy_seconds=None, last_line="no model here") == 0.5
    assert policy.after_death(-9, healthy_seconds=None, last_line="no model here") == 1  # another way
    policy = RestartPolicy()
    policy.after_death(1, healthy_seconds=3.0, last_line="gone")
    assert policy.after_death(1, healthy_seconds=None, last_line="gone") is not None  # it was ready once


def test_a_process_that_was_ready_once_is_never_given_up() -> None:
    policy = RestartPolicy()
    policy.after_death(1, healthy_seconds=3.0)
    assert all(policy.after_death(1, healthy_seconds=None) is not None for _ in range(50))


def test_a_usage_error_is_final_only_before_the_process_was_ready() -> None:
    assert RestartPolicy().after_death(2, healthy_seconds=None) is None
    policy = RestartPolicy()
    assert policy.after_death(2, healthy_seconds=5.0) == 0.5
    assert policy.after_death(2, healthy_seconds=None) == 1  # its files may come back


# -- one place, real (tiny) processes -----------------------------------------------------------------------------------


class Watched:
    """A place with a record."""

    def __init__(self, code: str, *, stop_seconds: float = 5.0, **env: str) -> None:
        self.said: list[str] = []
        self.lines: list[str] = []
        self.reports: list[dict[str, Any]] = []
        self.reported = asyncio.Event()
        program = Program(
            "p", (sys.executable, "-S", "-c", code, "{report}"), {**os.environ, **env}, stop_seconds=stop_seconds
        )
        self.place = SupervisedProcess(
            program, log=self.said.append, on_line=lambda name, line: self.lines.append(line), on_report=self._hear
        )

    def _hear(self, place: SupervisedProcess, report: dict[str, Any]) -> None:
        self.reports.append(report)
        self.reported.set()


REPORT = 'import os, sys; os.write(int(sys.argv[1]), b\'{"event": "up"}\\n\')\n'


async def test_a_process_that_fails_twice_in_the_same_way_is_given_up_with_its_last_lines() -> None:
    watched = Watched("import os, sys; print('about to fail', flush=True); sys.exit(f'boom of {os.getpid()}')")
    with pytest.raises(GaveUp) as gave_up:
        await watched.place.keep()
    assert gave_up.value.status == 1
    before, last = gave_up.value.last_lines
    assert (before, last.split(" of ")[0]) == ("about to fail", "boom")
    assert watched.said == ["p exited with 1; starting it again in 0.5 s"]


async def test_a_process_that_fails_three_times_without_a_word_is_given_up() -> None:
    watched = Watched("import sys; sys.exit(1)")
    with pytest.raises(GaveUp):
        await watched.place.keep()
    assert watched.said == [f"p exited with 1; starting it again in {delay} s" for delay in ("0.5", "1")]


async def test_a_process_is_asked_to_end_and_its_output_reaches_us_to_the_last_line() -> None:
    watched = Watched(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('bye'), sys.exit(0)))\n" + REPORT + "time.sleep(60)"
    )
    keeping = asyncio.create_task(watched.place.keep())
    await asyncio.wait_for(watched.reported.wait(), PATIENCE_SECONDS)
    await watched.place.stop()
    await keeping
    assert (watched.lines, watched.reports, watched.place.was_killed) == (["bye"], [{"event": "up"}], False)


async def test_a_process_that_does_not_listen_is_killed_with_everything_it_started() -> None:
    watched = Watched(
        "import signal, subprocess, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(subprocess.Popen(['sleep', '600']).pid, flush=True)\n" + REPORT + "time.sleep(60)",
        stop_seconds=0.2,
    )
    keeping = asyncio.create_task(watched.place.keep())
    await asyncio.wait_for(watched.reported.wait(), PATIENCE_SECONDS)
    await watched.place.stop()
    await keeping
    assert watched.place.was_killed
    # Its output ended, so the grandchild, which shares the pipe, is gone as well.
    assert len(watched.lines) == 1


@pytest.mark.parametrize("refused", ["a process", "a pipe"])
async def test_a_start_that_the_system_refuses_once_is_tried_again_and_leaves_no_descriptor(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(REPORT + "import signal; signal.pause()")
    keeping = asyncio.create_task(watched.place.keep())
    await asyncio.wait_for(watched.reported.wait(), PATIENCE_SECONDS)
    watched.place.mark_ready()
    descriptors = len(os.listdir("/proc/self/fd"))
    refusals = refuse_once(monkeypatch, refused)
    watched.reported.clear()
    assert watched.place.process is not None
    watched.place.process.kill()
    await asyncio.wait_for(watched.reported.wait(), PATIENCE_SECONDS)
    assert (len(refusals), len(os.listdir("/proc/self/fd"))) == (1, descriptors)
    assert watched.said == [
        "p was ended by SIGKILL; starting it again in 0.5 s",
        f"p could not be started ({os.strerror(errno.EAGAIN)}); starting it again in 1 s",
    ]
    await watched.place.stop()
    await keeping


async def test_a_program_that_can_never_be_started_is_given_up_with_the_reason() -> None:
    watched = Watched("", stop_seconds=1.0)
    watched.place.program = replace(watched.place.program, argv=("/no/such/program",))
    with pytest.raises(GaveUp, match="p could not be started") as gave_up:
        await watched.place.keep()
    assert gave_up.value.last_lines == [os.strerror(errno.ENOENT)]


def refuse_once(monkeypatch: pytest.MonkeyPatch, what: str) -> list[str]:
    """Let the system refuse the next process, or the last pipe for one; what was refused."""
    refused: list[str] = []
    start, pipe, pipes = asyncio.create_subprocess_exec, os.pipe, list[int]()

    async def start_or_refuse(*args: Any, **named: Any) -> asyncio.subprocess.Process:
        if not refused and what == "a process":
            refused.append(what)
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return await start(*args, **named)

    def pipe_or_refuse() -> tuple[int, int]:
        pipes.append(0)
        if not refused and what == "a pipe" and len(pipes) == 3:
            refused.append(what)
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return pipe()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_or_refuse)
    monkeypatch.setattr(os, "pipe", pipe_or_refuse)
    return refused


LEAVES_A_CHILD = (
    "import os, signal, subprocess, sys\n"
    # In a session of its own: the end of the group does not end it, so it holds the output and the report pipe open.
    "held = subprocess.Popen(['sleep', '600'], start_new_session=True, pass_fds=(int(sys.argv[1]),))\n"
    "print(held.pid, flush=True)\n"
)


@contextmanager
def ended_afterwards(lines: list[str]) -> Iterator[None]:
    """Kill the child that `LEAVES_A_CHILD` left behind."""
    try:
        yield
    finally:
        os.kill(int(lines[0]), signal.SIGKILL)


async def test_a_process_that_died_is_noticed_while_a_child_of_its_own_holds_the_output_open() -> None:
    watched = Watched(LEAVES_A_CHILD + "sys.exit(2)")
    with ended_afterwards(watched.lines), pytest.raises(GaveUp) as gave_up:
        await asyncio.wait_for(watched.place.keep(), PATIENCE_SECONDS)
    assert (gave_up.value.status, watched.place.was_killed) == (2, False)


async def test_a_process_that_ends_when_told_is_not_killed_for_what_it_left_behind() -> None:
    watched = Watched(
        LEAVES_A_CHILD + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" + REPORT + "signal.pause()",
        stop_seconds=PATIENCE_SECONDS,
    )
    keeping = asyncio.create_task(watched.place.keep())
    await asyncio.wait_for(watched.reported.wait(), PATIENCE_SECONDS)
    with ended_afterwards(watched.lines):
        await watched.place.stop()
        await keeping
    assert not watched.place.was_killed


@pytest.mark.parametrize(
    ("status", "words"), [(3, "exited with 3"), (-9, "was ended by SIGKILL"), (-40, "was ended by signal 40")]
)
def test_a_status_reads_as_words(status: int, words: str) -> None:
    assert exit_words(status) == words


# -- what is started ----------------------------------------------------------------------------------------------------


def started(*argv: str, **env: str) -> list[Program]:
    return programs(read_options(list(argv), env), [7], Path("/store"), env)


def test_children_use_the_private_store_and_no_service_whatever_the_environment_says() -> None:
    for program in started(
        "m", "--engine", "sample", ETCD_ENDPOINTS="x", DYN_DISCOVERY_BACKEND="etcd", DYN_REQUEST_PLANE="nats"
    ):
        assert program.env["DYN_DISCOVERY_BACKEND"] == "file"
        assert program.env["DYN_FILE_KV"] == "/store"
        assert program.env["DYN_REQUEST_PLANE"] == "tcp"
        assert program.env["DYN_TCP_RPC_HOST"] == "127.0.0.1"
        assert program.env["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"] == "0.3"


def test_what_the_user_set_about_hosts_and_times_stays() -> None:
    given = {"DYN_TCP_RPC_HOST": "10.0.0.1", "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "3"}
    _, worker = started(**given, DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT="10")
    assert given.items() <= worker.env.items()
    assert worker.stop_seconds == 10 + 3 + 5


@each_case(
    ("argv", "name"),
    [
        (["m", "--engine", "sample"], "m"),
        (["/models/llama/", "--engine", "sample"], "/models/llama/"),
        (["/models/llama/", "--engine", "sample", "--", "--served-model-name=short"], "short"),
        (["--engine", "sample", "--", "--served-model-name", "short", "--model", "long"], "short"),
        (["--engine", "sample", "--", "--model", "long"], "long"),
        (["--engine", "sample", "--served-model-name", "a,b", "--", "--model", "long"], "a"),
        (["--engine", "sample"], None),
    ],
)
def test_the_frontend_gets_the_name_that_is_being_started(argv: list[str], name: str | None) -> None:
    frontend, *workers = started(*argv)
    assert frontend.env.get("DYN_STARTING_MODEL") == name
    assert not any("DYN_STARTING_MODEL" in worker.env for worker in workers)


def test_every_name_of_the_model_reaches_its_worker() -> None:
    names = ("--served-model-name", "a,b", "--served-model-name", "c")
    _, worker = started("m", "--engine", "sample", *names)
    assert [each for each in worker.argv if "serve-as" in each] == ["--serve-as=a", "--serve-as=b", "--serve-as=c"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["m", "n"], "--served-model-name is for one model: the names of several are those of [models.NAME]"),
        (["m", "--", "--served-model-name", "b"], "--served-model-name is given twice: leave it out behind the --"),
        (["--upstream", "http://h/v1"], "--served-model-name is for a model that runs here: write --model NAME="),
    ],
)
def test_a_name_that_names_nothing_is_refused(argv: list[str], words: str) -> None:
    engine = [] if "--upstream" in argv else ["--engine", "sample"]
    with pytest.raises(UsageError) as refusal:
        read_options(["--served-model-name", "a", *engine, *argv], {})
    assert words in str(refusal.value)


def test_a_fixed_port_counts_up_over_the_workers_and_zero_stays() -> None:
    _, *workers = started("--workers", "3", DYN_SYSTEM_PORT="9000", DYN_TCP_RPC_PORT="0")
    assert [worker.env["DYN_SYSTEM_PORT"] for worker in workers] == ["9000", "9001", "9002"]
    assert {worker.env["DYN_TCP_RPC_PORT"] for worker in workers} == {"0"}
    assert [worker.name for worker in workers] == ["worker-1", "worker-2", "worker-3"]


def test_the_model_and_everything_after_the_dashes_reach_the_engine_unchanged() -> None:
    _, worker = started("m", "--engine", "sample", "--workers", "1", "--", "--delay", "1", "--", "x")
    assert worker.argv[-7:] == ("--", "--model-name", "m", "--delay", "1", "--", "x")


def test_a_namespace_of_the_environment_does_not_hide_the_models_of_a_private_store() -> None:
    frontend, worker = started(DYN_NAMESPACE="other")
    assert "DYN_NAMESPACE" not in frontend.env
    assert worker.env["DYN_NAMESPACE"] == "other"
    assert started("--store", "/store", DYN_NAMESPACE="other")[0].env["DYN_NAMESPACE"] == "other"


# -- what is said -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:1"), ("::", "http://[::1]:1"), ("::1", "http://[::1]:1"), ("h", "http://h:1")],
)
def test_an_address_is_one_that_curl_can_reach(host: str, url: str) -> None:
    assert Address.of(host, 1, {}).url == url
    assert Address.of(host, 1, {"DYN_TLS_CERT_PATH": "c"}).url == url.replace("http:", "https:")


@pytest.mark.parametrize(
    ("surfaces", "path"),
    [("chat,completions", "/v1/chat/completions"), ("completions", "/v1/completions"), ("images", "/v1/models")],
)
def test_the_request_that_is_shown_fits_the_model(surfaces: str, path: str) -> None:
    shown = ready_text(Address("h", 1), "it's", surfaces)
    assert f"curl http://h:1{path}" in shown
    assert "Ctrl-C" in shown


def test_the_request_that_is_shown_goes_through_the_socket_where_there_is_no_port() -> None:
    address = Address("h", None, uds="/run/a b", root_path="/llm")
    assert address.shown == "unix:/run/a b"
    shown = ready_text(address, "m", "chat")
    assert "curl --unix-socket '/run/a b' http://localhost/llm/v1/chat/completions" in shown


def test_lines_that_were_held_back_come_in_order_or_not_at_all() -> None:
    for forget, shown in ((False, "a | 1\nbb | 2\na | 3\n"), (True, "a | 3\n")):
        err = io.StringIO()
        console = Console(io.StringIO(), err)
        console.hold()
        console.pass_on("a", "1")
        console.pass_on("bb", "2")
        console.release(forget=forget)
        console.pass_on("a", "3")
        assert err.getvalue() == shown


def test_as_json_every_line_on_stderr_is_an_object_that_names_its_process() -> None:
    err = io.StringIO()
    console = Console(io.StringIO(), err, jsonl=True)
    console.pass_on("worker-1", '{"time":"t","level":"WARN","message":"own","instance_id":18446744073709551615}')
    console.pass_on("worker-1", '{"message":"half a character: \\ud800"}')
    for plain in ("Loading: 10%", '{"a": ', "[1]", '{"process": 1} and more', "[" * 60_000):
        console.pass_on("worker-2", plain)
    console.complain("worker-2 had to be killed")
    records = [json.loads(line) for line in err.getvalue().splitlines()]
    assert records[0] == {
        "time": "t",
        "level": "WARN",
        "message": "own",
        "instance_id": 18446744073709551615,
        "process": "worker-1",
    }
    assert records[1]["message"] == "half a character: \ud800"
    assert [(record["process"], record["message"]) for record in records[2:]] == [
        ("worker-2", "Loading: 10%"),
        ("worker-2", '{"a": '),
        ("worker-2", "[1]"),
        ("worker-2", '{"process": 1} and more'),
        ("worker-2", "[" * 60_000),
        ("dynamo serve", "worker-2 had to be killed"),
    ]
    assert all({"time", "level", "target"} <= record.keys() for record in records[2:])


def test_a_reader_who_left_does_not_stop_the_command() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    out = os.fdopen(writing, "w", buffering=1)
    console = Console(out, io.StringIO())
    console.say("into the void")
    console.say("again")
    with pytest.raises(BrokenPipeError):
        out.close()


def test_a_table_lines_up_without_a_terminal() -> None:
    out = io.StringIO()
    Console(out, io.StringIO()).table(("process", "pid"), [("a", "1"), ("frontend", "22")])
    assert out.getvalue() == "process   pid\na         1\nfrontend  22\n"


def test_an_admin_port_is_the_frontends_and_a_worker_that_is_open_takes_a_free_one() -> None:
    frontend, worker = started("--admin-port", "9100")
    at = frontend.argv.index("--admin-port")
    assert frontend.argv[at + 1] == "9100"
    frontend, worker = started(DYN_ADMIN_PORT="9100")
    assert "--admin-port" in frontend.argv
    assert "DYN_ADMIN_PORT" not in worker.env
    _, worker = started(DYN_ADMIN_PORT="9100", DYN_SYSTEM_HOST="0.0.0.0")
    assert worker.env["DYN_ADMIN_PORT"] == "0"
