"""What the engines of other projects share behind the contract: command line, start, the end of an answer, the probe."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final, Generic, Protocol, Self, TypeVar

from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import EngineConfig, GenerateChunk, LLMEngine
from dynamo.contract.health_check import build_health_check_payload, build_raw_health_check_payload
from dynamo.contract.modes import DisaggregationMode
from dynamo.engines.operations import EngineOperations, error_body
from dynamo.errors import EngineShutdown, InvalidArgument
from dynamo.protocol.records import MEDIA_KINDS
from dynamo.runtime.calls.context import Context
from dynamo.runtime.endpoint import Endpoint

NOTHING_DECLARED: Final[Mapping[str, object]] = MappingProxyType({})


class AdapterArguments(Protocol):
    """The fields that every engine's command line has once it is read."""

    @property
    def model(self) -> str: ...

    @property
    def served_name(self) -> str | None: ...

    @property
    def embeds(self) -> bool: ...  # makes vectors, and generates nothing


class AnswerChunks(Protocol):
    """Turns the outputs of one request into chunks."""

    is_complete: bool

    def chunk(self, output: Any) -> GenerateChunk | None:
        """Return what one output adds; None for nothing."""

    def cancelled(self) -> GenerateChunk:
        """Return the last chunk of a request that was cancelled."""


Arguments = TypeVar("Arguments", bound=AdapterArguments)


class AdapterEngine(LLMEngine, Generic[Arguments]):
    """An engine of another project. A subclass names it, reads its command line, and starts, feeds and ends it."""

    engine_name: ClassVar[str]
    reader: ClassVar[Callable[[list[str] | None], tuple[Any, WorkerConfig]]]  # `staticmethod(read_arguments)`
    _controlled: EngineOperations | None = None  # once it has started, where the engine has any

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self._was_cleaned_up = False

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        arguments, worker = await asyncio.to_thread(cls.reader, argv)
        return cls(arguments), worker

    async def check_wanted(self) -> None:
        """Call after each long step of `start`: a cleanup meanwhile found nothing, so what was made since is ended here."""
        if self._was_cleaned_up:
            await self.cleanup()
            raise EngineShutdown("this engine was cleaned up while it started")

    def described(
        self, context_length: int, *, declared: Mapping[str, object] = NOTHING_DECLARED, **facts: Any
    ) -> EngineConfig:
        """Return the record of a worker without media: requests with media are refused, whatever the model could do.

        `declared`: further runtime data.
        """
        return EngineConfig(
            model=self._arguments.model,
            served_model_name=self._arguments.served_name,
            context_length=context_length,
            runtime_data={MEDIA_KINDS: [], **declared},
            **facts,
        )

    def not_running(self) -> EngineShutdown:
        """Return the error of a request before the start or after the end."""
        return EngineShutdown(f"{self.engine_name} is not running")

    def check_task(self, *, embeds: bool) -> None:
        """Raise InvalidArgument for a request that this worker was not started for."""
        if self._arguments.embeds and not embeds:
            raise InvalidArgument("this worker makes embeddings and generates nothing")
        if embeds and not self._arguments.embeds:
            raise InvalidArgument("this worker generates; one that makes embeddings is started with --embedding-worker")

    async def answered(
        self, outputs: AsyncIterator[Any], answer: AnswerChunks, context: Context
    ) -> AsyncGenerator[GenerateChunk, None]:
        """Yield the chunks of an answer until it is complete or `context` is stopped.

        Raises EngineShutdown where the outputs end before the answer does.
        """
        async for output in outputs:
            if context.is_stopped():
                break
            chunk = answer.chunk(output)
            if chunk is not None:
                yield chunk
            if answer.is_complete:
                return
        if not context.is_stopped():
            raise EngineShutdown(f"{self.engine_name} ended an answer without its last output")
        yield answer.cancelled()

    # -- what an operator calls ---------------------------------------------------------------------------------------

    async def on_endpoint_ready(self, endpoint: Endpoint) -> None:
        refusals = {} if self._controlled is None else self._controlled.refusals()
        for name, reason in refusals.items():
            endpoint.runtime.register_engine_route(name, _refusing(reason))

    def supported_controls(self) -> set[str]:
        return set() if self._controlled is None else set(self._controlled.controls)

    def supported_updates(self) -> set[str]:
        return set() if self._controlled is None else set(self._controlled.updates)

    async def validate_engine_control(self, name: str, body: dict[str, Any]) -> dict[str, Any] | None:
        return None if self._controlled is None else self._controlled.refusal(name, body)

    async def engine_control(self, control: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._controlled is None:
            return await super().engine_control(control, body)
        return await self._controlled.control(control, body)

    async def engine_update(self, update: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._controlled is None:
            return await super().engine_update(update, body)
        return await self._controlled.update(update, body)

    def check_serving(self) -> None:
        """Raise WorkerUnavailable while a control has halted the engine."""
        if self._controlled is not None:
            self._controlled.check_serving()

    async def health_check_payload(self) -> dict[str, Any] | None:
        if self._arguments.embeds:
            return build_raw_health_check_payload({"token_ids": [[0]]})
        return build_health_check_payload(0)


def _refusing(reason: str) -> Callable[[object], Awaitable[dict[str, Any]]]:
    async def answer(_body: object) -> dict[str, Any]:
        return error_body(reason)

    return answer


def refuse_roles(args: argparse.Namespace, engine_name: str) -> None:
    """Raise InvalidArgument for a role that divides prefill and decode."""
    if args.disaggregation_mode is not DisaggregationMode.AGGREGATED:
        raise InvalidArgument(
            f"--disaggregation-mode {args.disaggregation_mode}: prefill and decode on different workers are not built for "
            f"{engine_name}"
        )


def positive(text: str) -> int:
    """Read a number above 0, as a type of argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value
