from __future__ import annotations

import functools
import json
import random
import threading
import time
import zlib
from collections.abc import Callable

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer

from dynamo.text import ByteTokenizer, CachedTokenizer, JsonTokenizer, cutpoints, prefix_cache
from dynamo.text.cutpoints import exact_cuts, split_alternatives
from support.cases import each_case

Family = Callable[[str], HfTokenizer]

ALPHABET = [
    *["the", "streaming", "worker's", "DON'T", "answer", "naïve", "x", "I'll", "123", "4567", "3.14", "²"],
    *["你好", "世界", "，", "。", "！", "こんにちは", "привет", "안녕", "\u1112\u1161", "e", "\u0301", "\u0308"],
    *["👩‍🚀", "🎉", "🇩🇪", "\u200d", "\u200b", "\x00", "\x01", "\x1c", "\x85", "\ufffd", "\u3000", "\xa0"],
    *[" ", " ", " ", " ", "  ", "   ", "\t", "\n", "\n", "\n\n", "\r\n", " \n", "\n ", "\r", "\u2028"],
    *["/", "//", "'", "'s", "'S", "-", "--", "...", "!?", "(", ")", "{", '"', "<", "|", ">", "_", "=", "\\"],
    *[" the answer", " x the", "▁", "world\nx"],
    *["<|begin|>", "<|end|>", "<|user|>", "<｜User｜>", "<tool_call>", "plainé", "plaine\u0301", "<|be", "<s>", "</s>"],
]


def texts(rng: random.Random, words: int) -> str:
    return "".join(rng.choices(ALPHABET, k=rng.randint(0, words)))


def pairs(seed: int, count: int) -> list[tuple[str, str]]:
    """Texts that share a beginning, which ends anywhere: also inside a word, a run of spaces or a special token."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        one = texts(rng, 40)
        found.append((one, one[: rng.randint(0, len(one))] + texts(rng, 12)))
    return found


@pytest.fixture
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut as often as possible, so that short texts meet every kind of cut."""
    monkeypatch.setattr(prefix_cache, "CHUNK_CHARS", 1)
    monkeypatch.setattr(prefix_cache, "MIN_TEXT_CHARS", 0)


CUT_INSIDE_TEXT = ("llama3", "qwen", "o200k", "deepseek", "gpt2", "gpt2-prefix", "starcoder")
CUT_BETWEEN_WORDS = ("llama2", "llama2-metaspace", "gemma")
CUT_AT_SPECIALS = ("odd-regex", "unigram", "wordpiece", "suffix-bpe")


@pytest.mark.usefixtures("tiny_chunks")
@pytest.mark.parametrize(
    ("name", "seed"), [(n, i) for i, n in enumerate(CUT_INSIDE_TEXT + CUT_BETWEEN_WORDS + CUT_AT_SPECIALS)]
)
@pytest.mark.process  # computes for seconds
def test_ids_are_those_of_the_uncached_tokenizer(hf: Family, name: str, seed: int) -> None:
    plain = JsonTokenizer(hf(name))
    cached = CachedTokenizer(plain)
    cases = [text for pair in pairs(seed, 500 if name in CUT_AT_SPECIALS else 1200) for text in pair]
    # One uncached call for all: what is compared is the cache, not the library's speed.
    for text, expected in zip(cases, plain.encode_many(cases), strict=True):
        assert cached.encode(text) == expected, repr(text)
    assert cached.stats.hits > 0


@pytest.mark.usefixtures("tiny_chunks")
@each_case("name", ["llama3", "qwen", "gpt2", "llama2", "llama2-metaspace", "gemma"])
@each_case(
    "token",
    [
        AddedToken("answer", lstrip=True, normalized=False),
        AddedToken("answer", rstrip=True, normalized=False),
        AddedToken("the", single_word=True, normalized=False),
        AddedToken("x 123", normalized=False),
        AddedToken("world\nx", normalized=False),
        AddedToken(" ", normalized=False),
        AddedToken("  ", normalized=False, rstrip=True),
        AddedToken("\n", normalized=False, lstrip=True, rstrip=True),
        AddedToken("世界，", normalized=False),
        AddedToken("e\u0301 ", normalized=True),
        AddedToken("answer", normalized=True),
        AddedToken("answer", normalized=False),
        AddedToken("x the", normalized=True),
        AddedToken("▁x▁answer", normalized=True),
    ],
    ids=repr,
)
def test_added_tokens_that_see_their_neighbours_do_not_spoil_the_ids(
    hf_copy: Family, name: str, token: AddedToken
) -> None:
    tokenizer = hf_copy(name)
    tokenizer.add_tokens([token])
    plain = JsonTokenizer(tokenizer)
    cached = CachedTokenizer(plain)
    cases = [text for pair in pairs(zlib.crc32(f"{name} {token!r}".encode()), 20) for text in pair]
    for text, expected in zip(cases, plain.encode_many(cases), strict=True):
        assert cached.encode(text) == expected, repr(text)


@pytest.mark.usefixtures("tiny_chunks")
def test_a_token_with_a_space_inside_leaves_the_cuts_behind_other_characters(hf_copy: Family) -> None:
    for content, is_normalized, has_cuts in (('": "', False, True), ("é the", False, True), ("é the", True, False)):
        tokenizer = hf_copy("qwen")
        tokenizer.add_tokens([AddedToken(content, normalized=is_normalized)])
        plain, cuts = JsonTokenizer(tokenizer), exact_cuts(tokenizer)
        assert cuts is not None
        assert (cuts.next("one two", 1) == 3) == has_cuts
        for text in ('{"one": "two two", "x": 1}', "caf\u00e9 the one", "cafe\u0301 the one"):
            assert CachedTokenizer(plain).encode(text) == plain.encode(text)


@pytest.mark.usefixtures("tiny_chunks")
def test_no_cut_is_made_behind_an_added_token_that_ends_a_word(hf_copy: Family) -> None:
    tokenizer = hf_copy("llama2")
    tokenizer.add_tokens([AddedToken("answer", normalized=False)])
    plain, text = JsonTokenizer(tokenizer), "the answer streaming there"
    assert CachedTokenizer(plain).encode(text) == plain.encode(text)


@pytest.mark.parametrize(("name", "skip"), [("llama2", 1), ("llama2-metaspace", 1), ("gemma", 0)])
def test_sentencepiece_bpe_is_cut_between_words(hf: Family, name: str, skip: int) -> None:
    cuts = exact_cuts(hf(name))
    assert cuts is not None
    assert cuts.skip == skip
    assert cuts.next("two words", 1) == 3


def test_a_vocabulary_that_joins_words_is_not_cut_between_them(hf: Family) -> None:
    state = json.loads(hf("llama2").to_str())
    state["model"]["vocab"]["e▁a"] = len(state["model"]["vocab"])
    cuts = exact_cuts(HfTokenizer.from_str(json.dumps(state)))
    assert cuts is not None
    assert cuts.before_match


@each_case("name", CUT_INSIDE_TEXT)
def test_known_byte_level_pipelines_are_cut_inside_text(hf: Family, name: str) -> None:
    cuts = exact_cuts(hf(name))
    assert cuts is not None
    assert not cuts.before_match


@each_case("name", CUT_AT_SPECIALS)
def test_other_pipelines_are_cut_only_before_special_tokens(hf: Family, name: str) -> None:
    cuts = exact_cuts(hf(name))
    assert cuts is not None
    assert cuts.before_match
    assert cuts.next("no special token, many words", 1) == -1


def test_a_single_word_token_forbids_every_cut_and_whole_texts_are_still_cached(hf_copy: Family) -> None:
    tokenizer = hf_copy("llama3")
    tokenizer.add_tokens([AddedToken("answer", single_word=True)])
    assert exact_cuts(tokenizer) is None
    cached = CachedTokenizer(JsonTokenizer(tokenizer))
    text = "the worker answer " * 100
    assert cached.encode(text) == cached.encode(text)
    assert (cached.stats.hits, cached.stats.misses) == (1, 1)


def test_special_tokens_that_overlap_are_not_cut_at(hf_copy: Family) -> None:
    tokenizer = hf_copy("odd-regex")
    tokenizer.add_special_tokens(["<|x<|user|>"])
    assert exact_cuts(tokenizer) is None


@pytest.mark.parametrize("name", ["llama3", "llama2", "odd-regex"])
def test_a_cut_is_found_wherever_the_searched_pieces_meet(hf: Family, name: str) -> None:
    cuts = exact_cuts(hf(name))
    assert cuts is not None
    for lead in range(cutpoints.SEARCH_CHARS - 12, cutpoints.SEARCH_CHARS + 12):
        text = "x" * lead + "<|begin|>a b"
        found = lead if cuts.before_match else len(text) - 2
        assert cuts.next(text, 1) == found


def test_alternatives_are_split_at_the_top_level_only() -> None:
    assert split_alternatives(r"(?i:'s|'t)|[|)]\||a(b|(c|d))") == {r"(?i:'s|'t)", r"[|)]\|", "a(b|(c|d))"}


@functools.cache
def vocabulary() -> list[str]:
    rng = random.Random(3)
    return ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 8))) for _ in range(3000)]


def long_text(words: int, seed: int = 3) -> str:
    return " ".join(random.Random(seed).choices(vocabulary(), k=words))


def test_a_prompt_that_shares_its_beginning_encodes_only_the_rest(hf: Family) -> None:
    plain = JsonTokenizer(hf("llama3"))
    cached = CachedTokenizer(plain)
    shared = long_text(4000)
    first = cached.encode(f"<|begin|>{shared} and one question")
    assert cached.stats.cached_tokens == 0
    before = cached.stats.uncached_tokens
    assert before == len(first)
    other = f"<|begin|>{shared} but another, longer question?"
    assert cached.encode(other) == plain.encode(other)
    encoded = cached.stats.uncached_tokens - before
    assert encoded < len(plain.encode(long_text(300)))  # a chunk, not the prompt
    assert cached.stats.cached_tokens > 0.9 * len(first)


def test_repeating_a_long_prompt_takes_a_fraction_of_encoding_it(hf: Family) -> None:
    plain = JsonTokenizer(hf("llama3"))
    cached = CachedTokenizer(plain)
    text = long_text(8000)
    cached.encode(text)

    def cpu(encode: Callable[[str], object]) -> float:
        taken = []
        for _ in range(3):
            began = time.thread_time()
            encode(text)
            taken.append(time.thread_time() - began)
        return min(taken)

    assert cpu(cached.encode) < cpu(plain.hf.encode) / 5  # about 1/60 where it was measured


def test_the_cache_stays_within_its_bytes_and_keeps_what_is_used(hf: Family) -> None:
    plain = JsonTokenizer(hf("llama3"))
    limit = 200_000
    cached = CachedTokenizer(plain, max_bytes=limit)
    favourite = long_text(150, seed=0)
    for seed in range(1, 120):
        text = long_text(300, seed=seed)
        assert cached.encode(text) == plain.encode(text)
        assert cached.encode(favourite) == plain.encode(favourite)
        assert cached.cached_bytes <= limit
    assert cached.stats.evictions > 50
    before = cached.stats.misses
    cached.encode(favourite)
    assert cached.stats.misses == before


def test_a_text_larger_than_the_cache_is_encoded_and_not_kept(hf: Family) -> None:
    cached = CachedTokenizer(JsonTokenizer(hf("llama3")), max_bytes=2000)
    text = "x" * 5000
    assert cached.encode(text) == cached.encode(text)
    assert cached.cached_bytes == 0


def test_short_texts_bytes_and_a_cache_of_zero_bypass_it(hf: Family) -> None:
    short = CachedTokenizer(JsonTokenizer(hf("llama3")))
    short.encode("short")
    assert (short.stats.misses, short.cached_bytes) == (0, 0)
    for off in (CachedTokenizer(ByteTokenizer()), CachedTokenizer(JsonTokenizer(hf("llama3")), max_bytes=0)):
        off.encode("long enough " * 100)
        assert off.cached_bytes == 0


def test_threads_may_share_one_cache(hf: Family) -> None:
    plain = JsonTokenizer(hf("llama3"))
    cached = CachedTokenizer(plain, max_bytes=60_000)
    cases = [long_text(400, seed=seed) for seed in range(6)]
    expected = plain.encode_many(cases)
    wrong: list[int] = []

    def work(start: int) -> None:
        for turn in range(40):
            index = (start + turn) % len(cases)
            if cached.encode_unlocked(cases[index]) != expected[index]:
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert cached.cached_bytes <= 60_000


def test_everything_else_is_the_tokenizer_behind_it(hf: Family) -> None:
    plain = JsonTokenizer(hf("llama3"), bos_token="<|begin|>", eos_token="<|end|>")
    cached = CachedTokenizer(plain)
    ids = plain.encode("the answer")
    assert cached.decode(ids) == "the answer"
    assert (cached.bos_token, cached.eos_token, cached.vocab_size) == ("<|begin|>", "<|end|>", plain.vocab_size)
    assert cached.token_id("<|end|>") == plain.token_id("<|end|>")
    assert cached.token_text(ids[0]) == plain.token_text(ids[0])
    assert cached.token_bytes(ids[0]) == plain.token_bytes(ids[0])
    assert cached.pieces(skip_special_tokens=True) is plain.pieces(skip_special_tokens=True)
    assert cached.encode_many(["a", "b"]) == plain.encode_many(["a", "b"])
