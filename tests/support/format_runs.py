"""Running the parsers of output formats over the corpus, cut in every way."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from dynamo.text.formats import REASONING_FORMATS, TOOL_FORMATS, TextMachine, ToolSet
from dynamo.text.formats.tagged_answer import ReasoningTags, tagged_machine
from dynamo.text.output import CallArguments, CallBegan, CallDropped, CallEnded, Content, Joined, OutputEvent, joined
from support.demo_model import FILES
from support.format_writers import CORPUS, FORMAT_OF, TOOLS, WRITERS

TOOL_SET: Final = ToolSet(TOOLS)
NAMES: Final = tuple(WRITERS)


@cache
def corpus(name: str) -> list[dict[str, Any]]:
    odd = CORPUS / "odd" / f"{name}.json"
    found: list[dict[str, Any]] = json.loads((CORPUS / f"{name}.json").read_text(encoding="utf-8"))
    return found + (json.loads(odd.read_text(encoding="utf-8")) if odd.exists() else [])


def parser(name: str, tags: ReasoningTags | None = None) -> TextMachine:
    form = TOOL_FORMATS[FORMAT_OF.get(name, name)]
    return form.parser(TOOL_SET) if form.call_form is None else tagged_machine(form.call_form, TOOL_SET, tags)


def events_of(name: str, pieces: Iterable[str], tags: ReasoningTags | None = None) -> list[OutputEvent]:
    machine = parser(name, tags)
    events: list[OutputEvent] = []
    for piece in pieces:
        events += machine.push(piece)
    return events + machine.finish()


def run(name: str, pieces: Iterable[str], tags: ReasoningTags | None = None) -> Joined:
    return joined(events_of(name, pieces, tags))


def meaning(found: Joined) -> tuple[str, str, list[Any]]:
    calls = [[call.name, json.loads(call.arguments)] for call in found.calls]
    return found.content, found.reasoning, calls


def cuts_of(text: str, dice: random.Random) -> Iterator[list[str]]:
    """Yield ways of cutting a text: by character, by token, and at random places."""
    yield list(text)
    yield token_pieces(text)
    for _ in range(2):
        places = sorted(dice.sample(range(len(text) + 1), min(len(text), dice.randrange(1, 6))))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(Path(FILES) / "tokenizer.json"))


def token_pieces(text: str) -> list[str]:
    """Return the text as the demonstration model's tokens divide it."""
    offsets = tokenizer().encode(text, add_special_tokens=False).offsets
    places = sorted({0, len(text), *(end for _, end in offsets)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


def assert_is_consistent(name: str, text: str, pieces: list[str], tags: ReasoningTags | None = None) -> None:
    """Check what must hold of any text: it is all there, calls are JSON, and what was sent stays true."""
    events = events_of(name, pieces, tags)
    found = joined(events)
    for call in found.calls:
        assert call.is_complete, (name, text)
        assert isinstance(json.loads(call.arguments), dict), (name, text)
    began = [event for event in events if isinstance(event, CallBegan)]
    if not began:
        kept = found.content + found.reasoning
        seams = "\n" if name == "harmony" else ""  # between its messages
        assert all(char in text + seams for char in kept)
    is_open = False
    for event in events:
        if isinstance(event, CallBegan):
            assert not is_open
            is_open = True
        elif isinstance(event, CallEnded | CallDropped):
            assert is_open
            is_open = False
        elif isinstance(event, CallArguments):
            assert is_open
        elif isinstance(event, Content):
            assert not is_open
    assert found == run(name, [text], tags), (name, text, pieces, tags)


TAGS: Final = (
    None,
    *(REASONING_FORMATS["qwen3"].tags(begins_inside=inside) for inside in (False, True)),
    REASONING_FORMATS["mistral"].tags(),
    REASONING_FORMATS["hunyuan_a13b"].tags(),
)
"""Ways to read reasoning beside a format of calls."""


def fuzz(name: str, runs: int, seed: int = 0) -> None:
    """Put pieces of the corpus together at random: the result must be consistent and the same however it is cut."""
    dice = random.Random(f"fuzz {name} {seed}")
    texts = [case["text"] for case in corpus(name)]
    for _ in range(runs):
        parts = []
        tags = dice.choice(TAGS)
        marks = (*tags.openings, *tags.closings, *tags.frame) if tags is not None else ("",)
        for _ in range(dice.randrange(1, 5)):
            text = dice.choice(texts)
            start = dice.randrange(len(text) + 1)
            parts.append(text[start : start + dice.randrange(60)] if dice.random() < 0.8 else text)
            if dice.random() < 0.4:
                parts.append(dice.choice(marks))
        text = "".join(parts)
        places = sorted(dice.randrange(len(text) + 1) for _ in range(dice.randrange(4)))
        pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
        assert_is_consistent(name, text, pieces, tags)
