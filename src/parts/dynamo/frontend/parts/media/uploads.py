"""Uploaded files as parts of messages: only those of the client's project, and only what was uploaded for vision."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import Final, Literal, Protocol

from dynamo.frontend.base.offload import Offload
from dynamo.frontend.parts.media.addresses import MediaRefused
from dynamo.frontend.parts.media.content import Media, media_type, read_media
from dynamo.protocol.batches.objects import FileObject
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.media_parts import refused_part
from dynamo.protocol.openai.shapes import MediaPart, RequestMedia

PURPOSES: Final = ("vision", "user_data", "assistants")


class FileSource(Protocol):
    """What is needed of the store of files."""

    async def open(self, id: str, owner: str) -> tuple[int, FileObject]:
        """Open a file for reading; return its descriptor, which the caller closes. Raises RequestRejected."""


class UploadedParts:
    """Puts the content of uploaded files in place of their ids."""

    def __init__(self, files: FileSource | None, offload: Offload, *, max_bytes: int, max_pixels: int) -> None:
        """`files`: None where files are switched off."""
        self._files, self._offload = files, offload
        self._max_bytes, self._max_pixels = max_bytes, max_pixels

    async def fill(self, media: RequestMedia, owner: str) -> None:
        """Read the files that a request names. Raises RequestRejected (400) that names the part."""
        for place, part in enumerate(media.parts):
            if part.file_id is not None:
                media.parts[place] = await self._filled(part, part.file_id, owner)

    async def _filled(self, part: MediaPart, id: str, owner: str) -> MediaPart:
        if self._files is None:
            raise refused_part(part.where, "files are switched off here (--files-dir): send the content, or its URL")
        try:
            opened, file = await self._files.open(id, owner)
        except RequestRejected as error:
            raise refused_part(part.where, error.message) from None
        try:
            if file.purpose not in PURPOSES:
                wanted = ", ".join(PURPOSES)
                raise refused_part(part.where, f"the purpose of the file is {file.purpose}, and not one of {wanted}")
            if file.bytes > self._max_bytes:
                raise refused_part(
                    part.where, f"the file has more than the {self._max_bytes} bytes allowed (DYN_MM_MAX_FILE_SIZE_MB)"
                )
            data = await asyncio.to_thread(_read_all, opened, file.bytes)
        finally:
            os.close(opened)
        kind = _kind_of(part, data)
        try:
            read: Media = await self._offload(partial(read_media, data, kind, max_pixels=self._max_pixels))
        except MediaRefused as error:
            raise refused_part(part.where, f"file {id[:128]}: {error}") from None
        return MediaPart(kind, read.url, part.uuid, part.where, is_upload=True)


def _kind_of(part: MediaPart, data: bytes) -> Literal["image", "video", "audio"]:
    """Return what a file is, and mark for the template where it stands. Raises RequestRejected for no media."""
    assert part.shown is not None
    if part.shown["type"] != "file":
        return part.kind
    found = (media_type(data[:16]) or "").partition("/")[0]
    kinds: dict[str, Literal["image", "video", "audio"]] = {"image": "image", "video": "video", "audio": "audio"}
    if found not in kinds:
        raise refused_part(part.where, "the file is no image, video or sound in a format that is taken")
    part.shown["type"] = kinds[found]
    return kinds[found]


def _read_all(opened: int, size: int) -> bytes:
    pieces: list[bytes] = []
    begin = 0
    while begin < size and (piece := os.pread(opened, size - begin, begin)):
        pieces.append(piece)
        begin += len(piece)
    return b"".join(pieces)
