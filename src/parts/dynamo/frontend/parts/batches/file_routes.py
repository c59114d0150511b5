"""`/v1/files`: upload, list, read, delete."""

from __future__ import annotations

import os
from urllib.parse import parse_qs

from dynamo.frontend.base.access import owner_of
from dynamo.frontend.base.asgi import Receive, Scope, Send, first_headers, reply_rejected
from dynamo.frontend.http.file_content import send_content
from dynamo.frontend.http.json_route import JsonRoute
from dynamo.frontend.http.multipart import FilePiece, read_form
from dynamo.frontend.parts.batches.stored_files import StoredFiles, Upload
from dynamo.protocol.batches.objects import BATCH_INPUT, FileObject, encode_object, list_page
from dynamo.protocol.batches.requests import MAX_FILENAME, file_form, file_page_query, refused
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.escaping import json_line


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
                    upload = await self._files.begin(owner_of(scope))
                await upload.write(part.data, is_batch=fields.get("purpose") == BATCH_INPUT)
            form = file_form(fields)
            if upload is None:
                raise refused("Missing required parameter: 'file'.", "file")
            await upload.write(b"", is_batch=form.purpose == BATCH_INPUT)  # where the purpose stood behind the file
            return await self._files.keep(upload, filename, form)
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


def _checked_name(filename: str) -> str:
    """Return the name of an upload as it is kept; it names nothing on our disk."""
    name = filename.replace("\\", "/").rpartition("/")[2]
    if not name or len(name) > MAX_FILENAME or not name.isprintable():
        raise refused(f"The file needs a name of 1 to {MAX_FILENAME} printable characters", "file")
    return name
