"""The clock for what expires: jumps of the wall clock are logged, and followed only when they last."""

import logging

import pytest

from dynamo.runtime.base.steady_wall import DRIFT, HOLD_SECONDS, JUMP_SECONDS, SteadyWall

DAY = 86_400.0


class Clocks:
    """A wall clock that can be set, beside a monotonic one."""

    def __init__(self) -> None:
        self.at, self.offset = 50.0, 1_800_000_000.0
        self.steady = SteadyWall(lambda: self.at + self.offset, lambda: self.at)

    def true_time(self) -> float:
        return self.at + 1_800_000_000.0


def test_a_jump_that_comes_back_is_never_seen(caplog: pytest.LogCaptureFixture) -> None:
    clocks = Clocks()
    for jump in (2 * DAY, -2 * DAY, 400 * DAY):
        caplog.clear()
        clocks.offset += jump
        for _ in range(int(HOLD_SECONDS) - 1):
            clocks.at += 1.0
            assert clocks.steady() == clocks.true_time()
        clocks.offset -= jump
        assert clocks.steady() == clocks.true_time()
        jumped, back = [record.getMessage() for record in caplog.records]
        assert f"jumped by {jump:+.0f} s" in jumped
        assert "is back" in back
        assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_a_jump_that_lasts_is_followed(caplog: pytest.LogCaptureFixture) -> None:
    clocks = Clocks()
    clocks.offset += DAY
    assert clocks.steady() == clocks.true_time()
    clocks.at += HOLD_SECONDS
    assert clocks.steady() == clocks.true_time() + DAY
    clocks.at += 1.0
    assert clocks.steady() == clocks.true_time() + DAY
    assert ["jumped" in record.getMessage() for record in caplog.records] == [True, False]


def test_a_second_jump_begins_the_wait_again() -> None:
    clocks = Clocks()
    clocks.offset += DAY
    clocks.steady()
    clocks.at += HOLD_SECONDS - 1.0
    clocks.offset += DAY
    assert clocks.steady() == clocks.true_time()
    clocks.at += 2.0
    assert clocks.steady() == clocks.true_time()
    clocks.at += HOLD_SECONDS
    assert clocks.steady() == clocks.true_time() + 2 * DAY


def test_small_corrections_and_drift_are_followed_at_once(caplog: pytest.LogCaptureFixture) -> None:
    clocks = Clocks()
    clocks.offset += JUMP_SECONDS - 0.5
    assert clocks.steady() == pytest.approx(clocks.at + clocks.offset)
    clocks.at += DAY  # without a call in between
    clocks.offset += DAY * DRIFT / 2
    assert clocks.steady() == pytest.approx(clocks.at + clocks.offset)
    assert not caplog.records
