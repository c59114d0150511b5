"""What an operator may do with a running SGLang: halt it, take its memory, empty its cache, change its weights, profile it.

Everything goes to SGLang's tokenizer manager, on the loop of its thread, as its own HTTP routes do it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dynamo.engines.operations import Body, EngineOperations, Operation, one_of
from dynamo.engines.weight_files import check_alike
from dynamo.errors import InvalidArgument
from dynamo.sglang.engine_thread import EngineThread
from dynamo.worker.adapters import path_member

NAME: Final = "SGLang"
PAUSE_MODES: Final = ("keep", "retract", "abort")
PROFILE_FIELDS: Final = frozenset({"output_dir", "start_step", "num_steps", "activities", "profile_prefix"})
# What these methods get is not followed by SGLang's HTTP request.
WITHOUT_REQUEST: Final = ("PauseGenerationReqInput", "ContinueGenerationReqInput", "ScaleElasticEPReqInput")
MEMORY: Final = ("release_memory_occupation", "resume_memory_occupation")

_NO_SAVER: Final = "SGLang gives no memory back: start it with --enable-memory-saver"
_NO_EXPERTS: Final = "elastic EP is not enabled (set --elastic-ep-backend)"
_OLD: Final = "this release of SGLang cannot change the number of its ranks; 0.5.16 can"
_NO_CAPACITY: Final = "SGLang does not report the GPUs of its cluster; is_scaling_elastic_ep has its ranks"
EXPERTS: Final = ("scale_elastic_ep", "is_scaling_elastic_ep")
_NO_LORA: Final = "adapters are not built for SGLang; vLLM and the reference engine have them"
REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("sleep", "wake_up"), f"the names are {' and '.join(MEMORY)} for SGLang"),
    "ep_capacity": _NO_CAPACITY,
    "update_weights_from_tensor": "tensors do not travel in a JSON body; use a directory or a weights update group",
    "update_weight_version": "give weight_version with the update of the weights",
    **dict.fromkeys(("load_lora", "unload_lora", "list_loras"), _NO_LORA),
}


class SglangOperations:
    """The controls of one engine. On the event loop only."""

    def __init__(self, thread: EngineThread, model: str) -> None:
        """`model`: what is served, a directory or a name."""
        self._thread, self._directory = thread, Path(model).expanduser()
        controls = {
            "pause_generation": Operation(self._pause_generation, frozenset({"mode"})),
            "resume_generation": Operation(self._resume_generation),
            "clear_kv_blocks": Operation(self._clear_kv_blocks),
            "start_profile": Operation(self._start_profile, PROFILE_FIELDS),
            "stop_profile": Operation(self._stop_profile),
        }
        refused = dict(REFUSED)
        if thread.engine.server_args.enable_memory_saver:
            controls["release_memory_occupation"] = Operation(self._release, frozenset({"tags"}))
            controls["resume_memory_occupation"] = Operation(self._resume, frozenset({"tags"}))
        else:
            refused |= dict.fromkeys(MEMORY, _NO_SAVER)
        if getattr(thread.engine.server_args, "elastic_ep_backend", None) is None:
            refused |= dict.fromkeys(EXPERTS, _NO_EXPERTS)
        elif not hasattr(self._manager, "get_elastic_ep_state"):
            refused |= dict.fromkeys(EXPERTS, _OLD)
        else:
            controls["scale_elastic_ep"] = Operation(self._scale, frozenset({"new_ep_size"}))
            controls["is_scaling_elastic_ep"] = Operation(self._scaling)
        group = frozenset(
            {"master_address", "master_port", "rank_offset", "world_size", "group_name", "backend"}
        )  # as SGLang's own request has them
        sent = frozenset({"names", "dtypes", "shapes", "group_name", "flush_cache", "weight_version", "load_format"})
        self.table = EngineOperations(
            NAME,
            controls,
            {
                "update_weights_from_disk": Operation(
                    self._update_from_disk, frozenset({"model_path", "load_format", "weight_version"})
                ),
                "init_weights_update_group": Operation(self._init_group, group),
                "update_weights_from_distributed": Operation(self._update_from_group, sent),
                "destroy_weights_update_group": Operation(self._destroy_group, frozenset({"group_name"})),
                "update_weights_from_ipc": Operation(
                    self._update_from_ipc, frozenset({"zmq_handles", "flush_cache", "weight_version"})
                ),
            },
            refused,
        )

    @property
    def _manager(self) -> Any:
        return self._thread.engine.tokenizer_manager

    async def _ask(self, method: str, structure: str, members: Mapping[str, Any]) -> Any:
        """Return what a method of the tokenizer manager returns for one of SGLang's request structures."""
        from sglang.srt.managers import io_struct

        try:
            asked = getattr(io_struct, structure)(**members)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"{method}: {error}") from error
        given = (asked,) if structure in WITHOUT_REQUEST else (asked, None)
        return await self._thread.ask(lambda: getattr(self._manager, method)(*given))

    # -- halting and memory -------------------------------------------------------------------------------------------

    async def _pause_generation(self, body: Mapping[str, Any]) -> Body:
        mode = one_of(body, "mode", PAUSE_MODES)
        self.table.halted_until = self.table.halted_until or "resume_generation"
        theirs = "in_place" if mode == "keep" else mode
        await self._ask("pause_generation", "PauseGenerationReqInput", {"mode": theirs})
        return {"message": f"paused; running requests: {mode}"}

    async def _resume_generation(self, _body: Mapping[str, Any]) -> Body:
        if self.table.halted_until == MEMORY[1]:
            raise InvalidArgument(f"the memory is released, and only {MEMORY[1]} ends that")
        await self._ask("continue_generation", "ContinueGenerationReqInput", {})
        self.table.halted_until = ""
        return {"message": "resumed"}

    async def _release(self, body: Mapping[str, Any]) -> Body:
        before, self.table.halted_until = self.table.halted_until, MEMORY[1]
        try:
            if running := len(self._manager.rid_to_state):  # SGLang's scheduler would end
                raise InvalidArgument(f"{running} requests are running; drain the worker first (POST /engine/drain)")
            await self._ask(MEMORY[0], "ReleaseMemoryOccupationReqInput", body)
        except BaseException:
            self.table.halted_until = before
            raise
        return {"message": "memory released", "is_sleeping": True}

    async def _resume(self, body: Mapping[str, Any]) -> Body:
        await self._ask(MEMORY[1], "ResumeMemoryOccupationReqInput", body)
        self.table.halted_until = ""
        return {"message": "memory resumed"}

    async def _clear_kv_blocks(self, _body: Mapping[str, Any]) -> Body:
        found = await self._thread.ask(lambda: self._manager.flush_cache())
        if not found.success:
            raise InvalidArgument("Cannot clear KV cache while requests are active")
        return {"status": "success", "message": "KV cache cleared"}

    # -- ranks --------------------------------------------------------------------------------------------------------

    async def _scale(self, body: Mapping[str, Any]) -> Body:
        """Change the number of expert-parallel ranks, as far as others have been started that join."""
        size = body.get("new_ep_size")
        if size is None:
            raise InvalidArgument("Missing required field: new_ep_size")
        if type(size) is not int:
            raise InvalidArgument(f"new_ep_size must be an integer, got: {size!r}")
        if size < 1:
            raise InvalidArgument("new_ep_size must be a positive integer")
        found = await self._ask("scale_elastic_ep", "ScaleElasticEPReqInput", body)
        said = found.message or (f"Scaled to ep_size={size}" if found.success else "scale_elastic_ep failed")
        sizes = {"message": said, "old_ep_size": found.old_ep_size, "new_ep_size": found.new_ep_size}
        if found.success:
            return sizes
        pending = getattr(found, "pending_ep_size", None)
        return {"status": "error", **sizes, **({} if pending is None else {"pending_ep_size": pending})}

    async def _scaling(self, _body: Mapping[str, Any]) -> Body:
        async def read() -> Any:
            return self._manager.get_elastic_ep_state()

        return dict(await self._thread.ask(read))

    # -- profile ------------------------------------------------------------------------------------------------------

    async def _start_profile(self, body: Mapping[str, Any]) -> Body:
        start = self._manager.start_profile
        if "output_dir" in inspect.signature(start).parameters:  # until 0.5.23
            await self._thread.ask(lambda: start(**body))
        else:
            from sglang.srt.managers.io_struct import ProfileReq

            await self._thread.ask(lambda: start(ProfileReq(**body)))
        return {"message": "profiling"}

    async def _stop_profile(self, _body: Mapping[str, Any]) -> Body:
        await self._thread.ask(lambda: self._manager.stop_profile())
        return {"message": "profile written"}

    # -- weights ------------------------------------------------------------------------------------------------------

    async def _update_from_disk(self, body: Mapping[str, Any]) -> Body:
        """Go on with the weights of another directory: same shapes, other values. SGLang empties its cache."""
        directory = path_member(body, "model_path")
        if self._directory.is_dir():
            await asyncio.to_thread(check_alike, self._directory, directory)
        await self._changed("update_weights_from_disk", "UpdateWeightFromDiskReqInput", body)
        self._directory = directory
        return {"model_path": str(directory)}

    async def _init_group(self, body: Mapping[str, Any]) -> Body:
        return await self._changed("init_weights_update_group", "InitWeightsUpdateGroupReqInput", body)

    async def _destroy_group(self, body: Mapping[str, Any]) -> Body:
        return await self._changed("destroy_weights_update_group", "DestroyWeightsUpdateGroupReqInput", body)

    async def _update_from_group(self, body: Mapping[str, Any]) -> Body:
        return await self._changed("update_weights_from_distributed", "UpdateWeightsFromDistributedReqInput", body)

    async def _update_from_ipc(self, body: Mapping[str, Any]) -> Body:
        return await self._changed("update_weights_from_ipc", "UpdateWeightsFromIPCReqInput", body)

    async def _changed(self, method: str, structure: str, body: Mapping[str, Any]) -> Body:
        """Return SGLang's message. Raises InvalidArgument with it where SGLang reports a failure."""
        succeeded, message, *_ = await self._ask(method, structure, body)
        if not succeeded:
            raise InvalidArgument(str(message))
        return {"message": str(message)}
