"""How families of models write tool calls: the table of formats, and the names under which a model card requests them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol

from dynamo.text.formats.bare_json import BareJson
from dynamo.text.formats.json_calls import NamedJson, TaggedJson
from dynamo.text.formats.kimi import KIMI_K2
from dynamo.text.formats.mistral import MistralCalls
from dynamo.text.formats.scanner import Grammar, TextMachine
from dynamo.text.formats.tool_set import NO_TOOLS, ToolSet

__all__ = ["TOOL_FORMATS", "Form", "ToolFormat"]


class Form(Protocol):
    """What a format is, whatever machine reads it."""

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that must reach the parser; the first begins a call."""
        ...

    def grammar(self, tools: ToolSet) -> Grammar:
        """Return the grammar of an answer that may call these tools."""
        ...


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes its calls."""

    form: Form
    description: str  # a line of the documentation
    end_tokens: tuple[
        str, ...
    ] = ()  # tokens that end a call: where a model also ends its answer with one, it must be seen
    # (name, schema of the arguments) -> the call as a tag for guided decoding; None: the format has no such tag.
    call_tag: Callable[[str, dict[str, Any]], dict[str, Any]] | None = None
    has_short_ids: bool = False  # ids of calls are nine letters or digits

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks that must stand in the text, also where they are special tokens; the first begins a call."""
        return self.form.marks

    def parser(self, tools: ToolSet = NO_TOOLS) -> TextMachine:
        """Make a parser for one choice."""
        return TextMachine(self.form.grammar(tools))


def _hermes_tag(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return a call of this function as one tag of a structural tag."""
    return {
        "begin": f'<tool_call>\n{{"name": "{name}", "arguments": ',
        "content": {"type": "json_schema", "json_schema": parameters},
        "end": "}\n</tool_call>",
    }


_TOOL_CALL: Final = (("<tool_call>",), ("</tool_call>",))
_HERMES: Final = ToolFormat(
    TaggedJson(*_TOOL_CALL),
    '`<tool_call>{"name", "arguments"}</tool_call>`, any number of them; also an array of such objects',
    end_tokens=("</tool_call>",),
    call_tag=_hermes_tag,
)
_NEMOTRON_DECI: Final = ToolFormat(
    TaggedJson(("<TOOLCALL>",), ("</TOOLCALL>",)), '`<TOOLCALL>[{"name", "arguments"}, ...]</TOOLCALL>`'
)
_JAMBA: Final = ToolFormat(
    TaggedJson(("<tool_calls>",), ("</tool_calls>",), separators=",;"),
    '`<tool_calls>[{"name", "arguments"}, ...]</tool_calls>`, or one object per line',
)
_PHI4: Final = ToolFormat(TaggedJson(("functools[",), opens_array=True), '`functools[{"name", "arguments"}, ...]`')
_LLAMA3: Final = ToolFormat(
    BareJson(("<|python_tag|>",), is_whole_answer=True),
    '`<|python_tag|>{"name", "parameters"}`, several divided by `;`; without the tag when the whole answer is such '
    "objects of known tools",
    end_tokens=("<|eom_id|>",),
)
_DEFAULT: Final = ToolFormat(
    BareJson(("<TOOLCALL>", "<|python_tag|>"), ("</TOOLCALL>",)),
    "bare objects or arrays of calls of known tools, anywhere; behind `<TOOLCALL>` or `<|python_tag|>` of any tool",
)
_MISTRAL: Final = ToolFormat(
    MistralCalls(),
    "`[TOOL_CALLS]` and an array of calls, or `NAME{...}`, or `NAME[ARGS]{...}`; ids are nine letters or digits",
    has_short_ids=True,
)
_DEEPSEEK_V3: Final = ToolFormat(
    NamedJson(
        opening="<｜tool▁call▁begin｜>",
        before_name="function<｜tool▁sep｜>",
        behind_name=("\n",),
        fence=("```json", "```"),
        behind_json=("<｜tool▁call▁end｜>",),
        outer=("<｜tool▁calls▁begin｜>",),
        closing=("<｜tool▁calls▁end｜>",),
    ),
    "`<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, the arguments in a fence of JSON",
    end_tokens=("<｜tool▁calls▁end｜>",),
)
_DEEPSEEK_V31: Final = ToolFormat(
    NamedJson(
        opening="<｜tool▁call▁begin｜>",
        before_name="",
        behind_name=("<｜tool▁sep｜>",),
        behind_json=("<｜tool▁call▁end｜>",),
        outer=("<｜tool▁calls▁begin｜>",),
        closing=("<｜tool▁calls▁end｜>",),
    ),
    "`<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`",
    end_tokens=("<｜tool▁calls▁end｜>",),
)
_KIMI_K2: Final = ToolFormat(
    KIMI_K2,
    "`<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`; the model's ids are kept",
    end_tokens=("<|tool_calls_section_end|>",),
)

TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = MappingProxyType(
    {
        "hermes": _HERMES,
        "qwen25": _HERMES,
        "nemotron_deci": _NEMOTRON_DECI,
        "jamba": _JAMBA,
        "phi4": _PHI4,
        "llama3_json": _LLAMA3,
        "default": _DEFAULT,
        "mistral": _MISTRAL,
        "deepseek_v3": _DEEPSEEK_V3,
        "deepseek_v3_1": _DEEPSEEK_V31,
        "kimi_k2": _KIMI_K2,
        "kimi_k25": _KIMI_K2,
    }
)
"""Every tool-call parser by the names it goes by."""
