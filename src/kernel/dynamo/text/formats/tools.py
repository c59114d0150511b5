"""How families of models write tool calls: the table of formats, and the names under which a model card requests them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Final, Protocol

from msgspec import Struct

from dynamo.protocol.openai.shapes import JsonObject
from dynamo.text.formats.brace_calls import BraceCalls, MistralCalls
from dynamo.text.formats.call_form import CallForm
from dynamo.text.formats.channels import Harmony, Inkling, KimiK3, Muse
from dynamo.text.formats.element_calls import ElementCalls, TaggedPairs
from dynamo.text.formats.json_calls import HERMES_KEYS, CallKeys, NamedJson, TaggedJson, call_objects
from dynamo.text.formats.output import Output
from dynamo.text.formats.python_calls import PythonCalls
from dynamo.text.formats.scanner import Grammar, NotACall, Scanner, Step, TextMachine
from dynamo.text.formats.tagged_answer import tagged_machine
from dynamo.text.formats.tool_set import NO_TOOLS, ToolSet
from dynamo.text.formats.xml_calls import TaggedXml

# Calls that are JSON and nothing else around it: Llama 3's, and those of no family in particular.
#
# A JSON object in an answer may be the answer. So without a mark it is a call only if it is whole and names a tool of the
# request; up to `scanner.MAX_CALL_CHARACTERS` of it are held back until that is known.


_KNOWN: Final = CallKeys(only_known=True)
_BARE: Final = ("{", "[")
_NOISE: Final = re.compile(r"""(?:\[(?=[^\s{])|\{(?=[^\s"']))+""")


@dataclass(frozen=True, slots=True)
class BareJson(CallForm):
    """Objects behind a mark, or bare ones."""

    opening: tuple[str, ...]
    closing: tuple[str, ...] = ()
    is_whole: bool = False  # bare calls are the whole answer, or none
    fences: tuple[str, ...] = ()  # behind these, too, objects are calls only of known tools

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks that must reach the parser; the first begins a call."""
        return (*self.opening, *self.closing, *self.fences)

    @property
    def starts(self) -> tuple[str, ...]:
        return (*self.opening, *self.fences, *(() if self.is_whole else _BARE))

    @property
    def noise(self) -> re.Pattern[str] | None:
        return None if self.is_whole else _NOISE

    @property
    def is_whole_answer(self) -> bool:
        return self.is_whole

    @property
    def may_stand_in_reasoning(self) -> bool:
        return False

    def calls(self, s: Scanner, mark: str, tools: ToolSet) -> Step[None]:
        if mark not in self.opening:
            yield from self._one(s, tools, mark if mark in self.fences else "")
            return
        s.take(s.at + len(mark))
        yield from call_objects(s, tools, HERMES_KEYS, separators=";,", closing=self.closing)

    def whole_answer(self, s: Scanner, tools: ToolSet) -> Step[None]:
        if (yield from s.comes(0, *_BARE)):
            yield from s.attempt(self._whole(s, tools))

    def _one(self, s: Scanner, tools: ToolSet, fence: str) -> Step[None]:
        s.out.hold()
        s.take(s.at + len(fence))
        yield from call_objects(s, tools, _KNOWN, separators=";,", closing=self.closing if fence else ())
        s.out.release()
        s.commit()

    def _whole(self, s: Scanner, tools: ToolSet) -> Step[None]:
        s.out.hold()
        yield from s.space()
        yield from call_objects(s, tools, _KNOWN, separators=";,")
        yield from s.space()
        if (yield from s.peek()):
            raise NotACall  # more than calls
        s.out.release()
        s.commit()


# DSML, the tags of DeepSeek V3.2 and later.
#
#     <｜DSML｜tool_calls>
#     <｜DSML｜invoke name="search">
#     <｜DSML｜parameter name="query" string="true">rain</｜DSML｜parameter>
#     </｜DSML｜invoke>
#     </｜DSML｜tool_calls>
#
# The versions differ in the outer tag and in a space; models mix them up and damage the bars. So one format reads them all.


_BARS: Final = ("｜", "|", "‖", "｜｜", "||")
_OUTER: Final = ("function_calls", "tool_calls", "toolcalls", "calls", "tool")


def dsml(word: str = "DSML", outer: str = "function_calls", space: str = "") -> TaggedXml:
    """Return the format; `outer` and `space` are those of the version, and the rest is read too."""
    heads = [f"{bar}{word}{bar}{gap}" for bar, gap in product(_BARS, ("", " "))]
    first = f"｜{word}｜{space}"
    heads.sort(key=lambda head: head != first)  # the version's own spelling first
    names = sorted(_OUTER, key=lambda name: name != outer)
    return TaggedXml(
        outer=tuple(f"<{head}{name}>" for head, name in product(heads, names)),
        closing=tuple(f"</{head}{name}>" for head, name in product(heads, names)),
        invoke=tuple(f"<{head}invoke" for head in heads),
        invoke_end=tuple(f"</{head}invoke>" for head in heads),
        parameter=tuple(f"<{head}parameter" for head in heads),
        parameter_end=tuple(f"</{head}parameter>" for head in heads),
        has_attributes=True,
        reads_json=True,
        prefixes=tuple(f"<{bar}{word}{bar}" for bar in _BARS),
    )


# The ids of Kimi K2, which carry the name: `functions.NAME:INDEX`. The client gets the id as the model wrote it.


_ID: Final = re.compile(r"(?:functions\.)?([\w.\-]+):([0-9]+)")


def identify(text: str, tools: ToolSet) -> tuple[str, str | None]:
    """Return the name and the id of a call. An odd id is a call of the tool whose name stands in it."""
    if (found := _ID.fullmatch(text)) is not None:
        name = found[1]
        return (f"functions.{name}" if f"functions.{name}" in tools.names else name), text
    known = [name for name in tools.names if name in text]
    if not known or len(text.split()) > 1:
        raise NotACall
    return max(known, key=len), None


KIMI_K2: Final = NamedJson(
    opening="<|tool_call_begin|>",
    before_name="",
    behind_name=("<|tool_call_argument_begin|>",),
    behind_json=("<|tool_call_end|>",),
    outer=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
    closing=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    identify=identify,
)


class UnifiedForm(Protocol):
    """A format in which reasoning and text are blocks, as calls are: one grammar reads the whole answer."""

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that must reach the parser, also where they are special tokens."""
        ...

    def grammar(self, tools: ToolSet) -> Grammar:
        """Return the grammar of an answer that may call these tools."""
        ...


class ToolFormat(Struct, frozen=True):
    """How a family of models writes its calls."""

    form: CallForm | UnifiedForm
    description: str  # a line of the documentation
    end_tokens: tuple[
        str, ...
    ] = ()  # tokens that end a call: where a model also ends its answer with one, it must be seen
    # (name, schema of the arguments) -> the call as a tag for guided decoding; None: the format has no such tag.
    call_tag: Callable[[str, JsonObject], JsonObject] | None = None
    has_short_ids: bool = False  # ids of calls are nine letters or digits

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks that must stand in the text, also where they are special tokens; the first begins a call."""
        return self.form.marks

    @property
    def call_form(self) -> CallForm | None:
        """Return how calls stand among text; None in a unified format."""
        return self.form if isinstance(self.form, CallForm) else None

    @property
    def unified(self) -> UnifiedForm | None:
        """Return the format of the whole answer, reasoning too; None where only calls have one."""
        return None if isinstance(self.form, CallForm) else self.form

    def parser(self, tools: ToolSet = NO_TOOLS) -> TextMachine:
        """Make a parser for one choice, which does not reason unless the format is unified."""
        if isinstance(self.form, CallForm):
            return tagged_machine(self.form, tools)
        return unified_parser(self.form, tools)


def unified_parser(
    form: UnifiedForm, tools: ToolSet = NO_TOOLS, *, begins_inside: bool = False, keeps_cut_call: bool = False
) -> TextMachine:
    """Make a parser of reasoning, text and calls in one.

    `begins_inside`: the prompt has begun the reasoning. `keeps_cut_call`: a call had to come, so what there is of one
    that was cut off is that call.
    """
    out = Output()
    out.is_reasoning, out.keeps_cut_call = begins_inside, keeps_cut_call
    return TextMachine(form.grammar(tools), out)


def _hermes_tag(name: str, parameters: dict[str, object], word: str = "tool_call") -> dict[str, object]:
    """Return a call of this function as one tag of a structural tag."""
    return {
        "begin": f'<{word}>\n{{"name": "{name}", "arguments": ',
        "content": {"type": "json_schema", "json_schema": parameters},
        "end": f"}}\n</{word}>",
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
    BareJson(("<|python_tag|>",), is_whole=True),
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

_QWEN_XML: Final = TaggedXml(
    *_TOOL_CALL,
    invoke=("<function=",),
    invoke_end=("</function>",),
    parameter=("<parameter=",),
    parameter_end=("</parameter>",),
    trims_line_break=True,
    reads_objects=True,
    implies_ends=True,
)
_QWEN3_CODER: Final = ToolFormat(
    _QWEN_XML,
    "`<tool_call><function=NAME><parameter=KEY>text</parameter></function></tool_call>`, typed by the tool's schema; also "
    "the objects of `hermes`",
    end_tokens=("</tool_call>",),
)
_INVOKES: Final = TaggedXml(
    ("<minimax:tool_call>",),
    ("</minimax:tool_call>",),
    invoke=("<invoke",),
    invoke_end=("</invoke>",),
    parameter=("<parameter",),
    parameter_end=("</parameter>",),
    has_attributes=True,
)
_INVOKES_TEXT: Final = (
    '`<{0}><invoke name="NAME"><parameter name="KEY">text</parameter></invoke></{0}>`, typed by the tool\'s schema'
)
_MINIMAX_M2: Final = ToolFormat(
    _INVOKES,
    _INVOKES_TEXT.format("minimax:tool_call"),
    end_tokens=("</minimax:tool_call>",),
)
_GLM: Final = ToolFormat(
    TaggedPairs(),
    "`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>text</arg_value></tool_call>`, with or without line breaks, typed by "
    "the tool's schema",
    end_tokens=("<|observation|>", "</tool_call>"),
)
_MINIMAX_M3: Final = ToolFormat(
    ElementCalls("]<]minimax[>["),
    '`<tool_call><invoke name="NAME"><KEY>text</KEY></invoke></tool_call>`, `]<]minimax[>[` in front of every tag; objects '
    "and arrays are nested elements. Emitted when a call is whole",
)
_MINIMAX_M3_NOM: Final = ToolFormat(ElementCalls(""), "the same without `]<]minimax[>[`")
_GEMMA4: Final = ToolFormat(
    BraceCalls(
        "<|tool_call>",
        ("<tool_call|>", "<turn|>"),
        '<|"|>',
        stray=("<tool_call|>", "<turn|>"),
        behind_reasoning=("call:", ":call:"),
    ),
    '`<|tool_call>call:NAME{key:<|"|>text<|"|>,other:3}<tool_call|>`; emitted value by value',
)
_PYTHONIC: Final = ToolFormat(
    PythonCalls(),
    '`[NAME(key="text", other=3), ...]`, at least one of them a known tool; emitted when the list is whole',
)
_DSML_TEXT: Final = (
    '`<｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">text</｜DSML｜parameter></｜DSML｜invoke>` in '
    "`<｜DSML｜{}>`; spellings of the other versions are read, too"
)
_DSML_V32: Final = ToolFormat(dsml(), _DSML_TEXT.format("function_calls"))
_DSML_V4: Final = ToolFormat(dsml(outer="tool_calls"), _DSML_TEXT.format("tool_calls"))
_DSML_V41: Final = ToolFormat(dsml(outer="calls", space=" "), _DSML_TEXT.format(" calls"))
MUSE: Final = Muse(
    TaggedXml(
        ("<atem:function_calls>",),
        ("</atem:function_calls>",),
        invoke=("<atem:invoke",),
        invoke_end=("</atem:invoke>",),
        parameter=("<atem:parameter",),
        parameter_end=("</atem:parameter>",),
        has_attributes=True,
        reads_json=True,
    )
)
_HARMONY: Final = ToolFormat(
    Harmony(),
    "`<|channel|>commentary to=functions.NAME<|message|>{...}<|call|>`; the channels `final` and `commentary` are text, "
    "`analysis` is reasoning",
    end_tokens=("<|call|>",),
)
_INKLING: Final = ToolFormat(
    Inkling(),
    '`<|content_invoke_tool_json|>{"name", "args"}<|end_message|>` among blocks of text and reasoning',
)
_KIMI_K3: Final = ToolFormat(
    KimiK3(),
    '`<|open|>call tool="NAME"<|sep|><|open|>argument key="KEY" type="string"<|sep|>text<|close|>argument<|sep|>...` '
    "among elements of text and reasoning",
)
_MUSE: Final = ToolFormat(
    MUSE,
    '`<atem:invoke name="NAME"><atem:parameter name="KEY">text</atem:parameter></atem:invoke>` in a message to a tool; '
    "messages to `self` are reasoning",
)

_STEP3: Final = TaggedXml(
    ("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>"),
    ("<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
    invoke=("<steptml:invoke",),
    invoke_end=("</steptml:invoke>",),
    parameter=("<steptml:parameter",),
    parameter_end=("</steptml:parameter>",),
    has_attributes=True,
    between=("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>"),
    stray=("<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
)
COHERE_FRAME: Final = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")

# Formats that engines read themselves, under the names that they have there.
_OF_ENGINES: Final = {
    "apertus": ToolFormat(
        TaggedJson(("<|tools_prefix|>",), ("<|tools_suffix|>",), CallKeys(()), stray=("<|tools_suffix|>",)),
        '`<|tools_prefix|>[{"NAME": {...}}, ...]<|tools_suffix|>`',
    ),
    "cohere_command3": ToolFormat(
        TaggedJson(
            ("<|START_ACTION|>",),
            ("<|END_ACTION|>",),
            CallKeys(("tool_name",), ("parameters",)),
            frame=COHERE_FRAME,
            stray=("<|END_ACTION|>",),
        ),
        '`<|START_ACTION|>[{"tool_call_id", "tool_name", "parameters"}, ...]<|END_ACTION|>`; the text may stand between '
        "`<|START_RESPONSE|>` and `<|END_RESPONSE|>`",
    ),
    "dots": ToolFormat(
        replace(_INVOKES, outer=("<dots_function_call>",), closing=("</dots_function_call>",), reads_objects=True),
        _INVOKES_TEXT.format("dots_function_call") + "; also the objects of `hermes`",
    ),
    "ernie45": ToolFormat(
        TaggedJson(*_TOOL_CALL, frame=("<response>", "</response>")),
        "that of `hermes`; the text may stand between `<response>` and `</response>`",
        call_tag=_hermes_tag,
    ),
    "functiongemma": ToolFormat(
        BraceCalls(
            "<start_function_call>",
            ("<end_function_call>",),
            "<escape>",
            stray=("<end_function_call>",),
            types_text=True,
        ),
        "`<start_function_call>call:NAME{KEY:<escape>text<escape>}<end_function_call>`, typed by the tool's schema",
    ),
    "granite": ToolFormat(
        TaggedJson(("<|tool_call|>", "<tool_call>")), '`<|tool_call|>[{"name", "arguments"}, ...]`, or `<tool_call>`'
    ),
    "hunyuan_a13b": ToolFormat(
        TaggedJson(("<tool_calls>",), ("</tool_calls>",), separators=",;", frame=("<answer>", "</answer>")),
        "that of `jamba`; the text may stand between `<answer>` and `</answer>`",
    ),
    "internlm": ToolFormat(
        TaggedJson(
            ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
            ("<|action_end|>",),
            stray=("<|action_end|>",),
        ),
        '`<|action_start|><|plugin|>{"name", "parameters"}<|action_end|>`',
    ),
    "lfm2": ToolFormat(
        PythonCalls(("<|tool_call_start|>",), ("<|tool_call_end|>",), is_bare=False),
        '`<|tool_call_start|>[NAME(key="text", other=3), ...]<|tool_call_end|>`; also objects of JSON',
    ),
    "llama4_pythonic": ToolFormat(
        PythonCalls(("<|python_start|>",), ("<|python_end|>",)),
        "that of `pythonic`; between `<|python_start|>` and `<|python_end|>` of any tool, and also objects of JSON",
    ),
    "longcat": ToolFormat(
        TaggedJson(("<longcat_tool_call>",), ("</longcat_tool_call>",)),
        '`<longcat_tool_call>{"name", "arguments"}</longcat_tool_call>`',
        call_tag=partial(_hermes_tag, word="longcat_tool_call"),
    ),
    "mimo": ToolFormat(
        replace(_QWEN_XML, trims_line_break=False, implies_ends=False),
        "that of `qwen3_coder`, the text directly between the tags",
    ),
    "olmo3": ToolFormat(
        PythonCalls(("<function_calls>",), ("</function_calls>",), is_bare=False, has_brackets=False),
        '`<function_calls>NAME(key="text", other=3)</function_calls>`, each call on a line of its own',
    ),
    "seed_oss": ToolFormat(
        replace(_QWEN_XML, outer=("<seed:tool_call>",), closing=("</seed:tool_call>",)),
        "that of `qwen3_coder`, between `<seed:tool_call>` and `</seed:tool_call>`",
    ),
    "step3": ToolFormat(
        _STEP3,
        '`<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME"><steptml:parameter name="KEY">text'
        "</steptml:parameter></steptml:invoke><｜tool_call_end｜>` in `<｜tool_calls_begin｜>`, typed by the tool's schema",
    ),
    "step3p5": _QWEN3_CODER,
    "xlam": ToolFormat(
        BareJson(("[TOOL_CALLS]", "<tool_call>"), ("</tool_call>", "```"), fences=("```json", "```", "</think>")),
        "bare objects or arrays of calls of known tools, anywhere, also in a fence of code or behind `</think>`; behind "
        "`[TOOL_CALLS]` or `<tool_call>` of any tool",
    ),
}

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
        "qwen3_coder": _QWEN3_CODER,
        "qwen3": _QWEN3_CODER,
        "nemotron_nano": _QWEN3_CODER,
        "minimax_m2": _MINIMAX_M2,
        "minimax_m3": _MINIMAX_M3,
        "minimax-m3": _MINIMAX_M3,
        "minimax_m3_nom": _MINIMAX_M3_NOM,
        "minimax-m3-nom": _MINIMAX_M3_NOM,
        "glm47": _GLM,
        "glm45": _GLM,
        "gemma4": _GEMMA4,
        "gemma-4": _GEMMA4,
        "pythonic": _PYTHONIC,
        "deepseek_v3_2": _DSML_V32,
        "deepseek_v4": _DSML_V4,
        "deepseek-v4": _DSML_V4,
        "deepseekv4": _DSML_V4,
        "deepseek_v41": _DSML_V41,
        "harmony": _HARMONY,
        "inkling": _INKLING,
        "kimi_k3": _KIMI_K3,
        "kimi-k3": _KIMI_K3,
        "muse": _MUSE,
        "muse_glimmer": _MUSE,
        **_OF_ENGINES,
    }
)
"""Every tool-call parser by the names it goes by."""
