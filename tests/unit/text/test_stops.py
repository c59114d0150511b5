from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from dynamo.text import StopStrings
from support.cases import each_case
from support.properties import examples


def run(stops: list[str], chunks: list[str], *, include: bool) -> tuple[str, str | None]:
    matcher = StopStrings(stops, include=include)
    shown, found = "", None
    for chunk in chunks:
        text, matched = matcher.push(chunk)
        shown, found = shown + text, found or matched
    return shown + matcher.finish(), found


def reference(stops: list[str], text: str, *, include: bool) -> tuple[str, str | None]:
    """Character by character: the first prefix of the text that ends with a stop string; the longest such one."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def chunkings(text: str) -> list[list[str]]:
    found = []
    for cuts in itertools.product([False, True], repeat=max(0, len(text) - 1)):
        chunks, start = [], 0
        for at, cut in enumerate(cuts, 1):
            if cut:
                chunks.append(text[start:at])
                start = at
        found.append([*chunks, text[start:]])
    return found


@each_case("include", [False, True])
@each_case("stops", [["ab"], ["aab", "b"], ["abc", "bc"], ["aba", "bab", "aa"], ["bb", "bbb"], ["abab"]])
def test_every_chunking_of_every_short_text_stops_alike(stops: list[str], include: bool) -> None:
    for length in range(7):
        for letters in (
            itertools.product("abc", repeat=length) if length < 5 else itertools.product("ab", repeat=length)
        ):
            text = "".join(letters)
            expected = reference(stops, text, include=include)
            for chunks in chunkings(text):
                assert run(stops, chunks, include=include) == expected, chunks


@examples(300)
@given(
    st.lists(st.text("aab\n", max_size=6), max_size=5),
    st.lists(st.text("aaab\nx", max_size=5), max_size=10),
    st.booleans(),
)
def test_random_stops_and_texts_agree_with_the_definition(stops: list[str], chunks: list[str], include: bool) -> None:
    assert run(stops, chunks, include=include) == reference(stops, "".join(chunks), include=include)


def test_the_start_of_a_stop_string_is_held_back_until_it_is_decided() -> None:
    matcher = StopStrings(["STOP"], include=False)
    assert [matcher.push(text) for text in ("a", "b", "cS", "T", "x", "STO")] == [
        ("a", None),
        ("b", None),
        ("c", None),
        ("", None),
        ("STx", None),
        ("", None),
    ]
    assert (matcher.finish(), matcher.finish()) == ("STO", "")


def test_nothing_is_shown_behind_a_match() -> None:
    matcher = StopStrings(["."], include=True)
    assert matcher.push("end. More") == ("end.", ".")
    assert matcher.push("again.") == ("", None)
    assert matcher.finish() == ""


def test_no_stops_pass_everything() -> None:
    matcher = StopStrings(["", ""], include=False)
    assert matcher.push("text") == ("text", None)


def test_a_very_long_stop_string_costs_no_more_than_the_text() -> None:
    matcher = StopStrings(["a" * 1_000_000 + "b"], include=False)
    shown = "".join(matcher.push("a")[0] for _ in range(2000))
    assert shown + matcher.finish() == "a" * 2000
