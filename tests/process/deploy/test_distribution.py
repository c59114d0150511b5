"""`make dist`: everything is in the wheel, and an empty environment with it has a version, a server and a green doctor."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import distribution
import pytest

from dynamo import __version__
from support.serve_command import serve_command

pytestmark = [
    pytest.mark.fresh,
    pytest.mark.skipif("FRESH" not in os.environ, reason="make test-fresh"),
    pytest.mark.timeout(1800),
]

STEM = f"dynamo_unified-{__version__}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return distribution.build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def python(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An environment that pip made of the wheel and what it requires, and of nothing else."""
    folder = tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    found = folder / "bin" / "python"
    install = [str(found), "-m", "pip", "install", "--quiet", f"{built[1]}[reference,guided]"]
    subprocess.run(install, check=True)
    yield found
    shutil.rmtree(folder)


def outside() -> dict[str, str]:
    """The variables of this process without those that lead to this tree or set something."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("DYN_", "PYTHON"))}


def test_the_same_tree_gives_the_same_bytes_and_they_have_the_version(built: tuple[Path, Path], tmp_path: Path) -> None:
    assert [path.name for path in built] == [f"{STEM}.tar.gz", f"{STEM}-py3-none-any.whl"]
    again = distribution.build(tmp_path)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in built]


def test_static_files_data_and_the_type_marker_are_in_the_wheel(built: tuple[Path, Path]) -> None:
    assert distribution.missing_from(built[1]) == []
    with zipfile.ZipFile(built[1]) as wheel:
        names = wheel.namelist()
    assert len(names) == len(set(names))
    kinds = ("py.typed", "prometheus_names.toml", "inspect.css", "rapidoc-min.js", "vision.safetensors", "main.rs.tmpl")
    for kind in kinds:
        assert [name for name in names if name.endswith(f"/{kind}")], kind
    assert not [
        name for name in names if "__pycache__" in name or not name.startswith(("dynamo/", f"{STEM}.dist-info/"))
    ]


def test_the_sdist_has_what_builds_and_tests_it(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.removeprefix(f"{STEM}/") for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "Makefile", "tests/conftest.py", "deploy/Containerfile"} <= names
    assert not [name for name in names if name.startswith((".venv", "dist", ".engines"))]


def test_a_wheel_that_lacks_a_file_is_found_out(built: tuple[Path, Path], tmp_path: Path) -> None:
    poor = tmp_path / "poor.whl"
    with zipfile.ZipFile(built[1]) as whole, zipfile.ZipFile(poor, "w") as other:
        for name in whole.namelist():
            if name != "dynamo/py.typed":
                other.writestr(name, whole.read(name))
    assert "src/kernel/dynamo/py.typed" in distribution.missing_from(poor)


def test_an_environment_with_the_wheel_alone_serves_the_demonstration_model(python: Path, tmp_path: Path) -> None:
    version = subprocess.run(
        [python.with_name("dynamo"), "--version"], check=True, capture_output=True, text=True, env=outside()
    )
    assert version.stdout.startswith(f"dynamo {__version__} (wire: mux 1, native 1.6.1)")
    # Fewer connections than a machine for tests has open files: that would be the doctor's warning.
    env = {**outside(), "DYN_HTTP_MAX_CONNECTIONS": "100", "HOME": str(tmp_path)}
    doctor = subprocess.run(
        [python.with_name("dynamo"), "doctor", "--all"], capture_output=True, text=True, env=env, check=False
    )
    assert doctor.returncode == 0, doctor.stdout
    with serve_command(tmp_path, "--http-port", "0", python=str(python), PYTHONPATH="") as served:
        served.wait_ready()
        assert served.ask("demo")
        served.process.terminate()
        assert served.wait_ended() == 0


def test_types_are_found_by_a_checker(python: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("from dynamo.common.backend import EngineConfig\n\nEngineConfig(model=3)\n")
    argv = [sys.executable, "-m", "mypy", "--python-executable", str(python), "--no-incremental", str(program)]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False, env=outside())
    assert 'incompatible type "int"' in done.stdout, done.stdout
