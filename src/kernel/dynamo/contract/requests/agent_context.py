"""Which agent session a request belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["agent_context_from_request", "session_id_from_request"]


def agent_context_from_request(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the request's `agent_context` object, or None."""
    found = request.get("agent_context")
    return found if isinstance(found, dict) else None


def session_id_from_request(request: Mapping[str, Any]) -> str | None:
    """Return the session id without surrounding blanks; None when it is absent, empty or not text."""
    session_id = (agent_context_from_request(request) or {}).get("session_id")
    if not isinstance(session_id, str):
        return None
    return session_id.strip() or None
