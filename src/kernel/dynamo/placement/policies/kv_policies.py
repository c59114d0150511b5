"""The policies of KV-aware placement by type name: adding one is a file and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Final

import msgspec

from dynamo.errors import InvalidArgument
from dynamo.placement.kv_state import KvPolicy
from dynamo.placement.policies import kv_default, kv_time, kv_two_tier

_TYPES: Final[Mapping[str, tuple[Callable[[Mapping[str, object]], KvPolicy], type[msgspec.Struct]]]] = {
    kv_default.TYPE_NAME: (kv_default.DefaultCost.of, kv_default.DefaultCostParameters),
    kv_two_tier.TYPE_NAME: (kv_two_tier.TwoTierCost.of, kv_two_tier.TwoTierParameters),
    kv_time.TYPE_NAME: (kv_time.TimeCost.of, kv_time.TimeParameters),
}
_SHORT_NAMES: Final = {"default": kv_default.TYPE_NAME, "two-tier": kv_two_tier.TYPE_NAME}
_OF_USERS: Final = "dynamo.policies.programmed"
_NOT_BUILT: Final = frozenset({"thunderagent"})


def kv_policy_types() -> tuple[str, ...]:
    """Return the type names that `kv_policy` knows."""
    return *_TYPES, *_SHORT_NAMES


def is_of_user(type_name: str) -> bool:
    """Return whether a policy is a class in a file or module of the user."""
    return ":" in type_name


def kv_policy_parameters(type_name: str) -> tuple[str, ...]:
    """Return the names of the parameters of a known type; of a user's policy the settings know none."""
    return () if is_of_user(type_name) else _TYPES[_SHORT_NAMES.get(type_name, type_name)][1].__struct_fields__


def kv_policy(type_name: str, parameters: Mapping[str, object] | None = None) -> KvPolicy:
    """Make a policy from its type name and parameters.

    A name with a colon, such as `policy.py:MyPolicy`, is that of a class of the user.

    Raises InvalidArgument: an unknown type or parameter (the message lists the known ones), or a bad value.
    """
    if is_of_user(type_name):
        made: KvPolicy = import_module(_OF_USERS).programmed_policy(type_name, parameters or {})
        return made
    found = _TYPES.get(_SHORT_NAMES.get(type_name, type_name))
    if found is None:
        reason = "is not built in this version" if type_name in _NOT_BUILT else "is unknown"
        raise InvalidArgument(f"policy type {type_name!r} {reason}; known: {', '.join(kv_policy_types())}")
    return found[0](parameters or {})
