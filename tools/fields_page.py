"""Write the tables of docs/fields.md from the types of the contract: `make docs`.

The meaning of a field is the comment behind it in the source, so that the page and the code cannot part.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from pages import write_page

from dynamo.contract import chunks
from dynamo.protocol.worker_request import OutputFields, PlannedRequest, SamplingFields, StopFields

PAGE: Final = Path(__file__).parent.parent / "docs" / "fields.md"
SOURCE: Final = Path(chunks.__file__)

_TABLE: Final = re.compile(r"(<!-- table: (\w+) -->\n)(?:\|.*\n)*")

ALWAYS: Final[Mapping[str, frozenset[str]]] = {
    "GenerateRequest": frozenset(PlannedRequest().for_prompt([])),
    "StopConditions": frozenset(StopFields.__struct_fields__),
    "SamplingOptions": frozenset(SamplingFields.__struct_fields__),
    "OutputOptions": frozenset(OutputFields.__struct_fields__),
}
"""What a frontend writes into every request, if only as None; other fields are there when they say something."""
REQUEST: Final = (*ALWAYS, "GuidedDecoding", "Routing")
CHUNK: Final = ("GenerateChunk", "CompletionUsage", "TopLogprob")


def fields_of(name: str) -> Iterator[tuple[str, str, str]]:
    """Walk a type's fields: name, type as written, and the comment behind it. Raises ValueError for one without."""
    text = SOURCE.read_text()
    lines = text.splitlines()
    found = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            _, mark, comment = lines[node.lineno - 1][node.end_col_offset :].partition("  # ")
            if not mark:
                raise ValueError(
                    f"{SOURCE.name}:{node.lineno}: {name}.{node.target.id} has no comment that explains it"
                )
            yield node.target.id, ast.unparse(node.annotation), comment


def table(name: str) -> str:
    """Return the rows of one type, with their head."""
    is_request = name in REQUEST
    lines = [f"| Field | Type | {'From a frontend' if is_request else 'Required'} | Meaning |", "|---|---|---|---|"]
    for field, annotation, comment in fields_of(name):
        is_required = annotation.startswith("Required[")
        kind = annotation.removeprefix("Required[").removesuffix("]") if is_required else annotation
        if is_request:
            presence = "always" if field in ALWAYS.get(name, ()) else "where it applies"
        else:
            presence = "yes" if is_required else ""
        cells = (f"`{field}`", f"`{kind.replace(' | ', ' or ')}`", presence, comment.replace("|", "or"))
        lines.append("|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|")
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """Return the page with its tables as the code has them. Raises ValueError when a table has no place."""
    found = [match[2] for match in _TABLE.finditer(page)]
    if sorted(found) != sorted((*REQUEST, *CHUNK)):
        raise ValueError(f"the page has tables {sorted(found)}, the code {sorted((*REQUEST, *CHUNK))}")
    return _TABLE.sub(lambda match: match[1] + table(match[2]), page)


if __name__ == "__main__":
    sys.exit(write_page(PAGE, written))
