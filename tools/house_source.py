"""What `make house` measures: the source files of the package, and a figure with the places that make it up."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from wings import name_in_package, source_files, wing_of

__all__ = ["Figure", "Finding", "Module", "attributes_of", "imports_of", "modules", "share"]

LOG_METHODS: Final = frozenset({"debug", "info", "warning", "error", "exception", "critical", "log"})


@dataclass(frozen=True)
class Finding:
    """One place that is above a bar."""

    where: str
    text: str


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    name: str
    value: float
    bar: str
    findings: tuple[Finding, ...] = ()


class Module:
    """One source file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = name_in_package(path)
        self.wing = wing_of(path)
        self.text = path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def room(self) -> str:
        """The first folder, or the module at the top."""
        return self.name.split("/", maxsplit=1)[0].removesuffix(".py")

    @property
    def dotted(self) -> str:
        """The import path: `dynamo.runtime.client`."""
        return "dynamo." + self.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def folder(self) -> str:
        """The package that the file lies in: `dynamo.runtime`."""
        return self.dotted if self.path.name == "__init__.py" else self.dotted.rpartition(".")[0]

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in self.nodes if isinstance(node, ast.ClassDef))

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        return (node for node in self.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))

    def prose(self) -> Iterator[tuple[int, str]]:
        """Yield the line and the text of each comment, docstring and log message."""
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
        for node in self.nodes:
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield node.lineno, node.value.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOG_METHODS:
                for part in node.args[:2]:
                    for inner in ast.walk(part):
                        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                            yield inner.lineno, inner.value


def modules() -> list[Module]:
    return [Module(path) for path in source_files() if not re.search(r"/template\w*/", f"/{name_in_package(path)}")]


def imports_of(module: Module, known: Iterable[str]) -> set[str]:
    """Return the modules among `known` that a module imports; `from package import module` names the second one."""
    names = known if isinstance(known, set | frozenset | dict) else set(known)
    found = set()
    for node in module.nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            below = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= below & set(names)
            if node.module in names and not below <= set(names):
                found.add(node.module)
    return found


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Return the names that instances hold: assigned on `self`, or in `__slots__`. Records declare theirs, and count not."""
    names: set[str] = set()
    for inner in ast.walk(node):
        if (
            isinstance(inner, ast.Attribute)
            and isinstance(inner.ctx, ast.Store)
            and isinstance(inner.value, ast.Name)
            and inner.value.id == "self"
        ):
            names.add(inner.attr)
        if isinstance(inner, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "__slots__" for t in inner.targets
        ):
            names |= {
                c.value for c in ast.walk(inner.value) if isinstance(c, ast.Constant) and isinstance(c.value, str)
            }
    return names


def share(part: int, whole: int) -> float:
    """Return a share in percent, with one digit."""
    return round(100 * part / max(whole, 1), 1)
