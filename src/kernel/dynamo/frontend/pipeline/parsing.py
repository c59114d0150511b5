"""Which parsers read a chat answer: decided once per request, from the request and the model's card.

Most requests have none and never come here again.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from dynamo.protocol.openai.chat_options import ChatOptions
from dynamo.protocol.openai.closed_schema import closed_schema
from dynamo.protocol.openai.shapes import REQUIRED
from dynamo.protocol.openai.tool_schema import parameters_of
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.protocol.worker_request import PlannedRequest, StopFields
from dynamo.text.detokenizer import Detokenizer
from dynamo.text.formats.json_calls import calls_beside_shape, named_call, required_calls
from dynamo.text.formats.reasoning import DEFAULT_MARKS, REASONING_FORMATS
from dynamo.text.formats.scanner import TextMachine
from dynamo.text.formats.tagged_answer import ContentStart, ReasoningTags, tagged_machine
from dynamo.text.formats.tool_set import ToolSet
from dynamo.text.formats.tools import TOOL_FORMATS, ToolFormat, UnifiedForm, unified_parser
from dynamo.text.markers import WHITE_SPACE
from dynamo.text.output import Idle, Reasoning
from dynamo.text.output_parser import OutputParser
from dynamo.text.tokenizer import Tokenizer

_ANY_OBJECT: Final = {"type": "object"}

PROMPT_TAIL_TOKENS: Final = 16  # of a prompt that came as ids: enough for an opening tag and the white space behind it


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """How every choice of one answer is read."""

    machine: Callable[[], TextMachine]
    forced: Callable[[], TextMachine] | None = None  # reads the content of `machine`, where a call must come
    only_first_call: bool = False
    only_function: str | None = None  # the client named the one function that may be called
    fills_content: bool = False
    has_reasoning: bool = False  # its tokens are counted
    expects_reasoning: bool = False  # the engine reasons before it answers, so guidance must wait for that
    has_short_ids: bool = False  # ids of calls are nine letters or digits, as the model's templates demand
    visible: frozenset[int] = frozenset()  # special tokens that reach the parser; the others are not shown

    def parser(self) -> OutputParser:
        """Make the parser of one choice."""
        return OutputParser(
            self.machine(),
            self.forced() if self.forced is not None else None,
            only_first_call=self.only_first_call,
            only_function=self.only_function,
            fills_content=self.fills_content,
        )

    def new_call_id(self) -> str:
        """Make the id of a call that brings none."""
        if self.has_short_ids:
            return "".join(random.SystemRandom().choices(string.ascii_letters + string.digits, k=9))
        return f"call-{uuid.uuid4()}"

    def counter(self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool) -> ReasoningCounter:
        """Make the token counter of one choice."""
        skips = skip_special_tokens or bool(self.visible)
        detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skips, visible=self.visible)
        return ReasoningCounter(self.machine(), detokenizer)


class ReasoningCounter:
    """Counts the tokens of a choice that were reasoning: those that came while the parser was inside it.

    The tokens of a closing tag count, those of an opening one do not. The ids go through one by one, because the text of
    a batch cannot be divided among its tokens; so the count does not depend on the batches.
    """

    __slots__ = ("_detokenizer", "_idle", "_parser")

    def __init__(self, parser: TextMachine, detokenizer: Detokenizer) -> None:
        self._parser, self._detokenizer = parser, detokenizer
        self._idle: Idle | None = None

    def count(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens, which follow the tokens of earlier calls, are reasoning."""
        idle, table = self._idle, self._detokenizer.whole
        if idle is not None and table is not None:
            for token_id in token_ids:
                text = table[token_id]
                if text is None or not idle.characters.isdisjoint(text):
                    break
            else:  # nearly always: no mark begins in these tokens, so all of them are of one kind
                return len(token_ids) if idle.kind is Reasoning else 0
        parser, detokenize = self._parser, self._detokenizer.push
        counted = 0
        for token_id in token_ids:
            counted += parser.is_inside
            parser.push(detokenize((token_id,)))
        self._idle = parser.idle
        return counted


def plan_output(
    options: ChatOptions,
    config: ModelRuntimeConfig,
    *,
    prompt: str | None,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    chooses_calls: bool = False,
) -> OutputPlan | None:
    """Choose the parsers of this request's answer; None when the answer's text is shown as it comes.

    `prompt` is the text that was tokenised, where it is known. `chooses_calls`: an engine that reads its own text may
    send calls that the request does not allow.
    """
    tools = TOOL_FORMATS.get(config.tool_call_parser or "")
    unified = _unified_form(config, tools)
    reasoning = REASONING_FORMATS.get(config.reasoning_parser or "")
    if unified is not None:
        reasoning = next(one for one in REASONING_FORMATS.values() if one.unified == unified)
    begins_inside, expects_reasoning = False, False
    has_reasoning = reasoning is not None and reasoning.applies(options.thinking)
    if reasoning is not None and has_reasoning:
        if prompt is None:
            prompt = tokenizer.decode(prompt_ids[-PROMPT_TAIL_TOKENS:], skip_special_tokens=False)
        begins_inside = reasoning.begins_inside(prompt)
        has_ended = prompt.rstrip(WHITE_SPACE).endswith(reasoning.marks[1])  # as a template writes for "no thinking"
        if config.reasoning_parser:
            expects_reasoning = begins_inside or (options.thinking is not False and not has_ended)
    tool_set = ToolSet(options.tools)
    start, is_forced = _forced_start(options, tool_set), options.forced_choice is not None
    form = tools.call_form if tools is not None and options.tools else None
    forced: Callable[[], TextMachine] | None = None
    if unified is not None:
        machine = functools.partial(
            unified_parser, unified, tool_set, begins_inside=begins_inside, keeps_cut_call=is_forced
        )
        forced = functools.partial(tagged_machine, None, start=start) if start is not None else None
    elif has_reasoning or form is not None or start is not None or chooses_calls:
        tags: ReasoningTags | None = None
        if reasoning is not None and has_reasoning:
            tags = reasoning.tags(begins_inside=begins_inside, json_is_content=options.guides_json)
        machine = functools.partial(tagged_machine, form, tool_set, tags, start, keeps_cut_call=is_forced)
    else:
        return None
    return OutputPlan(
        machine,
        forced,
        only_first_call=options.only_first_call,
        only_function=None if options.forced_choice == REQUIRED else options.forced_choice,
        fills_content=has_reasoning and options.fills_content,
        has_reasoning=has_reasoning,
        expects_reasoning=expects_reasoning,
        has_short_ids=tools is not None and tools.has_short_ids,
    )


def tell_worker(
    options: ChatOptions,
    config: ModelRuntimeConfig,
    plan: OutputPlan,
    tokenizer: Tokenizer,
    fields: PlannedRequest,
    *,
    closes_objects: bool = True,
) -> OutputPlan:
    """Change the worker's request as the parsers need it; return the plan with the tokens that have to be visible.

    - A worker that opted in gets a structural tag.
    - Guidance waits until the engine has reasoned, and an engine with a parser of its own gets the template's variables.
    - The marks reach the parsers, also from a tokenizer that calls them special tokens.
    - Where a model ends its answer with the token that ends a call, that token is shown.
    """
    sampling, output = fields.sampling_options, fields.output_options
    marks: tuple[str, ...] = ()
    if plan.has_reasoning and (reasoning := REASONING_FORMATS.get(config.reasoning_parser or "")) is not None:
        marks += reasoning.tokens
    form = TOOL_FORMATS.get(config.tool_call_parser or "")
    if form is not None and (options.tools or form.unified is not None):
        marks += form.marks
        _show_ends(form, tokenizer, fields.stop_conditions)
        if (tag := structural_tag(options, config, form, closes_objects=closes_objects)) is not None:
            backend = options.guidance_backend
            sampling.guided_decoding = {"structural_tag": tag, **({} if backend is None else {"backend": backend})}
    fields.requires_reasoning = plan.expects_reasoning and sampling.guided_decoding is not None
    if plan.has_reasoning and (variables := options.template_variables):
        kwargs = {"chat_template_kwargs": dict(variables)}
        fields.extra_args = {**(fields.extra_args or {}), "reasoning_parser_kwargs": kwargs}
    visible = tokenizer.special_ids_in(marks)
    if not visible or output.skip_special_tokens is not None:
        return plan
    output.skip_special_tokens = False
    return dataclasses.replace(plan, visible=visible)


def think_marks(config: ModelRuntimeConfig, tokenizer: Tokenizer) -> tuple[str, str] | None:
    """Return the tags around the model's reasoning; None for a model without reasoning."""
    form = REASONING_FORMATS.get(config.reasoning_parser or "")
    opening, closing = form.marks if form is not None else DEFAULT_MARKS
    if form is None and (tokenizer.token_id(opening) is None or tokenizer.token_id(closing) is None):
        return None
    return opening, closing


def _show_ends(form: ToolFormat, tokenizer: Tokenizer, stops: StopFields) -> None:
    hidden = stops.stop_token_ids_hidden
    ends = {tokenizer.token_id(text) for text in form.end_tokens}
    if hidden and (shown := [token_id for token_id in hidden if token_id in ends]):
        stops.stop_token_ids_visible = shown
        stops.stop_token_ids_hidden = [token_id for token_id in hidden if token_id not in ends] or None


def _unified_form(config: ModelRuntimeConfig, tools: ToolFormat | None) -> UnifiedForm | None:
    """Return the format that reads reasoning, text and calls in one, if the card names one under either name."""
    reasoning = REASONING_FORMATS.get(config.reasoning_parser or "")
    if reasoning is not None and reasoning.unified is not None:
        return reasoning.unified
    return tools.unified if tools is not None else None


def _forced_start(options: ChatOptions, tools: ToolSet) -> ContentStart | None:
    """Return what reads the JSON that the engine was guided to; None where that is no call."""
    choice = options.forced_choice
    if not options.tools:
        return None
    if choice is None:
        return None if options.shape is None else calls_beside_shape(tools)
    return required_calls(tools) if choice == REQUIRED else named_call(choice)


class _Policy(NamedTuple):
    """What the worker opted into."""

    is_always: bool  # also for calls that may come; otherwise only where one must, or a tool is strict
    is_strict: bool  # the arguments follow their schema; otherwise only those of strict tools and forced choices


def structural_tag(
    options: ChatOptions, config: ModelRuntimeConfig, form: ToolFormat, *, closes_objects: bool = True
) -> dict[str, object] | None:
    """Return the structural tag of this request, which may call tools; None when the engine is not guided by a tag."""
    policy = _policy(config)
    if policy is None or form.call_tag is None:
        return None
    choice = options.forced_choice
    tools = [tool for tool in options.tools if choice in (None, REQUIRED, tool["function"]["name"])]
    strict = {tool["function"]["name"] for tool in tools if tool["function"].get("strict") is True}
    shape = options.shape
    if choice is None and shape is None and (options.has_own_form or not (policy.is_always or strict)):
        return None
    tags = [
        form.call_tag(
            name := tool["function"]["name"],
            (closed_schema(parameters_of(tool)) if closes_objects else parameters_of(tool))
            if policy.is_strict or choice is not None or name in strict
            else _ANY_OBJECT,
        )
        for tool in tools
    ]
    is_one = options.only_first_call or choice not in (None, REQUIRED)
    calls: dict[str, object] = {"tags": tags, "stop_after_first": is_one}
    if choice is not None or shape is not None:  # nothing but calls, from the first token on
        calls = {"type": "tags_with_separator", "separator": "\n", "at_least_one": True, **calls}
    else:
        calls = {"type": "triggered_tags", "triggers": [form.marks[0]], "at_least_one": False, **calls}
    if choice is None and shape is not None:
        whole = {"type": "json_schema", "json_schema": closed_schema(shape) if closes_objects else shape}
        calls = {"type": "or", "elements": [whole, calls]}
    return {"type": "structural_tag", "format": calls}


def _policy(config: ModelRuntimeConfig) -> _Policy | None:
    """Read the policy from either form of the setting; the newer form, an object, has another default."""
    if isinstance(config.structural_tag, dict):
        tag = config.structural_tag
        return _Policy(tag.get("scope", "always") == "always", tag.get("schema", "auto") == "strict")
    if config.structural_tag_mode == "on":
        return _Policy(config.structural_tag_scope == "always", config.structural_tag_schema == "strict")
    return None
