"""Forms with a file (`multipart/form-data`), read piece by piece: no more of the file is in memory than has just arrived."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from msgspec import Struct
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from dynamo.frontend.base.asgi import ClientGone, Headers, Receive
from dynamo.protocol.openai.errors import RequestRejected

MAX_FIELDS: Final = 32
MAX_FIELD_BYTES: Final = 64 * 1024
MAX_HEADER_BYTES: Final = 16 * 1024  # of one part


class FormField(Struct, frozen=True):
    """A field without a file."""

    name: str
    value: str


class FilePiece(Struct, frozen=True):
    """The next bytes of a file."""

    name: str  # of the field
    filename: str
    data: bytes
    begins: bool = False  # the first piece of its file; every file has one


class _PartHeaders:
    """The headers of one part of a form, and what its `Content-Disposition` has."""

    def __init__(self) -> None:
        self.options: dict[bytes, bytes] = {}
        self._name, self._value = bytearray(), bytearray()  # of the line that is being read
        self._bytes = 0

    @property
    def name(self) -> str:
        """The name of the field."""
        return self.options.get(b"name", b"").decode("utf-8", "replace")

    def add_name(self, data: bytes) -> None:
        self._count(len(data))
        self._name += data

    def add_value(self, data: bytes) -> None:
        self._count(len(data))
        self._value += data

    def end_line(self) -> None:
        if bytes(self._name).lower() == b"content-disposition":
            _, self.options = parse_options_header(bytes(self._value))
        self._name.clear()
        self._value.clear()

    def _count(self, size: int) -> None:
        self._bytes += size
        if self._bytes > MAX_HEADER_BYTES:
            raise _refused("The headers of a form's part are too long")


class _Form:
    """Turns what the parser reports into fields and pieces of files."""

    def __init__(self, boundary: bytes, max_fields: int, max_field_bytes: int) -> None:
        self._max_fields, self._max_field_bytes = max_fields, max_field_bytes
        self.found: list[FormField | FilePiece] = []
        self.is_ended = False
        self._headers = _PartHeaders()
        self._value = bytearray()
        self._fields = 0
        self._field_bytes = 0
        self.parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begins,
                "on_part_data": self._part_data,
                "on_part_end": self._part_ends,
                "on_header_field": lambda data, start, end: self._headers.add_name(data[start:end]),
                "on_header_value": lambda data, start, end: self._headers.add_value(data[start:end]),
                "on_header_end": lambda: self._headers.end_line(),
                "on_headers_finished": self._headers_end,
                "on_end": self._ended,
            },
        )

    def _part_begins(self) -> None:
        self._fields += 1
        if self._fields > self._max_fields:
            raise _refused(f"A form may have at most {self._max_fields} fields")
        self._headers = _PartHeaders()
        self._value.clear()

    def _headers_end(self) -> None:
        if not self._headers.name:
            raise _refused("A part of the form has no name")
        if b"filename" in self._headers.options:
            self._file_piece(b"", begins=True)  # a file may be empty

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if b"filename" in self._headers.options:
            self._file_piece(data[start:end])
            return
        self._field_bytes += end - start
        if self._field_bytes > self._max_field_bytes:
            raise _refused(f"The fields of a form may have at most {self._max_field_bytes} bytes")
        self._value += data[start:end]

    def _part_ends(self) -> None:
        if b"filename" not in self._headers.options:
            self.found.append(FormField(self._headers.name, self._value.decode("utf-8", "replace")))

    def _file_piece(self, data: bytes, *, begins: bool = False) -> None:
        filename = self._headers.options[b"filename"].decode("utf-8", "replace")
        self.found.append(FilePiece(self._headers.name, filename, data, begins))

    def _ended(self) -> None:
        self.is_ended = True


async def read_form(
    headers: Headers, receive: Receive, *, max_fields: int = MAX_FIELDS, max_field_bytes: int = MAX_FIELD_BYTES
) -> AsyncIterator[FormField | FilePiece]:
    """Walk the fields of a form, and its files piece by piece, in the order of the client.

    `max_field_bytes`: of all fields together, without the files.

    Raises RequestRejected for what is not such a form, ClientGone when the client leaves.
    """
    kind, options = parse_options_header(headers.get(b"content-type", b""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise RequestRejected(415, "Expected request with Content-Type multipart/form-data and a boundary")
    try:
        form = _Form(boundary, max_fields, max_field_bytes)
    except FormParserError as error:
        raise _refused(f"The boundary of the form is not valid: {error}") from None
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        try:
            form.parser.write(message.get("body", b""))
        except FormParserError as error:
            raise _refused(f"The body is not a valid form: {error}") from None
        found, form.found = form.found, []
        for each in found:
            yield each
        more = message.get("more_body", False)
    if not form.is_ended:
        raise _refused("The form ends in the middle of a part")


def _refused(message: str) -> RequestRejected:
    return RequestRejected(400, message, stream_type="invalid_request_error")
