"""What the workers of one role have to do, as this process sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dynamo.frontend.models.served import ServedModel
from dynamo.placement import Candidate
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.router.busy_workers import LoadReport
from dynamo.router.pool import ModelPool
from dynamo.scaling.saturation import RoleLoad

__all__ = ["role_load"]


def role_load(
    pool: ModelPool, workers: Iterable[Candidate], reports_of: Callable[[int], Iterable[LoadReport]], now: float
) -> RoleLoad:
    """Return the load of a pool; `workers` are its members that are there, `reports_of` gives the newest reports of one."""
    streams = blocks = tokens = count = 0
    has_blocks = has_tokens = False
    for worker in workers:
        count += 1
        streams += worker.in_flight
        for report in reports_of(worker.instance_id):
            if report.active_decode_blocks is not None:
                blocks, has_blocks = blocks + report.active_decode_blocks, True
            if report.active_prefill_tokens is not None:
                tokens, has_tokens = tokens + report.active_prefill_tokens, True
    config = pool.runtime_config
    running, waiting, age = streams, 0, 0.0
    if isinstance(pool, ServedModel):  # requests come to it, and wait in it while no worker is there
        admission = pool.admission
        running, waiting, age = max(streams, admission.in_flight), admission.waiting, admission.queue_age_seconds(now)
    return RoleLoad(
        count,
        running,
        _together(config.max_num_seqs, config, count),
        waiting,
        age,
        blocks if has_blocks else None,
        _together(config.total_kv_blocks, config, count),
        tokens if has_tokens else None,
        _together(config.max_num_batched_tokens, config, count),
    )


def _together(of_a_rank: int | None, config: ModelRuntimeConfig, workers: int) -> int | None:
    """Return what all workers have together; None: they did not say."""
    return of_a_rank * max(1, config.data_parallel_size) * workers if of_a_rank else None
