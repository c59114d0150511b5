"""Engine controls and updates: the operations on a running engine over the status server.

`POST /engine/control/<name>` and `/engine/update/<name>` reach the engine as they are. Some controls make the engine
unable to serve for a while, so they first take the instance out of discovery; their counterparts bring it back. Those
wait for each other on one lock; all others run in parallel. A refusal is a body with `"status": "error"`, not an HTTP
status: it is the engine's language, and callers already read it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Final, Protocol

from dynamo.errors import InvalidArgument
from dynamo.runtime.base.tasks import Background, is_being_cancelled
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from dynamo.runtime.http.engine_routes import RESERVED
from dynamo.worker.instance_record import GuardedRecord, Hold
from dynamo.worker.lifecycle import AdminGate
from dynamo.worker.registration import checked_taints
from dynamo.worker.settings import RL_ENDPOINT

logger = logging.getLogger(__name__)

PAUSING_CONTROLS: Final = frozenset({"pause_generation", "sleep", "release_memory_occupation"})
RESUMING_CONTROLS: Final = frozenset({"resume_generation", "wake_up", "resume_memory_occupation"})
MODEL_TAINTS: Final = "model_taints"  # the framework's own update; it never reaches the engine

CANCEL_SECONDS: Final = 1.0  # for a cancelled control to unwind; shutdown goes on without one that does not
MAX_NAMES: Final = 256

Body = dict[str, object]
Route = Callable[[object], Awaitable[Body]]

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")


class AdminEngine(Protocol):
    """The part of an engine that is administered.

    An engine may also have `async validate_engine_control(name, body) -> dict | None`, free of side effects: a dict it
    returns is the answer, and neither discovery nor the engine are touched.
    """

    async def engine_control(self, name: str, body: Body) -> Body: ...

    async def engine_update(self, name: str, body: Body) -> Body: ...


def checked_names(kind: str, names: object) -> list[str]:
    """Return the names of `supported_controls` or `supported_updates`, sorted. Raises InvalidArgument naming what is
    wrong.
    """
    if isinstance(names, str | Mapping) or not isinstance(names, Iterable):
        raise InvalidArgument(f"supported_{kind}s() must return a set of names, got {type(names).__name__}")
    found = list(names)
    for name in found:
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise InvalidArgument(f"supported_{kind}s(): {name!r} is no route name (letters, digits and _ . - only)")
    if kind == "update" and MODEL_TAINTS in found:
        raise InvalidArgument(f"supported_updates(): {MODEL_TAINTS!r} is reserved for the framework")
    unique = sorted(set(found))
    if len(unique) > MAX_NAMES:
        raise InvalidArgument(f"supported_{kind}s() returned {len(unique)} names, at most {MAX_NAMES}")
    return unique


class AdminRoutes:
    """The admin routes of one worker. Usable on the event loop only."""

    def __init__(
        self,
        engine: AdminEngine,
        *,
        controls: Iterable[str],
        updates: Iterable[str],
        record: GuardedRecord,
        set_taints: Callable[[list[str]], Awaitable[object]],
    ) -> None:
        """`record`: what pausing controls hold; `set_taints` writes the (checked) taints to discovery."""
        self._engine = engine
        self._controls, self._updates = tuple(controls), tuple(updates)
        self._set_taints, self._record = set_taints, record
        self._exclusive = asyncio.Lock()  # held through a pausing or resuming control, the engine's part included
        self._running = Background()

    def routes(self) -> dict[str, Route]:
        """Route name below `/engine/` -> handler taking the decoded JSON body, whatever it is."""
        return {
            **{f"control/{name}": self._route("control", name) for name in self._controls},
            **{f"update/{name}": self._route("update", name) for name in self._updates},
            f"update/{MODEL_TAINTS}": self._route("update", MODEL_TAINTS),
        }

    async def close(self) -> None:
        """Refuse new calls, cancel those in flight ("shutting down"), freeze the discovery record for good. Idempotent."""
        await self._record.close()
        for task in await self._running.close(CANCEL_SECONDS):
            logger.warning("%s ignores its cancellation; shutting down without it", task.get_name())

    def _route(self, kind: str, name: str) -> Route:
        async def handle(body: object) -> Body:
            return await self._call(kind, name, body)

        return handle

    async def _call(self, kind: str, name: str, body: object) -> Body:
        if self._record.gate is not AdminGate.OPEN:
            return _unavailable(self._record.gate)
        if not isinstance(body, dict):
            if (kind, name) == ("update", MODEL_TAINTS):
                raise InvalidArgument("the body must be a JSON object")
            return _error(f"engine {kind} request body must be a JSON object")
        try:
            return await self._running.run(self._work(kind, name, body), f"engine {kind} {name}")
        except asyncio.CancelledError:
            if self._record.is_closed and not is_being_cancelled():
                return _unavailable(AdminGate.CLOSED)
            raise  # the caller is gone, and its control with it

    def _work(self, kind: str, name: str, body: Body) -> Coroutine[None, None, Body]:
        if kind == "update":
            return self._taint(body) if name == MODEL_TAINTS else self._engine.engine_update(name, body)
        if name in PAUSING_CONTROLS:
            return self._pause(name, body)
        if name in RESUMING_CONTROLS:
            return self._resume(name, body)
        return self._direct(name, body)

    async def _direct(self, name: str, body: Body) -> Body:
        verdict = await self._validate(name, body)
        return verdict if verdict is not None else await self._engine.engine_control(name, body)

    async def _pause(self, name: str, body: Body) -> Body:
        async with self._exclusive:
            verdict = await self._validate(name, body)
            if verdict is not None:
                return verdict
            try:
                await self._record.hold(Hold.PAUSED)
            except Exception as error:  # the boundary: becomes the answer
                logger.warning("engine control %s: discovery unregister failed: %s", name, error)
                return _error(f"engine control {name}: the instance could not be unregistered, try again ({error})")
            try:
                answer = await self._engine.engine_control(name, body)
            except BaseException:
                logger.warning("engine control %s failed; the instance stays unregistered until it is resumed", name)
                raise
            if _failed(answer):
                logger.warning("engine control %s answered with an error; the instance stays unregistered", name)
            return answer

    async def _resume(self, name: str, body: Body) -> Body:
        async with self._exclusive:
            verdict = await self._validate(name, body)
            if verdict is not None:
                return verdict
            answer = await self._engine.engine_control(name, body)
            if _failed(answer) or (isinstance(answer, Mapping) and answer.get("is_sleeping") is True):
                return answer
            try:
                gate = await self._record.release(Hold.PAUSED)
            except Exception as error:  # the boundary: becomes the answer
                logger.warning("engine control %s: discovery registration failed: %s", name, error)
                return _error(
                    f"engine control {name} ran, but the instance could not be registered again; retry ({error})"
                )
            return answer if gate is AdminGate.OPEN else _unavailable(gate)

    async def _validate(self, name: str, body: Body) -> Body | None:
        hook = getattr(self._engine, "validate_engine_control", None)
        verdict: Body | None = await hook(name, body) if hook is not None else None
        return verdict

    async def _taint(self, body: Body) -> Body:
        taints = checked_taints(body.get("taints"))
        await self._set_taints(taints)
        return {"status": "ok", "taints": taints}


def _error(message: str) -> Body:
    return {"status": "error", "message": message}


def _unavailable(gate: AdminGate) -> Body:
    return _error(f"engine administrative routes are unavailable while the worker is {gate.value}")


def _failed(answer: object) -> bool:
    """Return whether an engine's answer reports that the control failed."""
    if not isinstance(answer, Mapping):
        return False
    status = answer.get("status")
    return (isinstance(status, str) and status.lower() == "error") or answer.get("success") is False


# -- the RL directory -------------------------------------------------------------------------------------------------


def rl_endpoint_name(serving_endpoint: str, *, env: Mapping[str, str] | None = None) -> str:
    """Return the name of the auxiliary endpoint (`DYN_RL_ENDPOINT`, default `rl`). Raises InvalidArgument naming the
    variable.
    """
    name: str = RL_ENDPOINT.value(os.environ if env is None else env)
    if re.fullmatch(r"[A-Za-z0-9_-]+", name) is None:
        raise InvalidArgument(f"DYN_RL_ENDPOINT={name!r}: use letters, digits, _ and - only")
    if name == serving_endpoint:
        raise InvalidArgument(f"DYN_RL_ENDPOINT={name!r} is the serving endpoint's name; choose another")
    return name


class RlDirectory:
    """Answers where the admin routes of this worker are, for a trainer; a runtime `Handler`."""

    def __init__(self, base_url: str, admin: Iterable[str], served: Callable[[], Iterable[str]]) -> None:
        """`served`: all routes there are now. Those without a folder that are not the worker's are the engine's own."""
        self._base_url, self._admin, self._served = base_url, tuple(admin), served

    async def handle(self, body: object, context: Context, sink: ResponseSink) -> None:
        method = body.get("method") if isinstance(body, Mapping) else None
        unknown = None if method == "routes" else _error(f"unsupported method: {method!r}; use 'routes'")
        own = {name for name in self._served() if "/" not in name and name not in RESERVED}
        routes = sorted(f"/engine/{route}" for route in {*self._admin, *own})
        sink.send_object({"data": unknown or {"status": "ok", "base_url": self._base_url, "routes": routes}})
