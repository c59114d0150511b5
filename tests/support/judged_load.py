"""Clients that know every byte of the answer they must get, and count what they did not."""

from __future__ import annotations

import asyncio
import itertools
import string
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from support.http_client import CHAT, DONE, ask, chat, exchange, script

ANSWER = string.ascii_letters + string.digits + "+-"  # 64 tokens, no two alike
PACE_SECONDS = 0.01


@dataclass
class Tally:
    """What the clients got. `gaps` has the longest pause of each streamed answer, by tag."""

    sent: int = 0
    whole: int = 0
    lost: int = 0
    doubled: int = 0
    hung: int = 0
    problems: list[str] = field(default_factory=list)  # the first few
    gaps: dict[str, float] = field(default_factory=dict)

    def judge(self, tag: str, text: str, what: str) -> None:
        """Count one answer. `what` is said of one that is wrong."""
        if len(text) > len(set(text)):
            self.doubled += 1
        if text == ANSWER[: len(text)] and len(text) == self.tokens:
            self.whole += 1
            return
        self.lost += 1
        self.problem(f"{tag}: {what} {text!r}")

    def problem(self, text: str) -> None:
        if len(self.problems) < 10:
            self.problems.append(text[:400])

    tokens: int = len(ANSWER)

    @property
    def counts(self) -> dict[str, int]:
        """For `record`."""
        return {"sent": self.sent, "lost": self.lost, "doubled": self.doubled, "hung": self.hung}

    def assert_nothing_noticed(self) -> None:
        assert (self.lost, self.doubled, self.hung) == (0, 0, 0), self.problems
        assert self.whole == self.sent > 0


async def one(tally: Tally, port: int, model: str, tag: str, *, stream: bool, pace: float = PACE_SECONDS) -> None:
    """One request, judged."""
    tally.sent += 1
    text = ANSWER[: tally.tokens]
    body = chat(model, stream=stream, max_tokens=len(text))
    headers = script(["say", text, pace], tag=tag)
    try:
        if stream:
            said = await _streamed(tally, port, body, headers, tag)
        else:
            reply = await ask(port, CHAT, body, headers=headers)
            said = reply.text if reply.status == 200 else ""
            if reply.status != 200:
                tally.problem(f"{tag}: {reply.status} {reply.body[:200]!r}")
    except TimeoutError:
        tally.hung += 1
        tally.problem(f"{tag}: no end")
    except (OSError, EOFError) as error:
        tally.lost += 1
        tally.problem(f"{tag}: {error!r}")
    else:
        tally.judge(tag, said, "said only")


async def _streamed(tally: Tally, port: int, body: Any, headers: dict[str, str], tag: str) -> str:
    said, longest = "", 0.0
    async with exchange(port, CHAT, body, headers=headers) as opened:
        if await opened.head() != 200:
            tally.problem(f"{tag}: {opened.status} {(await opened.rest())[:200]!r}")
            return ""
        last = time.monotonic()
        while (event := await opened.event()) != DONE:
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            if "error" in event:
                tally.problem(f"{tag}: {event}")
                break
            for choice in event["choices"]:
                said += choice["delta"].get("content") or ""
    tally.gaps[tag] = longest
    return said


@asynccontextmanager
async def load(
    port: int | Callable[[], int], model: str, *, clients: int, tokens: int = len(ANSWER), name: str = "load"
) -> AsyncIterator[Tally]:
    """Clients that ask one thing after the other, every other one streaming, until the block ends; they end theirs."""
    tally = Tally(tokens=tokens)
    running = True
    numbers = itertools.count()

    async def client(stream: bool) -> None:
        while running:
            where = port() if callable(port) else port
            await one(tally, where, model, f"{name}-{next(numbers)}", stream=stream)

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(client(number % 2 == 0))
        try:
            yield tally
        finally:
            running = False
