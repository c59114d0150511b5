"""Which engine serves a model when nobody names one, and why; and fetching a model when somebody asks for that.

Nothing here imports an engine: whether a package is installed, and knows a model's architecture, is read from its files.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamo.cli.model_files import describe_model_file, has_gguf_magic
from dynamo.cli.usage import UsageError
from dynamo.settings.extras import install_command

__all__ = ["HUB_PREFIX", "EngineChoice", "choose_engine", "fetch_from_hub", "locate_model"]

HUB_PREFIX: Final = "hub:"
DEFAULT_ENGINE: Final = "reference"
INSTALL_HUB: Final = "pip install huggingface-hub"
FIRST_PART: Final = re.compile(r"-00001-of-\d{5}\.gguf$")
LATER_PART: Final = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")

Fetch = Callable[[str], Path]


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine, and one clause that says why."""

    engine: str
    reason: str
    model: str | None  # what the engine is given: a file, a directory, or nothing


def choose_engine(model: Path | None, *, has_tokenizer_flag: bool = False) -> EngineChoice:
    """Return the engine for a file or directory; None: the demonstration model. `has_tokenizer_flag`: `--tokenizer` follows.

    Raises UsageError for a file that no engine serves, and for a package that is needed and missing.
    """
    if model is None:
        return EngineChoice(DEFAULT_ENGINE, "no model is named: the demonstration model", None)
    file = _gguf_in(model)
    if file is not None:
        if not _is_installed("xllamacpp"):
            raise UsageError(f"{file} is a GGUF file, for which llama.cpp is needed: {install_command('llamacpp')}")
        if has_tokenizer_flag or (file.parent / "tokenizer.json").is_file():
            return EngineChoice("llamacpp", "a GGUF file, with the model's tokenizer beside it", str(file))
        return EngineChoice("llamacpp-text", "a GGUF file alone, whose own tokenizer and template are used", str(file))
    if model.is_file():
        raise UsageError(describe_model_file(model))
    architecture, kind = _architecture(model)
    for engine, package, knows in (("vllm", "vllm", _vllm_knows), ("transformers", "torch", _transformers_knows)):
        if _is_installed(package) and architecture and knows(architecture, kind):
            return EngineChoice(engine, f"{engine} is installed and knows {architecture}", str(model))
    return EngineChoice(
        DEFAULT_ENGINE,
        "neither vLLM nor transformers is installed here with this model's architecture: in NumPy, for small models only",
        str(model),
    )


def locate_model(name: str, *, allow_download: bool, fetch: Fetch) -> Path:
    """Return the file or directory that a person named, fetched only for `hub:NAME` or with `allow_download`.

    Raises UsageError for what is not here, and may not or cannot be fetched.
    """
    path = Path(name).expanduser()
    if not name.startswith(HUB_PREFIX) and path.exists():
        return path
    if name.startswith(HUB_PREFIX) or (allow_download and not name.startswith(("/", ".", "~"))):
        return fetch(name.removeprefix(HUB_PREFIX))
    from dynamo.worker.hub import cached_copy

    if (cached := cached_copy(name)) is not None:
        return cached
    raise UsageError(
        f"there is no directory or file {name}; write {HUB_PREFIX}{name} (or add --allow-download) to fetch a model of that name "
        "from the hub. To serve a name without a model, add --engine sample"
    )


def fetch_from_hub(name: str) -> Path:
    """Fetch `OWNER/MODEL`, or one file `OWNER/MODEL/FILE.gguf`, with a progress bar; what is here already is not fetched again.

    A fetch that was interrupted goes on where it stopped. Raises UsageError that says why it failed.
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
        reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
        raise UsageError(f"fetch {name} from the hub: {reason}") from error


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
    """Return the names of a model's architecture and type; ("", "") where there is none to read: the engine will say so."""
    try:
        config = json.loads((directory / "config.json").read_bytes())
        names = config.get("architectures") or [""]
        return str(names[0]), str(config.get("model_type") or "")
    except (OSError, ValueError, AttributeError, LookupError, TypeError):
        return "", ""


def _is_installed(package: str) -> bool:
    return _package_directory(package) is not None


def _package_directory(package: str) -> Path | None:
    """Return where a package is, without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _vllm_knows(architecture: str, _kind: str) -> bool:
    """Return whether vLLM's table of models has an architecture."""
    directory = _package_directory("vllm")
    table = None if directory is None else directory / "model_executor" / "models" / "registry.py"
    try:
        return table is not None and f'"{architecture}"' in table.read_text(encoding="utf-8")
    except OSError:
        return False


def _transformers_knows(architecture: str, kind: str) -> bool:
    """Return whether transformers generates with an architecture."""
    directory = _package_directory("transformers")
    if directory is None or not re.fullmatch(r"[A-Za-z0-9_\-]+", kind) or not architecture.endswith("ForCausalLM"):
        return False
    return (directory / "models" / kind.replace("-", "_")).is_dir()
