from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dynamo.cli.main import main
from dynamo.cli.new import Names
from dynamo.cli.usage import UsageError


def test_a_fresh_package_passes_its_own_tests_and_the_kit(tmp_path: Path) -> None:
    assert main(["new", "my-backend", "--dir", str(tmp_path)]) == 0
    root = tmp_path / "my-backend"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": "src", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "5 passed" in run.stdout
    kit = subprocess.run(
        [sys.executable, "-m", "dynamo.cli.main", "conformance", "my_backend.engine:MyEngine"],
        cwd=root / "src",
        capture_output=True,
        text=True,
        check=False,
    )
    assert kit.returncode == 0, kit.stdout + kit.stderr


def test_a_fresh_package_is_what_pip_and_its_command_expect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["new", "my-backend", "--dir", str(tmp_path)])
    root = tmp_path / "my-backend"
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert project["project"]["name"] == "my-backend"
    assert project["project"]["dependencies"] == ["ai-dynamo>=1.2.0"]
    assert project["project"]["scripts"] == {"my-backend": "my_backend.main:main"}
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["src/my_backend"]
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()) == [
        ".gitignore",
        "README.md",
        "pyproject.toml",
        "src/my_backend/__init__.py",
        "src/my_backend/engine.py",
        "src/my_backend/main.py",
        "tests/test_engine.py",
    ]
    assert not [path for path in root.rglob("*") if path.is_file() and "@@" in path.read_text()]
    assert f"cd {root}\n  pip install -e" in capsys.readouterr().out


def test_what_exists_is_overwritten_only_with_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my-backend" / "src").mkdir(parents=True)
    kept = tmp_path / "my-backend" / "notes.txt"
    kept.write_text("mine")
    assert main(["new", "my-backend", "--dir", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["new", "my-backend", "--dir", str(tmp_path), "--force"]) == 0
    assert kept.read_text() == "mine"
    assert (tmp_path / "my-backend" / "pyproject.toml").is_file()


def test_a_place_that_cannot_be_written_is_an_error_of_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["new", "my-backend", "--dir", str(tmp_path / "file")]) == 2
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "module", "engine"),
    [
        ("my-backend", "my_backend", "MyEngine"),
        ("acme", "acme", "AcmeEngine"),
        ("Acme.Fast_LLM", "acme_fast_llm", "AcmeFastLlmEngine"),
        ("tiny-engine", "tiny_engine", "TinyEngine"),
        ("backend", "backend", "BackendEngine"),
        ("x2", "x2", "X2Engine"),
    ],
)
def test_a_name_has_three_spellings(name: str, module: str, engine: str) -> None:
    assert Names.of(name) == Names(name, module, engine)


@pytest.mark.parametrize(
    "name",
    ["", "-x", "x-", "x--y", "2x", "../x", "a/b", "ümlaut", "x" * 65, "class", "json", "Dynamo", "asyncio", "a b"],
)
def test_a_name_that_cannot_work_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        Names.of(name)
