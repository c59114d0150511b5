"""A file of the disk as the answer to a request."""

from __future__ import annotations

import asyncio
import os
import re
from typing import Final

from dynamo.frontend.base.asgi import Scope, Send, first_headers, reply_rejected
from dynamo.protocol.openai.errors import RequestRejected

READ_BYTES: Final = 256 * 1024
_RANGE: Final = re.compile(rb"bytes=(\d{0,18})-(\d{0,18})")


async def send_content(scope: Scope, send: Send, opened: int, size: int, content_type: bytes) -> None:
    """Send an open file of `size` bytes, whole or the one range of it that the request names."""
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
