from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from dynamo.cli.inspect.printable import fit, printable, width_of
from support.cases import each_case
from support.properties import examples

HOSTILE = st.text(
    st.one_of(
        st.characters(codec="utf-8"),
        st.sampled_from(
            "\x1b[]\x07\x9b\n\r\t\x00\x7f\u202e\u2066\u200b\u200d\ufeff\u0301\u20dd\ufe0f\ufdfd\u3164\u2028漢字👩"
        ),
    ),
    max_size=60,
)


@examples(1000)
@given(HOSTILE)
def test_nothing_is_left_that_steers_hides_or_breaks_a_line(text: str) -> None:
    shown = printable(text)
    kinds = {unicodedata.category(character) for character in shown}
    assert not kinds & {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Me"}
    assert shown.splitlines() in ([], [shown])
    assert printable(shown) == shown


@examples(1000)
@given(HOSTILE, st.integers(0, 40), st.booleans(), st.booleans())
def test_a_fitted_text_covers_exactly_its_cells(text: str, width: int, right: bool, tail: bool) -> None:
    assert width_of(fit(printable(text), width, right=right, tail=tail)) == width


@each_case(
    ("text", "shown"),
    [
        ("demo-7b", "demo-7b"),
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\x9b31m", "\\x9b31m"),
        ("safe\u202egnp.exe", "safe\\u202egnp.exe"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("Zoe\u0308", "Zoë"),
        ("हिन्दी", "हिन्दी"),
        ("e" + "\u0301" * 3, "é\u0301\u0301"),
        ("e" + "\u0301" * 5, "é\u0301\u0301\\u0301\\u0301"),
        ("\u0301first", "\\u0301first"),
        ("\ufdfd", "\\ufdfd"),
        ("\u3164", "\\u3164"),
        ("\U000e0041", "\\U000e0041"),
        ("no\u00a0break", "no break"),
        ("[bold]markup[/]", "[bold]markup[/]"),
    ],
)
def test_what_is_shown(text: str, shown: str) -> None:
    assert printable(text) == shown


@each_case(
    ("width", "tail", "shown"),
    [
        (8, False, "abcdef  "),
        (6, False, "abcdef"),
        (4, False, "abc…"),
        (4, True, "…def"),
        (1, False, "…"),
        (0, False, ""),
    ],
)
def test_a_long_text_is_cut_with_a_mark(width: int, tail: bool, shown: str) -> None:
    assert fit("abcdef", width, tail=tail) == shown


def test_a_wide_character_is_not_cut_in_half() -> None:
    assert fit("漢字漢字", 6) == "漢字… "
