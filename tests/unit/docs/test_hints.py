"""Sentences that name a flag of the frontend: `dynamo serve` has not all of them, and the variable works with both."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from wings import name_in_package, source_files

from dynamo.cli import serve
from dynamo.frontend.args import build_parser

FLAG: Final = re.compile(r"--[a-z][a-z0-9-]+")
ROOMS: Final = ("frontend", "protocol", "text", "router", "placement")
# Where flags are defined or described, and no request or log line speaks.
TABLES: Final = ("settings", "args.py", "native_flags.py", "__main__.py")


def sentences(path: Path) -> Iterator[str]:
    """Yield each text of a module that is no docstring; an f-string without its values. None where no flag is named."""
    source = path.read_text()
    if not FLAG.search(source):
        return  # parsing takes its time
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings | inner:
            yield node.value


def test_a_hint_with_a_flag_that_dynamo_serve_lacks_names_its_variable() -> None:
    served = set(serve.build_parser({})._option_string_actions)
    lacking = {flag for flag in build_parser({})._option_string_actions if flag.startswith("--")} - served
    wrong = []
    for room in ROOMS:
        for path in source_files(room):
            if any(part.startswith(TABLES) for part in path.parts[-2:]):
                continue
            for text in sentences(path):
                named = [flag for flag in FLAG.findall(text) if flag in lacking]
                if named and " " in text and "DYN_" not in text:  # a flag alone is passed to what reads it
                    wrong.append(f"{name_in_package(path)}: {', '.join(named)}: {text[:100]}")
    assert wrong == []
