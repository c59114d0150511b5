from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo.cli.inspect import figures
from support.cases import each_case
from support.properties import examples


@each_case(
    ("made", "shown"),
    [
        (figures.age(None), "-"),
        (figures.age(0.4), "0s"),
        (figures.age(41), "41s"),
        (figures.age(90), "90s"),
        (figures.age(150), "2m"),
        (figures.age(7300), "2h"),
        (figures.age(3 * 86_400), "3d"),
        (figures.age(-5), "0s"),
        (figures.exact(0.0002), "0.2ms"),
        (figures.exact(0.084), "84ms"),
        (figures.exact(0.9999), "1.00s"),
        (figures.exact(1.61), "1.61s"),
        (figures.exact(36.4), "36.4s"),
        (figures.exact(400), "7m"),
        (figures.exact(None), "-"),
        (figures.count(6210), "6,210"),
        (figures.count(1_234_567), "1.2M"),
        (figures.count(None), "-"),
        (figures.short(4096), "4k"),
        (figures.short(131_072), "128k"),
        (figures.short(1000), "1,000"),
        (figures.per_second(0), "0"),
        (figures.per_second(47.12), "47.1"),
        (figures.per_second(2110.4), "2,110"),
        (figures.percent(0.0002), "0.02"),
        (figures.percent(0.61), "61"),
        (figures.percent(None), "-"),
        (figures.bytes_of(212 << 20), "212 MiB"),
        (figures.bytes_of(900), "900 B"),
        (figures.bytes_of(None), "-"),
        (figures.bar(0.84, 12), "███████░  84"),
        (figures.bar(None, 8), "       -"),
        (figures.bar(1.7, 12), "████████ 170"),
        (figures.bar(0.5, 5), "   50"),
        (figures.sparkline([1, None, 8], 5), "  ▂·█"),
        (figures.sparkline([0, 0], 2), "▁▁"),
        (figures.sparkline([], 3), "   "),
        (figures.clock(None), "-"),
        (figures.clock(10**40), "-"),
    ],
)
def test_a_figure(made: str, shown: str) -> None:
    assert made == shown


@examples(300)
@given(st.lists(st.none() | st.floats(0, 1e12), max_size=80), st.integers(1, 60))
def test_a_sparkline_is_as_wide_as_it_was_asked_to_be(values: list[float | None], width: int) -> None:
    assert len(figures.sparkline(values, width)) == width


@examples(300)
@given(st.floats(0, 1.5), st.integers(4, 40))
def test_a_bar_is_as_wide_as_it_was_asked_to_be(share: float, width: int) -> None:
    assert len(figures.bar(share, width)) == width
