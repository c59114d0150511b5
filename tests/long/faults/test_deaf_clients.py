"""R11: clients that never read."""

from __future__ import annotations

import os
import statistics
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from support.http_client import CHAT, ask, chat, exchange, script
from support.processes import Cluster
from support.scenario_table import record

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif("FAULTS" not in os.environ, reason="make test-faults"),
    pytest.mark.timeout(300),
]

MEBIBYTE = 1024 * 1024
HELD_BYTES = 5 * MEBIBYTE  # a stream's window is 1,024 tokens, and one with ten log probabilities takes some 3 KiB
DEAF = 50
STALL_SECONDS = 4.0
LARGE = {"stream": True, "logprobs": True, "top_logprobs": 10}  # about a KiB for each token


async def test_clients_that_never_read_cost_little_and_are_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Cluster(tmp_path) as cluster:
        frontend = cluster.frontend("frontend", DYN_HTTP_WRITE_STALL_SECS=str(STALL_SECONDS))
        worker = cluster.worker("worker", "talker")
        cluster.wait_ready(frontend, worker)

        async def others(count: int) -> list[float]:
            took = []
            for number in range(count):
                began = time.monotonic()
                reply = await ask(frontend.port, CHAT, chat("talker", stream=bool(number % 2)))
                assert (reply.status, reply.text) == (200, "Hello")
                took.append(time.monotonic() - began)
            return took

        before = await others(40)
        baselines = frontend.resident_bytes(), worker.resident_bytes()
        async with AsyncExitStack() as connections:
            for _ in range(DEAF):
                request, headers = chat("talker", **LARGE), script(["flood"], tag="deaf")
                await connections.enter_async_context(
                    exchange(frontend.port, CHAT, request, headers=headers, small_buffers=True)
                )
            firsts = await worker.sees("first", "deaf", DEAF)
            beside = await others(40)
            grown = frontend.resident_bytes() - baselines[0], worker.resident_bytes() - baselines[1]
            aborts, ends = [await worker.sees(event, "deaf", DEAF) for event in ("abort", "finally")]
            began, last = {one["id"]: one["at"] for one in firsts}, {one["id"]: one["last_at"] for one in ends}
            assert min(one["at"] - began[one["id"]] for one in aborts) >= STALL_SECONDS
            # From the last token that the window let through: on a busy machine the windows are full after half a minute.
            cut = [one["at"] - last[one["id"]] for one in aborts]
        after = await others(10)
        await worker.idle()
        record(
            f"R11 {DEAF} clients that never read",
            sent=DEAF + len(before) + len(beside) + len(after),
            recovery_ms=[1000 * each for each in cut],
            note=f"memory grew by {grown[0] // MEBIBYTE} MiB in the frontend and {grown[1] // MEBIBYTE} MiB in the worker; "
            f"others took {1000 * statistics.median(beside):.0f} ms beside them, {1000 * statistics.median(before):.0f} ms "
            f"before (p50); the times are from the last token to the cut, the limit is {STALL_SECONDS:g} s",
        )
        with capsys.disabled():
            print(
                f"\n  {DEAF} deaf: +{grown[0] / MEBIBYTE:.1f} and +{grown[1] / MEBIBYTE:.1f} MiB, others "
                f"{1000 * statistics.median(before):.1f} -> {1000 * statistics.median(beside):.1f} ms, cut after "
                f"{min(cut):.1f} to {max(cut):.1f} s",
                end="",
            )
        assert grown[0] < DEAF * HELD_BYTES
        assert grown[1] < DEAF * HELD_BYTES
        assert max(cut) < STALL_SECONDS + 20  # the rest is a busy machine: nothing else waits for it
        assert b'refusals_total{limit="write_stall"} %d\n' % DEAF in frontend.get("/metrics")[1]
