"""Whether a directory holds other values for the very weights that an engine serves: other shapes would end the engine."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, Final

from dynamo.errors import InvalidArgument

MAX_HEADER_BYTES: Final = 100 * 1024 * 1024  # of a safetensors file, by its format
# Members of config.json that have nothing to do with shapes and the computation, or that vLLM has read once and for all.
_FREE: Final = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "bos_token_id", "eos_token_id", "pad_token_id"}
)

Shapes = dict[str, tuple[int, ...]]


def check_alike(served: Path, other: Path) -> None:
    """Compare the configurations, and the names and shapes of all tensors; blocking.

    Raises InvalidArgument that names the first difference, or what cannot be read.
    """
    ours, theirs = _config(served), _config(other)
    differing = sorted(name for name in (ours.keys() | theirs.keys()) - _FREE if ours.get(name) != theirs.get(name))
    if differing:
        raise InvalidArgument(f"{other} holds another kind of model: {', '.join(differing)} of config.json differ")
    expected, found = _shapes(served), _shapes(other)
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            raise InvalidArgument(f"{other} has no tensor {name}")
        if name not in expected:
            raise InvalidArgument(f"{other} has a tensor {name} for which this model has no place")
        if expected[name] != found[name]:
            raise InvalidArgument(
                f"{other}: {name} has the shape {list(found[name])}, this model's is {list(expected[name])}"
            )


def _config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InvalidArgument(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidArgument(f"{path} must hold an object, got {type(found).__name__}")
    return found


def _shapes(directory: Path) -> Shapes:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise InvalidArgument(f"{directory} has no weights (*.safetensors)")
    return {name: shape for file in files for name, shape in _header(file).items()}


def _header(path: Path) -> Shapes:
    """Return the shapes of a file's tensors, from its header: a length (u64, little-endian), then JSON."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"its header has {length} bytes")
            text = file.read(length)
            header = json.loads(text)
            return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise InvalidArgument(f"{path} cannot be read as safetensors: {error}") from error
