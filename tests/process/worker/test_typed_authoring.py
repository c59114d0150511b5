"""What an author's editor and type checker get: types that refuse mistakes, and documentation on hover."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from dynamo.cli.main import main
from dynamo.contract.config import RuntimeConfig, WorkerConfig, WorkerFields
from dynamo.contract.engine_config import EngineConfig, LlmRegistration
from support.doc_pages import READ

MISTAKES = """\
from argparse import Namespace
from dataclasses import replace

from dynamo.common.backend import EngineConfig, LlmRegistration, WorkerConfig
from dynamo.common.backend.args import worker_config_from

args = Namespace()
worker_config_from(args, model_name="m", enable_rl=True)
worker_config_from(args, model_nam="m")
worker_config_from(args, endpoint_types=3)
WorkerConfig.from_runtime_config(args, "m", component="c")
WorkerConfig.from_runtime_config(args, "m", componnt="c")
WorkerConfig("ns", componnt="c")
EngineConfig("m", context_length=4096, llm=LlmRegistration(total_kv_blocks=1))
EngineConfig("m", context_lenght=4096)
replace(EngineConfig("m"), context_length=1)
"""
WRONG_LINES = {9, 10, 12, 13, 15}


@pytest.mark.timeout(300)
def test_the_scaffold_and_the_pages_package_are_strictly_typed_and_mistakes_are_refused(tmp_path: Path) -> None:
    assert main(["new", "acme-backend", "--dir", str(tmp_path)]) == 0
    page = tmp_path / "page"
    for block in READ["writing-a-backend.md"].blocks:
        if block.mark.startswith("file: "):
            target = page / block.mark.removeprefix("file: ")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text)
    (page / "tests" / "test_engine.py").rename(page / "tests" / "test_page.py")  # two modules of one name are refused
    mistakes = tmp_path / "mistakes.py"
    mistakes.write_text(MISTAKES)
    sources = [tmp_path / "acme-backend" / "src", page / "src"]
    checked = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", "--config-file", "", "--cache-dir", tmp_path / "cache"),
            *(*sources, tmp_path / "acme-backend" / "tests", page / "tests", mistakes),
        ],
        env={"MYPYPATH": ":".join(map(str, sources)), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    errors = [line for line in checked.stdout.splitlines() if ": error:" in line]
    elsewhere = [line for line in errors if "mistakes.py" not in line]
    assert not elsewhere, "\n".join(elsewhere)
    assert {int(line.split(":")[1]) for line in errors} == WRONG_LINES, checked.stdout + checked.stderr


def test_the_typed_keywords_are_the_fields_of_the_configuration() -> None:
    fields = {name: kind for name, kind in typing.get_type_hints(WorkerConfig).items() if name != "_"}
    keywords = typing.get_type_hints(WorkerFields)
    assert keywords == {name: kind for name, kind in fields.items() if name not in ("model_name", "served_model_name")}


@pytest.mark.parametrize("kind", [EngineConfig, LlmRegistration, WorkerConfig, RuntimeConfig])
def test_every_field_has_documentation_on_hover(kind: type) -> None:
    (definition,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    documented = {
        field.target.id
        for field, text in zip(definition.body, definition.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
    assert {entry.name for entry in dataclasses.fields(kind) if not entry.name.startswith("_")} <= documented
