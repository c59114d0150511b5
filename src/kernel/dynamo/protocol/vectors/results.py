"""What a worker answers to a request for vectors, checked: its count, its lengths, its numbers."""

from __future__ import annotations

import binascii
import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from dynamo.errors import Unknown

MAX_RESULT_BYTES: Final = 64 * 1024 * 1024  # of all vectors of one request; nothing larger is gathered in memory
ITEM_BYTES: Final = 4


class InputVector(Struct, frozen=True):
    """One vector (or one for each token), as little-endian float32."""

    data: bytes
    shape: Sequence[int] | None = None  # (tokens, size) where it is one for each token

    def floats(self) -> array[float]:
        """Return its values, one after the other."""
        values = array("f", self.data)
        if sys.byteorder == "big":
            values.byteswap()
        return values

    def base64(self) -> bytes:
        return binascii.b2a_base64(self.data, newline=False)


class InputVectors(Struct, frozen=True):
    """The results of some inputs, in their order, and what they cost."""

    items: Sequence[InputVector]
    prompt_tokens: int | None = None  # None: the worker does not report it


def read_vectors(answer: Any, count: int) -> InputVectors:
    """Return the `count` vectors of a worker's answer. Raises Unknown naming what is wrong with it."""
    if not isinstance(answer, Mapping) or not isinstance(found := answer.get("embeddings"), list):
        raise Unknown("the worker answered a request for vectors without a list of `embeddings`")
    if len(found) != count:
        raise Unknown(f"the worker sent {len(found)} embeddings for {count} inputs")
    shapes = answer.get("shapes")
    if shapes is not None and (not isinstance(shapes, list) or len(shapes) != count):
        raise Unknown(f"the worker sent `shapes` that are no list of {count}")
    items = [_vector(value, None if shapes is None else shapes[n], n) for n, value in enumerate(found)]
    return InputVectors(items, _tokens(answer.get("prompt_tokens")))


def read_openai_embeddings(answer: Any, count: int) -> InputVectors:
    """Return the vectors of an answer in OpenAI's shape, which models that take text send. Raises Unknown."""
    if not isinstance(answer, Mapping) or not isinstance(found := answer.get("data"), list):
        raise Unknown("the worker answered a request for embeddings without a list of `data`")
    if len(found) != count:
        raise Unknown(f"the worker sent {len(found)} embeddings for {count} inputs")
    placed: dict[int, InputVector] = {}
    for position, entry in enumerate(found):
        if not isinstance(entry, Mapping) or "embedding" not in entry:
            raise Unknown(f"the worker's data[{position}] has no embedding")
        index = entry.get("index", position)
        if type(index) is not int or not 0 <= index < count or index in placed:
            raise Unknown(f"the worker's data[{position}] has the index {index!r} among {count} inputs")
        placed[index] = _vector(entry["embedding"], None, index)
    usage = answer.get("usage")
    tokens = usage.get("prompt_tokens") if isinstance(usage, Mapping) else None
    return InputVectors([placed[index] for index in range(count)], _tokens(tokens))


def check_total(vectors: Sequence[InputVector]) -> None:
    """Raise Unknown for vectors that are too many bytes to be gathered."""
    total = sum(len(vector.data) for vector in vectors)
    if total > MAX_RESULT_BYTES:
        raise Unknown(
            f"the workers sent {total} bytes of vectors, at most {MAX_RESULT_BYTES} are gathered for one request"
        )


def _vector(value: Any, shape: Any, position: int) -> InputVector:
    try:
        if isinstance(value, str):
            data = binascii.a2b_base64(value, strict_mode=True)
            if len(data) % ITEM_BYTES:
                raise ValueError(f"{len(data)} bytes are no float32 values")
        elif isinstance(value, list):
            packed = array("f", value)
            if sys.byteorder == "big":
                packed.byteswap()
            data = packed.tobytes()
        else:
            raise TypeError(f"a list or base64 was expected, not {type(value).__name__}")
    except (TypeError, ValueError, OverflowError) as error:
        raise Unknown(f"the worker's embedding {position} is invalid: {error}") from error
    if not data:
        raise Unknown(f"the worker's embedding {position} is empty")
    if shape is not None and (
        not isinstance(shape, list)
        or not all(type(side) is int and side > 0 for side in shape)
        or math.prod(shape) * ITEM_BYTES != len(data)
    ):
        raise Unknown(f"the worker's embedding {position} does not have its shape")
    vector = InputVector(data, shape)
    if not math.isfinite(sum(floats := vector.floats())) and not all(map(math.isfinite, floats)):
        raise Unknown(f"the worker's embedding {position} holds NaN or infinity")
    return vector


def _tokens(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
