"""The page on lower-level workers lists every parameter of the functions that it describes, as their signatures have them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator

import pytest

from dynamo.llm import register_model
from dynamo.runtime import DistributedRuntime, Endpoint
from support.doc_pages import READ, code

PAGE = READ["lower-level-workers.md"].path.read_text()
DESCRIBED: dict[str, Callable[..., object]] = {
    "register_model": register_model,
    "Endpoint.serve_endpoint": Endpoint.serve_endpoint,
    "Endpoint.serve_bidirectional_endpoint": Endpoint.serve_bidirectional_endpoint,
    "DistributedRuntime.__init__": DistributedRuntime.__init__,
}


def table_rows(name: str) -> Iterator[list[str]]:
    found = re.search(rf"<!-- signature: {re.escape(name)} -->\n((?:\|.*\n)+)", PAGE)
    assert found is not None, f"the page has no table of {name}"
    for line in found[1].splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def expected_rows(function: Callable[..., object]) -> Iterator[tuple[str, str, str, bool]]:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        has_default = parameter.default is not parameter.empty
        yield (
            parameter.name,
            str(parameter.annotation).replace(" | ", " or "),
            repr(parameter.default) if has_default else "required",
            parameter.kind is parameter.KEYWORD_ONLY,
        )


@pytest.mark.parametrize("name", DESCRIBED)
def test_every_parameter_has_its_row_with_its_type_and_default(name: str) -> None:
    listed = [
        (code(row[0])[0], code(row[1])[0], row[2].strip("`"), row[3].startswith("Keyword-only."))
        for row in table_rows(name)
    ]
    assert listed == list(expected_rows(DESCRIBED[name]))


def test_the_page_has_no_table_of_a_function_that_is_not_compared() -> None:
    assert set(re.findall(r"<!-- signature: (.+) -->", PAGE)) == set(DESCRIBED)
