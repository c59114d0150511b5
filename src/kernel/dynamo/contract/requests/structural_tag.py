"""The text form of a structural tag, as engines take it."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["serialize_structural_tag"]


def serialize_structural_tag(structural_tag: Any) -> str | None:
    """Turn a model object or plain data into JSON; None and text stay as they are."""
    tag = structural_tag.model_dump() if hasattr(structural_tag, "model_dump") else structural_tag
    return tag if tag is None or isinstance(tag, str) else json.dumps(tag)
