"""The keys of a frontend with their limits and their usage, from its settings."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from dynamo.frontend.base.metrics.keys import KeyMetrics
from dynamo.frontend.parts.keys.cluster_limits import EVERY_NAMESPACE, ClusterLimits, SharedStore
from dynamo.frontend.parts.keys.key_store import KeyStore
from dynamo.frontend.parts.keys.limit_table import LimitTable
from dynamo.frontend.parts.keys.metering import UsageMeter
from dynamo.frontend.parts.keys.quotas import Quotas
from dynamo.frontend.parts.keys.usage_store import UsageStore
from dynamo.frontend.settings import FrontendSettings
from dynamo.runtime.discovery.base import Discovery
from dynamo.runtime.discovery.keys import encode_name
from dynamo.runtime.discovery.memory import MemoryDiscovery

__all__ = ["OpenedKeys", "open_cluster_limits", "open_keys"]

logger = logging.getLogger(__name__)


class OpenedKeys(NamedTuple):
    """All None where no route needs a key."""

    keys: KeyStore | None = None
    quotas: Quotas | None = None
    meter: UsageMeter | None = None


def open_keys(settings: FrontendSettings, metrics: KeyMetrics, table: LimitTable | None) -> OpenedKeys:
    """Read the keys, and open the file of what they use. `table`: of the group, None: this process is alone.

    Raises InvalidArgument for a file that cannot be used.
    """
    if not settings.key_sources.exist:
        return OpenedKeys()
    keys = KeyStore(settings.key_sources)
    store = None if settings.usage_db is None else UsageStore(Path(settings.usage_db).expanduser())
    spent = {} if store is None else store.spent()
    quotas = Quotas(lambda: keys.ring, table or LimitTable(), spent=spent)
    budgets = [*[key.budget for key in keys.ring.keys], *[project.budget for project in keys.ring.projects.values()]]
    if store is None and any(budget is not None for budget in budgets):
        logger.warning("budgets of API keys begin anew with this process: --usage-db FILE keeps what they have given")
    meter = UsageMeter(quotas, metrics, store, keep_days=settings.usage_keep_days, identities=lambda: keys.identities)
    return OpenedKeys(keys, quotas, meter)


def open_cluster_limits(settings: FrontendSettings, opened: OpenedKeys, store: Discovery) -> ClusterLimits | None:
    """Divide the limits of the keys with the other frontends; None where there are no keys, or no store for it."""
    keys, quotas = opened.keys, opened.quotas
    if keys is None or quotas is None or not settings.divide_limits:
        return None
    if not isinstance(store, SharedStore) or isinstance(store, MemoryDiscovery):  # which no other process sees
        return None
    return ClusterLimits(quotas, lambda: keys.identities, store, scope=_scope_of(settings))


def _scope_of(settings: FrontendSettings) -> str:
    """Return the segment of a record's key that says which namespaces a frontend serves."""
    if settings.namespace_prefix is not None:
        return encode_name(settings.namespace_prefix) + EVERY_NAMESPACE
    return EVERY_NAMESPACE if settings.namespace is None else encode_name(settings.namespace)
