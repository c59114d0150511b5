"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.frontend.base.stage_timer import StageTimer
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.pipeline.api import PROMPT_LOGPROBS, Answer, GenerationApi, Renderer, RenderOptions
from dynamo.frontend.pipeline.collector import CollectedAnswer, CollectedChoice
from dynamo.frontend.pipeline.events import ChoiceOutput, Finished, Logprobs
from dynamo.frontend.pipeline.plan import Plan
from dynamo.frontend.pipeline.preprocess import Preprocessor
from dynamo.protocol.model_types import ModelType
from dynamo.protocol.openai.body import BodyLimits
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.escaping import json_line
from dynamo.protocol.openai.headers import HeaderEffects
from dynamo.protocol.openai.requests import CompletionRequest, decode_completion, validate_completion
from dynamo.protocol.openai.responses import (
    FinishedChoice,
    TokenLogprob,
    completion_body,
    completion_logprob_pieces,
    completion_logprobs,
    finite,
    written_completion_logprobs,
)
from dynamo.protocol.openai.sse import DONE, CompletionStream
from dynamo.text.output import Content


class EchoedPrompts:
    """What stands in front of each choice of one answer."""

    __slots__ = ("_answer", "_request")

    def __init__(self, answer: Answer, request: CompletionRequest) -> None:
        self._answer, self._request = answer, request

    @property
    def drops_answer(self) -> bool:
        """Whether the prompt is all there is. Engines generate one token at least; it is not shown and not counted."""
        return self._request.max_tokens == 0

    def text(self, choice: int) -> str:
        """Return the prompt of a choice, as the client sent it or as the text of its ids."""
        number = choice // self._answer.work.plan.choices
        source = self._request.prompts()[number]
        if isinstance(source, str):
            return source
        return self._answer.model.text.tokenizer.decode(source, skip_special_tokens=False)

    def logprobs(
        self, choice: int, engine_data: Mapping[str, object] | None, generated: Sequence[TokenLogprob]
    ) -> tuple[bytes, int]:
        """Return the log probabilities of the prompt and of what was generated behind it, and where their texts end.

        Raises RequestRejected (400: another try would end alike) when the engine did not report those of the prompt.
        """
        prompt = self._answer.work.plan.prompts[choice // self._answer.work.plan.choices]
        positions = (engine_data or {}).get(PROMPT_LOGPROBS)
        if not isinstance(positions, Sequence) or len(positions) < len(prompt):
            raise RequestRejected(
                400,
                f"The engine of model '{self._answer.request.model}' does not report log probabilities of prompt tokens, "
                "which `echo` with `logprobs` needs: leave one of them out",
                param="echo",
            )
        tokens: list[str] = []
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        for token_id, position in zip(prompt, positions, strict=False):
            tokens.append(self._text_of(token_id))
            found = position if isinstance(position, Mapping) else {}
            own = found.get(str(token_id))
            token_logprobs.append(None if own is None else finite(own["logprob"]))
            top_logprobs.append(self._alternatives(found) if found else None)
        if not self.drops_answer:
            for item in generated:
                tokens.append(item.token)
                token_logprobs.append(item.logprob)
                top_logprobs.append({top.token: top.logprob for top in item.top_logprobs})
        offsets, offset = [], 0
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        members = {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }
        return json_line(members), offset

    def _alternatives(self, found: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
        # Two ids may have one text (parts of a character): the more likely one is kept.
        alternatives: dict[str, float] = {}
        for token_id, entry in found.items():
            text, logprob = self._text_of(int(token_id), entry.get("decoded_token")), finite(entry["logprob"])
            alternatives[text] = max(logprob, alternatives.get(text, logprob))
        return alternatives

    def _text_of(self, token_id: int, given: str | None = None) -> str:
        if self._request.return_tokens_as_token_ids is True:
            return f"token_id:{token_id}"
        return self._answer.model.text.tokenizer.token_text(token_id) if given is None else given


class CompletionApi(GenerationApi[CompletionRequest]):
    """Text completions."""

    endpoint = "completions"
    id_prefix = "cmpl-"
    model_type = ModelType.Completions

    def decode(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> CompletionRequest:
        return decode_completion(body, ignore_unsupported=ignore_unsupported, limits=limits)

    def validate(self, request: CompletionRequest) -> None:
        validate_completion(request)

    async def prepare(
        self,
        preprocessor: Preprocessor,
        request: CompletionRequest,
        effects: HeaderEffects,
        model: ServedModel,
        timer: StageTimer,
    ) -> tuple[Plan, str | None]:
        return await preprocessor.completion(request, effects, model, timer)

    def renderer(self, answer: Answer, options: RenderOptions) -> Renderer:
        return _CompletionRenderer(answer, options)


class _CompletionRenderer(Renderer):
    """Only text, log probabilities and the end have a place in a completion."""

    def __init__(self, answer: Answer, options: RenderOptions) -> None:
        super().__init__(answer, options)
        wants_more = answer.wants_nvext or answer.wants_logprobs or answer.wants_members
        self._is_plain = not (options.continuous_usage or wants_more)
        self._begun: set[int] = set()  # choices that have named the tokens of their prompt
        self._chunks: CompletionStream | None = None
        self._echo: EchoedPrompts | None = None
        request = answer.request
        # A model that takes text got `echo` with its request.
        if isinstance(request, CompletionRequest) and request.echo and not answer.model.takes_text:
            self._echo = EchoedPrompts(answer, request)
        self._echoed: set[int] = set()  # choices whose prompt has gone out
        # What came before the log probabilities of the prompt, by choice; bounded by the length of the answer.
        self._unscored: dict[int, CollectedChoice] = {}
        self._text_offsets: dict[int, int] = {}

    def stream(self, output: ChoiceOutput) -> bytes:
        if self._echo is not None and self._answer.wants_logprobs and output.choice not in self._echoed:
            return self._scored(self._echo, output)
        text, logprobs = "", None
        finished: Finished | None = None
        for event in output.events:
            if isinstance(event, Content):
                text += event.text
            elif isinstance(event, Logprobs):
                logprobs = self._logprobs(output.choice, [event])
            elif isinstance(event, Finished):
                finished = event
        reason = None if finished is None else finished.reason
        if self._echo is not None:
            if self._echo.drops_answer:
                text, reason = "", None if reason is None else "length"
                logprobs = None
            if output.choice not in self._echoed:
                self._echoed.add(output.choice)
                text = self._echo.text(output.choice) + text
        if self._is_plain and logprobs is None:
            if not text and reason is None:
                return b""
            beside = b"" if finished is None else _joined_members(self._members((), finished))
            return self._opened().delta(output.choice, text, finish_reason=reason, beside=beside)
        if not text and finished is None and logprobs is None:
            self._hold(output)
            return b""
        return self._chunk(output, text, finished, reason, logprobs)

    def _scored(self, echo: EchoedPrompts, output: ChoiceOutput) -> bytes:
        """Return the first chunk of a choice, with the log probabilities of its prompt; b"" until they are known."""
        choice = output.choice
        found = self._unscored.setdefault(choice, CollectedChoice())
        found.add(output)
        if found.finished is None and PROMPT_LOGPROBS not in (found.engine_data or {}):
            self._hold(output)
            return b""
        items = [item for each in found.logprobs for item in self._answer.logprob_items(each)]
        logprobs, self._text_offsets[choice] = echo.logprobs(choice, found.engine_data, items)
        del self._unscored[choice]
        self._echoed.add(choice)
        text = echo.text(choice) + ("" if echo.drops_answer else found.joined().content)
        reason = None if found.finished is None else "length" if echo.drops_answer else found.finished.reason
        return self._chunk(output, text, found.finished, reason, logprobs)

    def _chunk(
        self, output: ChoiceOutput, text: str, finished: Finished | None, reason: str | None, logprobs: bytes | None
    ) -> bytes:
        """Return a chunk with the members that its client requests."""
        answer, output = self._answer, self._with_held(output)
        nvext = None
        if answer.wants_nvext:
            nvext = answer.nvext(
                finished=finished is not None,
                stop_reason=None if finished is None else finished.stop_reason,
                token_ids=output.token_ids,
                engine_data=output.engine_data,
            )
        usage = self._usage() if self._options.continuous_usage else None
        members = self._members(output.token_ids, finished, output.engine_data)
        if output.choice not in self._begun:
            self._begun.add(output.choice)
            members |= self._prompt_members(output.choice)
        return self._opened().delta(
            output.choice,
            text,
            finish_reason=reason,
            logprobs=logprobs,
            usage=usage,
            nvext=nvext,
            beside=_joined_members(members),
        )

    def splice(self) -> tuple[bytes, bytes] | None:
        if not self._is_plain or (self._echo is not None and (self._echo.drops_answer or not self._echoed)):
            return None
        return self._opened().plain_ends()

    def end(self, *, with_usage: bool) -> bytes:
        usage = self._usage() if with_usage else None
        return DONE if usage is None else self._opened().usage_chunk(usage) + DONE

    def routed(self, nvext: bytes) -> bytes:
        return self._opened().delta(0, "", logprobs=b"null", nvext=nvext) + DONE

    def write_scores(self, index: int, choice: CollectedChoice) -> None:
        if self._echo is not None or any(each.ready for each in choice.logprobs):  # they are written as one
            return
        items = [item for each in choice.take_logprobs() for item in self._answer.logprob_items(each)]
        if items:
            offset = self._text_offsets.get(index, 0)
            self._text_offsets[index] = offset + sum(len(item.token) for item in items)
            choice.scores.append(completion_logprob_pieces(items, text_offset=offset))

    def collect(self, collected: CollectedAnswer) -> bytes:
        answer = self._answer
        choices = []
        for index, choice in enumerate(collected.choices):
            reason = None if choice.finished is None else choice.finished.reason
            text = choice.joined().content
            if (echo := self._echo) is None:
                logprobs = (
                    written_completion_logprobs(choice.scores)
                    if choice.scores
                    else self._logprobs(index, choice.logprobs)
                )
            else:
                text = echo.text(index) + ("" if echo.drops_answer else text)
                reason = "length" if echo.drops_answer else reason
                items = [item for each in choice.logprobs for item in answer.logprob_items(each)]
                logprobs = echo.logprobs(index, choice.engine_data, items)[0] if answer.wants_logprobs else None
            members = self._members(choice.token_ids, choice.finished, choice.engine_data)
            beside = members | self._prompt_members(index)
            choices.append(FinishedChoice(index, text, reason, logprobs=logprobs, beside=beside))
        nvext = self._collected_nvext(collected)
        return completion_body(
            answer.id, int(answer.received_at), answer.request.model, choices, self._usage(), nvext=nvext
        )

    def _usage(self) -> bytes | None:
        if self._echo is not None and self._echo.drops_answer:
            self._answer.work.tally.completion_tokens = 0
        return self._answer.usage()

    def _opened(self) -> CompletionStream:
        """Return the chunks' fixed bytes; made late, as a model that takes text brings its own id."""
        if self._chunks is None:
            answer = self._answer
            self._chunks = CompletionStream(
                answer.id, int(answer.received_at), answer.request.model, choices=answer.choices
            )
        return self._chunks

    def _logprobs(self, choice: int, found: Sequence[Logprobs]) -> bytes | None:
        """Return the JSON of what follows the log probabilities given before for the same choice."""
        ready = [one for each in found for one in each.ready]
        if ready:
            shaped = []
            for part in ready:
                offset = self._text_offsets.get(choice, 0)
                shaped.append(_completion_shape(part, offset))
                self._text_offsets[choice] = offset + sum(map(len, shaped[-1].get("tokens") or ()))
            return json_line(_merged(shaped))
        items = [item for each in found for item in self._answer.logprob_items(each)]
        if not items:
            return None
        offset = self._text_offsets.get(choice, 0)
        self._text_offsets[choice] = offset + sum(len(item.token) for item in items)
        return completion_logprobs(items, text_offset=offset)


def _joined_members(members: Mapping[str, object]) -> bytes:
    """Return members as they stand behind others in an object."""
    return b"," + json_line(members)[1:-1] if members else b""


def _completion_shape(part: Mapping[str, object], offset: int) -> Mapping[str, Any]:
    """Return log probabilities of a worker as completions have them; llama.cpp writes those of chats for both."""
    content = part.get("content")
    if not isinstance(content, list) or not all(isinstance(item, Mapping) for item in content):
        return part
    tokens = [str(item.get("token", "")) for item in content]
    offsets = [offset + len("".join(tokens[:place])) for place in range(len(tokens))]
    tops = [
        {str(top.get("token", "")): top.get("logprob") for top in item.get("top_logprobs") or ()} for item in content
    ]
    scores = [item.get("logprob") for item in content]
    return {"tokens": tokens, "token_logprobs": scores, "top_logprobs": tops, "text_offset": offsets}


def _merged(parts: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return log probability objects of a worker as one: their lists one behind the other."""
    whole: dict[str, object] = {}
    for part in parts:
        for name, value in part.items():
            held = whole.get(name)
            whole[name] = [*held, *value] if isinstance(held, list) and isinstance(value, list) else value
    return whole
