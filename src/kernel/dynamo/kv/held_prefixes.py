"""The prefixes that caches hold, the largest first: what a viewer of an index sees of it. Read from time to time, and never by a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from heapq import nlargest
from itertools import islice
from typing import Final

import msgspec

from dynamo.kv.holders import BlockHolders, HeldRun, RankBits
from dynamo.kv.overlap import WorkerRank

EXAMINED_RUNS: Final = 8000  # some five milliseconds; of a larger index a part is examined
MAX_STEPS: Final = 512  # from a block back to the beginning of its prompt, in runs


class HeldPrefix(msgspec.Struct, frozen=True):
    """A stretch of blocks that the same ranks hold."""

    block: int  # sequence hash of its last block
    blocks: int  # its length
    depth: int  # blocks from the beginning of a prompt to its end
    parent: int | None  # sequence hash of the block before it; None: it begins a prompt, or what is before it is gone
    ranks: tuple[WorkerRank, ...]  # that hold it
    hits: int  # of the prompts that were queried, those that begin with some of it


class HeldPrefixes(msgspec.Struct, frozen=True):
    """Some of the prefixes of an index."""

    shown: list[HeldPrefix]
    total: int  # prefixes that there are


def held_prefixes(holders: BlockHolders, bits: RankBits, hits: Mapping[int, int], most: int) -> HeldPrefixes:
    """Return at most `most` prefixes: those that take the most blocks of caches, and those that were hit.

    `hits`: how many prompts had their last cached block at this sequence hash.
    """
    counted, hit_runs = Counter[int](), dict[int, HeldRun]()
    for block, number in hits.items():
        for run, _ in _path(holders, block):
            counted[run.block] += number
            hit_runs[run.block] = run
    largest = nlargest(most, islice(holders.runs(), EXAMINED_RUNS), key=_weight)
    found = {run.block: run for run in largest} | hit_runs
    chosen = nlargest(most, found.values(), key=lambda run: (counted[run.block], *_weight(run)))
    shown = [
        HeldPrefix(
            block=run.block,
            blocks=run.blocks,
            depth=sum(length for _, length in _path(holders, run.block)),
            parent=run.parent,
            ranks=bits.of(run.mask),
            hits=counted[run.block],
        )
        for run in chosen
    ]
    return HeldPrefixes(shown, holders.run_count)


def _weight(run: HeldRun) -> tuple[int, int]:
    """Return the blocks of caches that a run takes; of equal ones the hash decides, so that a list does not jump."""
    return run.blocks * run.mask.bit_count(), run.block


def _path(holders: BlockHolders, block: int) -> Iterator[tuple[HeldRun, int]]:
    """Yield the runs from that of a block back to the beginning of its prompt, each with how many of its blocks are before."""
    at: int | None = block
    for _ in range(MAX_STEPS):
        found = None if at is None else holders.run_of(at)
        if found is None:
            return
        yield found
        at = found[0].parent
