"""The example of a diffusion language model: blocks of tokens, over real processes and in this one."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from dynamo._core import Context
from dynamo.common.backend import GenerateRequest
from dynamo.contract.conformance import run_conformance
from dynamo.llm.exceptions import InvalidArgument
from support.processes import Cluster, Process

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(autouse=True)
def _examples_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_a_block_has_fewer_masks_after_each_step_and_none_after_the_last() -> None:
    from block_diffusion_engine import TEXT, NeighbourModel, denoise

    blocks = list(denoise(NeighbourModel(TEXT, 6), b"The s", 10, 4, None))
    assert [block.count(None) for block in blocks] == [7, 4, 2, 0]


def test_a_token_stays_once_it_is_filled() -> None:
    from block_diffusion_engine import TEXT, NeighbourModel, denoise

    blocks = list(denoise(NeighbourModel(TEXT, 6), b"The s", 12, 6, random.Random(1)))
    for earlier, later in itertools.pairwise(blocks):
        kept = [place for place, token in enumerate(earlier) if token is not None]
        assert [earlier[place] for place in kept] == [later[place] for place in kept]


def test_a_mask_is_filled_from_both_of_its_sides() -> None:
    from block_diffusion_engine import NeighbourModel

    odds = NeighbourModel(b"axb cyb axd", 2).odds([ord("c"), None, ord("b")], 1)
    assert max(odds, key=lambda token: odds[token]) == ord("y")


async def test_a_chunk_is_a_block_and_the_last_block_is_cut_at_the_limit() -> None:
    from block_diffusion_engine import BlockDiffusionEngine

    engine = BlockDiffusionEngine("diffusion", 8, 4)
    await engine.start(1)
    request: GenerateRequest = {"token_ids": list(b"The s"), "stop_conditions": {"max_tokens": 19}}
    chunks = [chunk async for chunk in engine.generate(request, Context())]
    assert [len(chunk["token_ids"]) for chunk in chunks] == [8, 8, 3, 0]
    assert chunks[-1]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("member", "value", "named"),
    [
        ("multi_modal_data", {"image_url": [{"Url": "data:,"}]}, "multi_modal_data"),
        ("stop_conditions", {"max_thinking_tokens": 4}, "max_thinking_tokens"),
    ],
)
async def test_what_a_diffusion_model_lacks_is_refused(member: str, value: object, named: str) -> None:
    from block_diffusion_engine import BlockDiffusionEngine

    engine = BlockDiffusionEngine("diffusion", 8, 4)
    await engine.start(1)
    request = cast(GenerateRequest, {"token_ids": [1], member: value})
    with pytest.raises(InvalidArgument, match=named):
        await anext(engine.generate(request, Context()))


def test_more_steps_than_tokens_are_refused() -> None:
    from block_diffusion_engine import BlockDiffusionEngine

    with pytest.raises(ValueError, match="--steps is 9"):
        BlockDiffusionEngine("diffusion", 8, 9)


async def test_the_engine_keeps_the_contract() -> None:
    from block_diffusion_engine import BlockDiffusionEngine

    await run_conformance(lambda: BlockDiffusionEngine("diffusion", 8, 4))


def test_a_client_reads_the_blocks_through_a_frontend(tmp_path: Path) -> None:
    with Cluster(tmp_path) as running:
        script = [sys.executable, str(EXAMPLES / "block_diffusion_engine.py")]
        worker = running._start(Process, "worker", [*script, "--discovery-backend", "file"], {})
        frontend = running.frontend("frontend")
        frontend.wait_ready()
        frontend.wait_log("model diffusion is served")
        client = [sys.executable, str(EXAMPLES / "chat_client.py"), f"{frontend.url}/v1", "Hello!", "diffusion"]
        done = subprocess.run(client, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        answer, counted = done.stdout.rsplit("\n[diffusion: ", 1)
        assert len(answer) == int(counted.split(" + ")[1].split()[0])  # one token is one byte here
        for process in (worker, frontend):
            process.terminate()
        assert [process.exit_code() for process in (worker, frontend)] == [0, 0]
