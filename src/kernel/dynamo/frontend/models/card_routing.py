"""How the workers of one group are chosen: as their card sets in `router_config`, else as the frontend is set."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple

import msgspec

from dynamo.errors import InvalidArgument
from dynamo.frontend.models.cards import Group, GroupKey
from dynamo.placement import Policy, RouterMode
from dynamo.router.kv.domains import KvDomains
from dynamo.router.kv.native_config import FORMER_MEMBERS, NativeKvConfig, checked, not_built, settings_of_native
from dynamo.router.kv.settings import KvRouterSettings

logger = logging.getLogger(__name__)

MAX_CONFIGS: Final = 64  # different ones, of all cards of a frontend's life; each may follow KV events of its own


class GroupRouting(NamedTuple):
    """How the workers of a group are chosen."""

    new_policy: Callable[[], Policy]  # makes a policy, where `kv` does not
    kv: KvDomains | None = None  # in the kv mode: the placements, which are shared


RoutingMaker = Callable[[RouterMode, KvRouterSettings], GroupRouting]
"""From a mode and its settings to the choice. Raises InvalidArgument for a policy that cannot be made."""


class CardRouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The member `router_config` of a card."""

    router_mode: str | None = None  # None: the frontend's
    kv_router_config: dict[str, Any] | None = None
    load_threshold_config: dict[str, Any] | None = None
    enforce_disagg: bool = False  # has no effect, here and there
    session_affinity_ttl_secs: float | None = None
    session_affinity_mode: str = "hard"


def read_router_config(
    value: object, mode: RouterMode, over: KvRouterSettings
) -> tuple[RouterMode, KvRouterSettings, list[str]]:
    """Return the mode and the settings of a card, over those of the frontend, and what it sets that is not done.

    Raises ValueError naming the member that is unknown or wrong.
    """
    try:
        config = msgspec.convert(value, CardRouterConfig)
        mode = mode if config.router_mode is None else RouterMode.of(config.router_mode)
    except (msgspec.ValidationError, InvalidArgument) as error:
        raise ValueError(f"router_config: {error}") from error
    refused: list[str] = []
    limits = {name: it for name, it in (config.load_threshold_config or {}).items() if it is not None}
    refused += [f"load_threshold_config.{name}" for name in limits]
    if config.kv_router_config is not None:
        given = {
            name: it for name, it in config.kv_router_config.items() if name not in FORMER_MEMBERS and it is not None
        }
        if given.pop("router_policy_config", None) is not None:
            refused.append("kv_router_config.router_policy_config")  # a file of the worker's machine
        try:
            values = checked(msgspec.convert(given, NativeKvConfig))
        except (msgspec.ValidationError, ValueError) as error:
            raise ValueError(f"router_config.kv_router_config: {error}") from error
        refused += [f"kv_router_config.{asked}" for asked in not_built(values)]
        if values.router_queue_policy == "lcfs":
            values = msgspec.structs.replace(values, router_queue_policy=over.router_queue_policy)
        kept = {name: getattr(over, name) for name in ("router_prefill_policy", "router_decode_policy")}
        over = replace(settings_of_native(values, over), **kept)
    if config.session_affinity_ttl_secs is not None:
        if mode is RouterMode.KV:
            over = replace(
                over,
                router_session_affinity_ttl_secs=config.session_affinity_ttl_secs,
                router_session_affinity_mode=config.session_affinity_mode,
            )
        else:
            refused.append("session_affinity_ttl_secs")
    # The policy file is in it already, and one process may write one record of decisions only.
    over = replace(over, router_policy_config=None, decisions_path=None)
    try:
        return mode, over.settle({}), refused
    except ValueError as error:
        raise ValueError(f"router_config: {error}") from error


class CardRouting:
    """The choice of every group, made once: it holds until the group and what is served of it are gone."""

    def __init__(self, own: GroupRouting, mode: RouterMode, settings: KvRouterSettings, make: RoutingMaker) -> None:
        """`own`: by the frontend's `mode` and `settings`, for cards that set nothing."""
        self._own, self._mode, self._settings, self._make = own, mode, settings, make
        self._made: dict[bytes, GroupRouting] = {}  # by what cards set
        self._chosen: dict[GroupKey, GroupRouting] = {}  # of groups whose card sets something; bounded by the groups

    def of(self, group: Group) -> GroupRouting:
        """Return how the workers of a group are chosen."""
        found = self._chosen.get(group.key)
        if found is None:
            given = group.card.router_config
            if not given:
                return self._own
            found = self._chosen[group.key] = self._choose(group, given)
        return found

    def follow(self, key: GroupKey, group: Group | None) -> None:
        """Take over the workers of a group (None: it has none) before a request can be placed among them."""
        kv = None if group is None else self.of(group).kv
        for each in self.domains:
            if each is kv and group is not None:
                each.update(key, each.key(key.namespace, key.role, group.card), group.accepted)
            else:
                each.remove(key)

    def forget(self, key: GroupKey) -> None:
        """Forget the choice of a group that has gone."""
        self._chosen.pop(key, None)

    @property
    def domains(self) -> list[KvDomains]:
        """The domains of every choice that was made, the frontend's own first."""
        return [made.kv for made in (self._own, *self._made.values()) if made.kv is not None]

    def _choose(self, group: Group, given: object) -> GroupRouting:
        model = group.key.model
        written = msgspec.json.encode(given, order="deterministic")
        if (found := self._made.get(written)) is not None:
            return found
        try:
            mode, settings, refused = read_router_config(given, self._mode, self._settings)
            if len(self._made) >= MAX_CONFIGS:
                raise ValueError(f"router_config: more than {MAX_CONFIGS} different ones were registered here")
            made = self._make(mode, settings)
        except (ValueError, InvalidArgument) as error:
            logger.error(
                "model %s: the card's %s; its %s workers are routed by this frontend's flags",
                model,
                error,
                group.key.role,
            )
            return self._own
        if refused:
            logger.error("model %s: of the card's router_config this is not done: %s", model, ", ".join(refused))
        logger.info("model %s: its %s workers are routed by their card: %s", model, group.key.role, mode.value)
        self._made[written] = made
        return made
