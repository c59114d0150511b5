"""A GGUF file's own tokenizer, written in the Hugging Face layout (tests/process/models compares it with llama.cpp's)."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import InvalidArgument
from dynamo.llamacpp.gguf_header import MAX_KEPT_ITEMS, read_gguf_metadata
from dynamo.llamacpp.gguf_tokenizer import VOCABULARY, WORDS, has_known_tokenizer, tokenizer_of
from dynamo.text.tokenizer import load_tokenizer

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
TOKENS = ("<s>", "</s>", "<tool>", "a", "b", "Ġ", "1", "2", "ab", "Ġab", "12", "<end>")
KINDS = (CONTROL, CONTROL, USER_DEFINED, *[NORMAL] * 8, CONTROL)
MERGES = ("a b", "Ġ ab", "1 2", "b b")  # the last one gives no token


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dynamo" / "tokenizers"


def write(file: Path, rule: str = "smollm", model: str = "gpt2", **more: Any) -> Path:
    import gguf

    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(TOKENS)
    writer.add_token_types(more.get("kinds", KINDS))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(11)
    writer.add_chat_template("{{ messages }}")
    if "begins" in more:
        writer.add_add_bos_token(more["begins"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def made(file: Path) -> Path:
    directory = tokenizer_of(file)
    assert directory is not None
    return directory


def test_it_has_the_ids_the_named_tokens_and_the_template(tmp_path: Path, cache: Path) -> None:
    file = write(tmp_path / "m.gguf")
    assert has_known_tokenizer(file)
    directory = made(file)
    assert directory.parent == cache
    tokenizer = load_tokenizer(directory)
    assert tokenizer.encode("ab ab<tool>12</s>") == [8, 9, 2, 6, 7, 1]  # digits stay apart, by this rule
    assert tokenizer.encode_inputs(["ab"], add_special_tokens=True) == [[8]]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.decode([0, 8, 9, 2], skip_special_tokens=True) == "ab ab<tool>"
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == "{{ messages }}"
    assert json.loads((directory / "generation_config.json").read_text()) == {"eos_token_id": [1, 11]}


@pytest.mark.parametrize(
    ("rule", "begins", "expected"),
    [
        ("llama-bpe", {}, [0, 10]),  # its digits stay together, and its texts begin with the first token
        ("llama-bpe", {"begins": False}, [10]),
        ("qwen2", {}, [6, 7]),
        ("qwen2", {"begins": True}, [0, 6, 7]),
        ("gpt-2", {}, [10]),
    ],
)
def test_each_rule_divides_a_text_in_its_way(
    tmp_path: Path, rule: str, begins: dict[str, Any], expected: list[int]
) -> None:
    tokenizer = load_tokenizer(made(write(tmp_path / "m.gguf", rule, **begins)))
    assert tokenizer.encode_inputs(["12"], add_special_tokens=True) == [expected]


@pytest.mark.parametrize(("rule", "model"), [("tekken", "gpt2"), ("smollm", "llama"), ("", "gpt2")])
def test_of_a_rule_that_is_not_known_nothing_is_made(tmp_path: Path, cache: Path, rule: str, model: str) -> None:
    file = write(tmp_path / "m.gguf", rule, model)
    assert not has_known_tokenizer(file)
    assert tokenizer_of(file) is None
    assert not cache.exists()


def test_it_is_written_once(tmp_path: Path, cache: Path) -> None:
    file = write(tmp_path / "m.gguf")
    before = made(file) / "tokenizer.json"
    written_at = before.stat().st_mtime_ns
    assert made(write(tmp_path / "copy.gguf")) / "tokenizer.json" == before
    assert before.stat().st_mtime_ns == written_at
    assert made(write(tmp_path / "other.gguf", "qwen2")) != before.parent
    assert len(list(cache.iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    with pytest.raises(InvalidArgument, match=r"cannot be written to .*taken.*: Not a directory"):
        tokenizer_of(write(tmp_path / "m.gguf"))


def test_a_broken_vocabulary_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", kinds=KINDS[:-1])
    with pytest.raises(InvalidArgument, match="no vocabulary that can be read"):
        tokenizer_of(file)
    whole = write(tmp_path / "n.gguf").read_bytes()
    count = whole.index(struct.pack("<Q", len(TOKENS)), whole.index(VOCABULARY.encode()))
    file.write_bytes(whole[:count] + struct.pack("<Q", MAX_KEPT_ITEMS + 1) + whole[count + 8 :])
    with pytest.raises(InvalidArgument, match=f"claims a list of {MAX_KEPT_ITEMS + 1} items"):
        read_gguf_metadata(file, lists=(VOCABULARY,))
    with pytest.raises(InvalidArgument, match="not a whole GGUF file"):
        tokenizer_of(file)
    assert not has_known_tokenizer(tmp_path / "missing.gguf")


@pytest.mark.parametrize("rule", WORDS)
def test_words_keep_every_character(tmp_path: Path, rule: str) -> None:
    tokenizer = load_tokenizer(made(write(tmp_path / "m.gguf", rule)))
    pieces = tokenizer.hf.pre_tokenizer.pre_tokenize_str("It's 1234\n\n  für x,y\t🎉  ")
    assert "".join(text for text, _ in pieces).replace("Ġ", " ").count(" ") == 6
    assert [end for _, (_, end) in pieces[:-1]] == [start for _, (start, _) in pieces[1:]]
