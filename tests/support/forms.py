"""Forms as browsers and client libraries send them."""

from __future__ import annotations

from collections.abc import Sequence

BOUNDARY = "b0undary"
CONTENT_TYPE = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def form(*parts: tuple[str, str | bytes]) -> bytes:
    """The body of a form; bytes are the content of a file."""
    return b"".join([*map(_part, parts), f"--{BOUNDARY}--\r\n".encode()])


def _part(part: tuple[str, str | bytes]) -> bytes:
    name, value = part
    file = '; filename="a.bin"\r\nContent-Type: application/octet-stream' if isinstance(value, bytes) else ""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'
    return head.encode() + (value if isinstance(value, bytes) else value.encode()) + b"\r\n"


def fields(parts: Sequence[tuple[str, str | bytes]], **texts: str) -> bytes:
    """A form of `parts`, and of texts by their names."""
    return form(*parts, *texts.items())
