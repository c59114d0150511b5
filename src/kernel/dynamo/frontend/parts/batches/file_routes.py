"""`/v1/files`: upload, list, read, delete."""

from __future__ import annotations

import asyncio
import os
import re
from typing import Final
from urllib.parse import parse_qs

from dynamo.frontend.base.access import identity_of
from dynamo.frontend.base.asgi import Receive, Scope, Send, first_headers, reply_rejected
from dynamo.frontend.http.json_route import JsonRoute
from dynamo.frontend.http.multipart import FilePiece, read_form
from dynamo.frontend.parts.batches.stored_files import StoredFiles, Upload
from dynamo.protocol.batches.objects import BATCH_INPUT, FileObject, encode_object, list_page
from dynamo.protocol.batches.requests import MAX_FILENAME, file_form, file_page_query, refused
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.escaping import json_line

__all__ = ["FileContentRoute", "FileRoute", "FilesRoute", "owner_of", "send_content"]

READ_BYTES: Final = 256 * 1024
_RANGE: Final = re.compile(rb"bytes=(\d{0,18})-(\d{0,18})")


def owner_of(scope: Scope) -> str:
    """Return the project that the files and batches of a request belong to; empty where there are no keys."""
    identity = identity_of(scope)
    return "" if identity is None else identity.owner


class FilesRoute(JsonRoute):
    """POST and GET `/v1/files`."""

    leaves_body_unread = True

    def __init__(self, files: StoredFiles) -> None:
        self._files = files

    async def _answer(self, scope: Scope, receive: Receive) -> bytes:
        if scope["method"] == "POST":
            return encode_object(await self._upload(scope, receive))
        query = file_page_query(parse_qs(scope["query_string"].decode("latin-1")))
        found, has_more = await self._files.page(owner_of(scope), query)
        return list_page(found, has_more=has_more)

    async def _upload(self, scope: Scope, receive: Receive) -> FileObject:
        fields: dict[str, str] = {}
        upload: Upload | None = None
        filename = ""
        try:
            async for part in read_form(first_headers(scope), receive):
                if not isinstance(part, FilePiece):
                    fields[part.name] = part.value
                    continue
                if part.name != "file":
                    raise refused(
                        f"The form has a file in the field '{part.name[:64]}'; expected 'file'", part.name[:64]
                    )
                if upload is None:
                    filename = _checked_name(part.filename)
                    upload = await self._files.begin()
                await upload.write(part.data, is_batch=fields.get("purpose") == BATCH_INPUT)
            form = file_form(fields)
            if upload is None:
                raise refused("Missing required parameter: 'file'.", "file")
            await upload.write(b"", is_batch=form.purpose == BATCH_INPUT)  # where the purpose stood behind the file
            return await self._files.keep(upload, filename, form, owner_of(scope))
        finally:
            if upload is not None:
                upload.discard()


class FileRoute(JsonRoute):
    """GET and DELETE `/v1/files/{id}`."""

    def __init__(self, files: StoredFiles) -> None:
        self._files = files

    async def _answer(self, scope: Scope, receive: Receive) -> bytes:
        id: str = scope["path_params"]["file_id"]
        if scope["method"] == "DELETE":
            await self._files.delete(id, owner_of(scope))
            return json_line({"id": id, "object": "file", "deleted": True})
        return encode_object(await self._files.get(id, owner_of(scope)))


class FileContentRoute:
    """GET `/v1/files/{id}/content`, whole or one range of it."""

    def __init__(self, files: StoredFiles) -> None:
        self._files = files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            opened, file = await self._files.open(scope["path_params"]["file_id"], owner_of(scope))
        except RequestRejected as error:
            await reply_rejected(send, error)
            return
        try:
            await send_content(scope, send, opened, file.bytes, b"application/octet-stream")
        finally:
            os.close(opened)


async def send_content(scope: Scope, send: Send, opened: int, size: int, content_type: bytes) -> None:
    """Send an open file of `size` bytes, whole or the one range of it that is asked for."""
    begin, end, status = 0, size, 200
    headers = [(b"content-type", content_type), (b"accept-ranges", b"bytes"), (b"x-content-type-options", b"nosniff")]
    asked = _RANGE.fullmatch(first_headers(scope).get(b"range", b""))
    if asked is not None and any(asked.groups()):
        begin, end = _range(asked[1], asked[2], size)
        if begin >= end:
            extra = ((b"content-range", b"bytes */%d" % size),)
            await reply_rejected(send, RequestRejected(416, "The range is not within the file"), extra)
            return
        status = 206
        headers.append((b"content-range", b"bytes %d-%d/%d" % (begin, end - 1, size)))
    headers.append((b"content-length", b"%d" % (end - begin)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    loop = asyncio.get_running_loop()
    while begin < end:
        data = await loop.run_in_executor(None, os.pread, opened, min(READ_BYTES, end - begin), begin)
        if not data:
            raise OSError(f"the bytes of {scope['path']} end at {begin} of {size}")
        begin += len(data)
        await send({"type": "http.response.body", "body": data, "more_body": begin < end})
    if not size:
        await send({"type": "http.response.body", "body": b""})


def _range(first: bytes, last: bytes, size: int) -> tuple[int, int]:
    """Return begin and end of a range as HTTP writes it: "5-9", "5-", or "-4" for the last four bytes."""
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(size, int(last) + 1) if last else size


def _checked_name(filename: str) -> str:
    """Return the name of an upload as it is kept; it names nothing on our disk."""
    name = filename.replace("\\", "/").rpartition("/")[2]
    if not name or len(name) > MAX_FILENAME or not name.isprintable():
        raise refused(f"The file needs a name of 1 to {MAX_FILENAME} printable characters", "file")
    return name
