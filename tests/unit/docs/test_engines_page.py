"""The matrix of docs/engines.md is what the engines read and declare."""

from __future__ import annotations

from typing import Any

import engines_page
import pytest

from dynamo.errors import InvalidArgument
from dynamo.reference.engine import ReferenceEngine


def test_the_matrix_is_that_of_the_engines() -> None:
    page = engines_page.PAGE.read_text()
    assert engines_page.written(page) == page, "docs/engines.md is not current: make docs"


def test_a_page_without_a_place_for_the_matrix_is_an_error() -> None:
    with pytest.raises(ValueError, match="no place for the matrix"):
        engines_page.written("# Engines\n")


def fields(request: Any) -> set[str]:
    """The names in a part of a request, those of groups and of what an option holds included."""
    if not isinstance(request, dict):
        return set()
    return set(request).union(*(fields(value) for value in request.values()))


@pytest.mark.parametrize("engine", engines_page.ENGINES, ids=lambda engine: engine.name)
def test_what_an_engine_refuses_it_refuses_by_name(engine: engines_page.Engine) -> None:
    refused = [request for request in engines_page.REQUESTS.values() if not engines_page.accepts(engine, request)]
    assert 0 < len(refused) < len(engines_page.REQUESTS)
    for request in refused:
        with pytest.raises(InvalidArgument) as caught:
            engine.read({"token_ids": [1, 2, 3], **request})
        assert any(name in str(caught.value) for name in fields(request) - {"sampling_options"}), str(caught.value)


class Late(ReferenceEngine):
    started: set[str]

    def supported_controls(self) -> set[str]:
        return self.started


class LateAndEmpty(ReferenceEngine):
    def supported_controls(self) -> set[str]:
        return set()

    def supported_updates(self) -> set[str]:
        return set()


@pytest.mark.parametrize("kind", [Late, LateAndEmpty])
def test_controls_that_only_a_started_engine_declares_are_not_called_absent(kind: type[ReferenceEngine]) -> None:
    late = engines_page.Engine("late", kind, lambda request: request)
    assert engines_page.operations(late) is None
    assert engines_page._declares(None, "sleep") == "see its section"
