"""Which engine serves a model that is named alone, and what is fetched for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from dynamo.cli import engine_choice, packaged_models
from dynamo.cli.engine_choice import choose_engine, fetch_from_hub, locate_model
from dynamo.cli.serve import read_options
from dynamo.cli.usage import UsageError

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Packages that are installed, as directories with the files that are looked at."""
    packages: dict[str, Path] = {}
    for module in (engine_choice, packaged_models):
        monkeypatch.setattr(module, "package_directory", packages.get)

    def make(package: str, *known: str) -> None:
        root = tmp_path / "packages" / package
        if package == "vllm":
            table = root / "model_executor" / "models" / "registry.py"
            table.parent.mkdir(parents=True)
            table.write_text("".join(f'    "{name}": ("module", "{name}"),\n' for name in known))
        for name in known if package == "transformers" else ():
            (root / "models" / name).mkdir(parents=True)
        packages[package] = root

    return make


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}))
    return directory


def test_without_a_model_the_demonstration_model_is_served(install: Install) -> None:
    assert choose_engine(None).engine == "reference"
    assert read_options([], {}).engine_args == ()


@pytest.mark.parametrize(
    ("packages", "engine"),
    [
        ({}, "reference"),
        ({"torch": (), "transformers": ("qwen3",)}, "transformers"),
        ({"torch": (), "transformers": ("llama",)}, "reference"),
        ({"transformers": ("qwen3",)}, "reference"),
        ({"vllm": ("Qwen3ForCausalLM",), "torch": (), "transformers": ("qwen3",)}, "vllm"),
        ({"vllm": ("LlamaForCausalLM",), "torch": (), "transformers": ("qwen3",)}, "transformers"),
    ],
)
def test_a_directory_goes_to_the_first_engine_that_is_installed_and_knows_it(
    packages: dict[str, tuple[str, ...]], engine: str, model: Path, install: Install
) -> None:
    for name, known in packages.items():
        install(name, *known)
    choice = choose_engine(model)
    assert (choice.engine, choice.model) == (engine, str(model))
    assert "installed" in choice.reason


def test_a_directory_of_sentence_transformers_goes_to_transformers_for_vectors(model: Path, install: Install) -> None:
    (model / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "model_type": "bert"}))
    install("torch")
    install("transformers", "bert")
    assert choose_engine(model).engine == "reference"  # nothing tells that vectors are wanted of it
    (model / "modules.json").write_text("[]")
    choice = choose_engine(model)
    assert (choice.engine, choice.args) == ("transformers", ("--embedding-worker",))
    options = read_options([str(model)], {})
    assert options.engine_args == ("--model-name", str(model), "--embedding-worker")
    given = read_options([str(model), "--", "--embedding-worker"], {})
    assert given.engine_args == ("--model-name", str(model), "--embedding-worker")


def test_a_gguf_file_goes_to_llama_cpp(tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=r"pip install .*xllamacpp"):
        choose_engine(file)
    install("xllamacpp")
    assert choose_engine(file).engine == "llamacpp-text"  # there is no tokenizer in it, or of an unknown rule
    with monkeypatch.context() as known:
        known.setattr("dynamo.llamacpp.gguf_tokenizer.has_known_tokenizer", {file: True}.__getitem__)
        assert choose_engine(file).engine == "llamacpp"
    assert choose_engine(file, has_tokenizer_flag=True).engine == "llamacpp"
    (tmp_path / "tokenizer.json").touch()
    assert (choose_engine(file).engine, choose_engine(file).model) == ("llamacpp", str(file))


def test_a_directory_of_gguf_files_means_the_one_that_can_be_served(tmp_path: Path, install: Install) -> None:
    install("xllamacpp")
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-m.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert choose_engine(tmp_path).model == str(tmp_path / "m-00001-of-00002.gguf")
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=r"several GGUF files.*other\.gguf"):
        choose_engine(tmp_path)


def test_the_hub_is_asked_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "none"))
    asked: list[str] = []

    def fetch(name: str) -> Path:
        asked.append(name)
        return tmp_path

    with pytest.raises(UsageError, match=r"owner/model is not on this machine; dynamo serve hub:owner/model"):
        locate_model("owner/model", allow_download=False, fetch=fetch)
    with pytest.raises(UsageError, match=r"there is no file or directory \./owner/model"):
        locate_model("./owner/model", allow_download=True, fetch=fetch)
    assert asked == []
    assert locate_model(str(tmp_path), allow_download=True, fetch=fetch) == tmp_path
    assert asked == []
    locate_model("owner/model", allow_download=True, fetch=fetch)
    locate_model("hub:owner/model", allow_download=False, fetch=fetch)
    assert asked == ["owner/model", "owner/model"]


def test_a_fetched_model_has_its_name_on_the_hub(model: Path, install: Install) -> None:
    options = read_options(["hub:owner/model"], {}, fetch=lambda _name: model)
    assert options.engine_args == ("--model-name", str(model), "--served-model-name", "owner/model")
    assert "for small models only" in options.engine_reason
    options = read_options(["hub:owner/model", "--", "--served-model-name", "x"], {}, fetch=lambda _name: model)
    assert options.engine_args == ("--model-name", str(model), "--served-model-name", "x")
    assert read_options([str(model)], {}).engine_args == ("--model-name", str(model))


def test_a_named_engine_is_taken_as_it_is(model: Path, install: Install) -> None:
    options = read_options([str(model), "--engine", "sample"], {})
    assert (options.engine, options.engine_reason) == ("sample", "")


def test_a_repository_or_one_file_of_it_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, ...]] = []
    hub = ModuleType("huggingface_hub")
    hub.snapshot_download = lambda name: calls.append((name,)) or "/cache/all"  # type: ignore[attr-defined]
    hub.hf_hub_download = lambda name, file: calls.append((name, file)) or "/cache/m.gguf"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert fetch_from_hub("owner/model") == Path("/cache/all")
    assert fetch_from_hub("owner/model/sub/m.gguf") == Path("/cache/m.gguf")
    assert calls == [("owner/model",), ("owner/model", "sub/m.gguf")]

    def refuse(_name: str) -> str:
        raise OSError("offline\nand more")

    hub.snapshot_download = refuse  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="owner/model cannot be fetched from the hub: offline"):
        fetch_from_hub("owner/model")

    class GatedRepoError(OSError): ...

    def ask(_name: str) -> str:
        raise GatedRepoError("401 Client Error. (Request ID: Root=1)\n\nCannot access gated repo")

    monkeypatch.setattr(hub, "snapshot_download", ask)
    with pytest.raises(UsageError, match="its owner asks for consent"):
        fetch_from_hub("owner/model")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match="pip install huggingface-hub"):
        fetch_from_hub("owner/model")
