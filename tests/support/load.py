"""Clients that ask one thing after the other, streamed and not, and know to the byte what they must get."""

from __future__ import annotations

import asyncio
import string
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from support.http_client import CHAT, ask, chat, script

ALPHABET = string.ascii_letters + string.digits  # no character twice: what is missing or doubled shows


@dataclass
class Answer:
    """One request and what became of it."""

    tag: str
    asked_at: float
    ended_at: float
    text: str
    port: int  # of whoever was asked last
    trouble: str = ""  # why it is no whole answer

    @property
    def seconds(self) -> float:
        return self.ended_at - self.asked_at


@dataclass
class Load:
    """What the clients got so far."""

    text: str
    answers: list[Answer] = field(default_factory=list)
    begun: int = 0
    refused: int = 0  # asked somebody who is leaving, and then the next one, as a balancer does

    @property
    def lost(self) -> list[Answer]:
        return [each for each in self.answers if each.trouble or set(self.text) - set(each.text)]

    @property
    def doubled(self) -> list[Answer]:
        return [each for each in self.answers if not each.trouble and len(each.text) > len(set(each.text))]

    @property
    def hung(self) -> int:
        """Requests that have not ended, or ended by the client's patience; asked when the load is over."""
        return self.begun - len(self.answers) + sum(each.trouble.startswith("TimeoutError") for each in self.answers)

    def check(self) -> None:
        """Raises AssertionError unless every answer is whole."""
        assert not self.lost, [(each.tag, each.trouble, each.text) for each in self.lost][:5]
        assert not self.doubled, [(each.tag, each.text) for each in self.doubled][:5]
        assert not self.hung
        assert {each.text for each in self.answers} == {self.text}


@asynccontextmanager
async def load(
    ports: Sequence[int], model: str, *, clients: int, text: str = ALPHABET, pace: float = 0.005, name: str = "load"
) -> AsyncIterator[Load]:
    """Every other client streams. `ports` may change meanwhile: each request asks the next one of those there are, and
    the one after that when it gets a 503 or no connection, as often as there are ports.

    Leaving the block lets every request end.
    """
    found, running = Load(text), True

    async def client(number: int) -> None:
        turn = number // 2
        while running:
            turn += 1
            found.begun += 1
            answer = Answer(f"{name}-{number}-{turn}", time.monotonic(), 0.0, "", 0)
            for attempt in range(len(ports)):
                if attempt:
                    found.refused += 1
                answer.port = ports[(turn + attempt) % len(ports)]
                if not await one(answer, is_streamed=bool(number % 2)):
                    break
            answer.ended_at = time.monotonic()
            found.answers.append(answer)
            if answer.trouble:
                await asyncio.sleep(0.05)  # a refusal takes no time, and a million of them tell nothing more

    async def one(answer: Answer, *, is_streamed: bool) -> bool:
        """Ask; whether somebody else should be asked."""
        body = chat(model, stream=is_streamed, max_tokens=len(text))
        answer.trouble, is_refused = "", False
        try:
            reply = await ask(answer.port, CHAT, body, headers=script(["say", text, pace], tag=answer.tag))
            if reply.status == 200:
                answer.text = reply.text
            else:
                answer.trouble, is_refused = f"{reply.status} {reply.body[:300]!r}", reply.status == 503
        except Exception as error:  # judged by the test
            answer.trouble, is_refused = f"{type(error).__name__}: {error}", isinstance(error, ConnectionRefusedError)
        return is_refused

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(client(number))
        try:
            yield found
        finally:
            running = False
