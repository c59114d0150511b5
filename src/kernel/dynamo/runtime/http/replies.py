"""One answer of the status server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer. All bodies are `text/plain`, as in the native system, also those that are JSON."""

    status: int
    body: bytes = b""
    file: Path | None = None  # instead of `body`
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "text/plain; charset=utf-8"

    @classmethod
    def json(cls, status: int, value: object) -> Reply:
        """Raises TypeError or ValueError when `value` is no JSON."""
        return cls(status, json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode())

    @classmethod
    def text(cls, status: int, text: str) -> Reply:
        return cls(status, text.encode())


NOT_FOUND: Final = Reply(404, b"Route not found")
NO_FILE: Final = Reply(404, b"Not found")
