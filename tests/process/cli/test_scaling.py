"""`dynamo serve --workers MIN..MAX` over real processes: workers come with the load and go with it, and no request notices."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.http_client import CHAT, ask, chat, script
from support.load import load
from support.processes import SUPPORT, until
from support.serve_command import ServeCommand, left_behind, serve_command

pytestmark = pytest.mark.timeout(300)

PATIENCE_SECONDS = 120.0  # several starts of Python, one after the other, on a machine that does other things as well
START_SECONDS = 2.0
SCRIPTED = ("--engine", "scripted_engine:ScriptedEngine", "--http-host", "127.0.0.1", "--http-port", "0")


@contextmanager
def scaled(tmp_path: Path, workers: str, *args: str, **env: str) -> Iterator[ServeCommand]:
    scripted = {
        "PYTHONPATH": str(SUPPORT),
        "SCRIPTED_MODEL": "m",
        "SCRIPTED_NAME": "any",
        "SCRIPTED_JOURNAL": str(tmp_path / "journal"),
        "SCRIPTED_MAX_NUM_SEQS": "8",
        "SCRIPTED_START_SECONDS": str(START_SECONDS),
    }
    with serve_command(tmp_path, *SCRIPTED, "--workers", workers, *args, **{**scripted, **env}) as command:
        command.patience = PATIENCE_SECONDS
        command.wait_ready()
        yield command


async def said(command: ServeCommand, pattern: str, *, times: int = 1) -> float:
    """Waits for lines; the time at which they were seen."""
    await until(
        lambda: len(re.findall(pattern, command.out, re.MULTILINE)) >= times,
        lambda: f"{pattern}\n{command.out}\n{command.err}",
        patience=PATIENCE_SECONDS,
    )
    return time.monotonic()


async def ended(command: ServeCommand) -> int:
    command.process.send_signal(signal.SIGTERM)
    return await asyncio.to_thread(command.wait_ended)


async def test_a_step_of_the_load_is_met_and_gone_again_without_a_lost_request(tmp_path: Path) -> None:
    with scaled(tmp_path, "1..3", "--scale-down-after", "3") as command:
        async with load([command.port], "m", clients=1, pace=0.02) as quiet:
            await until(lambda: bool(quiet.answers), lambda: command.err)
            assert "scale:" not in command.out
            began = time.monotonic()
            async with load([command.port], "m", clients=40, pace=0.02, name="step") as step:
                decided_at = await said(command, r"^scale: 1 -> [23] workers ")
                serves_at = await said(command, r"^scale: worker-2 serves after [\d.]+ s$")
                await until(lambda: len(step.answers) >= 40, lambda: command.out)
            # How soon it decides by a given load is a matter of unit tests; how long a start of Python takes is the machine's.
            print(
                f"decided {decided_at - began:.1f} s after the step; a second worker serves after {serves_at - began:.1f} s"
            )
            await said(command, r"^scale: 2 -> 1 worker ")
            await said(command, r"^scale: worker-\d has ended$")
            before = len(quiet.answers)
            await until(lambda: len(quiet.answers) > before + 1, lambda: command.err)
        status = await ended(command)
    quiet.check()
    step.check()
    assert (status, left_behind(tmp_path)) == (0, [])


async def test_a_worker_killed_while_another_one_is_leaving_is_started_again(tmp_path: Path) -> None:
    with scaled(tmp_path, "1..2", "--scale-down-after", "3") as command:
        async with load([command.port], "m", clients=16, pace=0.02) as found:
            await said(command, r"^scale: worker-2 serves")
        async with load([command.port], "m", clients=1, pace=0.02) as rest:
            await said(command, r"^scale: worker-\d goes$")
            left = re.findall(r"^scale: (worker-\d) goes$", command.out, re.MULTILINE)[0]
            stays = "worker-1" if left == "worker-2" else "worker-2"
            os.kill(command.pid_of(stays), signal.SIGKILL)
            await said(command, rf"^{stays} was ended by SIGKILL; starting it again")
            await until(lambda: len(rest.answers) >= 3, lambda: command.out + command.err, patience=PATIENCE_SECONDS)
        status = await ended(command)
    found.check()
    assert status == 0
    assert left_behind(tmp_path) == []


async def test_a_restart_while_it_grows_replaces_all_of_them(tmp_path: Path) -> None:
    with scaled(tmp_path, "1..2", "--scale-down-after", "600") as command:
        async with load([command.port], "m", clients=24, pace=0.02) as found:
            await said(command, r"^scale: 1 -> 2 workers ")
            command.process.send_signal(signal.SIGHUP)
            await said(command, r"^all 2 workers were replaced in ")
        status = await ended(command)
    found.check()
    assert status == 0
    assert re.search(r"^scale: worker-2 serves", command.out, re.MULTILINE)


async def test_none_at_all_and_the_first_request_waits_for_a_worker(tmp_path: Path) -> None:
    with scaled(tmp_path, "0..2", "--scale-down-after", "2", "--cold-start-wait", "60") as command:
        await said(command, r"^scale: 1 -> 0 workers \(idle\)")
        await said(command, r"^scale: worker-1 has ended$")
        listed = (await ask(command.port, "/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["m"]
        reply = await ask(command.port, CHAT, chat("m"), headers=script(["say", "here"]))
        assert (reply.status, reply.text) == (200, "here")
        assert "scale: 0 -> 1 worker (first_request)" in command.out
        # A frontend that is started again while no worker is there knows no model: a worker is started for it.
        await said(command, r"^scale: worker-1 has ended$", times=2)
        os.kill(command.pid_of("frontend"), signal.SIGKILL)
        await said(command, r"knows no model$")
        assert await ended(command) == 0
    assert left_behind(tmp_path) == []


async def test_a_cold_start_that_fails_is_a_503_in_time_and_is_tried_again_later(tmp_path: Path) -> None:
    """The engine's code is broken meanwhile."""
    args = ("my-model", "--engine", "guide_engine:GuideEngine", "--http-host", "127.0.0.1", "--http-port", "0")
    scales = ("--workers", "0..1", "--scale-down-after", "1", "--cold-start-wait", "3")
    with serve_command(tmp_path, *args, *scales) as command:
        command.patience = PATIENCE_SECONDS
        command.wait_ready()
        await said(command, r"^scale: worker-1 has ended$")
        (tmp_path / "broken").touch()
        reply = await ask(command.port, CHAT, chat("my-model"))
        assert reply.status == 503
        assert reply.headers["retry-after"]
        await said(command, r"^scale: worker-1 does not serve: the new worker exited with 1$")
        (tmp_path / "broken").unlink()
        asked_at = time.monotonic()
        while (reply := await ask(command.port, CHAT, chat("my-model"))).status == 503:
            assert time.monotonic() < asked_at + PATIENCE_SECONDS, command.out
        assert (reply.status, reply.text) == (200, "hello from the guide")
        assert await ended(command) == 0


async def test_advice_changes_nothing(tmp_path: Path) -> None:
    with scaled(tmp_path, "1..2", "--scale-advise") as command:
        async with load([command.port], "m", clients=24, pace=0.02) as found:
            await said(command, r"^scale: would go from 1 -> 2 workers ")
            before = len(found.answers)
            await until(lambda: len(found.answers) >= before + 24, lambda: command.err)
        assert await ended(command) == 0
    found.check()
    assert "worker-2" not in command.out
    reasons = re.findall(r"would go from 1 -> 2 workers \((\w+)\)", command.out)
    assert len(reasons) == len(set(reasons))  # a slow start makes it full before enough work has piled up
