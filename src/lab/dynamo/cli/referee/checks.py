"""What a check is, what it may find, and what it is given."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from dynamo.cli.referee.exchange import Json, Server, ServerAnswer

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


class Cause(StrEnum):
    """Why a check cannot be judged. Those of `BLOCKING` keep a run from showing that core holds."""

    NOT_OFFERED = "not offered"  # an option, a limit or a metric that a server need not have
    MODEL = "model"  # what the model wrote does not reach what is judged
    ABSENT = "absent"  # the server lacks an API that --api names
    SERVER = "server"  # the server failed at what the check needs first
    TIME = "time"  # the limit of the run or of a wait came first


BLOCKING: Final = frozenset({Cause.ABSENT, Cause.SERVER, Cause.TIME})


class Broken(Exception):
    """The server breaks the promise; the message is what was seen."""


class CannotJudge(Exception):
    """The promise cannot be judged here; the message is the reason."""

    def __init__(self, message: str, cause: Cause = Cause.MODEL) -> None:
        super().__init__(message)
        self.cause = cause


class Evidence(Protocol):
    """What a check sent and saw last, for its report."""

    sent: str
    seen: str

    @property
    def timeout(self) -> float:
        """The seconds that an answer may take."""

    def hide(self, text: str) -> str:
        """Return a text without what no report may have."""


@dataclass(slots=True)
class RefereeRun:
    """What all checks of a run have in common."""

    server: Server
    model: str
    api_path: str  # of the first API that is judged
    secret: str = ""
    embedding_model: str = ""  # empty: the model
    limit: float = 60.0  # seconds for the whole run
    names_apis: bool = True  # False: every API that the server has is judged, and the others need not be there
    answers: dict[bytes, ServerAnswer | OSError] = field(
        default_factory=dict
    )  # by request; the checks send a fixed number
    locks: dict[bytes, asyncio.Lock] = field(default_factory=dict)  # so that a request on its way is not sent again
    steps: dict[str, Json] = field(
        default_factory=dict
    )  # what several checks need, such as one batch; by our own names


class Probe:
    """One check's way to the server. It keeps what was sent and seen last."""

    def __init__(self, shared: RefereeRun) -> None:
        self.shared, self.server, self.model = shared, shared.server, shared.model
        self.sent = self.seen = ""

    @property
    def embedding_model(self) -> str:
        """The model that makes embeddings."""
        return self.shared.embedding_model or self.model

    @property
    def timeout(self) -> float:
        """The seconds that one connection may take."""
        return self.server.timeout

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

    async def get(
        self, path: str, method: str = "GET", *, more: Mapping[str, str] | None = None, is_fresh: bool = True
    ) -> ServerAnswer:
        """Send a request without a body."""
        self.note(f"{method} {path}")
        request = self.server.request(method, path, None, more)
        answer = await (self._exchange(request, is_head=method == "HEAD") if is_fresh else self._once(request))
        self.note(f"{method} {path}", answer)
        return answer

    async def post(
        self,
        path: str,
        body: Mapping[str, Json] | bytes,
        *,
        more: Mapping[str, str] | None = None,
        is_fresh: bool = False,
    ) -> ServerAnswer:
        """Send a body. The same request is sent once in a run, unless `is_fresh`."""
        data = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
        shown = f"POST {path}\n{data[: 2 * MAX_EVIDENCE].decode(errors='replace')}"
        self.note(shown)
        request = self.server.request("POST", path, data, more)
        answer = await (self._exchange(request) if is_fresh else self._once(request))
        self.note(shown, answer)
        return answer

    async def step(self, name: str, make: Callable[[], Awaitable[Json]]) -> Json:
        """Return what `make` gives, made once in a run. Where it raises, each check that needs it raises the same."""
        made = self.shared.steps
        async with self.shared.locks.setdefault(name.encode(), asyncio.Lock()):
            if name not in made:
                try:
                    made[name] = await make()
                except (Broken, CannotJudge, OSError, TimeoutError) as error:
                    made[name] = error
        found = made[name]
        if isinstance(found, Exception):
            raise found
        return found

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

    async def _exchange(self, request: bytes, *, is_head: bool = False) -> ServerAnswer:
        async with self.server.line() as line:
            await line.send(request)
            return await line.answer(is_head=is_head)


Run = Callable[[Probe], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Promise:
    """One promise that clients rely on, and how to mend what breaks it."""

    id: str
    level: Level
    severity: str  # major: clients break; minor: clients cope
    clause: str
    fix: str


@dataclass(frozen=True, slots=True)
class Check(Promise):
    """A promise and how it is judged."""

    run: Run


@dataclass(frozen=True, slots=True)
class Result:
    """What one check found."""

    check: Promise
    outcome: CheckOutcome
    reason: str
    sent: str
    seen: str
    seconds: float
    cause: Cause | None = None  # of a check that cannot be judged


def demand(holds: object, message: str) -> None:
    """Raise Broken unless it holds."""
    if not holds:
        raise Broken(message)


def served(answer: ServerAnswer, *, is_optional: bool = False) -> ServerAnswer:
    """Return an answer with status 200. A refused optional feature cannot be judged."""
    if is_optional and answer.status in (400, 404, 405, 422, 501):
        raise CannotJudge(f"the server refuses it: {answer.message}", Cause.NOT_OFFERED)
    if answer.status == 429:
        raise CannotJudge(f"the server allows no more requests now: {answer.message}", Cause.SERVER)
    demand(answer.status == 200, f"expected status 200, got {answer.message}")
    return answer


Row = tuple[str, Run, Level, str, str, str]
"""Name, check, level, severity, the public document with its promise, how to mend it."""


def checks_of_rows(prefix: str, rows: Iterable[Row], is_there: Run) -> list[Check]:
    """Make the checks of one API. `is_there` raises CannotJudge where the server lacks the API."""

    def after(run: Run) -> Run:
        async def both(probe: Probe) -> None:
            await is_there(probe)
            await run(probe)

        return both

    return [
        Check(f"{prefix}.{name}", level, severity, clause, fix, after(run))
        for name, run, level, severity, clause, fix in rows
    ]


def demand_route(probe: Probe, answer: ServerAnswer, also: Container[int] = ()) -> None:
    """Raise CannotJudge where an answer shows that the server lacks a route."""
    if answer.status in (404, 405, 501) or answer.status in also:
        cause = Cause.ABSENT if probe.shared.names_apis else Cause.NOT_OFFERED
        raise CannotJudge(f"the server does not serve it: {answer.message}", cause)


def demand_fits(answer: ServerAnswer) -> None:
    """Demand status 200 of a long conversation, unless the model has no room for it."""
    text = answer.message.lower()
    if answer.status == 400 and any(word in text for word in ("context", "too long", "length", "maximum")):
        raise CannotJudge(f"the model has no room for the conversation: {answer.message}", Cause.NOT_OFFERED)
    served(answer)


def checks_of_named_events(stream: Callable[[Probe], Awaitable[ServerAnswer]]) -> tuple[Run, Run, Run]:
    """Return the checks of the type, the caching and the names of events that have names."""

    async def check_headers(probe: Probe) -> None:
        kind = (await stream(probe)).headers.get("content-type", "")
        demand(kind.startswith("text/event-stream"), f"Content-Type is {kind!r}")

    async def check_cache(probe: Probe) -> None:
        found = (await stream(probe)).headers.get("cache-control", "")
        demand("no-cache" in found or "no-store" in found, f"Cache-Control is {found!r}")

    async def check_names(probe: Probe) -> None:
        found = (await stream(probe)).named_events()
        demand(found, "the stream has no event")
        for name, event in found:
            demand(isinstance(event, dict), f"the data of an event {name!r} is not a JSON object")
            demand(name == event.get("type"), f"an event has the name {name!r} and the type {event.get('type')!r}")

    return check_headers, check_cache, check_names
