"""What the index of KV blocks costs: `python benchmarks/index.py`. One core, minimum of repeats.

Prints blocks per second stored and removed in events of 16 and of 128, the time of a 1,000-block lookup over 64 ranks,
hash and lookup together for three prompt lengths, and the memory of a block; with `--churn` also the memory before and
after 10^7 blocks came and went.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec

from dynamo.kv.events import (
    BlocksAdded,
    BlocksDropped,
    BlockUpdate,
    HeldBlock,
    KvChange,
    RouterEvent,
    read_events,
)
from dynamo.kv.hashing import block_hashes, sequence_hashes
from dynamo.kv.index import PrefixIndex
from dynamo.kv.overlap import WorkerRank

REPEATS = 7
BLOCK_SIZE = 16
RNG = random.Random(1)
Hashes = list[int]


def clock(repeats: int, work: Callable[..., object], *arguments: object) -> float:
    """Return the shortest CPU time of `work` in seconds."""
    best = float("inf")
    for _ in range(repeats):
        begun = time.process_time()
        work(*arguments)
        best = min(best, time.process_time() - begun)
    return best


def resident_bytes() -> int:
    """Return the memory of this process."""
    gc.collect()
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


def stores(rank: WorkerRank, chain: Hashes, tokens: Hashes, names: Hashes, size: int) -> list[RouterEvent]:
    """Return events of `size` blocks that store one sequence."""
    events = []
    for at in range(0, len(chain), size):
        blocks = [
            HeldBlock(name, token) for name, token in zip(names[at : at + size], tokens[at : at + size], strict=True)
        ]
        update = BlockUpdate(stored=BlocksAdded(blocks, names[at - 1] if at else None))
        events.append(RouterEvent(rank.worker_id, KvChange(at, update, rank.dp_rank)))
    return events


def removals(rank: WorkerRank, names: Hashes, size: int) -> list[RouterEvent]:
    """Return events that remove what `stores` stored, last blocks first."""
    back = names[::-1]
    return [
        RouterEvent(
            rank.worker_id, KvChange(at, BlockUpdate(removed=BlocksDropped(back[at : at + size])), rank.dp_rank)
        )
        for at in range(0, len(back), size)
    ]


def random_hashes(count: int) -> Hashes:
    return [RNG.getrandbits(64) for _ in range(count)]


def apply_all(index: PrefixIndex, events: Sequence[RouterEvent]) -> None:
    for event in events:
        status = index.apply(event)
        assert status == "ok", status


def rates(size: int, *, is_renamed: bool, part: int) -> tuple[float, float, float]:
    """Return blocks per second stored and removed in an index that holds a million others, and decoded from the wire."""
    index = PrefixIndex()
    apply_all(index, list(fill(range(1000, 1064), 15_000 // part)))
    ranks = [WorkerRank(worker) for worker in range(64)]
    made = []
    for rank in ranks:
        tokens = random_hashes(512)
        chain = sequence_hashes(tokens)
        made.append((rank, chain, tokens, random_hashes(512) if is_renamed else chain))
    count = 512 * len(ranks)
    store = remove = decode = 0.0
    for rank, chain, tokens, names in made:  # the shortest time of each part, so that a busy machine disturbs less
        storing, removing = stores(rank, chain, tokens, names, size), removals(rank, names, size)
        payload = msgspec.msgpack.encode(storing)
        decode += clock(REPEATS, read_events, payload)
        times = [
            (clock(1, apply_all, index, storing), clock(1, apply_all, index, removing))
            for _ in range(max(1, 2 * REPEATS // part))
        ]
        store += min(time for time, _ in times)
        remove += min(time for _, time in times)
    return count / store, count / remove, count / decode


def fill(workers: Sequence[int], blocks: int) -> Iterator[RouterEvent]:
    """Yield events that give each worker blocks of its own."""
    for worker in workers:
        for _ in range(blocks // 500):
            tokens = random_hashes(500)
            chain = sequence_hashes(tokens)
            yield from stores(WorkerRank(worker), chain, tokens, chain, 100)


def lookups(part: int) -> None:
    """Print the times of lookups: all ranks to the end, each rank to another depth, a miss, a big index around."""
    tokens = random_hashes(1000)
    chain = sequence_hashes(tokens)
    for title, depths in (
        ("64 ranks hold all of it", [1000] * 64),
        ("each of 64 ranks another depth", [15 * (number + 1) for number in range(64)]),
        ("64 ranks hold 10 blocks", [10] * 64),
        ("none", []),
    ):
        index = PrefixIndex()
        apply_all(index, list(fill(range(1000, 1064), 15_000 // part)))
        for worker, depth in enumerate(depths):
            rank = WorkerRank(worker)
            apply_all(index, stores(rank, chain[:depth], tokens[:depth], chain[:depth], 16))
        print(f"  lookup of 1,000 blocks, {title}: {clock(300 // part, index.find, chain) * 1e6:.1f} us")


def decide(index: PrefixIndex, prompt: Sequence[int]) -> object:
    """Find a prompt of tokens."""
    return index.find(sequence_hashes(block_hashes(prompt, BLOCK_SIZE)))


def decisions(part: int) -> None:
    """Print the time of hashing and lookup of prompts that 64 ranks hold half of."""
    for length, repeats in ((64, 3000 // part), (4096, 300 // part), (32_768, 100 // part)):
        prompt = [RNG.randrange(150_000) for _ in range(length)]
        tokens = block_hashes(prompt, BLOCK_SIZE)
        chain = sequence_hashes(tokens)
        index = PrefixIndex()
        half = len(chain) // 2
        for worker in range(64):
            apply_all(index, stores(WorkerRank(worker), chain[:half], tokens[:half], chain[:half], 16))

        block = clock(repeats, block_hashes, prompt, BLOCK_SIZE)
        linked = clock(repeats, sequence_hashes, tokens)
        found = clock(repeats, index.find, chain)
        together = clock(repeats, decide, index, prompt)
        print(
            f"  {length} tokens: {together * 1e6:.0f} us"
            f" (blocks {block * 1e6:.0f}, chain {linked * 1e6:.0f}, lookup {found * 1e6:.0f})"
        )


def memory_of(ranks: int, blocks: int, is_shared: bool) -> tuple[int, int]:
    """Return the bytes of an index and how many blocks it holds; with `is_shared` all ranks hold the same ones."""
    before = resident_bytes()
    index = PrefixIndex()
    for event in fill([0] if is_shared else range(ranks), blocks):
        # Through the wire's form, so that the index owns every number it keeps.
        wire = msgspec.msgpack.encode(event)
        for worker in range(ranks) if is_shared else [event.worker_id]:
            index.apply(msgspec.structs.replace(read_events(wire)[0], worker_id=worker))
    return resident_bytes() - before, index.blocks()


def memory(part: int) -> None:
    """Print the memory of a block, held by one rank or by several."""
    for title, case in (
        (f"{1000 // part:,} workers, 1,000 blocks each", (1000 // part, 1000, False)),
        (f"64 workers, {16_000 // part:,} blocks each", (64, 16_000 // part, False)),
        (f"20 workers, the same {50_000 // part:,} blocks", (20, 50_000 // part, True)),
    ):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            used, held = fresh.submit(memory_of, *case).result()
        print(f"  {title}: {used / 2**20:.0f} MiB, {used / held:.0f} bytes per block and worker")


def churn(total: int) -> None:
    """Print the memory while blocks come and go at 8 workers that hold 20,000 each."""
    index = PrefixIndex()
    held: list[list[tuple[WorkerRank, Hashes]]] = [[] for _ in range(8)]
    done, step = 0, total // 10
    while done < total:
        for worker, sequences in enumerate(held):
            rank = WorkerRank(worker)
            tokens = random_hashes(200)
            chain = sequence_hashes(tokens)
            apply_all(index, stores(rank, chain, tokens, chain, 40))
            sequences.append((rank, chain))
            if len(sequences) > 100:
                apply_all(index, removals(*sequences.pop(RNG.randrange(50)), 40))
            done += 200
        if done % step < 1600:
            print(f"  {done:>10,} blocks: {index.blocks():,} held, {resident_bytes() / 2**20:.0f} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--churn", type=int, nargs="?", const=10_000_000, help="blocks that come and go")
    parser.add_argument("--quick", action="store_true", help="a twentieth of everything: the figures mean little")
    options = parser.parse_args()
    part = 20 if options.quick else 1
    for is_renamed in (False, True):
        print("an engine that names blocks", "in its own way" if is_renamed else "by their sequence hash")
        for size in (1, 16, 128):
            store, remove, decode = rates(size, is_renamed=is_renamed, part=part)
            print(
                f"  events of {size}: {store / 1e6:.2f} M blocks/s stored, {remove / 1e6:.2f} M removed"
                f" (decoding before that: {decode / 1e6:.2f} M)"
            )
    print("lookups in an index of a million blocks")
    lookups(part)
    print("hash and lookup, 64 ranks hold half of the prompt")
    decisions(part)
    print("memory")
    memory(part)
    if options.churn:
        print("churn")
        churn(options.churn)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
