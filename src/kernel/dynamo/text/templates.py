"""Chat templates, rendered as HuggingFace renders them: messages -> one prompt text.

A template is the model author's Jinja program; it runs in a sandbox that lets it change nothing. What it does not accept
(`raise_exception`, a missing field it computes with) is the request's fault and becomes `TemplateRejected`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from types import CodeType
from typing import Any, Final, NamedTuple, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from msgspec import Struct

from dynamo.errors import InvalidArgument
from dynamo.protocol.openai.shapes import JsonMapping, JsonObject
from dynamo.text.contents import are_plain, in_form
from dynamo.text.template_budget import NO_CLOCK, BudgetExceeded, BudgetSpec
from dynamo.text.template_probe import (
    ArgumentForm,
    ContentForm,
    Message,
    Messages,
    RoleForm,
    find_argument_form,
    find_content_form,
    find_efforts,
    find_role_form,
)
from dynamo.text.template_sandbox import BudgetedSandbox, paid_filter, render_within
from dynamo.text.turns import alternating, with_placed_systems

__all__ = [
    "INLINE_BUDGET",
    "PLAIN_TEMPLATE",
    "BudgetExceeded",
    "BudgetSpec",
    "ChatTemplate",
    "TemplateRejected",
    "TemplateTraits",
    "ThinkMarks",
    "readable_messages",
    "traits_of",
]

# Messages as a template may read them: no null that a template would print, and reasoning where the template expects it.
#
# Clients send members that are null ("content": null beside tool calls, "tool_calls": null from a library that dumps every
# field). A template prints a null as the text `None`, and loops over it with an error. What a template does read is
# read from its source.


ThinkMarks = tuple[str, str]
"""The tags a model writes around its reasoning."""

_TESTS_NULL_CONTENT: Final = re.compile(r"content['\"]?\s*\]?\s*(?:is\s+(?:not\s+)?none|[!=]=\s*none)\b", re.IGNORECASE)
_OTHER_MEMBER: Final = re.compile(r"\b(?:m|msg|\w*message)(?:\.|\[['\"])(thinking|reasoning)\b")
_OPTIONAL: Final = ("tool_calls", "reasoning_content", "reasoning", "refusal", "name", "audio", "function_call")


class TemplateTraits(Struct, frozen=True):
    """What a template does with members that not every template knows."""

    tests_null_content: bool = False  # a null content means something to it (some write calls only beside a null)
    reasoning_member: str | None = None  # the member it reads earlier reasoning from; None: it reads none


def traits_of(source: str) -> TemplateTraits:
    """Read the traits from a template's source."""
    member = "reasoning_content" if "reasoning_content" in source else None
    if member is None and (other := _OTHER_MEMBER.search(source)) is not None:
        member = other.group(1)
    return TemplateTraits(_TESTS_NULL_CONTENT.search(source) is not None, member)


def readable_messages(messages: Messages, traits: TemplateTraits, think_marks: ThinkMarks | None) -> list[Message]:
    """Return the messages for a template of these traits; a message that needs no change is the same object.

    Reasoning of earlier turns goes into the member the template reads. For a template that reads none the reasoning
    goes in front of the content, between `think_marks`; without marks the model has no form for it, and it is left out.
    """
    return [_readable(message, traits, think_marks) for message in messages]


def _readable(message: Message, traits: TemplateTraits, think_marks: ThinkMarks | None) -> Message:
    dropped = [name for name in _OPTIONAL if name in message and (message[name] is None or message[name] == [])]
    if dropped:
        message = {name: value for name, value in message.items() if name not in dropped}
    if message.get("role") == "assistant":
        message = _with_reasoning(message, traits, think_marks)
    is_null = message.get("content") is None and ("content" in message or message.get("role") == "assistant")
    if is_null and not traits.tests_null_content:
        return {**message, "content": ""}
    if is_null and "content" not in message:
        return {**message, "content": None}  # the same message, whichever way the client spells it
    return message


def _with_reasoning(message: Message, traits: TemplateTraits, think_marks: ThinkMarks | None) -> Message:
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(reasoning, str) or not reasoning:
        return message
    if traits.reasoning_member is not None:
        if message.get(traits.reasoning_member):
            return message
        return {**message, traits.reasoning_member: reasoning}
    content = message.get("content")
    if think_marks is not None and isinstance(content, list) and content and isinstance(first := content[0], Mapping):
        block = _think_block(reasoning, think_marks)
        parts = (
            [{**first, "text": block + first["text"]}, *content[1:]]
            if "text" in first
            else [{"type": "text", "text": block}, *content]
        )
        return {**message, "content": parts}
    # Beside a null content such a template writes the calls; a text there would make it leave them out.
    is_needed_null = content is None and traits.tests_null_content and "tool_calls" in message
    if think_marks is None or is_needed_null or not isinstance(content, str | None):
        return message
    return {**message, "content": _think_block(reasoning, think_marks) + (content or "")}


def _think_block(reasoning: str, marks: ThinkMarks) -> str:
    return f"{marks[0]}\n{reasoning.strip()}\n{marks[1]}\n\n"


# For a model known only by name: readable lines, and an open line for the answer.
PLAIN_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ message.role + ': ' + (message.content if message.content is string else '') + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


MAX_SOURCE_CHARACTERS: Final = 256 * 1024  # the longest template in use has 30 KiB; this one compiles in seconds
COSTLY_RENDERINGS: Final = 100  # that go elsewhere at once, after one that took too long where it was
INLINE_BUDGET: Final = BudgetSpec(steps=20_000, sizes=4 * 1024 * 1024, seconds=0.005)
"""What a rendering may take on an event loop; a conversation of 20 messages takes 300 steps and under a millisecond."""
MAX_COMPILED: Final = 16  # compiling takes milliseconds, and every worker of a model brings the same template


class TemplateRejected(InvalidArgument):
    """The model's template cannot render this request. `detail` is the template's own message."""

    def __init__(self, detail: str) -> None:
        super().__init__(f"Invalid request: the model's chat template does not accept these messages: {detail}")
        self.detail = detail


_ASKED: Final = ({"role": "user", "content": "text"},)


class _Program(NamedTuple):
    """One compiled template."""

    template: Template
    traits: TemplateTraits
    contents: ContentForm
    roles: RoleForm
    arguments: ArgumentForm
    efforts: Mapping[str, str | None]  # what stands in for those that the family does not know


class ChatTemplate:
    """A compiled chat template. Rendering is pure and may run on several threads at once."""

    __slots__ = ("_budget", "_clock", "_constants", "_costly", "_default", "_named")

    def __init__(
        self,
        source: str | Mapping[str, str],
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] | None = None,
        budget: BudgetSpec | None = None,
        clock: Callable[[], float] = NO_CLOCK,
    ) -> None:
        """Compile `source`: one template, or several by name ("default", and "tool_use" where tools are given).

        `special_tokens` are further variables (`pad_token`, ...). `now` gives `strftime_now` its time; without it that
        name is undefined, which templates check for. `budget` bounds each rendering, its seconds as `clock` counts them.

        Raises:
            InvalidArgument: a template is too long, or does not compile; the message has the line.
        """
        self._budget, self._clock = budget or BudgetSpec(), clock
        self._costly = 0  # of the renderings to come, how many are expected to take long
        environment = _environment(now)
        sources = {"default": source} if isinstance(source, str) else source
        self._constants: JsonObject = dict(special_tokens or {})
        for role, token in (("bos_token", bos_token), ("eos_token", eos_token)):
            if token is not None:
                self._constants[role] = token
        self._named = {name: self._program(environment, name, text) for name, text in sources.items()}
        if not self._named:
            raise InvalidArgument("the model's list of chat templates is empty")
        self._default: _Program | None = self._named.get("default") or (
            next(iter(self._named.values())) if len(self._named) == 1 else None
        )

    def _program(self, environment: BudgetedSandbox, name: str, source: str) -> _Program:
        """Compile one template, and find by examples how it takes conversations."""
        template, traits = _compile(environment, name, source), traits_of(source)
        contents, is_endless = ContentForm(), False

        def raw(messages: Messages, tools: Messages | None, **variables: str) -> str | None:
            nonlocal is_endless
            if is_endless:  # a hostile template would take its whole budget for each of the examples
                return None
            given = {**self._constants, "tools": tools, "add_generation_prompt": True, **variables}
            shown = readable_messages(messages, traits, None)
            try:
                return render_within(template, {**given, "messages": shown}, self._budget, self._clock)
            except (BudgetExceeded, RecursionError):
                is_endless = True
                return None
            except Exception:  # a template is a program: whatever it raises, it does not accept this example
                return None

        def render(messages: Messages, tools: Messages | None) -> str | None:
            return raw(in_form(messages, contents), tools)

        def with_effort(effort: str | None) -> str | None:
            return raw(in_form(_ASKED, contents), None, **({} if effort is None else {"reasoning_effort": effort}))

        contents = find_content_form(raw)
        shows_calls = "arguments" in source or "tool_calls" in source
        return _Program(
            template,
            traits,
            contents,
            find_role_form(render, names_developer="developer" in source),
            find_argument_form(render) if shows_calls else ArgumentForm(),
            find_efforts(with_effort, source),
        )

    def argument_form(self, *, has_tools: bool) -> ArgumentForm:
        """Return how the template that renders requests with or without tools takes the arguments of earlier calls."""
        program = self._used(has_tools)
        return ArgumentForm() if program is None else program.arguments

    def role_form(self, *, has_tools: bool) -> RoleForm:
        """Return where that template shows the texts of the system."""
        program = self._used(has_tools)
        return RoleForm() if program is None else program.roles

    def _used(self, has_tools: bool) -> _Program | None:
        return (self._named.get("tool_use") if has_tools else None) or self._default

    @property
    def content_form(self) -> ContentForm:
        """How the template that is used without tools takes contents."""
        return ContentForm() if self._default is None else self._default.contents

    @property
    def reads_parts(self) -> bool:
        """Whether that template has a place for media."""
        return "user" in self.content_form.parts

    def expect_cheap(self) -> bool:
        """Return whether the next rendering is expected to stay within `INLINE_BUDGET`; costly ones are tried again later."""
        if self._costly == 0:
            return True
        self._costly -= 1
        return False

    def was_costly(self) -> None:
        """Record a rendering that took more than `INLINE_BUDGET`."""
        self._costly = COSTLY_RENDERINGS

    def render(
        self,
        messages: Messages,
        /,
        *,
        tools: Messages | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        think_marks: ThinkMarks | None = None,
        variables: JsonMapping | None = None,
        budget: BudgetSpec | None = None,
        **named: Any,
    ) -> str:
        """Render the prompt. `variables` and the `named` arguments are visible to the template and win over the model's own.

        What a user wrote (`chat_template_args`) belongs in `variables`: there any key is allowed, only `messages` is
        not replaced.

        Contents get the form that the template reads (see `contents.in_form`). No tools (None or empty) is `None` in the
        template. `think_marks` are the tags around the model's reasoning: see `messages.readable_messages`, which also
        determines what becomes of null members. `continue_final_message` ends the prompt with the last message's text, so that the answer goes on
        from it; it excludes the generation prompt, which is then left out.

        `budget` replaces the template's own.

        Raises:
            TemplateRejected: the template refused, cannot work with these messages, or takes more than its own budget.
            BudgetExceeded: it takes more than `budget`.
        """
        program = self._used(bool(tools))
        if program is None:
            raise TemplateRejected(f"it has only named templates ({', '.join(self._named)}) and none is the default")
        constants = {
            **self._constants,
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            **named,
            **(variables or {}),
        }
        if isinstance(effort := constants.get("reasoning_effort"), str) and effort in program.efforts:
            del constants["reasoning_effort"]
            if (known := program.efforts[effort]) is not None:
                constants["reasoning_effort"] = known

        def attempt(given: Messages) -> str:
            shaped = given
            if program.contents.only_parts or not are_plain(given):
                shaped = in_form(readable_messages(given, program.traits, think_marks), program.contents)
            values = {**constants, "messages": shaped}
            prompt = render_within(program.template, values, budget or self._budget, self._clock)
            return _cut_behind_final_message(prompt, shaped) if continue_final_message else prompt

        try:
            return _rendered(attempt, with_placed_systems(messages, program.roles))
        except BudgetExceeded as error:
            if budget is not None:
                raise
            raise TemplateRejected(str(error)) from error


def _rendered(attempt: Callable[[Messages], str], messages: Messages) -> str:
    """Render a conversation; one that is refused is rendered in turns of user and assistant, where that changes it."""
    try:
        return attempt(messages)
    except (BudgetExceeded, TemplateRejected):
        raise
    except Exception as error:  # a template is a program: whatever it raises, these messages made it raise
        found = _in_turns(attempt, messages)
        if found is None:  # the first refusal fits what was sent
            raise TemplateRejected(_describe(error)) from error
        return found


def _in_turns(attempt: Callable[[Messages], str], messages: Messages) -> str | None:
    """Return the prompt in turns of user and assistant; None where that changes nothing, or is refused as well."""
    if (turns := alternating(messages)) == list(messages):
        return None
    try:
        return attempt(turns)
    except (BudgetExceeded, TemplateRejected):
        raise
    except Exception:
        return None


def _compile(environment: BudgetedSandbox, name: str, source: str) -> Template:
    if len(source) > MAX_SOURCE_CHARACTERS:
        raise InvalidArgument(
            f"the model's chat template {name!r} has {len(source)} characters, at most {MAX_SOURCE_CHARACTERS} are read"
        )
    try:
        # A plain dict of them: every rendering copies it, and jinja2's chain of two maps is copied key by key.
        return Template.from_code(environment, _code(source), dict(environment.make_globals(None)))
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        where = f" at line {line}" if line else ""
        raise InvalidArgument(f"the model's chat template {name!r} does not compile{where}: {error}") from error


@lru_cache(maxsize=MAX_COMPILED)
def _code(source: str) -> CodeType:
    """Return the program of a template: the same for every environment: only `strftime_now` differs."""
    return _environment(None).compile(source)


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"


def _cut_behind_final_message(prompt: str, messages: Messages) -> str:
    final = messages[-1].get("content") if messages else None
    if isinstance(final, list):
        final = next(
            (p.get("text") for p in reversed(final) if isinstance(p, Mapping) and p.get("type") == "text"), None
        )
    if not isinstance(final, str) or not final.strip():
        raise TemplateRejected("continue_final_message needs a last message with text to continue")
    at = prompt.rfind(final.strip())
    if at < 0:
        raise TemplateRejected("continue_final_message: the template does not show the last message's text unchanged")
    # Templates that strip contents lose the white space behind it; others keep it.
    kept = final.lstrip()
    return prompt[: at + len(kept)] if prompt.startswith(kept, at) else prompt[: at + len(final.strip())]


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's part for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2 reads

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment(now: Callable[[], datetime] | None) -> BudgetedSandbox:
    environment = BudgetedSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = paid_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _raise_exception
    if now is not None:
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not jinja2's own filter: that one sorts keys and escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
