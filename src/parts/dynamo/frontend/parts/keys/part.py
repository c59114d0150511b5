"""API keys as a part: a door in front of the routes, limits and budgets, and what was used."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, NamedTuple
from urllib.parse import parse_qs

from starlette.types import ASGIApp

from dynamo.errors import InvalidArgument
from dynamo.frontend.base.access import Access, Caller
from dynamo.frontend.base.asgi import Receive, Scope, Send, reply, reply_rejected
from dynamo.frontend.base.settings.keys import KeySettings
from dynamo.frontend.http.routes import GuardedRoute, Site
from dynamo.frontend.http.settings import HttpSettings
from dynamo.frontend.models.settings import ModelSettings
from dynamo.frontend.parts.keys.charging import KeyCharges, PlaceShares
from dynamo.frontend.parts.keys.cluster_limits import EVERY_NAMESPACE, ClusterLimits, SharedStore
from dynamo.frontend.parts.keys.door import KeyDoor
from dynamo.frontend.parts.keys.key_store import KeyStore
from dynamo.frontend.parts.keys.limit_table import LimitTable
from dynamo.frontend.parts.keys.metering import UsageMeter
from dynamo.frontend.parts.keys.metrics import FAMILIES, KeyMetrics
from dynamo.frontend.parts.keys.quotas import Quotas
from dynamo.frontend.parts.keys.usage_store import UsageQuery, UsageStore, UsageUnavailable
from dynamo.frontend.parts.part import Kernel, Part
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.escaping import json_line
from dynamo.runtime.discovery.base import Discovery
from dynamo.runtime.discovery.keys import encode_name
from dynamo.runtime.discovery.memory import MemoryDiscovery

logger = logging.getLogger(__name__)


class Keys(KeyCharges, Part):
    """The keys in service, their limits, and what they use."""

    name: ClassVar[str] = "keys"
    families = FAMILIES
    outlives_models: ClassVar[bool] = True

    def __init__(self, settings: KeySettings, kernel: Kernel, table: LimitTable | None) -> None:
        """`table`: of the group, None: this process is alone. Raises InvalidArgument for a file that cannot be used."""
        self._settings, self._kernel = settings, kernel
        self._metrics = KeyMetrics(kernel.pipeline.metrics.families)
        self.store, self.quotas, self.meter = open_keys(settings, self._metrics, table)
        super().__init__(self.quotas, PlaceShares(kernel.pipeline.admission, kernel.shares))
        self._cluster_limits = open_cluster_limits(kernel.settings, self.store, self.quotas, kernel.runtime.discovery)
        self.store.on_look.append(self._cut_revoked)
        kernel.shares.know_owners(lambda: self.store.owners)

    def routes(self) -> Sequence[GuardedRoute]:
        usage = self._kernel.same_site(UsageRoute(self.meter))
        return (GuardedRoute("/admin/usage", usage, "GET", access=Access.ADMIN),)

    def in_front_of(self, app: ASGIApp, site: Site) -> ASGIApp:
        """Return `app` behind a door. For clients it is open where there are keys of admins alone, but for the admin routes."""
        sources, open_paths = self.store.sources, site.paths(Access.OPEN)
        if site.is_for_operators:
            is_open = (lambda path: path in open_paths) if self.store.protects_admin else (lambda _: True)
        elif sources.protect_clients:
            is_open = open_paths.__contains__
        else:
            is_open = partial(_is_no_admins, site.is_admins())
        return KeyDoor(
            app,
            self.store,
            is_open=is_open,
            dialect_of=site.dialects.of,
            trusted=self._settings.trusted_proxies,
            refused=self._refused,
        )

    def open_paths(self) -> Collection[str] | None:
        if not self.store.sources.protect_clients:
            return None
        probes = ("/health", "/live", "/ready")
        return (*probes, "/metrics") if self._settings.open_metrics else probes

    async def start(self) -> None:
        self.store.start()
        self.meter.start()
        if self._cluster_limits is not None:
            await self._cluster_limits.start()

    async def aclose(self) -> None:
        await self.meter.aclose()  # after the requests have ended, and before their limits go
        if self._cluster_limits is not None:
            await self._cluster_limits.aclose()
        self.quotas.table.close()
        await self.store.aclose()

    def _refused(self, caller: Caller | None, rejected: RequestRejected) -> None:
        self._metrics.refused(None if caller is None else caller.id, rejected.code or "")

    def _cut_revoked(self) -> None:
        """End the requests of keys that were taken away, where their record has that."""
        if self.store.cuts_requests:
            cut = self._kernel.pipeline.register.end_revoked(self.store.is_gone)
            if cut:
                logger.warning("%d request(s) were cut, because their key was revoked", cut)


def _is_no_admins(is_admins: Callable[[str], bool], path: str) -> bool:
    return not is_admins(path)


class OpenedKeys(NamedTuple):
    """What the part works with."""

    keys: KeyStore
    quotas: Quotas
    meter: UsageMeter


def open_keys(settings: KeySettings, metrics: KeyMetrics, table: LimitTable | None) -> OpenedKeys:
    """Read the keys, and open the file of what they use. `table`: of the group, None: this process is alone.

    Raises InvalidArgument for a file that cannot be used.
    """
    keys = KeyStore(settings.key_sources)
    store = None if settings.usage_db is None else UsageStore(Path(settings.usage_db).expanduser())
    spent = {} if store is None else store.spent()
    quotas = Quotas(lambda: keys.ring, table or LimitTable(), spent=spent)
    budgets = [*[key.budget for key in keys.ring.keys], *[project.budget for project in keys.ring.projects.values()]]
    if store is None and any(budget is not None for budget in budgets):
        logger.warning("budgets of API keys begin anew with this process: DYN_USAGE_DB=FILE keeps what they have given")
    meter = UsageMeter(quotas, metrics, store, keep_days=settings.usage_keep_days, identities=lambda: keys.identities)
    return OpenedKeys(keys, quotas, meter)


def open_cluster_limits(
    settings: HttpSettings, keys: KeyStore, quotas: Quotas, store: Discovery
) -> ClusterLimits | None:
    """Divide the limits of the keys with the other frontends; None where there is no store for it."""
    if not settings.divide_limits:
        return None
    if not isinstance(store, SharedStore) or isinstance(store, MemoryDiscovery):  # which no other process sees
        return None
    return ClusterLimits(quotas, lambda: keys.identities, store, scope=_scope_of(settings))


def _scope_of(settings: ModelSettings) -> str:
    """Return the segment of a record's key that names the namespaces of a frontend."""
    if settings.namespace_prefix is not None:
        return encode_name(settings.namespace_prefix) + EVERY_NAMESPACE
    return EVERY_NAMESPACE if settings.namespace is None else encode_name(settings.namespace)


DEFAULT_SECONDS: Final = 7 * 86_400
_KNOWN: Final = frozenset({"group_by", "since", "until"})


class UsageRoute:
    """Sums of a span of time (`since`, `until`: seconds since the epoch), grouped by `group_by`, separated by commas."""

    def __init__(self, meter: UsageMeter) -> None:
        self._meter = meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            query = _query_of(scope["query_string"].decode("latin-1"))
            try:
                data = await self._meter.rows(query)
            except InvalidArgument as error:
                raise RequestRejected(400, str(error), param="group_by") from None
            except UsageUnavailable as error:
                raise RequestRejected(503, str(error)) from None
        except RequestRejected as rejected:
            await reply_rejected(send, rejected)
            return
        body = {"object": "list", "since": query.since * 60, "until": query.until * 60, "data": data}
        await reply(send, 200, json_line(body))


def _query_of(text: str) -> UsageQuery:
    given = {name: values[-1] for name, values in parse_qs(text, keep_blank_values=True).items()}
    for name in given:
        if name not in _KNOWN:
            raise RequestRejected(
                400, f"{name[:64]} is not a parameter; there are {', '.join(sorted(_KNOWN))}", param=name[:64]
            )
    now = int(time.time())
    until = _seconds(given, "until", now + 60)
    since = _seconds(given, "since", until - DEFAULT_SECONDS)
    groups = tuple([group.strip() for group in given.get("group_by", "key").split(",")])
    if len(set(groups)) != len(groups):
        raise RequestRejected(400, "group_by names a group twice", param="group_by")
    return UsageQuery(groups, since // 60, -(-until // 60))


def _seconds(given: dict[str, str], name: str, default: int) -> int:
    value = given.get(name)
    if value is None:
        return max(0, default)
    if not (value.isascii() and value.isdecimal() and len(value) <= 12):
        raise RequestRejected(400, f"{name} must be seconds since the epoch, got {value[:64]!r}", param=name)
    return int(value)
