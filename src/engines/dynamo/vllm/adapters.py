"""The LoRA adapters of a running vLLM: loaded and taken away while it serves, and looked up for each request.

vLLM knows an adapter by a number, and reads it again from its directory if it has dropped it. So no more adapters are
held than vLLM keeps: a directory that is gone by then would end the engine core.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dynamo.errors import InvalidArgument, WorkerUnavailable
from dynamo.protocol.lora import lora_name_to_id
from dynamo.runtime.base.tasks import Background
from dynamo.worker.adapters import adapter_directory, adapter_name, adapter_source, publish_adapter
from dynamo.worker.registration import ModelEndpoint, unregister_model

logger = logging.getLogger(__name__)

Body = dict[str, Any]

CONFIG: Final = "adapter_config.json"
SPARE_SLOTS: Final = 1
"""Slots for adapters that vLLM gets on a CPU beside those that the operator set.

Where requests with an adapter and without share a step, its CPU code gives those without the adapter of the last slot
(seen in 0.32: the index -1 of `lora/ops/torch_ops`). A slot that is never used holds zeros, which add nothing.
"""
MAX_REMEMBERED: Final = 4096  # names whose blocks may be in the prefix cache; one more empties the cache


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """What a running vLLM takes."""

    most: int  # adapters at once
    flag: str  # by which an operator raises that number
    max_rank: int


def adapter_limits(options: Any, *, is_cpu: bool) -> AdapterLimits | None:
    """Return the limits of vLLM's `LoRAConfig`; None where it was started without adapters.

    On a CPU one slot must stay empty (`SPARE_SLOTS`): `options` counts it, the limits do not.
    """
    if options is None:
        return None
    if is_cpu:
        return AdapterLimits(int(options.max_loras) - SPARE_SLOTS, "--max-loras", int(options.max_lora_rank))
    most = int(options.max_cpu_loras or options.max_loras)
    return AdapterLimits(most, "--max-cpu-loras", int(options.max_lora_rank))


@dataclass(eq=False, slots=True)
class LoadedAdapter:
    """One adapter, from its load until no request uses it any more."""

    name: str
    directory: Path
    rank: int
    version: tuple[str, int]  # of its weights: (directory, time of the last change in ns)
    requests: int = 0  # that use it at the moment
    unused: asyncio.Event = field(default_factory=asyncio.Event)  # set when the last of them ends

    @property
    def number(self) -> int:
        """What vLLM calls it; the same on every worker."""
        return lora_name_to_id(self.name)


class CachedAdapters:
    """The adapters that blocks in the prefix cache were computed with: by name, so that those of another are dropped."""

    def __init__(self, clear: Callable[[], Awaitable[None]]) -> None:
        """`clear` empties the prefix cache; requests that run compute their blocks again."""
        self._clear = clear
        self._versions: dict[str, tuple[str, int]] = {}

    async def make_way(self, adapter: LoadedAdapter) -> None:
        """Empty the cache where blocks of another adapter under this name would be taken for its own."""
        if (
            self._versions.get(adapter.name, adapter.version) != adapter.version
            or len(self._versions) >= MAX_REMEMBERED
        ):
            await self._clear()
            self._versions.clear()

    def add(self, adapter: LoadedAdapter) -> None:
        """Count the blocks under its name as those of `adapter`."""
        self._versions[adapter.name] = adapter.version


class VllmAdapters:
    """The adapters of one engine. On the event loop only; loads and unloads run one at a time."""

    def __init__(
        self,
        client: Any,
        limits: AdapterLimits | None,
        clear_cache: Callable[[], Awaitable[None]],
        make_request: Callable[[str, int, str], Any] | None = None,
    ) -> None:
        """`client`: vLLM's `AsyncLLM`. `limits` None: it was started without --enable-lora.

        `make_request` makes vLLM's `LoRARequest` (the default) of name, number and directory. `clear_cache`: see `CachedAdapters`.
        """
        self.endpoint: ModelEndpoint | None = None  # where adapters are registered for frontends
        self._client, self._limits = client, limits
        self._make_request = make_request or _lora_request
        self._loaded: dict[str, LoadedAdapter] = {}
        self._leaving: dict[str, LoadedAdapter] = {}  # taken away, but some requests still use them
        self._cached = CachedAdapters(clear_cache)
        self._lock = asyncio.Lock()
        self._background = Background()

    @property
    def count(self) -> int:
        """How many adapters vLLM holds."""
        return len(self._loaded) + len(self._leaving)

    @property
    def requests(self) -> int:
        """How many requests use an adapter."""
        return sum(adapter.requests for adapter in (*self._loaded.values(), *self._leaving.values()))

    async def close(self) -> None:
        """Forget the adapters; the engine is about to end."""
        await self._background.close()

    # -- requests -----------------------------------------------------------------------------------------------------

    def of(self, request: Mapping[str, Any]) -> LoadedAdapter | None:
        """Return the adapter of a request, by `routing.lora_name` or by a `model` that is an adapter's name.

        Raises WorkerUnavailable for the name of an adapter that is not loaded: the base model would answer otherwise, and another
        worker may have it.
        """
        name = (request.get("routing") or {}).get("lora_name")
        if not name:
            model = request.get("model")
            return self._loaded.get(model) if isinstance(model, str) else None
        found = self._loaded.get(name) if isinstance(name, str) else None
        if found is None:
            raise WorkerUnavailable(f"routing.lora_name is {name!r}, but no such adapter is loaded on this worker")
        return found

    @contextmanager
    def used(self, adapter: LoadedAdapter | None) -> Iterator[Any]:
        """Keep an adapter for as long as a request runs; gives vLLM's `LoRARequest`, or None for the base model."""
        if adapter is None:
            yield None
            return
        adapter.requests += 1
        try:
            yield self._request(adapter)
        finally:
            adapter.requests -= 1
            if adapter.requests == 0:
                adapter.unused.set()

    # -- updates ------------------------------------------------------------------------------------------------------

    async def load_lora(self, body: Mapping[str, Any]) -> Body:
        """Load an adapter under a name, and publish the name as a model. Loaded already, from there: nothing happens."""
        name, directory = adapter_name(body), await adapter_directory(body)
        async with self._lock:
            adapter = await self._admit(name, directory)
            if adapter is self._loaded.get(name):
                return _described(adapter)
            await self._cached.make_way(adapter)
            try:
                await self._client.add_lora(self._request(adapter))
            except Exception as error:  # vLLM raises all kinds of them, and goes on
                raise InvalidArgument(f"vLLM refuses the adapter at {directory}: {error}") from error
            self._cached.add(adapter)
            self._loaded[name] = adapter
            if self.endpoint is not None:
                try:
                    await publish_adapter(self.endpoint, name, self._loaded, adapter_source(body))
                except BaseException:
                    await self._remove(self._retire(name))
                    raise
        return _described(adapter)

    async def unload_lora(self, body: Mapping[str, Any]) -> Body:
        """Take an adapter away; the streams that use it finish with it."""
        name = adapter_name(body)
        async with self._lock:
            if name not in self._loaded:
                raise InvalidArgument(f"lora_name is {name!r}, but no such adapter is loaded")
            if self.endpoint is not None:
                await unregister_model(self.endpoint, lora_name=name)
            adapter = self._retire(name)
            if adapter.requests == 0:
                await self._remove(adapter)
            else:
                self._background.start(self._remove_when_unused(adapter), f"unload of the adapter {name}")
        return {"lora_name": name}

    async def list_loras(self, _body: Mapping[str, Any]) -> Body:
        return {"loras": [_described(adapter) for adapter in self._loaded.values()], "count": len(self._loaded)}

    async def _admit(self, name: str, directory: Path) -> LoadedAdapter:
        """Return the adapter to load, or the one that is loaded already. Raises InvalidArgument."""
        limits = self._limits
        if limits is None:
            raise InvalidArgument("this worker serves no adapters: start it with --enable-lora")
        before = self._loaded.get(name)
        if before is not None and before.directory == directory:
            return before
        if before is not None:
            raise InvalidArgument(f"lora_name {name!r} is loaded from {before.directory}; unload it first")
        if name in self._leaving:
            left = self._leaving[name].requests
            raise InvalidArgument(f"lora_name {name!r} was unloaded, but {left} requests still use it; try again later")
        held = {**self._loaded, **self._leaving}
        if self.count >= limits.most:
            raise InvalidArgument(f"{self.count} adapters are loaded, at most {limits.flag} {limits.most}")
        adapter = await asyncio.to_thread(_read, name, directory, limits.max_rank)
        for other in held.values():
            if other.number == adapter.number:
                raise InvalidArgument(f"lora_name {name!r} has the number of {other.name!r}; choose another name")
        return adapter

    def _request(self, adapter: LoadedAdapter) -> Any:
        return self._make_request(adapter.name, adapter.number, str(adapter.directory))

    def _retire(self, name: str) -> LoadedAdapter:
        """Let no further request use an adapter."""
        adapter = self._loaded.pop(name)
        self._leaving[name] = adapter
        adapter.unused.clear()
        if adapter.requests == 0:
            adapter.unused.set()
        return adapter

    async def _remove_when_unused(self, adapter: LoadedAdapter) -> None:
        await adapter.unused.wait()
        await self._remove(adapter)

    async def _remove(self, adapter: LoadedAdapter) -> None:
        try:
            await self._client.remove_lora(adapter.number)
        finally:
            self._leaving.pop(adapter.name, None)


def _read(name: str, directory: Path, max_rank: int) -> LoadedAdapter:
    """Check what can be seen from outside; blocking. Raises InvalidArgument naming the file or field."""
    path = directory / CONFIG
    try:
        options = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InvalidArgument(f"{path} is not valid JSON: {error}") from error
    rank = options.get("r") if isinstance(options, dict) else None
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise InvalidArgument(f"{path}: r must be a positive integer, got {rank!r}")
    if rank > max_rank:
        raise InvalidArgument(f"{path}: r is {rank}, and this worker takes at most --max-lora-rank {max_rank}")
    changed = max((entry.stat().st_mtime_ns for entry in directory.glob("adapter_model.*")), default=0)
    return LoadedAdapter(name, directory, rank, (str(directory), changed))


def _lora_request(name: str, number: int, directory: str) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, directory)


def _described(adapter: LoadedAdapter) -> Body:
    return {"lora_name": adapter.name, "lora_path": str(adapter.directory), "rank": adapter.rank}
