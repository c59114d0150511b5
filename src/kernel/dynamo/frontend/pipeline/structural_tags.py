"""Structural tags: the engine may write any text, but a call, once begun, has the form and the arguments it must have.

A worker opts in on its card, and the model's tool format must define the form of its calls. The tag goes to the engine as
`guided_decoding.structural_tag`; with a forced choice the answer is calls and nothing else, in the model's own format.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from dynamo.protocol.openai.chat_options import ChatOptions
from dynamo.protocol.openai.closed_schema import closed_schema
from dynamo.protocol.openai.shapes import REQUIRED
from dynamo.protocol.openai.tool_schema import parameters_of
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.text.formats.tools import ToolFormat

_ANY_OBJECT: Final = {"type": "object"}


class _Policy(NamedTuple):
    """What the worker opted into."""

    is_always: bool  # also for calls that may come; otherwise only where one must, or a tool is strict
    is_strict: bool  # the arguments follow their schema; otherwise only those of strict tools and forced choices


def structural_tag(
    options: ChatOptions, config: ModelRuntimeConfig, form: ToolFormat, *, closes_objects: bool = True
) -> dict[str, Any] | None:
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
    calls: dict[str, Any] = {"tags": tags, "stop_after_first": is_one}
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
