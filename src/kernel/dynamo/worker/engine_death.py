"""An engine that reports its own end: the worker learns of it here, and its streams move to other workers."""

from __future__ import annotations

from typing import NoReturn

from dynamo.contract.engine import BaseEngine
from dynamo.errors import EngineShutdown
from dynamo.worker.hooks import await_hook

__all__ = ["EngineDied", "raise_when_dead"]


class EngineDied(EngineShutdown):
    """The engine can never serve again, and the worker ends."""


async def raise_when_dead(engine: BaseEngine) -> NoReturn:
    """Wait until the engine reports its end (`wait_dead`); most engines never do.

    Raises:
        EngineDied: the engine is dead; the reason is in the text.
    """
    try:
        reason = await await_hook(engine.wait_dead())
    except Exception as error:
        raise EngineDied(f"the engine died: {type(error).__name__}: {error}") from error
    raise EngineDied(f"the engine died: {reason}")
