"""SIGHUP of `dynamo serve` over real processes: workers are replaced one by one, and no request notices."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dynamo.cli.local_processes import worker_program
from dynamo.cli.serve import read_options
from dynamo.supervise.backoff import RestartPolicy
from support.load import load
from support.processes import SUPPORT, until
from support.serve_command import ServeCommand, is_running, left_behind, serve_command

pytestmark = pytest.mark.timeout(300)

PATIENCE_SECONDS = 120.0  # several starts of Python, one after the other, on a machine that does other things as well
HERE = ("--http-host", "127.0.0.1", "--http-port", "0")
GUIDE = ("my-model", "--engine", "guide_engine:GuideEngine", *HERE)
SCRIPTED = ("--engine", "scripted_engine:ScriptedEngine", *HERE)


def scripted_env(tmp_path: Path) -> dict[str, str]:
    return {
        "PYTHONPATH": str(SUPPORT),
        "SCRIPTED_MODEL": "m",
        "SCRIPTED_NAME": "any",
        "SCRIPTED_JOURNAL": str(tmp_path / "journal"),
    }


@contextmanager
def served(tmp_path: Path, *args: str, **env: str) -> Iterator[ServeCommand]:
    with serve_command(tmp_path, *args, **env) as command:
        command.patience = PATIENCE_SECONDS
        command.wait_ready()
        yield command


def hang_up(command: ServeCommand) -> None:
    command.process.send_signal(signal.SIGHUP)


async def test_a_hangup_replaces_every_worker_and_no_request_notices(tmp_path: Path) -> None:
    with served(tmp_path, *SCRIPTED, "--workers", "2", **scripted_env(tmp_path)) as command:
        command.wait_for(lambda: command.out.count("serves e2e") == 2, "both workers")
        frontend, before = command.pid_of("frontend"), {command.pid_of(f"worker-{number}") for number in (1, 2)}
        async with load([command.port], "m", clients=4) as found:
            await until(lambda: len(found.answers) >= 4, lambda: command.err)
            hang_up(command)
            await until(
                lambda: "all 2 workers were replaced in " in command.out,
                lambda: f"the restart\n{command.out}",
                patience=PATIENCE_SECONDS,
            )
            over_at = time.monotonic()
            await until(lambda: any(each.asked_at > over_at for each in found.answers), lambda: command.err)
        assert is_running(frontend)
        after = {command.pid_of(f"worker-{number}") for number in (1, 2)}
        command.process.send_signal(signal.SIGTERM)
        status = await asyncio.to_thread(command.wait_ended)
    found.check()
    assert not before & after
    assert re.findall(r"^worker (\d) of 2: replaced in [\d.]+ s \(pid \d+ -> \d+\)$", command.out, re.MULTILINE) == [
        "1",
        "2",
    ]
    assert not [pid for pid in before | after if is_running(pid)]
    assert (status, left_behind(tmp_path)) == (0, [])


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("broken", r"the replacement exited with 1"),
        ("other", r"the frontend refuses the replacement \(my-model: model card differs.*\)"),
    ],
)
def test_a_version_that_does_not_serve_costs_nothing_but_a_line(tmp_path: Path, version: str, words: str) -> None:
    with served(tmp_path, *GUIDE) as command:
        old = command.pid_of("worker-1")
        (tmp_path / version).touch()
        hang_up(command)
        command.wait_for(lambda: re.search(not_replaced(words, old), command.out), words)
        answer = command.ask("my-model")
        (tmp_path / version).unlink()
        hang_up(command)  # the next version is better
        command.wait_for(lambda: "the worker was replaced in " in command.out, "the replacement")
        assert not is_running(old)
        assert command.ask("my-model") == answer == "hello from the guide"
        command.process.send_signal(signal.SIGTERM)
        assert command.wait_ended() == 0, command.err
    assert left_behind(tmp_path) == []


def test_a_version_that_does_not_come_up_in_time_is_ended(tmp_path: Path) -> None:
    env = {"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "1"}
    with served(tmp_path, *GUIDE, "--replace-timeout", "1", **env) as command:
        old, before = command.pid_of("worker-1"), children_of(command.process.pid)
        (tmp_path / "hold").touch()
        hang_up(command)
        line = not_replaced(r"the replacement has not loaded within 1 s \(--replace-timeout\)", old)
        command.wait_for(lambda: re.search(line, command.out), line)
        command.wait_for(lambda: children_of(command.process.pid) == before, "its end")
        assert command.ask("my-model") == "hello from the guide"
        command.process.send_signal(signal.SIGTERM)
        assert command.wait_ended() == 0, command.err


def not_replaced(words: str, pid: int) -> str:
    return rf"worker 1 of 1: {words}; worker-1 \(pid {pid}\) stays, and the restart ends here \(0 replaced\)"


def test_a_hangup_during_a_restart_counts_once_and_a_stop_ends_everything(tmp_path: Path) -> None:
    with served(tmp_path, *GUIDE, DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT="1") as command:
        (tmp_path / "hold").touch()
        for count in (1, 2, 3):
            hang_up(command)
            command.wait_for(lambda count=count: command.out.count("SIGHUP: ") == count, "the news")  # type: ignore[misc]
        (tmp_path / "hold").unlink()
        command.wait_for(lambda: command.out.count("the worker was replaced in ") == 2, "both restarts")
        (tmp_path / "hold").touch()
        serving = command.pid_of("worker-1")
        hang_up(command)
        command.wait_for(lambda: len(children_of(command.process.pid)) == 3, "a third replacement")
        pids = children_of(command.process.pid)
        command.process.send_signal(signal.SIGTERM)
        status = command.wait_ended()
    assert command.out.count("the worker was replaced in ") == 2
    assert command.out.count("SIGHUP: one restart more follows the one under way") == 2
    assert serving in pids
    assert not [pid for pid in pids if is_running(pid)]
    assert (status, left_behind(tmp_path)) == (0, [])


def children_of(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def test_one_process_says_that_it_cannot(tmp_path: Path) -> None:
    with served(tmp_path, *GUIDE, "--in-process") as command:
        hang_up(command)
        command.wait_for(lambda: "SIGHUP: one process cannot replace its own workers" in command.out, "the line")
        assert command.ask("my-model") == "hello from the guide"
        command.process.send_signal(signal.SIGTERM)
        assert command.wait_ended() == 0


# -- what a hangup means -------------------------------------------------------------------------------------------------

LISTENER = """
import asyncio, fcntl, os, signal, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the terminal on standard input is ours now
# The suite itself may run under nohup, and its children inherit that.
signal.signal(signal.SIGHUP, signal.SIG_IGN if "ignored" in sys.argv else signal.SIG_DFL)
from dynamo.cli.hangup import hangups
say = lambda text: print(text, flush=True)
async def main():
    async with hangups(restart=lambda: say("restart"), terminal_gone=lambda: say("terminal gone")):
        say("listening")
        await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.parametrize(("more", "heard"), [((), "terminal gone"), (("ignored",), "restart")], ids=["plain", "nohup"])
def test_a_terminal_that_closes_asks_for_no_restart(more: tuple[str, ...], heard: str) -> None:
    ours, theirs = os.openpty()
    with subprocess.Popen([sys.executable, "-c", LISTENER, *more], stdin=theirs, stdout=subprocess.PIPE) as process:
        os.close(theirs)
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline()]
            process.send_signal(signal.SIGHUP)
            lines.append(process.stdout.readline())
            os.close(ours)
            lines.append(process.stdout.readline())
        finally:
            process.kill()
    assert [line.decode().strip() for line in lines] == ["listening", "restart", heard]


# -- parts ---------------------------------------------------------------------------------------------------------------


def test_an_applicant_that_fails_once_is_given_up_and_a_worker_that_served_is_not() -> None:
    assert RestartPolicy(early_failures=1).after_death(0, healthy_seconds=None) is None
    assert RestartPolicy(early_failures=1).after_death(1, healthy_seconds=1.0) == 0.5


def test_a_replacement_takes_the_fixed_port_that_is_free() -> None:
    env = {"DYN_SYSTEM_PORT": "9000", "DYN_TCP_RPC_PORT": "0"}
    program = worker_program(read_options(["--workers", "2"], {}), Path("/store"), env, "worker-1", 2)
    assert (program.name, program.env["DYN_SYSTEM_PORT"], program.env["DYN_TCP_RPC_PORT"]) == ("worker-1", "9002", "0")


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_a_replace_timeout_is_a_time(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_options([f"--replace-timeout={value}"], {})
    assert "--replace-timeout: " in capsys.readouterr().err
