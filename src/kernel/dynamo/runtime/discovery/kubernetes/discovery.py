"""Discovery in a Kubernetes cluster: each worker's records in a custom resource, each pod's readiness as its lease.

There is no lease to renew: the cluster watches over pods, and a record counts while its pod is ready. So all of this runs
on the process's own event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final

from dynamo.errors import CannotConnect, InvalidArgument
from dynamo.runtime.base.settings import KubernetesSettings
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.discovery.base import LEASE_TTL_SECONDS, Change, matches
from dynamo.runtime.discovery.feed import ChangeFeed
from dynamo.runtime.discovery.keys import split_bucket
from dynamo.runtime.discovery.kubernetes.api import NOT_FOUND, KubernetesApi, KubernetesError
from dynamo.runtime.discovery.kubernetes.collection import FollowedCollection
from dynamo.runtime.discovery.kubernetes.health import KubernetesHealth
from dynamo.runtime.discovery.kubernetes.own import OwnResource
from dynamo.runtime.discovery.kubernetes.records import (
    KIND,
    SELECTOR,
    ApiObject,
    instance_id_of,
    ready_by_containers,
    ready_by_slices,
    records_of,
)
from dynamo.runtime.discovery.last_view import SettlingView

logger = logging.getLogger(__name__)

Ready = Callable[[Iterable[ApiObject]], set[str]]
"""From the objects of the readiness collection to the names of the resources that are ready."""


class KubernetesView:
    """Sends each watcher the difference from what it received last."""

    def __init__(
        self,
        resources: FollowedCollection,
        readiness: FollowedCollection,
        ready: Ready,
        health: KubernetesHealth,
        *,
        debounce_seconds: float,
    ) -> None:
        self._resources = resources
        self._readiness = readiness
        self._ready = ready
        self._health = health
        self._debounce_seconds = debounce_seconds
        self._view = SettlingView(self._settle)
        self._feeds: dict[ChangeFeed, str] = {}  # -> its prefix
        self._publish_timer: asyncio.TimerHandle | None = None
        self._closed = False

    def read(self, prefix: str) -> dict[str, bytes]:
        """Return what was published last, sorted by key."""
        return self._view.read(prefix)

    def subscribe(self, feed: ChangeFeed, prefix: str) -> None:
        """Give `feed` the snapshot, and every change from here on."""
        feed.open(self._view.read(prefix))
        self._feeds[feed] = prefix

    def unsubscribe(self, feed: ChangeFeed) -> None:
        """Give `feed` nothing more; idempotent."""
        self._feeds.pop(feed, None)

    def publish_soon(self) -> None:
        """Publish within the debounce time, together with what else changes until then."""
        if self._publish_timer is None and not self._closed:
            loop = asyncio.get_running_loop()
            self._publish_timer = loop.call_later(self._debounce_seconds, self.publish)

    def publish(self) -> None:
        """Send watchers the difference from the last view they received."""
        if self._publish_timer is not None:
            self._publish_timer.cancel()
            self._publish_timer = None
        ready = self._ready(self._readiness.objects.values())
        records: dict[str, bytes] = {}
        for name in sorted(self._resources.objects):
            if name in ready:
                records.update(records_of(self._resources.objects[name]))
        self._view.doubt(self._health.doubt_until)
        self._tell(self._view.resync(records, _now()))

    def _settle(self) -> None:
        self._view.doubt(self._health.doubt_until)
        self._tell(self._view.settle(_now()))

    def _tell(self, changes: list[Change]) -> None:
        if changes:
            for feed, prefix in self._feeds.items():
                if wanted := [change for change in changes if matches(prefix, change.key)]:
                    feed.post(wanted)
        self._view.arm()

    def stop(self) -> None:
        """Set no timer any more."""
        self._closed = True
        self._view.stop()
        if self._publish_timer is not None:
            self._publish_timer.cancel()

    def close(self) -> None:
        """End every watch."""
        for feed in self._feeds:
            feed.close()
        self._feeds.clear()


def _now() -> float:
    return asyncio.get_running_loop().time()


DEBOUNCE_SECONDS: Final = 0.5  # a rollout changes many pods at once; watchers receive them together
CLOSE_SECONDS: Final = 2.0  # for removing our resource; the cluster does it with the pod


class KubernetesDiscovery:
    """`base.Discovery` on the custom resources that the native system's `kubernetes` backend can share.

    Two promises are narrower than elsewhere: values are JSON, and `delete` removes one's own keys only, as a resource has
    one owner. While the API server does not answer it is as with etcd: `put` and `delete` note the intended records, watches stay
    open, and `get_prefix` answers with the last view.
    """

    def __init__(
        self,
        settings: KubernetesSettings,
        *,
        configuration: Any = None,
        debounce_seconds: float = DEBOUNCE_SECONDS,
        keep_seconds: float = LEASE_TTL_SECONDS,
    ) -> None:
        """`configuration`: of `kubernetes_asyncio.client`; None: the pod's service account, else the kubeconfig.

        `keep_seconds`: how long after a loss of the API server nothing that is missing counts as gone. Raises
        InvalidArgument naming a variable that is not set.
        """
        pod = {"POD_NAME": settings.pod_name, "POD_NAMESPACE": settings.pod_namespace, "POD_UID": settings.pod_uid}
        if missing := [name for name, value in pod.items() if not value]:
            raise InvalidArgument(
                f"the kubernetes discovery backend needs {', '.join(missing)}: give the pod's own data to the container "
                "(downward API) as /etc/podinfo or as variables, or choose another store with --discovery-backend"
            )
        by_slices = settings.mode == "pod"
        self._api = api = KubernetesApi(settings.pod_namespace or "", configuration)
        self._health = health = KubernetesHealth(api, keep_seconds=keep_seconds)
        self._resources = FollowedCollection(api, api.resources, None, health, on_change=self._on_resource)
        readiness_path = api.slices if by_slices else api.pods
        self._readiness = FollowedCollection(api, readiness_path, SELECTOR, health, on_change=self._on_readiness)
        self._own = OwnResource(settings, api, self._resources, health)
        self._view = KubernetesView(
            self._resources,
            self._readiness,
            ready_by_slices if by_slices else ready_by_containers,
            health,
            debounce_seconds=debounce_seconds,
        )
        self._work = Background()
        self._is_started = False
        self._closed = False

    @property
    def lease_id(self) -> int:
        return instance_id_of(self._own.name)

    # -- life ----------------------------------------------------------------------------------------------------

    def trouble(self) -> str | None:
        return self._health.trouble()

    async def start(self) -> None:
        if self._closed:
            raise RuntimeError("this discovery store is closed")
        if self._is_started:
            return
        try:
            await self._api.open()
            await self._api.delete(self._own.name)  # what a container that ran here before left behind
            await self._resources.read(is_start=True)
            await self._readiness.read(is_start=True)
        except (CannotConnect, KubernetesError) as error:
            await self._api.close()
            raise CannotConnect(_explained(error)) from error
        self._is_started = True
        self._view.publish()
        self._work.start(self._resources.follow(), "kubernetes: resources")
        self._work.start(self._readiness.follow(), "kubernetes: readiness")
        self._work.start(self._own.keep_repaired(), "kubernetes: repair")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._view.stop()
        await self._work.close()
        self._view.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._own.remove()
        except (TimeoutError, CannotConnect, KubernetesError) as error:
            logger.warning("%s %s stays until its pod is gone: %s", KIND, self._own.name, error or "no answer in time")
        await self._api.close()

    # -- records -------------------------------------------------------------------------------------------------

    async def put(self, key: str, value: bytes) -> None:
        self._check_open()
        await self._own.put(key, value)

    async def put_new(self, key: str, value: bytes) -> bool:
        self._check_open()
        return await self._own.put_new(key, value)

    async def delete(self, key: str) -> None:
        self._check_open()
        await self._own.delete(key)

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        self._check_open()
        split_bucket(prefix)
        await self._refresh()
        return self._view.read(prefix)

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[AsyncIterator[list[Change]]]:
        self._check_open()
        split_bucket(prefix)
        feed = ChangeFeed()
        try:
            await self._refresh()
            self._view.subscribe(feed, prefix)
            yield feed
        finally:
            self._view.unsubscribe(feed)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this discovery store is closed")
        if not self._is_started:
            raise RuntimeError("call start() first")

    # -- what changes --------------------------------------------------------------------------------------------

    async def _refresh(self) -> None:
        """Update the view, ahead of the watches; leave it unchanged while the server does not answer."""
        try:
            await self._resources.read(is_start=False)
            self._own.check()
            await self._readiness.read(is_start=False)
        except (CannotConnect, KubernetesError) as error:
            logger.debug("answered from the last view: %s", error)
        self._view.publish()

    def _on_resource(self, name: str | None) -> None:
        if name is None or name == self._own.name:
            self._own.check()
        self._view.publish_soon()

    def _on_readiness(self, _: str | None) -> None:
        self._view.publish_soon()


def _explained(error: Exception) -> str:
    """Explain why a start failed, and what to do about it."""
    advice = "or choose another store with --discovery-backend"
    if isinstance(error, KubernetesError) and error.status in (401, 403):
        advice = f"let the service account get, list, watch, create, patch and delete {KIND}, and list and watch \
endpointslices (container mode: pods); {advice}"
    elif isinstance(error, KubernetesError) and error.status == NOT_FOUND:
        advice = f"install the definition of the custom resource {KIND}; {advice}"
    return f"cannot use Kubernetes for discovery: {error}. Put that right: {advice}"
