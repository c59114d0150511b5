"""The load: a trace in a file, or a sketch of it from which traces are drawn."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path

import msgspec

from dynamo.cli.bench.prompts import Length
from dynamo.cli.usage import UsageError
from dynamo.replay.mooncake import BadTraceLine, read_mooncake
from dynamo.replay.trace import Stretch, Trace, TraceRequest


class Demand(msgspec.Struct, frozen=True):
    """The requests that the replicas get. With a `file` the sketch is not read."""

    requests: int
    rate: float = 1.0  # requests per second, a Poisson process
    prompt: Length = Length(1)
    output: Length = Length(1)
    prefix_tokens: int = 0  # that the prompts of a group begin with
    groups: int = 1
    file: Path | None = None
    file_block_tokens: int = 512
    speedup: float = 1.0  # of the trace in the file

    def describe(self) -> str:
        """Return the load in a few words."""
        if self.file is not None:
            faster = "" if self.speedup == 1 else f", {self.speedup:g} times as fast"
            return f"the trace {self.file}, its first {self.requests:,} requests at the most{faster}"
        shared = f", {self.prefix_tokens} of them shared in {self.groups} groups" if self.prefix_tokens else ""
        return f"{self.rate:g} requests/s, prompts of {self.prompt} tokens{shared}, answers of {self.output} tokens"


@lru_cache(maxsize=8)
def trace_of(demand: Demand, seed: int) -> Trace:
    """Read the trace, or draw one. The same demand and seed give the same trace. Raises UsageError naming --trace."""
    if demand.file is None:
        return _drawn(demand, random.Random(f"{seed} size"))
    try:
        with demand.file.open("rb") as lines:
            return read_mooncake(lines, demand.file.name, block_tokens=demand.file_block_tokens, limit=demand.requests)
    except OSError as error:
        raise UsageError(f"--trace: cannot read {demand.file}: {error.strerror}") from None
    except BadTraceLine as error:
        raise UsageError(f"--trace: {demand.file}: {error}") from None


def _drawn(demand: Demand, rng: random.Random) -> Trace:
    requests: list[TraceRequest] = []
    at = 0.0
    for number in range(demand.requests):
        at += rng.expovariate(demand.rate)
        tokens = demand.prompt.draw(rng)
        prompt: tuple[Stretch, ...] = (Stretch(number, tokens),)
        if demand.prefix_tokens:
            shared = Stretch(-1 - rng.randrange(demand.groups), demand.prefix_tokens)
            prompt = (shared, Stretch(number, max(1, tokens - demand.prefix_tokens)))
        requests.append(TraceRequest(f"r{number}", round(1000 * at, 3), prompt, demand.output.draw(rng)))
    return Trace("sketch", requests)
