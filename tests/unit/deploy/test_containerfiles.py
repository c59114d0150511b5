"""The images for engines of users: without root, on the ports of the others, from sources that there are."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from oci_image.containerfile import Instruction, read_containerfile, texts

from support.cases import each_case

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
FILES = {name: read_containerfile(DEPLOY / f"Containerfile{name}") for name in ("", ".backend", ".rust")}


@each_case("name", FILES)
def test_no_process_is_root(name: str) -> None:
    assert texts(FILES[name], "USER")[-1] == "dynamo"
    users = re.findall(r"--uid (\d+) dynamo", "\n".join(texts(FILES[name], "RUN")))
    assert users == ([] if name == ".backend" else ["10001"])  # that one inherits its user


@each_case("name", FILES)
def test_what_starts_a_process_starts_no_shell(name: str) -> None:
    """A shell would not pass SIGTERM on, and the worker would be killed without its drain."""
    found = [each for each in FILES[name] if each.name in ("ENTRYPOINT", "CMD")]
    assert found
    assert all(each.words for each in found)


def test_a_user_s_wheel_goes_on_top_of_the_image_that_the_other_files_name() -> None:
    compose = (DEPLOY / "docker-compose.yml").read_text()
    (base,) = texts(FILES[".backend"], "FROM")
    assert f"image: {base}\n" in compose
    (install,) = texts(FILES[".backend"], "RUN")
    assert "pip install --no-cache-dir --no-deps /tmp/wheels/*.whl" in install
    (copy,) = texts(FILES[".backend"], "COPY")
    assert copy.endswith("dist/*.whl /tmp/wheels/")


def test_the_builder_has_the_rust_that_the_workspace_needs_and_the_image_its_debian() -> None:
    builder, image = (text for each in FILES[".rust"] if each.name == "FROM" for text in [each.text])
    version = re.search(r"rust:(\d+\.\d+)-slim-(\w+) AS build", builder)
    assert version is not None
    workspace = tomllib.loads((ROOT / "rust" / "Cargo.toml").read_text())["workspace"]
    assert version[1] == workspace["package"]["rust-version"]
    assert image.endswith(f"debian:{version[2]}-slim")
    default = dict(text.split("=", 1) for text in texts(FILES[".rust"], "ARG", 0))
    assert default["PACKAGE"] in workspace["members"]


def test_the_program_that_is_built_is_the_one_that_is_started() -> None:
    (build,) = texts(FILES[".rust"], "RUN", 0)
    built = build.split()[-1]
    target = next(text.split() for text in texts(FILES[".rust"], "COPY") if "--from=build" in text)
    assert (target[1], Path(target[2]).name) == (built, "backend")
    entry = next(each for each in FILES[".rust"] if each.name == "ENTRYPOINT")
    assert entry.words == ["backend"]


def test_ports_are_those_of_the_image_for_all() -> None:
    (ports,) = texts(FILES[""], "EXPOSE")
    assert set(texts(FILES[".rust"], "EXPOSE")[0].split()) < set(ports.split())


def test_a_file_with_something_else_is_not_read_as_if_it_were_understood(tmp_path: Path) -> None:
    path = tmp_path / "Containerfile"
    path.write_text("FROM scratch\nRUN a && \\\n    b\nONBUILD RUN c\n")
    with pytest.raises(ValueError, match="ONBUILD is not a known"):
        read_containerfile(path)
    path.write_text("FROM scratch\n# no\nRUN a && \\\n    b\n")
    assert read_containerfile(path) == [Instruction(0, "FROM", "scratch"), Instruction(0, "RUN", "a && b")]
