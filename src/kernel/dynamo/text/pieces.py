"""What each token id adds to the text, for tokenizers whose decoder works token by token.

Three families cover nearly every model: byte-level BPE (a token is bytes), byte-fallback (a token is text, or one byte
written `<0xE2>`) and plain text pieces (Metaspace, WordPiece). A decoder that depends on neighbouring tokens in any
other way has no table, and `table_for` returns None.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from typing import Final

from tokenizers import Tokenizer as HfTokenizer

from dynamo.protocol.openai.shapes import JsonMapping

MAX_ID: Final = 2**32 - 1  # the library's id type; anything else would raise OverflowError
PER_BYTE: Final = "dynamo.text.per_byte"  # error handler: one U+FFFD for every byte that is not text


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(PER_BYTE, _replace_each_byte)


class PieceTable(dict[int, str | None]):
    """id -> the text it adds, or None when it is only part of a code point (then see `data`).

    Filled on demand, so that a vocabulary of 150,000 entries costs nothing at start; only ids below `size` are kept.

    `raw(id)` is the bytes of one token, or None for a token the decoder does not see (unknown, or special and skipped).
    `first(id)` is the same for the very first token of a text, where that differs. `strip` is how many leading spaces
    the decoder removes from the start of a text. `errors` names the handler for bytes that are not UTF-8.
    """

    __slots__ = ("_encoded", "_partial", "errors", "first", "raw", "size", "strip")

    def __init__(
        self,
        raw: Callable[[int], bytes | None],
        *,
        size: int,
        first: Callable[[int], bytes] | None = None,
        strip: int = 0,
        errors: str = "replace",
    ) -> None:
        super().__init__()
        self.raw, self.first, self.strip, self.errors, self.size = raw, first, strip, errors, size
        self._partial: dict[int, bytes] = {}
        self._encoded: dict[Callable[[str], bytes], EncodedPieces] = {}

    def encoded(self, encode: Callable[[str], bytes]) -> EncodedPieces:
        """Return the same table with every text encoded, shared by all that call with the same function (one of few)."""
        found = self._encoded.get(encode)
        if found is None:
            found = self._encoded[encode] = EncodedPieces(self, encode)
        return found

    def __missing__(self, token_id: int) -> str | None:
        data = self.raw(token_id) or b""
        text: str | None
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = None
        if 0 <= token_id < self.size:
            self[token_id] = text
            if text is None:
                self._partial[token_id] = data
        return text

    def data(self, token_id: int) -> bytes:
        """Return the bytes `token_id` adds anywhere but at the start of a text."""
        text = self[token_id]
        if text is not None:
            return text.encode()
        found = self._partial.get(token_id)
        return found if found is not None else self.raw(token_id) or b""

    def seen(self, token_id: int) -> bool:
        """Return whether the decoder handles this token."""
        return bool(self[token_id]) or self.raw(token_id) is not None


class EncodedPieces(dict[int, bytes | None]):
    """id -> its text, encoded once; b"" for no text, None where `PieceTable` has None. Filled on demand, like that one."""

    __slots__ = ("_encode", "_table")

    def __init__(self, table: PieceTable, encode: Callable[[str], bytes]) -> None:
        super().__init__()
        self._table, self._encode = table, encode

    def __missing__(self, token_id: int) -> bytes | None:
        text = self._table[token_id]
        piece = self._encode(text) if text else None if text is None else b""
        if 0 <= token_id < self._table.size:
            self[token_id] = piece
        return piece


def _byte_level_alphabet() -> dict[str, int]:
    """Return the printable character that stands for each byte: itself where printable, else the next free one from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF: Final = _byte_level_alphabet()
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token; one that is not written in that alphabet (an added token) is its own UTF-8."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()


def table_for(tokenizer: HfTokenizer, hidden: frozenset[int]) -> PieceTable | None:
    """Return the table of `tokenizer`'s decoder without the `hidden` tokens.

    Returns None where text cannot be assembled token by token.
    """
    size = vocabulary_size(tokenizer)

    def visible(token_id: int) -> str | None:
        return tokenizer.id_to_token(token_id) if 0 <= token_id <= MAX_ID and token_id not in hidden else None

    def per_token(convert: Callable[[str], bytes]) -> Callable[[int], bytes | None]:
        def raw(token_id: int) -> bytes | None:
            token = visible(token_id)
            return None if token is None else convert(token)

        return raw

    decoder = tokenizer.decoder
    if decoder is None:  # the library then joins tokens with a space
        return PieceTable(
            per_token(lambda token: b" " + token.encode()),
            size=size,
            first=lambda token_id: (visible(token_id) or "").encode(),
        )
    steps = flatten_steps(json.loads(decoder.__getstate__()), "decoders")
    match [step["type"] for step in steps]:
        case ["ByteLevel"]:
            return PieceTable(per_token(byte_level_bytes), size=size)
        case ["Metaspace"] | ["WordPiece"]:
            # The decoder treats only the first token of a text differently, so the library itself shows what a
            # token adds behind another one ("x" is left alone by both).
            return PieceTable(
                per_token(lambda token: decoder.decode(["x", token])[1:].encode()),
                size=size,
                first=lambda token_id: decoder.decode([visible(token_id) or ""]).encode(),
            )
        case [*_, "Replace" | "ByteFallback" | "Fuse" | "Strip"]:
            plan = _byte_fallback_plan(steps)
            if plan is None:
                return None
            replacements, strip = plan
            return PieceTable(
                per_token(lambda token: _fallback_bytes(token, replacements)), size=size, strip=strip, errors=PER_BYTE
            )
    return None


def vocabulary_size(tokenizer: HfTokenizer) -> int:
    """Return one more than the largest id: added tokens may lie beyond a hole."""
    added = tokenizer.get_added_tokens_decoder()
    return max(tokenizer.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)


def flatten_steps(state: JsonMapping, parts: str) -> list[JsonMapping]:
    """Return a component of tokenizer.json as a flat list: nested `Sequence`s (their members are under `parts`) are opened."""
    if state["type"] != "Sequence":
        return [state]
    return [step for part in state[parts] for step in flatten_steps(part, parts)]


def _byte_fallback_plan(steps: list[JsonMapping]) -> tuple[list[tuple[str, str]], int] | None:
    """Return (literal replacements, leading spaces stripped) for Replace* ByteFallback [Fuse [Strip]]; None for other orders."""
    replacements: list[tuple[str, str]] = []
    rest = list(steps)
    while rest and rest[0]["type"] == "Replace":
        step = rest.pop(0)
        literal = step["pattern"].get("String")
        if not literal:
            return None
        replacements.append((literal, step["content"]))
    if not rest or rest.pop(0)["type"] != "ByteFallback":
        return None
    if rest and rest.pop(0)["type"] != "Fuse":
        return None
    if not rest:
        return replacements, 0
    strip = rest.pop(0)
    if rest or strip["type"] != "Strip" or strip["content"] != " " or strip["stop"]:
        return None
    return replacements, int(strip["start"])


def _fallback_bytes(token: str, replacements: list[tuple[str, str]]) -> bytes:
    for old, new in replacements:
        token = token.replace(old, new)
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.encode()
