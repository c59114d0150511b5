"""The router modes that a replay knows, by name, and what makes their frontends. Pure.

round-robin, random, least-loaded, power-of-two
kv                                   the policy `time`
kv:default, kv:time                  a policy by its name
kv:time,NAME=VALUE,...               with parameters of the policy; one name is the replay's own:
    events=off                       route without KV events
"""

from __future__ import annotations

import random
from typing import Final

from dynamo.errors import InvalidArgument
from dynamo.placement.policies import RouterMode
from dynamo.placement.policies.kv_policies import kv_policy
from dynamo.replay.frontend import CountingFrontend, MakeFrontend
from dynamo.replay.kv_frontend import KvFrontend
from dynamo.scheduling import SchedulerOptions

__all__ = ["COUNTING_MODES", "frontend_of"]

_COUNTING: Final = (RouterMode.ROUND_ROBIN, RouterMode.RANDOM, RouterMode.LEAST_LOADED, RouterMode.POWER_OF_TWO)
COUNTING_MODES: Final[tuple[str, ...]] = tuple(mode.value for mode in _COUNTING)
KV: Final = "kv"
STANDARD_POLICY: Final = "time"
_SWITCH: Final = {"on": True, "off": False, "true": True, "false": False}


def frontend_of(name: str, options: SchedulerOptions) -> MakeFrontend:
    """Return what makes frontends of a mode, for workers with these options.

    Raises InvalidArgument for an unknown mode, policy or parameter; the message lists what is known.
    """
    if name in COUNTING_MODES:
        mode = RouterMode(name)
        return lambda seed: CountingFrontend(mode, random.Random(f"{seed} {mode}"))
    kind, _, policy_text = name.partition(":")
    if kind != KV:
        raise InvalidArgument(f"there is no mode {name!r} to replay; use {', '.join(COUNTING_MODES)}, kv, kv:POLICY")
    policy, *given = (policy_text or STANDARD_POLICY).split(",")
    parameters = dict(_parameter(name, text) for text in given)
    reads_events = parameters.pop("events", True)
    if not isinstance(reads_events, bool):
        raise InvalidArgument(f"{name}: events is on or off")
    kv_policy(policy, parameters)  # so that a mistake shows before anything is replayed
    return lambda seed: KvFrontend(
        kv_policy(policy, parameters),
        options,
        random.Random(f"{seed} {KV}"),
        reads_events=reads_events,
    )


def _parameter(mode: str, text: str) -> tuple[str, bool | float]:
    """Split NAME=VALUE; a value is a number, or on or off."""
    name, _, value = text.partition("=")
    if value.lower() in _SWITCH:
        return name, _SWITCH[value.lower()]
    try:
        number = float(value)
    except ValueError:
        raise InvalidArgument(f"{mode}: {text!r} is not NAME=NUMBER, nor NAME=on or off") from None
    return name, int(number) if number.is_integer() and "." not in value else number
