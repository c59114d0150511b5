"""Where the list of pods comes from, each as long as the picker runs: a flag, a file that is read again, Kubernetes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from dynamo.errors import CannotConnect, InvalidArgument
from dynamo.picker.pods.listing import MAX_FILE_BYTES, MAX_PODS, PodRecord, pod_of_kubernetes, read_pod_file
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.discovery.base import LEASE_TTL_SECONDS
from dynamo.runtime.discovery.kubernetes.api import KubernetesApi, KubernetesError
from dynamo.runtime.discovery.kubernetes.collection import FollowedCollection
from dynamo.runtime.discovery.kubernetes.health import KubernetesHealth

logger = logging.getLogger(__name__)

FILE_SECONDS: Final = 1.0  # between two readings of a file

TakePods = Callable[[Sequence[PodRecord]], None]


class PodSource(Protocol):
    """One list of pods, and its changes."""

    async def start(self, take: TakePods) -> None:
        """Call `take` with the pods, and again with each change. Raises InvalidArgument and CannotConnect."""
        ...

    async def aclose(self) -> None:
        """Call it no more. Idempotent."""
        ...

    def trouble(self) -> str | None:
        """Return why the list may be out of date; None: it is not."""
        ...


class ListedPods:
    """The pods of a flag."""

    def __init__(self, pods: Sequence[PodRecord]) -> None:
        self._pods = pods

    async def start(self, take: TakePods) -> None:
        """Report the pods, and their changes. See `PodSource`."""
        take(self._pods)

    async def aclose(self) -> None:
        """Do nothing."""

    def trouble(self) -> str | None:
        """Return None: a flag does not change."""
        return None


class PodsOfFile:
    """The pods of a file. A file that cannot be read leaves the pods as they are, with one warning."""

    def __init__(self, file: Path, *, seconds: float = FILE_SECONDS) -> None:
        self._file, self._seconds = file, seconds
        self._background = Background()
        self._stamp: tuple[int, int, int] | None = None
        self._trouble: str | None = None

    async def start(self, take: TakePods) -> None:
        """Read the file, and follow it. Raises InvalidArgument where it cannot be read at the start."""
        try:
            found = await asyncio.to_thread(self._read)
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"--pods-file {self._file}: {error}") from error
        take(found or ())

        async def follow() -> None:
            while True:
                await asyncio.sleep(self._seconds)
                if (changed := await asyncio.to_thread(self._changed)) is not None:
                    take(changed)

        self._background.keep(follow, "the file of pods")

    async def aclose(self) -> None:
        """End. Idempotent."""
        await self._background.close()

    def trouble(self) -> str | None:
        """Return why the list may be out of date."""
        return self._trouble

    def _changed(self) -> tuple[PodRecord, ...] | None:
        try:
            found = self._read()
        except (OSError, ValueError) as error:
            if self._trouble != str(error):
                self._trouble = str(error)
                logger.warning("the pods stay as they are: %s: %s", self._file, error)
            return None
        self._trouble = None
        return found

    def _read(self) -> tuple[PodRecord, ...] | None:
        """Return the pods; None: the file has not changed. Raises OSError and ValueError."""
        status = self._file.stat()
        stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
        if stamp == self._stamp and self._trouble is None:
            return None
        if status.st_size > MAX_FILE_BYTES:
            raise ValueError(f"longer than {MAX_FILE_BYTES} bytes")
        found = read_pod_file(self._file.read_bytes())
        self._stamp = stamp
        return found


class PodsOfKubernetes:
    """The ready pods with some labels in one namespace. While the API server is silent the pods stay as they were."""

    def __init__(self, namespace: str, selector: str, port: int, role_label: str, *, configuration: Any = None) -> None:
        """`configuration`: of `kubernetes_asyncio.client`; None: the pod's service account, else the kubeconfig."""
        self._api = KubernetesApi(namespace, configuration)
        self._health = KubernetesHealth(self._api, keep_seconds=LEASE_TTL_SECONDS)
        self._pods = FollowedCollection(
            self._api, self._api.pods, selector, self._health, on_change=lambda _: self._report()
        )
        self._port, self._role_label = port, role_label
        self._background = Background()
        self._take: TakePods | None = None

    async def start(self, take: TakePods) -> None:
        """Report the pods, and their changes. See `PodSource`."""
        self._take = take
        try:
            await self._api.open()
            await self._pods.read(is_start=True)
        except (CannotConnect, KubernetesError) as error:
            await self._api.close()
            raise CannotConnect(
                f"cannot follow the pods: {error}. The service account must be able to get, list and watch pods"
            ) from error
        self._report()
        self._background.start(self._pods.follow(), "kubernetes: pods")

    async def aclose(self) -> None:
        """End. Idempotent."""
        await self._background.close()
        await self._api.close()

    def trouble(self) -> str | None:
        """Return why the list may be out of date."""
        return self._health.trouble()

    def _report(self) -> None:
        found = dict[str, PodRecord]()
        for each in self._pods.objects.values():
            if (record := pod_of_kubernetes(each, self._port, self._role_label)) is not None:
                found[record.address] = record  # an address is one pod's: of two records one is on its way out
        if self._take is not None:
            self._take(list(found.values())[:MAX_PODS])
