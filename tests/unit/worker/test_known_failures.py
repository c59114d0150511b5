"""The log of an engine that died: its death whole, once, and a line for each request after it."""

from __future__ import annotations

import logging
import traceback

import pytest

from dynamo.runtime.calls.context import Context
from dynamo.runtime.observe.known_failures import LOGGED, MAX_KINDS, WHOLE_AGAIN_SECONDS, KnownFailures
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


def test_new_exceptions_of_one_kind_are_a_traceback_and_then_a_counted_line_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for number in range(REQUESTS):
        fail(RuntimeError(f"request {number} cannot run"))
    assert whole(caplog) == [True] + [False] * (REQUESTS - 1)
    last = caplog.records[-1].getMessage()
    assert "RuntimeError: request 49 cannot run (logged before with its traceback; number 50 of its kind)" in last


def test_failures_of_another_class_or_from_another_line_are_each_whole(caplog: pytest.LogCaptureFixture) -> None:
    fail(RuntimeError("of this line"))
    fail(ValueError("of another class"))
    try:
        raise RuntimeError("of another line")
    except RuntimeError as error:
        log_failure(Context(), error, wrap_error(error))
    for kind in (KeyError, IndexError):
        try:
            raise kind
        except LookupError as cause:
            try:
                raise RuntimeError("from another cause") from cause
            except RuntimeError as error:
                log_failure(Context(), error, wrap_error(error))
    assert whole(caplog) == [True] * 5


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as found:
        return found


def test_a_kind_is_whole_again_after_a_while() -> None:
    now = [0.0]
    known = KnownFailures(lambda: now[0])
    seen = []
    for at in (0.0, 1.0, WHOLE_AGAIN_SECONDS - 1, WHOLE_AGAIN_SECONDS, WHOLE_AGAIN_SECONDS + 1):
        now[0] = at
        seen.append(known.sighting(raised(RuntimeError())).whole is not None)
    assert seen == [True, False, False, True, False]


def test_the_kinds_that_are_remembered_are_bounded_and_those_seen_last_stay() -> None:
    known = KnownFailures(lambda: 0.0)
    kinds = [type(f"Kind{number}", (Exception,), {}) for number in range(2 * MAX_KINDS)]
    for kind in kinds:
        assert known.sighting(raised(kind())).whole is not None
        assert known.sighting(raised(kinds[0]())).whole is None or kind is kinds[0]
    assert len(known._kinds) == MAX_KINDS
    assert known.sighting(raised(kinds[1]())).whole is not None


def test_a_chain_of_causes_that_leads_back_to_itself_ends() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert LOGGED.sighting(first).whole is first
    assert LOGGED.sighting(second).whole is None
