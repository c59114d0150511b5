"""Runs the replays of one command line, in this process or in several."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import msgspec

from dynamo.cli.bench.replay.options import ReplayOptions, TraceFile, read_options
from dynamo.cli.usage import UsageError
from dynamo.replay.figures import ReplayFigures
from dynamo.replay.modes import frontend_of
from dynamo.replay.mooncake import BadTraceLine, read_mooncake
from dynamo.replay.presets import Preset
from dynamo.replay.run import pooled_hit_rate, run_replay
from dynamo.replay.trace import StretchTree, Trace


class Replayed(NamedTuple):
    """One preset with one seed."""

    preset: int  # its place in the options
    seed: int
    figures: tuple[ReplayFigures, ...]  # of its variants


def trace_of(options: ReplayOptions, preset: Preset, seed: int) -> Trace:
    """Draw or read the trace. Raises UsageError."""
    if options.file is None:
        return preset.make_trace(seed, options.requests)
    return _read(options.file, options.requests)


def _read(file: TraceFile, limit: int | None) -> Trace:
    try:
        with file.path.open("rb") as lines:
            return read_mooncake(lines, file.path.name, block_tokens=file.block_tokens, limit=limit)
    except OSError as error:
        raise UsageError(f"cannot read {file.path}: {error.strerror}") from None
    except BadTraceLine as error:
        raise UsageError(f"{file.path}: {error}") from None


def replay_all(options: ReplayOptions, argv: list[str]) -> Iterator[Replayed]:
    """Yield what came of each preset and seed, in the order in which they are done.

    `argv` is what the options were read from: another process reads it again.
    """
    units = [(preset, seed) for preset in range(len(options.presets)) for seed in options.seeds]
    processes = min(options.jobs, len(units))
    if processes == 1:
        for preset, seed in units:
            yield _replay(options, preset, seed)
        return
    # Fresh processes: a forked one would share the locks of threads that it does not have.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(_replay_again, argv, preset, seed) for preset, seed in units]:
            yield done.result()


def _replay_again(argv: list[str], preset: int, seed: int) -> Replayed:
    return _replay(read_options(argv), preset, seed)


def _replay(options: ReplayOptions, number: int, seed: int) -> Replayed:
    preset = options.presets[number]
    trace = trace_of(options, preset, seed)
    tree = StretchTree(preset.options.block_size)
    setup = msgspec.structs.replace(preset.setup, seed=seed)
    pooled = pooled_hit_rate(trace, setup.workers * preset.options.num_gpu_blocks, tree)
    figures = tuple(
        run_replay(
            trace,
            msgspec.structs.replace(setup, **variant.setup),
            preset.options,
            frontend_of(variant.mode, preset.options),
            mode=variant.label,
            tree=tree,
            pooled=pooled,
            clock=time.thread_time if options.measures_cpu else None,
        )
        for variant in preset.variants
    )
    return Replayed(number, seed, figures)
