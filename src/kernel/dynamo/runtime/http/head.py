"""The head of an HTTP answer, and the framing of the body behind it: bytes out, and no I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import Final

CHUNKED: Final = None  # instead of a number of bytes: each piece of the body carries its length
TO_THE_END: Final = -1  # likewise: the end of the connection is the end of the body

_BAD_NAME: Final = re.compile(rb"[^!#$%&'*+\-.^_`|~0-9A-Za-z]")
_BAD_VALUE: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_status_lines: dict[int, bytes] = {}


def status_line(status: int) -> bytes:
    """Return the first line of an answer. Any number of three digits: an operator may choose one that has no phrase."""
    line = _status_lines.get(status)
    if line is None:
        phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else ""
        line = _status_lines[status] = f"HTTP/1.1 {status:03d} {phrase}\r\n".encode()
    return line


def write_head(
    status: int, headers: Iterable[tuple[bytes, bytes]], *, method: str, http_version: str, keep_alive: bool
) -> tuple[bytes, int | None, bool]:
    """Return the head, what is left to send of the body, and whether the connection is kept for a further request.

    Left is a number of bytes, or `CHUNKED`, or `TO_THE_END`. An answer without a body has 0 left. Raises RuntimeError for a
    header that is not valid.
    """
    parts = [status_line(status)]
    length: int | None = None
    is_closing = False
    for name, value in headers:
        if _BAD_NAME.search(name) or _BAD_VALUE.search(value):
            raise RuntimeError(f"the application sent a header that is not valid: {name!r}")
        name = name.lower()
        if name == b"content-length":
            length = int(value)
        elif name == b"connection" and value.lower() == b"close":
            is_closing = True
        elif name == b"transfer-encoding":
            continue  # the framing is decided here
        parts.append(b"%b: %b\r\n" % (name, value))
    has_body = status not in (204, 304) and status >= 200
    left: int | None
    if length is not None or not has_body or method == "HEAD":
        left = length or 0
    elif http_version == "1.0":
        keep_alive = False
        left = TO_THE_END
    else:
        left = CHUNKED
        parts.append(b"transfer-encoding: chunked\r\n")
    if is_closing:
        keep_alive = False
    elif not keep_alive:
        parts.append(b"connection: close\r\n")
    parts.append(b"\r\n")
    return b"".join(parts), left, keep_alive
