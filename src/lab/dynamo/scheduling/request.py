"""One request as a simulated scheduler knows it: how many tokens it has, and the names of its blocks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from dynamo.errors import InvalidArgument
from dynamo.kv.hashing import block_hashes, sequence_hashes


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """A request on its way through a `SchedulerCore`. The first part is the caller's, the second the core's to write."""

    request_id: str
    prompt_tokens: int
    max_output: int
    """Tokens to generate; the core lowers it to the room in the cache and in the model's context."""
    identities: list[int] = field(default_factory=list)
    """Chained hashes of the complete blocks of the prompt; the core appends those of the output's blocks."""
    content: list[int] = field(default_factory=list)
    """Hashes of the same blocks' own tokens, which KV events carry."""
    tail: list[int] | None = None
    """Tokens behind the blocks of the prompt: the end of the prompt, then the output, which the core appends.
    None: no tokens are made, and the output's blocks get random identities."""
    output: Iterator[int] | None = None
    """The output's token ids, at least `max_output`; needed where `tail` is set."""
    owner: object = None
    """A value of the caller's, kept for it."""
    lora_name: str | None = None
    cache_salt: str | None = None
    prompt_arrives: bool = True
    """At a decode worker: the prompt was computed elsewhere, and takes blocks but no time here."""

    tail_block: int = 0
    """Number of the block that `tail` begins with."""
    known: int = 0
    """Tokens that exist: those of the prompt, and the generated ones."""
    computed: int = 0
    """Tokens whose keys and values are in the cache."""
    last: int = 0
    """The request ends when this many tokens are known."""
    scheduled: int = 0
    """Tokens that the last pass that took it in computes."""
    burst: int = 1
    """Tokens that the last pass brought, where it brought any."""
    held: int = 0
    """Blocks it has, private ones included."""
    named: int = 0
    """Blocks it has that have an identity."""
    duplicates: set[int] = field(default_factory=set)
    """Numbers of named blocks of which another request's copy counts as the cached one."""
    cached_tokens: int = -1
    """Prompt tokens that its first admission found in the cache; -1: not admitted yet."""
    preemptions: int = 0
    is_over: bool = False
    """Finished, rejected or cancelled; it holds nothing."""
    submitted_ms: float = 0.0
    admitted_ms: float = -1.0
    """Beginning of the pass that admitted it first; -1: none yet."""

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1:
            raise InvalidArgument(f"prompt_tokens must be at least 1, got {self.prompt_tokens}")
        if self.max_output < 1:
            raise InvalidArgument(f"max_output must be at least 1, got {self.max_output}")
        if len(self.content) != len(self.identities):
            raise InvalidArgument(f"{len(self.identities)} identities but {len(self.content)} content hashes")
        if self.tail is not None and self.output is None:
            raise InvalidArgument("a request with a tail needs its output tokens")
        self.known = self.prompt_tokens
        self.tail_block = len(self.identities)

    @classmethod
    def of_tokens(
        cls,
        request_id: str,
        token_ids: Sequence[int],
        max_output: int,
        block_size: int,
        output: Iterator[int],
        *,
        owner: object = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> Self:
        """Make a request from its tokens; its blocks have the identities that a router computes."""
        content = block_hashes(token_ids, block_size, lora_name=lora_name, cache_salt=cache_salt)
        return cls(
            request_id,
            len(token_ids),
            max_output,
            identities=sequence_hashes(content),
            content=content,
            tail=list(token_ids[len(content) * block_size :]),
            output=output,
            owner=owner,
            lora_name=lora_name,
            cache_salt=cache_salt,
        )

    @property
    def generated(self) -> int:
        """Tokens that were generated so far."""
        return self.known - self.prompt_tokens

    def name_output_blocks(self, count: int, block_size: int, chance: random.Random) -> None:
        """Append identities until there are `count`; the tokens of those blocks are known."""
        identities, content, tail = self.identities, self.content, self.tail
        while len(identities) < count:
            if tail is None:
                identities.append(chance.getrandbits(64))
                content.append(chance.getrandbits(64))
                continue
            start = (len(identities) - self.tail_block) * block_size
            tokens = tail[start : start + block_size]
            (own,) = block_hashes(tokens, block_size, lora_name=self.lora_name, cache_salt=self.cache_salt)
            identities.append(sequence_hashes([identities[-1], own])[1] if identities else own)
            content.append(own)
