"""What an operator may do with a running vLLM: halt it, take its memory, empty its cache, look inside."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from dynamo.errors import DynamoException, InvalidArgument, WorkerUnavailable

__all__ = ["CONTROLS", "VllmOperations"]

Body = dict[str, Any]

PAUSE_MODES: Final = ("keep", "wait", "abort")
STEP_SECONDS: Final = 10.0
SLEEP_LEVELS: Final = (1, 2)


class VllmOperations:
    """The controls of one engine. On the event loop only."""

    def __init__(self, client: Any, make_step: Callable[[], Awaitable[None]]) -> None:
        """`client`: vLLM's `AsyncLLM`. `make_step` has the engine compute something, however little."""
        self._client, self._make_step = client, make_step
        self._is_asleep = self._is_paused = False

    def check_serving(self) -> None:
        """Raise WorkerUnavailable while the model's memory is given away: another worker serves the request."""
        if self._is_asleep:
            raise WorkerUnavailable("vLLM is asleep; wake_up ends that")

    def refusal(self, name: str, body: Mapping[str, Any]) -> Body | None:
        """Return the answer to a control that cannot be done, before anything is touched."""
        _, fields = CONTROLS[name]
        unknown = sorted(set(body) - fields)
        if unknown:
            known = f"known are {', '.join(sorted(fields))}" if fields else "there are none"
            return _error(f"unknown field {unknown[0]!r}; {known}")
        return None

    async def control(self, name: str, body: Mapping[str, Any]) -> Body:
        """Do it; a failure that the caller should read is a body with `"status": "error"`."""
        try:
            found = await CONTROLS[name][0](self, body)
        except InvalidArgument as error:
            return _error(str(error))
        except DynamoException:
            raise
        except Exception as error:  # vLLM's own words say what is missing, such as --profiler-config
            return _error(f"{type(error).__name__}: {error}")
        return {"status": "ok", **found}

    async def pause_generation(self, body: Mapping[str, Any]) -> Body:
        mode = _one_of(body, "mode", PAUSE_MODES, "keep")
        await self._client.pause_generation(mode=mode, clear_cache=False)
        self._is_paused = True
        return {"message": f"paused; running requests: {mode}"}

    async def resume_generation(self, _body: Mapping[str, Any]) -> Body:
        await self._client.resume_generation()
        self._is_paused = False
        return {"message": "resumed"}

    async def sleep(self, body: Mapping[str, Any]) -> Body:
        level = _one_of(body, "level", SLEEP_LEVELS, 1)
        if not self._is_asleep:
            self._is_asleep = True  # first: what arrives from here on goes elsewhere
            try:
                await self._client.sleep(level)
            except BaseException:
                self._is_asleep = False
                raise
        return {"message": f"asleep at level {level}", "is_sleeping": True}

    async def wake_up(self, _body: Mapping[str, Any]) -> Body:
        if self._is_asleep:
            await self._client.wake_up()
            self._is_asleep = False
        return {"message": "awake"}

    async def clear_kv_blocks(self, _body: Mapping[str, Any]) -> Body:
        if await self._client.reset_prefix_cache() is False:
            raise InvalidArgument("vLLM did not clear its cache: blocks of running requests are in it")
        if not self._is_paused and not self._is_asleep:  # vLLM tells routers of it with its next step only
            async with asyncio.timeout(STEP_SECONDS):
                await self._make_step()
        return {"message": "the prefix cache is empty"}

    async def start_profile(self, _body: Mapping[str, Any]) -> Body:
        await self._client.start_profile()
        return {"message": "profiling"}

    async def stop_profile(self, _body: Mapping[str, Any]) -> Body:
        await self._client.stop_profile()
        return {"message": "profile written"}


Operation = tuple[Callable[[VllmOperations, Mapping[str, Any]], Awaitable[Body]], frozenset[str]]

# Name -> (what does it, the members its body may have).
CONTROLS: Final[dict[str, Operation]] = {
    "pause_generation": (VllmOperations.pause_generation, frozenset({"mode"})),
    "resume_generation": (VllmOperations.resume_generation, frozenset()),
    "sleep": (VllmOperations.sleep, frozenset({"level"})),
    "wake_up": (VllmOperations.wake_up, frozenset()),
    "clear_kv_blocks": (VllmOperations.clear_kv_blocks, frozenset()),
    "start_profile": (VllmOperations.start_profile, frozenset()),
    "stop_profile": (VllmOperations.stop_profile, frozenset()),
}


def _one_of(body: Mapping[str, Any], name: str, allowed: tuple[Any, ...], default: Any) -> Any:
    value = body.get(name, default)
    if value not in allowed or isinstance(value, bool):
        raise InvalidArgument(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")
    return value


def _error(message: str) -> Body:
    return {"status": "error", "message": message}
