"""A trace: requests and their times, with prompts whose common parts are marked. Pure.

A prompt is a row of stretches. A stretch is a key and a number of tokens: the first tokens of an endless text that the key
names. Two prompts share exactly the stretches that they begin with, so a trace of long prompts stays small, and the same
token ids come out of it in every process.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from dynamo.kv.hashing import block_hashes, sequence_hashes

FIRST_TOKEN_ID: Final = 1000  # beyond the special tokens of any vocabulary
_DOMAIN: Final = b"dynamo replay stretch\0"


class Stretch(NamedTuple):
    """The first `tokens` tokens of the text named `key`."""

    key: int
    tokens: int


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One request of a trace."""

    request_id: str
    arrival_ms: float  # since the start of the trace; for a later turn with `delay_ms` it is not read
    prompt: tuple[Stretch, ...]
    output_tokens: int
    session_id: str | None = None
    delay_ms: float | None = None  # sent so long after the answer to the session's turn before
    priority: int = 0
    strict_priority: int = 0
    policy_class: str | None = None
    tenant: str | None = None  # owner of its key
    output_token_ids: tuple[int, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        return sum(stretch.tokens for stretch in self.prompt)


class Trace(msgspec.Struct, frozen=True):
    """Requests in the order of their arrival."""

    name: str
    requests: Sequence[TraceRequest]

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def seconds(self) -> float:
        """From the first to the last arrival."""
        return (self.requests[-1].arrival_ms - self.requests[0].arrival_ms) / 1000 if self.requests else 0.0


class PromptBlocks(NamedTuple):
    """The names of a prompt's whole blocks."""

    local: list[int]  # each covers its own tokens
    sequence: list[int]  # each covers everything up to its end, too


def stretch_token_ids(stretch: Stretch) -> list[int]:
    """Return the token ids of a stretch: 256 different ids, drawn by its key, the same on any machine."""
    data = hashlib.shake_128(_DOMAIN + stretch.key.to_bytes(16, "little", signed=True)).digest(stretch.tokens)
    return [FIRST_TOKEN_ID + byte for byte in data]


def prompt_token_ids(request: TraceRequest) -> array[int]:
    """Return the whole prompt as token ids."""
    ids = array("I")
    for stretch in request.prompt:
        ids.extend(stretch_token_ids(stretch))
    return ids


class _Node:
    """One stretch behind those of its parents."""

    __slots__ = ("children", "local", "sequence", "tail")

    def __init__(self, local: list[int], sequence: list[int], tail: list[int]) -> None:
        self.local = local  # the blocks that end in this stretch
        self.sequence = sequence
        self.tail = tail  # the tokens behind the last whole block
        self.children: dict[Stretch, tuple[_Node, int]] = {}  # with the last sequence hash up to the child's end


class StretchTree:
    """Computes block hashes of prompts, and hashes what prompts share only once. Bounded by what the trace holds."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._root = _Node([], [], [])

    def blocks(self, prompt: Sequence[Stretch]) -> PromptBlocks:
        """Return the hashes of a prompt's whole blocks: those of `dynamo.kv.hashing` over its token ids."""
        node, last = self._root, -1
        local: list[int] = []
        sequence: list[int] = []
        for stretch in prompt:
            found = node.children.get(stretch)
            if found is None:
                found = node.children[stretch] = self._grow(node, last, stretch)
            node, last = found
            local += node.local
            sequence += node.sequence
        return PromptBlocks(local, sequence)

    def _grow(self, parent: _Node, last: int, stretch: Stretch) -> tuple[_Node, int]:
        """Hash one stretch behind the blocks of `parent`; `last` is the sequence hash of the last of these, or -1."""
        ids = parent.tail + stretch_token_ids(stretch)
        local = block_hashes(ids, self.block_size)
        # A chain that begins with the last sequence hash goes on as if the blocks before had been given.
        sequence = sequence_hashes(local) if last < 0 else sequence_hashes([last, *local])[1:]
        node = _Node(local, sequence, ids[len(local) * self.block_size :])
        return node, sequence[-1] if sequence else last
