"""`make bench`: start each stack afresh, load it, and print what it cost beside the bars.

CPU is user + system time of a process over the load window; wall time on a shared machine is noise. The median of the
repeats is judged. The floor is what a bare uvicorn app costs on the same machine in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cases import Bench, Case, Figures, cases
from model import make_model
from stack import cluster_services

from dynamo.cli.bench.results import BUSY_SHARE

PACKAGES = ("dynamo-unified", "uvicorn", "uvloop", "httptools", "starlette", "msgspec", "tokenizers", "jinja2")


def machine() -> dict[str, Any]:
    """What a reader needs to compare two files."""
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "unknown"
    )
    memory = next((int(line.split()[1]) // 1024 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "platform": platform.platform(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_mb": memory,
        "load_average_before": os.getloadavg(),
    }


def versions() -> dict[str, str | None]:
    """Of everything that takes part."""
    found: dict[str, str | None] = {"python": platform.python_version(), "commit": _commit()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _commit() -> str | None:
    """With a plus when the tree has changes."""
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"], cwd=Path(__file__).parent, capture_output=True, text=True
        )
    except OSError:
        return None
    return said.stdout.strip() or None


def rows(case: Case, repeats: list[Figures]) -> list[dict[str, Any]]:
    """One per bar: the median, the spread, the verdict."""
    found = []
    for bar in case.bars:
        values = [figures[bar.figure] for figures in repeats]
        middle = statistics.median(values)
        verdict = None if bar.limit is None else "pass" if middle <= bar.limit else "MISS"
        found.append(
            {
                "case": case.name,
                "figure": bar.figure,
                "unit": bar.unit,
                "median": middle,
                "lowest": min(values),
                "highest": max(values),
                "bar": bar.limit,
                "verdict": verdict,
                "beside": {name: statistics.median(figures[name] for figures in repeats) for name in bar.beside},
            }
        )
    return found


def shown(row: dict[str, Any], *, is_first: bool) -> str:
    """One line of the table."""
    name = row["case"] if is_first else ""
    bar = "" if row["bar"] is None else f"<= {row['bar']:g}"
    spread = f"{row['lowest']:.2f} .. {row['highest']:.2f}"
    beside = "".join(f"; {figure}: {value:.1f}" for figure, value in row["beside"].items())
    return f"{name:46} {row['figure']:24} {row['median']:9.2f} {row['unit']:10} {bar:>8} {row['verdict'] or '-':6} {spread}{beside}"


def remarks(case: Case, repeats: list[Figures]) -> list[str]:
    """What would make a figure worthless."""
    found = []
    if failed := sum(figures.get("failed", 0) for figures in repeats):
        found.append(f"  {failed:.0f} requests failed: the figures of {case.name!r} mean nothing")
    share = max(figures.get("load generator share", 0.0) for figures in repeats)
    if share > BUSY_SHARE:
        found.append(
            f"  the load generator was busy ({100 * share:.0f} % of a core): throughput is its own, CPU is not"
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="fresh starts per case; the median counts (default: 5)")
    parser.add_argument("--quick", action="store_true", help="one fresh start per case")
    parser.add_argument("--only", default="", metavar="TEXT", help="run the cases whose name contains it")
    parser.add_argument("--cluster", action="store_true", help="with etcd for discovery and NATS for events")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a bar is missed")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="where model and results.json go")
    arguments = parser.parse_args()
    chosen = [case for case in cases() if arguments.only in case.name]
    if not chosen or arguments.repeats < 1:
        parser.error("nothing to run: " + ", ".join(repr(case.name) for case in cases()))
    count = 1 if arguments.quick else arguments.repeats
    bench = Bench(make_model(arguments.out / "model"), arguments.quick)
    with contextlib.ExitStack() as services:
        if arguments.cluster:
            services.enter_context(cluster_services(Path(services.enter_context(tempfile.TemporaryDirectory()))))
        return run(arguments, chosen, bench, count)


def run(arguments: argparse.Namespace, chosen: list[Case], bench: Bench, count: int) -> int:
    """Measure the chosen cases and print their rows; the exit code."""
    results: dict[str, Any] = {
        "machine": machine(), "versions": versions(), "repeats": count, "cluster": arguments.cluster, "rows": [], "runs": {}, "broken": {},
    }  # fmt: skip
    print(f"{results['machine']['cpu']}, {results['machine']['cores']} cores; {count} fresh starts per case")
    print(f"{'case':46} {'figure':24} {'median':>9} {'unit':10} {'bar':>8} {'':6} spread")
    begun = time.monotonic()
    for case in chosen:
        try:
            repeats = [case.run(bench) for _ in range(count)]
        except RuntimeError as error:  # one case shall not take the others' figures with it
            results["broken"][case.name] = str(error)
            print(f"{case.name:46} could not be measured: {error}", flush=True)
            continue
        judged = rows(case, repeats)
        results["runs"][case.name] = repeats
        results["rows"] += judged
        for number, row in enumerate(judged):
            print(shown(row, is_first=number == 0), flush=True)
        for remark in remarks(case, repeats):
            print(remark, flush=True)
    results["seconds"] = round(time.monotonic() - begun, 1)
    verdicts = [row["verdict"] for row in results["rows"] if row["verdict"]]
    print(f"{verdicts.count('pass')} of {len(verdicts)} bars met in {results['seconds']:.0f} s", end="")
    (arguments.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"; every repeat is in {arguments.out / 'results.json'}")
    return 1 if results["broken"] or (arguments.strict and "MISS" in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
