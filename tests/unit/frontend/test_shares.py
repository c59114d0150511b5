"""A bound has a share for each owner: no owner takes what the others need, and one that is alone has all of it."""

from __future__ import annotations

import pytest

from dynamo.frontend.base.shares import HELD_LONG, HELD_SHORTLY, SharedBound, Shares, largest_owner


def fill(bound: SharedBound, *owners: str) -> dict[str, int]:
    """Let owners take in turns until none of them can; return what each has."""
    waiting = list(owners)
    while waiting:
        waiting = [owner for owner in waiting if bound.take(owner)]
    return {owner: bound.of(owner) for owner in owners}


def shared(limit: int, weight: int | None = HELD_LONG, *, owners: int = 2) -> SharedBound:
    shares = Shares()
    shares.know_owners(lambda: owners)
    return shares.bound("things", limit, weight=weight)


@pytest.mark.parametrize(
    ("weight", "alone", "of_two", "of_four"), [(HELD_LONG, 128, 85, 51), (HELD_SHORTLY, 224, 119, 61)]
)
def test_greedy_owners_leave_room_for_the_next_one(weight: int, alone: int, of_two: int, of_four: int) -> None:
    assert fill(shared(256, weight), "a") == {"a": alone}
    assert set(fill(shared(256, weight), "a", "b").values()) <= {of_two, of_two + 1}
    bound = shared(256, weight)
    greedy = fill(bound, *"abcd")
    assert all(abs(count - of_four) <= 1 for count in greedy.values()), greedy
    assert bound.take("quiet")


@pytest.mark.parametrize("weight", [HELD_LONG, HELD_SHORTLY])
def test_an_owner_that_is_alone_has_all_of_it(weight: int) -> None:
    assert fill(shared(256, weight, owners=1), "a") == {"a": 256}
    assert fill(SharedBound(256, weight), "") == {"": 256}


def test_an_owner_with_nothing_gets_the_first_piece_also_of_a_small_bound() -> None:
    for limit in (1, 2, 3):
        bound = shared(limit)
        assert [bound.take(owner) for owner in "abcd"] == [number < limit for number in range(4)]


def test_owners_that_take_turns_are_only_counted() -> None:
    assert fill(shared(10, None), "a") == {"a": 10}


def test_what_is_given_back_leaves_no_owner_behind() -> None:
    bound = shared(10, None)
    assert bound.take("a", 3)
    assert bound.take("b")
    bound.give_back("a", 2)
    assert (bound.of("a"), bound.used) == (1, 2)
    bound.give_back("a")
    bound.give_back("b")
    assert (bound.used, bound._used) == (0, {})


def test_room_is_made_where_there_is_most() -> None:
    assert largest_owner({"a": 1, "b": 3, "c": 2}) == "b"


async def test_the_report_names_each_bound_and_its_owners() -> None:
    shares = Shares()
    shares.know_owners(lambda: 2)
    bound = shares.bound("batches", 8)
    for owner in ("project a", "project b", "project b"):
        assert bound.take(owner)

    async def stored() -> dict[str, int]:
        return {"project c": 7}

    shares.show("files", None, 100, stored)
    batches, files = await shares.report()
    assert (batches.name, batches.limit, batches.owner_limit, batches.used) == ("batches", 8, 4, 3)
    assert [(use.owner, use.used) for use in batches.owners] == [("project b", 2), ("project a", 1)]
    assert (files.limit, files.owner_limit, files.used, files.unit) == (None, 100, 7, "bytes")
