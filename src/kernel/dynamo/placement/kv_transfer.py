"""Which decode workers KV blocks can be sent to from the prefill worker that holds them. Pure.

A worker's card names its places (`topology_domains`, such as zone "a"), and a prefill worker's card the domain within which
its blocks are to stay (`kv_transfer_domain`). Both together make the rule for the decode worker of its prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

import msgspec

TAINT_PREFIX: Final = "dynamo.topology/"
REQUIRED: Final = "required"
DEFAULT_WEIGHT: Final = 1.0  # of a preference whose card names none; the cost of a match is 0.47 of that of others


class Topology(Protocol):
    """The place of a worker by its card: `ModelRuntimeConfig`."""

    @property
    def topology_domains(self) -> Mapping[str, str]: ...

    @property
    def kv_transfer_domain(self) -> str | None: ...

    @property
    def kv_transfer_enforcement(self) -> str | None: ...

    @property
    def kv_transfer_preferred_weight(self) -> float | None: ...


class TransferRule(msgspec.Struct, frozen=True, gc=False):
    """Where a prompt's blocks may be sent: to workers that have `taint`."""

    taint: str
    is_required: bool
    weight: float = DEFAULT_WEIGHT  # of the preference, where the taint is not required


def topology_taints(topology: Topology) -> frozenset[str]:
    """Return the taints that stand for a worker's places: "dynamo.topology/DOMAIN=VALUE"."""
    return frozenset(_taint(domain, value) for domain, value in topology.topology_domains.items())


def transfer_rule(prefill: Topology) -> TransferRule | None:
    """Return the rule for the decode workers of a prefill worker's prompts; None: any may take them.

    A worker whose place in its transfer domain is unknown makes no rule. An enforcement that is not named is `required`.
    """
    domain = prefill.kv_transfer_domain
    value = None if domain is None else prefill.topology_domains.get(domain)
    if domain is None or not value:
        return None
    weight = prefill.kv_transfer_preferred_weight
    return TransferRule(
        _taint(domain, value),
        (prefill.kv_transfer_enforcement or REQUIRED) == REQUIRED,
        DEFAULT_WEIGHT if weight is None else weight,
    )


def _taint(domain: str, value: str) -> str:
    return f"{TAINT_PREFIX}{domain}={value}"
