"""Whose cancellation is it: the task's own, or one that came out of what it awaited."""

from __future__ import annotations

import asyncio

__all__ = ["forgive_cancellation", "is_being_cancelled"]


def is_being_cancelled() -> bool:
    """Whether somebody cancelled the running task. A CancelledError without that was raised by what the task awaited:
    user code that cancels a task of its own and then awaits it, for example."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def forgive_cancellation() -> None:
    """Take back one cancellation of the running task: whoever asked for it wanted an end, and this is one."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
