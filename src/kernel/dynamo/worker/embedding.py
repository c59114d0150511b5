"""Requests for vectors at the worker: call `embed`, check what it yields, and answer with one object.

The object is that of the native wire: base64 of little-endian float32 for each input, in the order of the inputs.
"""

from __future__ import annotations

import binascii
import math
import sys
from array import array
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final

from dynamo.contract.chunks import CompletionUsage, usage
from dynamo.contract.embedding import Embeds
from dynamo.contract.engine import BaseEngine
from dynamo.errors import InvalidArgument, Unknown
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import Handler, ResponseSink
from dynamo.worker.cancellation import CancellationWatch, close_generator
from dynamo.worker.chunk_checks import checked_ids
from dynamo.worker.engine_failures import ErrorMapping, end_failed, is_engine_failure

MAX_INPUTS: Final = 2048  # of one request to a worker; frontends send far fewer


def offers_embeddings(engine: BaseEngine) -> bool:
    """Return whether an engine overrides `embed`."""
    return isinstance(engine, Embeds) and type(engine).embed is not Embeds.embed


class EmbedServing:
    """Serves requests whose `token_ids` is a list of inputs, and leaves all others to `generate`."""

    def __init__(
        self, engine: BaseEngine, generate: Handler, *, served_name: str, errors: ErrorMapping | None = None
    ) -> None:
        """`engine` must override `embed`. `served_name`: what the answers call the model."""
        assert isinstance(engine, Embeds)
        self._engine, self._embeds, self._generate = engine, engine, generate
        self._served_name = served_name
        self._errors = errors or ErrorMapping(engine)

    async def handle(self, body: object, context: Context, sink: ResponseSink) -> None:
        """Serve one request."""
        members = body if isinstance(body, dict) else {}
        inputs = members.get("token_ids")
        if not isinstance(inputs, list) or not inputs or not isinstance(inputs[0], list | tuple):
            await self._generate(body, context, sink)
            return
        watch = CancellationWatch(self._engine, context, defer=False)
        stream: AsyncGenerator[object, None] | None = None
        try:
            request = {**members, "token_ids": _checked_inputs(inputs)}
            stream = self._embeds.embed(request, context=context)  # type: ignore[arg-type]  # checked here
            results = _Results(len(inputs))
            async for item in stream:
                results.add(item)
                if sink.ended:
                    return
            if not context.is_stopped():
                sink.send_object({"data": results.body(sum(map(len, request["token_ids"])), self._served_name)})
            sink.end()
        except BaseException as error:
            end_failed(error, context, sink, watch, self._errors)
            if not is_engine_failure(error):
                raise
        finally:
            watch.finished()
            if stream is not None:
                await close_generator(stream, context)
            await watch.settle()


class _Results:
    """What an engine has yielded of one request."""

    def __init__(self, inputs: int) -> None:
        self._vectors: list[bytes | None] = [None] * inputs
        self._shapes: list[list[int] | None] = [None] * inputs

    def add(self, item: object) -> None:
        """Take one result. Raises Unknown naming what is wrong with it."""
        if not isinstance(item, dict) or "embedding" not in item:
            raise Unknown(f"embed() must yield objects with `index` and `embedding`, got {type(item).__name__}")
        index = item.get("index")
        if type(index) is not int or not 0 <= index < len(self._vectors):
            raise Unknown(f"embed() yielded the index {index!r}: this request has {len(self._vectors)} input(s)")
        if self._vectors[index] is not None:
            raise Unknown(f"embed() yielded the result of input {index} twice")
        vector, shape = item["embedding"], item.get("shape")
        if hasattr(vector, "reshape"):  # an array
            shape = vector.shape if shape is None and len(vector.shape) > 1 else shape
            vector = vector.reshape(-1)
        packed = _packed(vector, index)
        self._shapes[index] = _checked_shape(shape, packed, index)
        self._vectors[index] = packed

    def body(self, prompt_tokens: int, model: str) -> dict[str, object]:
        """Return the answer. Raises Unknown while a result is missing."""
        missing = [index for index, vector in enumerate(self._vectors) if vector is None]
        if missing:
            raise Unknown(f"embed() ended without a result for input {missing[0]} ({len(missing)} missing)")
        counts: CompletionUsage = usage(prompt_tokens, 0)
        body: dict[str, object] = {
            "embeddings": [binascii.b2a_base64(vector or b"", newline=False).decode() for vector in self._vectors],
            "prompt_tokens": counts["prompt_tokens"],
            "total_tokens": counts["total_tokens"],
            "model": model,
        }
        if any(shape is not None for shape in self._shapes):
            body["shapes"] = self._shapes
        return body


def _checked_inputs(inputs: Sequence[object]) -> list[list[int]]:
    if len(inputs) > MAX_INPUTS:
        raise InvalidArgument(f"token_ids holds {len(inputs)} inputs, at most {MAX_INPUTS} are served in one request")
    found = []
    for position, ids in enumerate(inputs):
        try:
            checked = checked_ids(ids)
        except TypeError as error:
            raise InvalidArgument(f"token_ids[{position}]: {error}") from error
        if not checked:
            raise InvalidArgument(f"token_ids[{position}] must not be empty")
        found.append(checked)
    return found


def _packed(vector: Any, index: int) -> bytes:
    """Return a vector as little-endian float32. Raises Unknown for anything else, and for values that are not finite."""
    try:
        if isinstance(vector, bytes | bytearray):
            values = array("f", bytes(vector))
            if sys.byteorder == "big":
                values.byteswap()
        else:
            values = array("f", vector.tolist() if hasattr(vector, "tolist") else vector)
    except (TypeError, ValueError, OverflowError) as error:
        raise Unknown(f"embed() yielded an embedding for input {index} that is no list of floats: {error}") from error
    if not values:
        raise Unknown(f"embed() yielded an empty embedding for input {index}")
    if not math.isfinite(sum(values)) and not all(map(math.isfinite, values)):
        raise Unknown(f"embed() yielded an embedding for input {index} that holds NaN or infinity")
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _checked_shape(shape: object, packed: bytes, index: int) -> list[int] | None:
    if shape is None:
        return None
    if not isinstance(shape, list | tuple) or not all(type(side) is int and side > 0 for side in shape):
        raise Unknown(f"embed() yielded the shape {shape!r} for input {index}; it must be a list of numbers above 0")
    if math.prod(shape) * 4 != len(packed):
        raise Unknown(f"embed() yielded {len(packed) // 4} values for input {index}, the shape says {list(shape)}")
    return list(shape)
