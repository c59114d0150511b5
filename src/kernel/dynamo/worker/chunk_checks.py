"""The shape of what an engine yields, and of the request it gets: checked here, so that a mistake names its field."""

from __future__ import annotations

import asyncio
import operator
import uuid
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final

from dynamo.contract.modes import DisaggregationMode
from dynamo.contract.requests.token_ids import normalize_request_token_ids
from dynamo.errors import InvalidArgument, Unknown
from dynamo.protocol.finish import CANCELLED

VALIDATE_SECONDS: Final = 1.0  # how long the validator waits for what an engine yields after its terminal chunk
MAX_TOKEN_ID: Final = 2**32 - 1

CHUNK_KEYS: Final = frozenset(
    {
        "completion_usage",
        "text",
        "tokens",
        "log_probs",
        "top_logprobs",
        "cum_log_probs",
        "stop_reason",
        "disaggregated_params",
        "encoder_result",
        "engine_data",
        "extra_args",
        "output_type",
        "content_parts",
        "worker_trace_link",
        "routing_data",
    }
)
"""Every key of a chunk that travels; others are ignored, so that an engine may annotate its chunks for itself."""


class InvalidChunk(Unknown):
    """The engine yielded something that is not a valid chunk: its fault and not the client's. Names what and why."""


async def check_silence(
    stream: AsyncGenerator[object, None],
    chunk: Mapping[str, object],
    word: str,
    mode: DisaggregationMode,
    *,
    last: bool,
) -> None:
    """Validator: nothing may follow a terminal chunk, and an encode terminal must carry its result."""
    if mode is DisaggregationMode.ENCODE and word != CANCELLED and not isinstance(chunk.get("encoder_result"), dict):
        raise Unknown("Encode-mode contract violation: the terminal chunk has no object-shaped encoder_result")
    if not last:
        return
    try:
        async with asyncio.timeout(VALIDATE_SECONDS):
            await anext(stream)
    except (StopAsyncIteration, TimeoutError):
        return
    except Exception as error:
        raise Unknown("item yielded after terminal item (an exception)") from error
    raise Unknown("item yielded after terminal item")


def checked_request(body: object) -> dict[str, object]:
    if not isinstance(body, dict):
        raise InvalidArgument(f"the request must be an object, got {type(body).__name__}")
    if type(body.get("token_ids")) is not list:
        if body.get("token_ids") is None:
            raise InvalidArgument("the request has no token_ids")
        try:
            normalize_request_token_ids(body)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"token_ids: {error}") from error
    if (info := body.get("bootstrap_info")) is not None:
        _check_bootstrap(info)
    return body


def _check_bootstrap(info: Any) -> None:
    """Convert the id of a hand-off to text: the native wire carries 16 bytes, every other wire text."""
    handoff_id = info.get("handoff_id") if isinstance(info, dict) else None
    if isinstance(handoff_id, bytes):
        try:
            info["handoff_id"] = str(uuid.UUID(bytes=handoff_id))
        except ValueError as error:
            raise InvalidArgument(f"bootstrap_info.handoff_id: {error}") from error


def choice_count(request: Mapping[str, object]) -> int:
    options = request.get("sampling_options")
    count = options.get("n") if isinstance(options, dict) else None
    return count if isinstance(count, int) and count > 1 else 1


def checked_ids(ids: object) -> list[int]:
    """Return a fresh list of u32s from a list, tuple or array. Raises TypeError naming what is wrong."""
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if not isinstance(ids, list | tuple):
        raise TypeError(f"token_ids must be a list of integers, got {type(ids).__name__}")
    checked = []
    for position, value in enumerate(ids):
        try:
            token = operator.index(value)
        except TypeError:
            raise TypeError(f"token_ids[{position}] must be an integer, got {type(value).__name__}") from None
        if isinstance(value, bool) or not 0 <= token <= MAX_TOKEN_ID:
            raise TypeError(f"token_ids[{position}] must be an unsigned 32-bit integer, got {value!r}")
        checked.append(token)
    return checked


def invalid_chunk(chunk: object, error: Exception) -> InvalidChunk:
    if not isinstance(chunk, Mapping):
        return InvalidChunk(f"the engine's chunk is invalid: expected a mapping, got {type(chunk).__name__}")
    if "token_ids" not in chunk:
        return InvalidChunk(f"the engine's chunk is invalid: no token_ids (keys: {sorted(map(str, chunk))})")
    return InvalidChunk(f"the engine's chunk is invalid: {error}")
