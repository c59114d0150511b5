"""Small real tokenizers of every family, trained here: nothing is downloaded."""

from __future__ import annotations

import functools
import importlib.util
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _SUFFIX + "|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _SUFFIX + "|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIALS = ["<|begin|>", "<|end|>", "<|user|>", "<｜User｜>"]

WORDS = [
    "the",
    "quick",
    "brown",
    "fox's",
    "don't",
    "WE'LL",
    "it's",
    "12345",
    "3.14",
    "naïve",
    "café",
    "Größe",
    "привет",
    "мир",
    "こんにちは世界",
    "你好世界",
    "안녕",
    "👩\u200d🚀",
    "🎉",
    "def",
    "f(x):",
    "{'a':",
    "[1,",
    "2]}",
    "//",
    "/path/to",
    "x=y;",
    "--",
    "...",
    "!?",
    "“quoted”",
    "é",
    "하",
    "tokens",
    "streaming",
    "worker",
    "answer",
]


SEPARATORS = [
    " ",
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    " \n",
    "\n ",
    "\n  ",
    "\r\n",
    "\t",
    "，",
    "。",
    "/",
    "'s ",
    ".",
    "(",
    "\u3000",
]


def corpus() -> list[str]:
    """Prose, and lines where anything stands beside anything: a tokenizer learns merges across every kind of border."""
    rng = random.Random(7)
    prose = [" ".join(rng.choices(WORDS, k=40)) + rng.choice([".\n", "\n\n", "，你好。\n", "  \n"]) for _ in range(80)]
    mixed = ["".join(rng.choice(WORDS) + rng.choice(SEPARATORS) for _ in range(60)) for _ in range(60)]
    return prose + mixed


def _byte_level(split: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("plainé", normalized=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
    )
    return tokenizer


def _split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _sentencepiece_bpe(*, legacy: bool, strip: bool = True) -> Tokenizer:
    """Llama 2 in either of the two ways its tokenizer.json is written."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator([line.replace("👩‍🚀", "").replace("界", "") for line in corpus()], trainer)
    state = json.loads(tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    state["model"]["byte_fallback"] = True
    state["model"]["fuse_unk"] = True
    if not strip:  # Gemma: spaces are only replaced, and the pre-tokenizer finds none to split at
        state["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        state["pre_tokenizer"] = {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        }
    elif legacy:
        state["pre_tokenizer"] = None
        state["normalizer"] = {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        }
    else:
        state["pre_tokenizer"]["split"] = False
    state["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if strip else []),
        ],
    }
    return Tokenizer.from_str(json.dumps(state))


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def _wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]", "[CLS]"], show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def _suffix_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def _word_level() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


BUILDERS: dict[str, Callable[[], Tokenizer]] = {
    "llama3": lambda: _byte_level(_split(LLAMA3)),
    "qwen": lambda: _byte_level(_split(QWEN), normalizers.NFC()),
    "o200k": lambda: _byte_level(_split(O200K)),
    "deepseek": lambda: _byte_level(_split(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK)),
    "gpt2": lambda: _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt2-prefix": lambda: _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "starcoder": lambda: _byte_level(
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    ),
    "odd-regex": lambda: _byte_level(_split(r"\w+ \w+|(?<=x)y|.+?")),
    "llama2": lambda: _sentencepiece_bpe(legacy=True),
    "llama2-metaspace": lambda: _sentencepiece_bpe(legacy=False),
    "gemma": lambda: _sentencepiece_bpe(legacy=False, strip=False),
    "unigram": _unigram,
    "wordpiece": _wordpiece,
    "suffix-bpe": _suffix_bpe,
    "word-level": _word_level,
}


@functools.cache
def _build(name: str) -> Tokenizer:
    return BUILDERS[name]()


@pytest.fixture(scope="session")
def hf() -> Callable[[str], Tokenizer]:
    """The tokenizer of a family by name; the same object each time, so do not change it."""
    return _build


@pytest.fixture(scope="session")
def hf_copy() -> Callable[[str], Tokenizer]:
    """A copy of a family's tokenizer, to change."""
    return lambda name: Tokenizer.from_str(_build(name).to_str())


@pytest.fixture(scope="session")
def tiny_model() -> ModuleType:
    """The shared writer of a small model directory."""
    path = Path(__file__).parents[2] / "support" / "tiny_model.py"
    spec = importlib.util.spec_from_file_location("text_tiny_model", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
