"""Awaiting the hooks of an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from dynamo.errors import Unknown

T = TypeVar("T")


async def await_hook(call: Awaitable[T]) -> T:
    """Await a hook of the engine. Only a cancellation of this very task comes out as one: an engine that awaits a task
    which it has cancelled raises CancelledError as well, and that is a failure like any other."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        return await call
    except asyncio.CancelledError as error:
        if task is not None and task.cancelling() > before:
            raise
        raise Unknown("CancelledError: the engine awaited a task that was cancelled") from error
