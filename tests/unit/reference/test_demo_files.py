"""The demonstration model as it is shipped: its files, its tokenizer, and what it answers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from demo_model.batches import load_template, rows
from demo_model.conversations import example
from demo_model.export import to_bfloat16, write_shards
from demo_model.vocabulary import END_OF_TURN, build_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from dynamo.reference import ReferenceEngine, demo
from dynamo.reference.config import read_model_config
from dynamo.text.formats.reasoning import REASONING_FORMATS
from dynamo.text.formats.tools import TOOL_FORMATS
from dynamo.text.model import load_text_model
from support.cases import each_case

TOKENIZER = Tokenizer.from_file(str(demo.DIRECTORY / "tokenizer.json"))


def tokens(text: str) -> list[str]:
    return [TOKENIZER.decode([token], skip_special_tokens=False) for token in TOKENIZER.encode(text).ids]


def test_the_files_stay_small() -> None:
    sizes = {path.name: path.stat().st_size for path in demo.DIRECTORY.iterdir()}
    assert max(sizes.values()) < 3_000_000
    assert sum(sizes.values()) < 5_000_000


def test_the_frontend_and_the_engine_read_the_same_model() -> None:
    text, config = load_text_model(demo.DIRECTORY), read_model_config(demo.DIRECTORY)
    assert text.has_chat_template
    assert text.tokenizer.vocab_size == config.vocab_size
    assert set(text.eos_token_ids) == set(config.eos_token_ids)
    assert text.context_length == config.context_length
    assert config.sampling.temperature == 0


async def test_without_a_model_the_engine_takes_this_one_and_says_how_it_writes_calls_and_thoughts() -> None:
    _, config = await ReferenceEngine.from_args([])
    assert (config.model_name, config.served_model_name) == (str(demo.DIRECTORY), "demo")
    assert config.tool_call_parser in TOOL_FORMATS
    assert config.reasoning_parser in REASONING_FORMATS


async def test_what_the_command_line_says_wins() -> None:
    flags = ["--served-model-name", "mine", "--dyn-tool-call-parser", "qwen25", "--dyn-reasoning-parser", "basic"]
    _, config = await ReferenceEngine.from_args(flags)
    assert (config.served_model_name, config.tool_call_parser, config.reasoning_parser) == ("mine", "qwen25", "basic")


async def test_another_model_gets_none_of_it(tmp_path: Path) -> None:
    _, config = await ReferenceEngine.from_args(["--model", str(tmp_path)])
    assert (config.served_model_name, config.tool_call_parser) == (tmp_path.name, None)
    assert config.reasoning_parser is None


# -- the tokenizer -------------------------------------------------------------------------------------------------------


@given(st.text(max_size=60))
def test_every_text_survives_the_tokenizer(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_digits_and_the_letters_of_words_in_quotes_are_tokens_of_their_own() -> None:
    assert tokens("What is 27?") == ["What", " is", " ", "2", "7", "?"]
    assert tokens('Spell "banana"') == ["Spell", ' "', "b", "a", "n", "a", "n", "a", '"']


def test_marks_are_text_and_turns_are_not() -> None:
    ids = TOKENIZER.encode("<think>\n</think><tool_call></tool_call><|im_end|>").ids
    assert len(ids) == 6
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "<think>\n</think><tool_call></tool_call>"


def test_the_same_texts_make_the_same_tokenizer() -> None:
    texts = [message["content"] for number in range(100) for message in example(1, number).messages]
    first, second = (build_tokenizer(texts, size=300) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.get_vocab_size() == 300


def test_what_is_learned_of_a_row_is_the_answers_and_their_ends() -> None:
    conversations = [example(1, number) for number in range(200)]
    template = load_template(demo.DIRECTORY)
    for conversation, (ids, learned) in zip(conversations, rows(conversations, template, TOKENIZER), strict=True):
        assert len(ids) == len(learned)
        if any(answer.given for answer in conversation.answers):
            assert 0 < sum(learned) < len(ids)
            continue
        taught = TOKENIZER.decode([i for i, is_learned in zip(ids, learned, strict=True) if is_learned], False)
        assert taught == "".join(answer.text + END_OF_TURN for answer in conversation.answers)


# -- the weights' way to disk --------------------------------------------------------------------------------------------


def test_shards_are_read_by_the_safetensors_package_and_rounded_to_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("demo_model.export.MAX_SHARD_BYTES", 600)
    random = np.random.default_rng(3)
    tensors = {f"t{n}": random.normal(size=(8, 16)).astype(np.float32) for n in range(5)}
    write_shards(tensors, tmp_path)
    places = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert sorted(places) == sorted(tensors)
    assert len(set(places.values())) == 3
    for name, values in tensors.items():
        save_file({name: to_bfloat16(values)}, tmp_path / "one")  # the same bits, under another type's name
        stored = (load_file(tmp_path / "one")[name].astype(np.uint32) << 16).view(np.float32)
        assert np.abs(stored - values).max() <= np.abs(values).max() / 2**8
        assert (tmp_path / places[name]).read_bytes().count(to_bfloat16(values).tobytes()) == 1


@each_case(("value", "bits"), [(1.0, 0x3F80), (-2.0, 0xC000), (1.00390625, 0x3F80), (1.01171875, 0x3F82), (0.0, 0)])
def test_rounding_is_to_even(value: float, bits: int) -> None:
    assert to_bfloat16(np.array([value], np.float32)).tolist() == [bits]
