"""What an inference API is: how a body is read, what work it means, and the shape of what goes back.

A further API is one file here. One that generates is a `GenerationApi` (decode, validate, prepare) and a `Renderer`
(stream, splice, collect); one with a single result is a `ResultApi` (decode, validate, plan, render). Its `Dialect` is
the shape of its errors.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

from msgspec import Struct

from dynamo.frontend.base.stage_timer import StageTimer
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.pipeline.collector import CollectedAnswer, CollectedChoice, merged
from dynamo.frontend.pipeline.events import ChoiceOutput, Finished, Logprobs
from dynamo.frontend.pipeline.exchange import Exchange
from dynamo.frontend.pipeline.plan import Plan, WorkRequest
from dynamo.frontend.pipeline.preprocess import Preprocessor
from dynamo.frontend.pipeline.routing_answer import explained_routing, kv_timing, queried_routing, worker_ids
from dynamo.protocol.dialect import OPENAI, Dialect
from dynamo.protocol.model_types import ModelType
from dynamo.protocol.openai.body import BodyLimits
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.headers import HeaderEffects
from dynamo.protocol.openai.requests import ChatRequest, Request
from dynamo.protocol.openai.responses import TokenLogprob, token_logprobs
from dynamo.protocol.openai.shapes import RequestMedia
from dynamo.protocol.openai.sse import nvext_json, usage_json
from dynamo.runtime.calls.context import Context

R = TypeVar("R", bound=Any)

PROMPT_LOGPROBS: Final = "prompt_logprobs"
"""The member of an engine's `engine_data` (of the last chunk): for each prompt token what could have stood there, as
{"<token id>": {"logprob", "rank"?, "decoded_token"?}}; None for the first, before which nothing stands."""

_MILLISECONDS: Final = 1000.0


class RenderOptions(Struct, frozen=True):
    """The frontend's settings for the shape of an answer."""

    continuous_usage: bool = False  # usage on every chunk
    reasoning_field: str = "reasoning_content"
    dispatches_calls: bool = False  # every complete call also goes out in a named event of its own
    dispatches_reasoning: bool = False  # and so does the whole reasoning


class Answer:
    """What is known of the request that is answered, and the optional members that every API can show."""

    __slots__ = (
        "_wanted", "exchange", "explains_routing", "id", "model", "received_at", "request", "wants_logprobs", "work",
    )  # fmt: skip

    def __init__(
        self,
        exchange: Exchange,
        request: Request,
        model: ServedModel,
        work: WorkRequest,
        *,
        explains_routing: bool = False,
    ) -> None:
        """`explains_routing`: the answer explains why its worker was chosen."""
        self.exchange, self.request, self.model, self.work = exchange, request, model, work
        if request.request_id is not None:  # the client's own name behind the prefix of the API
            prefix = exchange.response_id.partition("-")[0]
            exchange.response_id = f"{prefix}-{request.request_id}"
        self.id = exchange.response_id
        self.received_at = time.time() - (exchange.now() - exchange.arrival.at)  # seconds since the epoch
        self._wanted = frozenset(request.extra_fields)
        self.wants_logprobs = request.requested_logprobs is not None
        self.explains_routing = explains_routing

    def rename(self, id: str) -> None:
        """Take the id of a worker that writes the answer itself; before anything was rendered.

        A worker that repeats the request's own UUID has no other id for the answer, which then keeps its prefix.
        """
        if not self.exchange.is_called(id):
            self.id = id

    @property
    def has_alternatives(self) -> bool:
        """Whether log probabilities show other tokens: a chat has to request some, as at OpenAI."""
        return not (isinstance(self.request, ChatRequest) and self.request.requested_logprobs == 0)

    @property
    def wants_members(self) -> bool:
        """Whether parts of the answer have members of vLLM's beside the text: token ids, or those of the prompt."""
        return self.request.return_token_ids is True or self.request.prompt_logprobs is not None

    @property
    def wants_nvext(self) -> bool:
        if self.work.plan.is_query:
            return True
        return bool(self._wanted) or (self.explains_routing and not self.request.is_streaming)

    @property
    def choices(self) -> int:
        return len(self.work.plan.prompts) * self.work.plan.choices

    def usage(self) -> bytes | None:
        """Return the usage so far; None where nothing counts the tokens."""
        tally = self.work.tally
        if not tally.is_usage_known:
            return None
        return usage_json(
            tally.prompt_tokens,
            tally.completion_tokens,
            cached_tokens=tally.cached_tokens,
            reasoning_tokens=tally.reasoning_tokens,
            image_tokens=tally.image_tokens,
        )

    def logprob_items(self, found: Logprobs) -> list[TokenLogprob]:
        """Return the log probabilities of tokens with their texts filled in."""
        tokenizer = self.model.text.tokenizer
        return token_logprobs(
            found.token_ids,
            found.log_probs,
            found.top_logprobs,
            tokenizer.token_text,
            token_bytes=tokenizer.token_bytes,
            as_token_ids=self.request.return_tokens_as_token_ids is True,
            has_alternatives=self.has_alternatives,
        )

    def nvext(
        self,
        *,
        finished: bool,
        stop_reason: str | int | None = None,
        token_ids: Sequence[int] | None = None,
        engine_data: Mapping[str, object] | None = None,
    ) -> bytes | None:
        """Return the extension members the client requested; None when there are none.

        `worker_id` is in every part of the answer, `timing` in the part that ends a choice (`finished`).
        """
        wanted = self._wanted
        if self.work.plan.is_query:
            return nvext_json(**queried_routing(self.work.plan, self.work.tally))
        members: dict[str, object] = {
            "stop_reason": stop_reason if "stop_reason" in wanted else None,
            "completion_token_ids": token_ids if "completion_token_ids" in wanted else None,
            "engine_data": engine_data if "engine_data" in wanted else None,
        }
        if "worker_id" in wanted:
            members["worker_id"] = worker_ids(self.work.tally)
        if finished and "timing" in wanted:
            members["timing"] = self._timing()
        if self.explains_routing and not self.request.is_streaming:
            members["routing"] = explained_routing(self.work.tally)
        return nvext_json(**members)

    def _timing(self) -> dict[str, float]:
        """Return what is known of when things happened; the prompt is computed from the dispatch to the first output."""
        received, _, _, dispatched, first_output, _ = self.exchange.phase_times
        timing: dict[str, float] = {
            "request_received_ms": int(self.received_at * _MILLISECONDS),
            "total_time_ms": (time.time() - self.received_at) * _MILLISECONDS,
        }
        for name, begin, end in (
            ("prefill_wait_time_ms", received, dispatched),
            ("prefill_time_ms", dispatched, first_output),
            ("ttft_ms", received, first_output),
        ):
            if begin is not None and end is not None:
                timing[name] = (end - begin) * _MILLISECONDS
        return timing | kv_timing(self.work.tally, self.model)


class Renderer(ABC):
    """The events of one answer as the bytes of its API. Made once for each answer."""

    def __init__(self, answer: Answer, options: RenderOptions) -> None:
        self._answer = answer
        self._options = options
        # Token ids and engine data of output that showed nothing yet, by choice.
        self._held: dict[int, ChoiceOutput] = {}

    @abstractmethod
    def stream(self, output: ChoiceOutput) -> bytes:
        """Return the next server-sent events, ready for one write; b"" when nothing in `output` is visible."""

    @abstractmethod
    def splice(self) -> tuple[bytes, bytes] | Callable[[bytes], bytes] | None:
        """Return what stands before and behind the JSON string of a text in an event of choice 0 without other members;
        or, where such events differ in more than the text, what makes an event of that string.

        The hot path splices texts between these bytes. None where every event has more members, or the next one has to.
        """

    @abstractmethod
    def end(self, *, with_usage: bool) -> bytes:
        """Return the last bytes of a stream, after every choice has finished."""

    @abstractmethod
    def routed(self, nvext: bytes) -> bytes:
        """Return the stream of an answer that was only placed: no text, and `nvext` with where it would have gone."""

    @property
    def keeping(self) -> Callable[[], Awaitable[None]] | None:
        """What keeps the answer, to be called once generation has ended and before the client learns of it; None: nothing."""
        return None

    def failed(self, rejected: RequestRejected) -> bytes | None:
        """Return the last bytes of a stream that fails; None: use the dialect's generic error event."""
        return None

    def write_scores(self, index: int, choice: CollectedChoice) -> None:  # noqa: B027 - most have none to write
        """Write the log probabilities that have come of a choice, so that the end of a long answer has little to do.

        Does nothing where they are written whole.
        """

    @abstractmethod
    def collect(self, collected: CollectedAnswer) -> bytes:
        """Return the body of an answer that is not streamed."""

    def _hold(self, output: ChoiceOutput) -> None:
        """Keep the token ids and engine data of an output that shows nothing, for the next one that does."""
        if self._answer.wants_nvext or self._answer.wants_members:
            self._held[output.choice] = self._with_held(output)

    def _with_held(self, output: ChoiceOutput) -> ChoiceOutput:
        held = self._held.pop(output.choice, None)
        if held is None:
            return output
        token_ids = [*held.token_ids, *output.token_ids]
        return ChoiceOutput(output.choice, output.events, token_ids, merged(held.engine_data, output.engine_data))

    def _members(
        self, token_ids: Sequence[int], finished: Finished | None, engine_data: Mapping[str, object] | None = None
    ) -> dict[str, object]:
        """Return vLLM's members of one part of a choice: why it stopped, and what its client has requested."""
        request, members = self._answer.request, dict[str, object]()
        if finished is not None and finished.stop_reason is not None:
            members["stop_reason"] = finished.stop_reason
        if request.return_token_ids is True:
            members["token_ids"] = token_ids
        if request.prompt_logprobs is not None and PROMPT_LOGPROBS in (engine_data or {}):
            members[PROMPT_LOGPROBS] = (engine_data or {})[PROMPT_LOGPROBS]
        return members

    def _prompt_members(self, choice: int) -> dict[str, object]:
        """Return the tokens of a choice's prompt, where its client has requested them."""
        answer = self._answer
        if answer.request.return_token_ids is not True:
            return {}
        return {"prompt_token_ids": answer.work.plan.prompts[choice // answer.work.plan.choices]}

    def _collected_nvext(self, collected: CollectedAnswer) -> bytes | None:
        if not self._answer.wants_nvext:
            return None
        return self._answer.nvext(
            finished=True,
            stop_reason=collected.stop_reason,
            token_ids=collected.token_ids,
            engine_data=collected.engine_data,
        )


class MediaTaker(Protocol):
    """Checks the media of requests, gets their content, and writes it into the worker's request."""

    async def take_files(self, media: RequestMedia, owner: str | None) -> None:
        """Put the content of uploaded files in place of their ids. Raises RequestRejected (400) that names a part."""

    def check_model(self, model: ServedModel, media: RequestMedia) -> None:
        """Refuse media that the model does not take, before anything is fetched. Raises RequestRejected."""

    async def fill(
        self, media: RequestMedia, model: ServedModel, work: WorkRequest, text: str | None, context: Context
    ) -> None:
        """Get the content of the parts, and write the fields of the worker's request.

        Raises RequestRejected (400) that names a part, Overloaded, Cancelled when `context` ends first.
        """


class Api(ABC, Generic[R]):
    """One inference API."""

    endpoint: ClassVar[str]  # the metric label
    id_prefix: ClassVar[str]  # of the `id` of an answer; workers and logs see the request's bare UUID
    model_type: ClassVar[ModelType]
    dialect: ClassVar[Dialect] = OPENAI
    needs_model: ClassVar[bool] = True  # False: a request may leave it out where one model is served
    takes_media: ClassVar[bool] = False  # a long body is pictures or sound, and no prompt

    def response_id(self, request_id: str) -> str:
        """Return the `id` of the answer to a request, which is what its client has of it."""
        return self.id_prefix + request_id

    @abstractmethod
    def decode(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> R:
        """Return the typed request. Raises `RequestRejected` (400) for a body that is not one."""

    @abstractmethod
    def validate(self, request: R) -> None:
        """Raise `RequestRejected` for a broken rule."""


class GenerationApi(Api[R]):
    """One whose answers are generated token by token."""

    @abstractmethod
    async def prepare(
        self, preprocessor: Preprocessor, request: R, effects: HeaderEffects, model: ServedModel, timer: StageTimer
    ) -> tuple[Plan, str | None]:
        """Return the plan, and the text that was tokenised."""

    @abstractmethod
    def renderer(self, answer: Answer, options: RenderOptions) -> Renderer:
        """Return the renderer of one answer."""


class CountingApi(Api[R]):
    """One whose requests are not answered: only the tokens of their prompts are counted (`TokenCountCall`)."""

    @abstractmethod
    async def count(self, preprocessor: Preprocessor, request: R, model: ServedModel, timer: StageTimer) -> bytes:
        """Return the body with the count. Raises what `prepare` raises, but for the length of a prompt."""
