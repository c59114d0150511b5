"""`/v1/files`: upload, list, read, delete."""

from __future__ import annotations

import asyncio
import os
import re
from typing import Final
from urllib.parse import parse_qs

from dynamo.frontend.batches.stored_files import StoredFiles, Upload
from dynamo.frontend.http.asgi import ClientGone, Receive, Scope, Send, first_headers, reply, reply_rejected
from dynamo.frontend.http.auth import identity_of
from dynamo.frontend.http.multipart import FilePiece, read_form
from dynamo.protocol.batches.objects import BATCH_INPUT, FileObject, encode_object, list_page
from dynamo.protocol.batches.requests import MAX_FILENAME, file_form, file_page_query, refused
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.escaping import json_line

__all__ = ["FileContentRoute", "FileRoute", "FilesRoute", "owner_of"]

READ_BYTES: Final = 256 * 1024
_RANGE: Final = re.compile(rb"bytes=(\d{0,18})-(\d{0,18})")


def owner_of(scope: Scope) -> str:
    """Return the project that the files and batches of a request belong to; empty where there are no keys."""
    identity = identity_of(scope)
    return "" if identity is None else identity.owner


class FilesRoute:
    """POST and GET `/v1/files`."""

    def __init__(self, files: StoredFiles) -> None:
        self._files = files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["method"] == "POST":
                body = encode_object(await self._upload(scope, receive))
            else:
                query = file_page_query(parse_qs(scope["query_string"].decode("latin-1")))
                found, has_more = await self._files.page(owner_of(scope), query)
                body = list_page(found, has_more=has_more)
        except ClientGone:
            return
        except RequestRejected as error:
            # What is left of an upload is not read.
            extra = ((b"connection", b"close"),) if scope["method"] == "POST" else ()
            await reply_rejected(send, error, extra)
        else:
            await reply(send, 200, body)

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


class FileRoute:
    """GET and DELETE `/v1/files/{id}`."""

    def __init__(self, files: StoredFiles) -> None:
        self._files = files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        id: str = scope["path_params"]["file_id"]
        try:
            if scope["method"] == "DELETE":
                await self._files.delete(id, owner_of(scope))
                body = json_line({"id": id, "object": "file", "deleted": True})
            else:
                body = encode_object(await self._files.get(id, owner_of(scope)))
        except RequestRejected as error:
            await reply_rejected(send, error)
        else:
            await reply(send, 200, body)


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
            await self._send(scope, send, opened, file)
        finally:
            os.close(opened)

    async def _send(self, scope: Scope, send: Send, opened: int, file: FileObject) -> None:
        begin, end, status = 0, file.bytes, 200
        headers = [(b"content-type", b"application/octet-stream"), (b"accept-ranges", b"bytes")]
        asked = _RANGE.fullmatch(first_headers(scope).get(b"range", b""))
        if asked is not None and any(asked.groups()):
            begin, end = _range(asked[1], asked[2], file.bytes)
            if begin >= end:
                extra = ((b"content-range", b"bytes */%d" % file.bytes),)
                await reply_rejected(send, RequestRejected(416, "The range is not within the file"), extra)
                return
            status = 206
            headers.append((b"content-range", b"bytes %d-%d/%d" % (begin, end - 1, file.bytes)))
        headers.append((b"content-length", b"%d" % (end - begin)))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        loop = asyncio.get_running_loop()
        while begin < end:
            data = await loop.run_in_executor(None, os.pread, opened, min(READ_BYTES, end - begin), begin)
            if not data:
                raise OSError(f"the bytes of {file.id} end at {begin} of {file.bytes}")
            begin += len(data)
            await send({"type": "http.response.body", "body": data, "more_body": begin < end})
        if not file.bytes:
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
