"""The table of routing policies: traces, fleets of 4, 8 and 16 workers, two loads; hits, times to first token.

    python benchmarks/routing_table.py
    python benchmarks/routing_table.py --capacity
    python benchmarks/routing_table.py --trace conversation_trace.jsonl --trace synthetic_trace.jsonl

Everything runs in virtual time, so the same command gives the same figures on any machine. Without `--trace` the traces are drawn
after the statistics of the published ones, and named so: `drawn conversation`, `drawn synthetic`. With it they are
read in Mooncake's format. A line that repeats a session and has a `delay` comes so long after the answer before it.

A load is a multiple of the trace's own speed for every 4 workers: 16 workers get the trace four times as fast.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Final, NamedTuple

from dynamo.errors import InvalidArgument
from dynamo.replay.capacity import LoadTarget, highest_load, share_in_time
from dynamo.replay.figures import ReplayFigures
from dynamo.replay.modes import frontend_of
from dynamo.replay.mooncake import read_mooncake
from dynamo.replay.published import BLOCK, conversation, grid, synthetic
from dynamo.replay.run import pooled_hit_rate, run_replay
from dynamo.replay.setup import ReplaySetup
from dynamo.replay.trace import StretchTree, Trace
from dynamo.scheduling import SchedulerOptions

POLICIES: Final = Path(__file__).parents[1] / "examples" / "policies"
OURS, NATIVE = "time", "native default"
MODES: Final[Mapping[str, str]] = {
    "round robin": "round-robin",
    "two choices": "power-of-two",
    NATIVE: "kv:default",
    OURS: "kv:time",
    "LMetric": f"kv:{POLICIES / 'lmetric.py'}:LMetric",
    "LPWL": f"kv:{POLICIES / 'lpwl.py'}:LeastPrefillWork",
}
BASE_WORKERS: Final = 4  # get a trace at its own speed
TIE: Final = 1.01  # a mean time to first token that is longer by less is as good
TARGET: Final = LoadTarget(ttft_ms=2000.0, token_ms=50.0, share=0.95)
CAPACITY_WORKERS: Final = 8
CAPACITY_LOADS: Final = (0.5, 8.0)  # where the highest load is looked for
CAPACITY_STEPS: Final = 5
CAPACITY_REQUESTS: Final = 1500  # of each replay, as there are many

DRAWN: Final[Mapping[str, Callable[[int, int | None], Trace]]] = {
    "drawn conversation": conversation,
    "drawn synthetic": synthetic,
    "grid": grid,
}
USUAL_LOADS: Final = (1.0, 2.0)
WORKER: Final = SchedulerOptions(num_gpu_blocks=16384, block_size=64)  # as the mock engine by default
SMALL: Final = SchedulerOptions(num_gpu_blocks=2048, block_size=64)  # of a grid: 62 of its 128 prefixes


class Given(NamedTuple):
    """What the command line asks for."""

    traces: tuple[str, ...]  # names of drawn ones, or paths
    workers: tuple[int, ...]
    loads: tuple[float, ...] | None
    requests: int | None
    seed: int
    block_tokens: int


class Case(NamedTuple):
    """One replay."""

    trace: str
    workers: int
    load: float
    policy: str


class Row(NamedTuple):
    """What came of a replay."""

    hits: float
    of_pooled: float
    mean_ttft: float
    p99_ttft: float
    mean_e2e: float
    p99_itl: float


@cache
def trace_of(name: str, given: Given) -> Trace:
    """Draw a trace, or read it."""
    if name in DRAWN:
        return DRAWN[name](given.seed, given.requests)
    with Path(name).open("rb") as lines:
        return read_mooncake(lines, name, block_tokens=given.block_tokens, limit=given.requests)


@cache
def _tree(name: str, given: Given) -> StretchTree:
    return StretchTree(_options(name).block_size)


@cache
def _pooled(name: str, workers: int, given: Given) -> float:
    return pooled_hit_rate(trace_of(name, given), workers * _options(name).num_gpu_blocks, _tree(name, given))


def _options(name: str) -> SchedulerOptions:
    return SMALL if name == "grid" else WORKER


def replayed(case: Case, given: Given) -> ReplayFigures:
    """Replay one case."""
    options = _options(case.trace)
    speed = case.load * case.workers / BASE_WORKERS
    setup = ReplaySetup(case.workers, block_size=options.block_size, seed=given.seed, arrival_speedup_ratio=speed)
    return run_replay(
        trace_of(case.trace, given),
        setup,
        options,
        frontend_of(MODES[case.policy], options),
        mode=case.policy,
        tree=_tree(case.trace, given),
        pooled=_pooled(case.trace, case.workers, given),
    )


def row_of(case: Case, given: Given) -> Row:
    """Replay one case, and return its figures."""
    figures = replayed(case, given)
    ttft = figures.latencies["ttft"]
    mean_e2e, p99_itl = figures.latencies["e2e_latency"].mean, figures.latencies["itl"].p99
    return Row(figures.hit_rate, figures.hit_share, ttft.mean, ttft.p99, mean_e2e, p99_itl)


def capacity_of(case: Case, given: Given) -> float:
    """Return the highest load at which the target holds; 0 where it holds at none."""
    given = given._replace(requests=min(CAPACITY_REQUESTS, given.requests or CAPACITY_REQUESTS))
    return highest_load(
        lambda load: share_in_time(replayed(case._replace(load=load), given), TARGET) >= TARGET.share,
        *CAPACITY_LOADS,
        steps=CAPACITY_STEPS,
    )


def cases_of(given: Given) -> Iterator[Case]:
    """Yield every case of the table, the policies of a cell side by side."""
    for trace in given.traces:
        for workers in given.workers:
            for load in given.loads or USUAL_LOADS:
                for policy in MODES:
                    yield Case(trace, workers, load, policy)


# The verdict.


class Cell(NamedTuple):
    """The policies over one trace, fleet and load."""

    trace: str
    workers: int
    load: float
    rows: Mapping[str, Row]

    @property
    def is_first(self) -> bool:
        """Whether no policy has a mean time to first token that is shorter than ours by more than a tie."""
        return self.rows[OURS].mean_ttft <= TIE * min(row.mean_ttft for row in self.rows.values())


def cells_of(rows: Mapping[Case, Row]) -> list[Cell]:
    """Return the cells, in the order of the cases."""
    cells: dict[tuple[str, int, float], dict[str, Row]] = {}
    for case, row in rows.items():
        cells.setdefault(case[:3], {})[case.policy] = row
    return [Cell(*place, found) for place, found in cells.items()]


def verdict(cells: Sequence[Cell]) -> Iterator[tuple[str, bool]]:
    """Yield each bar with what was found, and whether it holds."""
    first = sum(cell.is_first for cell in cells)
    yield (
        f"{OURS} first or tied in mean TTFT: {first} of {len(cells)} cells (bar: 10 of 12)",
        12 * first >= 10 * len(cells),
    )
    worst = max(cell.rows[OURS].p99_ttft / cell.rows[NATIVE].p99_ttft for cell in cells)
    yield f"p99 TTFT of {OURS} by that of {NATIVE}: {worst:.2f} at worst (bar: 1)", worst <= 1.0
    least = min(cell.rows[OURS].of_pooled for cell in cells)
    yield f"hits of {OURS} by those of the pooled cache: {least:.3f} at worst (bar: 0.95)", least >= 0.95


def table_of(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield the table as Markdown; mean times to first token that no other is shorter than are in bold type."""
    yield "| Trace | Workers | Load | Policy | Hits | of pooled | Mean TTFT, ms | p99 TTFT | Mean e2e | p99 ITL |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for cell in cells:
        best = min(row.mean_ttft for row in cell.rows.values())
        place = f"{cell.trace} | {cell.workers} | {cell.load:g}"
        for policy, row in cell.rows.items():
            mark = "**" if row.mean_ttft <= TIE * best else ""
            yield (
                f"| {place} | {policy} | {row.hits:.3f} | {row.of_pooled:.3f} | {mark}{row.mean_ttft:,.0f}{mark} | "
                f"{row.p99_ttft:,.0f} | {row.mean_e2e:,.0f} | {row.p99_itl:,.0f} |"
            )
            place = " | | "


def capacities_of(capacities: Mapping[tuple[str, str], float]) -> Iterator[str]:
    """Yield the highest loads as Markdown."""
    traces = list(dict.fromkeys(trace for trace, _ in capacities))
    yield f"| Highest load, {CAPACITY_WORKERS} workers | {' | '.join(traces)} |"
    yield f"|---|{'---|' * len(traces)}"
    for policy in MODES:
        yield f"| {policy} | {' | '.join(f'{capacities[trace, policy]:.2f}' for trace in traces)} |"


def main() -> int:
    """Replay the table and print it. Return 1 where a bar is missed, 2 for an error of use."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="append", help="a trace in Mooncake's format, in place of the drawn ones")
    parser.add_argument(
        "--grid", action="store_true", help="the grid of 128 groups that share a prefix, beside the traces"
    )
    parser.add_argument("--trace-block-tokens", type=int, default=BLOCK, help="tokens that a hash id stands for")
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--loads", type=float, nargs="+", help="multiples of the trace's speed for 4 workers")
    parser.add_argument("--requests", type=int, help="only the first so many of each trace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes that share the replays")
    parser.add_argument(
        "--capacity", action="store_true", help=f"in place of the table, the highest load of {CAPACITY_WORKERS} workers"
    )
    parser.add_argument("--out", type=Path, help="folder for the table as Markdown and JSON")
    asked = parser.parse_args()
    traces = tuple(asked.trace or [name for name in DRAWN if name != "grid"]) + (("grid",) if asked.grid else ())
    loads = None if asked.loads is None else tuple(asked.loads)
    given = Given(traces, tuple(asked.workers), loads, asked.requests, asked.seed, asked.trace_block_tokens)
    if min((*given.workers, asked.jobs, given.requests or 1, given.block_tokens)) < 1 or min(loads or (1,)) <= 0:
        parser.error("workers, loads, requests, jobs and block tokens must be above 0")
    for name in traces:
        try:
            trace_of(name, given)
        except (OSError, InvalidArgument) as error:
            parser.error(f"{name}: {getattr(error, 'strerror', None) or error}")
    return _run(given, asked.jobs, asked.capacity, asked.out)


def _run(given: Given, jobs: int, is_capacity: bool, out: Path | None) -> int:
    bars: list[tuple[str, bool]] = []
    found: list[dict[str, object]] = []
    # Fresh processes: a forked one would share the locks of threads that it does not have.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        if is_capacity:
            asked = [Case(trace, CAPACITY_WORKERS, 1.0, policy) for trace in given.traces for policy in MODES]
            loads = list(pool.map(capacity_of, asked, [given] * len(asked)))
            lines = list(
                capacities_of({(each.trace, each.policy): load for each, load in zip(asked, loads, strict=True)})
            )
            lines += ["", f"Target: {TARGET}"]
            found = [{**each._asdict(), "load": load} for each, load in zip(asked, loads, strict=True)]
        else:
            cases = list(cases_of(given))
            rows = dict(zip(cases, pool.map(row_of, cases, [given] * len(cases)), strict=True))
            cells = cells_of(rows)
            lines, bars = (
                list(table_of(cells)),
                list(verdict([cell for cell in cells if cell.trace != "grid"] or cells)),
            )
            found = [{**case._asdict(), **row._asdict()} for case, row in rows.items()]
    print("\n".join(lines))
    for text, holds in bars:
        print(f"{'pass' if holds else 'MISS'}  {text}")
    if out is not None:
        name = "routing-capacity" if is_capacity else "routing-table"
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (out / f"{name}.json").write_text(json.dumps({"rows": found, "bars": bars}, indent=1) + "\n", encoding="utf-8")
    return 0 if all(holds for _, holds in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
