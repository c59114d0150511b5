"""`/v1/responses`."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

from dynamo.frontend.apis.history import AnswerHistory, StoredResponse, scoped_owner
from dynamo.frontend.base.offload import LARGE_BODY_BYTES, Offload
from dynamo.frontend.base.stage_timer import StageTimer
from dynamo.frontend.models.model_limits import PromptTooLong
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.pipeline.api import Answer, CountingApi, GenerationApi, Renderer, RenderOptions
from dynamo.frontend.pipeline.collector import CollectedAnswer, merged
from dynamo.frontend.pipeline.events import ChoiceOutput, Event, Finished, Logprobs
from dynamo.frontend.pipeline.plan import Plan
from dynamo.frontend.pipeline.preprocess import Preprocessor
from dynamo.protocol.model_types import ModelType
from dynamo.protocol.openai.body import BodyLimits
from dynamo.protocol.openai.errors import RequestRejected, not_built
from dynamo.protocol.openai.escaping import json_line
from dynamo.protocol.openai.headers import HeaderEffects
from dynamo.protocol.openai.shapes import JsonObject
from dynamo.protocol.openai.sse import DONE
from dynamo.protocol.responses.events import EventNumbers
from dynamo.protocol.responses.lowering import (
    ResponsesRequest,
    count_old_turns,
    decode_responses,
    listed_items,
    validate_responses,
    without_old_turns,
)
from dynamo.protocol.responses.output import ItemIds, OutputWriter
from dynamo.protocol.responses.request import ResponseObject, response_usage
from dynamo.text.output import CallArguments, CallBegan, CallDropped, CallEnded, Content, Reasoning

logger = logging.getLogger(__name__)

MAX_LOGGED_TYPES: Final = 256  # clients choose their names


class ResponsesApi(GenerationApi[ResponsesRequest]):
    """Responses, lowered to chat requests."""

    endpoint = "responses"
    id_prefix = "resp_"
    model_type = ModelType.Chat

    def __init__(self, history: AnswerHistory | None, offload: Offload) -> None:
        """`history`: None where nothing is stored."""
        self._history, self._offload = history, offload
        self._left_out: set[tuple[str, str]] = set()  # (model, type of tool) that the log has

    def response_id(self, request_id: str) -> str:
        return super().response_id(request_id).replace("-", "")

    def decode(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> ResponsesRequest:
        return decode_responses(body, limits=limits, ignore_unsupported=ignore_unsupported)

    def validate(self, request: ResponsesRequest) -> None:
        validate_responses(request)

    async def prepare(
        self,
        preprocessor: Preprocessor,
        request: ResponsesRequest,
        effects: HeaderEffects,
        model: ServedModel,
        timer: StageTimer,
    ) -> tuple[Plan, str | None]:
        if request.offered.left_out:
            self._log_left_out(request)
        try:
            if request.needs_history:
                await self._recall(request)
            if request.asked.truncation == "auto":
                return await _truncated(preprocessor, request, effects, model, timer)
            return await preprocessor.chat(request, effects, model, timer)
        except RequestRejected as error:
            raise request.renamed(error) from error

    def renderer(self, answer: Answer, options: RenderOptions) -> Renderer:
        return _ResponseRenderer(answer, options, self._history, self._offload)

    def _log_left_out(self, request: ResponsesRequest) -> None:
        """Log the types of tools that the model is not offered, each once for a model."""
        for kind in sorted(request.offered.left_out):
            if (request.model, kind) not in self._left_out and len(self._left_out) < MAX_LOGGED_TYPES:
                self._left_out.add((request.model, kind))
                logger.info("tools of type %r run elsewhere and are not offered to model %r", kind, request.model)

    async def _recall(self, request: ResponsesRequest) -> None:
        """Put the earlier turns into the request.

        Raises RequestRejected: 400 for what is not kept (any more), 422 where nothing is.
        """
        asked, history, owner = request.asked, self._history, owner_of(request)
        if history is None:
            if asked.previous_response_id is None:
                request.with_history((), {})  # items that are only named are left out
                return
            raise not_built(
                "Validation: `previous_response_id` is not supported: this frontend stores no responses "
                "(--responses-store, DYN_RESPONSES_STORE)",
                "previous_response_id",
            )
        earlier, size = list[JsonObject](), 0
        if asked.previous_response_id is not None:
            earlier, size = await history.items_before(asked.previous_response_id, owner)
        named = await history.items(request.references, owner)
        fill = partial(request.with_history, earlier, named)
        if size > LARGE_BODY_BYTES:
            request.is_large = True
        if request.is_large:
            await self._offload(fill)
        else:
            fill()


def owner_of(request: ResponsesRequest) -> str:
    """Return the owner that finds the response again: a tenant ("": none is named), of the owner of the key."""
    return scoped_owner(request.key_owner, request.effective_cache_salt or "")


class ResponsesCountApi(ResponsesApi, CountingApi[ResponsesRequest]):
    """The same requests, of which only the tokens of the prompt are counted."""

    endpoint = "responses_input_tokens"

    async def count(
        self, preprocessor: Preprocessor, request: ResponsesRequest, model: ServedModel, timer: StageTimer
    ) -> bytes:
        try:
            if request.needs_history:
                await self._recall(request)
            tokens = await preprocessor.count_chat(request, model, timer)
        except RequestRejected as error:
            raise request.renamed(error) from error
        return b'{"object":"response.input_tokens","input_tokens":%d}' % tokens


async def _truncated(
    preprocessor: Preprocessor,
    request: ResponsesRequest,
    effects: HeaderEffects,
    model: ServedModel,
    timer: StageTimer,
) -> tuple[Plan, str | None]:
    """Prepare without as many of the oldest turns as it takes for the rest to fit; the last turn stays."""
    whole = request.messages
    fewest, most = 0, count_old_turns(whole)
    dropped, prepared = 0, None  # the whole conversation first, then as little as will do, then by halves
    while prepared is None or fewest < most:
        request.messages = without_old_turns(whole, dropped)
        try:
            prepared = await preprocessor.chat(request, effects, model, timer)
            most = dropped
        except PromptTooLong:
            if dropped >= most:
                raise
            fewest = dropped + 1
        dropped = most if prepared is None else (fewest + most) // 2
    return prepared


class _Keeper:
    """Stores one response once its answer is whole."""

    def __init__(self, id: str, request: ResponsesRequest, history: AnswerHistory, offload: Offload) -> None:
        self._id, self._request, self._history, self._offload = id, request, history, offload
        self.last = b""  # the response object at the end

    async def keep(self) -> None:
        request = self._request

        def listed() -> bytes:
            return json_line(listed_items(request.asked, self._id))

        items = await self._offload(listed) if request.is_large else listed()
        previous = request.asked.previous_response_id
        await self._history.keep(StoredResponse(self._id, self.last, items, previous, owner_of(request)))


class _ResponseRenderer(Renderer):
    """Events as items. Streamed or not, the items are written by one `OutputWriter`."""

    def __init__(self, answer: Answer, options: RenderOptions, history: AnswerHistory | None, offload: Offload) -> None:
        super().__init__(answer, options)
        request = answer.request
        assert isinstance(request, ResponsesRequest)
        is_kept = history is not None and request.asked.store is not False  # the API stores by default
        id = answer.id  # ours, also where a worker names its answer itself
        self._keeper = _Keeper(id, request, history, offload) if history is not None and is_kept else None
        self._events = EventNumbers()
        self._output = OutputWriter(self._events, ItemIds(id), request.offered.called, request.shape)
        self._response = ResponseObject(id, int(answer.received_at), request.asked, is_stored=is_kept)
        self._finished: Finished | None = None
        self._is_begun = False
        self._token_ids: list[int] = []
        self._engine_data: dict[str, object] | None = None
        self._is_plain = not answer.wants_logprobs and not answer.wants_nvext and answer.work.plan.parsing is None

    def stream(self, output: ChoiceOutput) -> bytes:
        if self._answer.wants_nvext:
            self._token_ids += output.token_ids
            self._engine_data = merged(self._engine_data, output.engine_data)
        return self._begun() + self._write(output.events)

    def splice(self) -> Callable[[bytes], bytes] | None:
        return self._output.plain_text() if self._is_plain else None

    def end(self, *, with_usage: bool) -> bytes:
        last = self._begun() + self._finish()
        kind, response = self._final()
        return last + self._events.event(f"response.{kind}", b'"response":' + response) + DONE

    @property
    def keeping(self) -> Callable[[], Awaitable[None]] | None:
        return None if self._keeper is None else self._keeper.keep

    def failed(self, rejected: RequestRejected) -> bytes:
        last = self._begun() + self._output.finish("incomplete", is_failed=True)
        response = self._response.json("failed", output=self._output.items, error=rejected, usage=self._usage())
        return last + self._events.event("response.failed", b'"response":' + response) + DONE

    def routed(self, nvext: bytes) -> bytes:
        response = self._response.json(
            "completed", usage=self._usage(), completed_at=int(self._answer.received_at), nvext=nvext
        )
        return self._begun() + self._events.event("response.completed", b'"response":' + response) + DONE

    def collect(self, collected: CollectedAnswer) -> bytes:
        (choice,) = collected.choices
        self._token_ids, self._engine_data = collected.token_ids, collected.engine_data
        for events in choice.outputs:
            self._write(events)
        if not self._answer.work.plan.is_query:
            self._finish()
        return self._final()[1]

    def _begun(self) -> bytes:
        """Return the events that begin every stream; b"" once they are out."""
        if self._is_begun:
            return b""
        self._is_begun = True
        response = b'"response":' + self._response.json("in_progress")
        return self._events.event("response.created", response) + self._events.event("response.in_progress", response)

    def _write(self, events: Sequence[Event]) -> bytes:
        """Write the events of one wake-up. Its log probabilities go with the last of its text."""
        output, told = self._output, []
        logprobs = self._logprobs(events)
        last_text = max((place for place, event in enumerate(events) if isinstance(event, Content)), default=None)
        for place, event in enumerate(events):
            match event:
                case Content(text):
                    told.append(output.text(text, logprobs if place == last_text else None))
                case Reasoning(text):
                    told.append(output.reasoning(text))
                case CallBegan(name, call_id):
                    told.append(output.call(name, call_id or ""))
                case CallArguments(text, number):
                    told.append(output.arguments(text, number))
                case CallEnded():
                    told.append(output.call_ended())
                case CallDropped():
                    told.append(output.call_dropped())
                case Finished():
                    self._finished = event
        return b"".join(told)

    def _finish(self) -> bytes:
        return self._output.finish(self._status)

    def _final(self) -> tuple[str, bytes]:
        """Return the status of the whole answer, and its response object."""
        answer, status = self._answer, self._status
        nvext = None
        if answer.wants_nvext:
            nvext = answer.nvext(
                finished=True,
                stop_reason=None if self._finished is None else self._finished.stop_reason,
                token_ids=self._token_ids,
                engine_data=self._engine_data,
            )
        last = self._response.json(
            status,
            output=self._output.items,
            usage=self._usage(),
            completed_at=int(time.time()) if status == "completed" else None,
            finish_reason=None if self._finished is None else self._finished.reason,
            nvext=nvext,
        )
        if self._keeper is not None:
            self._keeper.last = last
        return status, last

    @property
    def _status(self) -> Any:
        cut = self._finished is not None and self._finished.reason in ("length", "content_filter")
        return "incomplete" if cut else "completed"

    def _usage(self) -> bytes | None:
        tally = self._answer.work.tally
        if not tally.is_usage_known:
            return None
        return response_usage(
            tally.prompt_tokens,
            tally.completion_tokens,
            cached_tokens=tally.cached_tokens,
            reasoning_tokens=tally.reasoning_tokens,
        )

    def _logprobs(self, events: Sequence[Event]) -> bytes | None:
        """Return the JSON array of the log probabilities among the events; None when there are none."""
        if not self._answer.wants_logprobs:
            return None
        found = [event for event in events if isinstance(event, Logprobs)]
        ready = [item for event in found for one in event.ready for item in one.get("content") or ()]
        items = ready or [item for event in found for item in self._answer.logprob_items(event)]
        return json_line(items) if items else None
