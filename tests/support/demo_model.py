"""The demonstration model as it is shipped."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

import dynamo.reference.demo
from dynamo.reference.engine import ReferenceEngine
from dynamo.reference.loading import Options
from dynamo.runtime.calls.context import Context

FILES: Final[Path] = dynamo.reference.demo.DIRECTORY


def chat_prompts(*texts: str) -> list[list[int]]:
    """Token ids of prompts, each a chat with one message."""
    tokenizer = Tokenizer.from_file(str(FILES / "tokenizer.json"))
    return [
        tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False).ids
        for text in texts
    ]


def sums(count: int = 40) -> list[list[int]]:
    """Prompts that ask for sums."""
    return chat_prompts(*(f"What is {number} + {60 - number}?" for number in range(1, count + 1)))


async def first_logprob(prompt: list[int]) -> float:
    """The log probability of the likeliest first token of the answer, as the reference engine has it."""
    engine = ReferenceEngine(FILES)
    await engine.start(0)
    try:
        body = {
            "token_ids": prompt,
            "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
            "sampling_options": {"temperature": 0.0},
            "output_options": {"logprobs": 0},
        }
        chunks = [chunk async for chunk in engine.generate(body, Context())]  # type: ignore[arg-type]
        return float(next(chunk["log_probs"][0] for chunk in chunks if chunk.get("log_probs")))
    finally:
        await engine.cleanup()


async def reference_vectors(prompts: list[list[int]]) -> list[list[float]]:
    """The normalised state of the last token of each prompt, as the reference engine has it."""
    engine = ReferenceEngine(FILES, Options(pooling="last"))
    await engine.start(0)
    try:
        found = {
            each["index"]: [float(value) for value in each["embedding"]]
            async for each in engine.embed({"token_ids": prompts}, Context())
        }
        return [found[index] for index in range(len(prompts))]
    finally:
        await engine.cleanup()


def detokenized(tokens: list[int]) -> str:
    """The text of an answer."""
    return str(Tokenizer.from_file(str(FILES / "tokenizer.json")).decode(tokens, skip_special_tokens=True))
