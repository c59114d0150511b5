"""The requests of a client as typed values, and the rules that they keep. Every broken one is a 400 that names the field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NoReturn, TypeAlias, cast

import msgspec
from msgspec import Struct

from dynamo.protocol.openai.errors import RequestRejected, not_built
from dynamo.protocol.openai.reader import RequestReader
from dynamo.protocol.openai.shapes import I64, U32, NvExt, RequestMedia
from dynamo.protocol.openai.validation import check_supported

MAX_INPUTS: Final = 2048  # OpenAI's limit
MAX_DIMENSIONS: Final = 1 << 20
ENCODING_FORMATS: Final = ("float", "base64")
POOLING_TASKS: Final = ("embed", "classify", "score", "token_embed", "token_classify")

Inputs: TypeAlias = Sequence[str] | Sequence[list[int]]
"""What is to be embedded: texts, or token ids that the client has made."""


class ResultRequest(Struct, kw_only=True, dict=True):
    """What every request for one result has, and what the way through the frontend needs of any request."""

    # What decoding found, as in `CommonRequest`: no fields, so that no JSON key can set them.
    unsupported = cast("tuple[str, ...]", ())
    ignored = cast("tuple[str, ...]", ())
    repaired = False
    key_owner = cast("str | None", None)
    cache_owner = cast("str | None", None)
    is_large = False
    media = cast("RequestMedia | None", None)  # fetched, so that the end of the request lets go of them

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


class ClassifyRequest(VectorRequest, kw_only=True, forbid_unknown_fields=True):
    """`/v1/classify`."""

    use_activation: bool | None = None
    request_id: str | None = None  # the client's own name of it; `x-request-id` does the same
    cache_salt: str | None = None


class PoolingRequest(VectorRequest, kw_only=True, forbid_unknown_fields=True):
    """`/v1/pooling`."""

    task: str | None = None
    encoding_format: str | None = None
    embed_dtype: str | None = None
    endianness: str | None = None
    dimensions: I64 | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    request_id: str | None = None
    cache_salt: str | None = None


class ScoreRequest(ResultRequest, kw_only=True, forbid_unknown_fields=True):
    """`/v1/score`: one text against many, or each of a list against its partner."""

    text_1: str | list[str]
    text_2: str | list[str]
    encoding_format: str | None = None
    truncate_prompt_tokens: I64 | None = None
    use_activation: bool | None = None
    priority: I64 | None = None

    def pairs(self) -> list[tuple[str, str]]:
        """Return what is compared. Call only after validation."""
        first, second = ([text] if isinstance(text, str) else text for text in (self.text_1, self.text_2))
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


class RankedDocument(Struct):
    """A document as Jina's and Cohere's clients may send it."""

    text: str


class RerankRequest(ResultRequest, kw_only=True, forbid_unknown_fields=True):
    """`/v1/rerank`, `/v2/rerank`, `/rerank`."""

    query: str
    documents: list[str | RankedDocument]
    top_n: I64 | None = None
    return_documents: bool | None = None
    truncate_prompt_tokens: I64 | None = None
    max_tokens_per_doc: I64 | None = None
    priority: I64 | None = None

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]

    def pairs(self) -> list[tuple[str, str]]:
        """Return the query with each document."""
        return [(self.query, text) for text in self.texts]


class AnyClassify(ClassifyRequest, forbid_unknown_fields=False):
    """The same request, read past unknown keys."""


class AnyPooling(PoolingRequest, forbid_unknown_fields=False):
    """The same request, read past unknown keys."""


class AnyScore(ScoreRequest, forbid_unknown_fields=False):
    """The same request, read past unknown keys."""


class AnyRerank(RerankRequest, forbid_unknown_fields=False):
    """The same request, read past unknown keys."""


EMBEDDINGS: Final = RequestReader(EmbeddingRequest, AnyEmbedding)
CLASSIFY: Final = RequestReader(ClassifyRequest, AnyClassify)
POOLING: Final = RequestReader(PoolingRequest, AnyPooling)
SCORE: Final = RequestReader(ScoreRequest, AnyScore)
RERANK: Final = RequestReader(RerankRequest, AnyRerank)


def validate_embedding(request: EmbeddingRequest) -> None:
    """Refuse a request that breaks a rule."""
    check_vector_request(request)
    check_choice("encoding_format", request.encoding_format, ENCODING_FORMATS)
    if request.dimensions is not None and not 1 <= request.dimensions <= MAX_DIMENSIONS:
        refuse(f"Dimensions must be at least 1 and at most {MAX_DIMENSIONS}, got {request.dimensions}", "dimensions")


def validate_classify(request: ClassifyRequest) -> None:
    """Refuse a request that breaks a rule."""
    check_vector_request(request)


def validate_pooling(request: PoolingRequest) -> None:
    """Refuse a request that breaks a rule, and forms of vectors that are not built."""
    check_vector_request(request)
    check_choice("task", request.task, POOLING_TASKS)
    if request.dimensions is not None:
        refuse("dimensions is currently not supported", "dimensions")
    check_choice("encoding_format", request.encoding_format, (*ENCODING_FORMATS, "bytes", "bytes_only"))
    check_choice("embed_dtype", request.embed_dtype, ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"))
    check_choice("endianness", request.endianness, ("native", "little", "big"))
    for field, built in (
        ("encoding_format", ENCODING_FORMATS),
        ("embed_dtype", ("float32",)),
        ("endianness", ("native", "little")),
    ):
        value = getattr(request, field)
        if value is not None and value not in built:
            raise not_built(f"Validation: `{field}` '{value}' is not in this version", field)


def validate_score(request: ScoreRequest) -> None:
    """Refuse a request that breaks a rule."""
    check_result_request(request)
    first, second = (_texts(getattr(request, field), field) for field in ("text_1", "text_2"))
    if len(first) not in (1, len(second)):
        refuse(
            f"Text_1 must be one text, or as many as text_2: got {len(first)} and {len(second)}",
            "text_1",
        )


def validate_rerank(request: RerankRequest) -> None:
    """Refuse a request that breaks a rule, in the words of 1.6.1 where it has some."""
    check_result_request(request)
    if not request.query.strip():
        refuse("Query cannot be empty or whitespace only", "query")
    if not request.documents:
        refuse("Documents cannot be empty", "documents")
    if len(request.documents) > MAX_INPUTS:
        refuse(f"Documents must have at most {MAX_INPUTS} entries, got {len(request.documents)}", "documents")
    for position, text in enumerate(request.texts):
        if not text.strip():
            refuse("Each document cannot be empty or whitespace only", f"documents[{position}]")
    if request.top_n is not None and request.top_n < 1:
        refuse("Parameter 'top_n' must be larger than 0", "top_n")
    if request.max_tokens_per_doc is not None:
        raise not_built(
            "Validation: `max_tokens_per_doc` is not in this version (truncate_prompt_tokens is)", "max_tokens_per_doc"
        )


def _texts(value: str | list[str], field: str) -> Sequence[str]:
    texts = [value] if isinstance(value, str) else value
    if not texts:
        refuse(f"{field.capitalize()} cannot be an empty list", field)
    if len(texts) > MAX_INPUTS:
        refuse(f"{field.capitalize()} must have at most {MAX_INPUTS} entries, got {len(texts)}", field)
    for position, text in enumerate(texts):
        if not text:
            refuse(f"{field.capitalize()}[{position}] cannot be empty", f"{field}[{position}]")
    return texts


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
    body = {name: value for name, value in msgspec.to_builtins(request).items() if value is not None}
    if "nvext" in body:
        body["nvext"] = {name: value for name, value in body["nvext"].items() if value is not None}
    return body


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
