"""Contexts for an engine's own tests."""

from __future__ import annotations

import asyncio

from dynamo.runtime.calls.context import Context


def mock_context() -> Context:
    """Make a fresh, live context with a random id."""
    return Context()


def cancelling_context(after: float) -> Context:
    """Make a context that stops itself `after` seconds from now. Call it where an event loop runs."""
    context = Context()
    asyncio.get_running_loop().call_later(after, context.stop_generating)
    return context
