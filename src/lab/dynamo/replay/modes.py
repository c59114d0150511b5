"""The router modes that a replay knows, by name, and what makes their frontends. Pure.

- `round-robin`, `random`, `least-loaded`, `power-of-two`
- `kv`: the policy `time`; `kv:default`, `kv:time`: a policy by its name
- `kv:time,NAME=VALUE,...`: with parameters of the policy

Three names are the replay's own. `events=off` routes without KV events, by what was sent where in the last two minutes; with
`lru=on` that counts as held until newer prompts fill the worker's cache. `predicted=SECONDS` counts what was sent as held
for so long beside the events.
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
    predicted = parameters.pop("predicted", None)
    by_lru = parameters.pop("lru", False)
    if not isinstance(reads_events, bool) or not isinstance(by_lru, bool):
        raise InvalidArgument(f"{name}: events and lru are on or off")
    if predicted is not None and (isinstance(predicted, bool) or not predicted > 0):
        raise InvalidArgument(f"{name}: predicted is a number of seconds above 0")
    kv_policy(policy, parameters)  # so that a mistake shows before anything is replayed
    return lambda seed: KvFrontend(
        kv_policy(policy, parameters),
        options,
        random.Random(f"{seed} {KV}"),
        reads_events=reads_events,
        guesses_by_lru=by_lru,
        predicted_ttl_seconds=predicted,
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
