"""When a stream that lost its worker may go on at another one, and what that worker is sent.

The new worker gets the prompt with everything that was generated so far behind it, and what is left of the token limits. The
request keeps its id, and `Context.prompt_tokens` is the length of its own prompt, so that an engine (its penalties,
grammars, usage) can distinguish the prompt from the generated text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynamo.protocol.records import RESUMES_GUIDED
from dynamo.protocol.worker_request import TokenLimits, WorkerRequest


class Move:
    """One change of worker, for the metrics."""

    __slots__ = ("is_ongoing", "outcome", "seconds")

    def __init__(self, *, is_ongoing: bool) -> None:
        """`is_ongoing`: after the first token."""
        self.is_ongoing = is_ongoing
        self.outcome = "failure"  # "success" and "cancelled" are set when they are known
        self.seconds = 0.0  # from the loss to the first items of the new worker


def migration_blocker(
    body: WorkerRequest, length: int, *, longest: int | None, runtime_data: Mapping[str, object]
) -> str | None:
    """Return what keeps a request that has begun to answer from another worker; None: nothing does.

    `length`: prompt and answer so far, in tokens; `longest`: `--migration-max-seq-len`.
    """
    if longest is not None and length > longest:
        return f"its {length} tokens are more than DYN_MIGRATION_MAX_SEQ_LEN={longest}"
    guided = (body.get("sampling_options") or {}).get("guided_decoding")
    if guided and runtime_data.get(RESUMES_GUIDED) is not True:
        return f"its engine does not take up a grammar in the middle (runtime_data has no {RESUMES_GUIDED!r})"
    return None


def tokens_left(body: WorkerRequest, generated: int) -> int | None:
    """Return how many more tokens the request allows; None: as many as the engine will."""
    most = (body.get("stop_conditions") or {}).get("max_tokens")
    return None if most is None else max(0, int(most) - generated)


def continued(body: WorkerRequest, prompt: Sequence[int], generated: Sequence[int]) -> WorkerRequest:
    """Return the request for the worker that goes on behind `generated`; `body` stays as it is."""
    stops: TokenLimits = {**(body.get("stop_conditions") or {})}
    if (most := stops.get("max_tokens")) is not None:
        stops["max_tokens"] = max(0, int(most) - len(generated))
    if (least := stops.get("min_tokens")) is not None:
        stops["min_tokens"] = max(0, int(least) - len(generated))
    return {**body, "stop_conditions": stops, "token_ids": [*prompt, *generated]}
