"""A masked-diffusion language model: it yields blocks of tokens instead of one token at a time.

    python examples/block_diffusion_engine.py --model-name diffusion --discovery-backend file
    python -m dynamo.frontend --discovery-backend file --http-port 8000

A block begins as masks. Each step fills the positions whose token is most certain, in any order, and a full block
is one chunk. The contract needs nothing more: a chunk may hold many ids. The model is a toy that counts the bytes of
`TEXT`, so no download is needed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Iterator, Sequence

from dynamo._core import Context
from dynamo.common.backend import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, WorkerConfig
from dynamo.common.backend.args import add_backend_arguments, worker_config_from
from dynamo.common.backend.engine import chunk, final_chunk, usage
from dynamo.common.backend.run import run
from dynamo.llm.exceptions import InvalidArgument

TEXT = b"The sea is wide and the sky is wide. The wind is over the sea and the sun is in the sky. "
CONTEXT_LENGTH = 4096
Block = list[int | None]  # None: still a mask


class NeighbourModel:
    """How often one byte of a text stands at each distance from another one."""

    def __init__(self, text: bytes, reach: int) -> None:
        self.reach = reach
        self._alone = Counter(text)
        self._after: defaultdict[tuple[int, int], Counter[int]] = defaultdict(Counter)
        self._before: defaultdict[tuple[int, int], Counter[int]] = defaultdict(Counter)
        for distance in range(1, reach + 1):
            for left, right in zip(text, text[distance:], strict=False):
                self._after[left, distance][right] += 1
                self._before[right, distance][left] += 1

    def odds(self, window: Sequence[int | None], place: int) -> dict[int, float]:
        """Return the probability of each token at a masked place, from every known neighbour within reach."""
        weights = {token: float(count) for token, count in self._alone.items()}
        for other in range(max(0, place - self.reach), min(len(window), place + self.reach + 1)):
            known = window[other]
            if known is None:
                continue
            distance = place - other
            seen = self._after[known, distance] if distance > 0 else self._before[known, -distance]
            weights = {token: weight * (seen[token] + 0.01) for token, weight in weights.items()}
        total = sum(weights.values())
        return {token: weight / total for token, weight in weights.items()}


def denoise(
    model: NeighbourModel, before: Sequence[int], size: int, steps: int, pick: random.Random | None
) -> Iterator[Block]:
    """Yield the block after each step; the last one has no mask. `pick` None: always the likeliest token."""
    context: Block = list(before[-model.reach :])
    block: Block = [None] * size
    for step in range(steps):
        masked = [place for place in range(size) if block[place] is None]
        odds = {place: model.odds(context + block, len(context) + place) for place in masked}
        surest = sorted(masked, key=lambda place: -max(odds[place].values()))
        for place in surest[: -(-len(masked) // (steps - step))]:  # an equal share of what is left, rounded up
            tokens = odds[place]
            if pick is None:
                block[place] = max(tokens, key=lambda token: tokens[token])
            else:
                block[place] = pick.choices(list(tokens), list(tokens.values()))[0]
        yield list(block)


class BlockDiffusionEngine(LLMEngine):
    """Fills blocks of `block_size` tokens in `steps` steps each."""

    def __init__(self, model_name: str, block_size: int, steps: int) -> None:
        if not 1 <= steps <= block_size:
            raise ValueError(f"--steps is {steps}: it must be 1 to --block-size, {block_size}")
        self.model_name = model_name
        self.block_size = block_size
        self.steps = steps
        self._model: NeighbourModel | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[BlockDiffusionEngine, WorkerConfig]:
        parser = argparse.ArgumentParser("block-diffusion-engine")
        parser.add_argument("--model-name", default="diffusion")
        parser.add_argument("--block-size", type=int, default=16, help="tokens of one block")
        parser.add_argument("--steps", type=int, default=8, help="steps that fill one block")
        add_backend_arguments(parser)
        args = parser.parse_args(argv)
        engine = cls(args.model_name, args.block_size, args.steps)
        return engine, worker_config_from(args, model_name=args.model_name)

    async def start(self, worker_id: int) -> EngineConfig:
        self._model = NeighbourModel(TEXT, reach=6)
        return EngineConfig(model=self.model_name, context_length=CONTEXT_LENGTH, max_num_seqs=8)

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        if request.get("multi_modal_data"):
            raise InvalidArgument("multi_modal_data: a diffusion language model takes text only")
        stops = request.get("stop_conditions") or {}
        if stops.get("max_thinking_tokens") is not None:
            raise InvalidArgument("max_thinking_tokens: a diffusion language model has no limit for thoughts")
        assert self._model is not None, "generate() before start()"
        prompt = request["token_ids"]
        limit = stops.get("max_tokens") or 64
        sampling = request.get("sampling_options") or {}
        pick = random.Random(sampling.get("seed")) if sampling.get("temperature") else None
        done: list[int] = []
        while len(done) < limit:
            filled: Block = []
            for block in denoise(self._model, [*prompt, *done], self.block_size, self.steps, pick):
                filled = block
                await asyncio.sleep(0)  # other requests run between two steps
                if context.is_stopped():
                    yield final_chunk("cancelled", usage=usage(len(prompt), len(done)))
                    return
            new = [token for token in filled if token is not None][: limit - len(done)]
            done += new
            yield chunk(new)  # the whole block at once
        yield final_chunk("length", usage=usage(len(prompt), len(done)))

    async def cleanup(self) -> None:
        self._model = None


if __name__ == "__main__":
    run(BlockDiffusionEngine)
