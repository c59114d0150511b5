"""An engine that blocks the event loop of its worker: what the log, the metrics and the probes report."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from support.http_client import CHAT, ask, chat, script
from support.processes import SCRIPTED_ENGINE, Stack, Worker, get, until

BLOCKING_LINE = 1 + SCRIPTED_ENGINE.read_text().splitlines().index("        time.sleep(0.01)  # the block")
PLACES = {f"scripted_engine.py:{BLOCKING_LINE + offset} (_block_until)" for offset in (-1, 0)}  # its head, or its body


def health(worker: Worker) -> tuple[int, dict[str, Any]]:
    status, body = get(worker.system_port, "/health")
    return status, json.loads(body)


async def test_a_blocked_event_loop_is_reported_while_it_lasts_and_afterwards(
    stack: Stack, name: str, tag: str, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    worker = stack.cluster.worker(name, name, DYN_LOOP_BLOCK_THRESHOLD_SECS="0.3")
    stack.cluster.wait_ready(stack.frontend, worker)
    assert health(worker)[0] == 200
    headers = script(["block", str(release)], ["say", "ok"], tag=tag)
    asked = asyncio.create_task(ask(stack.port, CHAT, chat(name), headers=headers))
    await worker.sees("generate", tag)
    await until(lambda: "the engine blocked the event loop for " in worker.log)

    status, during = await asyncio.to_thread(health, worker)
    other = await asyncio.to_thread(get, worker.system_port, "/metrics")
    release.touch()
    assert (await asked).text == "ok"

    assert (status, during["status"]) == (503, "notready")
    assert during["reason"].startswith("the event loop has been blocked for ")
    assert any(during["reason"].endswith(f"s, at {place}") for place in PLACES)
    assert other[0] == 503
    after_status, after = health(worker)
    assert (after_status, after["status"], "reason" in after) == (200, "ready", False)
    assert after["last_block"]["place"] in PLACES
    assert after["last_block"]["seconds"] >= 0.3
    assert worker.metric("dynamo_work_handler_event_loop_blocks_total") == 1
    assert worker.metric("dynamo_work_handler_event_loop_blocked_seconds_total") >= 0.3
    reported = [line for line in worker.log.splitlines() if "blocked the event loop for " in line]
    assert len(reported) == 1
    assert any(f"s, at {place}; no request of this process goes on" in reported[0] for place in PLACES)
