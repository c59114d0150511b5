"""The load book: a booking is released once, by whichever path comes first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo.placement import Booking, LoadBook


def test_a_second_release_changes_nothing() -> None:
    book = LoadBook()
    first, second = book.book(1), book.book(1)
    assert (first.release(), first.release()) == (True, False)
    assert (book.in_flight(1), book.total) == (1, 1)
    assert second.release()
    assert (book.in_flight(1), book.total) == (0, 0)


@given(st.lists(st.tuples(st.sampled_from(["book", "release"]), st.integers(1, 3)), max_size=60))
def test_the_counts_are_those_of_the_open_bookings(steps: list[tuple[str, int]]) -> None:
    book = LoadBook()
    made: list[tuple[int, Booking]] = []
    open_ones: list[tuple[int, Booking]] = []
    for step, number in steps:
        if step == "book":
            made.append((number, book.book(number)))
            open_ones.append(made[-1])
        elif made:
            chosen = made[number % len(made)]
            assert chosen[1].release() is (chosen in open_ones)
            if chosen in open_ones:
                open_ones.remove(chosen)
        for each in (1, 2, 3):
            assert book.in_flight(each) == sum(known == each for known, _ in open_ones)
