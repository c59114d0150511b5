from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer

from dynamo.errors import InvalidArgument
from dynamo.frontend.args import parse_args
from dynamo.frontend.models.files import tokenizer_choice
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.text import quick_encoder
from dynamo.text.prefix_cache import CachedTokenizer
from dynamo.text.quick_encoder import QuickEncoder, TokenizerChoice
from dynamo.text.tokenizer import JsonTokenizer, load_tokenizer
from support.cases import each_case
from unit.text.test_prefix_cache import ALPHABET

Family = Callable[[str], HfTokenizer]

QUICK = ("llama3", "qwen", "o200k", "deepseek", "gpt2", "gpt2-prefix", "starcoder", "llama2", "gemma", "odd-regex")
NOT_READ = ("llama2-metaspace", "unigram", "wordpiece", "suffix-bpe", "word-level")
FASTOKENS = TokenizerChoice("fastokens", may_fall_back=False)
TEXT = st.lists(st.one_of(st.sampled_from(ALPHABET), st.text(max_size=4)), max_size=30).map("".join)


@pytest.fixture(scope="module")
def directory(hf: Family, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a family's tokenizer."""

    def written(name: str) -> Path:
        path = tmp_path_factory.getbasetemp() / f"quick-{name}"
        path.mkdir(exist_ok=True)
        if not (path / "tokenizer.json").exists():
            hf(name).save(str(path / "tokenizer.json"))
        return path

    return written


def encoder(directory: Path, exact: Callable[[str], list[int]] | None = None) -> QuickEncoder:
    return QuickEncoder(directory / "tokenizer.json", exact or load_tokenizer(directory).encode)


@each_case("name", QUICK)
@given(texts=st.lists(TEXT, max_size=8))
@pytest.mark.property
def test_ids_are_those_of_the_models_own_tokenizer(
    directory: Callable[[str], Path], name: str, texts: list[str]
) -> None:
    exact, quick = load_tokenizer(directory(name)), load_once(directory(name))
    assert quick.is_quick
    assert [quick.encode(text) for text in texts] == quick.encode_many(texts) == exact.encode_many(texts)


_loaded: dict[Path, JsonTokenizer] = {}


@pytest.fixture(scope="module", autouse=True)
def unloaded() -> Iterator[None]:
    """Let go of what was loaded: the library keeps up to 100 MB of words for each."""
    yield
    _loaded.clear()


def load_once(directory: Path) -> JsonTokenizer:
    if directory not in _loaded:
        _loaded[directory] = load_tokenizer(directory, FASTOKENS)
    return _loaded[directory]


@each_case("name", NOT_READ)
def test_a_tokenizer_that_is_not_read_keeps_its_own_or_is_refused(
    directory: Callable[[str], Path], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InvalidArgument, match="fastokens does not read"):
        load_tokenizer(directory(name), FASTOKENS)
    kept = load_tokenizer(directory(name), TokenizerChoice("fastokens"))
    assert not kept.is_quick
    assert kept.encode("the answer") == load_tokenizer(directory(name)).encode("the answer")
    assert "prompts are encoded by the model's own tokenizer" in caplog.text


@each_case("side", ["lstrip", "rstrip", "single_word"])
def test_added_tokens_that_take_what_is_beside_them_are_not_read(hf_copy: Family, tmp_path: Path, side: str) -> None:
    tokenizer = hf_copy("qwen")
    tokenizer.add_tokens([AddedToken("<beside>", **{side: True})])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InvalidArgument, match="added tokens take what stands beside them"):
        load_tokenizer(tmp_path, FASTOKENS)


def test_a_missing_library_is_named(directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    with pytest.raises(InvalidArgument, match="pip install fastokens"):
        load_tokenizer(directory("qwen"), FASTOKENS)


def test_by_itself_it_loads_once_enough_was_encoded(directory: Callable[[str], Path]) -> None:
    loads: list[Callable[[], None]] = []
    cached = CachedTokenizer(load_tokenizer(directory("qwen"), TokenizerChoice("auto", aside=loads.append)))
    text = "the answer " * 100
    expected = cached.encode(text)
    for number in range(quick_encoder.WARM_CHARACTERS // 4000 + 10):
        cached.encode_unlocked(" ".join(f"{number}{each}" for each in range(1000)))
    assert not cached.is_quick
    (load,) = loads
    load()
    assert cached.is_quick
    assert cached.encode(text) == expected
    hits = cached.stats.hits
    assert cached.encode(text) == expected
    assert cached.stats.hits == hits, "a text that is encoded faster than found is not looked up"


def test_ids_that_differ_at_its_trial_keep_it_out(directory: Callable[[str], Path]) -> None:
    with pytest.raises(InvalidArgument, match=r"gives other ids than .* for \d+ texts of its trial"):
        encoder(directory("qwen"), lambda text: [0]).load()


def test_the_first_difference_later_ends_its_use(
    directory: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    exact = load_tokenizer(directory("qwen")).encode
    has_changed = False
    quick = encoder(directory("qwen"), lambda text: [7] if has_changed else exact(text))
    quick.load()
    has_changed = True
    with caplog.at_level(logging.ERROR):
        answers = [quick.encode("the answer") for _ in range(quick_encoder.TEXTS_PER_CHECK + 1)]
    assert answers == [exact("the answer")] * (quick_encoder.TEXTS_PER_CHECK - 1) + [[7], [7]]
    assert not quick.is_quick
    assert "Set --tokenizer default" in caplog.text
    assert "the answer" not in caplog.text


def test_a_difference_empties_the_cache_of_prompts(directory: Callable[[str], Path]) -> None:
    tokenizer = load_tokenizer(directory("qwen"), FASTOKENS)
    cached, text = CachedTokenizer(tokenizer), " ".join(map(str, range(2000)))
    expected = cached.encode(text)
    assert tokenizer._quick is not None
    tokenizer._quick._fast = None
    misses = cached.stats.misses
    assert cached.encode(text) == expected
    assert cached.stats.misses > misses


def test_a_file_that_changed_is_not_read_again(hf_copy: Family, tmp_path: Path) -> None:
    loads: list[Callable[[], None]] = []
    path = tmp_path / "tokenizer.json"
    hf_copy("qwen").save(str(path))
    tokenizer = load_tokenizer(tmp_path, TokenizerChoice("auto", aside=loads.append))
    tokenizer.encode("x " * quick_encoder.WARM_CHARACTERS)
    other = hf_copy("qwen")
    other.add_tokens(["<other>"])
    other.save(str(path))
    loads[0]()
    assert not tokenizer.is_quick


def test_a_lone_surrogate_is_encoded_by_the_own_tokenizer(directory: Callable[[str], Path]) -> None:
    quick = load_once(directory("qwen"))
    assert quick.encode("a\ud800b") == load_tokenizer(directory("qwen")).encode("a?b")


@pytest.mark.parametrize(
    ("flags", "card", "expected"),
    [
        ([], {}, ("auto", True)),
        ([], {"tokenizer_backend": "fastokens"}, ("fastokens", True)),
        ([], {"tokenizer_backend": "fastokens", "tokenizer_fallback_enabled": False}, ("fastokens", False)),
        ([], {"tokenizer_backend": "basetenkenizer", "tokenizer_fallback_enabled": False}, ("auto", True)),
        (["--tokenizer", "default"], {"tokenizer_backend": "fastokens"}, ("default", True)),
        (["--tokenizer", "fastokens", "--no-tokenizer-fallback"], {}, ("fastokens", False)),
    ],
)
def test_the_flag_counts_before_the_card(flags: list[str], card: dict[str, Any], expected: tuple[str, bool]) -> None:
    choice = tokenizer_choice(parse_args(flags, env={}), ModelRuntimeConfig(**card))
    assert (choice.backend, choice.may_fall_back) == expected
