"""The router's queues: policy classes, their limits, and whose turn it is. No I/O: time and load are arguments."""

from dynamo.placement.queueing.deficit_round_robin import DeficitRoundRobin
from dynamo.placement.queueing.order import QueueOrder
from dynamo.placement.queueing.policy_file import PolicyFile, RouterFileSettings, Selector, read_policy_file
from dynamo.placement.queueing.profile import InvalidPolicy, PolicyClass, PolicyProfile, RankPrefill, UncachedIslBucket
from dynamo.placement.queueing.router_queue import EligibleRanks, QueueRequest, QueueUsage, RouterQueue

__all__ = [
    "DeficitRoundRobin",
    "EligibleRanks",
    "InvalidPolicy",
    "PolicyClass",
    "PolicyFile",
    "PolicyProfile",
    "QueueOrder",
    "QueueRequest",
    "QueueUsage",
    "RankPrefill",
    "RouterFileSettings",
    "RouterQueue",
    "Selector",
    "UncachedIslBucket",
    "read_policy_file",
]
