"""The columns of the inspector: they show members that there are, and the page and the terminal both know every form."""

from __future__ import annotations

import re
from importlib.resources import files

from dynamo.cli.inspect.store import LISTS
from dynamo.protocol.inspector.columns import COLUMNS, Form
from support.cases import each_case

OWN = {Form.OWN_TEXT, Form.OWN_FIGURE}
PAGE = files("dynamo.frontend.parts.inspector").joinpath("static/inspect")


@each_case("view", list(COLUMNS))
def test_a_column_shows_members_of_its_view(view: str) -> None:
    known = set(LISTS[view].__struct_fields__)
    assert [c.id for c in COLUMNS[view] if c.form not in OWN and not set(c.members) <= known] == []
    assert len({c.id for c in COLUMNS[view]}) == len(COLUMNS[view])


@each_case("view", [view for view, columns in COLUMNS.items() if any(column.page for column in columns)])
def test_the_page_draws_each_column_that_has_a_form_of_its_own(view: str) -> None:
    own = re.findall(r"^  (\w+): \{\s*text", PAGE.joinpath(f"views/{view}.js").read_text(), re.MULTILINE)
    assert {c.id for c in COLUMNS[view] if c.page is not None and c.form in OWN} <= set(own)


def test_the_page_has_a_writer_for_each_form() -> None:
    script = PAGE.joinpath("table.js").read_text()
    writers = script.partition("const WRITERS = {")[2].partition("}")[0]
    known = set(re.findall(r"^  (\w+)[:,]", writers, re.MULTILINE)) | set(re.findall(r'"(\w+)"', script))
    assert {form.value for form in Form if form not in OWN} <= known
