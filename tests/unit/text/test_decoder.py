from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer

from dynamo.text import ByteTokenizer, ChoiceDecoder, JsonTokenizer
from support.cases import each_case
from support.properties import examples

TOKENIZER = ByteTokenizer()
Outcome = tuple[str, str | None, str | int | None, int]


def decoder(*, include: bool = False, skip: bool | None = None, **stop_conditions: Any) -> ChoiceDecoder:
    return ChoiceDecoder(TOKENIZER, [], stop_conditions, {"skip_special_tokens": skip}, include_stop_str=include)


def run(choice: ChoiceDecoder, pushes: Sequence[Sequence[int]]) -> Outcome:
    shown = "".join(choice.push(list(ids)) for ids in pushes) + choice.finish()
    return shown, choice.finish_reason, choice.stop_reason, choice.generated


def each(text: str) -> list[list[int]]:
    return [[byte] for byte in text.encode()]


def test_without_stops_everything_is_shown_and_counted() -> None:
    assert run(decoder(), each("héllo")) == ("héllo", None, None, 6)


@each_case(
    ("least", "expected"), [(2, ("he", "stop", "l", 3)), (3, ("hel", "stop", "l", 4)), (4, ("hello", None, None, 5))]
)
def test_stop_strings_are_looked_for_behind_min_tokens_in_an_engine_s_own_text(least: int, expected: Outcome) -> None:
    choice = decoder(stop=["l"], min_tokens=least)
    shown = "".join(choice.push([1], letter) for letter in "hello") + choice.finish()
    assert (shown, choice.finish_reason, choice.stop_reason, choice.generated) == expected


@each_case(("least", "expected"), [(0, ("", "stop", "\ufffd", 1)), (1, ("\ufffd", None, None, 1))])
def test_stop_strings_are_looked_for_behind_min_tokens_in_what_the_end_shows(least: int, expected: Outcome) -> None:
    assert run(decoder(stop=["\ufffd"], min_tokens=least), [[0xC3]]) == expected  # half of a code point


def test_absent_and_null_members_mean_unset() -> None:
    choice = decoder(
        stop=None,
        stop_token_ids=None,
        stop_token_ids_visible=None,
        stop_token_ids_hidden=None,
        min_tokens=None,
        ignore_eos=None,
    )
    assert run(choice, each("hello")) == ("hello", None, None, 5)


@each_case(
    ("conditions", "expected"),
    [
        ({"stop_token_ids_hidden": [ord("l")]}, ("he", "stop", None, 3)),
        ({"stop_token_ids": [ord("l")]}, ("he", "stop", ord("l"), 3)),
        ({"stop_token_ids_visible": [ord("l")]}, ("hel", "stop", None, 3)),
        ({"stop_token_ids": [ord("l")], "stop_token_ids_hidden": [ord("l")]}, ("he", "stop", ord("l"), 3)),
        ({"stop_token_ids": [ord("l")], "stop_token_ids_visible": [ord("l")]}, ("hel", "stop", ord("l"), 3)),
        ({"stop": ["ll"]}, ("he", "stop", "ll", 4)),
        ({"stop": "ll"}, ("he", "stop", "ll", 4)),
        ({"stop": ["zz"]}, ("hello", None, None, 5)),
        ({"stop": ["l"], "stop_token_ids_hidden": [ord("l")]}, ("he", "stop", None, 3)),
        ({"stop": ["l"], "stop_token_ids_visible": [ord("l")]}, ("hel", "stop", None, 3)),
        ({"stop": ["ex"], "stop_token_ids_hidden": [ord("l")]}, ("he", "stop", None, 3)),
        ({"stop_token_ids_hidden": [ord("l")], "ignore_eos": True}, ("hello", None, None, 5)),
        ({"stop_token_ids_visible": [ord("l")], "ignore_eos": True}, ("hello", None, None, 5)),
        ({"stop_token_ids": [ord("l")], "ignore_eos": True}, ("he", "stop", ord("l"), 3)),
        ({"stop_token_ids_hidden": [ord("l")], "min_tokens": 3}, ("he", "stop", None, 3)),
        ({"stop_token_ids_hidden": [ord("l")], "min_tokens": 4}, ("hel", "stop", None, 4)),
        ({"stop_token_ids_hidden": [ord("l")], "min_tokens": 5}, ("hello", None, None, 5)),
        ({"stop": ["l"], "min_tokens": 3}, ("hel", "stop", "l", 4)),
        ({"stop": ["l"], "min_tokens": 4}, ("hello", None, None, 5)),  # looked for behind the fourth token only
        ({"stop": ["ll"], "min_tokens": 3}, ("hello", None, None, 5)),
        ({"stop": ["ll"], "min_tokens": 2}, ("he", "stop", "ll", 4)),
    ],
)
def test_stop_conditions_in_their_order(conditions: dict[str, Any], expected: Outcome) -> None:
    whole = list(b"hello")
    for cuts in itertools.chain.from_iterable(itertools.combinations(range(1, 5), n) for n in range(5)):
        edges = [0, *cuts, 5]
        pushes = [whole[a:b] for a, b in itertools.pairwise(edges)]
        assert run(decoder(**conditions), pushes) == expected, cuts


def test_a_kept_stop_string_stays_in_the_text() -> None:
    assert run(decoder(stop=["ll"], include=True), each("hello")) == ("hell", "stop", "ll", 4)


def test_a_held_back_prefix_streams_nothing_and_is_trimmed() -> None:
    choice = decoder(stop=["STOP"])
    assert [choice.push(ids) for ids in each("abcSTOP")] == ["a", "b", "c", "", "", "", ""]
    assert (choice.finish_reason, choice.stop_reason, choice.generated) == ("stop", "STOP", 7)


def test_after_a_stop_nothing_is_shown_or_counted() -> None:
    choice = decoder(stop_token_ids_hidden=[0])
    choice.push([65, 0])
    assert (choice.push([66]), choice.push([], "text"), choice.finish()) == ("", "", "")
    assert choice.generated == 2


def test_a_stop_shows_what_was_pending() -> None:
    assert run(decoder(stop_token_ids_hidden=[0], stop=["ab"]), [[0x61], [0]]) == ("a", "stop", None, 2)
    assert run(decoder(stop_token_ids_hidden=[0]), [[0xE2, 0x82], [0]]) == ("\ufffd", "stop", None, 3)
    assert run(decoder(), [[0xE2, 0x82]]) == ("\ufffd", None, None, 2)


def test_text_from_the_engine_passes_through_with_every_rule() -> None:
    choice = decoder()
    assert choice.push([7, 8], "from the engine") == "from the engine"
    assert choice.generated == 2

    choice = decoder(stop=["END"])
    assert choice.push([1], "one E") + choice.push([2], "ND two") == "one "
    assert (choice.finish_reason, choice.stop_reason, choice.generated) == ("stop", "END", 2)

    choice = decoder(stop_token_ids=[9], min_tokens=2)
    assert choice.push([9], "kept") == "kept"
    assert choice.push([1, 9, 3], " last") == " last"
    assert (choice.finish_reason, choice.stop_reason, choice.generated) == ("stop", 9, 3)

    choice = decoder(stop_token_ids_visible=[9], stop=["la"])
    assert choice.push([9], "last") == "last"
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)


def test_finish_may_complete_a_stop_string() -> None:
    choice = decoder(stop=["\ufffd"])
    assert choice.push([0x41, 0xE2]) + choice.finish() == "A"
    assert choice.stop_reason == "\ufffd"


def test_special_tokens_are_skipped_unless_asked_for(hf: Callable[[str], HfTokenizer]) -> None:
    tokenizer = JsonTokenizer(hf("llama3"))
    end = tokenizer.token_id("<|end|>")
    assert end is not None
    for skip, shown in ((None, "ok"), (True, "ok"), (False, "<|end|>ok")):
        options = {} if skip is None else {"skip_special_tokens": skip}
        choice = ChoiceDecoder(tokenizer, [end], {}, options, include_stop_str=False)
        assert choice.push([end, *tokenizer.encode("ok")]) == shown


@examples(200)
@given(
    st.lists(st.lists(st.sampled_from(list("ab€".encode())), max_size=3), max_size=7),
    st.lists(st.text("ab€", min_size=1, max_size=3), max_size=2),
    st.integers(0, 6),
    st.sets(st.sampled_from([ord("a"), 0x82]), max_size=1),
    st.booleans(),
)
def test_the_outcome_does_not_depend_on_chunking(
    pushes: list[list[int]], stops: list[str], min_tokens: int, hidden: set[int], include: bool
) -> None:
    def fresh() -> ChoiceDecoder:
        return decoder(stop=stops, min_tokens=min_tokens, stop_token_ids_hidden=hidden, include=include)

    flat = [token_id for ids in pushes for token_id in ids]
    assert run(fresh(), pushes) == run(fresh(), [[i] for i in flat]) == run(fresh(), [flat])


@given(text=st.text(max_size=12), cuts=st.sets(st.integers(0, 40)), stop_at=st.none() | st.integers(0, 255))
def test_the_short_way_of_plain_tokens_shows_and_counts_the_same(
    text: str, cuts: set[int], stop_at: int | None
) -> None:
    """Characters of several tokens, tokens that come together, a stop: whatever the short way refuses goes the long one."""
    conditions: dict[str, Any] = {} if stop_at is None else {"stop_token_ids": [stop_at]}
    choice, expected = decoder(**conditions), decoder(**conditions)
    ids = list(text.encode())
    bounds = [0, *sorted(cut for cut in cuts if 0 < cut < len(ids)), len(ids)]
    pushes = [ids[begin:end] for begin, end in itertools.pairwise(bounds)]
    shown = ""
    for push in pushes:
        pieces = choice.plain_pieces(str.encode)
        if (
            pieces is not None
            and len(push) == 1
            and push[0] not in choice.stop_ids
            and (piece := pieces[push[0]]) is not None
        ):
            shown += piece.decode()
            choice.generated += 1
            continue
        plain = choice.push_plain(push)
        assert plain is None or stop_at not in push
        shown += choice.push(push) if plain is None else plain
    shown += choice.finish()
    assert (shown, choice.finish_reason, choice.stop_reason, choice.generated) == run(expected, pushes)
