"""`dynamo serve` with several models: each is loaded at its first request, and one makes room for another."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from dynamo.cli.many import session_bytes
from support.http_client import CHAT, ask, chat, exchange
from support.processes import until
from support.serve_command import ServeCommand, left_behind, serve_command

pytestmark = pytest.mark.timeout(300)

PATIENCE_SECONDS = 200.0
MODEL_BYTES = 80_000_000
BUDGET_BYTES = 320_000_000  # two of them, and what a process of Python takes beside the weights; not three

ENGINE = """
import asyncio
import os

from dynamo.engines.sample.engine import SampleLLMEngine


class BallastEngine(SampleLLMEngine):
    '''Takes as much memory as the file of its model has, and as long for it as LOAD_SECONDS gives.'''

    @classmethod
    async def from_args(cls, argv=None):
        path = argv[argv.index("--model-name") + 1]
        with open(os.path.join(path, "weights.bin"), "rb") as file:
            ballast = file.read()
        await asyncio.sleep(float(os.environ.get("LOAD_SECONDS", "0")))
        grown = []
        while os.path.exists(os.path.join(path, "grows")):
            grown.append(b"x" * 1_000_000)  # so slowly that a busy machine sees it in time
            await asyncio.sleep(0.02)
        if os.path.exists(os.path.join(path, "broken")):
            raise SystemExit("the weights have a hole")
        engine, config = await super().from_args(["--model-name", os.path.basename(path), "--delay", "0.001"])
        engine.ballast = ballast
        return engine, config
"""


@contextmanager
def many(tmp_path: Path, *args: str, names: str = "abcde", **env: str) -> Iterator[ServeCommand]:
    (tmp_path / "ballast_engine.py").write_text(ENGINE)
    for name in names:
        folder = tmp_path / "models" / name
        folder.mkdir(exist_ok=True, parents=True)
        with (folder / "weights.bin").open("wb") as file:
            file.truncate(MODEL_BYTES)
    engine = ("--engine", "ballast_engine:BallastEngine", "--port", "0")
    with serve_command(tmp_path, *engine, *args, **env) as command:
        command.patience = PATIENCE_SECONDS
        command.wait_ready()
        yield command


async def shown(command: ServeCommand) -> dict[str, Any]:
    found: dict[str, Any] = (await ask(command.port, "/residency/v1")).json()
    return found


def children(command: ServeCommand, role: bytes) -> list[int]:
    """The processes that the command has started in a role: `worker`, one for each model, or `frontend`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == command.process.pid and b"dynamo.cli.child" in words and role in words:
                found.append(int(path.name))
    return sorted(found)


async def most_resident(command: ServeCommand, until: asyncio.Future[Any]) -> int:
    """The most bytes of memory that all models had together, until something is done."""
    most = 0
    while not until.done():
        most = max(most, sum(session_bytes(pid) for pid in children(command, b"worker")))
        await asyncio.sleep(0.05)
    return most


async def state_of(command: ServeCommand, name: str) -> str:
    return str({model["name"]: model["state"] for model in (await shown(command))["models"]}[name])


async def until_state(command: ServeCommand, name: str, state: str) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await state_of(command, name) != state:
            await asyncio.sleep(0.05)


async def ended(command: ServeCommand) -> int:
    command.process.send_signal(signal.SIGTERM)
    return await asyncio.to_thread(command.wait_ended)


async def test_five_models_under_a_budget_of_two_answer_a_thousand_requests(tmp_path: Path) -> None:
    paths = [str(tmp_path / "models" / name) for name in "abcde"]
    with many(
        tmp_path, *paths, "--memory", f"{BUDGET_BYTES // 10**6}MB", "--pin", "a", "--cold-start-wait", "600"
    ) as command:
        dice, statuses = random.Random(28), Counter[int]()
        names = [dice.choice("abcde") for _ in range(1000)]
        pinned_states = set[str]()
        await until_state(command, "a", "loaded")

        async def client(mine: list[str]) -> None:
            for name in mine:
                body = chat(name, stream=dice.random() < 0.5, max_tokens=4)
                async with exchange(command.port, CHAT, body) as opened:
                    reply = await opened.reply(patience=PATIENCE_SECONDS)
                statuses[reply.status] += 1
                assert reply.status == 200, reply.body
                assert b"error" not in reply.body

        clients = asyncio.gather(*(client(names[number::200]) for number in range(200)))
        measuring = asyncio.create_task(most_resident(command, clients))
        while not clients.done():
            found = await shown(command)
            assert found["used_bytes"] <= BUDGET_BYTES * 1.05
            pinned_states.add(next(model["state"] for model in found["models"] if model["pinned"]))
            await asyncio.sleep(0.2)
        await clients
        most = await measuring
        assert statuses == {200: 1000}
        assert most <= BUDGET_BYTES * 1.05
        assert pinned_states == {"loaded"}
        assert "a is being unloaded" not in command.out
        print(
            f"at most {most / 1e6:.0f} MB resident of {BUDGET_BYTES / 1e6:.0f}; {command.out.count('is being unloaded')} switches"
        )
        assert await ended(command) == 0
    assert left_behind(tmp_path) == []


async def test_a_switch_takes_as_long_as_a_load_and_two_tenths_of_a_second(tmp_path: Path) -> None:
    paths = [str(tmp_path / "models" / name) for name in "ab"]
    with many(tmp_path, *paths, "--memory", "200MB", "--idle", "1s", names="ab") as command:

        async def seconds(name: str) -> float:
            began = time.monotonic()
            assert (await ask(command.port, CHAT, chat(name, max_tokens=1))).status == 200
            return time.monotonic() - began

        loads, switches, first = list[float](), list[float](), "a"
        # Loads and switches take turns, and on a machine with other work there are more of them before medians are compared.
        while len(loads) < 5 or (statistics.median(switches) > statistics.median(loads) + 0.2 and len(loads) < 20):
            loads.append(await seconds(first))
            first = "b" if first == "a" else "a"
            switches.append(await seconds(first))
            await until_state(command, first, "absent")
        load, switch = statistics.median(loads), statistics.median(switches)
        metrics = (await ask(command.port, "/metrics")).body.decode()
        unloads = dict(re.findall(r'residency_unload_seconds_(sum|count)\{model="a"\} (\S+)', metrics))
        unload = float(unloads["sum"]) / float(unloads["count"])
        print(f"a load {load:.2f} s, a switch {switch:.2f} s, of which the unload {unload:.3f} s; {len(loads)} of each")
        assert switch <= load + 0.2


async def test_a_frontend_that_is_killed_finds_its_models_again(tmp_path: Path) -> None:
    paths = [str(tmp_path / "models" / name) for name in "abc"]
    with many(tmp_path, *paths, "--pin", "a", "--memory", f"{BUDGET_BYTES // 10**6}MB", LOAD_SECONDS="1") as command:
        await until_state(command, "a", "loaded")
        assert (await ask(command.port, CHAT, chat("b"))).status == 200
        before = children(command, b"worker")
        os.kill(children(command, b"frontend")[0], signal.SIGKILL)
        reply = await ask(command.port, CHAT, chat("a"))  # the socket is the command's: who connects meanwhile waits
        assert reply.status == 200
        assert (await ask(command.port, CHAT, chat("b"))).status == 200
        assert children(command, b"worker") == before
        assert command.out.count("is being loaded") == 2
        waiting = asyncio.create_task(ask(command.port, CHAT, chat("c")))  # b makes room, as before
        await until_state(command, "c", "loading")
        os.kill(children(command, b"frontend")[0], signal.SIGKILL)
        with suppress(OSError, EOFError):
            await waiting  # its connection is cut
        await until_state(command, "c", "loaded")  # the load went on
        assert await state_of(command, "b") == "absent"
        assert (await ask(command.port, CHAT, chat("c"))).status == 200
        assert command.out.count("is being loaded") == 3
        assert await ended(command) == 0
    assert left_behind(tmp_path) == []


async def test_a_load_that_outgrows_the_budget_is_ended_and_harms_no_other_model(tmp_path: Path) -> None:
    paths = [str(tmp_path / "models" / name) for name in "ab"]
    with many(tmp_path, *paths, "--pin", "a", "--memory", f"{BUDGET_BYTES // 10**6}MB", names="ab") as command:
        (tmp_path / "models" / "b" / "grows").touch()
        await until_state(command, "a", "loaded")
        asking = asyncio.create_task(ask(command.port, CHAT, chat("b")))
        most = await most_resident(command, asking)
        reply = await asking
        assert (reply.status, reply.json()["error"]["code"]) == (503, "model_too_large")
        assert most <= BUDGET_BYTES * 1.05
        assert (await ask(command.port, CHAT, chat("a"))).status == 200


async def test_a_killed_load_is_an_error_of_its_own_model_alone_and_is_tried_again(tmp_path: Path) -> None:
    with many(
        tmp_path, str(tmp_path / "models" / "a"), str(tmp_path / "models" / "b"), "--pin", "a", LOAD_SECONDS="2"
    ) as command:
        await until_state(command, "a", "loaded")
        loading = asyncio.create_task(ask(command.port, CHAT, chat("b")))
        await until_state(command, "b", "loading")
        os.kill(worker_of(tmp_path / "models" / "b"), signal.SIGKILL)
        reply = await loading
        assert reply.status == 503
        assert reply.json()["error"]["code"] == "model_load_failed"
        assert "was ended by SIGKILL" in reply.json()["message"]
        assert (await ask(command.port, CHAT, chat("a"))).status == 200
        await asyncio.sleep(float(reply.headers["retry-after"]))  # the client does as the answer says
        assert (await ask(command.port, CHAT, chat("b"))).status == 200


def worker_of(folder: Path) -> int:
    """Return the process that serves a folder, which the command names, too."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"dynamo.cli.child" in words and b"worker" in words and str(folder).encode() in words:
                return int(path.parent.name)
    raise LookupError(f"no process serves {folder}")


async def test_a_load_that_fails_is_answered_with_the_last_line_of_the_engine(tmp_path: Path) -> None:
    with many(tmp_path, str(tmp_path / "models" / "a"), str(tmp_path / "models" / "b")) as command:
        (tmp_path / "models" / "b" / "broken").touch()
        reply = await ask(command.port, CHAT, chat("b"))
        assert reply.status == 503
        assert "the weights have a hole" in reply.json()["message"]
        assert (await ask(command.port, CHAT, chat("a"))).status == 200


async def test_a_stream_is_sent_comments_while_its_model_is_loaded_and_an_idle_model_goes(tmp_path: Path) -> None:
    settings = {"LOAD_SECONDS": "3", "DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS": "200"}
    with many(
        tmp_path, str(tmp_path / "models" / "a"), str(tmp_path / "models" / "b"), "--idle", "2s", **settings
    ) as command:
        began = time.monotonic()
        async with exchange(command.port, CHAT, chat("a", stream=True)) as opened:
            reply = await opened.reply()
        waited = time.monotonic() - began
        assert (reply.status, reply.body.split(b"\n", 1)[0][:1]) == (200, b":")
        took = re.search(r"a is loaded after ([\d.]+) s", command.out)
        assert took is not None
        print(f"first request {waited:.2f} s, the bare load {took[1]} s")
        await until_state(command, "a", "absent")
        listed = (await ask(command.port, "/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["a", "b"]


async def test_presets_and_models_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "many.toml"
    file.write_text(
        f'memory = "{BUDGET_BYTES // 10**6}MB"\n[models.first]\nmodel = "{tmp_path}/models/a"\npin = true\n'
        f'[models.second]\nmodel = "{tmp_path}/models/b"\n'
        '[presets.coding]\nmodel = "second"\ntemperature = 0.2\nsystem = "Write code."\n'
    )
    with many(tmp_path, "--config", str(file)) as command:
        listed = (await ask(command.port, "/v1/models")).json()["data"]
        assert sorted(model["id"] for model in listed) == ["coding", "first", "second"]
        plain = (await ask(command.port, CHAT, chat("second"))).json()
        preset = (await ask(command.port, CHAT, chat("coding"))).json()
        assert preset["model"] == "coding"
        assert preset["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]
        unknown = await ask(command.port, CHAT, chat("third"))
        assert unknown.status == 404
        assert "'coding', 'first', 'second'" in unknown.json()["message"]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("a", "b", "--memory", "50MB"), "--memory 0.05GB is too small: a takes about 0.07 GB"),
        (("a", "b", "--pin", "c"), "--pin c: there is no such model; there are a, b"),
        (("a", "b", "--workers", "2"), "--workers has no meaning with several models"),
        (("x/a", "y/a"), "two models have the name a"),
        (("a", "b", "--memory", "12"), "is not a number with one of the units"),
    ],
)
async def test_mistakes_are_named_at_the_start(tmp_path: Path, args: tuple[str, ...], text: str) -> None:
    with serve_command(tmp_path, "--engine", "sample", "--port", "0", *args) as command:
        assert await asyncio.to_thread(command.wait_ended) == 2
        await until(lambda: text in command.err, lambda: command.err)
