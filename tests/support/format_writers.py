"""How each family of models writes a call: the grammars, written the other way round from what reads them.

`python tests/support/format_writers.py` writes the generated part of the corpus, `tests/unit/text/formats/corpus/*.json`.
Every case of it says what the text means; the cases that no writer makes are in `corpus/odd/`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

Call = tuple[str, dict[str, Any]]

CORPUS: Final = Path(__file__).parents[1] / "unit" / "text" / "formats" / "corpus"

TOOLS: Final[list[dict[str, Any]]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in (
        (
            "book_table",
            {"restaurant": {"type": "string"}, "seats": {"type": "integer"}, "outdoor": {"type": "boolean"}},
        ),
        ("find", {"query": {"type": "string"}, "filters": {"type": "object"}}),
        ("run", {"code": {"type": "string"}, "values": {"type": "array"}, "ratio": {"type": "number"}}),
        ("ping", {}),
    )
]


@dataclass(frozen=True)
class Writer:
    """How one format writes calls, and what it cannot say."""

    calls: Callable[[Sequence[Call]], str]
    begin: str  # of the first call, up to and with its mark
    closing: str = ""  # a mark that must be data inside a string
    text_before: str = "One moment. "
    text_behind: str = " Done."
    separator: str = "\n"
    decoy: str = ""  # looks like the beginning of a call
    can_follow: bool = True  # text may follow the calls
    letter: bool = True  # what is no call is content to the letter, marks too
    empty: bool = True  # arrays and objects may be empty
    any_tool: bool = True  # a call of an unknown tool is a call


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def spaced(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def objects(calls: Sequence[Call], *, arguments: str = "arguments", name: str = "name") -> list[str]:
    return [spaced({name: called, arguments: given}) for called, given in calls]


def each(before: str, behind: str, separator: str = "\n", **keys: str) -> Callable[[Sequence[Call]], str]:
    return lambda calls: separator.join(f"{before}{one}{behind}" for one in objects(calls, **keys))


def array(before: str, behind: str, **keys: str) -> Callable[[Sequence[Call]], str]:
    return lambda calls: f"{before}[{', '.join(objects(calls, **keys))}]{behind}"


def deepseek_v3(calls: Sequence[Call]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{spaced(given)}\n```<｜tool▁call▁end｜>"
        for name, given in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{spaced(given)}<｜tool▁call▁end｜>" for name, given in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def kimi_k2(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{compact(given)}<|tool_call_end|>"
        for number, (name, given) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def mistral(middle: str) -> Callable[[Sequence[Call]], str]:
    return lambda calls: "".join(f"[TOOL_CALLS]{name}{middle}{spaced(given)}" for name, given in calls)


WRITERS: Final[dict[str, Writer]] = {
    "hermes": Writer(each("<tool_call>\n", "\n</tool_call>"), "<tool_call>", "</tool_call>", decoy="<tool_call"),
    "nemotron_deci": Writer(array("<TOOLCALL>", "</TOOLCALL>"), "<TOOLCALL>", "</TOOLCALL>", decoy="<TOOLCAL"),
    "jamba": Writer(array("<tool_calls>", "</tool_calls>"), "<tool_calls>", "</tool_calls>", decoy="<tool_cal"),
    "phi4": Writer(array("functools", ""), "functools[", "]functools[", decoy="functools.lru_cache and functools"),
    "llama3_json": Writer(
        lambda calls: "<|python_tag|>" + "; ".join(objects(calls, arguments="parameters")),
        "<|python_tag|>",
        "<|python_tag|>",
        decoy="<|python",
    ),
    "default": Writer(array("", ""), "[", "]", decoy="[1] {x} ", any_tool=False),
    "mistral": Writer(array("[TOOL_CALLS]", ""), "[TOOL_CALLS]", "[/TOOL_CALLS]", decoy="see [1] and [TOOL"),
    "mistral_v11": Writer(mistral(""), "[TOOL_CALLS]", "[TOOL_CALLS]", separator="", decoy="see [TOOL_"),
    "mistral_v13": Writer(mistral("[ARGS]"), "[TOOL_CALLS]", "[ARGS]", separator="", decoy="see [TOOL_"),
    "deepseek_v3": Writer(deepseek_v3, "<｜tool▁calls▁begin｜>", "\n```<｜tool▁call▁end｜>", decoy="<｜tool▁calls"),
    "deepseek_v3_1": Writer(deepseek_v31, "<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>", decoy="<｜tool▁calls"),
    "kimi_k2": Writer(kimi_k2, "<|tool_calls_section_begin|>", "<|tool_call_end|>", decoy="<|tool_calls_sec"),
}


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else spaced(value)


def qwen_xml(outer: str, line: str) -> Callable[[Sequence[Call]], str]:
    def one(name: str, given: dict[str, Any]) -> str:
        inner = "".join(f"<parameter={key}>{line}{as_text(value)}{line}</parameter>\n" for key, value in given.items())
        return f"<{outer}>\n<function={name}>\n{inner}</function>\n</{outer}>"

    return lambda calls: "\n".join(one(*call) for call in calls)


def invokes(prefix: str, outer: str, *, says_string: bool = False) -> Callable[[Sequence[Call]], str]:
    def parameter(key: str, value: Any) -> str:
        said = f' string="{str(isinstance(value, str)).lower()}"' if says_string else ""
        return f'<{prefix}parameter name="{key}"{said}>{as_text(value)}</{prefix}parameter>\n'

    def one(name: str, given: dict[str, Any]) -> str:
        inner = "".join(parameter(key, value) for key, value in given.items())
        return f'<{prefix}invoke name="{name}">\n{inner}</{prefix}invoke>'

    return lambda calls: f"<{outer}>\n{chr(10).join(one(*call) for call in calls)}\n</{outer}>"


def glm(line: str, separator: str) -> Callable[[Sequence[Call]], str]:
    def one(name: str, given: dict[str, Any]) -> str:
        pairs = "".join(
            f"{line}<arg_key>{key}</arg_key>{line}<arg_value>{as_text(value)}</arg_value>"
            for key, value in given.items()
        )
        return f"<tool_call>{name}{pairs}{line}</tool_call>"

    return lambda calls: separator.join(one(*call) for call in calls)


def elements(prefix: str) -> Callable[[Sequence[Call]], str]:
    def element(key: str, value: Any) -> str:
        return f"{prefix}<{key}>{inside(value)}{prefix}</{key}>"

    def inside(value: Any) -> str:
        if isinstance(value, dict):
            return "".join(element(key, one) for key, one in value.items())
        if isinstance(value, list):
            return "".join(element("item", one) for one in value)
        return as_text(value)

    def one(name: str, given: dict[str, Any]) -> str:
        inner = "".join(element(key, value) for key, value in given.items())
        return f'{prefix}<invoke name="{name}">{inner}{prefix}</invoke>'

    return lambda calls: f"{prefix}<tool_call>\n{chr(10).join(one(*call) for call in calls)}\n{prefix}</tool_call>"


def gemma(calls: Sequence[Call]) -> str:
    def said(value: Any) -> str:
        if isinstance(value, str):
            return f'<|"|>{value}<|"|>'
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{said(one)}" for key, one in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(said, value)) + "]"
        return spaced(value)

    return "".join(f"<|tool_call>call:{name}{said(given)}<tool_call|>" for name, given in calls)


def python_calls(calls: Sequence[Call]) -> str:
    inner = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls)
    return f"[{', '.join(inner)}]"


def harmony(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{spaced(given)}<|call|>"
        for name, given in calls
    )


def inkling(calls: Sequence[Call]) -> str:
    inner = "<|message_model|>".join(
        f"<|content_invoke_tool_json|>{compact({'name': name, 'args': given})}<|end_message|>" for name, given in calls
    )
    return f"<|message_model|>{inner}<|content_model_end_sampling|>"


def kimi_k3(calls: Sequence[Call]) -> str:
    kinds = {str: "string", bool: "boolean", int: "number", float: "number", dict: "object", list: "array"}

    def one(number: int, name: str, given: dict[str, Any]) -> str:
        inner = "".join(
            f'<|open|>argument key="{key}" type="{kinds[type(value)]}"<|sep|>{as_text(value)}<|close|>argument<|sep|>'
            for key, value in given.items()
        )
        return f'<|open|>call tool="{name}" index="{number}"<|sep|>{inner}<|close|>call<|sep|>'

    inner = "".join(one(number, *call) for number, call in enumerate(calls))
    return f"<|open|>tools<|sep|>{inner}<|close|>tools<|sep|>"


def muse(calls: Sequence[Call]) -> str:
    write = invokes("atem:", "atem:function_calls")
    return "<|eom|>".join(f"<|start|>assistant to={call[0]}<|message|>{write([call])}" for call in calls) + "<|eot|>"


M3: Final = "]<]minimax[>["

WRITERS.update(
    {
        "qwen3_coder": Writer(
            qwen_xml("tool_call", "\n"), "<tool_call>", "</parameter> x </tool_call>", decoy="<tool_call"
        ),
        "minimax_m2": Writer(
            invokes("", "minimax:tool_call"), "<minimax:tool_call>", "</parameter> x", decoy="<minimax:tool"
        ),
        "glm47": Writer(glm("", ""), "<tool_call>", "</arg_value> x", decoy="<tool_call", separator=""),
        "glm45": Writer(glm("\n", "\n"), "<tool_call>", "</arg_value> x", decoy="<tool_call"),
        "minimax_m3": Writer(elements(M3), f"{M3}<tool_call>", "</code></invoke>", decoy="]<]minimax[", empty=False),
        "minimax_m3_nom": Writer(elements(""), "<tool_call>", "</invoke>", decoy="<tool_call", empty=False),
        "gemma4": Writer(gemma, "<|tool_call>", "<tool_call|>", decoy="<|tool_cal", separator=""),
        "pythonic": Writer(python_calls, "[", "]", decoy="[1] [see(1)] ", any_tool=False, text_before="One.\n"),
        "deepseek_v3_2": Writer(
            invokes("｜DSML｜", "｜DSML｜function_calls", says_string=True),
            "<｜DSML｜function_calls>",
            "</｜DSML｜parameter> x",
            decoy="<｜DSML",
        ),
        "deepseek_v4": Writer(
            invokes("｜DSML｜", "｜DSML｜tool_calls", says_string=True),
            "<｜DSML｜tool_calls>",
            "</｜DSML｜parameter> x",
            decoy="<｜DSML",
        ),
        "deepseek_v41": Writer(
            invokes("｜DSML｜ ", "｜DSML｜ calls", says_string=True),
            "<｜DSML｜ calls>",
            "</｜DSML｜ parameter> x",
            decoy="<｜DSML",
        ),
        "harmony": Writer(
            harmony, "<|channel|>commentary to=functions.ping<|message|>", "<|end|>", can_follow=False, letter=False
        ),
        "inkling": Writer(inkling, "<|content_invoke_tool_json|>", "<|end_message|>", can_follow=False, letter=False),
        "kimi_k3": Writer(kimi_k3, "<|open|>call", "<|close|>call<|sep|> x", can_follow=False, letter=False),
        "muse": Writer(
            muse, "<|start|>assistant to=ping<|message|>", "</atem:parameter> x", can_follow=False, letter=False
        ),
    }
)


def step3(calls: Sequence[Call]) -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        inner = "".join(
            f'<steptml:parameter name="{key}">{as_text(value)}</steptml:parameter>\n' for key, value in given.items()
        )
        invoke = f'<steptml:invoke name="{name}">\n{inner}</steptml:invoke>'
        return f"<｜tool_call_begin｜>function<｜tool_sep｜>{invoke}<｜tool_call_end｜>"

    return f"<｜tool_calls_begin｜>\n{chr(10).join(one(*call) for call in calls)}\n<｜tool_calls_end｜>"


def functiongemma(calls: Sequence[Call]) -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        inner = ",".join(f"{key}:<escape>{as_text(value)}<escape>" for key, value in given.items())
        return f"<start_function_call>call:{name}{{{inner}}}<end_function_call>"

    return "".join(one(*call) for call in calls)


def apertus(calls: Sequence[Call]) -> str:
    return f"<|tools_prefix|>{spaced([{name: given} for name, given in calls])}<|tools_suffix|>"


def cohere(calls: Sequence[Call]) -> str:
    listed = [
        {"tool_call_id": str(at), "tool_name": name, "parameters": given} for at, (name, given) in enumerate(calls)
    ]
    return f"<|START_ACTION|>{spaced(listed)}<|END_ACTION|>"


def python_lines(calls: Sequence[Call]) -> str:
    lines = "\n".join(python_calls([call])[1:-1] for call in calls)
    return f"<function_calls>\n{lines}\n</function_calls>"


def python_between(before: str, behind: str) -> Callable[[Sequence[Call]], str]:
    return lambda calls: f"{before}{python_calls(calls)}{behind}"


WRITERS.update(
    {
        "apertus": Writer(apertus, "<|tools_prefix|>", "<|tools_suffix|>", decoy="<|tools_"),
        "cohere_command3": Writer(cohere, "<|START_ACTION|>", "<|END_ACTION|>", decoy="<|START_ACT"),
        "dots": Writer(
            invokes("", "dots_function_call"), "<dots_function_call>", "</parameter> x", decoy="<dots_function"
        ),
        "ernie45": Writer(each("<tool_call>\n", "\n</tool_call>"), "<tool_call>", "</tool_call>", decoy="<tool_call"),
        "functiongemma": Writer(
            functiongemma, "<start_function_call>", "<end_function_call>", decoy="<start_function", separator=""
        ),
        "granite": Writer(array("<|tool_call|>", ""), "<|tool_call|>", "]<tool_call>", decoy="<|tool_cal"),
        "hunyuan_a13b": Writer(
            array("<tool_calls>", "</tool_calls>"), "<tool_calls>", "</tool_calls>", decoy="<tool_c"
        ),
        "internlm": Writer(
            each("<|action_start|><|plugin|>\n", "<|action_end|>", arguments="parameters"),
            "<|action_start|><|plugin|>",
            "<|action_end|>",
            decoy="<|action_start|><|plug",
        ),
        "lfm2": Writer(
            python_between("<|tool_call_start|>", "<|tool_call_end|>"),
            "<|tool_call_start|>",
            "]<|tool_call_end|>",
            decoy="<|tool_call_st",
        ),
        "llama4_pythonic": Writer(python_calls, "[", "]", decoy="[1] [see(1)] ", any_tool=False, text_before="One.\n"),
        "llama4_pythonic_marked": Writer(
            python_between("<|python_start|>", "<|python_end|>"),
            "<|python_start|>",
            "]<|python_end|>",
            decoy="<|python",
        ),
        "longcat": Writer(
            each("<longcat_tool_call>", "</longcat_tool_call>"),
            "<longcat_tool_call>",
            "</longcat_tool_call>",
            decoy="<longcat_tool",
        ),
        "mimo": Writer(qwen_xml("tool_call", ""), "<tool_call>", "</parameter> x", decoy="<tool_call"),
        "olmo3": Writer(python_lines, "<function_calls>", ")</function_calls>", decoy="<function_ca"),
        "seed_oss": Writer(qwen_xml("seed:tool_call", "\n"), "<seed:tool_call>", "</parameter> x", decoy="<seed:tool"),
        "step3": Writer(step3, "<｜tool_calls_begin｜>", "</steptml:parameter> x", decoy="<｜tool_calls"),
        "xlam": Writer(array("", ""), "[", "]", decoy="[1] {x} `` ", any_tool=False),
        "xlam_fenced": Writer(array("```json\n", "\n```"), "```json", "```", decoy="`` [1]", any_tool=False),
        "xlam_marked": Writer(array("[TOOL_CALLS]", ""), "[TOOL_CALLS]", "[TOOL_CALLS]", decoy="see [1] and [TOOL"),
    }
)

FORMAT_OF: Final = {
    "mistral_v11": "mistral",
    "mistral_v13": "mistral",
    "llama4_pythonic_marked": "llama4_pythonic",
    "xlam_fenced": "xlam",
    "xlam_marked": "xlam",
}
"""Writers of a dialect, and the parser that reads it."""

NESTED: Final = {"tags": ["x", "y", []], "max": 2.5, "deep": {"a": {"b": [1, {"c": None}]}}, "on": True}
FULL: Final = {"tags": ["x", "y", ["z"]], "max": 2.5, "deep": {"a": {"b": [1, {"c": False}]}}, "on": True}


def cases(writer: Writer) -> list[dict[str, Any]]:
    """Return the generated cases of one format."""
    book: Call = ("book_table", {"restaurant": "Chez Léa", "seats": 4, "outdoor": True})
    find: Call = ("find", {"query": '2 < 3 & "so"', "filters": {"tags": ["x", "y"], "max": 2.5}})
    ping: Call = ("ping", {})
    nested: Call = ("find", {"query": "all", "filters": NESTED if writer.empty else FULL})
    unicode: Call = ("find", {"query": "größe 👩‍🚀 你好 \u2028 ｜ ▁"})
    escapes: Call = ("run", {"code": "if a < b:\n\tprint(\"c:\\\\d\", 'e')  # {x} [y] </z>\n"})
    numbers: Call = ("run", {"values": [0, -3, 2.5, 12345678901234567890123], "ratio": -0.125})
    marks: Call = ("run", {"code": f"echo {writer.closing} and {writer.begin} x"})
    empty: Call = ("find", {"query": "", "filters": {}})
    before, behind = writer.text_before, writer.text_behind if writer.can_follow else ""

    def case(name: str, text: str, content: str, *calls: Call) -> dict[str, Any]:
        return {"name": name, "text": text, "content": content, "calls": [list(call) for call in calls]}

    one = writer.calls([book])
    found = [
        case("one call", one, "", book),
        case("text before", before + one, before, book),
        case("text around", f"{before}{one}{behind}", before + behind, book),
        case("line breaks around", f"\n{one}\n", "", book),
        case("two calls", writer.calls([find, ping]), "", find, ping),
        case("three calls", writer.calls([ping, book, ping]), "", ping, book, ping),
        case("no arguments", writer.calls([ping]), "", ping),
        case("nested", writer.calls([nested]), "", nested),
        case("unicode", f"Größe. {writer.calls([unicode])}", "Größe. ", unicode),
        case("escapes", writer.calls([escapes]), "", escapes),
        case("numbers", writer.calls([numbers]), "", numbers),
        case("marks in a string", writer.calls([marks]), "", marks),
        case("empty values", writer.calls([empty]), "", empty),
        case("prose", "No call at all: a < b, {x}, [y], `z`.\n", "No call at all: a < b, {x}, [y], `z`.\n"),
        case("twice", f"{one}{writer.separator}{one}", "", book, book),
    ]
    unknown: Call = ("no_such", {"a": "b"})
    text = writer.calls([unknown])
    found.append(case("an unknown tool", text, *(("", unknown) if writer.any_tool else (text,))))
    if not writer.letter:
        return found
    found += [
        case("the beginning of a mark", f"Say {writer.decoy}", f"Say {writer.decoy}"),
        case("the beginning of a mark, then text", f"Say {writer.decoy} now", f"Say {writer.decoy} now"),
        case("a mark and no call", f"{before}{writer.begin} no", f"{before}{writer.begin} no"),
        case("a mark at the end", f"{before}{writer.begin}", f"{before}{writer.begin}"),
    ]
    cut = writer.calls([("find", {"query": "red shoes"})])
    cut = cut[: cut.index("red") + 5]
    found.append(case("cut in a value", f"{before}{cut}", f"{before}{cut}"))
    return found


def main() -> None:
    CORPUS.mkdir(parents=True, exist_ok=True)
    for name, writer in WRITERS.items():
        lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases(writer))
        (CORPUS / f"{name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def random_arguments(dice: random.Random, *, empty: bool = True) -> dict[str, Any]:
    """Return arguments of `run`, whose text is full of what formats are made of. `empty`: some values are empty."""
    pieces = [
        "a",
        "é",
        "👩‍🚀",
        "\n",
        " ",
        '"',
        "'",
        "\\",
        "<",
        ">",
        "{",
        "}",
        "[",
        "]",
        "|",
        ",",
        ":",
        "=",
        "</",
        "1",
        "null",
    ]
    text = "".join(dice.choices(pieces, k=dice.randrange(12)))
    values = [
        dice.choice([text, 1, -2.5, True, None, {"a": text}, [text, [] if empty else [1]]])
        for _ in range(dice.randrange(3))
    ]
    return {"code": text, "values": values}


if __name__ == "__main__":
    main()
