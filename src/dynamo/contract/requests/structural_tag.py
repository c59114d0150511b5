"""The text form of a structural tag, as engines take it."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["serialize_structural_tag"]


def serialize_structural_tag(tag: Any) -> str | None:
    """None stays None, text stays as it is; a model object or plain data becomes JSON."""
    if hasattr(tag, "model_dump"):
        tag = tag.model_dump()
    if tag is None or isinstance(tag, str):
        return tag
    return json.dumps(tag)
