"""What an operator may do with a running vLLM: halt it, take its memory, empty its cache, change its weights, read its state."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from dynamo.engines.operations import error_body
from dynamo.engines.weight_files import check_alike
from dynamo.errors import DynamoException, InvalidArgument, WorkerUnavailable
from dynamo.vllm.adapters import AdapterLimits, VllmAdapters
from dynamo.worker.adapters import path_member

Body = dict[str, Any]

PAUSE_MODES: Final = ("keep", "wait", "abort")
STEP_SECONDS: Final = 10.0
SLEEP_LEVELS: Final = (1, 2)


class VllmOperations:
    """The controls of one engine. On the event loop only."""

    def __init__(
        self,
        client: Any,
        make_step: Callable[[], Awaitable[None]],
        *,
        model: str = "",
        limits: AdapterLimits | None = None,
        parallel: Any = None,
    ) -> None:
        """`client`: vLLM's `AsyncLLM`. `make_step` has the engine compute something, however little.

        `model`: what is served, a directory or a name. `limits`: of its adapters; None: it takes none. `parallel`: vLLM's
        `ParallelConfig`.
        """
        self._client, self._make_step = client, make_step
        self._is_asleep = self.is_paused = False
        self.weight_version: str | None = None  # as it was declared with the weights; None: it was not
        self.experts = ElasticExperts(client, parallel)
        self._directory = Path(model)  # of the weights
        self.adapters = VllmAdapters(client, limits, self.forget_blocks)
        self.lock = asyncio.Lock()  # held while weights change, and while the engine is paused or resumed

    def check_serving(self) -> None:
        """Raise WorkerUnavailable while the model's memory is given away: another worker serves the request."""
        if self._is_asleep:
            raise WorkerUnavailable("vLLM is asleep; wake_up ends that")

    def refusal(self, name: str, body: Mapping[str, Any]) -> Body | None:
        """Return the answer to a control that cannot be done, before anything is touched."""
        return unknown_field(body, CONTROLS[name][1])

    async def control(self, name: str, body: Mapping[str, Any]) -> Body:
        """Do it; a failure that the caller should read is a body with `"status": "error"`."""
        return await self._serve(CONTROLS, name, body)

    async def update(self, name: str, body: Mapping[str, Any]) -> Body:
        """Do it; as `control`."""
        return await self._serve(UPDATES, name, body)

    async def _serve(self, table: Mapping[str, Operation], name: str, body: Mapping[str, Any]) -> Body:
        if name not in table:
            return error_body(f"unknown operation {name!r}; there are {', '.join(sorted(table))}")
        operation, fields = table[name]
        if (refusal := unknown_field(body, fields)) is not None:
            return refusal
        try:
            found = await operation(self, body)
        except InvalidArgument as error:
            return error_body(str(error))
        except DynamoException:
            raise
        except Exception as error:  # vLLM's own message names what is missing, such as --profiler-config
            return error_body(f"{type(error).__name__}: {error}")
        return {"status": "ok", **found}

    async def pause_generation(self, body: Mapping[str, Any]) -> Body:
        mode = member_of(body, "mode", PAUSE_MODES, "keep")
        await self.pause(mode, clears_cache=False)
        return {"message": f"paused; running requests: {mode}"}

    async def resume_generation(self, _body: Mapping[str, Any]) -> Body:
        async with self.lock:
            await self._client.resume_generation()
            self.is_paused = False
        return {"message": "resumed"}

    async def pause(self, mode: str, *, clears_cache: bool) -> None:
        """Halt the engine, with what is to become of the requests that run: one of `PAUSE_MODES`."""
        async with self.lock:
            await self._client.pause_generation(mode=mode, clear_cache=clears_cache)
            self.is_paused = True

    async def sleep(self, body: Mapping[str, Any]) -> Body:
        level = member_of(body, "level", SLEEP_LEVELS, 1)
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
        if not self.is_paused and not self._is_asleep:  # vLLM publishes it to routers with its next step only
            async with asyncio.timeout(STEP_SECONDS):
                await self._make_step()
        return {"message": "the prefix cache is empty"}

    async def forget_blocks(self) -> None:
        """Empty the prefix cache, also of what running requests have in it: they compute it again. Raises InvalidArgument."""
        if await self._client.reset_prefix_cache(reset_running_requests=True) is False:
            raise InvalidArgument("vLLM did not clear its cache")

    async def update_weights(self, body: Mapping[str, Any], rpc: str = "reload_weights") -> Body:
        """Go on with the weights of another directory: same shapes, other values. Streams recompute and go on.

        `rpc`: the method of vLLM's workers that reads them.
        """
        directory = path_member(body, "model_path")
        version = text_member(body, "weight_version")
        async with self.lock:
            if self._is_asleep:
                raise InvalidArgument("vLLM is asleep; wake it up first")
            if self.adapters.count:
                raise InvalidArgument(f"{self.adapters.count} LoRA adapters are loaded; unload them first")
            if not self._directory.is_dir():
                raise InvalidArgument(
                    f"the weights that are served came from {self._directory}, which is not a directory to compare with"
                )
            await asyncio.to_thread(check_alike, self._directory, directory)
            if not self.is_paused:
                await self._client.pause_generation(mode="keep", clear_cache=False)
            try:
                await self._client.collective_rpc(rpc, kwargs={"weights_path": str(directory)})
                await self.forget_blocks()
                if version is not None and hasattr(self._client, "update_weight_version"):
                    await self._client.update_weight_version(version)
            finally:
                if not self.is_paused:
                    await self._client.resume_generation()
            self._directory, self.weight_version = directory, version
        return {"model_path": str(directory)}

    async def load_lora(self, body: Mapping[str, Any]) -> Body:
        return await self.adapters.load_lora(body)

    async def unload_lora(self, body: Mapping[str, Any]) -> Body:
        return await self.adapters.unload_lora(body)

    async def list_loras(self, body: Mapping[str, Any]) -> Body:
        return await self.adapters.list_loras(body)

    async def start_profile(self, _body: Mapping[str, Any]) -> Body:
        await self._client.start_profile()
        return {"message": "profiling"}

    async def stop_profile(self, _body: Mapping[str, Any]) -> Body:
        await self._client.stop_profile()
        return {"message": "profile written"}

    async def scale_elastic_ep(self, body: Mapping[str, Any]) -> Body:
        return await self.experts.scale(body)

    async def ep_capacity(self, _body: Mapping[str, Any]) -> Body:
        return await self.experts.capacity()


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
    "scale_elastic_ep": (VllmOperations.scale_elastic_ep, frozenset({"new_data_parallel_size"})),
    "ep_capacity": (VllmOperations.ep_capacity, frozenset()),
}
UPDATES: Final[dict[str, Operation]] = {
    "load_lora": (VllmOperations.load_lora, frozenset({"lora_name", "lora_path", "source"})),
    "unload_lora": (VllmOperations.unload_lora, frozenset({"lora_name"})),
    "list_loras": (VllmOperations.list_loras, frozenset()),
    "update_weights_from_disk": (VllmOperations.update_weights, frozenset({"model_path", "weight_version"})),
}


def unknown_field(body: Mapping[str, Any], fields: frozenset[str]) -> Body | None:
    """Return the answer to a body with a member that is not known; None: there is none."""
    unknown = sorted(set(body) - fields)
    if not unknown:
        return None
    known = f"known are {', '.join(sorted(fields))}" if fields else "there are none"
    return error_body(f"unknown field {unknown[0]!r}; {known}")


def member_of(body: Mapping[str, Any], name: str, allowed: tuple[Any, ...], default: Any) -> Any:
    """Return a member of a body that is one of some values. Raises InvalidArgument naming the member."""
    value = body.get(name, default)
    if value not in allowed or isinstance(value, bool):
        raise InvalidArgument(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")
    return value


def text_member(body: Mapping[str, Any], name: str) -> str | None:
    """Return a member of a body that is a text, or absent. Raises InvalidArgument naming the member."""
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidArgument(f"{name} must be a string, got {value!r}")
    return value


logger = logging.getLogger(__name__)

SIZE: Final = "new_data_parallel_size"
NOT_ENABLED: Final = (
    "elastic EP scaling is not enabled on this worker; it requires enable_elastic_ep=true and data_parallel_backend=ray"
)


class ElasticExperts:
    """Elastic expert parallelism: a running vLLM gets more ranks, or fewer, where it was started for that, on Ray.

    On the event loop only.
    """

    def __init__(self, client: Any, parallel: Any) -> None:
        """`client`: vLLM's `AsyncLLM`. `parallel`: its `ParallelConfig`, whose size vLLM keeps up to date; None: one rank."""
        self._client, self._parallel = client, parallel
        self._is_scaling = False
        self.failure = ""  # why the engine is neither what it was nor what it was to become

    async def scale(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Change the number of data-parallel ranks. Raises InvalidArgument for a size that is not one, and while a scale runs."""
        size = body.get(SIZE)
        if size is None:
            raise InvalidArgument(f"Missing required field: {SIZE}")
        if type(size) is not int:
            raise InvalidArgument(f"{SIZE} must be an integer, got: {size}")
        if size < 1:
            raise InvalidArgument(f"{SIZE} must be >= 1, got: {size}")
        self._check_enabled()
        if self._is_scaling:
            raise InvalidArgument(
                f"A scale_elastic_ep operation is already in progress; rejecting concurrent request for {SIZE}={size}"
            )
        self._is_scaling = True
        try:
            await self._client.scale_elastic_ep(size)
        except BaseException as error:
            self.failure = f"scale_elastic_ep to {size} ranks failed: {type(error).__name__}: {error}"
            logger.error("%s; the worker ends", self.failure)
            raise
        finally:
            self._is_scaling = False
        return {"message": f"Scaled to data_parallel_size={size}", SIZE: size}

    async def capacity(self) -> dict[str, Any]:
        """Return how many ranks there are, and the GPUs of the Ray cluster. Raises InvalidArgument without elastic EP."""
        self._check_enabled()
        parallel = self._parallel
        return {
            "data_parallel_size": parallel.data_parallel_size,
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "data_parallel_backend": parallel.data_parallel_backend,
            "data_parallel_external_lb": bool(getattr(parallel, "data_parallel_external_lb", False)),
            **await asyncio.to_thread(_gpus),
        }

    def _check_enabled(self) -> None:
        parallel = self._parallel
        if not getattr(parallel, "enable_elastic_ep", False) or parallel.data_parallel_backend != "ray":
            raise InvalidArgument(NOT_ENABLED)


def _gpus() -> dict[str, Any]:
    import ray

    total, available = (int(found.get("GPU", 0)) for found in (ray.cluster_resources(), ray.available_resources()))
    nodes = [
        {
            "node_id": node["NodeID"],
            "address": node["NodeManagerAddress"],
            "total_gpus": int(node["Resources"].get("GPU", 0)),
        }
        for node in ray.nodes()
        if node["Alive"]
    ]
    return {"total_gpus": total, "available_gpus": available, "used_gpus": total - available, "nodes": nodes}
