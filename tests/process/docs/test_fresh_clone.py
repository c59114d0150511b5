"""A new user: a clone, `python3` and `make`, and the README from top to bottom. It installs packages, so it takes minutes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.doc_pages import READ, ROOT, Page
from support.doc_shell import Shell

pytestmark = [
    pytest.mark.fresh,
    pytest.mark.skipif("FRESH" not in os.environ, reason="make test-fresh"),
    pytest.mark.timeout(1800),
]

INSTALL_SECONDS = 900.0  # two environments' worth of packages from a slow mirror


class FreshShell(Shell):
    """One reader with nothing but the system's Python, who activates the environment when the page says so."""

    patience_seconds = INSTALL_SECONDS

    def __init__(self, clone: Path, home: Path) -> None:
        super().__init__(clone, home)
        own = Path(sys.executable).parent
        path = [part for part in os.environ["PATH"].split(os.pathsep) if part and Path(part) != own]
        self._env = {name: value for name, value in self._env.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
        self._env["PATH"] = os.pathsep.join(path)
        self._clone = clone

    def _command(self, text: str) -> list[str]:
        # Ctrl-C in a terminal reaches make and the server; a signal of ours only the process that was started.
        text = re.sub(r"^exec make serve$", "make .venv/.run .venv/.model; exec .venv/bin/dynamo serve", text)
        return super()._command(text)

    def run(self, text: str) -> str:
        output = super().run(text)
        if "source .venv/bin/activate" in text:  # what it does to the terminal lasts; ours is a new one for each block
            self._env["PATH"] = f"{self._clone / '.venv' / 'bin'}{os.pathsep}{self._env['PATH']}"
        return output


def clone(target: Path) -> Path:
    """Copy what git tracks, as it stands in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def test_the_readme_works_from_top_to_bottom_in_a_fresh_clone(tmp_path: Path) -> None:
    here = clone(tmp_path / "clone")
    shell = FreshShell(here, tmp_path)
    page: Page = READ["README.md"]
    try:
        for block in page.blocks:
            kind, _, detail = block.mark.partition(": ")
            where = f"README.md:{block.line}"
            if kind == "file":
                (here / detail).write_text(block.text)
            elif kind in {"run", "fresh"}:
                text = block.text if block.language == "bash" else f"python - <<'END'\n{block.text}END\n"
                assert detail.lower() in shell.run(text).lower(), where
            elif kind in {"start", "start afresh"}:
                if kind == "start afresh":
                    shell.close()
                shell.start(block.text, detail)
    finally:
        shell.close()
