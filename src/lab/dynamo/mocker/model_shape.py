"""How many bytes of KV cache one token takes, from a model's config.json."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

__all__ = ["kv_bytes_per_token"]

logger = logging.getLogger(__name__)

_NESTED: Final = ("text_config", "llm_config", "language_config", "decoder", "thinker_config")
_BYTES: Final = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "int8": 1}
_UNKNOWN_BYTES: Final = 2


def kv_bytes_per_token(model_path: str, dtype: str = "auto") -> int | None:
    """Return layers x 2 x KV heads x head size x bytes; None where no config.json has them."""
    file = Path(model_path).expanduser() / "config.json"
    if not model_path or not file.is_file():
        return None
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8"))
        return _size(config, dtype)
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        logger.info("%s does not say how large a token's cache is (%s: %s)", file, type(error).__name__, error)
        return None


def _size(config: Mapping[str, Any], dtype: str) -> int:
    sizes = config
    while "num_hidden_layers" not in sizes:
        found = next((sizes[name] for name in _NESTED if isinstance(sizes.get(name), dict)), None)
        if found is None:
            raise KeyError("num_hidden_layers")
        sizes = found
    heads = int(sizes["num_attention_heads"])
    kv_heads = int(sizes.get("num_key_value_heads") or heads)
    head_size = int(sizes["hidden_size"]) // heads
    kind = dtype
    if dtype == "auto":
        kind = sizes.get("torch_dtype") or sizes.get("dtype") or config.get("torch_dtype") or config.get("dtype") or ""
    return int(sizes["num_hidden_layers"]) * 2 * kv_heads * head_size * _bytes(str(kind))


def _bytes(dtype: str) -> int:
    name = dtype.lower().removeprefix("torch.")
    return 1 if name.startswith(("fp8", "float8")) else _BYTES.get(name, _UNKNOWN_BYTES)
