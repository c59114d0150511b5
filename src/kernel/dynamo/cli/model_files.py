"""What a file is that was given where a model's directory belongs, and what to write instead."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Final

__all__ = ["describe_model_file", "has_gguf_magic"]

MAGIC: Final = ((b"GGUF", ".gguf"), (b"PK\x03\x04", ".zip"), (b"\x1f\x8b", ".gz"))
LAYOUT: Final = "a directory in the HuggingFace layout (config.json, tokenizer.json, *.safetensors)"
PYTORCH: Final = frozenset({".bin", ".pt", ".pth", ".ckpt"})
ARCHIVES: Final = frozenset({".zip", ".tar", ".gz", ".tgz", ".xz", ".bz2", ".zst", ".7z"})
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
    return f"{path} is a file, and no model; serve {LAYOUT}"


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
