"""The engine behind the native frontend when it is judged: that of the benchmarks, with choices and log probabilities.

Both are an engine's part behind that frontend, and where they lack the frontend is not at fault.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from native_engine import NativeBenchEngine

from dynamo.common.backend import GenerateChunk, GenerateRequest
from dynamo.common.backend.run import run
from dynamo.runtime import Context

LOG_PROBABILITY = -0.25  # of each token


class PeerEngine(NativeBenchEngine):
    """`NativeBenchEngine` that makes as many choices as a request has, token by token."""

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        choices = range((request.get("sampling_options") or {}).get("n") or 1)
        has_logprobs = (request.get("output_options") or {}).get("logprobs") is not None
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                if has_logprobs:
                    chunk["log_probs"] = [LOG_PROBABILITY] * len(chunk["token_ids"])
                for index in choices:
                    yield {**chunk, "index": index}


if __name__ == "__main__":
    run(PeerEngine)
