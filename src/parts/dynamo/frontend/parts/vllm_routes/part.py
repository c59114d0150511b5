"""The routes of vLLM that its clients call beside those of OpenAI: no worker gets anything of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final, TypeVar

import msgspec
from msgspec import Struct, field

from dynamo import __version__
from dynamo.frontend.admission.process import Admission, Stage
from dynamo.frontend.base.access import Access
from dynamo.frontend.base.asgi import Receive, Scope, Send, reply
from dynamo.frontend.base.offload import LARGE_ANSWER_TOKENS
from dynamo.frontend.base.stage_timer import StageTimer
from dynamo.frontend.http.inference_route import InferenceRoute
from dynamo.frontend.http.json_route import JsonRoute
from dynamo.frontend.http.routes import GuardedRoute
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.parts.part import Kernel, Part
from dynamo.frontend.pipeline.api import CountingApi
from dynamo.frontend.pipeline.preprocess import Preprocessor, check_has_tokens
from dynamo.frontend.pipeline.results import TokenCountCall
from dynamo.protocol.model_types import ModelType
from dynamo.protocol.openai.body import BodyLimits, check_messages
from dynamo.protocol.openai.errors import RequestRejected, not_built
from dynamo.protocol.openai.reader import RequestReader
from dynamo.protocol.openai.schema import (
    ApiDescription,
    describe_operation,
    describe_read,
    generation_errors,
    json_content,
)
from dynamo.protocol.openai.shapes import U32, ChatRequest, JsonObject
from dynamo.protocol.openai.validation import check_supported, validate_chat
from dynamo.protocol.vectors.requests import ResultRequest


class TokenizeRequest(ChatRequest, kw_only=True, forbid_unknown_fields=True):
    """A prompt, or a chat with all that may shape its prompt. `model` may be left out where one model is served."""

    model: str = ""
    prompt: str | None = None
    messages: list[JsonObject] = field(default_factory=list)
    return_token_strs: bool | None = None
    chat_template: str | None = None


class DetokenizeRequest(ResultRequest, kw_only=True, forbid_unknown_fields=True):
    """The ids of tokens."""

    model: str = ""
    tokens: list[U32]


class _AnyTokenize(TokenizeRequest, forbid_unknown_fields=False):
    """The same request, read past unknown keys."""


class _AnyDetokenize(DetokenizeRequest, forbid_unknown_fields=False):
    """The same request, read past unknown keys."""


class Tokenized(Struct):
    count: int
    max_model_len: int | None  # None: the worker did not report it
    tokens: list[int]
    token_strs: list[str] | None = None  # with `return_token_strs`: as the vocabulary has them


class Detokenized(Struct):
    prompt: str


class Version(Struct):
    version: str  # of this package


_TOKENIZE: Final = RequestReader(TokenizeRequest, _AnyTokenize)
_DETOKENIZE: Final = RequestReader(DetokenizeRequest, _AnyDetokenize)


def decode_tokenize(body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> TokenizeRequest:
    """Decode a request to tokenize. Raises RequestRejected (400) for a body that is not one."""
    request: TokenizeRequest = _TOKENIZE.read(body, ignore_unsupported=ignore_unsupported, limits=limits)
    check_messages(request.messages, limits.messages)
    return request


def decode_detokenize(body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> DetokenizeRequest:
    """Decode a request to detokenize. Raises RequestRejected (400) for a body that is not one."""
    request: DetokenizeRequest = _DETOKENIZE.read(body, ignore_unsupported=ignore_unsupported, limits=limits)
    return request


def validate_tokenize(request: TokenizeRequest) -> None:
    """Refuse a request that has no text or two, or breaks a rule of chats."""
    if request.chat_template is not None:
        raise not_built("Validation: `chat_template` is not in this version: the model's own is used", "chat_template")
    if request.prompt is None:
        if not request.messages:
            raise RequestRejected(400, "Validation: one of `prompt` and `messages` is needed", param="prompt")
        validate_chat(request)
        return
    if request.messages:
        raise RequestRejected(400, "Validation: `prompt` and `messages` cannot both be tokenized", param="prompt")
    check_supported(request.unsupported)


R = TypeVar("R")

ANY_TYPE: Final = ~ModelType.Empty
"""Whatever a model does, its text has tokens; one that takes text is refused by its name."""


def _post(name: str, summary: str, request: str, answer: str) -> dict[str, object]:
    body, errors = json_content(request), generation_errors("ErrorBody")
    return {"post": describe_operation(name, summary, json_content(answer), body=body, errors=errors)}


def _ping(method: str) -> dict[str, object]:
    not_now = {"503": {"description": "No requests are taken."}}
    return describe_operation(f"{method}Ping", "The status of /health, without a body", {}, errors=not_now)


VLLM_ROUTES: Final = ApiDescription(
    [TokenizeRequest, DetokenizeRequest, Tokenized, Detokenized, Version],
    {
        "/tokenize": _post("tokenize", "The tokens of a prompt or a chat", "TokenizeRequest", "Tokenized"),
        "/detokenize": _post("detokenize", "The text of tokens", "DetokenizeRequest", "Detokenized"),
        "/version": {"get": describe_read("getVersion", "The version of this server", "Version")},
        "/ping": {method: _ping(method) for method in ("get", "post")},
    },
)


class _TokenApi(CountingApi[R]):
    """What both APIs share."""

    id_prefix = "tok-"
    model_type = ANY_TYPE
    needs_model = False

    def __init__(self, context_window: int | None) -> None:
        """`context_window`: what is reported as the length of every model; None: its own."""
        self._context_window = context_window

    async def _encoded(self, preprocessor: Preprocessor, tokens: int, make: Callable[[], Struct]) -> bytes:
        """Return a value as JSON; a long one is made beside the event loop."""
        if tokens < LARGE_ANSWER_TOKENS:
            return msgspec.json.encode(make())
        return await preprocessor.offload(lambda: msgspec.json.encode(make()))


class TokenizeApi(_TokenApi[TokenizeRequest]):
    """Returns the tokens that a model would get."""

    endpoint = "tokenize"

    def decode(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> TokenizeRequest:
        return decode_tokenize(body, ignore_unsupported=ignore_unsupported, limits=limits)

    def validate(self, request: TokenizeRequest) -> None:
        validate_tokenize(request)

    async def count(
        self, preprocessor: Preprocessor, request: TokenizeRequest, model: ServedModel, timer: StageTimer
    ) -> bytes:
        if request.prompt is None:
            ids = await preprocessor.chat_tokens(request, model, timer)
        else:
            ids = await preprocessor.text_tokens(request, request.prompt, model, timer)
        name_of = model.text.tokenizer.token_name if request.return_token_strs is True else None
        window = self._context_window or model.context_length

        def answer() -> Tokenized:
            return Tokenized(len(ids), window, ids, None if name_of is None else list(map(name_of, ids)))

        return await self._encoded(preprocessor, len(ids), answer)


class DetokenizeApi(_TokenApi[DetokenizeRequest]):
    """Returns the text of tokens, with the special ones among them."""

    endpoint = "detokenize"

    def decode(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> DetokenizeRequest:
        return decode_detokenize(body, ignore_unsupported=ignore_unsupported, limits=limits)

    def validate(self, request: DetokenizeRequest) -> None:
        check_supported(request.unsupported)

    async def count(
        self, preprocessor: Preprocessor, request: DetokenizeRequest, model: ServedModel, timer: StageTimer
    ) -> bytes:
        check_has_tokens(request.model, model)
        ids, size = request.tokens, model.text.vocabulary_size
        if size is not None and ids and (largest := max(ids)) >= size:
            text = f"Validation: tokens holds the id {largest}, but this model's ids end at {size - 1}"
            raise RequestRejected(400, text, param=f"tokens[{ids.index(largest)}]")

        def answer() -> Detokenized:
            return Detokenized(model.text.tokenizer.decode(ids, skip_special_tokens=False))

        return await self._encoded(preprocessor, len(ids), answer)


class PingRoute:
    """The status of `/health` without a body."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await reply(send, 200 if self._admission.stage is Stage.SERVING else 503, b"", content_type=None)


class VersionRoute(JsonRoute):
    """The version of this package."""

    async def _answer(self, scope: Scope, receive: Receive) -> bytes:
        return msgspec.json.encode(Version(__version__))


class VllmRoutes(Part):
    """The routes to a model's tokenizer, and the small ones."""

    name: ClassVar[str] = "vllm_routes"

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def inference(self) -> Mapping[str, InferenceRoute]:
        kernel, window = self._kernel, self._kernel.settings.context_window
        return {
            path: InferenceRoute(call, body_limit_bytes=kernel.settings.limits.body_limit_bytes, budget=kernel.budget)
            for path, call in {
                "/tokenize": TokenCountCall(TokenizeApi(window), kernel.pipeline),
                "/detokenize": TokenCountCall(DetokenizeApi(window), kernel.pipeline),
            }.items()
        }

    def routes(self) -> Sequence[GuardedRoute]:
        ping = PingRoute(self._kernel.pipeline.admission)
        return [
            GuardedRoute("/ping", ping, "GET", "POST", access=Access.OPEN),
            GuardedRoute("/version", VersionRoute(), "GET", access=Access.OPEN),
        ]

    def described(self) -> Sequence[ApiDescription]:
        return (VLLM_ROUTES,)
