"""What a key file holds: keys, projects and prices. Every record is checked when it is made from plain values."""

from __future__ import annotations

import enum
import ipaddress
from collections.abc import Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Annotated, Final

from msgspec import Meta, Struct, field

from dynamo.frontend.base.access import KeyRole, RouteGroup

__all__ = [
    "DEFAULT_BURST",
    "Budget",
    "KeyRecord",
    "KeyRing",
    "KeyRole",
    "LimitSet",
    "Network",
    "Period",
    "Price",
    "ProjectRecord",
    "Revocation",
    "RouteGroup",
]

DEFAULT_BURST: Final = 1 / 6  # of a limit per minute: what ten seconds allow may come at once

Count = Annotated[int, Meta(ge=1, le=10**15)]
Name = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]+$")]
KeyId = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
Hash = Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}$")]
Moment = Annotated[datetime, Meta(tz=True)]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Revocation(enum.StrEnum):
    """What becomes of running requests when their key is removed, disabled or expired."""

    LATER = "later"
    """They end by themselves."""
    NOW = "now"
    """They are cut."""


class Period(enum.StrEnum):
    """After which time a budget is whole again; days and months are those of UTC."""

    DAY = "day"
    MONTH = "month"
    TOTAL = "total"


class LimitSet(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The rates of a key, a project, or a key with a model; None: no limit."""

    requests_per_minute: Count | None = None
    requests_per_day: Count | None = None
    tokens_per_minute: Count | None = None
    input_tokens_per_minute: Count | None = None
    output_tokens_per_minute: Count | None = None
    concurrent: Count | None = None
    max_tokens_per_request: Count | None = None
    burst: Annotated[float, Meta(gt=0, le=1)] = DEFAULT_BURST
    """The part of each rate that may come at once; one request always may."""


class Budget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What may be used in a period: tokens, or money by the prices of the file."""

    period: Period
    tokens: Count | None = None
    money: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    hard: bool = False
    """A request gets no more output than the budget has left, and ends with the reason `length`."""

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.money is None):
            raise ValueError("a budget has either `tokens` or `money`")


class Price(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a model costs, for each million tokens, in the currency of the file."""

    input: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    output: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    cached: Annotated[float, Meta(ge=0, le=1e6)] | None = None  # None: as `input`


class ProjectRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What all keys of a project share."""

    limits: LimitSet | None = None
    budget: Budget | None = None


class KeyRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key, without the key itself."""

    id: KeyId
    hash: Hash
    name: Name | None = None
    project: Name | None = None
    role: KeyRole = KeyRole.USER
    enabled: bool = True
    revoke: Revocation = Revocation.LATER
    created: Moment | None = None
    expires: Moment | None = None
    previous_hash: Hash | None = None
    """The key before the last rotation, and until when it is still taken."""
    previous_expires: Moment | None = None
    models: tuple[Name, ...] | None = None
    """Names with `*` and `?`; None: every model."""
    routes: tuple[RouteGroup, ...] | None = None
    """None: every group but `metrics`."""
    cidrs: tuple[str, ...] | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    """The most that a request of this key may have, and what it has by default."""
    max_tokens: Count | None = None
    limits: LimitSet | None = None
    model_limits: Mapping[Name, LimitSet] = field(default_factory=dict)
    """The limits of each model that a pattern names; the first pattern that fits counts."""
    budget: Budget | None = None
    metadata: Mapping[Name, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.previous_hash is None) != (self.previous_expires is None):
            raise ValueError("`previous_hash` and `previous_expires` need each other")
        for cidr in self.cidrs or ():
            ipaddress.ip_network(cidr)  # raises ValueError that names it

    @property
    def owner(self) -> str:
        """Whose files, batches and stored responses it sees: those of its project, else its own."""
        return f"key {self.id}" if self.project is None else f"project {self.project}"

    def networks(self) -> Sequence[Network]:
        """Return the networks that it may be used from; empty: all."""
        return tuple(map(ipaddress.ip_network, self.cidrs or ()))

    def allows_group(self, group: RouteGroup) -> bool:
        """Return whether it may use the routes of a group."""
        if self.routes is None and self.role.only_inspects:
            return group is RouteGroup.METRICS
        if self.routes is None:
            return group is not RouteGroup.METRICS or self.role is KeyRole.ADMIN
        return group in self.routes

    def allows_model(self, name: str) -> bool:
        """Return whether it may use a model, or an adapter, of this name."""
        return self.models is None or any(fnmatchcase(name, pattern) for pattern in self.models)

    def limits_of(self, model: str) -> tuple[str, LimitSet] | None:
        """Return the pattern and limits for a model; None where there are none."""
        for pattern, limits in self.model_limits.items():
            if fnmatchcase(model, pattern):
                return pattern, limits
        return None


class KeyRing(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Everything that a key file holds."""

    keys: Annotated[tuple[KeyRecord, ...], Meta(max_length=100_000)] = ()
    projects: Mapping[Name, ProjectRecord] = field(default_factory=dict)
    prices: Mapping[Name, Price] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ids: set[str] = set()
        hashes: set[str] = set()
        for record in self.keys:
            if record.id in ids:
                raise ValueError(f"two keys have the id {record.id!r}")
            ids.add(record.id)
            for one in filter(None, (record.hash, record.previous_hash)):
                if one in hashes:
                    raise ValueError(f"two keys have the same hash; the second one is {record.id!r}")
                hashes.add(one)

    def find(self, id: str) -> KeyRecord | None:
        """Return the key with this id."""
        return next((record for record in self.keys if record.id == id), None)

    def price_of(self, model: str) -> Price | None:
        """Return the price of a model, from the first pattern that fits; None where there is none."""
        return next((price for pattern, price in self.prices.items() if fnmatchcase(model, pattern)), None)
