"""Header compression of HTTP/2 (RFC 7541): reading all of it, and writing without a table. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Final

Headers = list[tuple[bytes, bytes]]

MAX_HEADER_BYTES: Final = 64 * 1024  # of one block, as it is after decompression
TABLE_BYTES: Final = 4096  # the default of the protocol, which is never raised here
_ENTRY_BYTES: Final = 32  # what each entry counts beside its text
_KEPT_BLOCKS: Final = 64
_KEPT_BYTES: Final = 512  # of a block that is kept

# Appendix A: the entries from 1 on, as name=value.
_STATIC_TEXT: Final = (
    ":authority= | :method=GET | :method=POST | :path=/ | :path=/index.html | :scheme=http | :scheme=https | "
    ":status=200 | :status=204 | :status=206 | :status=304 | :status=400 | :status=404 | :status=500 | "
    "accept-charset= | accept-encoding=gzip, deflate | accept-language= | accept-ranges= | accept= | "
    "access-control-allow-origin= | age= | allow= | authorization= | cache-control= | content-disposition= | "
    "content-encoding= | content-language= | content-length= | content-location= | content-range= | content-type= | "
    "cookie= | date= | etag= | expect= | expires= | from= | host= | if-match= | if-modified-since= | if-none-match= "
    "| if-range= | if-unmodified-since= | last-modified= | link= | location= | max-forwards= | proxy-authenticate= "
    "| proxy-authorization= | range= | referer= | refresh= | retry-after= | server= | set-cookie= | "
    "strict-transport-security= | transfer-encoding= | user-agent= | vary= | via= | www-authenticate="
)
_STATIC: Final[Headers] = [
    (name.encode(), value.encode()) for name, _, value in (entry.partition("=") for entry in _STATIC_TEXT.split(" | "))
]

# Appendix B: how many bits each symbol takes, a letter for each, from 5 bits (a) on; the last one is the end of a text. The codes
# follow from that: they rise with the length, and within a length with the symbol.
_LENGTHS: Final = (
    "isxxxxxxxtzxxzxxxxxxxxzxxxxxxxxxbffhibdgffdgdbbbaaabbbbbbbcdkbhfibccccccccccccccccccccccdcdioijb"
    "kabababbbaccbbbabcbaabccccckgjixprpprrrsrssssststtrstssssqrsrsstrqprrssqsrrtqrssqqrqsrssprrrsrrs"
    "vvporsruvvvwwvtuoqvwwvwtqqvvxwwwptpqrqqsrruuttvsvwvvwwwwwxwwwwwvz"
)
_END_SYMBOL: Final = 256


class BadHeaders(ValueError):
    """A block of headers that cannot be read: the connection cannot go on."""


@cache
def _steps() -> tuple[Sequence[tuple[int, int]], frozenset[int]]:
    """Return what half a byte leads to, by place in the tree * 16 + half byte: a place, and a symbol or -1; and where a text may end.

    A text may end at the root, and within a code of up to 7 bits that are all ones. No code is so short that half a byte ends two.
    """
    tree, code, before = [[0, 0]], 0, 0
    for bits, symbol in sorted((ord(letter) - ord("a") + 5, symbol) for symbol, letter in enumerate(_LENGTHS)):
        code <<= bits - before
        place = 0
        for shift in range(bits - 1, 0, -1):
            branch = code >> shift & 1
            if not tree[place][branch]:
                tree[place][branch] = len(tree)
                tree.append([0, 0])
            place = tree[place][branch]
        tree[place][code & 1] = ~symbol
        code, before = code + 1, bits
    steps = []
    for start in range(len(tree)):
        for half in range(16):
            place, symbol = start, -1
            for shift in (3, 2, 1, 0):
                place = tree[place][half >> shift & 1]
                if place < 0:
                    place, symbol = 0, ~place
            steps.append((place, symbol))
    ends = [0]
    for _ in range(7):
        ends.append(tree[ends[-1]][1])
    return steps, frozenset(ends)


def read_huffman(data: bytes) -> bytes:
    """Return the text of a Huffman code. Raises BadHeaders."""
    steps, ends = _steps()
    found, place = list[int](), 0
    for byte in data:
        place, symbol = steps[place << 4 | byte >> 4]
        if symbol >= 0:
            found.append(symbol)
        place, symbol = steps[place << 4 | byte & 15]
        if symbol >= 0:
            found.append(symbol)
    if _END_SYMBOL in found:
        raise BadHeaders("a Huffman code holds its end")
    if place not in ends:
        raise BadHeaders("a Huffman code is cut off")
    return bytes(found)


class HeaderReader:
    """Reads the blocks of one connection, in their order."""

    def __init__(self) -> None:
        self._dynamic: deque[tuple[bytes, bytes]] = deque()  # the newest first
        self._size, self._limit = 0, TABLE_BYTES
        # A gateway sends the same block for each call. It means the same for as long as the table stays as it is.
        self._known: dict[bytes, Headers] = {}

    def read(self, block: bytes) -> Headers:
        """Return the headers of a block, which the caller leaves as they are. Raises BadHeaders."""
        if (known := self._known.get(block)) is not None:
            return known
        found, at, total, is_lasting = Headers(), 0, 0, len(block) <= _KEPT_BYTES
        while at < len(block):
            byte = block[at]
            if byte & 0x80:
                index, at = _integer(block, at, 7)
                header = self._entry(index)
            elif byte & 0xE0 == 0x20:
                size, at = _integer(block, at, 5)
                if size > TABLE_BYTES:
                    raise BadHeaders(f"a table of {size} bytes was not offered")
                self._limit, is_lasting = size, False
                self._evict()
                continue
            else:
                is_kept = byte & 0xC0 == 0x40
                index, at = _integer(block, at, 6 if is_kept else 4)
                name, at = (self._entry(index)[0], at) if index else _text(block, at)
                value, at = _text(block, at)
                header = name, value
                if is_kept:
                    is_lasting = False
                    self._dynamic.appendleft(header)
                    self._size += len(name) + len(value) + _ENTRY_BYTES
                    self._evict()
            total += len(header[0]) + len(header[1]) + _ENTRY_BYTES
            if total > MAX_HEADER_BYTES:
                raise BadHeaders(f"more than {MAX_HEADER_BYTES} bytes of headers")
            found.append(header)
        if is_lasting:
            if len(self._known) >= _KEPT_BLOCKS:
                self._known.clear()
            self._known[block] = found
        return found

    def _entry(self, index: int) -> tuple[bytes, bytes]:
        if 0 < index <= len(_STATIC):
            return _STATIC[index - 1]
        at = index - len(_STATIC) - 1
        if not 0 <= at < len(self._dynamic):
            raise BadHeaders(f"there is no header {index}")
        return self._dynamic[at]

    def _evict(self) -> None:
        self._known.clear()
        while self._size > self._limit and self._dynamic:
            name, value = self._dynamic.pop()
            self._size -= len(name) + len(value) + _ENTRY_BYTES


def _integer(data: bytes, at: int, bits: int) -> tuple[int, int]:
    most = (1 << bits) - 1
    value = data[at] & most
    at += 1
    if value < most:
        return value, at
    shift = 0
    while True:
        if at >= len(data) or shift > 28:
            raise BadHeaders("a number is cut off, or too large")
        byte = data[at]
        at += 1
        value += (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _text(data: bytes, at: int) -> tuple[bytes, int]:
    if at >= len(data):
        raise BadHeaders("a text is cut off")
    is_huffman = data[at] & 0x80
    size, at = _integer(data, at, 7)
    if at + size > len(data):
        raise BadHeaders("a text is cut off")
    found = data[at : at + size]
    return (read_huffman(found) if is_huffman else found), at + size


def write_headers(headers: Headers) -> bytes:
    """Write headers as texts that no table keeps."""
    written = bytearray()
    for name, value in headers:
        written.append(0)
        for text in (name, value):
            written += _written_integer(len(text), 7) + text
    return bytes(written)


def _written_integer(value: int, bits: int) -> bytes:
    most = (1 << bits) - 1
    if value < most:
        return bytes((value,))
    written, value = bytearray((most,)), value - most
    while value >= 0x80:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)
