"""`dynamo serve` over real processes: few, because each costs seconds."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from support.cases import each_case
from support.patience import PATIENCE_SECONDS
from support.serve_command import is_running, left_behind, serve_command

ENGINE = ("--engine", "guide_engine:GuideEngine", "--http-host", "127.0.0.1", "--http-port", "0")


def port_is_free(url: str) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return probe.connect_ex(("127.0.0.1", urlsplit(url).port or 0)) != 0


def test_an_engine_of_the_guide_is_served_without_a_service_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with serve_command(tmp_path, "my-model", *ENGINE, ETCD_ENDPOINTS="http://127.0.0.1:1") as command:
        command.wait_ready()
        answer = command.ask("my-model")
        pids = [command.pid_of("frontend"), command.pid_of("worker-1")]
        command.process.send_signal(signal.SIGINT)
        status = command.wait_ended()
    assert answer == "hello from the guide"
    assert status == 0, command.err
    assert command.out.endswith("SIGINT: stopping (again: at once)\nstopped\n")
    assert '"my-model"' in command.printed_curl()
    assert command.out.count("\nfrontend ") == 1  # the table is printed once
    assert not [pid for pid in pids if is_running(pid)]
    assert port_is_free(command.url)
    assert left_behind(tmp_path) == []


def test_a_worker_and_a_frontend_that_die_are_started_again(tmp_path: Path) -> None:
    with serve_command(tmp_path, "my-model", *ENGINE) as command:
        command.wait_ready()
        os.kill(command.pid_of("worker-1"), signal.SIGKILL)
        command.wait_for(lambda: "worker-1 was ended by SIGKILL; starting it again in 0.5 s" in command.out, "the news")
        os.kill(command.pid_of("frontend"), signal.SIGKILL)
        command.wait_for(lambda: "guide.backend.generate again at" in command.out, "the worker")
        command.wait_for(lambda: "frontend serves again at" in command.out, "the frontend")
        answer = command.ask_until_answered("my-model")
        command.process.send_signal(signal.SIGTERM)
        status = command.wait_ended()
    assert answer == "hello from the guide"
    assert (status, left_behind(tmp_path)) == (0, [])


@each_case("more", [(), ("--in-process",)])
def test_a_model_is_served_under_the_names_that_are_given(tmp_path: Path, more: tuple[str, ...]) -> None:
    home = tmp_path / "".join(more)
    home.mkdir(exist_ok=True)
    with serve_command(home, "my-model", *ENGINE, *more, "--served-model-name", "short,other") as command:
        command.wait_ready()
        assert '"short"' in command.printed_curl()
        assert {command.ask(name) for name in ("short", "other")} == {"hello from the guide"}
        with pytest.raises(AssertionError, match=r"^404: "):
            command.ask("my-model")
        command.process.send_signal(signal.SIGTERM)
        assert command.wait_ended() == 0


def test_the_frontend_may_be_several_processes(tmp_path: Path) -> None:
    with serve_command(tmp_path, "my-model", *ENGINE, "--frontend-workers", "2") as command:
        command.wait_ready()
        answers = {command.ask_until_answered("my-model") for _ in range(4)}
        command.wait_for(lambda: command.metric("dynamo_frontend_processes") == 2, "both of them")
        command.process.send_signal(signal.SIGTERM)
        status = command.wait_ended()
    assert answers == {"hello from the guide"}
    assert (status, left_behind(tmp_path)) == (0, [])


@pytest.mark.parametrize("more", [(), ("--hang",)])
def test_children_and_what_they_started_end_when_the_parent_is_killed(tmp_path: Path, more: tuple[str, ...]) -> None:
    short = {"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "1"}  # an engine that hangs is ended by force then
    with serve_command(tmp_path, *ENGINE, "--", "--helper", *more, **short) as command:
        command.wait_ready()
        helper = int(re.findall(r"worker-1 \| helper (\d+)", command.err)[0])
        pids = [command.pid_of("frontend"), command.pid_of("worker-1"), helper]
        assert all(map(is_running, pids))
        command.process.kill()
        command.wait_for(lambda: not any(map(is_running, pids)), "the end of the children")


def test_a_process_that_an_engine_started_does_not_delay_the_end(tmp_path: Path) -> None:
    with serve_command(tmp_path, *ENGINE, "--", "--helper") as command:
        command.wait_ready()
        helper = int(re.findall(r"worker-1 \| helper (\d+)", command.err)[0])
        command.process.send_signal(signal.SIGTERM)
        status = command.wait_ended()
        command.wait_for(lambda: not is_running(helper), "the end of what the engine started")
    assert status == 0, command.err
    assert "had to be killed" not in command.err


def test_an_end_before_signals_are_handled_takes_along_what_was_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, time\n"
        "from dynamo.cli.child import Lifeline\n"
        "Lifeline(600.0).watch()\n"
        "subprocess.Popen(['sleep', '600'])\n"
        "print('started', flush=True)\n"
        "time.sleep(600)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"started\n"
        child.communicate(timeout=PATIENCE_SECONDS)  # closes the lifeline; the output ends with its last holder
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    with serve_command(tmp_path, *ENGINE, "--", "--hang", "--helper") as command:
        command.wait_ready()
        helper = int(re.findall(r"worker-1 \| helper (\d+)", command.err)[0])
        command.process.send_signal(signal.SIGINT)
        command.wait_for(lambda: "unregistered from discovery" in command.err, "the worker's stop")
        command.process.send_signal(signal.SIGINT)
        status = command.wait_ended()
    assert status == 130
    assert not is_running(command.pid_of("worker-1"))
    assert not is_running(helper)
    assert left_behind(tmp_path) == []


def test_one_process_serves_the_same(tmp_path: Path) -> None:
    with serve_command(tmp_path, "my-model", *ENGINE, "--in-process", "--workers", "2") as command:
        command.wait_ready()
        answer = command.ask("my-model")
        command.process.send_signal(signal.SIGINT)
        status = command.wait_ended()
    assert answer == "hello from the guide"
    assert status == 0, command.err
    assert command.out.endswith("stopped\n")
    assert port_is_free(command.url)


@each_case("more", [(), ("--in-process",), ("--frontend-workers", "2")])
def test_a_model_that_still_loads_for_the_first_time_is_a_503(tmp_path: Path, more: tuple[str, ...]) -> None:
    home = tmp_path / "".join(more)
    home.mkdir(exist_ok=True)
    (home / "hold").touch()
    with serve_command(home, "my-model", *ENGINE, *more) as command:
        command.wait_for(lambda: "serving HTTP on" in command.err or "waiting for 1 worker" in command.out, "it")
        with pytest.raises(AssertionError, match=r"^503: .*is not ready to serve requests yet"):
            command.ask("my-model")
        with pytest.raises(AssertionError, match=r"^404: "):
            command.ask("another")
        (home / "hold").unlink()
        command.wait_ready()
        assert command.ask("my-model") == "hello from the guide"
        command.process.send_signal(signal.SIGTERM)
        assert command.wait_ended() == 0


def test_a_bad_flag_of_the_engine_ends_everything_with_the_engines_own_words(tmp_path: Path) -> None:
    with serve_command(tmp_path, "--engine", "sample", "--http-port", "0", "--", "--max-tokens", "many") as command:
        status = command.wait_ended()
    assert status == 2
    assert command.err.count("\n") == 1
    assert "--max-tokens" in command.err
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("more", [("--workers", "2"), ("--in-process",)])
def test_a_mistake_that_the_next_start_would_meet_again_is_one_sentence(tmp_path: Path, more: tuple[str, ...]) -> None:
    (tmp_path / "empty").mkdir()
    with serve_command(tmp_path, "empty", "--engine", "reference", "--http-port", "0", *more) as command:
        status = command.wait_ended()
    assert status == 2
    assert (command.out + command.err).count("has no config.json") == 1
    assert command.err.splitlines()[-1].startswith("dynamo serve: error: empty has no config.json; give the directory")
    assert "starting it again" not in command.out + command.err
    assert "Traceback" not in command.err


@pytest.mark.parametrize("more", [(), ("--in-process",)])
def test_a_request_in_flight_ends_well_before_the_worker_is_stopped(tmp_path: Path, more: tuple[str, ...]) -> None:
    sample = ("m", "--engine", "sample", "--http-host", "127.0.0.1", "--http-port", "0", *more)
    with (
        serve_command(tmp_path, *sample, "--", "--delay", "0.05", "--max-tokens", "16") as command,
        ThreadPoolExecutor(1) as pool,
    ):
        command.wait_ready()
        answer = pool.submit(command.ask, "m")
        command.wait_for(lambda: command.metric("dynamo_frontend_inflight_requests") == 1, "the request")
        command.process.send_signal(signal.SIGINT)
        text = answer.result()
        status = command.wait_ended()
    assert len(text) == 16
    assert status == 0, command.err


def test_jsonl_stays_json_and_names_the_process(tmp_path: Path) -> None:
    with serve_command(tmp_path, "my-model", *ENGINE, DYN_LOGGING_JSONL="1") as command:
        command.wait_ready()
        command.ask("my-model")
        command.process.send_signal(signal.SIGTERM)
        command.wait_ended()
    records = [json.loads(line) for line in command.err.splitlines()]
    completed = [record for record in records if record["message"] == "request completed"]
    assert sorted(record["process"] for record in completed) == ["frontend", "worker-1"]
    assert len({record["request_id"] for record in completed}) == 1
