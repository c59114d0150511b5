"""The head of a GGUF file: its metadata, and where its tensors end. Needs neither llama.cpp nor NumPy."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from dynamo.errors import InvalidArgument

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_ENTRIES: Final = 100_000  # of metadata; files have a few dozen
MAX_KEY_BYTES: Final = 65_535  # a limit of the format
MAX_TEXT_BYTES: Final = 16 * 2**20  # a chat template may have 20 kB
MAX_ITEMS: Final = 50_000_000  # of one list; vocabularies have up to a million
MAX_KEPT_ITEMS: Final = 2_000_000  # of a list that is read
MAX_TENSORS: Final = 1_000_000
MAX_DIMENSIONS: Final = 4
ALIGNMENT: Final = 32  # where the file names none
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d"}

# By the number of a tensor's type: elements in a block, and bytes of a block. Of others only where they begin is known.
BLOCKS: Final = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 10: (256, 84), 11: (256, 110),
    12: (256, 144), 13: (256, 176), 14: (256, 210), 16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18),
    21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56),
    30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a server needs of a file before llama.cpp loads it."""

    architecture: str  # qwen3, llama, ...
    name: str  # "" where the file has none
    context_length: int | None  # tokens the model was trained for
    has_chat_template: bool
    parts: int  # files the model is split into
    part: int  # which of them this file is, from 0
    has_pooling: bool  # the file names how the states of its tokens become one vector


def is_gguf(path: Path) -> bool:
    """Return whether a file begins as GGUF files do; False for what cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the head of a file. Raises InvalidArgument that names the file for one that is missing, cut or not GGUF."""
    try:
        with path.open("rb") as file:
            reader = _Reader(file, path)
            metadata = reader.metadata()
            whole, size = reader.end_of_tensors(metadata.get("general.alignment")), path.stat().st_size
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror or error}") from error
    if size < whole:
        raise InvalidArgument(
            f"{path} is not a whole GGUF file: it has {size} bytes, and its header describes {whole}; download or copy it again"
        )
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise InvalidArgument(f"{path} does not say of which architecture its model is (general.architecture)")
    length = metadata.get(f"{architecture}.context_length")
    name = metadata.get("general.name")
    return GgufHeader(
        architecture=architecture,
        name=name if isinstance(name, str) else "",
        context_length=length if isinstance(length, int) and length > 0 else None,
        has_chat_template="tokenizer.chat_template" in metadata,
        parts=int(metadata.get("split.count") or 1),
        part=int(metadata.get("split.no") or 0),
        has_pooling=f"{architecture}.pooling_type" in metadata,
    )


def read_gguf_metadata(path: Path, *, lists: Collection[str] = ()) -> dict[str, Any]:
    """Read the metadata of a file, of its lists those of these keys. Raises InvalidArgument as `read_gguf_header` does."""
    try:
        with path.open("rb") as file:
            return _Reader(file, path).metadata(lists)
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror or error}") from error


class _Reader:
    """Walks the head of one open file. Lists that are not named are skipped: vocabularies are long."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self._tensors = 0

    def metadata(self, lists: Collection[str] = ()) -> dict[str, Any]:
        if self._file.read(len(MAGIC)) != MAGIC:
            raise InvalidArgument(f"{self._path} is not a GGUF file")
        version = self._number("I")
        if version not in VERSIONS:
            raise InvalidArgument(f"{self._path} is GGUF of version {version}; 2 and 3 are read")
        self._tensors = self._number("Q")
        entries = self._number("Q")
        if entries > MAX_ENTRIES:
            raise self._broken(f"it claims {entries} entries of metadata")
        found: dict[str, Any] = {}
        for _ in range(entries):
            key = self._text(MAX_KEY_BYTES)
            found[key] = self._value(self._number("I"), is_kept=key in lists)
        return found

    def end_of_tensors(self, alignment: Any) -> int:
        """Return how many bytes the file must have; called once, behind the metadata. `alignment`: as the metadata names it."""
        if self._tensors > MAX_TENSORS:
            raise self._broken(f"it claims {self._tensors} tensors")
        end = 0
        for _ in range(self._tensors):
            name, dimensions = self._text(MAX_KEY_BYTES), self._number("I")
            if dimensions > MAX_DIMENSIONS:
                raise self._broken(f"its tensor {name[:64]!r} has {dimensions} dimensions")
            elements = math.prod(self._number("Q") for _ in range(dimensions))
            in_block, block_bytes = BLOCKS.get(self._number("I"), (1, 0))
            end = max(end, self._number("Q") + elements // in_block * block_bytes)
        step = alignment if isinstance(alignment, int) and alignment > 0 else ALIGNMENT
        return -(-self._file.tell() // step) * step + end if end else 0

    def _value(self, kind: int, *, is_kept: bool) -> Any:
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == STRING:
            return self._text(MAX_TEXT_BYTES)
        if kind == ARRAY:
            return self._list() if is_kept else self._skip_list()
        raise self._broken(f"it holds a value of the unknown type {kind}")

    def _list(self) -> list[Any]:
        kind, items = self._number("I"), self._number("Q")
        if items > MAX_KEPT_ITEMS:
            raise self._broken(f"it claims a list of {items} items")
        if kind == STRING:
            return [self._text(MAX_KEY_BYTES) for _ in range(items)]
        if kind not in SCALARS:
            raise self._broken(f"it holds a list of the type {kind} where texts or numbers belong")
        form = f"<{items}{SCALARS[kind]}"
        return list(struct.unpack(form, self._bytes(struct.calcsize(form))))

    def _skip_list(self) -> None:
        kind, items = self._number("I"), self._number("Q")
        if items > MAX_ITEMS:
            raise self._broken(f"it claims a list of {items} items")
        if kind in SCALARS:
            self._file.seek(items * struct.calcsize(f"<{SCALARS[kind]}"), 1)
            return
        skip: Callable[[], Any]
        if kind == STRING:
            skip = self._skip_text
        elif kind == ARRAY:
            skip = self._skip_list
        else:
            raise self._broken(f"it holds a list of the unknown type {kind}")
        for _ in range(items):
            skip()

    def _skip_text(self) -> None:
        self._file.seek(self._number("Q"), 1)

    def _text(self, limit: int) -> str:
        size = self._number("Q")
        if size > limit:
            raise self._broken(f"it claims a text of {size} bytes")
        return self._bytes(size).decode("utf-8", "replace")

    def _number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._bytes(struct.calcsize(f"<{form}")))[0]

    def _bytes(self, count: int) -> bytes:
        found = self._file.read(count)
        if len(found) < count:
            raise self._broken("it ends within its head")
        return found

    def _broken(self, what: str) -> InvalidArgument:
        return InvalidArgument(f"{self._path} is not a whole GGUF file: {what}")
