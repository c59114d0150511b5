"""What batches cost: checking 50,000 lines, executing them, the memory meanwhile, and the wait of interactive requests.

    python benchmarks/batches.py [--lines N] [--tokens N]
    python benchmarks/batches.py --turns 20 --delay 0.001    # the wait alone, in turns: for a machine that does other work

A frontend with `--files-dir` and a worker of the sample engine, as processes of their own. Interactive requests come one at a
time, first alone and then beside the batch. It prints seconds, lines per second, megabytes and milliseconds, with the bars.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import openai

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.processes import Cluster, Frontend

MODEL: Final = "batched"
VALIDATION_BAR: Final = 5.0  # seconds
MEMORY_BAR: Final = 40.0  # MB more than before
WAIT_BAR: Final = 1.10  # of the wait without a batch
ASKED: Final = 300
ASKED_IN_A_TURN: Final = 120


def main() -> int:
    """Measure and print; tell by the status whether the bars were met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=50_000, metavar="N", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=4, metavar="N", help="of each answer (default: %(default)s)")
    parser.add_argument(
        "--delay", type=float, default=0.02, metavar="S", help="before each token (default: %(default)s)"
    )
    parser.add_argument(
        "--turns", type=int, default=0, metavar="N", help="measure waits without and with a batch in turns"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, Cluster(Path(place)) as cluster:
        worker = cluster.sample("worker", MODEL, "--delay", str(given.delay))
        frontend = cluster.frontend("frontend", f"--files-dir={place}/files")
        cluster.wait_ready(frontend, worker)
        with openai.OpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0, timeout=600) as api:
            if given.turns:
                return _take_turns(api, given.turns, _input(given.lines, given.tokens))
            return _measure(api, frontend, given.lines, given.tokens)


def _measure(api: openai.OpenAI, frontend: Frontend, lines: int, tokens: int) -> int:
    alone = _waits(api)
    file = api.files.create(file=("in.jsonl", _input(lines, tokens)), purpose="batch")
    memory = [frontend.resident_bytes()]
    began = time.monotonic()
    batch = api.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    while batch.status == "validating":
        time.sleep(0.02)
        batch = api.batches.retrieve(batch.id)
    checked = time.monotonic() - began
    beside = _waits(api)
    while batch.status in ("in_progress", "finalizing"):
        time.sleep(0.2)
        memory.append(frontend.resident_bytes())
        batch = api.batches.retrieve(batch.id)
    took = time.monotonic() - began
    counts = batch.request_counts
    assert counts is not None
    grown = (max(memory) - memory[0]) / 2**20
    ratio = beside[-1] / alone[-1]
    print(f"{batch.status}: {counts.completed} of {counts.total} lines")
    print(f"checking the input     {checked:8.2f} s       bar {VALIDATION_BAR}")
    print(f"executing it           {lines / took:8.0f} lines/s")
    print(f"memory of the frontend {grown:+8.1f} MB      bar +{MEMORY_BAR}")
    print(f"interactive, alone     p50 {alone[0]:6.1f}  p99 {alone[1]:6.1f} ms")
    print(f"interactive, beside it p50 {beside[0]:6.1f}  p99 {beside[1]:6.1f} ms, {ratio:.2f} x     bar {WAIT_BAR}")
    return 0 if checked <= VALIDATION_BAR and grown <= MEMORY_BAR and ratio <= WAIT_BAR else 1


def _take_turns(api: openai.OpenAI, turns: int, lines: io.BytesIO) -> int:
    """Measure waits without and with a batch one after the other, so that both have the same other work beside them."""
    file = api.files.create(file=("in.jsonl", lines), purpose="batch")
    alone, beside, ratios = [], [], []
    _waits(api, ASKED_IN_A_TURN)
    for _ in range(turns):
        alone.append(_waits(api, ASKED_IN_A_TURN))
        batch = api.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        while batch.status == "validating":
            time.sleep(0.02)
            batch = api.batches.retrieve(batch.id)
        _waits(api, 10)
        beside.append(_waits(api, ASKED_IN_A_TURN))
        batch = api.batches.cancel(batch.id)
        while batch.status not in ("cancelled", "completed"):
            time.sleep(0.02)
            batch = api.batches.retrieve(batch.id)
        assert batch.status == "cancelled", "the batch was too short for its turn: more --lines"
        ratios.append(beside[-1][1] / alone[-1][1])
    for name, found in (("alone", alone), ("beside a batch", beside)):
        p50, p99 = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"interactive, {name:15} p50 {p50:6.1f}  p99 {p99:6.1f} ms, medians of {turns} turns")
    ratio = statistics.median(ratios)
    print(f"p99 with a batch over p99 without, median of the turns: {ratio:.2f}     bar {WAIT_BAR}")
    return 0 if ratio <= WAIT_BAR else 1


def _waits(api: openai.OpenAI, asked: int = ASKED) -> tuple[float, float]:
    """Return p50 and p99 of the time of short requests, in ms."""
    found = []
    for _ in range(asked):
        began = time.monotonic()
        api.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=4)
        found.append(1000 * (time.monotonic() - began))
    cuts = statistics.quantiles(found, n=100)
    return cuts[49], cuts[98]


def _input(lines: int, tokens: int) -> io.BytesIO:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "What is 27 + 15?"}], "max_tokens": tokens}
    line = {"custom_id": "", "method": "POST", "url": "/v1/chat/completions", "body": body}
    written = io.BytesIO()
    for number in range(lines):
        written.write(json.dumps(line | {"custom_id": f"line-{number}"}).encode() + b"\n")
    written.seek(0)
    return written


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
