"""What the two ends of a connection hear when one of them is frozen, leaves or dies: the simulated wire, and `mux` between
real processes, must tell the same story."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from dynamo.runtime.calls.request_plane.base import INITIAL_CREDITS, Instance
from dynamo.testing.simulation.loop import run_virtual
from dynamo.testing.simulation.network import PING_LIMIT_SECONDS, Network
from support.processes import PATIENCE_SECONDS, until
from support.wire_ends import INSTANCE_ID, PATH, call, handler

ENDS = Path(__file__).parents[2] / "support" / "wire_ends.py"
FROZEN_SECONDS = 1.5 * PING_LIMIT_SECONDS  # in the simulation: the caller gives up meanwhile, but not twice
WORDS = INITIAL_CREDITS - 1


class Simulated:
    """Both ends in one virtual loop."""

    def __init__(self) -> None:
        self._network = Network(random.Random(1))
        self._heard: dict[str, list[str]] = {"worker": [], "caller": []}
        self._server = self._network.plane("worker").server()
        self._server.register(PATH, handler(self._heard["worker"].append, lambda: self._network.kill("worker")))
        self._network.announce(INSTANCE_ID, "worker")
        self._client = self._network.plane("caller").client()
        self._instance = Instance(
            namespace="ns", component="c", endpoint="e", instance_id=INSTANCE_ID, **self._server.transport(PATH)
        )
        self._calls: list[asyncio.Task[None]] = []
        self._thaws_at = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for each in self._calls:
            each.cancel()
        await self._server.close()

    async def call(self, name: str, tokens: int = 1, end: str = "waits") -> None:
        body = {"name": name, "tokens": tokens, "dies": end == "dies"}
        opened = asyncio.Event()
        note = self._heard["caller"].append
        self._calls.append(asyncio.ensure_future(call(self._client, self._instance, body, note, opened)))
        await opened.wait()

    async def freeze(self) -> None:
        self._network.freeze("worker", FROZEN_SECONDS)
        self._thaws_at = asyncio.get_running_loop().time() + FROZEN_SECONDS

    async def thaw(self) -> None:
        await asyncio.sleep(self._thaws_at - asyncio.get_running_loop().time() + 1.0)

    async def caller_leaves(self) -> None:
        await self._client.close()

    async def caller_dies(self) -> None:
        self._network.kill("caller")

    async def caller_gives_up(self, name: str) -> None:
        await asyncio.sleep(PING_LIMIT_SECONDS + 1.0)
        await self.hears("caller", f"{name}: 1 tokens, Disconnected")

    async def hears(self, end: str, *lines: str) -> None:
        """These lines; their order is that of tasks which are woken together."""
        await asyncio.sleep(1.0)
        assert sorted(self._heard[end]) == sorted(lines)


class Sockets:
    """Each end a process."""

    def __init__(self) -> None:
        self._ends: dict[str, subprocess.Popen[str]] = {}
        self._heard: dict[str, list[str]] = {"worker": [], "caller": []}

    async def __aenter__(self) -> Self:
        for end in ("worker", "caller"):
            self._start(end)
        address = (await self._line("worker")).removeprefix("listens at ")
        await self._told(f"work with {address}", "ready")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for end in self._ends.values():
            end.kill()
            end.communicate()

    def _start(self, end: str) -> None:
        env = {key: value for key, value in os.environ.items() if not key.startswith("DYN_")}
        env["PYTHONPATH"] = str(ENDS.parent.parent)
        self._ends[end] = subprocess.Popen(
            [sys.executable, str(ENDS), end],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    async def _line(self, end: str) -> str:
        out = self._ends[end].stdout
        assert out is not None
        async with asyncio.timeout(PATIENCE_SECONDS):
            return (await asyncio.to_thread(out.readline)).strip()

    async def _told(self, line: str, answer: str) -> None:
        """Tell the caller to do something, and wait until it has; what else it said meanwhile is kept."""
        tell = self._ends["caller"].stdin
        assert tell is not None
        tell.write(f"{line}\n")
        while (said := await self._line("caller")) != answer:
            assert said, "the caller ended"
            self._heard["caller"].append(said)

    async def call(self, name: str, tokens: int = 1, end: str = "waits") -> None:
        await self._told(f"call {name} {tokens} {end}", f"called {name}")

    async def freeze(self) -> None:
        self._ends["worker"].send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self._ends['worker'].pid}/stat")
        await until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", lambda: "the worker to stand still")

    async def thaw(self) -> None:
        self._ends["worker"].send_signal(signal.SIGCONT)

    async def caller_leaves(self) -> None:
        await self._told("leave", "left")

    async def caller_dies(self) -> None:
        self._ends["caller"].kill()
        await asyncio.to_thread(self._ends["caller"].wait)

    async def caller_gives_up(self, name: str) -> None:
        await self._told("patience 0.5", "waits")
        await self.hears("caller", f"{name}: 1 tokens, Disconnected")
        await self._told("patience 60", "waits")

    async def hears(self, end: str, *lines: str) -> None:
        while len(self._heard[end]) < len(lines):
            said = await self._line(end)
            assert said, f"the {end} ended; it said {self._heard[end]}"
            self._heard[end].append(said)
        assert sorted(self._heard[end]) == sorted(lines)


Rig = Simulated | Sockets
Story = Callable[[Rig], Awaitable[None]]


async def a_frozen_worker_hears_at_its_thaw_that_its_caller_left(rig: Rig) -> None:
    await rig.call("a")
    await rig.hears("worker", "began a")
    await rig.freeze()
    await rig.caller_leaves()
    await rig.thaw()
    await rig.hears("worker", "began a", "killed a")


async def what_a_killed_caller_had_sent_arrives_before_its_end(rig: Rig) -> None:
    await rig.call("a")
    await rig.hears("worker", "began a")
    await rig.freeze()
    await rig.call("b")
    await rig.caller_dies()
    await rig.thaw()
    await rig.hears("worker", "began a", "began b", "killed a", "killed b")


async def what_a_killed_worker_had_sent_arrives_before_its_end(rig: Rig) -> None:
    await rig.call("a", WORDS)
    await rig.call("b", 3, "dies")
    await rig.hears("caller", f"a: {WORDS} tokens, Disconnected", "b: 3 tokens, Disconnected")


async def a_frozen_worker_is_given_up_and_hears_of_that_at_its_thaw(rig: Rig) -> None:
    await rig.call("a")
    await rig.hears("worker", "began a")
    await rig.freeze()
    await rig.caller_gives_up("a")
    await rig.call("b")  # its system accepts
    await rig.thaw()
    await rig.hears("worker", "began a", "killed a", "began b")


STORIES: tuple[Story, ...] = (
    a_frozen_worker_hears_at_its_thaw_that_its_caller_left,
    what_a_killed_caller_had_sent_arrives_before_its_end,
    what_a_killed_worker_had_sent_arrives_before_its_end,
    a_frozen_worker_is_given_up_and_hears_of_that_at_its_thaw,
)


async def told(rig: Rig, story: Story) -> None:
    async with rig:
        await story(rig)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_the_simulated_wire_tells_the_story(story: Story) -> None:
    async def main() -> None:
        await told(Simulated(), story)

    run_virtual(main())


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="a frozen process is recognised by /proc")
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_real_sockets_tell_the_same_story(story: Story) -> None:
    asyncio.run(told(Sockets(), story))
