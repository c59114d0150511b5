"""The prefill half of a request: which worker computes its prompt. The gateway's pods do the rest."""

from __future__ import annotations

from typing import NamedTuple

from dynamo.placement import Placement
from dynamo.router.dispatch.failover import Failover
from dynamo.router.dispatch.stages import PrefillStage
from dynamo.router.kv.placement import KvPlacement
from dynamo.runtime.calls.request_plane.base import Instance


class PrefillWorker(NamedTuple):
    """The worker that computes a prompt."""

    placement: Placement
    instance: Instance
    kv: KvPlacement | None  # books it; None: nothing does


async def choose_prefill(failover: Failover) -> PrefillWorker | None:
    """Choose the prefill worker of a request, and pass on to the choice of its decode worker what follows from that.

    None: the decode worker computes the prompt itself. Nothing is booked. Raises what the stage raises.
    """
    (stage,) = failover.stages
    assert isinstance(stage, PrefillStage), "the picker was asked for a model with other stages"
    record = failover.request.record
    result = await stage.advise(failover.request.body, record)
    failover.given = result
    placement, workers = record.prefill_placement, stage.router.workers
    if placement is None or result.worker is not None:
        return None
    instance = workers.instance(placement.candidate.instance_id)
    return None if instance is None else PrefillWorker(placement, instance, workers.kv)  # None: it left a moment ago
