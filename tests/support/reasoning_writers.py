"""How families of models write reasoning, and the corpus of it: `tests/unit/text/formats/corpus/reasoning/*.json`.

`python tests/support/reasoning_writers.py` writes the corpus.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from support.format_writers import WRITERS

CORPUS: Final = Path(__file__).parents[1] / "unit" / "text" / "formats" / "corpus" / "reasoning"

TAGGED: Final = {
    "basic": ("<think>", "</think>"),
    "kimi": ("◁think▷", "◁/think▷"),
    "granite": ("Here is my thought process:", "Here is my response:"),
    "granite_s": ("Here's my thought process:", "Here's my response:"),
    "mistral": ("[THINK]", "[/THINK]"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "gemma4": ("<|channel>thought", "<channel|>"),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "ernie45": ("<think>", "</think>"),
    "hunyuan_a13b": ("<think>", "</think>"),
    "cohere_command3": ("<|START_THINKING|>", "<|END_THINKING|>"),
}
"""Tags by format; "granite_s" is granite's other spelling."""

FRAMES: Final = {
    "ernie45": ("<response>", "</response>"),
    "hunyuan_a13b": ("<answer>", "</answer>"),
    "cohere_command3": ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
}
"""What may stand around the text of the answer, by format."""

PING: Final = ["ping", {}]


def case(name: str, text: str, reasoning: str, content: str, *calls: Any, inside: bool = False) -> dict[str, Any]:
    found = {"name": name, "text": text, "reasoning": reasoning, "content": content, "calls": list(calls)}
    return {**found, "inside": True} if inside else found


def tagged(opening: str, closing: str) -> list[dict[str, Any]]:
    """Return the cases of reasoning between two tags."""
    pair = f"{opening}a{closing}"
    return [
        case("plain", "No tags at all.", "", "No tags at all."),
        case("a pair", f"{pair}b", "a", "b"),
        case("line breaks", f"{opening}\nTwo plus two.\n{closing}\n\nFour.", "Two plus two.", "Four."),
        case("text before", f"Well, {pair} so", "a", "Well,  so"),
        case("never closed", f"{opening}half a thou", "half a thou", ""),
        case("a lone closing tag", f"x{closing} y", "", "x y"),
        case("closed twice", f"{pair}b{closing}c", "a", "bc"),
        case("two spans", f"{pair}b{opening}c{closing}d", "ac", "bd"),
        case("nothing between", f"{opening}{closing}x", "", "x"),
        case("an opening tag inside", f"{opening}a {opening} b{closing}c", f"a {opening} b", "c"),
        case("the beginning of a tag", f"the tag is {opening[:-2]}", "", f"the tag is {opening[:-2]}"),
        case("the beginning of a tag, then text", f"{opening[:-2]}_ x", "", f"{opening[:-2]}_ x"),
        case("the beginning of a closing tag", f"{opening}a{closing[:-1]}", f"a{closing[:-1]}", ""),
        case("unicode", f"{opening}größe 👩‍🚀{closing}你好", "größe 👩‍🚀", "你好"),
        case("code", f"{opening}if a < b: [x]{closing}`<b>` {{x}}", "if a < b: [x]", "`<b>` {x}"),
        case("from the prompt", f"a{closing}b", "a", "b", inside=True),
        case("from the prompt and once more", f"\n{opening}\na\n{closing}\nb", "a", "b", inside=True),
        case("from the prompt, never closed", "no end", "no end", "", inside=True),
        case("from the prompt, closed at once", f"{closing}b", "", "b", inside=True),
    ]


def framed(opening: str, closing: str, before: str, behind: str) -> list[dict[str, Any]]:
    """Return the cases of text between two marks, which are none of it."""
    return [
        case("a frame", f"{opening}a{closing}\n\n{before}\nb\n{behind}\n", "a", "b"),
        case("a frame without line breaks", f"{opening}a{closing}{before}b{behind}", "a", "b"),
        case("a frame alone", f"{before}\nb\n\nc\n{behind}", "", "b\n\nc"),
        case("a frame around nothing", f"{before}\n{behind}\n", "", ""),
        case("a frame that does not end", f"{before}b\n", "", "b\n"),
        case("text around a frame", f"x {before}b{behind} y", "", "x b y"),
        case("line breaks in front of no frame", f"a\n\n{behind[:-1]}_", "", f"a\n\n{behind[:-1]}_"),
        case("a frame in reasoning", f"{opening}a {before} b{closing}c", f"a {before} b", "c"),
        case("a frame behind reasoning", f"b\n{opening}a{closing}{before}c{behind}", "a", "b\nc"),
        case("from the prompt, framed", f"a\n{closing}\n\n{before}\nb\n{behind}\n", "a", "b", inside=True),
    ]


def spans(think: str, say: str, end: str, call: str, between: str = "", seam: str = "") -> list[dict[str, Any]]:
    """Return the cases of a format whose whole answer is divided. `think` and `say` begin a block, `end` ends it.

    `seam`: what parts two blocks of one kind.
    """
    a, b = f"{think}a{end}", f"{say}b{end}"
    return [
        case("plain", "No marks at all.", "", "No marks at all."),
        case("reasoning", a, "a", ""),
        case("content", b, "", "b"),
        case("both", f"{a}{between}{b}", "a", "b"),
        case("twice", f"{a}{between}{b}{between}{a}{between}{b}", f"a{seam}a", f"b{seam}b"),
        case("reasoning cut", f"{think}half a thou", "half a thou", ""),
        case("content cut", f"{a}{between}{say}half an ans", "a", "half an ans"),
        case("a mark cut", f"{say}b{end[:-1]}", "", f"b{end[:-1]}"),
        case("the beginning of a mark in text", f"{say}b{end[:-2]} c{end}", "", f"b{end[:-2]} c"),
        case("a call behind reasoning", f"{a}{between}{call}", "a", "", PING),
        case("a call behind content", f"{b}{between}{call}", "", "b", PING),
        case("a call alone", call, "", "", PING),
        case("unicode", f"{think}größe 👩‍🚀{end}{between}{say}你好{end}", "größe 👩‍🚀", "你好"),
        case("nothing in a block", f"{think}{end}{between}{say}b{end}", "", "b"),
        case("code", f"{say}if a < b: `[x]` {{y}}{end}", "", "if a < b: `[x]` {y}"),
        case("line breaks stay", f"{think}a\nb{end}{between}{say}c\n\nd\n{end}", "a\nb", "c\n\nd\n"),
    ]


def unified() -> dict[str, list[dict[str, Any]]]:
    """Return the cases of the formats that one parser reads."""
    call = {name: WRITERS[name].calls([("ping", {})]) for name in ("harmony", "inkling", "kimi_k3", "muse")}
    assistant = "<|start|>assistant"
    return {
        "gpt_oss": [
            *spans(
                "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|>", call["harmony"], assistant, "\n"
            ),
            case("a preamble", "<|channel|>commentary<|message|>I will look.<|end|>", "", "I will look."),
            case("a preamble and an answer", f"<|channel|>commentary<|message|>I will look.<|end|>{assistant}<|channel|>final<|message|>b<|return|>", "", "I will look.\nb"),
            case("two messages and an empty one", f"<|channel|>final<|message|>b<|end|>{assistant}<|channel|>final<|message|><|end|>{assistant}<|channel|>final<|message|>c<|return|>", "", "b\nc"),
            case("thoughts from the prompt, and more", f"a<|end|>{assistant}<|channel|>analysis<|message|>b<|end|>", "a\nb", "", inside=True),
            case("returned", "<|channel|>final<|message|>b<|return|>", "", "b"),
            case("the recipient first", " to=functions.ping<|channel|>commentary<|message|>{}<|call|>", "", "", PING),
            case("no channel", f"{assistant}<|message|>b<|end|>", "", "b"),
            case("an odd header", "<|channel|>final x y<|constrain|>z<|message|>b<|end|>", "", "b"),
            case("no message", "<|channel|>final It is 4.<|end|>", "", " It is 4."),
            case("no message, cut off", "<|channel|>analysis<|message|>a<|end|><|start|>assistant Yes: <b>", "a", " Yes: <b>"),
            case("a header cut off", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>fin", "a", ""),
            case("a header too long", f"<|channel|>final{' word' * 300}<|message|>b<|end|>", "", f"{' word' * 300}b"),
            case("two channels", "<|channel|>final<|channel|>analysis<|message|>a<|end|>", "a", ""),
            case("a bare name", "<|channel|>commentary to=ping<|message|>{}<|call|>", "", "", PING),
            case("no arguments", "<|channel|>commentary to=functions.ping<|message|><|call|>", "", "", PING),
            case("a built-in tool", "<|channel|>analysis to=python<|message|>1 + 1<|call|>", "", ""),
            case("no end", "<|channel|>commentary to=functions.ping<|message|>{}", "", "", PING),
        ],
        "inkling": [
            *spans(
                "<|content_thinking|>", "<|content_text|>", "<|end_message|>", call["inkling"], "<|message_model|>"
            ),
            case("ended", "<|content_text|>b<|end_message|><|content_model_end_sampling|>", "", "b"),
            case("a name", "<|message_model|>x<|content_text|>b<|end_message|>", "", "b"),
        ],
        "kimi_k3": [
            case("plain", "b", "", "b"),
            case("from the prompt", "a<|close|>think<|sep|>b", "a", "b", inside=True),
            case("ended", "<|open|>response<|sep|>b<|end_of_msg|>", "", "b"),
            case("an unknown channel", "<|open|>note<|sep|>b<|close|>note<|sep|>", "", "b"),
            case("no tag", "see <|open|> there", "", "see <|open|> there"),
            *[
                {**one, "text": text}
                for one in spans("{T}", "{R}", "{E}", call["kimi_k3"])
                if "mark" not in one["name"] and (text := xtml(one["text"])) is not None
            ],
        ],
        "muse": [
            *spans(
                f"{assistant} to=self<|message|>",
                f"{assistant} to=user<|message|>",
                "<|eom|>",
                call["muse"],
            ),
            case("the header in the prompt", " to=self<|message|>a<|eom|><|start|>assistant to=user<|message|>b<|eot|>", "a", "b"),
            case("commentary", f"{assistant} to=commentary<|message|>b<|eot|>", "", "b"),
            case("a call to the user", f"{assistant} to=user<|message|><atem:invoke name=\"ping\">", "", "<atem:invoke name=\"ping\">"),
        ],
    }  # fmt: skip


def xtml(text: str) -> str:
    """Return a text whose blocks are elements."""
    parts, kind = [], ""
    for part in text.replace("{T}", "\0T\0").replace("{R}", "\0R\0").replace("{E}", "\0E\0").split("\0"):
        if part in ("T", "R"):
            kind = "think" if part == "T" else "response"
            parts.append(f"<|open|>{kind}<|sep|>")
        elif part == "E":
            parts.append(f"<|close|>{kind}<|sep|>")
        else:
            parts.append(part)
    return "".join(parts)


def corpus() -> dict[str, list[dict[str, Any]]]:
    """Return the cases of every format."""
    return {
        name: tagged(*tags) + (framed(*tags, *FRAMES[name]) if name in FRAMES else []) for name, tags in TAGGED.items()
    } | unified()


if __name__ == "__main__":
    CORPUS.mkdir(parents=True, exist_ok=True)
    for name, cases in corpus().items():
        lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in cases)
        (CORPUS / f"{name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
