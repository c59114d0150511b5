"""The error tree: what a kind means, how it travels, what an engine may assert."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo.errors import (
    HTTP_ERROR_MESSAGE_LIMIT,
    MAX_CAUSES,
    RULES,
    DynamoException,
    EngineShutdown,
    HttpError,
    InvalidArgument,
    RouterQueueLimitExceeded,
    SelectionServiceError,
    Unknown,
    chain,
    describe,
    kind_of,
    revive,
    rule_of,
    text_of,
)
from support.cases import each_case

PLAIN = [cls for cls in RULES if cls not in (RouterQueueLimitExceeded, SelectionServiceError)]


@each_case("code", [True, False, -1, 600, 404.0, "404", None])
def test_an_http_error_has_a_status(code: Any) -> None:
    with pytest.raises(ValueError, match="code must be an int"):
        HttpError(code, "text")


@pytest.mark.parametrize("message", [None, b"bytes", 7])
def test_an_http_error_has_a_text(message: Any) -> None:
    with pytest.raises(ValueError, match="message must be a str"):
        HttpError(400, message)


@pytest.mark.parametrize("length", [0, HTTP_ERROR_MESSAGE_LIMIT - 1, HTTP_ERROR_MESSAGE_LIMIT])
def test_a_text_within_the_limit_stays_whole(length: int) -> None:
    error = HttpError(599, "x" * length)
    assert (error.code, error.message, str(error)) == (599, "x" * length, "HTTP 599: " + "x" * length)


def test_a_longer_text_is_cut_at_8192_characters() -> None:
    message = HttpError(0, "x" * 8193).message
    assert message == "x" * 8189 + "..."


def test_a_subclass_means_what_its_parent_means_and_a_bare_one_is_unknown() -> None:
    class TooLong(InvalidArgument):
        pass

    assert rule_of(TooLong()) is RULES[InvalidArgument]
    assert text_of(TooLong("x")) == "InvalidArgument: x"
    for error in (DynamoException("x"), ValueError("x"), HttpError(404, "x")):
        assert kind_of(error) is Unknown


@each_case("kind", PLAIN, ids=lambda cls: cls.__name__)
def test_every_kind_survives_the_wire_with_its_causes(kind: type[DynamoException]) -> None:
    error = kind("outer")
    error.__cause__ = EngineShutdown("middle")
    error.__cause__.__cause__ = KeyError("inner")
    revived = revive(describe(error))
    assert [type(each) for each in chain(revived)] == [kind, EngineShutdown, Unknown]
    assert [str(each) for each in chain(revived)] == ["outer", "middle", "KeyError: 'inner'"]


def test_a_chain_without_end_is_cut() -> None:
    first, second = Unknown("a"), Unknown("b")
    first.__cause__, second.__cause__ = second, first
    assert len(chain(first)) == MAX_CAUSES + 1
    assert len(chain(revive(describe(first)))) == MAX_CAUSES + 1


@each_case("record", [None, 7, [], {}, {"error_type": {}}, {"error_type": 3, "message": None}])
def test_a_record_of_any_shape_is_some_error(record: Any) -> None:
    assert type(revive(record)) is Unknown


def test_what_was_not_written_for_clients_stays_private() -> None:
    error = InvalidArgument("internal")
    error.public = False
    revived = revive(describe(error))
    assert isinstance(revived, InvalidArgument)
    assert not revived.public
