"""Which tokens of which sequence are computed in the next step. No clock, no array, no model.

Continuous batching: every step takes one token of each sequence that generates, then pieces of prompts, up to a budget
of tokens. When the blocks run out, the sequence that came last gives up its own and waits; it keeps its tokens, and
computes them again when there is room (most are found in the prefix cache).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from dynamo.errors import InvalidArgument
from dynamo.kv.hashing import block_hashes, sequence_hashes
from dynamo.reference.blocks import PLAIN, BlockPool, PrefixKey


@dataclass(slots=True, eq=False)
class Sequenced:
    """One sequence on its way: a prompt, and what was generated after it."""

    tokens: list[int]
    priority: int = 0  # higher goes first; equals go in order of arrival
    key: PrefixKey = PLAIN
    may_share: bool = True  # False: compute the whole prompt, whatever is cached
    routed: tuple[int, ...] = ()  # the beginning of `tokens` as routers hash it; (): as it is
    arrives: bool = False  # its prompt's keys and values come from another worker; until `received`
    may_name: bool = True  # False: what is computed is for this sequence alone
    arrival: int = -1  # set by the scheduler
    computed: int = 0  # tokens whose keys and values are in `blocks`
    cached: int = -1  # of them, taken from the cache at the first admission; -1: never admitted
    preemptions: int = 0
    is_finished: bool = False
    generates: bool = True  # tokens come behind the prompt
    blocks: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)  # of the full blocks of `tokens`, as far as they were needed

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller goes first."""
        return -self.priority, self.arrival


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Compute `count` tokens of a sequence from `start` on. With `samples`, the last of them yields a new token."""

    sequence: Sequenced
    start: int
    count: int

    @property
    def samples(self) -> bool:
        return self.start + self.count == len(self.sequence.tokens)


class Scheduler:
    """Call `plan`, compute it, then `computed` for every piece of it; `finish` and `abort` in between."""

    def __init__(self, pool: BlockPool, *, max_sequences: int, max_step_tokens: int) -> None:
        """`max_step_tokens` bounds a step; at least `max_sequences`, so that a sequence that generates always may."""
        if max_sequences < 1 or max_step_tokens < max_sequences:
            raise InvalidArgument(
                f"the step's {max_step_tokens} tokens must be at least the {max_sequences} sequences, and those at least 1"
            )
        self.pool = pool
        self._max_sequences, self._max_step_tokens = max_sequences, max_step_tokens
        self._arrivals = itertools.count()
        self._waiting: list[tuple[tuple[int, int], Sequenced]] = []  # a heap; may hold finished ones
        self._running: list[Sequenced] = []  # by rank
        self._receiving: dict[Sequenced, None] = {}  # hold their blocks, and wait for what goes into them
        self._reserved: list[Sequenced] = []  # of them, those that were not reported yet
        self._is_stuck = False

    @property
    def is_idle(self) -> bool:
        """Nothing to do until `add`, `received` or `finish`: a sequence that waits needs blocks that others hold."""
        self._drop_finished()
        return not self._running and (not self._waiting or self._is_stuck)

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    def add(self, sequence: Sequenced) -> None:
        """Queue a sequence. Raises InvalidArgument for one that could never run."""
        needed = self._blocks_for(len(sequence.tokens) + sequence.generates)
        if not sequence.tokens or needed > self.pool.blocks:
            raise InvalidArgument(
                f"a prompt of {len(sequence.tokens)} tokens needs {needed} KV blocks, the cache has {self.pool.blocks}"
                if sequence.tokens
                else "token_ids must not be empty"
            )
        self._is_stuck = False
        sequence.arrival = next(self._arrivals)
        heapq.heappush(self._waiting, (sequence.rank, sequence))

    def take_reserved(self) -> list[Sequenced]:
        """Sequences whose blocks are held now, so that their prompts may arrive; each is named once."""
        reserved, self._reserved = self._reserved, []
        return reserved

    def received(self, sequence: Sequenced, tokens: int) -> None:
        """Go on with the first `tokens` tokens of a reserved sequence in its blocks; the rest is computed here."""
        if sequence not in self._receiving:
            return
        del self._receiving[sequence]
        self._is_stuck = sequence.arrives = False
        before, sequence.computed = sequence.computed, max(sequence.computed, tokens)
        size = self.pool.block_size
        if self.pool.prefix_caching:
            self._name_blocks(sequence, before // size, sequence.computed // size)
        self._run(sequence)

    def plan(self) -> list[Work]:
        """Return the next step, within the budget and with every block it needs held; [] only when there is nothing to do."""
        planned: dict[Sequenced, Work] = {}
        budget = self._max_step_tokens
        preempted = False
        # A sequence that generates goes before the prompts: one token each, and no stream stalls behind a long prompt.
        for sequence in sorted(self._running, key=lambda s: (len(s.tokens) - s.computed > 1, s.rank)):
            count = min(len(sequence.tokens) - sequence.computed, budget)
            if count == 0 or sequence not in self._running:
                continue
            while not self._reserve(sequence, sequence.computed + count):
                # Never one that is planned already: a prompt has held all its blocks since it was admitted, so a request that
                # needs one generates, and those go by rank.
                preempted = True
                victim = self._running[-1]
                self._preempt(victim)
                if victim is sequence:
                    break
            else:
                planned[sequence] = Work(sequence, sequence.computed, count)
                budget -= count
        # A sequence just lost its blocks: giving them to a newcomer would only take them back and forth.
        if not preempted:
            self._admit(planned, budget)
        self._is_stuck = not planned and not preempted
        return list(planned.values())

    def computed(self, work: Work, token: int | None = None) -> None:
        """Record a piece as being in the cache; `token` is the new token, if the piece yielded one with which the
        sequence goes on.
        """
        sequence = work.sequence
        if sequence.is_finished:
            return
        sequence.computed = work.start + work.count
        full = sequence.computed // self.pool.block_size
        if full > work.start // self.pool.block_size and self.pool.prefix_caching:
            self._name_blocks(sequence, work.start // self.pool.block_size, full)
        if token is not None:
            sequence.tokens.append(token)

    def finish(self, sequence: Sequenced, *, keep: bool = False) -> None:
        """Free the blocks of a sequence that ended or was aborted. Safe to call twice, and while the sequence waits.

        `keep`: hold the blocks for another worker that is going to fetch them; a second call without `keep` frees them.
        """
        if not sequence.is_finished:
            sequence.is_finished = True
            self._receiving.pop(sequence, None)
            if sequence in self._running:
                self._running.remove(sequence)
        if not keep:
            self._is_stuck = False
            self._release(sequence)

    def preempt_all(self) -> None:
        """Preempt every sequence: each gives its blocks up and computes them again; no token is lost."""
        for sequence in reversed(list(self._running)):
            self._preempt(sequence)
        for sequence in self._receiving:  # what arrives was computed with what is no more
            sequence.may_name = False
        self._is_stuck = False

    def _admit(self, planned: dict[Sequenced, Work], budget: int) -> None:
        """Admit prompts from the head of the queue, in order: the prompts that fit whole, until the budget or the
        blocks run out.
        """
        while budget > 0 and len(self._running) + len(self._receiving) < self._max_sequences:
            self._drop_finished()
            if not self._waiting:
                return
            sequence = self._waiting[0][1]
            # The last token is always computed: its logits are what the next one is drawn from.
            reusable = (len(sequence.tokens) - 1) // self.pool.block_size
            self._hash(sequence, reusable)
            shared = self.pool.match(sequence.hashes[:reusable]) if sequence.may_share else []
            held = self.pool.take(shared, self._blocks_for(len(sequence.tokens)) - len(shared))
            if held is None:
                return
            heapq.heappop(self._waiting)
            sequence.blocks, sequence.computed = held, len(shared) * self.pool.block_size
            if sequence.cached < 0:
                sequence.cached = sequence.computed
            if sequence.arrives:
                self._receiving[sequence] = None
                self._reserved.append(sequence)
                continue
            count = min(len(sequence.tokens) - sequence.computed, budget)
            planned[sequence] = Work(sequence, sequence.computed, count)
            budget -= count
            self._run(sequence)

    def _run(self, sequence: Sequenced) -> None:
        self._running.append(sequence)
        self._running.sort(key=lambda s: s.rank)

    def _reserve(self, sequence: Sequenced, length: int) -> bool:
        """Allocate blocks for `length` tokens; return whether there were enough."""
        missing = self._blocks_for(length) - len(sequence.blocks)
        if missing <= 0:
            return True
        more = self.pool.take((), missing)
        if more is None:
            return False
        sequence.blocks.extend(more)
        return True

    def _preempt(self, sequence: Sequenced) -> None:
        self._running.remove(sequence)
        self._release(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        heapq.heappush(self._waiting, (sequence.rank, sequence))  # its arrival puts it before later ones

    def _release(self, sequence: Sequenced) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []

    def _name_blocks(self, sequence: Sequenced, first: int, full: int) -> None:
        if not sequence.may_name:
            return
        size = self.pool.block_size
        self._hash(sequence, full)
        for number in range(first, full):
            parent = sequence.hashes[number - 1] if number else None
            start, end = number * size, (number + 1) * size
            tokens = sequence.tokens[start:end]
            if start < len(sequence.routed):
                shown = sequence.routed[start:end]
                tokens[: len(shown)] = shown
            self.pool.name(sequence.blocks[number], sequence.hashes[number], parent, tokens, sequence.key)

    def _hash(self, sequence: Sequenced, blocks: int) -> None:
        """Compute the hashes of the first `blocks` blocks."""
        known, size = len(sequence.hashes), self.pool.block_size
        if not self.pool.prefix_caching or known >= blocks:
            return
        key = sequence.key
        fresh = block_hashes(
            sequence.tokens[known * size : blocks * size], size, lora_name=key.lora_name, cache_salt=key.cache_salt
        )
        if known * size < len(sequence.routed):
            fresh = self._with_content(sequence, fresh, known)
        chain: Sequence[int] = [sequence.hashes[-1], *fresh] if known else fresh
        sequence.hashes.extend(sequence_hashes(chain)[1 if known else 0 :])

    def _with_content(self, sequence: Sequenced, hashes: Sequence[int], first: int) -> list[int]:
        """Return the hashes of blocks so that those with images name the images' content, too.

        Two images may become the same tokens. Their blocks would hold the same, and are kept apart all the same: whether a
        prompt was computed before is nothing that another image should reveal.
        """
        size, key = self.pool.block_size, sequence.key
        end = (first + len(hashes)) * size
        shown = [*sequence.routed[first * size : end], *sequence.tokens[max(len(sequence.routed), first * size) : end]]
        named = block_hashes(shown, size, lora_name=key.lora_name, cache_salt=key.cache_salt)
        return [own if own == other else own ^ other for own, other in zip(hashes, named, strict=True)]

    def _drop_finished(self) -> None:
        while self._waiting and self._waiting[0][1].is_finished:
            heapq.heappop(self._waiting)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)
