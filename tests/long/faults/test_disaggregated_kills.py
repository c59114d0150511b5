"""Prefill and decode mockers, one to three of each, killed at random moments under load: no answer may differ."""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path

import pytest

from support.disaggregated_mockers import ROLES, Mockers, aggregated, ask_ids, requests
from support.processes import Cluster
from support.scenario_table import Say

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif("FAULTS" not in os.environ, reason="make test-faults"),
    pytest.mark.timeout(900),
]

# A prompt takes 0.1 to 0.3 s, its blocks 0.2 s to the decode worker, an answer about 0.5 s: kills meet every phase.
PACE = (
    "--block-size", "16", "--speedup-ratio", "0.5", "--kv-bytes-per-token", "1000000", "--kv-transfer-bandwidth", "4",
)  # fmt: skip
PROMPT_TOKENS, OUTPUT_TOKENS = 800, 40
AT_ONCE, ROUNDS = 6, 8


@pytest.mark.parametrize("bootstrap", [False, True], ids=["completion", "bootstrap"])
@pytest.mark.parametrize("each", [1, 2, 3], ids=["1x1", "2x2", "3x3"])
async def test_workers_killed_at_any_moment_change_no_answer(
    tmp_path: Path, say: Say, each: int, bootstrap: bool
) -> None:
    chance = random.Random(each * 2 + bootstrap)
    kills = 0
    began = time.monotonic()
    with Cluster(tmp_path, DYN_MIGRATION_LIMIT="20", DYN_REPLACEMENT_WAIT_SECS="60") as cluster:
        mockers = Mockers(cluster, each, *PACE, bootstrap=bootstrap)
        await mockers.ready()
        for number in range(ROUNDS):
            bodies = requests(AT_ONCE, PROMPT_TOKENS, OUTPUT_TOKENS, seed=number)
            expected = await aggregated(bodies)
            begun = [asyncio.Event() for _ in bodies]
            running = asyncio.gather(
                *(ask_ids(mockers.frontend, body, event.set) for body, event in zip(bodies, begun, strict=True))
            )
            await asyncio.sleep(chance.uniform(0.0, 0.8))
            role = chance.choice(ROLES)
            mockers.kill(chance.choice(mockers.living[role]))
            await mockers.replace(role)
            if each > 1:
                # A request that two workers die on before its first token is refused: it may be what kills them.
                await asyncio.gather(*(event.wait() for event in begun))
                mockers.kill(chance.choice(mockers.living["decode"]))
                await mockers.replace("decode")
            kills += 1 + (each > 1)
            assert await running == expected, f"round {number}; log:\n{mockers.frontend.log}"
        moved = mockers.logged(r"lost worker [0-9a-f]+ after [1-9]")
        again = mockers.logged(r"trying another|computed again")
    assert again > 0
    assert moved > 0
    say(
        f"{each}x{each} {'bootstrap' if bootstrap else 'completion'}: {ROUNDS * AT_ONCE} answers, {kills} kills, "
        f"{again} prompts computed again, {moved} answers moved, in {time.monotonic() - began:.0f} s"
    )
