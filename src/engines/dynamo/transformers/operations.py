"""What an operator may do with a running transformers: halt it, empty its cache, change its weights, profile it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from dynamo.engines.operations import CONTROLS, UPDATES, Body, EngineOperations, Operation
from dynamo.engines.weight_files import check_alike
from dynamo.errors import InvalidArgument
from dynamo.worker.adapters import path_member

NAME: Final = "transformers"

_NO_MEMORY: Final = "transformers has no call that gives its memory back; end this worker and start it again"
_NO_GROUP: Final = "weights come from a directory here: update_weights_from_disk"
_NO_LORA: Final = "adapters are not built for transformers; vLLM and the reference engine have them"
_NO_EXPERTS: Final = "transformers runs in one process; there is no expert parallelism to scale"
REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("sleep", "wake_up", "release_memory_occupation", "resume_memory_occupation"), _NO_MEMORY),
    **dict.fromkeys(("scale_elastic_ep", "is_scaling_elastic_ep", "ep_capacity"), _NO_EXPERTS),
    **dict.fromkeys(
        (
            "update_weights_from_tensor", "update_weights_from_distributed", "update_weights_from_ipc",
            "init_weights_update_group", "destroy_weights_update_group",
        ),
        _NO_GROUP,
    ),
    "update_weight_version": "transformers has no version of weights",
    **dict.fromkeys(("load_lora", "unload_lora", "list_loras"), _NO_LORA),
}  # fmt: skip


def embedding_operations() -> EngineOperations:
    """Return the operations of a worker that makes vectors: there are none."""
    reason = "this worker makes embeddings; controls are of workers that generate"
    return EngineOperations(NAME, {}, {}, dict.fromkeys(CONTROLS | UPDATES, reason))


class _Pause:
    """Holds transformers' pause from a thread of its own: a pause belongs to the thread that entered it."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._leave = threading.Event()
        self._thread: threading.Thread | None = None

    async def enter(self) -> None:
        """Return once the step that runs has ended and no other begins. Raises RuntimeError where generation has ended."""
        loop = asyncio.get_running_loop()
        entered: asyncio.Future[None] = loop.create_future()

        def settle(error: Exception | None) -> None:
            if entered.done():
                return
            if error is None:
                entered.set_result(None)
            else:
                entered.set_exception(error)

        def hold() -> None:
            try:
                with self._manager.pause():
                    loop.call_soon_threadsafe(settle, None)
                    self._leave.wait()
            except Exception as error:  # handed to the caller, which waits
                loop.call_soon_threadsafe(settle, error)

        self._thread = threading.Thread(target=hold, name="transformers-pause", daemon=True)
        self._thread.start()
        try:
            await entered
        except BaseException:
            self._leave.set()
            raise

    async def leave(self) -> None:
        """Let generation go on. Safe twice."""
        self._leave.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)


class TransformersOperations:
    """The controls of one engine. On the event loop only."""

    def __init__(self, manager: Any, model: str) -> None:
        """`manager`: transformers' `ContinuousBatchingManager`. `model`: the directory of the weights."""
        self._manager, self._directory = manager, Path(model)
        self._pause: _Pause | None = None
        self._profile: Any = None
        self.table = EngineOperations(
            NAME,
            {
                "pause_generation": Operation(self._pause_generation),
                "resume_generation": Operation(self._resume_generation),
                "clear_kv_blocks": Operation(self._clear_kv_blocks),
                "start_profile": Operation(self._start_profile),
                "stop_profile": Operation(self._stop_profile, frozenset({"path"})),
            },
            {"update_weights_from_disk": Operation(self._update_weights, frozenset({"model_path"}))},
            REFUSED,
        )

    async def close(self) -> None:
        """Let generation go on, so that it can end."""
        pause, self._pause = self._pause, None
        if pause is not None:
            await pause.leave()

    async def _pause_generation(self, _body: Mapping[str, Any]) -> Body:
        if self._pause is None:
            self.table.halted_until = "resume_generation"  # first: what arrives from here on goes elsewhere
            pause = _Pause(self._manager)
            try:
                await pause.enter()
            except BaseException:
                self.table.halted_until = ""
                raise
            self._pause = pause
        return {"message": "paused; running requests wait"}

    async def _resume_generation(self, _body: Mapping[str, Any]) -> Body:
        await self.close()
        self.table.halted_until = ""
        return {"message": "resumed"}

    @asynccontextmanager
    async def _between_steps(self) -> AsyncIterator[None]:
        pause = _Pause(self._manager)
        await pause.enter()
        try:
            yield
        finally:
            await pause.leave()

    async def _clear_kv_blocks(self, _body: Mapping[str, Any]) -> Body:
        async with self._between_steps():
            self._forget_blocks()
        return {"status": "success", "message": "KV cache cleared"}

    def _forget_blocks(self) -> None:
        self._manager.batch_processor.cache.evict_cached_blocks()  # those that no request holds

    async def _update_weights(self, body: Mapping[str, Any]) -> Body:
        """Go on with the weights of another directory: same shapes, other values."""
        directory = path_member(body, "model_path")
        await asyncio.to_thread(check_alike, self._directory, directory)
        weights = await asyncio.to_thread(_read_weights, self._manager.model, directory)
        async with self._between_steps():
            running = len(self._manager.output_router.result_handlers)
            if running:  # what they have in the cache is of the weights that go
                raise InvalidArgument(f"{running} requests are running; drain the worker first (POST /engine/drain)")
            await asyncio.to_thread(self._manager.model.load_state_dict, weights)
            self._forget_blocks()
        self._directory = directory
        return {"model_path": str(directory)}

    async def _start_profile(self, _body: Mapping[str, Any]) -> Body:
        if self._profile is not None:
            raise InvalidArgument("a profile is being taken already; stop_profile ends it")
        self._profile = await asyncio.to_thread(_begin_profile)
        return {"message": "profiling"}

    async def _stop_profile(self, body: Mapping[str, Any]) -> Body:
        """Write what torch's profiler has seen to `path`, as a trace that chrome://tracing and Perfetto read."""
        path = body.get("path")
        if not isinstance(path, str) or not path:
            raise InvalidArgument(f"path must be a file to write the trace to, got {path!r}")
        if self._profile is None:
            raise InvalidArgument("no profile is being taken; start_profile begins one")
        profile, self._profile = self._profile, None
        await asyncio.to_thread(_end_profile, profile, path)
        return {"message": f"profile written to {path}"}


def _read_weights(model: Any, directory: Path) -> Any:
    """Return the values of another directory, by the names of the running model; blocking."""
    try:
        other = type(model).from_pretrained(directory, dtype=model.dtype, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise InvalidArgument(f"transformers cannot load {directory}: {error}") from error
    return other.state_dict()


def _begin_profile() -> Any:
    from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile, supported_activities

    chosen = [each for each in (ProfilerActivity.CPU, ProfilerActivity.CUDA) if each in supported_activities()]
    # Without it torch sees the thread that began the profile, and transformers generates in another one.
    begun = profile(activities=chosen, experimental_config=_ExperimentalConfig(profile_all_threads=True))
    begun.start()
    return begun


def _end_profile(profile: Any, path: str) -> None:
    profile.stop()
    try:
        profile.export_chrome_trace(path)
    except (OSError, RuntimeError) as error:
        raise InvalidArgument(f"path {path!r} cannot be written: {error}") from error
