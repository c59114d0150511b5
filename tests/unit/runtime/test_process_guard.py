"""What the guard of a process takes for that process's descendants, in tables of processes made up here."""

from __future__ import annotations

import pytest

from dynamo.runtime import process_guard

PARENT, CHILD, GRANDCHILD, OTHER = 4_000_001, 4_000_002, 4_000_003, 4_000_004  # beyond what a kernel gives out

Table = dict[int, tuple[int, str]]


class Kernel:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.table: Table = {PARENT: (1, "t1"), CHILD: (PARENT, "t2"), GRANDCHILD: (CHILD, "t3")}
        self.killed: list[int] = []
        monkeypatch.setattr(process_guard, "_table", lambda: dict(self.table))
        monkeypatch.setattr(process_guard, "_kill", self.kill)

    def kill(self, number: int) -> None:
        self.killed.append(number)
        del self.table[number]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


def guard() -> process_guard._Guard:
    return process_guard._Guard(PARENT, "mark", "0")


def test_a_look_tells_whether_something_has_changed(kernel: Kernel) -> None:
    looking = guard()
    assert [looking.look(), looking.look()] == [True, False]
    del kernel.table[GRANDCHILD]
    assert [looking.look(), looking.look()] == [True, False]


def test_what_is_left_is_killed_and_nothing_that_has_a_number_of_the_dead(kernel: Kernel) -> None:
    looking = guard()
    looking.look()
    kernel.table = {
        PARENT: (1, "t9"),  # another process has the number of the parent by now,
        OTHER: (PARENT, "t9"),  # and a child;
        CHILD: (1, "t9"),  # and yet another has that of a child
        GRANDCHILD: (1, "t3"),
    }
    looking.sweep()
    assert kernel.killed == [GRANDCHILD]
