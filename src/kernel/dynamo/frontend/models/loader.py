"""Fetches and reads the files of models, again and again until it works."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from dynamo.errors import DynamoException
from dynamo.frontend.base.metrics import FrontendMetrics
from dynamo.frontend.models.cards import CardBook, Group, GroupKey
from dynamo.frontend.models.changes import Changes
from dynamo.frontend.models.endpoint_clients import EndpointClients
from dynamo.frontend.models.instances import InstanceBook
from dynamo.protocol.records import ModelCard
from dynamo.runtime.base.forever import counted
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.discovery.base import Discovery
from dynamo.text.model import TextModel

logger = logging.getLogger(__name__)

RETRY_SECONDS: Final = (1, 2, 4, 8, 16, 30)  # then 30 again and again: the files may be on their way
CONCURRENT_LOADS: Final = 2  # models whose files are read at once

Load = Callable[[ModelCard, frozenset[str]], Awaitable[TextModel]]
"""From a card, and the hosts that its workers advertise, to its tokenizer and template. Raises `DynamoException`; it is
called again after a while."""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """What is known of the cluster: the store that has it, the cards, the workers behind them, and the way to each."""

    store: Discovery
    cards: CardBook
    instances: InstanceBook
    clients: EndpointClients
    changes: Changes
    # Groups whose cards have changed, until that was taken over.
    touched: dict[GroupKey, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Loading:
    """A group whose files are being fetched."""

    fingerprint: str
    task: asyncio.Task[None]
    last_error: str | None = None


class ModelLoader:
    """Loads groups side by side, and hands each over once its files are read and its endpoints are connected."""

    def __init__(
        self,
        load: Load,
        cluster: ClusterView,
        on_loaded: Callable[[Group, TextModel], None],
        *,
        metrics: FrontendMetrics,
        background: Background,
        concurrent_loads: int = CONCURRENT_LOADS,
    ) -> None:
        self._load, self._cluster, self._on_loaded = load, cluster, on_loaded
        self._metrics, self._background = metrics, background
        self._slots = asyncio.Semaphore(concurrent_loads)
        self._loading: dict[GroupKey, _Loading] = {}

    @property
    def is_busy(self) -> bool:
        """Whether files are being fetched or read."""
        return bool(self._loading)

    def last_error(self, key: GroupKey) -> str | None:
        """Return why a group could not be loaded so far; None when nothing failed."""
        loading = self._loading.get(key)
        return None if loading is None else loading.last_error

    def start(self, group: Group) -> None:
        """Load a group, unless that has begun."""
        if group.key not in self._loading:
            task = self._background.start(self._bring_up(group.key), f"frontend: load {group.key.model}")
            self._loading[group.key] = _Loading(group.fingerprint, task)

    def give_up_outdated(self, key: GroupKey, group: Group | None) -> None:
        """Stop loading what `key` no longer is. `group`: its members now, if any."""
        loading = self._loading.get(key)
        if loading is not None and (group is None or group.fingerprint != loading.fingerprint):
            loading.task.cancel()
            del self._loading[key]

    def forget_all(self) -> None:
        """Forget what is being loaded; its tasks end with their owner."""
        self._loading.clear()

    async def _bring_up(self, key: GroupKey) -> None:
        attempt, cards = 0, self._cluster.cards
        with counted(f"frontend: load {key.model}") as failed:
            while True:
                group = cards.group(key)
                if group is None:
                    return
                try:
                    hosts = await self._hosts_of(key)
                    async with self._slots:
                        text = await self._load(group.card, hosts)
                        await self._cluster.clients.connect(group.endpoints)
                    break
                except Exception as error:  # the boundary: a stranger's files may do anything to a parser
                    delay = RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)]
                    attempt += 1
                    self._failed(key, error, delay)
                    failed(error, delay)
                    await asyncio.sleep(delay)
        group = cards.group(key)  # it may have grown meanwhile; a new fingerprint would have cancelled this task
        self._loading.pop(key, None)
        if group is not None:
            self._on_loaded(group, text)

    def _failed(self, key: GroupKey, error: Exception, delay: float) -> None:
        self._metrics.models.load_failures.labels(key.model).inc()
        loading = self._loading.get(key)
        if loading is not None:
            loading.last_error = str(error) or type(error).__name__
        expected = isinstance(error, DynamoException | OSError | ValueError)
        logger.error(
            "model %s cannot be loaded, next attempt in %g s: %s",
            key.model,
            delay,
            error,
            exc_info=None if expected else error,
        )

    async def _hosts_of(self, key: GroupKey) -> frozenset[str]:
        """Return the hosts that a group's workers advertise; wait for the first record where files must be fetched."""
        cluster = self._cluster
        while (group := cluster.cards.group(key)) is not None:
            is_there = cluster.instances.count(group) > 0
            if is_there or not any("://" in ref.path for _, ref in group.card.files()):
                return cluster.instances.hosts(group.accepted)
            if (loading := self._loading.get(key)) is not None:
                loading.last_error = "its files lie at a worker that is not in the store yet"
            await cluster.changes.next()
        return frozenset()
