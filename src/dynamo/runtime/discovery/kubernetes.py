"""Discovery in a Kubernetes cluster: each worker's records in a custom resource, each pod's readiness as its lease.

There is no lease to renew: the cluster watches over pods, and a record counts while its pod is ready. So all of this runs
on the process's own event loop.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from dynamo.errors import CannotConnect, InvalidArgument
from dynamo.runtime.discovery.base import LEASE_TTL_SECONDS, Change, matches
from dynamo.runtime.discovery.feed import ChangeFeed
from dynamo.runtime.discovery.keys import split_bucket, split_key
from dynamo.runtime.discovery.kubernetes_api import GONE, NOT_FOUND, KubernetesApi, KubernetesError
from dynamo.runtime.discovery.kubernetes_records import (
    KIND,
    SELECTOR,
    check_record,
    instance_id_of,
    ready_by_containers,
    ready_by_slices,
    records_of,
    resource,
)
from dynamo.runtime.discovery.last_view import LastView
from dynamo.runtime.discovery.retry import Delays
from dynamo.runtime.settings import KubernetesSettings
from dynamo.runtime.tasks import Background

logger = logging.getLogger(__name__)

DEBOUNCE_SECONDS: Final = 0.5  # a rollout changes many pods at once; watchers receive them together
CLOSE_SECONDS: Final = 2.0  # for removing our resource; the cluster does it with the pod
CREATE_ATTEMPTS: Final = 20

Objects = dict[str, Mapping[str, Any]]


class _Collection:
    """One collection of the API server as it was last seen."""

    def __init__(self, path: str, selector: str | None) -> None:
        self.path, self.selector = path, selector
        self.objects: Objects = {}  # by name
        self.version = 0  # everything up to here is in `objects`
        self.reading = asyncio.Lock()


class KubernetesDiscovery:
    """`base.Discovery` on the custom resources that the native system's `kubernetes` backend can share.

    Two promises are narrower than elsewhere: values are JSON, and `delete` removes one's own keys only, as a resource has
    one owner. While the API server does not answer it is as with etcd: `put` and `delete` note what is wanted, watches stay
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
        self._settings = settings
        self._name = settings.resource_name
        self._lease_id = instance_id_of(self._name)
        self._api = KubernetesApi(settings.pod_namespace or "", configuration)
        self._resources = _Collection(self._api.resources, None)
        by_slices = settings.mode == "pod"
        self._readiness = _Collection(self._api.slices if by_slices else self._api.pods, SELECTOR)
        self._ready: Callable[[Any], set[str]] = ready_by_slices if by_slices else ready_by_containers
        self._debounce_seconds, self._keep_seconds = debounce_seconds, keep_seconds
        self._own: dict[str, bytes] = {}
        self._applied_version = 0  # of our resource as we wrote it last
        self._has_resource = False
        self._writing = asyncio.Lock()
        self._repair_wanted = asyncio.Event()
        self._view = LastView()
        self._feeds: dict[ChangeFeed, str] = {}  # -> its prefix
        self._publishing: asyncio.TimerHandle | None = None
        self._settling: asyncio.TimerHandle | None = None
        self._work = Background()
        self._is_lost = False
        self._is_started = False
        self._closed = False

    @property
    def lease_id(self) -> int:
        return self._lease_id

    # -- life ----------------------------------------------------------------------------------------------------

    def trouble(self) -> str | None:
        return f"{self._api.where} does not answer" if self._is_lost else None

    async def start(self) -> None:
        if self._closed:
            raise RuntimeError("this discovery store is closed")
        if self._is_started:
            return
        try:
            await self._api.open()
            await self._api.delete(self._name)  # what a container that ran here before left behind
            await self._read(self._resources, is_start=True)
            await self._read(self._readiness, is_start=True)
        except (CannotConnect, KubernetesError) as error:
            await self._api.close()
            raise CannotConnect(_explained(error)) from error
        self._is_started = True
        self._publish()
        self._work.start(self._follow(self._resources), "kubernetes: resources")
        self._work.start(self._follow(self._readiness), "kubernetes: readiness")
        self._work.start(self._repair(), "kubernetes: repair")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for timer in (self._publishing, self._settling):
            if timer is not None:
                timer.cancel()
        await self._work.close()
        for feed in self._feeds:
            feed.close()
        self._feeds.clear()
        try:
            if self._has_resource:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._api.delete(self._name)
        except (TimeoutError, CannotConnect, KubernetesError) as error:
            logger.warning("%s %s stays until its pod is gone: %s", KIND, self._name, error or "no answer in time")
        await self._api.close()

    # -- records -------------------------------------------------------------------------------------------------

    async def put(self, key: str, value: bytes) -> None:
        self._check_open()
        check_record(key, value)
        before = self._own.get(key)
        self._own[key] = value
        try:
            await self._write()
        except CannotConnect as error:
            self._postpone(key, error)
        except KubernetesError:
            if before is None:
                self._own.pop(key, None)
            else:
                self._own[key] = before
            raise

    async def put_new(self, key: str, value: bytes) -> bool:
        """Put a key that must be new; return whether this process keeps it. Two resources may both hold a key, so
        the server does not decide which came first. Each process writes, reads, and removes its own key when it
        finds another's: of processes that write at once, the last to read sees all keys, so two never stay.
        """
        self._check_open()
        check_record(key, value)
        for _ in range(CREATE_ATTEMPTS):
            if key in self._own or await self._is_held_by_others(key):
                return False
            self._own[key] = value
            try:
                await self._write()
                if not await self._is_held_by_others(key):
                    return True
            except BaseException:
                self._withdraw(key)
                raise
            del self._own[key]
            await self._write()
            await asyncio.sleep(random.uniform(0, 0.2))
        raise KubernetesError(409, f"{key}: several processes create it at once, again and again")

    async def delete(self, key: str) -> None:
        self._check_open()
        split_key(key)
        if self._own.pop(key, None) is None:
            return
        try:
            await self._write()
        except CannotConnect as error:
            self._postpone(key, error)

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
            feed.open(self._view.read(prefix))
            self._feeds[feed] = prefix
            yield feed
        finally:
            self._feeds.pop(feed, None)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this discovery store is closed")
        if not self._is_started:
            raise RuntimeError("call start() first")

    async def _is_held_by_others(self, key: str) -> bool:
        found, _ = await self._api.read_all(self._resources.path, None)
        return any(each["metadata"]["name"] != self._name and key in records_of(each) for each in found)

    async def _write(self) -> None:
        """Apply `_own` to our resource."""
        async with self._writing:
            body = resource(
                self._name,
                pod_name=self._settings.pod_name or "",
                pod_uid=self._settings.pod_uid or "",
                own=self._own,
            )
            self._has_resource = True
            self._applied_version = await self._api.apply(self._name, body)
        self._hear()
        self._look_at_own()  # it may have been removed while we wrote

    def _withdraw(self, key: str) -> None:
        """Take a key back that may have been written."""
        self._own.pop(key, None)
        self._repair_wanted.set()

    def _postpone(self, key: str, error: CannotConnect) -> None:
        logger.warning("the record %s is made right when the API server answers again: %s", key, error)
        self._repair_wanted.set()

    async def _repair(self) -> None:
        delays = Delays()
        while True:
            await self._repair_wanted.wait()
            self._repair_wanted.clear()
            try:
                await self._write()
                delays = Delays()
                await asyncio.sleep(next(delays))  # another writer that keeps writing must not keep us busy
                continue
            except CannotConnect as error:
                self._on_store_lost(error)
            except KubernetesError as error:
                logger.warning("the API server declines our %s: %s", KIND, error)
            except Exception:  # the boundary: a defect in here must not end what keeps our records
                logger.exception("writing our %s failed", KIND)
            self._repair_wanted.set()
            await asyncio.sleep(next(delays))

    # -- following -----------------------------------------------------------------------------------------------

    async def _read(self, collection: _Collection, *, is_start: bool) -> None:
        """Read a collection as a whole. `is_start`: no watch runs, and what is read is the truth."""
        async with collection.reading:
            found, version = await self._api.read_all(collection.path, collection.selector)
            self._hear()
            if is_start or version >= collection.version:  # else its watch was faster
                collection.objects = {each["metadata"]["name"]: each for each in found}
                collection.version = version
                self._look_at_own()

    async def _refresh(self) -> None:
        """Update the view, ahead of the watches; leave it unchanged while the server does not answer."""
        try:
            await self._read(self._resources, is_start=False)
            await self._read(self._readiness, is_start=False)
        except (CannotConnect, KubernetesError) as error:
            logger.debug("answered from the last view: %s", error)
        self._publish()

    async def _follow(self, collection: _Collection) -> None:
        delays = Delays()
        while True:
            try:
                api = self._api
                async with api.watch(collection.path, collection.selector, collection.version) as events:
                    delays = Delays()
                    async for event in events:
                        self._hear()
                        if event.version <= collection.version:
                            continue  # a reading was ahead of the watch
                        collection.version = event.version
                        if event.object is not None:
                            self._take(collection, event.object, deleted=event.deleted)
                continue  # the server ends a watch now and then
            except CannotConnect as error:
                self._on_store_lost(error)
            except KubernetesError as error:
                if error.status != GONE:
                    logger.warning("the API server declines a watch: %s", error)
            except Exception:  # the boundary: a process must not go blind for ever
                logger.exception("following %s failed; trying again", collection.path)
            await asyncio.sleep(next(delays))
            await self._start_again(collection)

    async def _start_again(self, collection: _Collection) -> None:
        try:
            await self._read(collection, is_start=True)
            self._publish_soon()
        except (CannotConnect, KubernetesError) as error:
            logger.debug("%s cannot be read yet: %s", collection.path, error)

    def _take(self, collection: _Collection, found: Mapping[str, Any], *, deleted: bool) -> None:
        name = found["metadata"]["name"]
        if deleted:
            collection.objects.pop(name, None)
        else:
            collection.objects[name] = found
        if collection is self._resources and name == self._name:
            self._look_at_own()
        self._publish_soon()

    def _look_at_own(self) -> None:
        """Somebody may have removed our resource, or records in it."""
        if not self._own or self._writing.locked() or self._resources.version < self._applied_version:
            return  # what was seen last is older than what we wrote last
        found = records_of(self._resources.objects.get(self._name, {}))
        if not self._own.keys() <= found.keys():
            logger.warning("%s %s was removed or emptied by somebody else; writing it again", KIND, self._name)
            self._repair_wanted.set()

    # -- the view ------------------------------------------------------------------------------------------------

    def _publish_soon(self) -> None:
        if self._publishing is None and not self._closed:
            loop = asyncio.get_running_loop()
            self._publishing = loop.call_later(self._debounce_seconds, self._publish)

    def _publish(self) -> None:
        """Send watchers the difference from the last view they received."""
        if self._publishing is not None:
            self._publishing.cancel()
            self._publishing = None
        ready = self._ready(self._readiness.objects.values())
        records: dict[str, bytes] = {}
        for name in sorted(self._resources.objects):
            if name in ready:
                records.update(records_of(self._resources.objects[name]))
        self._tell(self._view.resync(records, self._now()))

    def _settle(self) -> None:
        self._tell(self._view.settle(self._now()))

    def _tell(self, changes: list[Change]) -> None:
        if changes:
            for feed, prefix in self._feeds.items():
                if wanted := [change for change in changes if matches(prefix, change.key)]:
                    feed.post(wanted)
        if self._settling is not None:
            self._settling.cancel()
            self._settling = None
        if (at := self._view.settles_at) is not None and not self._closed:
            self._settling = asyncio.get_running_loop().call_at(at, self._settle)

    def _hear(self) -> None:
        if self._is_lost:
            self._is_lost = False
            self._view.doubt(self._now() + self._keep_seconds)
            logger.info("%s is back", self._api.where)

    def _on_store_lost(self, error: CannotConnect) -> None:
        if not self._is_lost:
            self._is_lost = True
            logger.warning("%s; going on with what was last known", error)
        self._view.doubt(self._now() + self._keep_seconds)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _explained(error: Exception) -> str:
    """Explain why a start failed, and what to do about it."""
    advice = "or choose another store with --discovery-backend"
    if isinstance(error, KubernetesError) and error.status in (401, 403):
        advice = f"let the service account get, list, watch, create, patch and delete {KIND}, and list and watch \
endpointslices (container mode: pods); {advice}"
    elif isinstance(error, KubernetesError) and error.status == NOT_FOUND:
        advice = f"install the definition of the custom resource {KIND}; {advice}"
    return f"cannot use Kubernetes for discovery: {error}. Put that right: {advice}"
