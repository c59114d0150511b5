"""Bytes of an HTTP/1.1 answer in, what a load generator needs to know out. No I/O, no clock.

The usual read of a paced stream is one chunk with one event, and there are tens of thousands of them a second: nothing
is parsed that is not needed, and no object is made per event.
"""

from __future__ import annotations

import json
import re
from typing import Final

MAX_HEAD_BYTES: Final = 65_536
MAX_BODY_BYTES: Final = 64 << 20  # of an answer that is kept whole
MAX_LINE_BYTES: Final = 4096

Usage = tuple[int | None, int | None]  # prompt tokens, completion tokens


class BadAnswer(Exception):
    """The other side does not speak HTTP/1.1."""


class AnswerReader:
    """One answer of a connection. `feed` returns its body bytes as they come; `begin` readies it for the next answer."""

    __slots__ = ("_held", "_in_trailer", "_is_chunked", "_left", "is_complete", "keeps_alive", "status")

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Expect a new answer."""
        self.status = 0  # until the head is complete
        self.is_complete = False
        self.keeps_alive = True
        self._held = b""  # a head or a chunk's first line of which the end has not come
        self._is_chunked = False
        self._in_trailer = False
        self._left: int | None = None  # bytes until the end of the body or chunk; None: until the connection closes

    def feed(self, data: bytes) -> bytes:
        """Body bytes in `data`. Raises BadAnswer."""
        if not self.status:
            data = self._head(data)
            if not self.status:
                return b""
        if self._is_chunked:
            return self._chunks(data)
        if self._left is None:
            return data
        if len(data) > self._left:
            raise BadAnswer("more bytes than the answer's Content-Length")
        self._left -= len(data)
        self.is_complete = self._left == 0
        return data

    def end(self) -> bool:
        """Note the end of the connection and return whether the answer is complete."""
        if self.status and not self._is_chunked and self._left is None:
            self.is_complete = True
        self.keeps_alive = False
        return self.is_complete

    def _head(self, data: bytes) -> bytes:
        """Read the head once it is whole; the bytes after it."""
        data = self._held + data
        at = data.find(b"\r\n\r\n")
        if at < 0:
            if len(data) > MAX_HEAD_BYTES:
                raise BadAnswer("headers without end")
            self._held = data
            return b""
        lines = data[:at].split(b"\r\n")
        matched = re.fullmatch(rb"HTTP/1\.([01]) (\d{3})(?: .*)?", lines[0])
        if matched is None:
            raise BadAnswer(f"not an HTTP/1.1 answer: {lines[0][:80]!r}")
        rest, self._held = data[at + 4 :], b""
        if matched[2].startswith(b"1"):  # an interim answer; the real one follows
            return self._head(rest)
        self.keeps_alive = matched[1] == b"1"
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            name, value = name.strip().lower(), value.strip().lower()
            if name == b"content-length":
                if not value.isdigit():
                    raise BadAnswer(f"Content-Length {value[:40]!r}")
                self._left = int(value)
            elif name == b"transfer-encoding" and b"chunked" in value:
                self._is_chunked = True
            elif name == b"connection":
                self.keeps_alive = b"close" not in value and (self.keeps_alive or b"keep-alive" in value)
        self.status = int(matched[2])
        if self._is_chunked:
            self._left = 0
        elif self.status in (204, 304) or self._left == 0:
            self._left, self.is_complete = 0, True
        elif self._left is None:
            self.keeps_alive = False
        return rest

    def _chunks(self, data: bytes) -> bytes:
        if self._held:
            data, self._held = self._held + data, b""
        at, end, left = 0, len(data), self._left or 0
        pieces: list[bytes] = []
        while True:
            if left:  # counts the line end behind the chunk, too
                stop = at + left
                if stop > end:
                    left = stop - end
                    pieces.append(data[at : end if left >= 2 else end - (2 - left)])
                    break
                if left > 2:
                    pieces.append(data[at : stop - 2])
                at, left = stop, 0
            line_end = data.find(b"\r\n", at)
            if line_end < 0:
                if end - at > MAX_LINE_BYTES:
                    raise BadAnswer("a chunk's first line without end")
                self._held = data[at:]
                break
            line = data[at:line_end]
            at = line_end + 2
            if self._in_trailer:
                if not line:
                    self.is_complete = True
                    break
                continue
            try:
                size = int(line, 16)
            except ValueError:
                try:
                    size = int(line.partition(b";")[0], 16)
                except ValueError:
                    raise BadAnswer(f"a chunk of the length {line[:40]!r}") from None
            if size:
                left = size + 2
            else:
                self._in_trailer = True
        self._left = left
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


# The text of a delta that shows something. How this server spells it is learnt from its first event; a search for those
# bytes then costs a tenth of the expression. A quote inside a JSON string is escaped, so text cannot imitate the key.
_FIRST_TEXT: Final = re.compile(rb'("(?:content|reasoning_content|reasoning|text)": ?")[^"]')
_USAGE_MARK: Final = b'_tokens"'  # of the first key of a usage object, whichever that is
_ERROR_MARK: Final = b'{"error"'
_KEPT: Final = 64  # bytes carried into the next read: longer than every mark, and than `data: [DONE]`
_KEPT_USAGE: Final = 2048
_KEPT_ERROR: Final = 2048
_COMPLETION: Final = re.compile(rb'"completion_tokens": ?(\d+)')
_CACHED: Final = re.compile(rb'"cached_tokens": ?(\d+)')
_PROMPT: Final = re.compile(rb'"prompt_tokens": ?(\d+)')


class StreamMeter:
    """The body of one streamed answer."""

    __slots__ = ("_error", "_mark", "_tail", "_usage", "text_events")

    def __init__(self) -> None:
        self.text_events = 0
        self._mark = b""
        self._tail = b""
        self._usage = b""
        self._error = b""

    def feed(self, body: bytes) -> int:
        """Count the events with text that began in these bytes. An event whose key was cut counts later."""
        tail = self._tail
        text = tail + body
        self._tail = text[-_KEPT:]
        mark = self._mark
        if mark:
            start = len(tail) - len(mark) + 1
            found = text.count(mark, start if start > 0 else 0)
        elif matched := _FIRST_TEXT.search(text):
            self._mark = mark = matched[1]
            found = text.count(mark, matched.start())
        else:
            found = 0
        self.text_events += found
        if self._usage or _USAGE_MARK in text:
            self._keep_usage(text, body)
        if self._error or _ERROR_MARK in text:
            self._keep_error(text, body)
        return found

    def _keep_usage(self, text: bytes, body: bytes) -> None:
        # Kept to the end of the stream: some servers send usage in every event, and the last one wins.
        self._usage = (self._usage + body if self._usage else text)[-_KEPT_USAGE:]

    def _keep_error(self, text: bytes, body: bytes) -> None:
        self._error = (self._error + body if self._error else text[text.find(_ERROR_MARK) :])[:_KEPT_ERROR]

    @property
    def usage(self) -> Usage:
        """The last usage in the stream."""
        prompt, completion = _PROMPT.findall(self._usage), _COMPLETION.findall(self._usage)
        return (int(prompt[-1]) if prompt else None, int(completion[-1]) if completion else None)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the server had in a cache, as the last usage in the stream has it; 0 where it has none."""
        cached = _CACHED.findall(self._usage)
        return int(cached[-1]) if cached else 0

    @property
    def failure(self) -> tuple[str, str] | None:
        """(kind, message) if the stream carried an error or lacks its end; None for a proper stream."""
        if self._error:
            return "error in the stream", error_of(self._error.split(b"\n", 1)[0])
        if not self._tail.rstrip().endswith(b"data: [DONE]"):
            return "stream without [DONE]", self._tail[-_KEPT:].decode("utf-8", "replace").strip()
        return None


def usage_of(body: bytes) -> Usage:
    """Read the usage of a whole answer. Anything that is not a chat or text completion has none."""
    try:
        usage = json.loads(body).get("usage") or {}
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    except (ValueError, AttributeError):
        return None, None
    return (prompt if isinstance(prompt, int) else None, completion if isinstance(completion, int) else None)


def error_of(body: bytes) -> str:
    """Return the message of an error's body, on one line."""
    said: object
    try:
        said = json.loads(body)
    except ValueError:
        return _one_line(body.decode("utf-8", "replace"))
    if isinstance(said, dict):
        inner = said.get("error", said)
        said = inner.get("message", inner) if isinstance(inner, dict) else inner
    return _one_line(str(said))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]
