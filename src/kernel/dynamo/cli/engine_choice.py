"""Which engine serves a model when the command line names none, and why; and fetching a model when it requests that.

Nothing here imports an engine: whether a package is installed, and knows a model's architecture, is read from its files.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamo.cli.packaged_models import DEMO, PACKAGED, package_directory, packaged
from dynamo.cli.serve_flags import ServeFlags
from dynamo.cli.usage import UsageError
from dynamo.settings.command import did_you_mean
from dynamo.settings.extras import install_command

# What a file is that was given where a model's directory belongs, and what to write instead.


MAGIC: Final = ((b"GGUF", ".gguf"), (b"PK\x03\x04", ".zip"), (b"\x1f\x8b", ".gz"))
LAYOUT: Final = "a directory in the HuggingFace layout (config.json, tokenizer.json, *.safetensors)"
PYTORCH: Final = frozenset({".bin", ".pt", ".pth", ".ckpt"})
ARCHIVES: Final = frozenset({".zip", ".tar", ".gz", ".tgz", ".xz", ".bz2", ".zst", ".7z"})
OF_FILES: Final = "dynamo.llamacpp.gguf_tokenizer"  # its `has_known_tokenizer(file)` is true where tokens can be served
DESCRIPTIONS: Final = frozenset({"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"})


def describe_model_file(path: Path) -> str:
    """Return one sentence of advice on serving the file `path`."""
    suffix = _kind_of(path)
    match suffix:
        case ".gguf":
            return f"{path} is named like a GGUF file, and is not one; fetch it again"
        case ".safetensors":
            return f"{path} is a file of weights (safetensors); {_directory_of(path)}"
        case ".py":
            return f"{path} is a Python file; to serve a function or an engine of it, use --engine {path}:NAME"
        case _ if suffix in PYTORCH:
            return f"{path} is a file of PyTorch weights, which no engine of this package reads; fetch the model as {LAYOUT}"
        case _ if suffix in ARCHIVES:
            return f"{path} is an archive; unpack it and serve {LAYOUT}"
        case _ if path.name in DESCRIPTIONS or path.name.endswith(".safetensors.index.json"):
            return f"{path} is one file of a model; {_directory_of(path)}"
    return f"{path} is not a model; serve {LAYOUT} or a GGUF file"


def has_gguf_magic(path: Path) -> bool:
    """Return whether a file begins as GGUF files do, whatever its name is."""
    return _kind_of(path) == ".gguf" and _head(path).startswith(b"GGUF")


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(4)
    except OSError:
        return b""


def _kind_of(path: Path) -> str:
    """Return the suffix that fits the content, where the content identifies it; else the name's suffix."""
    head = _head(path)
    return next(
        (suffix for magic, suffix in MAGIC if head.startswith(magic) and path.suffix not in PYTORCH), path.suffix
    )


def _directory_of(path: Path) -> str:
    directory = path.absolute().parent
    if (directory / "config.json").is_file():
        return f"serve its directory: dynamo serve {shlex.quote(str(directory))}"
    return f"the engine needs all of the model, and there is no config.json beside it; fetch it as {LAYOUT}"


HUB_PREFIX: Final = "hub:"
DEFAULT_ENGINE: Final = "reference"
INSTALL_HUB: Final = "pip install huggingface-hub"
FIRST_PART: Final = re.compile(r"-00001-of-\d{5}\.gguf$")
LATER_PART: Final = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")

Fetch = Callable[[str], Path]


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine, and one clause that gives the reason."""

    engine: str
    reason: str
    model: str | None  # what the engine is given: a file, a directory, or nothing
    args: tuple[str, ...] = ()  # further arguments that the model needs


def choose_engine(model: Path | None, *, has_tokenizer_flag: bool = False) -> EngineChoice:
    """Return the engine for a file or directory; None: the demonstration model. `has_tokenizer_flag`: `--tokenizer` follows.

    Raises UsageError for a file that no engine serves, and for a package that is needed and missing.
    """
    if model is None:
        return EngineChoice(DEFAULT_ENGINE, "the demonstration model, a toy; dynamo models lists real ones", None)
    file = _gguf_in(model)
    if file is not None:
        if not _is_installed("xllamacpp"):
            raise UsageError(f"{file} is a GGUF file, for which llama.cpp is needed: {install_command('llamacpp')}")
        if has_tokenizer_flag or (file.parent / "tokenizer.json").is_file():
            return EngineChoice("llamacpp", "a GGUF file, with the model's tokenizer beside it", str(file))
        if importlib.import_module(OF_FILES).has_known_tokenizer(file):
            return EngineChoice("llamacpp", "a GGUF file alone, whose own tokenizer and template are used", str(file))
        return EngineChoice("llamacpp-text", "a GGUF file alone, whose tokenizer only llama.cpp has", str(file))
    if model.is_file():
        raise UsageError(describe_model_file(model))
    architecture, kind = _architecture(model)
    for engine, package, knows in (("vllm", "vllm", _vllm_knows), ("transformers", "torch", _transformers_knows)):
        if _is_installed(package) and architecture and knows(architecture, kind):
            return EngineChoice(engine, f"{engine} is installed and knows {architecture}", str(model))
    if _is_installed("torch") and (model / "modules.json").is_file() and _transformers_has(kind):
        reason = f"{architecture or kind} makes vectors, and transformers is installed and has it"
        return EngineChoice("transformers", reason, str(model), ("--embedding-worker",))
    if not (model / "config.json").is_file():
        raise UsageError(f"{model} has neither config.json nor a GGUF file; serve {LAYOUT} or a GGUF file")
    return EngineChoice(
        DEFAULT_ENGINE,
        "neither vLLM nor transformers is installed here with this model's architecture: in NumPy, for small models only",
        str(model),
    )


def upstream_args(flags: ServeFlags, further: Sequence[str]) -> list[str]:
    """Return the arguments of the engine that calls another server; none: no server is named. Raises UsageError."""
    if flags.upstream is None:
        if flags.upstream_models and not (flags.upstream_key_file or flags.upstream_ca_file or further):
            example = flags.upstream_models[0]
            raise UsageError(
                f"--model is for --upstream URL; a model that runs here has no flag: dynamo serve {example}"
            )
        if flags.upstream_key_file or flags.upstream_ca_file or flags.upstream_models or further:
            raise UsageError("--model and --upstream-... describe another server: add --upstream URL")
        return []
    files = (("--upstream-key-file", flags.upstream_key_file), ("--upstream-ca-file", flags.upstream_ca_file))
    given = [part for flag, value in files if value is not None for part in (flag, value)]
    models = [part for model in flags.upstream_models for part in ("--model", model)]
    return ["--upstream", flags.upstream, *given, *models, *further]


def locate_model(name: str, *, allow_download: bool, fetch: Fetch) -> Path:
    """Return the file or directory that a person named, fetched only for `hub:NAME` or with `allow_download`.

    Raises UsageError for what is not here, and may not or cannot be fetched.
    """
    path = Path(name).expanduser()
    if not name.startswith(HUB_PREFIX) and path.exists():
        return path
    if (model := packaged(name)) is not None:
        return model.locate()
    if name.startswith(HUB_PREFIX) or (allow_download and not name.startswith(("/", ".", "~"))):
        return fetch(name.removeprefix(HUB_PREFIX))
    from dynamo.worker.hub import cached_copy

    if (cached := cached_copy(name)) is not None:
        return cached
    raise UsageError(_not_here(name))


def _not_here(name: str) -> str:
    """Return what to do about a model that is not here, by the form of its name."""
    if name.startswith(("http://", "https://")):
        return f"{name} is an address: dynamo serve --upstream {name} --model NAME serves a model of that server"
    parts = name.split("/")
    if len(parts) == 2 and all(parts) and name[0] not in "./~" and not name.endswith(".gguf"):
        return f"{name} is not on this machine; dynamo serve {HUB_PREFIX}{name} fetches it from the hub first"
    if len(parts) > 1 or name.endswith((".gguf", ".safetensors")):
        there = Path(name).expanduser().absolute().parent
        return f"there is no file or directory {name}" + ("" if there.is_dir() else f", nor its folder {there}")
    close = did_you_mean(name, [DEMO, *(model.name for model in PACKAGED)])
    return (
        f"there is no directory, file or short name {name}{close} (dynamo models lists the short names); "
        f"dynamo serve {HUB_PREFIX}{name} fetches a model of that name from the hub. To serve a name without a model, "
        "add --engine sample"
    )


_HUB_ERRORS: Final = {  # whose own first lines are a status and the id of a request
    "EntryNotFoundError": "there is no such file in it",
    "GatedRepoError": "its owner asks for consent: give it on the page of the model, then run hf auth login",
    "RemoteEntryNotFoundError": "there is no such file in it",
    "RepositoryNotFoundError": "there is no model of that name, or it is private: hf auth login",
}


def fetch_from_hub(name: str) -> Path:
    """Fetch `OWNER/MODEL`, or one file `OWNER/MODEL/FILE.gguf`, with a progress bar; what is here already is not fetched again.

    A fetch that was interrupted goes on where it stopped. Raises UsageError with the reason of the failure.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise UsageError(f"to fetch {name} from the hub a package is needed: {INSTALL_HUB}") from None
    owner, _, rest = name.partition("/")
    model, _, file = rest.partition("/")
    try:
        if file:
            return Path(huggingface_hub.hf_hub_download(f"{owner}/{model}", file))
        return Path(huggingface_hub.snapshot_download(name))
    except Exception as error:  # the hub client raises its transport's errors as they are
        kind = type(error).__name__
        reason = _HUB_ERRORS.get(kind) or str(error).strip().split("\n", 1)[0].removeprefix("Got: ") or kind
        raise UsageError(f"{name} cannot be fetched from the hub: {reason}") from error


# -- what is where ----------------------------------------------------------------------------------------------------


def _gguf_in(model: Path) -> Path | None:
    """Return the GGUF file that a path means: the file itself, or the one of a directory that holds nothing else to serve."""
    if model.is_file():
        return model if has_gguf_magic(model) else None
    if (model / "config.json").exists():
        return None
    found = [file for file in sorted(model.glob("*.gguf")) if not LATER_PART.search(file.name)]
    found = [file for file in found if not file.name.startswith("mmproj")]
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise UsageError(f"{model} holds several GGUF files ({names}); name one of them")
    return found[0] if found else None


def _architecture(directory: Path) -> tuple[str, str]:
    """Return the names of a model's architecture and type; ("", "") where there is none to read: the engine will report it."""
    try:
        config = json.loads((directory / "config.json").read_bytes())
        names = config.get("architectures") or [""]
        return str(names[0]), str(config.get("model_type") or "")
    except (OSError, ValueError, AttributeError, LookupError, TypeError):
        return "", ""


def _is_installed(package: str) -> bool:
    return package_directory(package) is not None


def _vllm_knows(architecture: str, _kind: str) -> bool:
    """Return whether vLLM's table of models has an architecture."""
    directory = package_directory("vllm")
    table = None if directory is None else directory / "model_executor" / "models" / "registry.py"
    try:
        return table is not None and f'"{architecture}"' in table.read_text(encoding="utf-8")
    except OSError:
        return False


def _transformers_knows(architecture: str, kind: str) -> bool:
    """Return whether transformers generates with an architecture."""
    return architecture.endswith("ForCausalLM") and _transformers_has(kind)


def _transformers_has(kind: str) -> bool:
    """Return whether transformers is installed and has models of a type."""
    directory = package_directory("transformers")
    if directory is None or not re.fullmatch(r"[A-Za-z0-9_\-]+", kind):
        return False
    return (directory / "models" / kind.replace("-", "_")).is_dir()
