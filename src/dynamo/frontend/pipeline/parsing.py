"""Which parsers read a chat answer: decided once per request, from the request and the model's card.

Most requests have none and never come here again.
"""

from __future__ import annotations

import functools
import random
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dynamo.frontend.pipeline.structural_tags import structural_tag
from dynamo.protocol.openai.chat_options import ChatOptions
from dynamo.protocol.openai.shapes import REQUIRED
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.text.detokenizer import Detokenizer
from dynamo.text.formats.tool_set import ToolSet
from dynamo.text.formats.tools import TOOL_FORMATS, Form, ToolFormat, unified_parser
from dynamo.text.markers import WHITE_SPACE
from dynamo.text.output_parser import OutputParser
from dynamo.text.reasoning import DEFAULT_MARKS, REASONING_FORMATS, ReasoningParser
from dynamo.text.tokenizer import Tokenizer
from dynamo.text.tools import NamedCallParser, RequiredCallsParser, ToolParser

__all__ = [
    "OutputPlan",
    "ReasoningCounter",
    "plan_output",
    "tell_worker",
    "think_marks",
]

PROMPT_TAIL_TOKENS: Final = 16  # of a prompt that came as ids: enough for an opening tag and the white space behind it


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """How every choice of one answer is read."""

    reasoning: Callable[[], ReasoningParser] | None
    tools: Callable[[], ToolParser] | None
    only_first_call: bool = False
    only_function: str | None = None  # the client named the one function that may be called
    fills_content: bool = False
    expects_reasoning: bool = False  # the engine reasons before it answers, so guidance must wait for that
    inside: Callable[[], ToolParser] | None = None  # reads the calls in a span of reasoning
    has_short_ids: bool = False  # ids of calls are nine letters or digits, as the model's templates demand

    def parser(self) -> OutputParser:
        """Make the parser of one choice."""
        return OutputParser(
            self.reasoning() if self.reasoning is not None else None,
            self.tools() if self.tools is not None else None,
            only_first_call=self.only_first_call,
            only_function=self.only_function,
            fills_content=self.fills_content,
            inside=self.inside,
        )

    def new_call_id(self) -> str:
        """Make the id of a call that brings none."""
        if self.has_short_ids:
            return "".join(random.SystemRandom().choices(string.ascii_letters + string.digits, k=9))
        return f"call-{uuid.uuid4()}"

    def counter(self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool) -> ReasoningCounter:
        """Make the token counter of one choice; call only with a reasoning parser."""
        assert self.reasoning is not None
        return ReasoningCounter(
            self.reasoning(), Detokenizer(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
        )


class ReasoningCounter:
    """Counts the tokens of a choice that were reasoning: those that came while the parser was inside it.

    The tokens of a closing tag count, those of an opening one do not. The ids go through one by one, because the text of
    a batch cannot be divided among its tokens; so the count does not depend on the batches.
    """

    __slots__ = ("_detokenizer", "_parser")

    def __init__(self, parser: ReasoningParser, detokenizer: Detokenizer) -> None:
        self._parser, self._detokenizer = parser, detokenizer

    def count(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens, which follow the tokens of earlier calls, are reasoning."""
        parser, detokenize = self._parser, self._detokenizer.push
        counted = 0
        for token_id in token_ids:
            counted += parser.is_inside
            parser.push(detokenize((token_id,)))
        return counted


def plan_output(
    options: ChatOptions,
    config: ModelRuntimeConfig,
    *,
    prompt: str | None,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
) -> OutputPlan | None:
    """Choose the parsers of this request's answer; None when the answer's text is shown as it comes.

    `prompt` is the text that was tokenised, where it is known.
    """
    unified = _unified_form(config)
    tools = _tools(options, config, unified)
    reasoning: Callable[[], ReasoningParser] | None = None
    expects_reasoning = False
    form = REASONING_FORMATS.get(config.reasoning_parser or "")
    if unified is not None:
        form = next(one for one in REASONING_FORMATS.values() if one.unified == unified)
    if form is not None:
        thinking = options.thinking
        if form.applies(thinking):
            if prompt is None:
                prompt = tokenizer.decode(prompt_ids[-PROMPT_TAIL_TOKENS:], skip_special_tokens=False)
            begins_inside = form.begins_inside(prompt)
            if unified is None:
                reasoning = functools.partial(
                    form.parser, begins_inside=begins_inside, json_is_content=options.guides_json
                )
            else:
                reasoning = functools.partial(
                    unified_parser,
                    unified,
                    ToolSet(options.tools),
                    begins_inside=begins_inside,
                    keeps_cut_call=options.forced_choice is not None,
                )
            has_ended = prompt.rstrip(WHITE_SPACE).endswith(form.marks[1])  # as a template writes for "no thinking"
            if config.reasoning_parser:
                expects_reasoning = begins_inside or (thinking is not False and not has_ended)
    if tools is None and reasoning is None:
        return None
    written = TOOL_FORMATS.get(config.tool_call_parser or "")
    reads_inside = written is not None and written.may_stand_in_reasoning and unified is None
    return OutputPlan(
        reasoning,
        tools,
        only_first_call=options.only_first_call,
        only_function=None if options.forced_choice == REQUIRED else options.forced_choice,
        fills_content=reasoning is not None and options.fills_content,
        expects_reasoning=expects_reasoning,
        inside=functools.partial(written.reasoning_parser, ToolSet(options.tools))
        if written is not None and reads_inside and tools is not None and reasoning is not None
        else None,
        has_short_ids=written is not None and written.has_short_ids,
    )


def tell_worker(
    options: ChatOptions,
    config: ModelRuntimeConfig,
    plan: OutputPlan,
    tokenizer: Tokenizer,
    body: dict[str, Any],
    *,
    closes_objects: bool = True,
) -> None:
    """Change the worker's request as the parsers need it.

    - A worker that opted in gets a structural tag.
    - Guidance waits until the engine has reasoned, and an engine with a parser of its own gets the template's variables.
    - The marks reach the parsers, also from a tokenizer that calls them special tokens.
    - Where a model ends its answer with the token that ends a call, that token is shown.
    """
    sampling = body["sampling_options"]
    marks: tuple[str, ...] = ()
    if plan.reasoning is not None and (reasoning := REASONING_FORMATS.get(config.reasoning_parser or "")) is not None:
        marks += reasoning.tokens
    form = TOOL_FORMATS.get(config.tool_call_parser or "")
    if form is not None and (plan.tools is not None or form.is_unified):
        marks += form.marks
        _show_ends(form, tokenizer, body["stop_conditions"])
        if (tag := structural_tag(options, config, form, closes_objects=closes_objects)) is not None:
            backend = options.guidance_backend
            sampling["guided_decoding"] = {"structural_tag": tag, **({} if backend is None else {"backend": backend})}
    if plan.expects_reasoning and sampling["guided_decoding"] is not None:
        body["require_reasoning"] = True
    if plan.reasoning is not None and (variables := options.template_variables):
        extra = body["extra_args"] or {}
        body["extra_args"] = {**extra, "reasoning_parser_kwargs": {"chat_template_kwargs": dict(variables)}}
    if body["output_options"]["skip_special_tokens"] is None and any(_is_skipped(tokenizer, mark) for mark in marks):
        body["output_options"]["skip_special_tokens"] = False


def think_marks(config: ModelRuntimeConfig, tokenizer: Tokenizer) -> tuple[str, str] | None:
    """Return the tags around the model's reasoning; None for a model without reasoning."""
    form = REASONING_FORMATS.get(config.reasoning_parser or "")
    opening, closing = form.marks if form is not None else DEFAULT_MARKS
    if form is None and (tokenizer.token_id(opening) is None or tokenizer.token_id(closing) is None):
        return None
    return opening, closing


def _show_ends(form: ToolFormat, tokenizer: Tokenizer, stops: dict[str, Any]) -> None:
    hidden = stops["stop_token_ids_hidden"]
    ends = {tokenizer.token_id(text) for text in form.end_tokens}
    if hidden and (shown := [token_id for token_id in hidden if token_id in ends]):
        stops["stop_token_ids_visible"] = shown
        stops["stop_token_ids_hidden"] = [token_id for token_id in hidden if token_id not in ends] or None


def _is_skipped(tokenizer: Tokenizer, mark: str) -> bool:
    """Return whether the mark is one token, and a special token, which shows no text."""
    token_id = tokenizer.token_id(mark)
    return token_id is not None and not tokenizer.decode([token_id])


def _unified_form(config: ModelRuntimeConfig) -> Form | None:
    """Return the format that reads reasoning, text and calls in one, if the card asks for one under either name."""
    reasoning = REASONING_FORMATS.get(config.reasoning_parser or "")
    if reasoning is not None and reasoning.unified is not None:
        return reasoning.unified
    tools = TOOL_FORMATS.get(config.tool_call_parser or "")
    return tools.form if tools is not None and tools.is_unified else None


def _tools(options: ChatOptions, config: ModelRuntimeConfig, unified: Form | None) -> Callable[[], ToolParser] | None:
    if not options.tools:
        return None
    form = TOOL_FORMATS.get(config.tool_call_parser or "") if unified is None else None
    choice = options.forced_choice
    native = functools.partial(form.parser, ToolSet(options.tools)) if form is not None else None
    if choice is None:
        return native

    def forced() -> ToolParser:
        own = native() if native is not None else None
        return RequiredCallsParser(own) if choice == REQUIRED else NamedCallParser(choice, own)

    return forced
