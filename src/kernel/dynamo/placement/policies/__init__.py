"""How one of several workers is chosen: one policy per file."""

from __future__ import annotations

import random
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Final

from dynamo.errors import InvalidArgument
from dynamo.placement.candidates import Policy
from dynamo.placement.policies.device_aware_weighted import DeviceAwareWeighted
from dynamo.placement.policies.direct import Direct
from dynamo.placement.policies.least_loaded import LeastLoaded
from dynamo.placement.policies.power_of_two import PowerOfTwo
from dynamo.placement.policies.random_choice import RandomChoice
from dynamo.placement.policies.round_robin import RoundRobin, RoundRobinCursor

__all__ = ["DEFAULT_CUDA_TO_CPU_RATIO", "Policy", "RoundRobinCursor", "RouterMode", "policy_for"]

DEFAULT_CUDA_TO_CPU_RATIO: Final = 8.0  # DYN_ENCODER_CUDA_TO_CPU_RATIO


class RouterMode(StrEnum):
    """The name of a policy; the values are those of `--router-mode`."""

    ROUND_ROBIN = "round-robin"
    RANDOM = "random"
    POWER_OF_TWO = "power-of-two"
    LEAST_LOADED = "least-loaded"
    KV = "kv"
    DEVICE_AWARE_WEIGHTED = "device-aware-weighted"
    DIRECT = "direct"
    # The native system's spelling of the same modes. A type checker would count an alias as a further member.
    if TYPE_CHECKING:
        RoundRobin: RouterMode
        Random: RouterMode
        PowerOfTwoChoices: RouterMode
        LeastLoaded: RouterMode
        DeviceAwareWeighted: RouterMode
        Direct: RouterMode
    else:
        RoundRobin = ROUND_ROBIN
        Random = RANDOM
        PowerOfTwoChoices = POWER_OF_TWO
        LeastLoaded = LEAST_LOADED
        DeviceAwareWeighted = DEVICE_AWARE_WEIGHTED
        Direct = DIRECT

    @classmethod
    def of(cls, value: object) -> RouterMode:
        """Return a mode, its value in any spelling ("round_robin", "RoundRobin"), or another enum's member of that name.

        Raises InvalidArgument naming the modes there are.
        """
        if isinstance(value, cls):
            return value
        name = value.name if isinstance(value, Enum) else value
        plain = "".join(c for c in str(name).lower() if c.isalnum()).removesuffix("choices")
        for mode in cls:
            if mode.value.replace("-", "") == plain:
                return mode
        raise InvalidArgument(f"unknown router mode {name!r}; use one of {', '.join(mode.value for mode in cls)}")


def policy_for(mode: RouterMode, *, rng: random.Random, cuda_to_cpu_ratio: float = DEFAULT_CUDA_TO_CPU_RATIO) -> Policy:
    """Make the policy of a mode. Each group of workers needs one of its own: a policy keeps its caller's turn.

    Raises InvalidArgument for `kv`, which also needs the workers' cards and KV events: see `dynamo.router.kv.placement`.
    """
    match mode:
        case RouterMode.ROUND_ROBIN:
            return RoundRobin()
        case RouterMode.RANDOM:
            return RandomChoice(rng)
        case RouterMode.POWER_OF_TWO:
            return PowerOfTwo(rng)
        case RouterMode.LEAST_LOADED:
            return LeastLoaded(rng)
        case RouterMode.DEVICE_AWARE_WEIGHTED:
            return DeviceAwareWeighted(rng, cuda_to_cpu_ratio)
        case RouterMode.DIRECT:
            return Direct()
        case RouterMode.KV:
            raise InvalidArgument("router mode kv is one of the frontend and of dynamo.router, not of a plain client")
