"""The layout is the architecture: imports point one way, and every public package says what it exports."""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

from house_shape import side_by_side
from wings import WINGS, name_in_package, source_files, wing_of

import dynamo
from support.cases import each_case

PURE_FORBIDDEN = frozenset({"asyncio", "socket", "ssl", "selectors", "time", "os", "threading", "subprocess", "signal"})

# Each room and the rooms it may import. The longest prefix of a module's name decides.
PURE = frozenset({"errors", "settings", "protocol", "text", "kv", "placement", "scheduling", "scaling", "residency"})
CONTRACT = frozenset(
    {
        "errors",
        "settings",
        "protocol",
        "kv",
        "runtime",
        "contract",
    }
)
WORKER = CONTRACT | {"worker"}
FRONTEND = PURE | {"runtime", "router", "frontend", "supervise"}
FACADE = WORKER | {"engines", "common", "llm", "_core"}
ALLOWED: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "settings": frozenset({"errors", "settings"}),
    "placement": frozenset({"errors", "kv", "placement"}),
    "protocol": frozenset({"errors", "settings", "protocol"}),
    "text": frozenset({"errors", "settings", "protocol", "text"}),
    "kv": frozenset({"errors", "protocol", "kv"}),
    "scaling": frozenset({"errors", "scaling"}),
    "residency": frozenset({"errors", "residency"}),
    "scheduling": frozenset({"errors", "protocol", "kv", "scheduling"}),
    "prometheus_names": frozenset(),
    "runtime": frozenset({"errors", "settings", "placement", "runtime"}),
    "logits_processing": CONTRACT,
    "health_check": CONTRACT,
    "contract": CONTRACT,
    "worker": WORKER,
    "engines": WORKER | {"engines"},
    "router": frozenset({"errors", "settings", "protocol", "kv", "placement", "runtime", "router"}),
    "policies": frozenset({"errors", "protocol", "placement", "router", "runtime", "policies"}),
    "bindings": frozenset(
        {"errors", "protocol", "kv", "placement", "router", "runtime", "worker", "bindings", "common"}
    ),
    "frontend": FRONTEND,
    "common": FACADE,
    "llm": FACADE | {"bindings"},
    "_core": FACADE | {"bindings"},
    "reference": FACADE | {"reference"},
    "vllm": WORKER | {"engines", "vllm"},
    "llamacpp": WORKER | {"engines", "llamacpp"},
    "transformers": WORKER | {"engines", "transformers"},
    "sglang": WORKER | {"engines", "sglang"},
    "trtllm": WORKER | {"engines", "trtllm"},
    "upstream": WORKER | {"engines", "upstream"},
    "chaos": frozenset({"errors", "runtime", "chaos"}),
    "mocker": FACADE | {"scheduling", "mocker"},
    "replay": frozenset({"errors", "kv", "placement", "router", "scheduling", "mocker", "replay"}),
    "picker": FRONTEND | {"contract", "worker", "picker"},
    "supervise": frozenset({"errors", "protocol", "runtime", "scaling", "supervise"}),
    "testing": WORKER | FRONTEND | {"chaos", "testing"},
    "cli": WORKER | FRONTEND | {"engines", "testing", "scheduling", "mocker", "replay", "chaos", "cli"},
}

# Imports that point the wrong way and are to be cut; nothing may be added here.
DEBTS: frozenset[tuple[str, str]] = frozenset()

# Inside the frontend: each folder and the folders that it may import. A part is `parts.NAME`; a module that stands beside the
# folders goes by its own name.
KERNEL = ("base", "admission", "models", "pipeline", "apis", "http")  # each may import those before it
FRONTEND_PARTS = (
    "keys", "recording", "inspector", "batches", "stored_responses", "media", "scaling", "residency", "group", "vllm_routes", "ollama", "fallbacks",
    "route_extensions", "token_routes", "rl",
)  # fmt: skip
FRONTEND_TOP = frozenset({"app", "application", "opening", "args", "settings", "__init__", "__main__"})
INSIDE_FRONTEND: dict[str, frozenset[str]] = {
    **{folder: frozenset(KERNEL[: place + 1]) for place, folder in enumerate(KERNEL)},
    "parts": frozenset(KERNEL),
    "parts.opening": frozenset(
        {*KERNEL, "parts", "opening", "settings", *(f"parts.{part}" for part in FRONTEND_PARTS)}
    ),
    **{f"parts.{name}": frozenset({*KERNEL, "parts", f"parts.{name}"}) for name in FRONTEND_PARTS},
    **{
        name: frozenset({*KERNEL, "parts", *(f"parts.{part}" for part in FRONTEND_PARTS)}) | FRONTEND_TOP
        for name in FRONTEND_TOP
    },
}
INSIDE_FRONTEND["parts.group"] |= {"app", "args", "settings", "parts.keys"}  # a member of a group is a whole frontend


# Inside the runtime: each folder and the folders that it may import. What stands beside them is what `dynamo.runtime` exports.
RUNTIME_FOLDERS = ("base", "observe", "discovery", "calls", "http")  # each may import those before it
INSIDE_RUNTIME = {folder: frozenset(RUNTIME_FOLDERS[: place + 1]) for place, folder in enumerate(RUNTIME_FOLDERS)}

# Inside the router: each folder and the folders that it may import.
INSIDE_ROUTER: dict[str, frozenset[str]] = {
    "peers": frozenset({"peers"}),
    "kv_events": frozenset({"kv_events"}),
    "kv": frozenset({"peers", "kv_events", "kv"}),
    "workers": frozenset({"kv", "workers"}),
    "dispatch": frozenset({"kv", "workers", "dispatch"}),
    "standalone": frozenset({"peers", "kv_events", "kv", "workers", "dispatch", "standalone"}),
}

# The wings: the kernel imports none of them, but finds their modules by name (the commands, the engines) or entry point.
INSIDE_WINGS: dict[str, frozenset[str]] = {
    "kernel": frozenset({"kernel"}),
    "parts": frozenset({"kernel", "parts"}),
    "engines": frozenset({"kernel", "engines"}),
    "compat": frozenset(WINGS) - {"inspect", "parts"},  # a facade stands before any wing
    "lab": frozenset({"kernel", "engines", "compat", "lab"}),
    "inspect": frozenset({"kernel", "inspect"}),
}


def modules() -> Iterator[tuple[str, Path]]:
    for path in source_files():
        parts = Path(name_in_package(path)).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name and not any(part == "template" for part in parts):
            yield name, path


def room_of(name: str) -> str:
    return name.split(".", maxsplit=1)[0]


def rules_of(name: str) -> frozenset[str] | None:
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((ALLOWED[prefix] for prefix in prefixes if prefix in ALLOWED), None)


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """What a module imports, from the lines that begin like an import, in less than a tenth of the time of a parser.

    In formatted source each import is such a line. Where a line of a text begins so, too, or goes on over further lines, the
    parser decides.
    """
    text = path.read_text()
    lines = IMPORT_LINE.findall(text)
    if '"""' in text and any(IMPORT_LINE.search(doc) for doc in DOCSTRING.findall(text)):
        return frozenset(_imports(ast.parse(text)))
    found = set()
    for module, plain in lines:
        if plain:
            found.add(plain)
        elif module == "dynamo":
            return frozenset(_imports(ast.parse(text)))
        elif not module.startswith("."):
            found.add(module)
    return frozenset(found)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement below `node`, without a look at its expressions: no import hides in one."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, field, ()):
            yield inner
            yield from _statements(inner)


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            if node.module == "dynamo":
                yield from (f"dynamo.{alias.name}" for alias in node.names)
            else:
                yield node.module


IMPORT_LINE = re.compile(r"^\s*(?:from (\S+) import .*|import ([\w.]+).*)$", re.MULTILINE)
DOCSTRING = re.compile(r'"""(?:[^"]|"(?!""))*"""')

MODULES = list(modules())
PATHS = dict(MODULES)


@each_case("name", [name for name, _ in MODULES])
def test_imports_point_one_way(name: str) -> None:
    path = PATHS[name]
    room, allowed = room_of(name), rules_of(name)
    assert allowed is not None, f"room {room!r} is not on the architecture page: add it there and here"
    wrong = {
        module
        for module in imports(path)
        if module.startswith("dynamo.")
        and module != "dynamo.__version__"
        and room_of(module[7:]) not in allowed
        and (name, module[7:]) not in DEBTS
    }
    assert not wrong, f"dynamo.{name} may not import {sorted(wrong)}"


def is_pure(name: str) -> bool:
    return room_of(name) in PURE | {"replay"} or name.startswith("frontend.parts.keys.rules")


def frontend_folder(module: str) -> str:
    """Return the folder of a module below `frontend`: `base`, `parts.keys`, `app`."""
    below = module.split(".")
    if below[0] in FRONTEND_TOP or below == [""]:
        return below[0] or "__init__"
    return (
        ".".join(below[:2])
        if below[0] == "parts" and len(below) > 1 and below[1] in {*FRONTEND_PARTS, "opening"}
        else below[0]
    )


def frontend_arrows() -> dict[tuple[str, str], set[str]]:
    """Return each pair of folders of which the first imports the second, with the imports."""
    found: dict[tuple[str, str], set[str]] = {}
    for name, path in MODULES:
        if room_of(name) != "frontend":
            continue
        folder = frontend_folder(name[9:])
        for module in imports(path):
            if module == "dynamo.frontend" or module.startswith("dynamo.frontend."):
                found.setdefault((folder, frontend_folder(module[16:])), set()).add(f"{name} -> {module[7:]}")
    return found


def test_arrows_inside_the_frontend_point_one_way() -> None:
    arrows = frontend_arrows()
    wrong = {pair: sorted(arrows[pair]) for pair in arrows if pair[1] not in INSIDE_FRONTEND[pair[0]] | {pair[0]}}
    assert wrong == {}


EDGE = re.compile(
    r"runtime/http/|frontend/http/|frontend/parts/keys/access_log|frontend/parts/inspector/routes|testing/simulation/"
)
"""What is a listener, or stands between one and a call."""


def test_only_the_edge_knows_the_private_extensions_of_the_listener() -> None:
    """The way inside is `Call.run` with an `AnswerSink`."""
    private = re.compile(r"\b(?:LEAVE|PUSH|RESPOND|SPLICE)_EXTENSION\b|dynamo\.(?:on_leave|push|respond|splice)\b")
    found = [path.as_posix() for _, path in MODULES if private.search(path.read_text())]
    assert [name for name in found if EDGE.search(name) is None] == []
    assert len(found) > 5


def folder_of(name: str) -> str:
    """Return the package that a module lies in; a package lies in itself."""
    return f"dynamo.{name}" if PATHS[name].name == "__init__.py" else f"dynamo.{name}".rpartition(".")[0]


def test_no_folders_anywhere_stand_in_a_circle() -> None:
    arrows: dict[str, set[tuple[str, str]]] = {}  # by the folder that both lie in
    for name, path in MODULES:
        for module in imports(path):
            if module[7:] in PATHS and (pair := side_by_side(folder_of(name), folder_of(module[7:]))) is not None:
                arrows.setdefault(pair[0].rpartition(".")[0], set()).add(pair)
    assert {folder: found for folder, inside in arrows.items() if (found := circles(inside))} == {}


def test_arrows_inside_the_runtime_point_one_way() -> None:
    """Holds for the folders; a module beside them may import all of them, and no folder may import such a module."""
    wrong = set()
    for name, path in MODULES:
        _, _, below = name.partition("runtime.")
        folder = below.split(".")[0]
        if room_of(name) != "runtime" or folder not in INSIDE_RUNTIME or wing_of(path) != "kernel":
            continue
        for module in imports(path):
            if module.startswith("dynamo.runtime."):
                target = module.split(".")[2]
                if target not in INSIDE_RUNTIME[folder]:
                    wrong.add(f"{name} -> {module[7:]}")
    assert sorted(wrong) == []


def test_arrows_inside_the_router_point_one_way() -> None:
    found = set()
    for name, path in MODULES:
        folder = name.removeprefix("router.").split(".")[0]
        if room_of(name) == "router" and folder not in ("router", "__main__"):  # these two stand above all folders
            targets = {module.split(".")[2] for module in imports(path) if module.startswith("dynamo.router.")}
            found |= {(folder, target, name) for target in targets}
    assert {folder for folder, _, _ in found} == INSIDE_ROUTER.keys()
    assert sorted(arrow for arrow in found if arrow[1] not in INSIDE_ROUTER[arrow[0]]) == []
    assert circles({(folder, target) for folder, target, _ in found if folder != target}) == []


@functools.cache
def wing_of_module(module: str) -> str | None:
    """Return the wing of a module, or of the module that has the named attribute."""
    while module and module not in PATHS:
        module = module.rpartition(".")[0]
    return wing_of(PATHS[module]) if module else None


def test_the_kernel_imports_no_wing_and_a_wing_only_those_it_may() -> None:
    wrong = set()
    for name, path in MODULES:
        allowed = INSIDE_WINGS[wing_of(path)]
        for module in imports(path):
            if module.startswith("dynamo.") and wing_of_module(module[7:]) not in {*allowed, None}:
                wrong.add(f"{name} -> {module[7:]}")
    assert sorted(wrong) == []


def circles(arrows: set[tuple[str, str]]) -> list[str]:
    """Return the names that are left once all that lead nowhere, or to such names alone, have been taken away."""
    left = {name for arrow in arrows for name in arrow}
    while ends := {name for name in left if not any(a == name and b in left for a, b in arrows)}:
        left -= ends
    return sorted(left)


@each_case("name", [n for n, _ in MODULES if is_pure(n)])
def test_the_pure_rooms_do_no_io(name: str) -> None:
    roots = {module.split(".")[0] for module in imports(PATHS[name])}
    assert not roots & PURE_FORBIDDEN, f"dynamo.{name} imports {sorted(roots & PURE_FORBIDDEN)}"


def public_packages() -> list[str]:
    found = [
        info.name
        for info in pkgutil.walk_packages(dynamo.__path__, "dynamo.")
        if info.ispkg and "template" not in info.name
    ]
    return sorted(found)


@each_case("name", public_packages())
def test_every_public_package_exports_what_its_all_says(name: str) -> None:
    package = importlib.import_module(name)
    exported = getattr(package, "__all__", None)
    assert exported is not None, f"{name} has no __all__"
    assert sorted(set(exported)) == sorted(exported), f"{name}.__all__ repeats a name"
    missing = [item for item in exported if not hasattr(package, item)]
    assert not missing, f"{name}.__all__ names {missing}, which do not exist"


def test_each_noun_of_the_glossary_is_one_class() -> None:
    page = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text()
    nouns = re.findall(r"^\| [^|]+ \| `(\w+)` \|", page, re.MULTILINE)
    homes: dict[str, list[str]] = {noun: [] for noun in nouns}
    for name, path in MODULES:
        if room_of(name) != "_core":
            for noun in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE):
                if noun in homes:
                    homes[noun].append(name)
    assert {noun: places for noun, places in homes.items() if len(places) != 1} == {}
    assert len(nouns) == len(homes) > 25


def test_the_index_names_every_page() -> None:
    docs = Path(__file__).parents[2] / "docs"
    linked = set(re.findall(r"\]\(([a-z-]+\.md)\)", (docs / "index.md").read_text()))
    assert linked == {page.name for page in docs.glob("*.md")} - {"index.md"}
