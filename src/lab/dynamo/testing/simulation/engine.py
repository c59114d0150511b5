"""An engine whose next token is a hash of everything before it, so that a lost, doubled or misplaced token shows at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from hashlib import blake2b
from typing import Final, Protocol

from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine
from dynamo.errors import InvalidArgument
from dynamo.protocol.openai.shapes import JsonMapping
from dynamo.runtime.calls.context import Context

_ALPHABET: Final = (
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"  # one byte, one token, one character
)
_DIGEST_BYTES: Final = 8


class _Prefix:
    """The hash of a growing sequence of tokens."""

    __slots__ = ("_state",)

    def __init__(self, prompt: Sequence[int], seed: int) -> None:
        self._state = blake2b(b"%d:" % seed, digest_size=_DIGEST_BYTES)
        self._state.update(b",".join(b"%d" % token for token in prompt))

    def next(self) -> int:
        """Return the token that follows, which then belongs to the prefix."""
        token = _ALPHABET[self._state.digest()[0] % len(_ALPHABET)]
        self._state.update(b",%d" % token)
        return token


def continuation(prompt: Sequence[int], count: int, *, seed: int = 0) -> list[int]:
    """Return the first `count` tokens that every `PrefixEngine` generates after `prompt`."""
    prefix = _Prefix(prompt, seed)
    return [prefix.next() for _ in range(count)]


class Step:
    """What one request is doing; the observer may delay, stall or fail it."""

    __slots__ = ("context", "origin", "prompt", "seed", "tokens")

    def __init__(self, prompt: list[int], seed: int, context: Context) -> None:
        self.prompt, self.seed, self.context = prompt, seed, context
        # The client's own prompt: behind it stands what another worker had sent before it was lost.
        self.origin = bytes(prompt[: context.prompt_tokens])
        self.tokens = 0  # sent so far


class Observer(Protocol):
    """What the simulation learns of an engine, and how it interferes."""

    def began(self, step: Step) -> None: ...

    async def before_token(self, step: Step) -> None:
        """Wait as long as the token takes; may raise."""

    def ended(self, step: Step, reason: str | None) -> None:
        """Record the generator's `finally`; `reason` None: the generator was closed or failed before its last chunk."""

    def aborted(self, context: Context) -> None: ...

    def said_goodbye(self) -> None:
        """Record the call of `drain` or `cleanup`: no request may be served from here on."""


class PrefixEngine(LLMEngine):
    """Deterministic, polls cancellation before every token, and reports everything to its observer."""

    def __init__(
        self, model: str, observer: Observer, *, tokens_per_chunk: Callable[[Step], int] = lambda _: 1
    ) -> None:
        self._model, self._observer = model, observer
        self._tokens_per_chunk = tokens_per_chunk
        self.running = 0

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[PrefixEngine, WorkerConfig]:
        """Refuse to parse arguments: the simulation makes this engine."""
        raise InvalidArgument("PrefixEngine is made by a simulated cluster, not from a command line")

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(self._model, context_length=4096)

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        prompt = list(request["token_ids"])
        stops: JsonMapping = request.get("stop_conditions") or {}
        limit = stops.get("max_tokens") or 16
        seed = (request.get("sampling_options") or {}).get("seed") or 0
        step = Step(prompt, seed, context)
        prefix = _Prefix(prompt, seed)
        reason: str | None = None
        self.running += 1
        self._observer.began(step)
        try:
            while step.tokens < limit:
                if context.is_stopped():
                    reason = "cancelled"
                    yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
                    return
                await self._observer.before_token(step)
                if context.is_stopped():
                    continue
                count = min(self._tokens_per_chunk(step), limit - step.tokens)
                tokens = [prefix.next() for _ in range(count)]
                step.tokens += count
                if step.tokens < limit:
                    yield {"token_ids": tokens, "index": 0}
            reason = "length"
            yield {
                "token_ids": tokens,
                "index": 0,
                "finish_reason": "length",
                "completion_usage": {
                    "prompt_tokens": len(prompt),
                    "completion_tokens": step.tokens,
                    "total_tokens": len(prompt) + step.tokens,
                },
            }
        finally:
            self.running -= 1
            self._observer.ended(step, reason)

    async def abort(self, context: Context) -> None:
        self._observer.aborted(context)

    async def drain(self) -> None:
        self._observer.said_goodbye()
        await asyncio.sleep(0)

    async def cleanup(self) -> None:
        self._observer.said_goodbye()
