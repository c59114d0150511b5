"""What can be seen of a model before vLLM is imported: a directory without a model in it is a mistake of the operator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from dynamo.errors import InvalidArgument

CONFIGS: Final = ("config.json", "params.json")  # the second is Mistral's own format
WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
LOADED_FROM_FILES: Final = frozenset({"auto", "hf", "safetensors", "pt"})  # load formats that read the files above


def is_local(model: str) -> bool:
    """Return whether `model` is a path on this machine, and not the name of a model on a hub ("name", "owner/name")."""
    return model.startswith(("/", ".", "~")) or model.count("/") > 1 or Path(model).exists()


def check_model(model: str) -> None:
    """Raise InvalidArgument for a path at which no model is; names for a hub pass, as vLLM resolves them."""
    if not is_local(model):
        return
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise InvalidArgument(
                f"--model {model} is a file; vLLM takes a directory, the name of a model, or a GGUF file"
            )
        return
    if not path.is_dir():
        raise InvalidArgument(f"--model {model}: there is no such directory")
    found = [path / name for name in CONFIGS if (path / name).is_file()]
    if not found:
        raise InvalidArgument(f"--model {model}: the directory has no {' or '.join(CONFIGS)}, so it holds no model")
    try:
        config = json.loads(found[0].read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"--model {model}: {found[0].name} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise InvalidArgument(f"--model {model}: {found[0].name} must hold an object, got {type(config).__name__}")


def check_weights(model: str, load_format: str) -> None:
    """Raise InvalidArgument for a directory without files of weights, if `load_format` reads weights from such files."""
    path = Path(model).expanduser()
    if load_format not in LOADED_FROM_FILES or not is_local(model) or not path.is_dir():
        return
    if not any(next(path.glob(pattern), None) for pattern in WEIGHTS):
        raise InvalidArgument(f"--model {model}: the directory has no weights ({', '.join(WEIGHTS)})")
