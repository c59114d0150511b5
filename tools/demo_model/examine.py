"""`PYTHONPATH=tools python -m demo_model.examine`: what the model gets right of what it was never trained on.

The answers are those of the NumPy engine that serves it, greedy. An answer counts when it is right as a whole: the
same text, the same JSON value, the same call; with thinking, what stands behind the thoughts.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from tokenizers import Tokenizer

from demo_model.conversations import KINDS, Answer, Conversation, conversation
from demo_model.conversations.picture_chats import PICTURE_KINDS
from demo_model.lessons.pictures import Picture
from dynamo.reference.core import Core, Failure
from dynamo.reference.demo import DIRECTORY
from dynamo.reference.demo.draw import encode_png
from dynamo.reference.loading import Options, load_core
from dynamo.reference.media import NO_MEDIA, MediaPrompt
from dynamo.reference.picture_codes import FILE, Vision
from dynamo.reference.request import read_request
from dynamo.text.templates import ChatTemplate

__all__ = ["Result", "answers_of", "examine", "is_right", "questions", "table"]

SEED: Final = "final examination"
MAX_ANSWER_TOKENS: Final = 160
EXAMINED: Final = (
    *(kind for kind in KINDS if kind not in ("exercises", "drills", "counts", "judgements", "yes or no", "unsaid")),
    *PICTURE_KINDS,
)  # nobody asks as the others do
MARK_BEGIN, MARK_END = "<!-- examined -->", "<!-- end -->"


@dataclass(frozen=True, slots=True)
class Result:
    """How one kind of question went."""

    kind: str
    right: int
    asked: int
    wrong: tuple[tuple[str, str, str], ...]  # (prompt, wanted, got), to look at

    @property
    def share(self) -> float:
        return self.right / self.asked


def examine(directory: Path, *, count: int, kinds: Iterable[str] = EXAMINED, seed: str = SEED) -> list[Result]:
    """Ask `count` held-out questions of every kind."""
    found = []
    for kind in kinds:
        if kind in PICTURE_KINDS and not (directory / FILE).exists():
            continue  # it sees nothing
        asked = questions(kind, count, seed)
        given = answers_of(directory, [(c.messages[: a.at], c.variables, c.pictures) for c, a in asked])
        wrong = tuple(
            (_shown(c, a), a.text, got) for (c, a), got in zip(asked, given, strict=True) if not is_right(a, got)
        )
        found.append(Result(kind, count - len(wrong), count, wrong))
    return found


def questions(kind: str, count: int, seed: str = SEED) -> list[tuple[Conversation, Answer]]:
    """Return the held-out conversations of one kind, each with its last answer; the same conversations at every call.

    Answers that guided decoding would begin are left out: the examination does not use guided decoding.
    """
    rng = Random(f"{seed}:{kind}")
    found: dict[str, tuple[Conversation, Answer]] = {}
    while len(found) < count:
        is_seen = kind in PICTURE_KINDS
        made = PICTURE_KINDS[kind](rng, True) if is_seen else conversation(rng, held_out=True, kind=kind)
        if not made.answers[-1].given:
            found.setdefault(
                str((made.messages, *made.keys)) if is_seen else str(made.messages), (made, made.answers[-1])
            )
    return list(found.values())


def _shown(asked: Conversation, answer: Answer) -> str:
    """Return the last question, and what its picture shows."""
    content = asked.messages[answer.at - 1]["content"]
    if not asked.pictures:
        return str(content)
    text = next(part["text"] for part in content if part["type"] == "text")
    return f"{text} [{asked.pictures[0].described}: {asked.pictures[0].drawing}]"


def answers_of(directory: Path, asked: Sequence[tuple[Any, ...]]) -> list[str]:
    """Return the model's answer to each (messages, template variables), or with the pictures of these messages behind."""
    template = ChatTemplate((directory / "chat_template.jinja").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    prompts = [template.render(messages, variables=variables) for messages, variables, *_ in asked]
    core = load_core(directory, Options(max_num_seqs=32, kv_cache_mb=64))
    tokens = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
    media = [_seen(core.limits.vision, *pictures) for _, _, *pictures in asked]
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in _generate(core, tokens, media)]


def _seen(vision: Vision | None, pictures: Sequence[Picture] = ()) -> MediaPrompt:
    """Return what stands for the pictures in the prompt, read from PNG as the engine would."""
    if vision is None or not pictures:
        return NO_MEDIA
    return MediaPrompt(tuple(token for each in pictures for token in vision.tokens(encode_png(each.pixels()))))


def is_right(answer: Answer, got: str) -> bool:
    """Return whether `got` is the answer, compared in the way of its form."""
    match answer.form:
        case "text":
            return got == answer.text
        case "json":
            return bool(_json(got) == _json(answer.text))
        case "thinking":
            thought, closed, rest = got.partition("</think>\n\n")
            return thought.startswith("<think>\n") and bool(closed) and rest == answer.text.partition("</think>\n\n")[2]
        case "call":
            has_thought = ("<think>" in got) == ("<think>" in answer.text)
            return has_thought and _call(got) is not None and bool(_call(got) == _call(answer.text))


def table(results: Iterable[Result]) -> str:
    """Format the results as a Markdown table."""
    rows = [f"| {r.kind} | {r.share:.1%} | {r.right} of {r.asked} |" for r in results]
    return "\n".join(("| Kind of question | Right | Answers |", "|---|---|---|", *rows))


def _generate(core: Core, prompts: Sequence[list[int]], media: Sequence[MediaPrompt]) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in prompts]
    places = {}
    for number, tokens in enumerate(prompts):
        request = {
            "token_ids": tokens,
            "sampling_options": {"temperature": 0.0},
            "stop_conditions": {"max_tokens": MAX_ANSWER_TOKENS},
        }
        places[core.add(read_request(request, core.limits, media=media[number]))[0]] = number
    while not core.is_idle:
        for emission in core.step():
            if isinstance(emission, Failure):
                raise emission.error
            if emission.shown:
                answers[places[emission.choice]].append(emission.drawn.token)
    return answers


def _json(text: str) -> Any:
    """Return the value, or an object equal to nothing."""
    try:
        return json.loads(text)
    except ValueError:
        return object()


def _call(text: str) -> Any:
    found = re.fullmatch(r"(?:<think>\n.*\n</think>\n\n)?<tool_call>\n(.*)\n</tool_call>", text, re.DOTALL)
    return None if found is None else _json(found[1])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m demo_model.examine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, default=DIRECTORY, metavar="DIR", help="whom to examine (default: the shipped model)")
    add("--count", type=int, default=200, metavar="N", help="questions of each kind (default: 200)")
    add("--wrong", type=int, default=0, metavar="N", help="print so many wrong answers of each kind (default: 0)")
    add(
        "--seed",
        default=SEED,
        help="of the questions; those of the table are not for choosing by (default: the table's)",
    )
    add("--into", type=Path, metavar="FILE", help="put the table into this page, between its two marks")
    options = parser.parse_args(argv)
    results = examine(options.model, count=options.count, kinds=EXAMINED, seed=options.seed)
    print(table(results))
    for result in results:
        for prompt, wanted, got in result.wrong[: options.wrong]:
            print(f"\n{result.kind}: {prompt!r}\n  wanted {wanted!r}\n  got    {got!r}")
    if options.into is not None:
        page = options.into.read_text(encoding="utf-8")
        before, rest = page.split(MARK_BEGIN)
        options.into.write_text(
            f"{before}{MARK_BEGIN}\n{table(results)}\n{MARK_END}{rest.split(MARK_END)[1]}", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
