"""The tokenizer of the demonstration model: bytes, and whole words where the lessons use them often.

It is a byte-level BPE without merges: a piece of text (a word with the space before it, one digit, a run of
punctuation) is one token if the vocabulary has it and its bytes if not. So the words of questions are short, and a
word in quotes, which somebody may want spelled, stays a row of letters.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from demo_model.lessons.words import WORDS

__all__ = ["END_OF_TEXT", "END_OF_TURN", "build_tokenizer", "write_tokenizer"]

END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL: Final = (END_OF_TEXT, START_OF_TURN, END_OF_TURN)
MARKS: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tools>", "</tools>")  # text, but one token each
SCHEMA: Final = (  # what every tool's schema holds, as `tojson` writes it: prompts with tools are half as long
    '{"type": "function", "function": {"name": "',
    '", "description": "',
    '", "parameters": {"type": "object", "properties": {"',
    '": {"type": "',
    '"}, "required": ["',
)
PIECES: Final = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s"


def build_tokenizer(texts: Iterable[str], *, size: int) -> Tokenizer:
    """Train a tokenizer of at most `size` tokens: every byte, the marks, and the pieces that occur most often."""
    pieces = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    counts = Counter(
        piece for text in texts for part in _between_marks(text) for piece, _ in pieces.pre_tokenize_str(part)
    )
    for bare in WORDS:  # as it stands in quotes
        counts.pop(bare, None)
    room = size - len(SPECIAL) - len(MARKS) - len(SCHEMA) - len(alphabet)
    ranked = sorted((piece for piece in counts if len(piece) > 1), key=lambda piece: (-counts[piece], piece))
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *MARKS, *SCHEMA, *alphabet, *ranked[:room]))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pieces
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in (*MARKS, *SCHEMA)])
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, directory: Path, *, context_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`; the chat template has a file of its own beside them."""
    directory.joinpath("tokenizer.json").write_text(tokenizer.to_str(pretty=False) + "\n", encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
    }
    directory.joinpath("tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _between_marks(text: str) -> list[str]:
    for mark in (*SPECIAL, *MARKS, *SCHEMA):
        text = text.replace(mark, "\0")
    return [part for part in text.split("\0") if part]
