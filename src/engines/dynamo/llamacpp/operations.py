"""What an operator may do with a running llama.cpp: halt its process, and empty its slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dynamo.engines.operations import Body, EngineOperations, Operation
from dynamo.llamacpp.slots import LlamaSlots

NAME: Final = "llama.cpp"
HOST_CACHE: Final = "cache_ram_mib"  # llama.cpp's parameter: how much memory keeps prompts that left their slot

_RESTART: Final = "llama.cpp reads a model once; start a worker with the other file, then drain this one"
_NO_MEMORY: Final = "llama.cpp has no call that gives its memory back; end this worker: a start takes a second"
_NO_LORA: Final = "llama.cpp takes adapters when it starts, as --set lora_adapters; loading them later is not built"
_NO_EXPERTS: Final = "llama.cpp runs in one process; there is no expert parallelism to scale"
_HOST_CACHE: Final = (
    "KV cache clear not supported on this worker: llama.cpp keeps prompts beside its slots, and no call empties that; "
    f"start it with --set {HOST_CACHE}=0"
)
REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("sleep", "wake_up", "release_memory_occupation", "resume_memory_occupation"), _NO_MEMORY),
    **dict.fromkeys(("scale_elastic_ep", "is_scaling_elastic_ep", "ep_capacity"), _NO_EXPERTS),
    **dict.fromkeys(("start_profile", "stop_profile"), "llama.cpp has no profiler; perf sees its process"),
    **dict.fromkeys(
        (
            "update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_distributed",
            "update_weights_from_ipc", "update_weight_version", "init_weights_update_group",
            "destroy_weights_update_group",
        ),
        _RESTART,
    ),
    **dict.fromkeys(("load_lora", "unload_lora", "list_loras"), _NO_LORA),
}  # fmt: skip


class LlamaOperations:
    """The controls of one llama.cpp. On the event loop only."""

    def __init__(self, llama: LlamaSlots, *, keeps_prompts: bool) -> None:
        """`keeps_prompts`: it has a cache of prompts beside its slots."""
        self._llama = llama
        controls = {
            "pause_generation": Operation(self._pause_generation),
            "resume_generation": Operation(self._resume_generation),
        }
        refused = dict(REFUSED)
        if keeps_prompts:
            refused["clear_kv_blocks"] = _HOST_CACHE
        else:
            controls["clear_kv_blocks"] = Operation(self._clear_kv_blocks)
        self.table = EngineOperations(NAME, controls, {}, refused)

    async def _pause_generation(self, _body: Mapping[str, Any]) -> Body:
        self.table.halted_until = "resume_generation"
        self._llama.halt()
        return {"message": "paused; running requests wait"}

    async def _resume_generation(self, _body: Mapping[str, Any]) -> Body:
        self._llama.go_on()
        self.table.halted_until = ""
        return {"message": "resumed"}

    async def _clear_kv_blocks(self, _body: Mapping[str, Any]) -> Body:
        self.table.check_serving()  # a process that is halted answers nothing
        await self._llama.erase()
        return {"status": "success", "message": "KV cache cleared"}
