"""Tensors from one process to another of the same machine, through files or shared memory.

`tensors` has a tensor as bytes and back, `tensor_file` the form of its file, `held_files` the files themselves: bounded, taken
once, and removed when the process that wrote them is gone. `dynamo.common.multimodal` has the names of the guide over it.
"""

from dynamo.engines.handover.held_files import (
    HOLD_SECONDS,
    MAX_BYTES,
    HeldFiles,
    Leftovers,
    TakenFile,
    sender_id,
    shared_memory_directory,
)
from dynamo.engines.handover.tensor_file import pack_tensor, unpack_tensor
from dynamo.engines.handover.tensors import RawTensor, raw_tensor, restored_tensor

__all__ = [
    "HOLD_SECONDS",
    "MAX_BYTES",
    "HeldFiles",
    "Leftovers",
    "RawTensor",
    "TakenFile",
    "pack_tensor",
    "raw_tensor",
    "restored_tensor",
    "sender_id",
    "shared_memory_directory",
    "unpack_tensor",
]
