"""The controls and updates of an engine of another project: those that its API has, and why the others are refused.

What the engine can do is in `supported_controls` and `supported_updates`. Every other operation that workers have is a
route, too, which answers with the reason: a caller reads what to do instead of a 404.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple

from dynamo.errors import DynamoException, InvalidArgument, WorkerUnavailable

__all__ = ["CONTROLS", "UPDATES", "Body", "EngineOperations", "Operation", "one_of"]

Body = dict[str, Any]

CONTROLS: Final = frozenset(
    {
        "pause_generation", "resume_generation", "sleep", "wake_up", "release_memory_occupation",
        "resume_memory_occupation", "clear_kv_blocks", "start_profile", "stop_profile", "scale_elastic_ep",
        "is_scaling_elastic_ep", "ep_capacity",
    }
)  # fmt: skip
"""Every control that some engine's worker has."""

UPDATES: Final = frozenset(
    {
        "update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_distributed",
        "update_weights_from_ipc", "update_weight_version", "init_weights_update_group",
        "destroy_weights_update_group", "load_lora", "unload_lora", "list_loras",
    }
)  # fmt: skip
"""Every update that some engine's worker has."""


class Operation(NamedTuple):
    """What does it, and the members that its body may have."""

    run: Callable[[Mapping[str, Any]], Awaitable[Body]]
    fields: frozenset[str] = frozenset()


class EngineOperations:
    """The operations of one engine. On the event loop only; one runs at a time."""

    def __init__(
        self,
        engine_name: str,
        controls: Mapping[str, Operation],
        updates: Mapping[str, Operation],
        refused: Mapping[str, str],
    ) -> None:
        """`refused`: operation -> why the engine cannot do it. Raises ValueError for one that is neither here nor there."""
        self._engine_name = engine_name
        self.controls, self.updates, self.refused = dict(controls), dict(updates), dict(refused)
        left = (CONTROLS | UPDATES) - self.controls.keys() - self.updates.keys() - self.refused.keys()
        if left:
            raise ValueError(f"{engine_name}: neither done nor refused: {', '.join(sorted(left))}")
        self.halted_until = ""  # the control that ends the halt; "" while the engine computes
        self._lock = asyncio.Lock()

    def check_serving(self) -> None:
        """Raise WorkerUnavailable while the engine is halted: another worker serves the request."""
        if self.halted_until:
            raise WorkerUnavailable(
                f"{self._engine_name} is halted; POST /engine/control/{self.halted_until} ends that"
            )

    def refusals(self) -> dict[str, str]:
        """Return route below `/engine/` -> the reason, of what is refused."""
        return {
            f"{'control' if name in CONTROLS else 'update'}/{name}": reason for name, reason in self.refused.items()
        }

    def refusal(self, name: str, body: Mapping[str, Any]) -> Body | None:
        """Return the answer to a control that cannot be done, before anything is touched."""
        operation = self.controls.get(name)
        return self._refused(name) if operation is None else _unknown_field(body, operation.fields)

    async def control(self, name: str, body: Mapping[str, Any]) -> Body:
        """Do it; a failure that the caller should read is a body with `"status": "error"`."""
        return await self._serve(self.controls.get(name), name, body)

    async def update(self, name: str, body: Mapping[str, Any]) -> Body:
        """Do it; as `control`."""
        return await self._serve(self.updates.get(name), name, body)

    async def _serve(self, operation: Operation | None, name: str, body: Mapping[str, Any]) -> Body:
        if operation is None:
            return self._refused(name)
        if (refusal := _unknown_field(body, operation.fields)) is not None:
            return refusal
        try:
            async with self._lock:
                return {"status": "ok", **await operation.run(body)}
        except DynamoException as error:  # a refusal is an answer in this language
            return error_body(str(error))
        except Exception as error:  # the engine's own message names what is missing
            return error_body(f"{type(error).__name__}: {error}")

    def _refused(self, name: str) -> Body:
        known = ", ".join(sorted({*self.controls, *self.updates}))
        return error_body(self.refused.get(name) or f"unknown operation {name!r}; there are {known}")


def error_body(message: str) -> Body:
    """Return the answer of a control or update that failed."""
    return {"status": "error", "message": message}


def one_of(body: Mapping[str, Any], name: str, allowed: tuple[str, ...]) -> str:
    """Return a member of a body, by default the first that is allowed. Raises InvalidArgument naming the member."""
    value = body.get(name, allowed[0])
    if value not in allowed:
        raise InvalidArgument(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    return str(value)


def _unknown_field(body: Mapping[str, Any], fields: frozenset[str]) -> Body | None:
    unknown = sorted(set(body) - fields)
    if not unknown:
        return None
    known = f"known are {', '.join(sorted(fields))}" if fields else "there are none"
    return error_body(f"unknown field {unknown[0]!r}; {known}")
