"""Figures of the house as a whole: sizes, shares and circles, so that nothing can sit just below a bar."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from house_source import Figure, Finding, Module, attributes_of, imports_of, share
from wings import ROOT, WINGS

__all__ = [
    "any_inside",
    "classes_near_the_bar",
    "folders_in_circles",
    "hidden_members",
    "ignored_types",
    "large_class_share",
    "lines_of_source",
    "lines_of_tests",
    "lines_of_wing",
    "long_file_share",
    "loops_that_choose",
    "modules_with_one_user",
    "person_words",
    "rings",
    "side_by_side",
]

NEAR_THE_BAR: Final = range(10, 13)  # attributes of a class; the bar is 12
LONG_FILE_LINES: Final = 400
EDGES: Final = frozenset({"contract", "protocol"})  # what an engine author and a client write has any type
CHOOSING: Final = frozenset({"choose", "_choose", "select", "_select", "place"})

PERSON_WORDS: Final = re.compile(
    r"""\b(?:who|whom|whoever|somebody|someone|nobody|anybody|anyone|everybody|everyone
    |say|says|said|saying|tell|tells|told|telling|ask|asks|asked|asking|hear|hears|heard|hearing
    |want|wants|wanted|wanting|forgive|forgives|forgiven|blame|blames|blamed
    |look|looks|looked|looking)\b(?![ ]up\b)""",
    re.IGNORECASE | re.VERBOSE,
)
"""Words for persons. Users, operators and authors are persons; processes, workers and requests are none."""


def lines_of_wing(wing: str, bar: str, house: Iterable[Module]) -> Figure:
    """Count the lines of one wing."""
    sizes: Counter[str] = Counter()
    for module in house:
        if module.wing == wing:
            sizes[module.room] += module.lines
    found = tuple(Finding(room, f"{lines} lines") for room, lines in sizes.most_common())
    return Figure(f"lines of {wing}", sizes.total(), bar, found)


def lines_of_source(house: Iterable[Module]) -> Figure:
    """Count the lines of all wings."""
    sizes = Counter(dict.fromkeys(WINGS, 0))
    for module in house:
        sizes[module.wing] += module.lines
    return Figure("lines of src", sizes.total(), "<= 125000", tuple(Finding(w, f"{n} lines") for w, n in sizes.items()))


def ignored_types(house: Iterable[Module]) -> Figure:
    """Count the lines of the tests whose types mypy is told not to check."""
    found = tuple(
        Finding(f"{path.relative_to(ROOT)}:{number}", line.strip()[:100])
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "# type: ignore" in line
    )
    return Figure("ignored types in tests", len(found), "-", found)


def lines_of_tests(house: Iterable[Module]) -> Figure:
    """Count the lines of the tests."""
    sizes: Counter[str] = Counter()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        sizes["/".join(path.relative_to(ROOT).parts[:3])] += path.read_text().count("\n")
    found = tuple(Finding(folder, f"{lines} lines") for folder, lines in sizes.most_common())
    return Figure("lines of tests", sizes.total(), "-", found)


def large_class_share(house: Iterable[Module]) -> Figure:
    """Compute the share of classes with more than 9 attributes."""
    sizes = [_size(module, node) for module in house for node in module.classes()]
    large = [finding for count, finding in sizes if count > 9]
    return Figure("% of classes with more than 9 attributes", share(len(large), len(sizes)), "-", tuple(large))


def classes_near_the_bar(house: Iterable[Module]) -> Figure:
    """Count the classes with 10 to 12 attributes."""
    sizes = [_size(module, node) for module in house for node in module.classes()]
    near = tuple(finding for count, finding in sizes if count in NEAR_THE_BAR)
    return Figure("classes with 10 to 12 attributes", len(near), "<= 40", near)


def _size(module: Module, node: ast.ClassDef) -> tuple[int, Finding]:
    count = len(attributes_of(node))
    return count, Finding(f"{module.name}:{node.lineno}", f"{node.name}: {count} attributes")


def long_file_share(house: Sequence[Module]) -> Figure:
    """Compute the share of files over 400 lines."""
    long = sorted((m for m in house if m.lines > LONG_FILE_LINES), key=lambda m: -m.lines)
    found = tuple(Finding(module.name, f"{module.lines} lines") for module in long)
    return Figure(f"% of files over {LONG_FILE_LINES} lines", share(len(long), len(house)), "-", found)


def modules_with_one_user(house: Sequence[Module]) -> Figure:
    """Compute the share of modules that exactly one other module imports, so each is a part of that one.

    A module that its package exports is none of them.
    """
    known = {module.dotted for module in house}
    users: dict[str, list[str]] = {}
    for module in house:
        for name in imports_of(module, known):
            users.setdefault(name, []).append(module.name)
    counted = [module for module in house if module.path.name not in ("__init__.py", "__main__.py")]
    one = [m for m in counted if len(users.get(m.dotted, ())) == 1 and not users[m.dotted][0].endswith("__init__.py")]
    found = tuple(Finding(m.name, f"{m.lines} lines, for {users[m.dotted][0]}") for m in one)
    return Figure("% of modules with one user", share(len(one), len(counted)), "<= 15", found)


def any_inside(house: Iterable[Module]) -> Figure:
    """Count `Any` per 1,000 lines where neither an engine author nor a client nor another system decides the type."""
    lines, counts = 0, Counter[str]()
    for module in house:
        if module.room not in EDGES and module.wing not in ("engines", "compat"):
            lines += module.lines
            counts[module.name] += sum(isinstance(node, ast.Name) and node.id == "Any" for node in module.nodes)
    found = tuple(Finding(name, f"{count} Any") for name, count in counts.most_common() if count)
    return Figure(
        "Any per 1,000 lines outside contract, protocol, engines",
        round(1000 * counts.total() / lines, 1),
        "<= 5",
        found,
    )


def person_words(house: Iterable[Module]) -> Figure:
    """Count words for persons in comments, docstrings and log messages."""
    found = [
        Finding(f"{module.name}:{line}", f"{word}: {' '.join(text.split())[:90]}")
        for module in house
        for line, text in module.prose()
        for word in PERSON_WORDS.findall(text)
    ]
    return Figure("words for persons in comments, docstrings and logs", len(found), "<= 60", tuple(found))


def hidden_members(house: Iterable[Module]) -> Figure:
    """Count the places that reach for members of a request behind its record."""
    found = [
        Finding(f"{module.name}:{node.lineno}", ast.unparse(node))
        for module in house
        for node in module.nodes
        if isinstance(node, ast.Attribute)
        and node.attr == "__dict__"
        and isinstance(node.value, ast.Name)
        and node.value.id in {"request", "self"}
    ]
    return Figure("uses of request.__dict__", len(found), "0", tuple(found))


def loops_that_choose(house: Iterable[Module]) -> Figure:
    """Count the loops of the router that choose a worker again after a failure."""
    found = [
        Finding(f"{module.name}:{node.lineno}", ast.unparse(node).split("\n", 1)[0])
        for module in house
        if module.room == "router"
        for node in module.nodes
        if isinstance(node, ast.While) and _chooses(node)
    ]
    return Figure("loops that choose a worker, try it and choose again", len(found), "1", tuple(found))


def _chooses(loop: ast.While) -> bool:
    inner = list(ast.walk(loop))
    names = {
        node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        for node in inner
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name)
    }
    return bool(names & CHOOSING) and any(isinstance(node, ast.ExceptHandler | ast.Match) for node in inner)


def folders_in_circles(house: Sequence[Module]) -> Figure:
    """Count the folders that lie in a circle of imports with a folder beside them."""
    known = {module.dotted: module for module in house}
    folders = {module.folder for module in house}
    arrows: dict[str, dict[tuple[str, str], str]] = {}  # by the folder that both lie in
    for module in house:
        for name in imports_of(module, known):
            pair = side_by_side(module.folder, known[name].folder)
            if pair is not None and folders.issuperset(pair):
                arrows.setdefault(pair[0].rpartition(".")[0], {}).setdefault(pair, f"{module.name} -> {name}")
    found = [
        Finding(folder, "; ".join(sorted(place for (a, b), place in inside.items() if a == folder and b in ring)[:4]))
        for inside in arrows.values()
        for ring in rings(set(inside))
        for folder in sorted(ring)
    ]
    return Figure("folders in a circle of imports", len(found), "0", tuple(found))


def side_by_side(one: str, other: str) -> tuple[str, str] | None:
    """Return the two folders, beside each other, that hold the two; None: one lies in the other."""
    a, b = one.split("."), other.split(".")
    for depth, (x, y) in enumerate(zip(a, b, strict=False), 1):
        if x != y:
            return ".".join(a[:depth]), ".".join(b[:depth])
    return None


def rings(arrows: set[tuple[str, str]]) -> list[set[str]]:
    """Return the sets of names that reach each other."""
    reached = {a: {b for x, b in arrows if x == a} for a, _ in arrows}
    for middle in list(reached):  # Warshall: the names are few
        for name in reached:
            if middle in reached[name]:
                reached[name] |= reached[middle]
    found: list[set[str]] = []
    for name in sorted(reached):
        ring = {other for other in reached[name] if name in reached.get(other, ())}
        if len(ring) > 1 and ring not in found:
            found.append(ring)
    return found
