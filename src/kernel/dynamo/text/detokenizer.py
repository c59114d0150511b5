"""Token ids -> text, while they arrive.

The text of a stream does not depend on how its ids were cut into pushes, and is what decoding prompt and answer
together shows behind the prompt. A code point is emitted when its last byte is there.

Bytes that are not UTF-8 become U+FFFD, and only once that is certain: when the next byte cannot continue the sequence,
or at `finish`. Byte-level tokenizers count as the library does (one U+FFFD per maximal invalid part). Byte-fallback
tokenizers get one U+FFFD per invalid byte; the library, which sees the whole answer, also throws away valid
characters written in byte tokens next to an invalid one. A stream cannot take them back, so they stay.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Final

from dynamo.text.pieces import PieceTable
from dynamo.text.tokenizer import Tokenizer

MAX_PENDING_BYTES: Final = 3  # an unfinished UTF-8 sequence is at most this long
WINDOW_TOKENS: Final = 6  # prompt tokens that give a neighbour-dependent decoder its context
MAX_HELD_TOKENS: Final = 16  # such a decoder may really write U+FFFD: do not wait for it longer than this


class Detokenizer:
    """The decode state of one choice."""

    __slots__ = ("_at_start", "_pending", "_prompt_tail", "_strip", "_table", "_window", "whole")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        visible: frozenset[int] = frozenset(),
    ) -> None:
        """`visible`: special tokens that are shown although special tokens are skipped."""
        table = tokenizer.pieces(skip_special_tokens=skip_special_tokens, visible=visible)
        if table is None:
            self._window: _Window | None = _Window(tokenizer, prompt_ids, skip_special_tokens, visible)
            self._table, self._pending, self._strip = _NO_TABLE, b"", 0
            self._prompt_tail, self._at_start = 0, False
            self.whole: PieceTable | None = None
            """The table of the tokens' texts while nothing is pending: a text in it is then what `push` returns for its
            token; for None there, and while this is None, call `push`."""
            return
        self._window = None
        self._table = table
        self._pending = _unfinished_tail(table, prompt_ids)
        # How many U+FFFD the pending bytes would show if they stay broken: they are the prompt's, not ours.
        self._prompt_tail = len(utf_8_decode(self._pending, table.errors, True)[0])
        starts = (table.first is not None or table.strip > 0) and not any(map(table.seen, reversed(prompt_ids)))
        self._at_start = starts and table.first is not None
        self._strip = table.strip if starts else 0
        self.whole = None if self._pending or self._at_start or self._strip else table

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text these ids complete; whole code points only, so often empty for part of a character."""
        if (table := self.whole) is not None:
            if len(token_ids) == 1:
                text = table[token_ids[0]]
                if text is not None:
                    return text
            else:
                parts = [table[token_id] for token_id in token_ids]
                if None not in parts:
                    return "".join(parts)  # type: ignore[arg-type]
        elif self._window is not None:
            return self._window.push(token_ids)
        return self._push_bytes(token_ids)

    def finish(self) -> str:
        """Return the pending text: empty, or U+FFFD for a code point that never became whole. Idempotent."""
        if self._window is not None:
            return self._window.finish()
        return self._emit(b"", final=True)

    def _push_bytes(self, token_ids: Sequence[int]) -> str:
        table = self._table
        if self._at_start:
            assert table.first is not None
            for index, token_id in enumerate(token_ids):
                if table.seen(token_id):
                    self._at_start = False
                    rest = b"".join(map(table.data, token_ids[index + 1 :]))
                    return self._emit(table.first(token_id) + rest)
            return ""
        return self._emit(b"".join(map(table.data, token_ids)))

    def _emit(self, data: bytes, *, final: bool = False) -> str:
        data = self._pending + data
        text, used = utf_8_decode(data, self._table.errors, final)
        self._pending = data[used:]
        if text:
            if self._prompt_tail:
                broken = len(text) - len(text.lstrip("\ufffd"))
                text = text[min(broken, self._prompt_tail) :]
                self._prompt_tail = 0
            if self._strip:
                kept = text.lstrip(" ")
                stripped = min(len(text) - len(kept), self._strip)
                text = text[stripped:]
                self._strip = self._strip - stripped if not text else 0
        is_held = self._pending or self._at_start or self._strip or self._prompt_tail
        self.whole = None if is_held else self._table
        return text


_NO_TABLE: Final = PieceTable(lambda _id: None, size=0)


def _unfinished_tail(table: PieceTable, prompt_ids: Sequence[int]) -> bytes:
    """Return the bytes at the end of the prompt that only begin a code point (nearly always none)."""
    if prompt_ids and table[prompt_ids[-1]]:
        return b""  # its last token is whole characters
    data = b""
    for token_id in reversed(prompt_ids):
        data = table.data(token_id) + data
        if len(data) >= MAX_PENDING_BYTES:
            break
    return data[utf_8_decode(data, table.errors, False)[1] :]


class _Window:
    """For decoders that depend on neighbours: decode a short window with and without the new ids, and show the difference."""

    __slots__ = ("_ids", "_known", "_skip", "_tokenizer", "_visible")

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool, visible: frozenset[int]
    ) -> None:
        self._tokenizer, self._skip, self._visible = tokenizer, skip_special_tokens, visible
        self._ids = list(prompt_ids[-WINDOW_TOKENS:])
        self._known = len(self._ids)  # ids whose text has been shown

    def push(self, token_ids: Sequence[int]) -> str:
        # One by one: what is shown must not depend on how the ids were grouped.
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def _push_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        shown, text = self._decode(self._known), self._decode(len(self._ids))
        held = len(self._ids) - self._known
        if len(text) <= len(shown) or (text.endswith("\ufffd") and held < MAX_HELD_TOKENS):
            return ""
        del self._ids[: max(0, self._known - WINDOW_TOKENS)]
        self._known = len(self._ids)
        return text[len(shown) :]

    def finish(self) -> str:
        shown, text = self._decode(self._known), self._decode(len(self._ids))
        self._known = len(self._ids)
        return text[len(shown) :]

    def _decode(self, end: int) -> str:
        return self._tokenizer.decode(self._ids[:end], skip_special_tokens=self._skip, visible=self._visible)
