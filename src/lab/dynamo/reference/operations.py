"""What an operator may do with a running engine: halt it, take its memory, change its weights, add adapters, read its state.

No operation drops a stream. A halted engine's streams wait; what is taken from them (blocks, weights) they compute again.
"""

from __future__ import annotations

import asyncio
import cProfile
import pstats
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeVar

from dynamo.errors import DynamoException, EngineShutdown, InvalidArgument, WorkerUnavailable
from dynamo.protocol.openai.shapes import JsonMapping
from dynamo.reference.config import ModelConfig, read_model_config
from dynamo.reference.core import Core
from dynamo.reference.loading import check_memory
from dynamo.reference.lora import Adapter, load_adapter
from dynamo.reference.weights import Weights, load_weights
from dynamo.worker.adapters import adapter_directory, adapter_name, adapter_source, path_member, publish_adapter
from dynamo.worker.registration import ModelEndpoint, unregister_model

T = TypeVar("T")
Body = dict[str, object]

PROFILE_ROWS: Final = 40  # of the functions that took the most time


class Steps(Protocol):
    """What operations need of the thread that computes."""

    async def ask(self, question: Callable[[Core], T]) -> T:
        """Run a question between two steps and return its answer."""
        ...


class _Served(NamedTuple):
    directory: Path
    config: ModelConfig
    cache_tokens: int
    max_loras: int
    may_sleep: bool


class Operations:
    """One engine's controls and updates. On the event loop only; those that change something run one at a time."""

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        steps: Steps,
        *,
        cache_tokens: int,
        max_loras: int,
        may_sleep: bool = True,
    ) -> None:
        """`directory` is where the weights came from; `cache_tokens` is what the KV cache holds.

        `may_sleep` False: the cache's memory must stay where it is.
        """
        self.adapters: dict[str, Adapter] = {}  # loaded, by name
        self.endpoint: ModelEndpoint | None = None  # where adapters are reported to frontends
        self._served = _Served(directory, config, cache_tokens, max_loras, may_sleep)
        self._steps = steps
        self._sleep_level = 0  # 0: awake
        self._is_paused = False
        self._profile: cProfile.Profile | None = None
        self._lock = asyncio.Lock()

    def check_serving(self) -> None:
        """Raises WorkerUnavailable, and another worker is tried, while the engine is halted."""
        if self._sleep_level:
            raise WorkerUnavailable("this engine sleeps; wake it up with POST /engine/control/wake_up")
        if self._is_paused:
            raise WorkerUnavailable("this engine is paused; POST /engine/control/resume_generation resumes it")

    def refusal(self, name: str, body: JsonMapping) -> Body | None:
        """Check a control's body before any action; return what is wrong with it."""
        try:
            _checked(body, CONTROLS[name][1])
            if name == "sleep":
                self._check_sleep(body)
        except InvalidArgument as error:
            return _error(str(error))
        return None

    async def control(self, name: str, body: JsonMapping) -> Body:
        return await self._serve(CONTROLS, name, body)

    async def update(self, name: str, body: JsonMapping) -> Body:
        return await self._serve(UPDATES, name, body)

    async def _serve(self, table: Mapping[str, Operation], name: str, body: JsonMapping) -> Body:
        if name not in table:
            return _error(f"unknown operation {name!r}; there are {', '.join(sorted(table))}")
        operation, fields = table[name]
        try:
            _checked(body, fields)
            async with self._lock:
                return {"status": "ok", **await operation(self, body)}
        except DynamoException as error:  # a refusal is an answer in this language
            return _error(str(error))

    # -- memory -------------------------------------------------------------------------------------------------------

    async def sleep(self, body: JsonMapping) -> Body:
        """Let the KV cache's memory go (level 1), with level 2 the weights' too. Streams wait."""
        before, level = self._sleep_level, max(self._check_sleep(body), self._sleep_level)
        self._sleep_level = level
        try:
            await self._steps.ask(lambda core: core.release(weights=level == 2))
        except DynamoException:
            self._sleep_level = before
            raise
        return {"is_sleeping": True, "level": level}

    def _check_sleep(self, body: Mapping[str, object]) -> int:
        level = body.get("level", 1)
        if level not in (1, 2) or isinstance(level, bool):
            raise InvalidArgument(f"level must be 1 (the KV cache) or 2 (the weights too), got {level!r}")
        if not self._served.may_sleep:
            raise InvalidArgument("a prefill worker with --kv-transfer nixl cannot sleep: others read its memory")
        return int(level)

    async def wake_up(self, _body: JsonMapping) -> Body:
        """Take the memory again and go on. Too little of it: an error, and the engine sleeps on."""
        if self._sleep_level:
            without_weights = self._sleep_level == 2
            check_memory(self._served.config, weights=without_weights, cache_tokens=self._served.cache_tokens)
            weights = (
                await asyncio.to_thread(load_weights, self._served.directory, self._served.config)
                if without_weights
                else None
            )
            await self._steps.ask(lambda core: core.restore(weights))
            self._sleep_level = 0
        await self._halt_or_go_on()
        return {"is_sleeping": False}

    async def pause_generation(self, _body: Mapping[str, object]) -> Body:
        """Compute nothing until resumed; everything stays where it is."""
        self._is_paused = True
        await self._halt_or_go_on()
        return {"is_paused": True}

    async def resume_generation(self, _body: Mapping[str, object]) -> Body:
        if self._sleep_level:
            raise InvalidArgument("the engine sleeps, and only wake_up ends that")
        self._is_paused = False
        await self._halt_or_go_on()
        return {"is_paused": False}

    async def _halt_or_go_on(self) -> None:
        is_halted = self._is_paused or self._sleep_level > 0

        def set_halted(core: Core) -> None:
            core.is_halted = is_halted

        await self._steps.ask(set_halted)

    async def clear_kv_blocks(self, _body: Mapping[str, object]) -> Body:
        """Forget every cached prefix that no stream uses at the moment."""
        return {"cleared_blocks": await self._steps.ask(lambda core: core.clear_cache())}

    # -- profile ------------------------------------------------------------------------------------------------------

    async def start_profile(self, _body: Mapping[str, object]) -> Body:
        """Count where the step thread's time goes, from now on."""
        if self._profile is not None:
            raise InvalidArgument("a profile is being taken already; stop_profile ends it")
        profile = cProfile.Profile()
        try:
            await self._steps.ask(lambda _core: profile.enable())
        except ValueError as error:  # the interpreter has one profiler at a time
            raise InvalidArgument(f"another profiler is at work in this process: {error}") from error
        self._profile = profile
        return {}

    async def stop_profile(self, body: Mapping[str, object]) -> Body:
        """Return the functions that took the most time; with `path` the whole profile is written there (for `pstats`)."""
        profile, path = self._profile, body.get("path")
        if profile is None:
            raise InvalidArgument("no profile is being taken; start_profile begins one")
        if path is not None and not isinstance(path, str):
            raise InvalidArgument(f"path must be a file to write, got {path!r}")
        self._profile = None
        await self._steps.ask(lambda _core: profile.disable())
        if path is not None:
            try:
                await asyncio.to_thread(profile.dump_stats, path)
            except OSError as error:
                raise InvalidArgument(f"path {path!r} cannot be written: {error.strerror or error}") from error
        return {"functions": await asyncio.to_thread(_slowest, profile)}

    # -- weights and adapters -----------------------------------------------------------------------------------------

    async def update_weights(self, body: Mapping[str, object]) -> Body:
        """Go on with the weights of another directory: same shapes, other values. Streams recompute and go on."""
        directory = path_member(body, "model_path")
        if self._sleep_level:
            raise InvalidArgument("the engine sleeps; wake it up first")
        weights = await asyncio.to_thread(_read_alike, directory, self._served.config)
        await self._steps.ask(lambda core: core.replace_weights(weights))
        self._served = self._served._replace(directory=directory)
        return {"model_path": str(directory)}

    async def load_lora(self, body: JsonMapping) -> Body:
        """Load an adapter under a name, and report the name to frontends as a model. Again: it is replaced."""
        name, directory = adapter_name(body), await adapter_directory(body)
        before = self.adapters.get(name)
        if before is None and len(self.adapters) >= self._served.max_loras:
            raise InvalidArgument(
                f"{len(self.adapters)} adapters are loaded, at most --max-loras {self._served.max_loras}"
            )
        adapter = await asyncio.to_thread(load_adapter, name, directory, self._served.config)
        await self._steps.ask(lambda core: core.add_adapter(adapter))
        self.adapters[name] = adapter
        try:  # last: a frontend that reads the card may send requests at once
            if self.endpoint is not None:
                await publish_adapter(self.endpoint, name, self.adapters, adapter_source(body))
        except BaseException:
            await self._roll_back(name, before)
            raise
        return _described(adapter)

    async def _roll_back(self, name: str, before: Adapter | None) -> None:
        """Serve under a name what was served before, if anything: its card could not be published."""
        if before is None:
            del self.adapters[name]
            await self._steps.ask(lambda core: core.remove_adapter(name))
        else:
            self.adapters[name] = before
            await self._steps.ask(lambda core: core.add_adapter(before))

    async def unload_lora(self, body: JsonMapping) -> Body:
        """Take an adapter away; the streams that use it finish with it."""
        name = adapter_name(body)
        if name not in self.adapters:
            raise InvalidArgument(f"lora_name is {name!r}, but no such adapter is loaded")
        if self.endpoint is not None:
            await unregister_model(self.endpoint, lora_name=name)
        del self.adapters[name]
        await self._steps.ask(lambda core: core.remove_adapter(name))
        return {"lora_name": name}

    async def list_loras(self, _body: JsonMapping) -> Body:
        return {"loras": [_described(adapter) for adapter in self.adapters.values()], "count": len(self.adapters)}


Operation = tuple[Callable[[Operations, Mapping[str, object]], Awaitable[Body]], frozenset[str]]

# Name -> (what does it, the members its body may have).
CONTROLS: Final[dict[str, Operation]] = {
    "sleep": (Operations.sleep, frozenset({"level"})),
    "wake_up": (Operations.wake_up, frozenset()),
    "pause_generation": (Operations.pause_generation, frozenset()),
    "resume_generation": (Operations.resume_generation, frozenset()),
    "clear_kv_blocks": (Operations.clear_kv_blocks, frozenset()),
    "start_profile": (Operations.start_profile, frozenset()),
    "stop_profile": (Operations.stop_profile, frozenset({"path"})),
}
UPDATES: Final[dict[str, Operation]] = {
    "update_weights_from_disk": (Operations.update_weights, frozenset({"model_path"})),
    "load_lora": (Operations.load_lora, frozenset({"lora_name", "lora_path", "source"})),
    "unload_lora": (Operations.unload_lora, frozenset({"lora_name"})),
    "list_loras": (Operations.list_loras, frozenset()),
}


def _error(message: str) -> Body:
    return {"status": "error", "message": message}


def _checked(body: Mapping[str, object], fields: frozenset[str]) -> None:
    unknown = sorted(set(body) - fields)
    if unknown:
        known = f"known are {', '.join(sorted(fields))}" if fields else "there are none"
        raise InvalidArgument(f"unknown field {unknown[0]!r}; {known}")


def _described(adapter: Adapter) -> Body:
    return {"lora_name": adapter.name, "lora_path": str(adapter.directory), "rank": adapter.rank}


def _read_alike(directory: Path, config: ModelConfig) -> Weights:
    """Load the weights of a model whose shape does not differ from ours."""
    other = read_model_config(directory)
    # What only defines when to end, or how to sample, was fixed when the engine started.
    same = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_ids", "sampling", "context_length")}
    if replace(other, **same) != config:
        differing = [
            name for name in config.__slots__ if name not in same and getattr(other, name) != getattr(config, name)
        ]
        raise InvalidArgument(f"{directory} holds another kind of model: {', '.join(differing)} differ")
    try:
        check_memory(config, weights=True, cache_tokens=0)
    except EngineShutdown as error:
        raise InvalidArgument(f"old and new weights do not fit side by side: {error}") from error
    return load_weights(directory, config)


def _slowest(profile: cProfile.Profile) -> list[Body]:
    rows = []
    # pstats keeps its figures in an attribute that its type stub leaves out.
    figures: dict[tuple[str, int, str], tuple[int, int, float, float, object]] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    for (file, line, name), (_, calls, own, total, _) in sorted(figures.items(), key=lambda item: -item[1][2]):
        rows.append({"function": name, "at": f"{file}:{line}", "calls": calls, "own_s": own, "total_s": total})
    return rows[:PROFILE_ROWS]
