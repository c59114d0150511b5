"""The policies of KV-aware placement by type name: adding one is a file and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from dynamo.errors import InvalidArgument
from dynamo.placement.kv_state import KvPolicy
from dynamo.placement.policies import kv_default, kv_time, kv_two_tier

_TYPES: Final[Mapping[str, Callable[[Mapping[str, object]], KvPolicy]]] = {
    kv_default.TYPE_NAME: kv_default.DefaultCost.of,
    kv_two_tier.TYPE_NAME: kv_two_tier.TwoTierCost.of,
    kv_time.TYPE_NAME: kv_time.TimeCost.of,
}
_SHORT_NAMES: Final = {"default": kv_default.TYPE_NAME, "two-tier": kv_two_tier.TYPE_NAME}
_NOT_BUILT: Final = frozenset({"thunderagent"})


def kv_policy_types() -> tuple[str, ...]:
    """Return the type names that `kv_policy` knows."""
    return *_TYPES, *_SHORT_NAMES


def kv_policy(type_name: str, parameters: Mapping[str, object] | None = None) -> KvPolicy:
    """Make a policy from its type name and parameters.

    Raises InvalidArgument: an unknown type or parameter (the message lists the known ones), or a bad value.
    """
    make = _TYPES.get(_SHORT_NAMES.get(type_name, type_name))
    if make is None:
        reason = "is not built in this version" if type_name in _NOT_BUILT else "is unknown"
        raise InvalidArgument(f"policy type {type_name!r} {reason}; known: {', '.join(kv_policy_types())}")
    return make(parameters or {})
