"""Tokenising long shared prompts once: a cache of encoded chunks in front of a tokenizer.

A text is cut, from its start, at the first exact cut (see `cutpoints`) behind a quarter of what stands before it, but at
least `SHORT_CHARS` and at most `CHUNK_CHARS` characters, and each chunk is encoded on its own and remembered. Two texts with
a common beginning get the same cuts up to where they part, also in the middle of a message, so all but the last shared chunk is
found again. Because a cut is exact the ids are those of the uncached tokenizer, whatever was or was not in the cache. The key
is the text itself, not a hash of it: no collision can put one user's tokens into another user's prompt.

What was not used for longest goes first, by generations: new and used chunks gather in a young one; when that holds half
the bytes it becomes the old one, and the old one of before is dropped. This needs no lock (every step is one dict
operation; threads that race lose at worst a cached chunk or a count), and a miscount ends with its generation.

A tokenizer without provable cuts still profits from repeated prompts: then the whole text is the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dynamo.text.cutpoints import ExactCuts, exact_cuts
from dynamo.text.pieces import PieceTable
from dynamo.text.tokenizer import BatchTokenizer, ByteTokenizer, JsonTokenizer, TextInput

CHUNK_CHARS: Final = 1024  # what parts two prompts costs encoding up to this much again; smaller means more entries
SHORT_CHARS: Final = 256  # of the first chunks: a short prompt is nearly all found again, for six entries more
MIN_TEXT_CHARS: Final = 256  # a shorter text is encoded faster than it is looked up and stored
MIN_TEXT_CHARS_QUICK: Final = 2048  # the same where the tokenizer is quick
ENTRY_OVERHEAD_BYTES: Final = 300  # key object, list object and dict slot, beside their contents
BYTES_PER_ID: Final = 8  # a reference: see `_ints`
DEFAULT_MAX_BYTES: Final = 64 * 1024 * 1024


@dataclass(slots=True, eq=False, weakref_slot=True)
class CacheStats:
    """Running totals, exact but for racing threads. A chunk is a hit or a miss; a text too short to look up is neither."""

    hits: int = 0
    misses: int = 0
    cached_tokens: int = 0  # tokens that came from the cache
    uncached_tokens: int = 0  # tokens that had to be encoded, short texts included
    evictions: int = 0  # chunks dropped


class _Chunks:
    """Chunks of texts with their ids, and what they take."""

    __slots__ = ("bytes", "ids")

    def __init__(self) -> None:
        self.ids: dict[str, list[int]] = {}
        self.bytes = 0


class CachedTokenizer:
    """`tokenizer` with a cache of at most about `max_bytes`, least recently used chunks first to go. Thread-safe."""

    __slots__ = ("_cuts", "_ints", "_max_bytes", "_old", "_tokenizer", "_was_quick", "_young", "stats")

    def __init__(self, tokenizer: BatchTokenizer, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        """`max_bytes` <= 0 turns the cache off."""
        self._tokenizer = tokenizer
        self._cuts: ExactCuts | None = exact_cuts(tokenizer.hf) if isinstance(tokenizer, JsonTokenizer) else None
        self._max_bytes = max_bytes if not isinstance(tokenizer, ByteTokenizer) else 0  # bytes need no cache
        self._young, self._old = _Chunks(), _Chunks()
        # One object per token id for all chunks (at most a vocabulary of them): a prompt that is found again is then put
        # together by copying references, where making 32,000 numbers takes half a millisecond.
        self._ints: dict[int, int] = {}
        self._was_quick = False
        self.stats = CacheStats()

    @property
    def cached_bytes(self) -> int:
        """What the cache holds now, by estimate."""
        return self._young.bytes + self._old.bytes

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def is_quick(self) -> bool:
        return self._tokenizer.is_quick

    @property
    def bos_token(self) -> str | None:
        return self._tokenizer.bos_token

    @property
    def eos_token(self) -> str | None:
        return self._tokenizer.eos_token

    def encode(self, text: str) -> list[int]:
        tokenizer, length = self._tokenizer, len(text)
        if length < MIN_TEXT_CHARS or self._max_bytes <= 0 or (length < MIN_TEXT_CHARS_QUICK and tokenizer.is_quick):
            ids = tokenizer.encode(text)
            self.stats.uncached_tokens += len(ids)
            return ids
        if self._was_quick is not tokenizer.is_quick:
            if self._was_quick:  # its ids were found to differ, and so may those that are kept
                self._young, self._old = _Chunks(), _Chunks()
            self._was_quick = tokenizer.is_quick
        chunks = self._cut(text)
        found, missing = self._look_up(chunks)
        if missing:
            self._store(missing, self._tokenizer.encode_many(missing), found)
        ids = []
        for chunk in chunks:
            ids.extend(found[chunk])
        self.stats.cached_tokens += len(ids) - sum([len(found[chunk]) for chunk in missing])  # a chunk may come twice
        return ids

    encode_unlocked = encode

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_inputs(
        self, inputs: Sequence[TextInput], *, add_special_tokens: bool = True, most_tokens: int | None = None
    ) -> list[list[int]]:
        """Encode without the cache: inputs of embeddings are short and rarely share a beginning."""
        return self._tokenizer.encode_inputs(inputs, add_special_tokens=add_special_tokens, most_tokens=most_tokens)

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, visible: frozenset[int] = frozenset()
    ) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, visible=visible)

    def token_id(self, text: str) -> int | None:
        return self._tokenizer.token_id(text)

    def token_name(self, token_id: int) -> str:
        return self._tokenizer.token_name(token_id)

    def token_text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def pieces(self, *, skip_special_tokens: bool, visible: frozenset[int] = frozenset()) -> PieceTable | None:
        return self._tokenizer.pieces(skip_special_tokens=skip_special_tokens, visible=visible)

    def special_ids_in(self, texts: tuple[str, ...]) -> frozenset[int]:
        return self._tokenizer.special_ids_in(texts)

    def _cut(self, text: str) -> list[str]:
        cuts = self._cuts
        if cuts is None:
            return [text]
        chunks: list[str] = []
        start = 0
        while (end := cuts.next(text, start + min(max(start // 4, SHORT_CHARS), CHUNK_CHARS))) >= 0:
            chunks.append(text[start:end])
            start = end + cuts.skip
        chunks.append(text[start:])
        return chunks

    def _look_up(self, chunks: list[str]) -> tuple[dict[str, Sequence[int]], list[str]]:
        found, missing = dict[str, Sequence[int]](), dict[str, None]()
        for chunk in chunks:
            ids = self._young.ids.get(chunk)
            if ids is None and (ids := self._old.ids.pop(chunk, None)) is not None:
                self._old.bytes -= _entry_bytes(chunk, ids)
                self._keep(chunk, ids)
            if ids is None:
                missing[chunk] = None
            else:
                found[chunk] = ids
        stats = self.stats
        stats.hits += len(found)
        stats.misses += len(missing)
        return found, list(missing)

    def _store(self, missing: list[str], encoded: list[list[int]], found: dict[str, Sequence[int]]) -> None:
        for chunk, ids in zip(missing, encoded, strict=True):
            found[chunk] = ids
            self.stats.uncached_tokens += len(ids)
            self._keep(chunk, list(map(self._ints.setdefault, ids, ids)))

    def _keep(self, chunk: str, ids: list[int]) -> None:
        size = _entry_bytes(chunk, ids)
        half = self._max_bytes // 2
        if size > half:
            return
        if self._young.bytes + size > half:
            self.stats.evictions += len(self._old.ids)
            self._old, self._young = self._young, _Chunks()
        self._young.ids[chunk] = ids
        self._young.bytes += size


def _entry_bytes(chunk: str, ids: Sequence[int]) -> int:
    # A str takes 1, 2 or 4 bytes a character by its widest one.
    width = 1 if chunk.isascii() else 2 if max(chunk) < "\U00010000" else 4
    return len(chunk) * width + len(ids) * BYTES_PER_ID + ENTRY_OVERHEAD_BYTES
