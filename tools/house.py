"""`make house`: the figures of the house, each beside its bar and its ceiling.

A bar is where the figure should be. A ceiling, in `tools/house.toml`, is where it may be today: `--check` fails when a
figure is above its ceiling, so no figure gets worse. Lower a ceiling when a figure falls (`--tighten` does it).
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from house_shape import (
    any_inside,
    classes_near_the_bar,
    folders_in_circles,
    hidden_members,
    ignored_types,
    large_class_share,
    lines_of_source,
    lines_of_tests,
    lines_of_wing,
    long_file_share,
    loops_that_choose,
    modules_with_one_user,
    person_words,
)
from house_source import Figure, Finding, Module, attributes_of, modules
from wings import WINGS

CEILINGS: Final = Path(__file__).with_suffix(".toml")

MAX_PARAMETERS: Final = 6
MAX_CLASS_LINES: Final = 300
MAX_ATTRIBUTES: Final = 12
MAX_FILE_LINES: Final = 600
LARGEST: Final = 12  # files that are listed
PURE_ROOMS: Final = ("kv", "placement", "router")
TASK_MAKERS: Final = frozenset({"create_task", "ensure_future"})

# First words that are never an imperative.
NOT_A_VERB: Final = frozenset(
    """
    a an the this that these those what which who whom whose where when why how whether if in on at of for from with
    without after before while as by to into about everything nothing something anything all every each any some no none
    one two more most it its they their there here and or not only same is are was were be has have had does did may might
    can must should see
    """.split()  # noqa: SIM905 - a hundred quoted words would hide the words
)


@cache
def _settings() -> dict[str, Any]:
    """Read the ceilings, and under `exempt` what does not count: for each figure, the place and the reason."""
    return tomllib.loads(CEILINGS.read_text()) if CEILINGS.exists() else {}


def _exempt(figure: str) -> dict[str, str]:
    found: dict[str, str] = _settings().get("exempt", {}).get(figure, {})
    return found


# -- the figures -----------------------------------------------------------------------------------------------------


def long_parameter_lists(house: Iterable[Module]) -> Figure:
    """Count private functions with more parameters than a reader keeps in mind."""
    found = []
    for module in house:
        for function in module.functions():
            taken = function.args
            names = [
                a.arg for a in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs) if a.arg not in {"self", "cls"}
            ]
            is_private = function.name.startswith("_") and not function.name.startswith("__")
            if is_private and len(names) > MAX_PARAMETERS:
                found.append(Finding(f"{module.name}:{function.lineno}", f"{function.name} takes {len(names)}"))
    return Figure("private functions with more than 6 parameters", len(found), "0", tuple(found))


def large_classes(house: Iterable[Module]) -> Figure:
    """Count classes outside `testing` that are too long or hold too much."""
    found = []
    for module in house:
        if module.room == "testing":
            continue
        for node in module.classes():
            if f"{module.name}:{node.name}" in _exempt("classes"):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            attributes = attributes_of(node)
            if lines > MAX_CLASS_LINES or len(attributes) > MAX_ATTRIBUTES:
                found.append(
                    Finding(f"{module.name}:{node.lineno}", f"{node.name}: {lines} lines, {len(attributes)} attributes")
                )
    return Figure("classes over 300 lines or 12 attributes", len(found), "0", tuple(found))


def long_files(house: Iterable[Module]) -> Figure:
    """Count files over 600 lines."""
    found = [Finding(m.name, f"{m.lines} lines") for m in house if m.lines > MAX_FILE_LINES]
    return Figure("files over 600 lines", len(found), "0", tuple(found))


def largest_files(house: Iterable[Module]) -> Figure:
    """Name the largest files, each with the one idea that its docstring begins with."""
    found = sorted(house, key=lambda module: -module.lines)[:LARGEST]
    ideas = [(ast.get_docstring(module.tree) or "").split("\n", 1)[0] for module in found]
    return Figure(
        "lines of the largest file",
        found[0].lines,
        f"<= {MAX_FILE_LINES}",
        tuple(Finding(module.name, f"{module.lines} lines: {idea}") for module, idea in zip(found, ideas, strict=True)),
    )


def loose_tasks(house: Iterable[Module]) -> Figure:
    """Count tasks that are made outside `runtime/base/tasks.py` and no task group."""
    found = []
    for module in house:
        if module.name == "runtime/base/tasks.py":
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TASK_MAKERS:
                owner = node.func.value
                name = (
                    owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
                )
                if "group" in name.lower():
                    continue
                found.append(Finding(f"{module.name}:{node.lineno}", ast.unparse(node.func)))
    return Figure("loose task creations", len(found), "<= 20", tuple(found))


def untyped(house: Iterable[Module]) -> Figure:
    """Count `Any` per 1,000 lines in the rooms that decide."""
    lines = any_count = 0
    found = []
    for module in house:
        if module.room in PURE_ROOMS:
            lines += module.lines
            here = sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(module.tree))
            any_count += here
            if here:
                found.append(Finding(module.name, f"{here} Any"))
    return Figure(
        "Any per 1,000 lines in kv, placement, router", round(1000 * any_count / max(lines, 1), 1), "<= 5", tuple(found)
    )


def nouns_used_twice(house: Iterable[Module]) -> Figure:
    """Count names that two public classes carry."""
    places: dict[str, list[str]] = {}
    for module in house:
        if module.room in {"testing"}:
            continue
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                if f"{module.name}:{node.name}" in _exempt("nouns"):
                    continue
                places.setdefault(node.name, []).append(module.name)
    found = [Finding(name, ", ".join(files)) for name, files in sorted(places.items()) if len(files) > 1]
    return Figure("public class names used twice", len(found), "0", tuple(found))


def docstrings_without_verb(house: Iterable[Module]) -> Figure:
    """Count functions whose docstring begins with a word that is no verb."""
    found = []
    for module in house:
        for function in module.functions():
            if function.name == "__init__":
                continue  # it describes the arguments
            if any(isinstance(d, ast.Name) and "property" in d.id for d in function.decorator_list):
                continue  # a property is a noun
            doc = ast.get_docstring(function, clean=True)
            if doc and not begins_with_verb(doc):
                found.append(
                    Finding(f"{module.name}:{function.lineno}", f"{function.name}: {doc.splitlines()[0][:70]}")
                )
    return Figure("function docstrings that begin with no verb", len(found), "0", tuple(found))


def begins_with_verb(doc: str) -> bool:
    """Return whether the first word can be an imperative. It errs on the side of the author."""
    first = doc.split(maxsplit=1)[0].rstrip(",.:;")
    if not first.isalpha() or first.lower() in NOT_A_VERB:
        return False
    followed = [*doc.split(maxsplit=2), "", ""][1]
    return not first.endswith(("ing", "ed")) and followed.lower() not in {
        "of",
        "is",
        "are",
        "was",
        "that",
        "which",
        "who",
    }


def room_sizes(house: Iterable[Module]) -> Figure:
    """Compare the room that decides with the one that prepares and renders."""
    sizes: Counter[str] = Counter()
    for module in house:
        sizes[module.room] += module.lines
        if module.name.startswith("frontend/pipeline/"):
            sizes["frontend/pipeline"] += module.lines
    router = sizes["router"] + sizes["placement"]
    return Figure(
        "lines of frontend/pipeline over those of router + placement",
        round(sizes["frontend/pipeline"] / max(router, 1), 2),
        "< 1",
        (Finding("router", str(sizes["router"])), Finding("placement", str(sizes["placement"])),
         Finding("frontend/pipeline", str(sizes["frontend/pipeline"]))),
    )  # fmt: skip


def stays_of_a_request(house: Iterable[Module]) -> Figure:
    """Count the stays of a chat request on its way to the worker. `tools/way.py` says what a stay is."""
    found = tuple(Finding(stay["module"], ", ".join(stay["functions"])) for stay in _way())
    return Figure("stays of a chat request on its way to the worker", len(found), "<= 14", found)


def stays_of_a_token(house: Iterable[Module]) -> Figure:
    """Count the stays of a token on its way from the engine's chunk to the client's socket."""
    found = tuple(Finding(stay["module"], ", ".join(stay["functions"])) for stay in _way("--token"))
    return Figure("stays of a token on its way to the client", len(found), "<= 14", found)


def climbs_of_a_request(house: Iterable[Module]) -> Figure:
    """Count the stays that lead back into a higher room."""
    found = tuple(Finding(stay["module"], ", ".join(stay["functions"])) for stay in _way() if stay["is_climb"])
    return Figure("climbs of a chat request on its way to the worker", len(found), "<= 3", found)


def stays_by_five_statements(house: Iterable[Module], *, is_climb: bool) -> Figure:
    """Count the stays, or the climbs, of a chat request where a function with five statements is a stop already."""
    found = [stay for stay in _way("--least", "5") if stay["is_climb"] or not is_climb]
    name, bar = ("climbs", "<= 3") if is_climb else ("stays", "<= 18")
    places = tuple(Finding(stay["module"], ", ".join(stay["functions"])) for stay in found)
    return Figure(f"{name} of a chat request by the rule of five statements", len(found), bar, places)


def calls_of_a_request(house: Iterable[Module]) -> Figure:
    """Count the calls of our functions on the way of a chat request to the worker: what its Python costs, on any machine."""
    return Figure("calls of a chat request on its way to the worker", _traced("--count"), "-", ())


def _way(*arguments: str) -> list[dict[str, Any]]:
    way: list[dict[str, Any]] = _traced(*arguments)
    return way


@cache
def _traced(*arguments: str) -> Any:
    # In a process of its own: tracing slows everything in it down, and a frontend leaves much behind.
    command = [sys.executable, str(Path(__file__).with_name("way.py")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout)


LINES: Final = {"kernel": "<= 90000", "parts": "-", "engines": "-", "lab": "-", "inspect": "-", "compat": "-"}

FIGURES: Final[tuple[tuple[str, Callable[[list[Module]], Figure]], ...]] = (
    ("parameters", long_parameter_lists),
    ("classes", large_classes),
    ("files", long_files),
    ("largest", largest_files),
    ("tasks", loose_tasks),
    ("any", untyped),
    ("nouns", nouns_used_twice),
    ("docstrings", docstrings_without_verb),
    ("pipeline", room_sizes),
    ("way", stays_of_a_request),
    ("climbs", climbs_of_a_request),
    ("token", stays_of_a_token),
    ("calls", calls_of_a_request),
    ("way_by_five", partial(stays_by_five_statements, is_climb=False)),
    ("climbs_by_five", partial(stays_by_five_statements, is_climb=True)),
    *((f"lines_{wing}", partial(lines_of_wing, wing, LINES[wing])) for wing in WINGS),
    ("lines", lines_of_source),
    ("lines_tests", lines_of_tests),
    ("ignored_types", ignored_types),
    ("large_classes", large_class_share),
    ("near_classes", classes_near_the_bar),
    ("long_files", long_file_share),
    ("one_user", modules_with_one_user),
    ("any_inside", any_inside),
    ("persons", person_words),
    ("hidden", hidden_members),
    ("loops", loops_that_choose),
    ("circles", folders_in_circles),
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("make house", description="Print the figures of the house.")
    parser.add_argument("--check", action="store_true", help="fail when a figure is above its ceiling (house.toml)")
    parser.add_argument("--tighten", action="store_true", help="lower the ceilings to today's figures")
    parser.add_argument(
        "--list", metavar="FIGURE", choices=[key for key, _ in FIGURES], help="print each place of one figure"
    )
    options = parser.parse_args(argv)
    house = modules()
    if options.list:
        for finding in dict(FIGURES)[options.list](house).findings:
            print(f"{finding.where}: {finding.text}")
        return 0
    figures = {key: measure(house) for key, measure in FIGURES}
    ceilings = {key: value for key, value in _settings().items() if key != "exempt"}
    worse = [key for key, figure in figures.items() if figure.value > ceilings.get(key, float("inf"))]
    if options.tighten:
        ceilings = {key: min(figure.value, ceilings.get(key, figure.value)) for key, figure in figures.items()}
        _, exempt, reasons = CEILINGS.read_text().partition("\n[exempt")
        lines = [
            "# Ceilings of `make house`; they only fall.",
            *(f"{key} = {value:g}" for key, value in ceilings.items()),
        ]
        CEILINGS.write_text("\n".join(lines) + "\n" + exempt + reasons)
    if not options.check or worse:
        print(f"{'figure':<62} {'now':>8} {'ceiling':>8}  bar")
        for key, figure in figures.items():
            print(f"{figure.name:<62} {figure.value:>8g} {ceilings.get(key, 0):>8g}  {figure.bar}")
    for key in worse:
        print(f"{figures[key].name}: {figures[key].value:g} is above its ceiling {ceilings[key]:g}; "
              f"`make house ARGS=\"--list {key}\"` names the places", file=sys.stderr)  # fmt: skip
    return 1 if options.check and worse else 0


if __name__ == "__main__":
    raise SystemExit(main())
