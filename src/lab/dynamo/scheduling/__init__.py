"""Simulated schedulers and KV caches: pure, without a clock, for the mock engine and for replays in virtual time.

`make_core(options, timing)` makes one rank of one engine. Submit `ScheduledRequest`s, then alternate `begin_pass(now_ms)`,
which gives how long the pass takes, and `end_pass()`, which returns what it brought: tokens, ends, rejections and changes
of the cache. Times are in ms. `core` shows the loop; `RankGroup` runs several ranks in step.

A `ScheduledRequest` has either tokens (`ScheduledRequest.of_tokens`) or only the identities of its blocks: chained
sequence hashes (`kv.hashing.sequence_hashes`) and, for KV events, the hashes of the blocks' own tokens. Without tokens
none are made, and a pass costs less.
"""

from __future__ import annotations

from dynamo.scheduling.batching import TrtllmCore, VllmCore
from dynamo.scheduling.block_changes import DEVICE_TIER, HOST_TIER, BlockRun, EvictedBlocks
from dynamo.scheduling.core import PassPlan, PassResult, SchedulerCore
from dynamo.scheduling.host_tier import HostTier, HostTierOptions
from dynamo.scheduling.options import PassTiming, SchedulerOptions, SglangOptions
from dynamo.scheduling.pool import PrefixPool
from dynamo.scheduling.radix import SglangCore
from dynamo.scheduling.ranks import RankGroup, pass_duration
from dynamo.scheduling.request import ScheduledRequest

__all__ = [
    "DEVICE_TIER",
    "HOST_TIER",
    "BlockRun",
    "EvictedBlocks",
    "HostTier",
    "HostTierOptions",
    "PassPlan",
    "PassResult",
    "PassTiming",
    "PrefixPool",
    "RankGroup",
    "ScheduledRequest",
    "SchedulerCore",
    "SchedulerOptions",
    "SglangCore",
    "SglangOptions",
    "TrtllmCore",
    "VllmCore",
    "make_core",
    "pass_duration",
]

_CORES: dict[str, type[SchedulerCore]] = {"vllm": VllmCore, "trtllm": TrtllmCore, "sglang": SglangCore}


def make_core(options: SchedulerOptions, timing: PassTiming, *, seed: int = 0) -> SchedulerCore:
    """Make one rank with the scheduler that `options.backend` names."""
    return _CORES[options.backend](options, timing, seed=seed)
