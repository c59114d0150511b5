"""Whether the first token of a request can be there in time, by what waits and by the speed that the workers have shown. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from dynamo.errors import RouterQueueLimitExceeded
from dynamo.placement.kv_state import RankState
from dynamo.placement.queueing.router_queue import QueueRequest
from dynamo.placement.timing import DEFAULT_TIMING, pass_ms

TARGET_KIND: Final = "ttft_target_ms"  # the `limit_kind` of a refusal
USUAL_BATCH: Final = 8192  # tokens of one pass of a rank that does not report how many it takes
MAX_RETRY_SECONDS: Final = 60


def expected_ttft_ms(ranks: Sequence[RankState], tokens_ahead: int, own_tokens: int) -> float | None:
    """Return when the first token of a request is expected that any of the ranks may serve; None: no rank has shown its speed.

    An optimistic estimate: the ranks share what is before the request to the last token, and decode nothing beside it.
    """
    known = [each for each in ranks if each.timing.prefill != DEFAULT_TIMING.prefill]
    if not known:
        return None
    speeds = [(each.timing.prefill, each.max_num_batched_tokens or USUAL_BATCH) for each in known]
    own_ms = min(pass_ms(curve, own_tokens, batch) for curve, batch in speeds)
    tokens_per_ms = sum(batch / curve.at(batch) for curve, batch in speeds) / len(known)  # of the others, too
    return own_ms + (sum(each.prefill_tokens for each in ranks) + tokens_ahead) / (tokens_per_ms * len(ranks))


def check_target(
    policy_class: str, request: QueueRequest[Any], ranks: Sequence[RankState], tokens_ahead: int, now: float
) -> None:
    """Raise RouterQueueLimitExceeded for a request that has to wait and whose first token cannot be there when it is due.

    It has when the target could be kept, if nothing else came meanwhile. Without an estimate no request is refused.
    """
    expected = expected_ttft_ms(ranks, tokens_ahead, request.uncached_tokens)
    if expected is None or request.due is None:
        return
    left = 1000.0 * (request.due - now)
    if expected > left:
        seconds = min(MAX_RETRY_SECONDS, max(1, math.ceil((expected - left) / 1000)))
        raise RouterQueueLimitExceeded(
            policy_class, TARGET_KIND, math.ceil(expected), max(0, int(left)), retry_after_seconds=seconds
        )
