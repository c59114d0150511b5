"""Files and batches as a part: a directory that keeps them, the runner of batches, and their routes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final
from urllib.parse import parse_qs

from dynamo.frontend.base.access import Access, CallerLookup, identity_of, owner_of
from dynamo.frontend.base.asgi import (
    BodyBudget,
    Receive,
    Scope,
    Send,
    check_content_type,
    first_headers,
    read_body,
    reply_rejected,
)
from dynamo.frontend.base.settings.batches import BatchesSettings
from dynamo.frontend.http.file_content import send_content
from dynamo.frontend.http.json_route import JsonRoute
from dynamo.frontend.http.multipart import FilePiece, read_form
from dynamo.frontend.http.routes import GuardedRoute
from dynamo.frontend.parts.batches.line_call import check_endpoint
from dynamo.frontend.parts.batches.metrics import FAMILIES
from dynamo.frontend.parts.batches.room import BatchSettings
from dynamo.frontend.parts.batches.service import BatchService
from dynamo.frontend.parts.batches.stored_files import FileLimits, StoredFiles, Upload
from dynamo.frontend.parts.part import Kernel, Part
from dynamo.frontend.pipeline.inference import Call
from dynamo.frontend.pipeline.outcome import RequestListener
from dynamo.protocol.batches.objects import BATCH_INPUT, BATCHES_API, FileObject, encode_object, list_page
from dynamo.protocol.batches.requests import (
    MAX_FILENAME,
    batch_page_query,
    decode_create_batch,
    file_form,
    file_page_query,
    refused,
)
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.escaping import json_line
from dynamo.protocol.openai.schema import ApiDescription

MAX_BODY_BYTES: Final = 64 * 1024


class BatchesRoute(JsonRoute):
    """POST and GET `/v1/batches`."""

    def __init__(self, service: BatchService, budget: BodyBudget) -> None:
        self._service, self._budget = service, budget

    async def _answer(self, scope: Scope, receive: Receive) -> bytes:
        owner = owner_of(scope)
        if scope["method"] == "POST":
            headers = first_headers(scope)
            check_content_type(headers)
            request = decode_create_batch(await read_body(headers, receive, MAX_BODY_BYTES, self._budget.of(owner)))
            identity = identity_of(scope)
            check_endpoint(identity, request.endpoint)
            key_id = "" if identity is None else identity.id
            return encode_object(await self._service.create(request, owner, key_id))
        query = batch_page_query(parse_qs(scope["query_string"].decode("latin-1")))
        found, has_more = await self._service.page(owner, query)
        return list_page(found, has_more=has_more)


class BatchRoute(JsonRoute):
    """GET `/v1/batches/{id}`, and POST `/v1/batches/{id}/cancel`."""

    def __init__(self, service: BatchService) -> None:
        self._service = service

    async def _answer(self, scope: Scope, receive: Receive) -> bytes:
        act = self._service.cancel if scope["method"] == "POST" else self._service.get
        return encode_object(await act(scope["path_params"]["batch_id"], owner_of(scope)))


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


class Batches(Part):
    """The service, and its routes."""

    name: ClassVar[str] = "batches"
    families = FAMILIES

    def __init__(self, service: BatchService, kernel: Kernel) -> None:
        self.service, self._kernel = service, kernel

    def connect(self, calls: Mapping[str, Call]) -> None:
        self.service.serve(calls)

    def listeners(self) -> Sequence[RequestListener]:
        return (self.service,)

    def routes(self) -> Sequence[GuardedRoute]:
        service = self.service
        files, one, batch = FilesRoute(service.files), FileRoute(service.files), BatchRoute(service)
        batches = BatchesRoute(service, self._kernel.budget)
        return (
            GuardedRoute("/v1/files", files, "GET", "POST", access=Access.FILES, takes_forms=True),
            GuardedRoute("/v1/files/{file_id}", one, "GET", "DELETE", access=Access.FILES),
            GuardedRoute("/v1/files/{file_id}/content", FileContentRoute(service.files), "GET", access=Access.FILES),
            GuardedRoute("/v1/batches", batches, "GET", "POST", access=Access.BATCHES),
            GuardedRoute("/v1/batches/{batch_id}", batch, "GET", access=Access.BATCHES),
            GuardedRoute("/v1/batches/{batch_id}/cancel", batch, "POST", access=Access.BATCHES),
        )

    def described(self) -> Sequence[ApiDescription]:
        return (BATCHES_API,)

    def troubles(self) -> Sequence[str]:
        return list(self.service.troubles())

    async def start(self) -> None:
        self.service.start()

    async def aclose(self) -> None:
        await self.service.aclose()


def open_batches(settings: BatchesSettings, kernel: Kernel, keys: CallerLookup | None) -> BatchService:
    """Open the directory of files. Raises InvalidArgument when it cannot be used."""
    assert settings.files_dir is not None, "files are switched off"
    limits = FileLimits(
        settings.file_limit_bytes,
        settings.batch_file_limit_bytes,
        settings.files_total_bytes,
        settings.files_total_count,
    )
    chosen = BatchSettings(
        settings.files_dir.expanduser(),
        limits,
        settings.files_dir_force,
        settings.batch_concurrency,
        settings.batch_model_wait_seconds,
    )
    return BatchService(chosen, kernel.pipeline, keys, kernel.shares)
