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

FORMAT_OF: Final = {"mistral_v11": "mistral", "mistral_v13": "mistral"}
"""Writers of a dialect, and the parser that reads it."""

NESTED: Final = {"tags": ["x", "y", []], "max": 2.5, "deep": {"a": {"b": [1, {"c": None}]}}, "on": True}


def cases(writer: Writer) -> list[dict[str, Any]]:
    """Return the generated cases of one format."""
    book: Call = ("book_table", {"restaurant": "Chez Léa", "seats": 4, "outdoor": True})
    find: Call = ("find", {"query": '2 < 3 & "so"', "filters": {"tags": ["x", "y"], "max": 2.5}})
    ping: Call = ("ping", {})
    nested: Call = ("find", {"query": "all", "filters": NESTED})
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
        case("the beginning of a mark", f"Say {writer.decoy}", f"Say {writer.decoy}"),
        case("the beginning of a mark, then text", f"Say {writer.decoy} now", f"Say {writer.decoy} now"),
        case("a mark and no call", f"{before}{writer.begin} no", f"{before}{writer.begin} no"),
        case("a mark at the end", f"{before}{writer.begin}", f"{before}{writer.begin}"),
        case("twice", f"{one}{writer.separator}{one}", "", book, book),
    ]
    unknown: Call = ("no_such", {"a": "b"})
    text = writer.calls([unknown])
    found.append(case("an unknown tool", text, *(("", unknown) if writer.any_tool else (text,))))
    cut = writer.calls([("find", {"query": "red shoes"})])
    cut = cut[: cut.index("red") + 5]
    found.append(case("cut in a value", f"{before}{cut}", f"{before}{cut}"))
    return found


def main() -> None:
    CORPUS.mkdir(parents=True, exist_ok=True)
    for name, writer in WRITERS.items():
        lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases(writer))
        (CORPUS / f"{name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def random_arguments(dice: random.Random) -> dict[str, Any]:
    """Return arguments of `run`, whose text is full of what formats are made of."""
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
    values = [dice.choice([text, 1, -2.5, True, None, {"a": text}, [text, []]]) for _ in range(dice.randrange(3))]
    return {"code": text, "values": values}


if __name__ == "__main__":
    main()
