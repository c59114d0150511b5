"""The requests of a client as typed values, and the rules that they keep. Every broken one is a 400 that names the field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final, NoReturn, TypeAlias

import msgspec
from msgspec import Struct

from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.reader import RequestReader
from dynamo.protocol.openai.shapes import I64, U32, NvExt
from dynamo.protocol.openai.validation import check_supported

__all__ = [
    "EMBEDDINGS",
    "MAX_INPUTS",
    "EmbeddingRequest",
    "Inputs",
    "ResultRequest",
    "VectorRequest",
    "check_inputs",
    "client_body",
    "validate_embedding",
]

MAX_INPUTS: Final = 2048  # OpenAI's limit
MAX_DIMENSIONS: Final = 1 << 20
ENCODING_FORMATS: Final = ("float", "base64")

Inputs: TypeAlias = Sequence[str] | Sequence[list[int]]
"""What is to be embedded: texts, or token ids that the client has made."""


class ResultRequest(Struct, kw_only=True, dict=True):
    """What every request for one result has, and what the way through the frontend asks of any request."""

    # What decoding found, as in `CommonRequest`: in the instance's `__dict__`, where no JSON key can set it.
    unsupported: ClassVar[tuple[str, ...]] = ()
    repaired: ClassVar[bool] = False
    is_large: ClassVar[bool] = False

    model: str
    user: str | None = None
    nvext: NvExt | None = None

    @property
    def is_streaming(self) -> bool:
        return False

    def free_form(self) -> tuple[Any, ...]:
        """Return the members that may hold any JSON value, and so may nest."""
        return ()


class VectorRequest(ResultRequest, kw_only=True):
    """What the requests for vectors of texts share."""

    input: str | list[str | U32 | list[U32]]
    truncate_prompt_tokens: I64 | None = None
    add_special_tokens: bool | None = None
    priority: I64 | None = None


class EmbeddingRequest(VectorRequest, kw_only=True, forbid_unknown_fields=True):
    """`/v1/embeddings`: OpenAI's members, and those of vLLM that change what is computed."""

    encoding_format: str | None = None
    dimensions: I64 | None = None


class AnyEmbedding(EmbeddingRequest, forbid_unknown_fields=False):
    """The same request, read past unknown keys."""


EMBEDDINGS: Final = RequestReader(EmbeddingRequest, AnyEmbedding)


def validate_embedding(request: EmbeddingRequest) -> None:
    """Refuse a request that breaks a rule."""
    check_vector_request(request)
    check_choice("encoding_format", request.encoding_format, ENCODING_FORMATS)
    if request.dimensions is not None and not 1 <= request.dimensions <= MAX_DIMENSIONS:
        refuse(f"Dimensions must be at least 1 and at most {MAX_DIMENSIONS}, got {request.dimensions}", "dimensions")


def check_vector_request(request: VectorRequest) -> None:
    """Refuse what no request for vectors may have."""
    check_result_request(request)
    check_inputs(request.input)
    if (limit := request.truncate_prompt_tokens) is not None and limit != -1 and limit < 1:
        refuse(
            f"Truncate_prompt_tokens must be at least 1, or -1 for the model's length, got {limit}",
            "truncate_prompt_tokens",
        )
    if request.priority is not None and not -(2**31) <= request.priority < 2**31:
        refuse(f"Priority must be a signed number of 32 bits, got {request.priority}", "priority")


def check_result_request(request: ResultRequest) -> None:
    """Refuse what no request for a result may have."""
    check_supported(request.unsupported)
    if not request.model or request.model.isspace():
        refuse("Model cannot be empty", "model")
    if request.nvext is not None and request.nvext.token_data is not None:
        refuse("Nvext.token_data is for generated answers; send token ids as `input`", "nvext.token_data")


def check_inputs(value: str | list[Any], field: str = "input") -> Inputs:
    """Return the inputs one by one. Raises RequestRejected (400) for none, an empty one, a mixture, or too many."""
    if isinstance(value, str):
        if not value:
            refuse(f"{field.capitalize()} cannot be an empty string", field)
        return [value]
    if not value:
        refuse(f"{field.capitalize()} cannot be an empty list", field)
    kind = type(value[0])
    if kind is int:
        _check_alike(value, int, field)
        return [value]
    if len(value) > MAX_INPUTS:
        refuse(f"{field.capitalize()} must have at most {MAX_INPUTS} entries, got {len(value)}", field)
    _check_alike(value, kind, field)
    for position, entry in enumerate(value):
        if not entry:
            refuse(f"{field.capitalize()}[{position}] cannot be empty", f"{field}[{position}]")
    return value


def client_body(request: ResultRequest) -> dict[str, Any]:
    """Return the request as its client sent it, for a model that takes text; what was not sent is not in it."""
    return {name: value for name, value in msgspec.to_builtins(request).items() if value is not None}


def check_choice(field: str, value: str | None, known: Sequence[str]) -> None:
    """Refuse a word that is not one of `known`."""
    if value is not None and value not in known:
        refuse(f"{field.capitalize()} must be one of {', '.join(known)}, got '{value[:64]}'", field)


def refuse(message: str, param: str) -> NoReturn:
    """Raise the 400 of a broken rule."""
    raise RequestRejected(400, f"Validation: {message}", param=param)


def _check_alike(values: list[Any], kind: type, field: str) -> None:
    for position, entry in enumerate(values):
        if type(entry) is not kind:
            refuse(
                f"{field.capitalize()} must be texts, token ids, or lists of token ids, and not a mixture: entry {position} "
                "is of another kind than the first",
                f"{field}[{position}]",
            )
