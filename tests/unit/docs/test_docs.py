"""The docs are true: tables match the code, links lead somewhere, snippets and commands run."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import metrics_page
import pytest
import settings_page
from wings import name_in_package, source_files

from dynamo.cli.completion import command_parsers
from dynamo.contract.args import add_backend_arguments
from dynamo.contract.conformance import FAILURE_NAMES
from dynamo.errors import RULES
from dynamo.frontend.args import build_parser
from dynamo.runtime.calls.request_plane import metrics as plane_metrics
from support.cases import each_case
from support.doc_pages import PAGES, READ, ROOT, code, rows

COMMANDS = (
    "size",
    "serve",
    "chat",
    "new",
    "conformance",
    "simulate",
    "explain",
    "top",
    "status",
    "drain",
    "doctor",
    "bench",
    "bench replay",
)


MARKS = re.compile(r"(run|run with \w+|start|start afresh|fresh)(: .+)?|(not run|file): .+")


@each_case("path", PAGES, ids=lambda path: path.name)
def test_every_shell_block_says_whether_it_is_run(path: Path) -> None:
    unmarked = [
        block.line for block in READ[path.name].blocks if block.language == "bash" and not MARKS.fullmatch(block.mark)
    ]
    assert unmarked == [], "write a mark above the block: <!-- run -->, <!-- start: TEXT -->, or <!-- not run: WHY -->"


# -- lines ---------------------------------------------------------------------------------------------------------------

# Pages that are not yet written with a sentence to a line, and lines of 100 columns; nothing may be added here.
LONG_LINES = frozenset(
    """
    adapters.md batches.md deployment.md embeddings.md engines.md errors.md faults.md keys.md media.md messages.md
    metrics.md performance.md responses.md routing.md security.md settings.md tools-and-reasoning.md
    writing-a-backend-in-rust.md
    """.split()  # noqa: SIM905 - as a list it would take a line for each
)


@each_case("path", [path for path in PAGES if path.parent.name == "docs"], ids=lambda path: path.name)
def test_the_lines_of_a_page_are_short(path: Path) -> None:
    prose = re.sub(r"(?ms)^[ ]*```.*?^[ ]*```$", "", path.read_text())
    long = [line for line in prose.splitlines() if len(line) > 100 and not line.lstrip().startswith("|")]
    assert path.name in LONG_LINES or long == []


def test_the_readme_fits_on_two_screens() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 160] == []


# -- links ---------------------------------------------------------------------------------------------------------------


def anchor(heading: str) -> str:
    plain = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
    return plain.replace(" ", "-")


@each_case("path", PAGES, ids=lambda path: path.name)
def test_every_internal_link_leads_somewhere(path: Path) -> None:
    lost = []
    for target in re.findall(r"\]\(([^)\s]+)\)", READ[path.name].prose):
        if target.startswith(("http://", "https://")):
            continue
        file, _, fragment = target.partition("#")
        found = path if not file else (path.parent / file).resolve()
        known = {anchor(heading) for heading in READ[found.name].headings} if fragment and found.exists() else set()
        if not found.exists() or (fragment and fragment not in known):
            lost.append(target)
    assert lost == []


def test_the_index_links_every_page_and_the_readme_the_index() -> None:
    text = READ["index.md"].prose
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert sorted(page for page in pages if f"({page})" not in text) == []
    assert "docs/index.md" in READ["README.md"].prose


# -- errors --------------------------------------------------------------------------------------------------------------


def test_the_error_table_is_the_table_of_the_code() -> None:
    expected = [
        [
            f"`{kind.__name__}`",
            str(rule.status),
            f"`{rule.phrase}`",
            f"`{rule.stream_type}`",
            "the error's own message" if rule.public is None else rule.public,
            "yes" if rule.retryable else "no",
            "yes" if rule.inhibits else "no",
        ]
        for kind, rule in RULES.items()
    ]
    assert list(rows("errors.md", "Error", "Status")) == expected


def test_everything_that_is_not_built_is_listed() -> None:
    """By the names that the code passes to the two functions that answer 422."""
    listed = " ".join(row[0] for row in rows("errors.md", "Field", "Answer"))
    for path in source_files("protocol/openai"):
        for call in calls(path, "_not_built", "_deprecated"):
            word = call.args[-1] if call.func.id == "_not_built" else call.args[0]  # type: ignore[attr-defined]
            if isinstance(word, ast.Constant) and isinstance(word.value, str):
                assert f"`{word.value}`" in listed


def calls(path: Path, *names: str) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            yield node


# -- the kit -------------------------------------------------------------------------------------------------------------


def test_the_kits_failures_are_those_of_the_code() -> None:
    listed = {code(row[0])[0]: row[1] for row in rows("writing-a-backend.md", "Failure", "Promise")}
    assert listed == FAILURE_NAMES


# -- metrics -------------------------------------------------------------------------------------------------------------


def test_the_metrics_tables_are_those_of_the_code() -> None:
    page = metrics_page.PAGE.read_text()
    assert metrics_page.written(page) == page, "docs/metrics.md is not current: make docs"


@cache
def words_beside_the_metrics() -> set[str]:
    """Return every word of the code outside the modules that define the metrics."""
    texts = [path.read_text() for path in source_files() if path.name not in ("metrics.py", "prometheus_names.py")]
    return {word for text in texts for word in re.findall(r"\w+", text)}


def test_a_metric_is_said_to_be_not_filled_exactly_when_nothing_fills_it() -> None:
    families = {**plane_metrics.CALLER, **plane_metrics.WORK_HANDLER}
    not_filled = {code(row[0])[0] for row in rows("metrics.md", "Name", "Type") if "Not filled" in row[3]}
    assert not_filled == {
        family.name for attribute, family in families.items() if attribute not in words_beside_the_metrics()
    }


def test_metrics_are_registered_by_their_families_only() -> None:
    """Else the page would not have them."""
    found = {
        name_in_package(path)
        for path in source_files()
        if re.search(r"\b(registry|metrics)\.(counter|gauge|histogram)(_vector)?\(", path.read_text())
    }
    assert found == {"runtime/observe/metrics/family.py"}


def test_every_family_of_the_code_is_on_the_page() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    names = {name for path in source_files() for name in re.findall(r"Family\(\s*\"([a-z_]+)\"", path.read_text())}
    prefixes = ("", "dynamo_frontend_", "dynamo_autoscale_")
    missing = [name for name in names if not any(f"`{prefix}{name}`" in page for prefix in prefixes)]
    assert (missing, len(names) > 80) == ([], True)


# -- settings ------------------------------------------------------------------------------------------------------------

_VARIABLE = re.compile(
    r"(DYN|OTEL|ETCD|NATS|HF|PROMETHEUS|CUDA|NVIDIA|OMP|OPENAI|POD)_[A-Z0-9_]*[A-Z0-9]|CONTAINER_NAME|NO_COLOR|TMPDIR"
)


def variables_of_the_source() -> set[str]:
    """String constants that are nothing but the name of a variable. A name in a sentence is not one."""
    texts = [path.read_text() for path in source_files()]
    return {
        node.value
        for text in texts
        if _VARIABLE.search(text)  # few have one, and parsing takes its time
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _VARIABLE.fullmatch(node.value)
    }


@pytest.mark.process  # computes for seconds
def test_the_table_of_tool_call_formats_is_the_code_s() -> None:
    page = [sys.executable, str(ROOT / "tools" / "formats_page.py"), "--check"]
    assert subprocess.run(page, check=False).returncode == 0, "make docs writes the table"


def documented_variables() -> set[str]:
    documented = {name for row in rows("settings.md", "Variable") for name in code(row[0])}
    return documented | {name for row in rows("settings.md", "Flag", "Variable") for name in code(row[1])}


def test_the_settings_page_lists_exactly_the_variables_that_are_read() -> None:
    assert documented_variables() == variables_of_the_source()


def test_no_text_or_comment_names_a_variable_that_is_not_on_the_settings_page() -> None:
    name = re.compile(r"\bDYN_[A-Z0-9_]*[A-Z0-9](?![A-Z0-9_]*[*{])\b")
    texts = [path.read_text() for path in source_files()]
    named = {found for text in texts for found in name.findall(text)}
    assert named - documented_variables() - {"DYN_HISTOGRAM_X"} == set()


def test_the_settings_tables_are_those_of_the_code() -> None:
    page = settings_page.PAGE.read_text()
    assert settings_page.written(page) == page, "docs/settings.md is not current: make docs"


@pytest.mark.parametrize("command", ["worker", "frontend"])
def test_every_flag_of_a_process_is_on_the_settings_page(command: str) -> None:
    parser = argparse.ArgumentParser()
    if command == "worker":
        add_backend_arguments(parser, env={})
    else:
        parser = build_parser({})
    page = (ROOT / "docs" / "settings.md").read_text()
    flags = {
        flag
        for action in parser._actions
        for flag in action.option_strings
        if action.dest not in ("help", "version") and not (action.help == argparse.SUPPRESS and flag.startswith("--no"))
    }
    assert (sorted(flag for flag in flags if f"`{flag}`" not in page), len(flags) > 50) == ([], True)


@each_case("command", COMMANDS)
def test_the_flags_of_a_command_are_those_of_its_table(command: str) -> None:
    name = command.rpartition(" ")[2]
    table = re.search(rf"<!-- table: {name} -->\n((?:\|.*\n)+)", READ["settings.md"].path.read_text())
    assert table is not None
    documented = {flag for line in table[1].splitlines() for flag in re.findall(r"`(--[a-z-]+)`", line.split("|")[1])}
    taken = {flag for action in command_parsers()[command]._actions for flag in action.option_strings}
    assert documented == taken - {"-h", "--help"}


# -- names ---------------------------------------------------------------------------------------------------------------


def test_every_public_name_that_the_docs_list_exists_and_none_is_left_out() -> None:
    listed = {code(row[0])[0]: set(code(row[1])) for row in rows("architecture.md", "Package", "Exports")}
    actual = {name: set(importlib.import_module(name).__all__) for name in listed}
    assert listed == actual
    assert listed.keys() >= {"dynamo.common.backend", "dynamo.common.backend.testing", "dynamo.runtime", "dynamo.llm"}


def test_every_import_in_the_docs_works() -> None:
    for page in READ.values():
        for block in page.blocks:
            if block.language != "python":
                continue
            for node in ast.walk(ast.parse(block.text)):
                if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dynamo":
                    module = importlib.import_module(node.module)
                    names = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                    # A name may be a module that nothing has imported yet.
                    missing = [name for name in names if importlib.util.find_spec(f"{node.module}.{name}") is None]
                    assert missing == [], f"{page.name}:{block.line}: {node.module}"


def test_modules_and_files_named_in_the_docs_exist() -> None:
    for page in READ.values():
        for name in re.findall(r"`(dynamo(?:\.[a-z_]+)+)`", page.prose):
            assert exists(name), f"{page.name}: {name}"
        for name in re.findall(r"`((?:src|docs|examples|tests|benchmarks|shim)/[\w./-]*)`", page.prose):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


def exists(name: str) -> bool:
    """A module, or an attribute of one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[cut:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False
