"""Ollama's API as a part: its requests go the way of chat and of embeddings, its answers are lines of JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from time import perf_counter
from typing import ClassVar, Final

import msgspec

from dynamo.frontend.apis.chat import ChatApi
from dynamo.frontend.apis.vectors import EmbeddingsApi
from dynamo.frontend.base.access import Access, identity_of
from dynamo.frontend.base.asgi import Receive, Scope, first_headers, read_body
from dynamo.frontend.base.offload import Offload
from dynamo.frontend.http.inference_route import InferenceRoute
from dynamo.frontend.http.json_route import JsonRoute
from dynamo.frontend.http.routes import GuardedRoute
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.parts.ollama.messages import (
    API_VERSION,
    OLLAMA,
    LoweredOllama,
    OllamaEmbedding,
    called,
    decode_chat,
    decode_embed,
    decode_generate,
    described_model,
    embed_body,
    nanoseconds,
    read_named,
)
from dynamo.frontend.parts.ollama.schema import OLLAMA_API
from dynamo.frontend.parts.part import Kernel, Part
from dynamo.frontend.pipeline.api import Answer, Renderer, RenderOptions
from dynamo.frontend.pipeline.collector import CollectedAnswer
from dynamo.frontend.pipeline.events import ChoiceOutput, Finished, Logprobs
from dynamo.frontend.pipeline.exchange import Exchange
from dynamo.frontend.pipeline.generation_call import GenerationCall
from dynamo.frontend.pipeline.inference import Call
from dynamo.frontend.pipeline.reading import Resolved
from dynamo.frontend.pipeline.result_api import ResultAnswer, ResultReply
from dynamo.frontend.pipeline.results import ResultCall
from dynamo.frontend.pipeline.sink import OpenAnswer
from dynamo.protocol.model_types import ModelType
from dynamo.protocol.openai.body import BodyLimits
from dynamo.protocol.openai.schema import ApiDescription
from dynamo.protocol.vectors.requests import EmbeddingRequest
from dynamo.text.output import CallDropped, Content, JoinedCall, OutputEvent, Reasoning, joined

NameOf = Callable[[str], str]
Decode = Callable[[bytes, BodyLimits, NameOf], LoweredOllama]
EPOCH: Final = "1970-01-01T00:00:00Z"  # when a model was made that no worker has described yet
NEVER: Final = "2999-01-01T00:00:00Z"  # when a model would be unloaded


def _written(at: datetime) -> str:
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")


class OllamaGeneration(ChatApi):
    """`/api/chat` and `/api/generate`: a request becomes a chat request, so that everything of chat serves it."""

    id_prefix = "ollama-"
    dialect = OLLAMA

    def __init__(self, endpoint: str, decode: Decode, name_of: NameOf) -> None:
        self.endpoint = endpoint  # type: ignore[misc]  # one class serves two endpoints
        self._decode, self._name_of = decode, name_of

    def decode(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> LoweredOllama:
        return self._decode(body, limits, self._name_of)

    def renderer(self, answer: Answer, options: RenderOptions) -> Renderer:
        return _Lines(answer, options)


class _Lines(Renderer):
    """A line of JSON for each piece; the last one has the counts and the times."""

    def __init__(self, answer: Answer, options: RenderOptions) -> None:
        super().__init__(answer, options)
        request = answer.request
        assert isinstance(request, LoweredOllama)
        self._is_prompt, self._shows_thinking = request.is_prompt, request.shows_thinking
        self._calls: list[OutputEvent] = []
        self._finished: Finished | None = None

    def stream(self, output: ChoiceOutput) -> bytes:
        text = thinking = ""
        for event in output.events:
            if isinstance(event, Content):
                text += event.text
            elif isinstance(event, Reasoning):
                thinking += event.text
            elif isinstance(event, Finished):
                self._finished = event
            elif not isinstance(event, Logprobs):
                self._calls.append(event)
                text += event.text if isinstance(event, CallDropped) else ""
        thinking = thinking if self._shows_thinking else ""
        return self._line(self._piece(text, thinking)) if text or thinking else b""

    def splice(self) -> None:
        return None

    def end(self, *, with_usage: bool) -> bytes:
        calls = joined(self._calls).calls
        made = self._line(self._piece("", "", calls)) if calls and not self._is_prompt else b""
        return made + self._line(self._piece("", ""), self._finished)

    def routed(self, nvext: bytes) -> bytes:
        return self.end(with_usage=False)

    def collect(self, collected: CollectedAnswer) -> bytes:
        choice = collected.choices[0]
        whole = choice.joined()
        thinking = whole.reasoning if self._shows_thinking else ""
        return self._line(self._piece(whole.content, thinking, whole.calls), choice.finished).rstrip()

    def _piece(self, text: str, thinking: str, calls: Sequence[JoinedCall] = ()) -> dict[str, object]:
        members: dict[str, object] = {"response" if self._is_prompt else "content": text}
        if thinking:
            members["thinking"] = thinking
        if self._is_prompt:
            return members
        if calls:
            members["tool_calls"] = [called(call.name, call.arguments) for call in calls]
        return {"message": {"role": "assistant", **members}}

    def _line(self, members: Mapping[str, object], finished: Finished | None = None) -> bytes:
        head = {"model": self._answer.request.model, "created_at": _written(datetime.now(UTC))}
        done = {"done": False} if finished is None else self._done(finished)
        return msgspec.json.encode({**head, **members, **done}) + b"\n"

    def _done(self, finished: Finished) -> dict[str, object]:
        exchange, tally = self._answer.exchange, self._answer.work.tally
        now, begin = exchange.now(), exchange.arrival.at
        dispatched, first = (at or now for at in exchange.phase_times[3:5])
        return {
            "done": True,
            "done_reason": "length" if finished.reason == "length" else "stop",
            "total_duration": nanoseconds(now - begin),
            "load_duration": 0,
            "prompt_eval_count": tally.prompt_tokens if tally.is_usage_known else 0,
            "prompt_eval_duration": nanoseconds(first - dispatched),
            "eval_count": tally.completion_tokens if tally.is_usage_known else 0,
            "eval_duration": nanoseconds(now - first),
        }


class LoadingCall(GenerationCall):
    """A call whose requests may only load a model: they are answered once it can be called."""

    async def _answer(self, exchange: Exchange, resolved: Resolved, opened: OpenAnswer) -> None:
        request = resolved.request
        if not (isinstance(request, LoweredOllama) and request.only_loads):
            await super()._answer(exchange, resolved, opened)
            return
        exchange.timer.answering()
        said = {"response": ""} if request.is_prompt else {"message": {"role": "assistant", "content": ""}}
        head = {"model": request.model, "created_at": _written(datetime.now(UTC))}
        await opened.sink.reply(200, msgspec.json.encode({**head, **said, "done": True, "done_reason": "load"}))


class OllamaEmbedApi(EmbeddingsApi):
    """`/api/embed`."""

    endpoint = "ollama_embed"
    dialect = OLLAMA

    def __init__(self, name_of: NameOf) -> None:
        self._name_of = name_of

    def decode(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> OllamaEmbedding:
        request = decode_embed(body, limits, self._name_of)
        request.began = perf_counter()
        return request

    async def render(self, offload: Offload, request: EmbeddingRequest, answer: ResultAnswer) -> ResultReply:
        assert isinstance(request, OllamaEmbedding)
        found = await super().render(offload, request, answer)
        return ResultReply(await offload(partial(embed_body, request, found.body, perf_counter())))


class OllamaModels(JsonRoute):
    """`/api/tags`, `/api/ps`, `/api/show` and `/api/version`."""

    dialect = OLLAMA

    def __init__(self, kernel: Kernel, name_of: NameOf) -> None:
        self._kernel, self._name_of = kernel, name_of

    async def _answer(self, scope: Scope, receive: Receive) -> bytes:
        caller, models, asked = identity_of(scope), self._kernel.pipeline.models, scope["path"].rpartition("/")[2]
        allowed = [model for model in models.models() if caller is None or caller.allows_model(model.name)]
        if asked == "version":
            return msgspec.json.encode({"version": API_VERSION})
        unloaded = [name for name in models.names.unloaded() if caller is None or caller.allows_model(name)]
        if asked == "show":
            limit = self._kernel.settings.limits.body_limit_bytes
            name = self._name_of(read_named(await read_body(first_headers(scope), receive, limit, self._kernel.budget)))
            found = models.lookup(name)
            is_known = found is not None or name in unloaded
            if not is_known or (caller is not None and not caller.allows_model(name)):
                raise OLLAMA.unknown_model(name, [*(model.name for model in allowed), *unloaded])
            return msgspec.json.encode(_shown(name, found))
        listed = [described_model(model.name, model.created_at_text) for model in allowed]
        if asked == "tags":
            listed += [described_model(name, EPOCH) for name in unloaded]
        else:
            for entry, model in zip(listed, allowed, strict=True):
                entry |= {"expires_at": NEVER, "size_vram": 0, "context_length": model.context_length or 0}
        return msgspec.json.encode({"models": listed})


def _shown(name: str, model: ServedModel | None) -> dict[str, object]:
    """Return what is known of a model; None: it is loaded with its first request, and only its name is known."""
    if model is None:
        return _described(described_model(name, EPOCH), None, [])
    config, surfaces = model.card.runtime_config, model.surface_bits
    can = {
        "completion": surfaces & (ModelType.Chat | ModelType.Completions),
        "embedding": surfaces & ModelType.Embedding,
        "tools": model.takes_text or config.tool_call_parser,
        "thinking": config.reasoning_parser,
        "vision": "image" in model.text.media.kinds,
    }
    listed = described_model(model.name, model.created_at_text)
    return _described(listed, model.context_length, [name for name, is_so in can.items() if is_so])


def _described(listed: Mapping[str, object], context: int | None, capabilities: Sequence[str]) -> dict[str, object]:
    length = {} if context is None else {"dynamo.context_length": context}
    return {
        **{name: listed[name] for name in ("details", "modified_at")},
        **dict.fromkeys(("modelfile", "parameters", "template"), ""),
        "model_info": {"general.architecture": "dynamo", **length},
        "capabilities": capabilities,
    }


class OllamaPart(Part):
    """The routes that Ollama's clients call."""

    name: ClassVar[str] = "ollama"

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def inference(self) -> Mapping[str, InferenceRoute]:
        pipeline = self._kernel.pipeline
        chat = OllamaGeneration("ollama_chat", decode_chat, self._name_of)
        generate = OllamaGeneration("ollama_generate", decode_generate, self._name_of)
        return {
            "/api/chat": self._route(LoadingCall(chat, pipeline), Access.INFERENCE),
            "/api/generate": self._route(LoadingCall(generate, pipeline), Access.INFERENCE),
            "/api/embed": self._route(ResultCall(OllamaEmbedApi(self._name_of), pipeline), Access.EMBEDDINGS),
        }

    def routes(self) -> Sequence[GuardedRoute]:
        route = OllamaModels(self._kernel, self._name_of)
        return [
            GuardedRoute(f"/api/{name}", route, "POST" if name == "show" else "GET", access=Access.ANY_KEY)
            for name in ("tags", "ps", "show", "version")
        ]

    def described(self) -> Sequence[ApiDescription]:
        return (OLLAMA_API,)

    def _route(self, call: Call, access: Access) -> InferenceRoute:
        kernel = self._kernel
        return InferenceRoute(
            call, access=access, body_limit_bytes=kernel.settings.limits.body_limit_bytes, budget=kernel.budget
        )

    def _name_of(self, given: str) -> str:
        """Return the name of a model: clients of Ollama may write `:latest` behind it."""
        if given.endswith(":latest") and not self._kernel.pipeline.models.names.is_registered(given):
            return given.removesuffix(":latest")
        return given
