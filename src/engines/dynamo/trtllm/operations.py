"""What an operator may do with a running TensorRT-LLM: take its memory and give it back, where its release can."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

from dynamo.engines.operations import Body, EngineOperations, Operation
from dynamo.errors import InvalidArgument

NAME: Final = "TensorRT-LLM"
SLEEP_CONFIG: Final = "sleep_config"  # the argument of `LLM` without which it gives nothing back

_DRAIN: Final = "the LLM class of TensorRT-LLM halts no requests; POST /engine/drain takes the worker out"
_NO_MEMORY: Final = (
    "TensorRT-LLM gives memory back from 1.4 on, started with a sleep_config (--extra-engine-args or "
    "--override-engine-args)"
)
_OTHER_NAMES: Final = "the names are release_memory_occupation and resume_memory_occupation for TensorRT-LLM"
_NO_UPDATE: Final = (
    "the LLM class of TensorRT-LLM reads weights when it starts; start a new worker, then drain this one"
)
_NO_LORA: Final = "adapters are not built for TensorRT-LLM; vLLM and the reference engine have them"
REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("pause_generation", "resume_generation"), _DRAIN),
    **dict.fromkeys(("sleep", "wake_up"), _OTHER_NAMES),
    "clear_kv_blocks": "KV cache clear not supported on this worker: the LLM class of TensorRT-LLM has no such call",
    **dict.fromkeys(
        ("start_profile", "stop_profile"), "TensorRT-LLM chooses the steps it profiles by TLLM_PROFILE_START_STOP"
    ),
    **dict.fromkeys(
        ("scale_elastic_ep", "is_scaling_elastic_ep", "ep_capacity"),
        "TensorRT-LLM has the ranks it was started with; start another worker",
    ),
    **dict.fromkeys(
        (
            "update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_distributed",
            "update_weights_from_ipc", "update_weight_version", "init_weights_update_group",
            "destroy_weights_update_group",
        ),
        _NO_UPDATE,
    ),
    **dict.fromkeys(("load_lora", "unload_lora", "list_loras"), _NO_LORA),
}  # fmt: skip


class TrtllmOperations:
    """The controls of one engine. On the event loop only."""

    def __init__(self, llm: Any, *, has_sleep_config: bool, running: Callable[[], int]) -> None:
        """`llm`: TensorRT-LLM's `LLM`. `running`: returns how many requests it serves."""
        self._llm, self._running = llm, running
        memory = {
            "release_memory_occupation": Operation(self._release),
            "resume_memory_occupation": Operation(self._resume),
        }
        can = has_sleep_config and hasattr(llm, "release") and hasattr(llm, "resume")
        refused = dict(REFUSED) if can else {**REFUSED, **dict.fromkeys(memory, _NO_MEMORY)}
        self.table = EngineOperations(NAME, memory if can else {}, {}, refused)

    async def _release(self, _body: Mapping[str, Any]) -> Body:
        if not self.table.halted_until:
            self.table.halted_until = "resume_memory_occupation"  # first: what arrives from here on goes elsewhere
            try:
                if running := self._running():
                    raise InvalidArgument(
                        f"{running} requests are running; drain the worker first (POST /engine/drain)"
                    )
                await asyncio.to_thread(self._llm.release)
            except BaseException:
                self.table.halted_until = ""
                raise
        return {"message": "memory released", "is_sleeping": True}

    async def _resume(self, _body: Mapping[str, Any]) -> Body:
        if self.table.halted_until:
            await asyncio.to_thread(self._llm.resume)
            self.table.halted_until = ""
        return {"message": "memory resumed"}
