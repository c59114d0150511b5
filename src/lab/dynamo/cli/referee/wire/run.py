"""What the checks of a worker's wires have in common: where it listens, what is sent to it, and the evidence."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from dynamo.cli.referee.checks import MAX_EVIDENCE, Broken, CannotJudge, Cause, Level, Promise
from dynamo.cli.referee.exchange import Json
from dynamo.runtime.calls.request_plane.mux.frames import pack
from dynamo.runtime.calls.request_plane.secret import SharedSecret

WIRES: Final = ("mux", "native")
SHORT: Final = 4  # tokens of a request that only has to be answered
LONG: Final = 256  # tokens of a request that is still under way when a check cancels it
FLOOD: Final = 120  # refused requests whose refusals are not read
FLOOD_PATH: Final = "x" * 60_000  # that of each: most workers repeat it, and so much fills any socket
FLOOD_SECONDS: Final = 1.0  # after which the worker is taken to read no more
MAX_SHOWN: Final = 160  # characters of one frame in the evidence

REQUEST: Final[dict[str, Json]] = {
    "model": "conformance",
    "token_ids": [11, 12, 13, 14, 15, 16, 17, 18],
    "stop_conditions": {"ignore_eos": True},
    "sampling_options": {"temperature": 0.0, "seed": 1},
    "output_options": {},
    "eos_token_ids": [],
    "annotations": [],
}
"""A request in tokens as frontends send it (docs/fields.md); `--model-request` replaces it."""


@dataclass(slots=True)
class WireRun:
    """The worker, and what all checks of a run have in common."""

    host: str
    port: int
    path: str
    request: Json = field(default_factory=lambda: dict(REQUEST))
    secret: SharedSecret | None = None
    timeout: float = 5.0
    limit: float = 60.0
    lacking: dict[str, CannotJudge] = field(default_factory=dict)  # the wires that the worker does not speak

    @property
    def is_in_tokens(self) -> bool:
        """Whether the request has token ids, so that its length can be chosen."""
        return isinstance(self.request, dict) and isinstance(self.request.get("token_ids"), list)

    def sized(self, tokens: int, **more: Json) -> Json:
        """Return the request for so many tokens; one without token ids is sent as it is."""
        if not self.is_in_tokens:
            return {**self.request, **more} if isinstance(self.request, dict) else self.request
        stop = self.request.get("stop_conditions") or {}
        return {**self.request, "stop_conditions": {**stop, "max_tokens": tokens}, **more}

    def wrong_types(self) -> Json:
        """Return the request with token ids of a wrong type. Raises CannotJudge where it has none."""
        if not self.is_in_tokens:
            raise CannotJudge("the request of --model-request has no token_ids to give a wrong type")
        return {**self.request, "token_ids": "no list"}


class WireProbe:
    """One check's way to the worker. It keeps what was sent and seen last."""

    def __init__(self, shared: WireRun) -> None:
        self.shared = shared
        self.sent = self.seen = ""

    @property
    def timeout(self) -> float:
        """The seconds that each thing that must come may take."""
        return self.shared.timeout

    def hide(self, text: str) -> str:
        """Return the text as it is: the secret itself never travels, and no answer has it."""
        return text

    def note_sent(self, line: str) -> None:
        """Keep what was sent as evidence: the last of it."""
        self.sent = f"{self.sent}{line}\n"[-MAX_EVIDENCE:]

    def note_seen(self, line: str) -> None:
        """Keep what came as evidence: the last of it."""
        self.seen = f"{self.seen}{line}\n"[-MAX_EVIDENCE:]


WireCheckRun: TypeAlias = Callable[[WireProbe], Awaitable[None]]
WireRow: TypeAlias = tuple[str, WireCheckRun, Level, str, str, str]
"""Name, check, level, severity, the section with its promise, how to mend the worker."""


@dataclass(frozen=True, slots=True)
class WireCheck(Promise):
    """A promise of a wire and how it is judged."""

    run: WireCheckRun


def wire_checks(wire: str, page: str, rows: Iterable[WireRow]) -> list[WireCheck]:
    """Make the checks of a wire. Where the worker does not speak it, they cannot be judged."""

    def where_spoken(run: WireCheckRun) -> WireCheckRun:
        async def judged(probe: WireProbe) -> None:
            lacking = probe.shared.lacking.get(wire)
            if lacking is not None:
                raise CannotJudge(str(lacking), lacking.cause)
            await run(probe)

        return judged

    return [
        WireCheck(f"{wire}.{name}", level, severity, f"{page}, {clause}", fix, where_spoken(run))
        for name, run, level, severity, clause, fix in rows
    ]


def shown(payload: bytes) -> str:
    """Return the bytes of a frame as a person reads them: msgpack decoded, others in hex."""
    try:
        text = repr(msgspec.msgpack.decode(payload))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        text = payload[:MAX_SHOWN].hex(" ")
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ... ({len(payload)} bytes)"


async def connected(probe: WireProbe) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the worker. Raises Broken where it does not take the connection in time, and OSError."""
    shared = probe.shared
    try:
        async with asyncio.timeout(probe.timeout):
            return await asyncio.open_connection(shared.host, shared.port)
    except TimeoutError:
        raise Broken(f"the connection was not taken within {probe.timeout:g} s") from None


def stop_reading(writer: asyncio.StreamWriter) -> None:
    """Read nothing more from a connection, and let the system keep little of what comes."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's transport reads, too


async def flood(send: Callable[[], Awaitable[None]], count: int) -> None:
    """Send so often, until the worker takes no more."""
    with suppress(TimeoutError):
        async with asyncio.timeout(FLOOD_SECONDS):
            for _ in range(count):
                await send()


def too_short(what: str) -> CannotJudge:
    """Return why a check needs a longer answer than the engine gave."""
    return CannotJudge(f"the answer of {what} was over before what is judged", Cause.MODEL)


def encoded(body: Json) -> bytes:
    """Return a body in msgpack."""
    return pack(body)


def as_json(value: Json) -> bytes:
    """Return a value in JSON, as compact as the native system writes it."""
    return json.dumps(value, separators=(",", ":")).encode()
