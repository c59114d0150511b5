"""The log of an engine that died: its death whole, once, and a line for each request after it."""

from __future__ import annotations

import logging
import traceback

import pytest

from dynamo.runtime.calls.context import Context
from dynamo.runtime.observe.known_failures import first_sight
from dynamo.worker.engine_failures import log_failure, wrap_error

REQUESTS = 50


def fail(error: Exception) -> None:
    """Log what a request of the engine raises."""
    try:
        raise error
    except Exception as raised:
        log_failure(Context(), raised, wrap_error(raised))


def whole(caplog: pytest.LogCaptureFixture) -> list[bool]:
    return [bool(record.exc_info) for record in caplog.records]


def test_an_engine_that_raises_the_same_exception_is_a_traceback_and_then_a_line_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    death = RuntimeError("the device is lost")
    for _ in range(REQUESTS):
        fail(death)
    assert whole(caplog) == [True] + [False] * (REQUESTS - 1)
    assert all("RuntimeError: the device is lost" in record.getMessage() for record in caplog.records[1:])
    assert all(record.levelno == logging.ERROR for record in caplog.records)
    assert len(traceback.extract_tb(death.__traceback__)) <= 1  # it does not grow with the requests


def test_new_exceptions_from_the_same_death_are_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    death = RuntimeError("the device is lost")
    for number in range(REQUESTS):
        try:
            raise death
        except RuntimeError:
            try:
                raise ValueError(f"request {number} cannot run")  # its context is the death
            except ValueError as error:
                fail(error)
    assert whole(caplog) == [True] + [False] * (REQUESTS - 1)
    assert "ValueError: request 49 cannot run" in caplog.text


def test_failures_of_their_own_are_each_whole(caplog: pytest.LogCaptureFixture) -> None:
    for number in range(3):
        fail(RuntimeError(f"request {number}"))
    assert whole(caplog) == [True] * 3


def test_a_chain_of_causes_that_leads_back_to_itself_ends() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert first_sight(first) is first
    assert first_sight(second) is None
