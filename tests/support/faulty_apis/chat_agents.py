"""What the faulty server refuses of a chat that it should take."""

from __future__ import annotations

from typing import Any


def refused(fault: str, asked: dict[str, Any]) -> tuple[int, str, str | None] | None:
    """Return the refusal that a fault makes of a right request."""
    turns = asked.get("messages", [])
    turns = turns if isinstance(turns, list) else []
    results = [turn for turn in turns if turn.get("role") == "tool"]
    is_refused = {
        "results in another order refused": bool(results) and isinstance(results[0]["content"], str),
        "result parts refused": any(isinstance(turn["content"], list) for turn in results),
        "long conversation refused": len(turns) > 20,
        "developer refused": any(turn.get("role") == "developer" for turn in turns),
        "metadata refused": "metadata" in asked,
        "seed refused": "seed" in asked,
        "unknown member is 500": "referee_of_tests" in asked,
    }
    if fault == "unknown member named" and "referee_of_tests" in asked:
        return 400, "referee_of_tests: unsupported", None
    return (500, "not so", None) if is_refused.get(fault) else None


def calls_tool(fault: str, asked: dict[str, Any]) -> bool:
    """Return whether the answer to a request is a call."""
    choice = asked.get("tool_choice", "auto")
    if choice == "none":
        return fault == "tool called in spite of none"
    return choice != "auto" and not (choice == "required" and fault == "required ignored")
