"""What a check is, what it may find, and what it is given."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from dynamo.cli.referee.exchange import Server, ServerAnswer

MAX_EVIDENCE: Final = 1500  # characters of what was sent, and of what was seen


class Level(StrEnum):
    """The use that a server is ready for when its checks of this level pass."""

    CORE = "core"
    AGENT = "agent-ready"
    OPERATOR = "operator-ready"


class CheckOutcome(StrEnum):
    """What became of a check."""

    PASSED = "passed"
    FAILED = "failed"
    CANNOT_JUDGE = "cannot judge"
    SKIPPED = "skipped"


class Broken(Exception):
    """The server breaks the promise; the message is what was seen."""


class CannotJudge(Exception):
    """The promise cannot be judged here; the message is the reason."""


@dataclass(slots=True)
class RefereeRun:
    """What all checks of a run have in common."""

    server: Server
    model: str
    api_path: str  # of the first API that is judged
    secret: str = ""
    answers: dict[bytes, ServerAnswer | OSError] = field(
        default_factory=dict
    )  # by request; the checks send a fixed number
    locks: dict[bytes, asyncio.Lock] = field(default_factory=dict)  # so that a request on its way is not sent again


class Probe:
    """One check's way to the server. It keeps what was sent and seen last."""

    def __init__(self, shared: RefereeRun) -> None:
        self.shared, self.server, self.model = shared, shared.server, shared.model
        self.sent = self.seen = ""

    def note(self, sent: str, answer: ServerAnswer | None = None) -> None:
        """Keep an exchange as evidence: cut, and without the key."""
        self.sent = self._cut(sent)
        if answer is not None:
            heads = "\n".join(f"{name}: {value}" for name, value in answer.headers.items())
            self.seen = self._cut(f"HTTP {answer.status}\n{heads}\n\n{answer.body.decode(errors='replace')}")

    def hide(self, text: str) -> str:
        """Return a text without the key: a server may repeat it in the text of an error."""
        return text.replace(self.shared.secret, "[redacted]") if self.shared.secret else text

    def _cut(self, text: str) -> str:
        text = self.hide(text)
        return text if len(text) <= MAX_EVIDENCE else f"{text[:MAX_EVIDENCE]} ... ({len(text)} characters)"

    async def get(self, path: str, method: str = "GET") -> ServerAnswer:
        """Send a request without a body."""
        self.note(f"{method} {path}")
        async with self.server.line() as line:
            await line.send(self.server.request(method, path))
            answer = await line.answer(is_head=method == "HEAD")
        self.note(f"{method} {path}", answer)
        return answer

    async def post(self, path: str, body: Mapping[str, Any] | bytes, *, is_fresh: bool = False) -> ServerAnswer:
        """Send a body. The same body is sent once in a run, unless `is_fresh`."""
        data = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
        shown = f"POST {path}\n{data[: 2 * MAX_EVIDENCE].decode(errors='replace')}"
        self.note(shown)
        request = self.server.request("POST", path, data)
        answer = await (self._exchange(request) if is_fresh else self._once(request))
        self.note(shown, answer)
        return answer

    async def _once(self, request: bytes) -> ServerAnswer:
        answers = self.shared.answers
        async with self.shared.locks.setdefault(request, asyncio.Lock()):
            if request not in answers:
                try:
                    answers[request] = await self._exchange(request)
                except OSError as error:  # kept, too: a server that does not answer is waited for once
                    answers[request] = error
        found = answers[request]
        if isinstance(found, OSError):
            raise found
        return found

    async def _exchange(self, request: bytes) -> ServerAnswer:
        async with self.server.line() as line:
            await line.send(request)
            return await line.answer()


Run = Callable[[Probe], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Check:
    """One promise that clients rely on."""

    id: str
    level: Level
    severity: str  # major: clients break; minor: clients cope
    clause: str
    fix: str
    run: Run


@dataclass(frozen=True, slots=True)
class Result:
    """What one check found."""

    check: Check
    outcome: CheckOutcome
    reason: str
    sent: str
    seen: str
    seconds: float


def demand(holds: object, message: str) -> None:
    """Raise Broken unless it holds."""
    if not holds:
        raise Broken(message)


def served(answer: ServerAnswer, *, is_optional: bool = False) -> ServerAnswer:
    """Return an answer with status 200. A refused optional feature cannot be judged."""
    if is_optional and answer.status in (400, 404, 422, 501):
        raise CannotJudge(f"the server refuses it: {answer.message}")
    demand(answer.status == 200, f"expected status 200, got {answer.message}")
    return answer
