"""What an answer reports of its routing: the model and the workers that served it, why, and where it would have gone."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dynamo.frontend.base.asgi import HeaderPairs
from dynamo.frontend.pipeline.exchange import FallbackStep, tried_models
from dynamo.frontend.pipeline.plan import Plan, Tally
from dynamo.placement import Placement
from dynamo.protocol.openai.escaping import json_line
from dynamo.protocol.openai.sse import annotation_event
from dynamo.router.kv.explain import explain_placement, hit_rate_of, trust_of
from dynamo.router.workers.pool import ModelPool


def worker_ids(tally: Tally) -> dict[str, int] | None:
    """Return the workers of an answer, and their data-parallel ranks where a router chose them; None while there is none."""
    placement, prefill = tally.placement, tally.prefill_placement
    if tally.instances:
        decode_id = tally.instances[-1].instance_id
    elif placement is not None:
        decode_id = placement.candidate.instance_id
    else:
        return None
    is_apart = tally.prefill_instance_id is not None
    ranks = {
        "prefill_dp_rank": prefill if is_apart else placement,
        "decode_dp_rank": placement,
    }
    return {
        "prefill_worker_id": tally.prefill_instance_id if tally.prefill_instance_id is not None else decode_id,
        "decode_worker_id": decode_id,
        **{name: by.dp_rank for name, by in ranks.items() if by is not None and by.dp_rank is not None},
    }


def explained_routing(tally: Tally) -> dict[str, object] | None:
    """Return why the workers of an answer were chosen, by stage, and how long it waited in queues of the router; None while
    there is no worker."""
    stages = {"prefill": tally.prefill_placement, "decode": tally.placement}
    found: dict[str, object] = {stage: explain_placement(made) for stage, made in stages.items() if made is not None}
    if tally.bypass is not None and found:
        found["bypass"] = msgspec.to_builtins(tally.bypass)
    if found and tally.queued_seconds:
        found["queued_ms"] = round(tally.queued_seconds * 1000, 3)
    return found or None


def routing_event(tally: Tally) -> bytes:
    """Return the same as the annotation that comes before the data of a stream; b"" while there is none."""
    found = explained_routing(tally)
    return b"" if found is None else annotation_event("routing", json_line(found).decode())


def kv_timing(tally: Tally, pool: ModelPool) -> dict[str, float]:
    """Return what the kv mode adds to the times of an answer: the share of the prompt that was cached where it was computed, as
    far as the router knew, and how many requests wait for a worker now. Empty in the other modes."""
    placement = tally.prefill_placement or tally.placement
    rate = None if placement is None else hit_rate_of(placement)
    if rate is None:
        return {}
    return {"kv_hit_rate": rate, "router_queue_depth": 0 if pool.gate is None else len(pool.gate)}


def queried_routing(plan: Plan, tally: Tally) -> dict[str, object]:
    """Return the extension members of a request that was only placed."""
    return {"worker_id": worker_ids(tally), "token_ids": plan.prompts[0]}


def routing_headers(placement: Placement | None) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers that name the worker of an answer and the trust in what it was reported to hold."""
    if placement is None:
        return ()
    headers = [(b"x-dynamo-worker-instance-id", b"%d" % placement.candidate.instance_id)]
    if placement.dp_rank is not None:
        headers.append((b"x-dynamo-dp-rank", b"%d" % placement.dp_rank))
    if (trust := trust_of(placement)) is not None:
        headers.append((b"x-dynamo-kv-trust", trust.encode()))
    return tuple(headers)


def fallback_headers(steps: Sequence[FallbackStep]) -> HeaderPairs:
    """Return the headers that name the model of an answer, and those that were tried before; () where it is the first one."""
    if not steps:
        return ()
    named = ((b"x-dynamo-fallback", steps[-1].next_model), (b"x-dynamo-fallback-tried", tried_models(steps)))
    return tuple([(header, text.encode("ascii", "backslashreplace")) for header, text in named])
