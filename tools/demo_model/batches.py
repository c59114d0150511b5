"""From conversations to rows of token ids, with a mask of what is to be learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

from tokenizers import Tokenizer

from demo_model.conversations import Conversation, example
from demo_model.vocabulary import END_OF_TURN
from dynamo.text.templates import ChatTemplate

__all__ = ["Row", "batches", "load_template", "rows"]

Row = tuple[list[int], list[bool]]  # token ids; whether each is to be predicted

POOL: Final = 3000  # conversations sorted by length together, so that a batch is padded little
MAX_TOKENS: Final = 640  # the few longer ones are left out


def load_template(directory: Path) -> ChatTemplate:
    return ChatTemplate((directory / "chat_template.jinja").read_text(encoding="utf-8"))


def rows(conversations: Sequence[Conversation], template: ChatTemplate, tokenizer: Tokenizer) -> list[Row]:
    """Return one row per conversation: the text before an answer is context, the answer and its end of turn are learned."""
    parts: list[tuple[int, str, Any]] = []  # (conversation, text, answer or None)
    for number, each in enumerate(conversations):
        shown = 0
        for answer in each.answers:
            prompt = template.render(each.messages[: answer.at], variables=each.variables)
            parts.append((number, prompt[shown:], None))
            parts.append((number, answer.text + END_OF_TURN, answer))
            shown = len(prompt) + len(answer.text) + len(END_OF_TURN)
    encodings = tokenizer.encode_batch([text for _, text, _ in parts], add_special_tokens=False)
    found: list[Row] = [([], []) for _ in conversations]
    for (number, _, answer), encoding in zip(parts, encodings, strict=True):
        tokens, learned = found[number]
        tokens += encoding.ids
        if answer is None:
            learned += [False] * len(encoding.ids)
        else:
            learned += [
                not any(low <= start and end <= high for low, high in answer.given) for start, end in encoding.offsets
            ]
    return found


def batches(
    seed: int, first_pool: int, template: ChatTemplate, tokenizer: Tokenizer, *, batch_tokens: int
) -> Iterator[tuple[int, list[Row]]]:
    """Yield (pool, rows) without end: rows of like length, about `batch_tokens` with their padding."""
    pool = first_pool
    while True:
        made = rows([example(seed, pool * POOL + n) for n in range(POOL)], template, tokenizer)
        made = sorted((row for row in made if len(row[0]) <= MAX_TOKENS), key=lambda row: len(row[0]))
        cut: list[list[Row]] = [[]]
        for row in made:
            if (len(cut[-1]) + 1) * len(row[0]) > batch_tokens:
                cut.append([])
            cut[-1].append(row)
        Random(f"{seed}:pool:{pool}").shuffle(cut)
        for batch in cut:
            yield pool, batch
        pool += 1
