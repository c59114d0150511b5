"""One request on its way through a replay, and what is kept of it afterwards. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from dynamo.replay.trace import PromptBlocks, TraceRequest

NEVER: Final = -1.0  # of a time


class RequestFigures(msgspec.Struct, frozen=True, gc=False):
    """One request of a replay as its report has it. Times are milliseconds since the start of the trace."""

    request_id: str
    status: str  # "finished", "rejected" (larger than a worker's cache) or "failed" (no worker was there)
    worker: int | None  # the number of the worker that ended it, from 0
    frontend: int
    arrival_ms: float
    first_admit_ms: float | None
    first_token_ms: float | None
    last_token_ms: float | None
    ttft_ms: float | None
    ttst_ms: float | None  # from the first to the second token
    itl_ms: float | None  # the mean of this request
    e2e_latency_ms: float | None
    input_tokens: int
    reused_input_tokens: int
    output_tokens: int
    moves: int = 0  # how often it went on at another worker
    policy_class: str | None = None


class RequestTimes:
    """When a request arrived, was admitted and got its tokens, in ms; -1: not yet."""

    __slots__ = ("admitted", "arrived", "first", "last", "second")

    def __init__(self, arrived_ms: float) -> None:
        self.arrived = arrived_ms
        self.admitted = self.first = self.second = self.last = NEVER


class Flight:
    """One request while it is served, and after. The cluster writes it."""

    __slots__ = (
        "blocks",
        "frontend",
        "moves",
        "request",
        "reused_tokens",
        "status",
        "times",
        "tokens",
        "worker",
    )

    def __init__(self, request: TraceRequest, blocks: PromptBlocks, frontend: int, now_ms: float) -> None:
        self.request = request
        self.blocks = blocks
        self.frontend = frontend
        self.worker: int | None = None
        self.status = "waiting"
        self.times = RequestTimes(now_ms)
        self.reused_tokens = 0
        self.tokens = 0
        self.moves = 0

    @property
    def booking_id(self) -> str:
        """The id under which a router knows the current try."""
        return f"{self.request.request_id}#{self.moves}" if self.moves else self.request.request_id

    def figures(self) -> RequestFigures:
        """Return what the report keeps."""
        has_tokens = self.tokens > 0
        times = self.times
        ttft = times.first - times.arrived if has_tokens else None
        return RequestFigures(
            request_id=self.request.request_id,
            status=self.status,
            worker=self.worker,
            frontend=self.frontend,
            arrival_ms=_rounded(times.arrived),
            first_admit_ms=_rounded(times.admitted) if times.admitted >= 0 else None,
            first_token_ms=_rounded(times.first) if has_tokens else None,
            last_token_ms=_rounded(times.last) if has_tokens else None,
            ttft_ms=None if ttft is None else _rounded(ttft),
            ttst_ms=_rounded(times.second - times.first) if times.second >= 0 else None,
            itl_ms=_rounded((times.last - times.first) / (self.tokens - 1)) if self.tokens > 1 else None,
            e2e_latency_ms=_rounded(times.last - times.arrived) if has_tokens else None,
            input_tokens=self.request.prompt_tokens,
            reused_input_tokens=self.reused_tokens,
            output_tokens=self.tokens,
            moves=self.moves,
            policy_class=self.request.policy_class,
        )


def _rounded(milliseconds: float) -> float:
    return round(milliseconds, 4)
