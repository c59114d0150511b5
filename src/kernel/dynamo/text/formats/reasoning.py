"""How families of models write reasoning: the table of formats, and the names under which a model card requests them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from dynamo.text.formats.channels import Harmony, Inkling, KimiK3
from dynamo.text.formats.tagged_answer import ReasoningTags
from dynamo.text.formats.tools import COHERE_FRAME, MUSE, UnifiedForm
from dynamo.text.markers import WHITE_SPACE

OPENING: Final = "<think>"
CLOSING: Final = "</think>"

DEFAULT_MARKS: Final = (OPENING, CLOSING)
"""The tags of a model whose card names no reasoning parser, if its vocabulary has them."""


class ReasoningFormat(Struct, frozen=True):
    """How a family of models reasons, and when it does not reason at all."""

    description: str = "between `<think>` and `</think>`"  # a line of the documentation
    starts_inside: bool = False  # the first token is reasoning, with or without an opening tag
    needs_thinking: bool = False  # nothing is parsed unless the request switches thinking on
    heeds_off: bool = False  # nothing is parsed when the request switches thinking off
    marks: tuple[str, str] = (OPENING, CLOSING)  # must stand in the text, also where they are special tokens
    other_openings: tuple[str, ...] = ()
    special_tokens: tuple[str, ...] = ()  # that a mark begins with
    other_closings: tuple[str, ...] = ()
    unified: UnifiedForm | None = None  # reasoning, text and calls are blocks of one format; one parser reads them all
    prepends: bool = False  # nothing is divided, the opening tag is put in front
    frame: tuple[str, ...] = ()  # marks around the text of the answer

    def applies(self, thinking: bool | None) -> bool:
        """Return whether to parse. `thinking` is the mode of the request or the model's default; None: unset."""
        if self.needs_thinking:
            return thinking is True
        return not (self.heeds_off and thinking is False)

    def begins_inside(self, prompt: str) -> bool:
        """Return whether the answer begins as reasoning behind this prompt (its last characters are enough)."""
        return self.starts_inside or prompt.rstrip(WHITE_SPACE).endswith((self.marks[0], *self.other_openings))

    def tags(self, *, begins_inside: bool = False, json_is_content: bool = False) -> ReasoningTags:
        """Return the tags of one answer, in a format that is not unified.

        `json_is_content`: the answer is guided JSON, so text that begins with `{` or `[` is no reasoning. That is for
        engines that guide the output from its first token on although the model would reason first.
        """
        if self.prepends:
            return ReasoningTags(prepended=OPENING)
        openings, closings = (self.marks[0], *self.other_openings), (self.marks[1], *self.other_closings)
        return ReasoningTags(openings, closings, begins_inside, json_is_content, frame=self.frame)

    @property
    def tokens(self) -> tuple[str, ...]:
        """Return the marks that must reach the parser, also where they are special tokens."""
        if self.unified is not None:
            return self.unified.marks
        return (*self.marks, *self.other_openings, *self.other_closings, *self.special_tokens)


_OFF: Final = "; nothing is parsed when the request switches thinking off"
_ON: Final = "; nothing is parsed unless the request (or `--dyn-default-thinking-mode`) switches thinking on"
_BEGINS: Final = "the answer begins as reasoning, up to `</think>`; the opening tag may be missing"

_BASIC: Final = ReasoningFormat()
_INSIDE: Final = ReasoningFormat(_BEGINS, starts_inside=True)
_INSIDE_UNLESS_OFF: Final = ReasoningFormat(_BEGINS + _OFF, starts_inside=True, heeds_off=True)
_WHEN_THINKING: Final = ReasoningFormat(_BEGINS + _ON, starts_inside=True, needs_thinking=True)
_BASIC_UNLESS_OFF: Final = ReasoningFormat("between `<think>` and `</think>`" + _OFF, heeds_off=True)
_KIMI: Final = ReasoningFormat("between `◁think▷` and `◁/think▷`", marks=("◁think▷", "◁/think▷"))
_GRANITE: Final = ReasoningFormat(
    "between `Here is my thought process:` and `Here is my response:` (or `Here's`)",
    marks=("Here is my thought process:", "Here is my response:"),
    other_openings=("Here's my thought process:",),
    other_closings=("Here's my response:",),
)
_MISTRAL: Final = ReasoningFormat(
    "between `[THINK]` and `[/THINK]`" + _ON, needs_thinking=True, marks=("[THINK]", "[/THINK]")
)
_MINIMAX_M3: Final = ReasoningFormat(
    "between `<mm:think>` and `</mm:think>`" + _OFF, heeds_off=True, marks=("<mm:think>", "</mm:think>")
)
_GEMMA4: Final = ReasoningFormat(
    "between `<|channel>thought` and `<channel|>` (`thought` may be missing)" + _ON,
    needs_thinking=True,
    marks=("<|channel>thought", "<channel|>"),
    other_openings=("<|channel>\n",),
    special_tokens=("<|channel>",),
)
_APPEND: Final = ReasoningFormat("`<think>` is put in front of the content, and nothing is divided", prepends=True)
_GPT_OSS: Final = ReasoningFormat(
    "messages of the channel `analysis`; the tool-call format `harmony` is the same",
    marks=("<|channel|>analysis<|message|>", "<|end|>"),
    unified=Harmony(),
)
_KIMI_K3: Final = ReasoningFormat(
    "`<|open|>think<|sep|>` ... `<|close|>think<|sep|>`; the tool-call format `kimi_k3` is the same",
    marks=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    unified=KimiK3(),
)
_INKLING: Final = ReasoningFormat(
    "blocks that begin with `<|content_thinking|>`; the tool-call format `inkling` is the same",
    marks=("<|content_thinking|>", "<|end_message|>"),
    unified=Inkling(),
)
_MUSE: Final = ReasoningFormat(
    "messages to `self`; the tool-call format `muse` is the same", marks=("to=self<|message|>", "<|eom|>"), unified=MUSE
)

# Formats that engines read themselves, under the names that they have there.
_FRAMED: Final = "; the text may stand between `<{0}>` and `</{0}>`"
_OF_ENGINES: Final = {
    "apertus": ReasoningFormat(
        "between `<|inner_prefix|>` and `<|inner_suffix|>`", marks=("<|inner_prefix|>", "<|inner_suffix|>")
    ),
    "cohere_command3": ReasoningFormat(
        "between `<|START_THINKING|>` and `<|END_THINKING|>`; the text may stand between `<|START_RESPONSE|>` and "
        "`<|END_RESPONSE|>`",
        marks=("<|START_THINKING|>", "<|END_THINKING|>"),
        frame=COHERE_FRAME,
    ),
    "ernie45": ReasoningFormat(
        _BEGINS + _FRAMED.format("response"), starts_inside=True, frame=("<response>", "</response>")
    ),
    "hunyuan_a13b": ReasoningFormat(_BASIC.description + _FRAMED.format("answer"), frame=("<answer>", "</answer>")),
    "mimo": _BASIC,
    "olmo3": _INSIDE,
    "seed_oss": ReasoningFormat("between `<seed:think>` and `</seed:think>`", marks=("<seed:think>", "</seed:think>")),
    "step3p5": _INSIDE,
}

REASONING_FORMATS: Final[Mapping[str, ReasoningFormat]] = MappingProxyType(
    {
        "basic": _BASIC,
        "qwen3": _BASIC,
        "qwen3_coder": _BASIC,
        "glm45": _BASIC,
        "glm47": _BASIC,
        "nemotron_deci": _BASIC,
        "kimi_k2": _BASIC,
        "deepseek_v4": _BASIC_UNLESS_OFF,
        "deepseek-v4": _BASIC_UNLESS_OFF,
        "deepseekv4": _BASIC_UNLESS_OFF,
        "deepseek_v41": _BASIC_UNLESS_OFF,
        "deepseek_r1": _INSIDE,
        "step3": _INSIDE,
        "minimax_m2": _INSIDE,
        "deepseek_v3_2": _INSIDE_UNLESS_OFF,
        "nemotron_nano": _INSIDE_UNLESS_OFF,
        "nemotron3": _INSIDE_UNLESS_OFF,
        "nemotron_v3": _INSIDE_UNLESS_OFF,
        "kimi_k25": _INSIDE_UNLESS_OFF,
        "deepseek_v3": _WHEN_THINKING,
        "deepseek_v3_1": _WHEN_THINKING,
        "kimi": _KIMI,
        "granite": _GRANITE,
        "mistral": _MISTRAL,
        "minimax_m3": _MINIMAX_M3,
        "minimax-m3": _MINIMAX_M3,
        "gemma4": _GEMMA4,
        "gemma-4": _GEMMA4,
        "minimax_append_think": _APPEND,
        "gpt_oss": _GPT_OSS,
        "kimi_k3": _KIMI_K3,
        "kimi-k3": _KIMI_K3,
        "inkling": _INKLING,
        "muse": _MUSE,
        "muse_glimmer": _MUSE,
        **_OF_ENGINES,
    }
)
"""Every reasoning parser by the names it goes by."""
