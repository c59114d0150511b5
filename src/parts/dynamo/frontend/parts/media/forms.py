"""The door of a route that also takes forms: a bounded form in, the JSON body of its members out."""

from __future__ import annotations

from functools import partial
from typing import Final

from dynamo.frontend.base.asgi import BodyBudget, Headers, Message, Receive
from dynamo.frontend.base.offload import Offload
from dynamo.frontend.http.multipart import FilePiece, read_form
from dynamo.frontend.parts.media.content import media_type
from dynamo.protocol.forms import FormFile, FormShape, form_body
from dynamo.protocol.openai.errors import RequestRejected

MAX_FIELDS: Final = 64
MAX_FIELD_BYTES: Final = 256 * 1024  # a prompt of 32,000 characters has up to 128 KB
_MIB: Final = 1024 * 1024


class FormLimit:
    """How long a form may be, and the setting that sets it."""

    __slots__ = ("size_bytes", "variable")

    def __init__(self, size_bytes: int, variable: str) -> None:
        self.size_bytes, self.variable = size_bytes, variable

    def exceeded(self) -> RequestRejected:
        """Return the 413 of a longer form."""
        text = f"Request body exceeds the limit of {self.size_bytes // _MIB} MB set by {self.variable}"
        return RequestRejected(413, text, limit="body_size")


class FormDoor:
    """Reads the forms of one route."""

    def __init__(self, shape: FormShape, limit: FormLimit, offload: Offload) -> None:
        self._shape, self._limit, self._offload = shape, limit, offload

    @staticmethod
    def takes(headers: Headers) -> bool:
        """Return whether a request declares that it is a form."""
        return headers.get(b"content-type", b"")[:10].lower() == b"multipart/"

    async def read(self, headers: Headers, receive: Receive, budget: BodyBudget) -> bytes:
        """Return the form as JSON. Nothing of a form that is refused is kept.

        Raises RequestRejected, and ClientGone when the client leaves.
        """
        announced = headers.get(b"content-length", b"")
        if announced.isdigit() and int(announced[:20]) > self._limit.size_bytes:
            raise self._limit.exceeded()
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            size = len(message.get("body", b""))
            if taken + size > self._limit.size_bytes:
                raise self._limit.exceeded()
            budget.take(size)
            taken += size
            return message

        try:
            fields, files = await self._walk(headers, counted)
            return await self._offload(partial(form_body, fields, files, self._shape))
        except RequestRejected as error:
            error.more_headers = {**error.more_headers, "connection": "close"}  # the rest of the body is not read
            raise
        finally:
            budget.give_back(taken)

    async def _walk(self, headers: Headers, receive: Receive) -> tuple[list[tuple[str, str]], list[FormFile]]:
        fields: list[tuple[str, str]] = []
        files: list[FormFile] = []
        async for part in read_form(headers, receive, max_fields=MAX_FIELDS, max_field_bytes=MAX_FIELD_BYTES):
            if not isinstance(part, FilePiece):
                fields.append((part.name, part.value))
            elif part.begins:
                files.append(FormFile(part.name, bytearray(part.data)))
            else:
                files[-1].data += part.data
        for file in files:
            file.media_type = media_type(bytes(file.data[:16])) or file.media_type
        return fields, files
