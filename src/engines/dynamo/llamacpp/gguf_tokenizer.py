"""The tokenizer of a GGUF file in the Hugging Face layout, so that a file alone is served with tokens.

A file holds the vocabulary, the merges and the template, and of the rule that divides a text into words only the name. So this
is made for the rules whose words are known here (`WORDS`), and for no others.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from dynamo.errors import InvalidArgument
from dynamo.llamacpp.gguf_header import read_gguf_metadata

BYTE_PAIRS: Final = "gpt2"  # llama.cpp's name of the algorithm
CONTROL, USER_DEFINED = 3, 4  # kinds of tokens
VOCABULARY, KINDS, MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"
TEMPLATE: Final = "tokenizer.chat_template"

Json = Mapping[str, Any]


def _byte_level(*, divides: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": divides}


def _split(digits: str) -> list[Json]:
    """Return the rule of Llama 3 and of its relatives, which differ in how many digits stay together."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, _byte_level(divides=False)]


WORDS: Final[Mapping[str, list[Json]]] = {
    "gpt-2": [_byte_level(divides=True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, _byte_level(divides=True)],
    "llama-bpe": _split(r"\p{N}{1,3}"),
    "qwen2": _split(r"\p{N}"),
}
"""By llama.cpp's name of a rule, what divides a text into words."""

WHOLE_WORDS: Final = frozenset(
    {"llama-bpe"}
)  # a word that is a token needs no merges, and texts begin with the first token
COMPOSED: Final = frozenset({"qwen2"})  # texts are in Unicode's composed form

logger = logging.getLogger(__name__)


def has_known_tokenizer(file: Path) -> bool:
    """Return whether `tokenizer_of` makes a tokenizer of a file; False for one that cannot be read."""
    try:
        return _rule(read_gguf_metadata(file)) in WORDS
    except InvalidArgument:
        return False


def tokenizer_of(file: Path) -> Path | None:
    """Return a directory with the tokenizer of a file, written into the user's cache once; None where its rule is not known.

    Raises InvalidArgument for a file that is broken or has no tokenizer that can be read, and for a cache that cannot be written.
    """
    rule = _rule(read_gguf_metadata(file))
    if rule not in WORDS:
        return None
    metadata = read_gguf_metadata(file, lists=(VOCABULARY, KINDS, MERGES))
    texts, kinds = metadata.get(VOCABULARY), metadata.get(KINDS)
    if not texts or not kinds or len(texts) != len(kinds):
        raise InvalidArgument(f"{file} has no vocabulary that can be read ({VOCABULARY}, {KINDS})")
    settings = _settings(metadata, texts)
    first = settings.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", rule in WHOLE_WORDS) else None
    files = {
        "tokenizer.json": _tokenizer(rule, metadata, first),
        "tokenizer_config.json": settings,
        "generation_config.json": {"eos_token_id": _ends(metadata, len(texts))},
    }
    return _written({name: json.dumps(content) for name, content in files.items()})


def _rule(metadata: Json) -> str:
    found = metadata.get("tokenizer.ggml.pre")
    return found if metadata.get("tokenizer.ggml.model") == BYTE_PAIRS and isinstance(found, str) else ""


def _tokenizer(rule: str, metadata: Json, first: str | None) -> Json:
    texts, plain = metadata[VOCABULARY], dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    numbers = {text: number for number, text in enumerate(texts)}
    added = [
        {"id": number, "content": texts[number], "special": kind == CONTROL, **plain}
        for number, kind in enumerate(metadata[KINDS])
        if kind in (CONTROL, USER_DEFINED)
    ]
    # llama.cpp passes over a merge that gives no token; the reader of tokenizer.json refuses the file.
    merges = [
        each for each in metadata.get(MERGES) or () if {*each.split(" "), each.replace(" ", "")} <= numbers.keys()
    ]
    model = {"type": "BPE", "vocab": numbers, "merges": merges, "ignore_merges": rule in WHOLE_WORDS}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if rule in COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": WORDS[rule]},
        "post_processor": None if first is None else _begins_with(first, numbers[first]),
        "decoder": _byte_level(divides=True),
        "model": model,
    }


def _begins_with(token: str, number: int) -> Json:
    single = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {token: {"id": token, "ids": [number], "tokens": [token]}}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _settings(metadata: Json, texts: list[str]) -> dict[str, Any]:
    """Return the tokenizer's settings: its named tokens, and its templates."""
    found: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"), ("unk_token", "unknown")):
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(number, int) and number < len(texts):
            found[name] = texts[number]
    if TEMPLATE in metadata:
        found["chat_template"] = metadata[TEMPLATE]
    return found


def _ends(metadata: Json, size: int) -> list[int]:
    """Return the tokens that end an answer: that of a text, of a turn, and of a message."""
    found = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return sorted({number for number in found if isinstance(number, int) and number < size})


def _check(file: Path) -> None:
    """Raise InvalidArgument for a tokenizer that no frontend could read."""
    try:
        Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise InvalidArgument(
            f"the tokenizer in the file cannot be read: {error}; give another one with --tokenizer DIR"
        ) from error


def _written(files: Mapping[str, str]) -> Path:
    digest = hashlib.sha256("\0".join(files.values()).encode("utf-8", "surrogatepass")).hexdigest()
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    parent = (Path(base) if base else Path.home() / ".cache") / "dynamo" / "tokenizers"
    target = parent / digest[:24]
    if target.is_dir():
        return target
    try:
        parent.mkdir(parents=True, exist_ok=True)
        # In a folder of this process's own: two that start at once both write, and a whole directory appears at once.
        with tempfile.TemporaryDirectory(prefix="new.", dir=parent) as own:
            made = Path(own, "tokenizer")
            made.mkdir()
            for name, text in files.items():
                (made / name).write_text(text, encoding="utf-8")
            _check(made / "tokenizer.json")
            try:
                made.rename(target)
            except OSError:
                if not target.is_dir():  # else another process was faster
                    raise
    except OSError as error:
        raise InvalidArgument(
            f"the tokenizer of the file cannot be written to {parent}: {error.strerror or error}"
        ) from error
    logger.debug("wrote the tokenizer of a GGUF file to %s", target)
    return target
