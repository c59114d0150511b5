"""What the docs tell people to type works: blocks are run in order, servers as real processes on free ports.

The mark above a ```bash or ```python block says how: `run` (to its end, status 0), `run: TEXT` (and TEXT is in the output),
`run with PROGRAM: TEXT` (the same, where a program of another project is installed), `start: REGEX` (a server; it is up when
its log matches), `start afresh: REGEX` (the servers before it are stopped), `not run: WHY`; `fresh` or `fresh: TEXT` is run only in a fresh clone with an environment of its own
(`test_fresh_clone.py`), because it installs something. `file: PATH` above any block writes the file. Python blocks without such a mark are executed in a row.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo.contract.conformance import run_conformance
from support.doc_pages import READ, ROOT, Block, Page
from support.doc_shell import Shell, follow


@pytest.mark.parametrize(
    "name", [name for name, page in READ.items() if any(b.language == "bash" for b in page.blocks)]
)
def test_what_a_page_tells_people_to_type_works(name: str, tmp_path: Path) -> None:
    page = READ[name]
    cwd = tmp_path / "here"
    cwd.mkdir()
    shell = Shell(cwd, tmp_path)
    try:
        missing = follow(page, shell, cwd)
    finally:
        shell.close()
    if missing:
        pytest.skip(f"all but the blocks with {', '.join(missing)}, which is not installed here")


# -- python blocks -------------------------------------------------------------------------------------------------------


def snippets(page: Page) -> Iterator[Block]:
    for block in page.blocks:
        if block.language == "python" and not block.mark.startswith(("file: ", "run", "not run: ")):
            yield block


def execute(page: Page) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the snippets of a page in one namespace; after each, its mark and the namespace."""
    namespace: dict[str, Any] = {"__name__": "docs"}
    for block in snippets(page):
        # Line numbers of a traceback are those of the page.
        exec(compile("\n" * block.line + block.text, page.path, "exec"), namespace)
        yield block.mark, namespace


@pytest.mark.parametrize("name", [name for name, page in READ.items() if any(True for _ in snippets(page))])
async def test_python_snippets_run_and_their_engines_conform(name: str) -> None:
    for mark, namespace in execute(READ[name]):
        kind, _, engine = mark.partition(": ")
        if kind == "conforms":
            await run_conformance(namespace[engine])


async def test_the_tests_that_the_cancellation_page_shows_pass() -> None:
    *_, (_, namespace) = execute(READ["cancellation.md"])
    tests = [value for key, value in namespace.items() if key.startswith("test_")]
    assert len(tests) == 2
    async with asyncio.TaskGroup() as group:
        for test in tests:
            group.create_task(test())


# -- make ----------------------------------------------------------------------------------------------------------------


def test_every_make_target_in_the_docs_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in READ.values():
        named = set(re.findall(r"`make ([a-z-]+)`", page.prose))
        named |= {word for block in page.blocks for word in re.findall(r"^make ([a-z-]+)", block.text, re.MULTILINE)}
        assert named <= targets, page.name


def test_make_serve_is_dynamo_serve() -> None:
    """Which is what these tests run in its place."""
    assert re.search(r"^serve:.*\n\t@\$\(BIN\)/dynamo serve \$\(ARGS\)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
