"""How an embedding gets from an encode worker to the worker that computes the prompt, on the same machine.

The sender writes the tensor where the receiver finds it, and the handle (`TransferRequest`) travels in `encoder_result`. Two
ways are built: `local`, the temporary safetensors file of the guide, and `shared-memory`, which is of this system: it has no
header, and the receiver maps it instead of reading it. Both bound what waits, and remove it when a process dies.
"""

from __future__ import annotations

import importlib.util
import re
import secrets
import tempfile
from abc import ABC, abstractmethod
from asyncio import Future, get_running_loop, to_thread
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from dynamo.contract.modes import EmbeddingTransferMode
from dynamo.engines.handover import (
    HOLD_SECONDS,
    MAX_BYTES,
    HeldFiles,
    Leftovers,
    RawTensor,
    TakenFile,
    pack_tensor,
    raw_tensor,
    restored_tensor,
    sender_id,
    shared_memory_directory,
    unpack_tensor,
)
from dynamo.errors import InvalidArgument, Overloaded

LOCAL_PREFIX: Final = "encoder_cache."
SHARED_PREFIX: Final = "dynamo_embedding."
KEY: Final = "ec_cache"  # of the tensor in its safetensors file
_NAMES: Final = re.compile(r"(?:encoder_cache|dynamo_embedding)\.[\w-]+_\d+\.[\w.-]*", re.ASCII)


class TransferRequest(msgspec.Struct):
    """The handle to an embedding: what a sender gives, and what a receiver takes."""

    embeddings_shape: list[int]
    embedding_dtype_str: str  # `torch.float32` for a tensor of torch, else `float32`
    serialized_request: Any  # of the mode: a path, or a name and a size

    def to_dict(self) -> dict[str, Any]:
        """Return the handle as a JSON object, for `encoder_result`."""
        return dict(msgspec.to_builtins(self))

    @classmethod
    def from_dict(cls, found: object) -> Self:
        """Read a handle. Raises InvalidArgument naming the member that is wrong."""
        try:
            return msgspec.convert(found, cls)
        except msgspec.ValidationError as error:
            raise InvalidArgument(f"a handle to an embedding is wrong: {error}") from error


class SharedMemoryHandle(msgspec.Struct, frozen=True):
    """`serialized_request` of the mode `shared-memory`."""

    name: str
    size: int


class EmbeddingSender(ABC):
    """Hands embeddings over to another process, which takes each of them once."""

    def __init__(
        self,
        prefix: str,
        directory: Path,
        *,
        max_bytes: int = MAX_BYTES,
        hold_seconds: float = HOLD_SECONDS,
    ) -> None:
        """`max_bytes` bounds what waits to be taken, `hold_seconds` for how long. Use the constructor of a mode."""
        self._leftovers = Leftovers(directory, prefix)
        self._leftovers.sweep()
        stem = f"{prefix}{sender_id()}"
        self._files = HeldFiles(directory, stem, max_bytes=max_bytes, hold_seconds=hold_seconds)
        self._numbers = count()

    @property
    def waiting(self) -> int:
        """How many embeddings no receiver has taken yet."""
        return len(self._files.waiting())

    async def send_embeddings(
        self, embeddings: Any, stage_embeddings: bool = False
    ) -> tuple[TransferRequest, Awaitable[None]]:
        """Return a handle to a copy of the tensor, and an awaitable that is done when the tensor is not needed any more.

        As the copy is made at once, the awaitable is done, and `stage_embeddings` changes nothing. Raises InvalidArgument
        for what is not a tensor or is above the bound, and Overloaded while too much waits.
        """
        self._leftovers.sweep_at_times()
        raw = raw_tensor(embeddings)
        name = f"{self._files.stem}_{next(self._numbers)}.{secrets.token_hex(4)}"
        path = await self._files.put(name, self._pieces(raw))
        done: Future[None] = get_running_loop().create_future()
        done.set_result(None)
        return TransferRequest(list(raw.shape), raw.dtype, self._serialized(path, raw)), done

    @abstractmethod
    def _pieces(self, raw: RawTensor) -> Sequence[bytes | memoryview]: ...

    @abstractmethod
    def _serialized(self, path: Path, raw: RawTensor) -> object: ...

    async def aclose(self, wait_seconds: float = 2.0) -> None:
        """Give receivers a moment to take what waits, and remove the rest."""
        await self._files.aclose(wait_seconds)


class EmbeddingReceiver(ABC):
    """Takes what senders of other processes have handed over."""

    def __init__(self, prefix: str, directory: Path, *, max_bytes: int = MAX_BYTES) -> None:
        """`max_bytes` bounds what is received and not released."""
        self._leftovers = Leftovers(directory, prefix)
        self._leftovers.sweep()
        self._max_bytes = max_bytes
        self._taken: dict[int, TakenFile] = {}
        self._numbers = count()

    async def receive_embeddings(self, request: TransferRequest) -> tuple[int, Any]:
        """Return the tensor, and the number under which it is released.

        Raises Disconnected where it is gone (another worker may have it encoded again), InvalidArgument where it is
        not what the handle describes or is above the bound, and Overloaded while too much is not released. After an error
        nothing is left of the embedding.
        """
        self._leftovers.sweep_at_times()
        path = self._path(request.serialized_request)
        if _NAMES.fullmatch(path.name) is None:
            raise InvalidArgument("a handle to an embedding names a file that no sender writes")
        try:
            room = self._max_bytes - sum(taken.data.nbytes for taken in self._taken.values())
            if room <= 0:
                raise Overloaded(f"embeddings of {self._max_bytes} bytes are received and not released")
            taken = await to_thread(self._take, path, room)
            raw = self._raw(taken.data, request)
            if list(raw.shape) != request.embeddings_shape or not _same_type(raw.dtype, request.embedding_dtype_str):
                raise InvalidArgument(
                    f"an embedding is {raw.dtype} {list(raw.shape)}, and its handle describes "
                    f"{request.embedding_dtype_str} {request.embeddings_shape}"
                )
            tensor = restored_tensor(RawTensor(request.embedding_dtype_str, raw.shape, raw.data))
        except BaseException:
            with suppress(OSError):  # a file of another user stays
                path.unlink(missing_ok=True)
            raise
        number = next(self._numbers)
        self._taken[number] = taken
        return number, tensor

    def release_tensor(self, tensor_id: int) -> None:
        """Give up a tensor: its file is removed. Its memory is freed with the last reference to it."""
        taken = self._taken.pop(tensor_id, None)
        if taken is not None:
            taken.remove()

    def close(self) -> None:
        """Release every tensor."""
        for number in list(self._taken):
            self.release_tensor(number)

    @abstractmethod
    def _path(self, serialized: object) -> Path: ...

    @abstractmethod
    def _take(self, path: Path, max_bytes: int) -> TakenFile: ...

    @abstractmethod
    def _raw(self, data: memoryview, request: TransferRequest) -> RawTensor: ...


def _same_type(one: str, other: str) -> bool:
    return one.removeprefix("torch.") == other.removeprefix("torch.")


class LocalEmbeddingSender(EmbeddingSender):
    """Hands embeddings over as temporary safetensors files, which the receiver removes when it releases them."""

    def __init__(self, directory: Path | None = None, **bounds: Any) -> None:
        super().__init__(LOCAL_PREFIX, directory or Path(tempfile.gettempdir()), **bounds)

    def _pieces(self, raw: RawTensor) -> Sequence[bytes | memoryview]:
        return pack_tensor(KEY, raw)

    def _serialized(self, path: Path, raw: RawTensor) -> object:
        return str(path)


class LocalEmbeddingReceiver(EmbeddingReceiver):
    """Reads temporary safetensors files."""

    def __init__(self, directory: Path | None = None, **bounds: Any) -> None:
        """`directory`: where files of dead senders are removed; the handles have paths of their own."""
        super().__init__(LOCAL_PREFIX, directory or Path(tempfile.gettempdir()), **bounds)

    def _path(self, serialized: object) -> Path:
        if not isinstance(serialized, str) or not serialized.startswith("/") or "\0" in serialized:
            raise InvalidArgument("serialized_request of the mode local must be the path of a file")
        return Path(serialized)

    def _take(self, path: Path, max_bytes: int) -> TakenFile:
        return TakenFile.open(path, max_bytes=max_bytes, maps=False)

    def _raw(self, data: memoryview, request: TransferRequest) -> RawTensor:
        return unpack_tensor(KEY, data)


class SharedMemoryEmbeddingSender(EmbeddingSender):
    """Hands embeddings over in POSIX shared memory. The native system has no such mode: both sides must be ours."""

    def __init__(self, **bounds: Any) -> None:
        super().__init__(SHARED_PREFIX, shared_memory_directory(), **bounds)

    def _pieces(self, raw: RawTensor) -> Sequence[bytes | memoryview]:
        return (raw.data,)

    def _serialized(self, path: Path, raw: RawTensor) -> object:
        return {"name": path.name, "size": raw.data.nbytes}


class SharedMemoryEmbeddingReceiver(EmbeddingReceiver):
    """Maps embeddings from shared memory, which has no name any more from then on."""

    def __init__(self, **bounds: Any) -> None:
        super().__init__(SHARED_PREFIX, shared_memory_directory(), **bounds)

    def _path(self, serialized: object) -> Path:
        try:
            handle = msgspec.convert(serialized, SharedMemoryHandle)
        except msgspec.ValidationError as error:
            raise InvalidArgument(f"serialized_request of the mode shared-memory is wrong: {error}") from error
        if _NAMES.fullmatch(handle.name) is None:  # before it is a path: it may have slashes
            raise InvalidArgument("a handle to an embedding names shared memory that no sender writes")
        return shared_memory_directory() / handle.name

    def _take(self, path: Path, max_bytes: int) -> TakenFile:
        return TakenFile.open(path, max_bytes=max_bytes, maps=True)

    def _raw(self, data: memoryview, request: TransferRequest) -> RawTensor:
        return RawTensor(request.embedding_dtype_str, tuple(request.embeddings_shape), data)


def check_transfer_mode(mode: EmbeddingTransferMode) -> None:
    """Raises InvalidArgument for a mode that is not built."""
    if mode in (EmbeddingTransferMode.NIXL_READ, EmbeddingTransferMode.NIXL_WRITE):
        missing = "the package nixl is not installed, and " if importlib.util.find_spec("nixl") is None else ""
        raise InvalidArgument(
            f"{mode.value}: {missing}embeddings do not travel over NIXL in this system; use local or shared-memory"
        )


class NixlReadEmbeddingSender:
    """Stands for the mode `nixl-read`, which is not built: the constructor raises InvalidArgument."""

    def __init__(self, *arguments: object, **more: object) -> None:
        check_transfer_mode(EmbeddingTransferMode.NIXL_READ)


class NixlWriteEmbeddingSender:
    """Stands for the mode `nixl-write`, which is not built: the constructor raises InvalidArgument."""

    def __init__(self, *arguments: object, **more: object) -> None:
        check_transfer_mode(EmbeddingTransferMode.NIXL_WRITE)


class NixlReadEmbeddingReceiver(NixlReadEmbeddingSender):
    """Stands for the mode `nixl-read`, likewise."""


class NixlWriteEmbeddingReceiver(NixlWriteEmbeddingSender):
    """Stands for the mode `nixl-write`, likewise."""


EMBEDDING_SENDER_FACTORIES: Final[dict[EmbeddingTransferMode, Callable[..., Any]]] = {
    EmbeddingTransferMode.LOCAL: LocalEmbeddingSender,
    EmbeddingTransferMode.NIXL_WRITE: NixlWriteEmbeddingSender,
    EmbeddingTransferMode.NIXL_READ: NixlReadEmbeddingSender,
    EmbeddingTransferMode.SHARED_MEMORY: SharedMemoryEmbeddingSender,
}
EMBEDDING_RECEIVER_FACTORIES: Final[dict[EmbeddingTransferMode, Callable[..., Any]]] = {
    EmbeddingTransferMode.LOCAL: LocalEmbeddingReceiver,
    EmbeddingTransferMode.NIXL_WRITE: NixlWriteEmbeddingReceiver,
    EmbeddingTransferMode.NIXL_READ: NixlReadEmbeddingReceiver,
    EmbeddingTransferMode.SHARED_MEMORY: SharedMemoryEmbeddingReceiver,
}
