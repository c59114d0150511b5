"""One whole answer of the faulty server, and the events of its streams."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


def as_json(status: int, body: Any, **headers: str) -> Reply:
    return Reply(status, json.dumps(body).encode(), headers)


def as_events(named: list[tuple[str, Any]], *, kind: str = "text/event-stream", cache: str = "no-cache") -> Reply:
    text = "".join(f"event: {name}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n" for name, event in named)
    return Reply(200, text.encode(), {"Content-Type": kind, "Cache-Control": cache})


def parsed(body: bytes) -> Any:
    """Return the body, or None where it is not JSON."""
    try:
        return json.loads(body)
    except ValueError:
        return None


def openai_refusal(status: int, message: str, param: str | None = None, *, as_text: bool = False) -> Reply:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    return as_json(status, {"error": message if as_text else error})


def words(value: Any) -> int:
    """Count the words of all texts in a value, which is what this server counts as tokens."""
    if isinstance(value, str):
        return len(value.split())
    if isinstance(value, dict):
        kept = ("content", "text", "output", "arguments", "input", "thinking")
        return sum(words(value[name]) for name in kept if name in value)
    return sum(map(words, value)) if isinstance(value, list) else 0
