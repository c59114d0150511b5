"""The few requests to a Kubernetes API server that discovery needs, through `kubernetes-asyncio`.

That library brings what is tedious about reaching a cluster (service accounts and their renewal, kubeconfig, client
certificates); answers are read here, as its models know nothing of our resource.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dynamo.errors import CannotConnect, DynamoException
from dynamo.runtime.discovery.http_stream import Lines, watch_over
from dynamo.runtime.discovery.kubernetes.records import GROUP, PLURAL, VERSION, ApiObject
from dynamo.settings.extras import install_command

if TYPE_CHECKING:
    import aiohttp

FIELD_MANAGER: Final = "dynamo-worker"
REQUEST_SECONDS: Final = 5.0
WATCH_SECONDS: Final = 240  # then the server ends a watch and the next one goes on from there
PAGE_OBJECTS: Final = 500  # of one answer: a list of thousands of workers is neither one document nor one long request
LONGEST_PAUSE_SECONDS: Final = 30.0  # of a Retry-After; a longer one is cut to this
TOO_MANY: Final = 429
GONE: Final = 410
NOT_FOUND: Final = 404


class KubernetesError(DynamoException):
    """The API server declined. `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Throttled(CannotConnect):
    """The API server has too much to do. `pause_seconds`: its Retry-After."""

    def __init__(self, pause_seconds: float) -> None:
        super().__init__(f"the Kubernetes API server answers {TOO_MANY}: it has too many requests")
        self.pause_seconds = pause_seconds


def retry_after(error: Exception) -> float:
    """Return the Retry-After of the server, 0 where an error has none."""
    return error.pause_seconds if isinstance(error, Throttled) else 0.0


@dataclass(frozen=True, slots=True)
class ObjectEvent:
    """One change of one object, or (`object` None) only a newer version of the collection."""

    deleted: bool
    object: ApiObject | None
    version: int


class KubernetesApi:
    """Methods raise `CannotConnect` when the server does not answer, and `KubernetesError` when it declines."""

    def __init__(self, namespace: str, configuration: Any = None) -> None:
        """`configuration`: of `kubernetes_asyncio.client`; None: the pod's service account, else the kubeconfig."""
        self._configuration = configuration
        self._namespace = namespace
        self._client: Any = None

    @property
    def where(self) -> str:
        return str(self._configuration.host) if self._configuration is not None else "the Kubernetes API server"

    async def open(self) -> None:
        """Raises CannotConnect when the extra is not installed, or the cluster's address is unknown."""
        try:
            from kubernetes_asyncio import client, config
        except ImportError as error:
            raise CannotConnect(
                "the kubernetes discovery backend needs the extra kubernetes: "
                f"{install_command('kubernetes')}; or choose another store with --discovery-backend"
            ) from error
        if self._configuration is None:
            found = client.Configuration()
            try:
                if os.environ.get("KUBERNETES_SERVICE_HOST"):
                    config.load_incluster_config(client_configuration=found)  # type: ignore[no-untyped-call]
                else:
                    await config.load_kube_config(client_configuration=found)
            except (config.ConfigException, OSError) as error:
                raise CannotConnect(
                    f"nothing says where the Kubernetes cluster is: {error}. Run in a pod with a service account, set "
                    "KUBECONFIG, or choose another store with --discovery-backend"
                ) from error
            self._configuration = found
        self._client = client.ApiClient(self._configuration)

    async def close(self) -> None:
        if self._client is not None:
            opened, self._client = self._client, None
            await opened.close()

    # -- requests ------------------------------------------------------------------------------------------------

    async def read_all(self, path: str, selector: str | None) -> tuple[list[ApiObject], int]:
        """Return the present objects of a collection, and the version at which this was true.

        All pages are of one version. Where the server has forgotten that one in between, the pages are read anew, and
        at the second time the collection is read as a whole.
        """
        for limit in (PAGE_OBJECTS, PAGE_OBJECTS, 0):
            try:
                return await self._pages(path, _selected(selector), limit)
            except KubernetesError as error:
                if error.status != GONE or not limit:
                    raise
        raise AssertionError("the last round returns or raises")

    async def _pages(self, path: str, query: list[tuple[str, str]], limit: int) -> tuple[list[ApiObject], int]:
        found: list[ApiObject] = []
        answer = await self._answer("GET", path, [*query, ("limit", str(limit))])
        while True:
            found += answer.get("items") or []
            following = (answer.get("metadata") or {}).get("continue")
            if not following:
                return found, version_of(answer)
            answer = await self._answer("GET", path, [*query, ("limit", str(limit)), ("continue", following)])

    async def apply(self, name: str, body: Mapping[str, object]) -> ApiObject:
        """Apply `body` to our resource, overriding other writers (server-side apply); return it as it is now."""
        query = [("fieldManager", FIELD_MANAGER), ("force", "true")]
        return await self._answer("PATCH", f"{self.resources}/{name}", query, body)

    async def delete(self, name: str) -> None:
        """Remove our resource; absent is fine."""
        try:
            await self._answer("DELETE", f"{self.resources}/{name}")
        except KubernetesError as error:
            if error.status != NOT_FOUND:
                raise

    @asynccontextmanager
    async def watch(self, path: str, selector: str | None, version: int) -> AsyncIterator[AsyncIterator[ObjectEvent]]:
        """Watch the changes of a collection after `version`, until the server ends the watch as it does every few
        minutes.

        Iterating raises `CannotConnect` when the stream broke, and `KubernetesError`, with `GONE` when `version` is too
        old.
        """
        import aiohttp

        query = [*_selected(selector), ("watch", "true"), ("resourceVersion", str(version))]
        query += [("allowWatchBookmarks", "true"), ("timeoutSeconds", str(WATCH_SECONDS))]
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                response = await self._send("GET", path, query, None)
            # Longer than the server's own limit: only a server that is gone without a word gets there.
            async with asyncio.timeout(WATCH_SECONDS + 30), response:
                if response.status != 200:
                    raise _declined(response, await response.read())
                watch_over(response)
                async with aclosing(_events(response)) as events:
                    yield events
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
            raise self._unreachable(error) from error

    @property
    def resources(self) -> str:
        """The collection of our resources."""
        return f"/apis/{GROUP}/{VERSION}/namespaces/{self._namespace}/{PLURAL}"

    @property
    def slices(self) -> str:
        return f"/apis/discovery.k8s.io/v1/namespaces/{self._namespace}/endpointslices"

    @property
    def pods(self) -> str:
        return f"/api/v1/namespaces/{self._namespace}/pods"

    async def _answer(
        self,
        method: str,
        path: str,
        query: list[tuple[str, str]] | None = None,
        body: Mapping[str, object] | None = None,
    ) -> ApiObject:
        import aiohttp

        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                async with await self._send(method, path, query or [], body) as response:
                    answer = await response.read()
            if not 200 <= response.status < 300:
                raise _declined(response, answer)
            return msgspec.json.decode(answer, type=dict[str, Any])
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
            raise self._unreachable(error) from error

    async def _send(
        self, method: str, path: str, query: list[tuple[str, str]], body: Mapping[str, object] | None
    ) -> aiohttp.ClientResponse:
        if self._client is None:
            raise CannotConnect("the connection to the Kubernetes API server is closed")
        headers = {"Accept": "application/json"}
        if method == "PATCH":
            headers["Content-Type"] = "application/apply-patch+yaml"  # JSON is YAML, too
        response: aiohttp.ClientResponse = await self._client.call_api(
            path,
            method,
            query_params=query,
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
            _preload_content=False,
        )
        return response

    def _unreachable(self, error: Exception) -> CannotConnect:
        why = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        return CannotConnect(f"{self.where} does not answer: {why}")


async def _events(response: aiohttp.ClientResponse) -> AsyncGenerator[ObjectEvent, None]:
    lines = Lines()
    async for data in response.content.iter_any():
        for line in lines.feed(data):
            message = msgspec.json.decode(line, type=dict[str, Any])
            found = message.get("object") or {}
            if message.get("type") == "ERROR":
                raise KubernetesError(int(found.get("code") or 500), str(found.get("message") or "the watch failed"))
            is_bookmark = message.get("type") == "BOOKMARK"
            yield ObjectEvent(message.get("type") == "DELETED", None if is_bookmark else found, version_of(found))


def _selected(selector: str | None) -> list[tuple[str, str]]:
    return [("labelSelector", selector)] if selector else []


def version_of(found: ApiObject) -> int:
    """Read a version: opaque by the specification, but a rising number in every known server (and by promise since
    1.35).
    """
    return int((found.get("metadata") or {}).get("resourceVersion") or 0)


def _declined(response: aiohttp.ClientResponse, body: bytes) -> Exception:
    status = response.status
    if status == TOO_MANY:
        asked = response.headers.get("Retry-After", "")
        return Throttled(min(float(asked), LONGEST_PAUSE_SECONDS) if asked.isdecimal() else 0.0)
    if status >= 500:
        return CannotConnect(f"the Kubernetes API server answers {status}")
    try:
        message = str(msgspec.json.decode(body, type=dict[str, object]).get("message") or "")
    except msgspec.MsgspecError:
        message = ""
    return KubernetesError(status, message or f"HTTP status {status}")
