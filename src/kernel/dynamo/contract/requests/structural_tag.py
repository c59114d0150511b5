"""The text form of a structural tag, as engines take it."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["serialize_structural_tag"]


def serialize_structural_tag(tag: Any) -> str | None:
    """Turn a model object or plain data into JSON; None and text stay as they are."""
    if hasattr(tag, "model_dump"):
        tag = tag.model_dump()
    if tag is None or isinstance(tag, str):
        return tag
    return json.dumps(tag)
