"""What a chat request and its model decide together about tools and reasoning: derived once, and passed with the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from dynamo.protocol.openai.shapes import ChatRequest, JsonObject, Thinking

_THINKING: Final = {"enabled": True, "disabled": False}


class ChatOptions(Struct, frozen=True):
    """How the answer of one chat request is guided, read and shown. Made by `chat_options`."""

    forced_choice: str | None  # see `ChatRequest.forced_choice`
    thinking_mode: str | None  # see `thinking_mode`
    tools: Sequence[JsonObject]  # that the answer may call
    only_first_call: bool  # further calls of the answer are dropped
    fills_content: bool  # an answer without text shows its reasoning as text
    has_own_form: bool  # the request guides the whole answer itself
    guides_json: bool  # the answer is JSON and nothing else
    shape: JsonObject | None  # a schema that the answer has unless it is calls
    guidance_backend: str | None  # of the engine; None: its own choice
    template_variables: Mapping[str, Any]  # of the template, and of an engine's own parser; read only

    @property
    def thinking(self) -> bool | None:
        """Whether the model is to reason; None: the model decides."""
        return _THINKING.get(self.thinking_mode or "")


def chat_options(request: ChatRequest, *, default_thinking_mode: str | None = None) -> ChatOptions:
    """Return what follows from the request and from the model's default. The request has been validated."""
    if request.is_plain and default_thinking_mode is None:
        return _PLAIN
    form, guidance, choice = request.response_format, request.guidance, request.forced_choice
    has_form = form is not None and form.type != "text"
    is_silent = request.thinking is None and request.reasoning_effort is None
    is_silent = is_silent and not request.chat_template_args and not request.chat_template_kwargs
    mode = default_thinking_mode if is_silent else thinking_mode(request, default=default_thinking_mode)
    return ChatOptions(
        forced_choice=choice,
        thinking_mode=mode,
        tools=() if not request.tools or request.tool_choice == "none" else request.tools,
        only_first_call=request.parallel_tool_calls is False,
        fills_content=not is_silent and request.fills_content,
        has_own_form=has_form or bool(guidance),
        guides_json="json" in guidance or choice is not None or (form is not None and form.shape is not None),
        shape=None if guidance else request.shape_beside_calls,
        guidance_backend=request.guided_decoding_backend,
        template_variables=template_variables(request, mode),
    )


_PLAIN: Final = ChatOptions(
    forced_choice=None, thinking_mode=None, tools=(), only_first_call=False, fills_content=False, has_own_form=False,
    guides_json=False, shape=None, guidance_backend=None, template_variables={},
)  # fmt: skip


def template_variables(request: ChatRequest, mode: str | None = None) -> JsonObject:
    """Return the extra top-level variables of the template, the reasoning controls made consistent.

    `mode`, the result of `thinking_mode`, is passed under three names (`thinking`, `enable_thinking`, `thinking_mode`),
    because templates differ in the one they read. "adaptive" removes the booleans.
    """
    variables = dict(request.template_args)
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    if request.verbosity is not None:
        variables.setdefault("verbosity", request.verbosity)
    if request.documents is not None:
        variables.setdefault("documents", request.documents)
    if mode is None:
        return variables
    if mode == "adaptive":
        variables.pop("thinking", None)
        variables.pop("enable_thinking", None)
    else:
        variables["thinking"] = variables["enable_thinking"] = mode != "disabled"
    variables["thinking_mode"] = mode
    return variables


def thinking_mode(request: ChatRequest, *, default: str | None = None) -> str | None:
    """Return whether the model is to reason: "enabled", "disabled", "adaptive" or a word of the model's own; None: unset.

    The first that speaks decides: `thinking`; then `thinking`, `enable_thinking` or `thinking_mode` of the template
    arguments; then `reasoning_effort` (anything but "none" is on); then the model's `default`.
    """
    mode = _mode_of_field(request.thinking) or _mode_of_arguments(request.template_args)
    if mode is None and request.reasoning_effort is not None:
        mode = "disabled" if request.reasoning_effort == "none" else "enabled"
    return mode or default


def _mode_of_field(thinking: bool | Thinking | None) -> str | None:
    if thinking is None:
        return None
    if isinstance(thinking, Thinking):
        return thinking.type
    return "enabled" if thinking else "disabled"


def _mode_of_arguments(arguments: JsonObject) -> str | None:
    if not arguments:
        return None
    for name in ("thinking", "enable_thinking"):
        if isinstance(value := arguments.get(name), bool):
            return "enabled" if value else "disabled"
    mode = arguments.get("thinking_mode")
    return mode if isinstance(mode, str) else None
