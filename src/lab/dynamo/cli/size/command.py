"""`dynamo size`: read the command line, search or measure, report."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Final

import msgspec

from dynamo import __version__
from dynamo.cli.bench.command import ServerTrouble
from dynamo.cli.console import Console
from dynamo.cli.size.measure import measure
from dynamo.cli.size.options import Measurement, build_parser, read_options
from dynamo.cli.size.profile import profile_text
from dynamo.cli.size.search import MOST_LOAD, Bench, LayoutRow, SizeAnswer, SizePlan, executor_of, search
from dynamo.cli.usage import UsageError

__all__ = ["build_parser", "main"]

EXIT_NOTHING: Final = 1
SETTLED: Final = 2.0  # a trace lasts so many answers, or the load never settles


def main(argv: list[str]) -> int:
    """Search, or measure; the exit status."""
    options = read_options(argv)
    console = Console()
    if isinstance(options.work, Measurement):
        return _measured(options.work, console)
    plan = options.work
    started = time.monotonic()
    try:
        with executor_of(options.jobs) as executor:
            bench = Bench(plan, executor, lambda line: print(f"dynamo size: {line}", file=sys.stderr, flush=True))
            answer = search(plan, bench)
    except BrokenExecutor:
        console.complain(
            "dynamo size: a process of --jobs was lost, perhaps for lack of memory; use fewer --requests or --jobs"
        )
        return EXIT_NOTHING
    _show(plan, answer, console)
    console.say(f"{bench.trials} simulations in {time.monotonic() - started:.1f} s")
    if options.json_file is not None:
        _write(options.json_file, json.dumps(as_json(plan, answer), indent=1) + "\n", console)
    return EXIT_NOTHING if answer.best is None else 0


def _measured(work: Measurement, console: Console) -> int:
    try:
        profile = measure(work, lambda line: print(f"dynamo size: {line}", file=sys.stderr, flush=True))
    except ServerTrouble as trouble:
        console.complain(f"dynamo size: {trouble}")
        return EXIT_NOTHING
    _write(work.out, profile_text(profile), console)
    return 0


def _write(path: Path, text: str, console: Console) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    console.say(f"wrote {path}")


def _show(plan: SizePlan, answer: SizeAnswer, console: Console) -> None:
    profile = plan.profile
    console.say(f"load    {plan.demand.describe()}")
    console.say(f"target  {', '.join(map(str, plan.goals))}")
    console.say(f"engine  {profile.name}: {profile.kv_blocks} blocks of {profile.block_size} tokens, "
        f"{profile.max_batched_tokens} tokens a pass, {profile.max_sequences} sequences")  # fmt: skip
    console.say("")
    console.table(_head(plan), [_cells(plan, row, row.layout == answer.best) for row in _sorted(answer.rows)])
    console.say("")
    for line in recommendation(plan, answer):
        console.say(line, strong=True)
    for line in remarks(plan, answer):
        console.say(line)


def _sorted(rows: Sequence[LayoutRow]) -> list[LayoutRow]:
    return sorted(rows, key=lambda row: (row.layout.replicas, row.layout.is_split, -row.layout.kv_blocks))


def _head(plan: SizePlan) -> tuple[str, ...]:
    bounds = (f"{goal.latency.upper()} {goal.statistic} ms" for goal in plan.goals)
    return ("", "replicas", "layout", "KV blocks", "router", *bounds, "tokens/s", "hits", "meets", "holds to", "margin")


def _cells(plan: SizePlan, row: LayoutRow, is_best: bool) -> tuple[str, ...]:
    found, layout = row.found, row.layout
    return (
        "*" if is_best else "",
        str(layout.replicas),
        str(layout),
        str(layout.kv_blocks),
        layout.mode,
        *(f"{found.latencies[goal.latency][goal.statistic]:.1f}" for goal in plan.goals),
        f"{found.tokens_per_second:,.0f}",
        f"{found.hit_rate:.2f}",
        "yes" if row.meets else "no",
        _share(row.holds_to),
        f"{row.margin:+.0%}",
    )


def _share(holds_to: float) -> str:
    if holds_to >= MOST_LOAD:
        return f">{MOST_LOAD:.0%}"
    return f"{holds_to:.0%}" if holds_to else "<10%"


def recommendation(plan: SizePlan, answer: SizeAnswer) -> Iterator[str]:
    """Yield what to run: the number of replicas, whether to split them, and the cache."""
    if answer.best is None:
        yield f"Nothing up to {plan.max_replicas} replicas meets the target."
        return
    best = next(row for row in answer.rows if row.layout == answer.best)
    count = f"{best.layout.replicas} replica{'s' if best.layout.replicas != 1 else ''}"
    if best.layout.is_split:
        yield f"{count}: {best.layout.prefill} prefill and {best.layout.decode} decode workers."
    else:
        yield f"{count}, all alike: no split into prefill and decode workers."
    yield f"The target holds up to {_share(best.holds_to)} of the load; {best.margin:.0%} of the tightest bound is left."
    smallest = answer.smallest_cache
    if smallest is not None and not best.layout.is_split:
        size = plan.profile.block_size
        yield f"Cache: {smallest} blocks of {size} tokens each are enough ({smallest * size:,} tokens)."
    else:
        yield f"Cache: {best.layout.kv_blocks} blocks each, as the profile has; a smaller one was not tried for a split."
    for row in answer.rows:
        if row.meets and row.layout.replicas < best.layout.replicas:
            yield f"With {row.layout.kv_blocks} blocks each {row.layout} would be enough."


def remarks(plan: SizePlan, answer: SizeAnswer) -> Iterator[str]:
    """Yield what limits the figures."""
    if answer.no_split:
        yield f"No split: {answer.no_split}."
    if any(row.found.is_beyond for row in answer.rows):
        yield "Some layouts needed times far outside of the measured curves; those figures are guesses."
    best = next((row.found for row in answer.rows if row.layout == answer.best), answer.rows[0].found)
    if best.trace_seconds < SETTLED * best.answer_seconds:
        yield (
            f"The trace lasts {best.trace_seconds:.1f} s, an answer {best.answer_seconds:.1f} s: the load does not settle; "
            "simulate more requests (--requests)."
        )
    most = max(row.found.unserved for row in answer.rows)
    if most:
        yield f"Up to {most} requests were not served: they are larger than a replica's cache or context."


def as_json(plan: SizePlan, answer: SizeAnswer) -> dict[str, object]:
    """Return everything as it goes into the JSON file."""
    return {
        "version": __version__,
        "load": plan.demand.describe(),
        "requests": answer.rows[0].found.requests,
        "goals": [msgspec.to_builtins(goal) for goal in plan.goals],
        "profile": msgspec.to_builtins(plan.profile),
        "recommendation": None
        if answer.best is None
        else {**msgspec.to_builtins(answer.best), "replicas": answer.best.replicas},
        "smallest_kv_blocks": answer.smallest_cache,
        "no_split": answer.no_split or None,
        "rows": [
            {**msgspec.to_builtins(row), "replicas": row.layout.replicas, "is_best": row.layout == answer.best}
            for row in _sorted(answer.rows)
        ],
        "remarks": list(remarks(plan, answer)),
    }
