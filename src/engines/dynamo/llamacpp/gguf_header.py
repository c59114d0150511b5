"""The head of a GGUF file: its metadata, without the tensors. Needs neither llama.cpp nor NumPy."""

from __future__ import annotations

import struct
from collections.abc import Callable
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
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d"}


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
            metadata = _Reader(file, path).metadata()
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror or error}") from error
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


class _Reader:
    """Walks the metadata of one open file. Lists are skipped: vocabularies are long, and nothing here needs them."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path

    def metadata(self) -> dict[str, Any]:
        if self._file.read(len(MAGIC)) != MAGIC:
            raise InvalidArgument(f"{self._path} is not a GGUF file")
        version = self._number("I")
        if version not in VERSIONS:
            raise InvalidArgument(f"{self._path} is GGUF of version {version}; 2 and 3 are read")
        self._number("Q")  # tensors
        entries = self._number("Q")
        if entries > MAX_ENTRIES:
            raise self._broken(f"it claims {entries} entries of metadata")
        found: dict[str, Any] = {}
        for _ in range(entries):
            key = self._text(MAX_KEY_BYTES)
            found[key] = self._value(self._number("I"))
        return found

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == STRING:
            return self._text(MAX_TEXT_BYTES)
        if kind == ARRAY:
            return self._skip_list()
        raise self._broken(f"it holds a value of the unknown type {kind}")

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
            raise self._broken("it ends within its metadata")
        return found

    def _broken(self, what: str) -> InvalidArgument:
        return InvalidArgument(f"{self._path} is not a whole GGUF file: {what}")
