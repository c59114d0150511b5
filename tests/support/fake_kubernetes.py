"""A fake of the Kubernetes API server: as much of it as discovery uses, and nothing else is promised.

Honest in what matters there: one rising version for all objects, lists that say which version they are, watches from a
version on with bookmarks, `410 Gone` for a version that is too old, label selectors, 404 and 403 as `Status` objects, and
the removal of what a deleted pod owned. Not like the real one: an apply replaces the whole object (there is one field
manager), schemas are not checked, and readiness is what the test says.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web

from support.patience import PATIENCE_SECONDS

NAMESPACE = "prod"
LABELS = {
    "nvidia.com/dynamo-discovery-backend": "kubernetes",
    "nvidia.com/dynamo-discovery-enabled": "true",
}
WORKERS, SLICES, PODS = "dynamoworkermetadatas", "endpointslices", "pods"
PATHS = {
    WORKERS: f"/apis/nvidia.com/v1alpha1/namespaces/{NAMESPACE}/{WORKERS}",
    SLICES: f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/{SLICES}",
    PODS: f"/api/v1/namespaces/{NAMESPACE}/{PODS}",
}


@functools.cache
def _authority() -> str:
    """A file with one authority. Without it every client reads the 150 of the machine, which no test needs."""
    path = Path(tempfile.mkdtemp(prefix="fake-kubernetes-")) / "ca.pem"
    atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
    trustme.CA().cert_pem.write_to_path(str(path))
    return str(path)


@pytest.fixture
def patient_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a store wait for this fake as long as a test does: they share a loop, which a busy machine runs seldom."""
    monkeypatch.setattr("dynamo.runtime.discovery.kubernetes.api.REQUEST_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr("dynamo.runtime.discovery.kubernetes.discovery.CLOSE_SECONDS", PATIENCE_SECONDS)


class FakeKubernetes:
    """One namespace. Objects by collection and name; `requests` is a journal of method and path."""

    def __init__(self, *, token: str = "secret") -> None:
        self._token = token
        self._version = 100
        self._oldest = 0  # changes up to here are forgotten
        self._objects: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in PATHS}
        self._history: list[tuple[int, str, str, dict[str, Any]]] = []  # version, collection, type, object
        self._changed = asyncio.Condition()
        self._streams: set[asyncio.Task[Any]] = set()
        self._runner: web.AppRunner | None = None
        self._denied: set[tuple[str, str]] = set()
        self.is_defined = True  # the definition of our custom resource
        self.port = 0
        self.requests: list[tuple[str, str]] = []
        self.applied_by: set[str] = set()

    def configuration(self) -> Any:
        import kubernetes_asyncio.client  # here: it takes a second, and only the worker that uses this pays

        found = kubernetes_asyncio.client.Configuration(host=f"http://127.0.0.1:{self.port}")
        found.ssl_ca_cert = _authority()
        found.api_key["BearerToken"] = f"Bearer {self._token}"
        return found

    def kubeconfig(self) -> str:
        """The text of a kubeconfig that leads here."""
        return json.dumps(  # JSON is YAML, too
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "fake",
                "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
                "clusters": [{"name": "fake", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
                "users": [{"name": "fake", "user": {"token": self._token}}],
            }
        )

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen; on the same port as before, after a `stop`."""
        app = web.Application()
        for collection, path in PATHS.items():
            app.router.add_get(path, self._handler(self._list_or_watch, collection))
            app.router.add_route("PATCH", path + "/{name}", self._handler(self._apply, collection))
            app.router.add_delete(path + "/{name}", self._handler(self._delete, collection))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Refuse connections, and cut those there are; objects stay."""
        for stream in list(self._streams):
            stream.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # -- what a cluster does -----------------------------------------------------------------------------------------

    async def set_pod(self, name: str, *, ready: bool = True, container: str = "main") -> None:
        """A pod of the service, and whether it is ready."""
        pod = self._objects[PODS].get(name) or {
            "metadata": {"name": name, "uid": f"uid-{name}", "labels": LABELS},
            "status": {"containerStatuses": []},
        }
        statuses = [each for each in pod["status"]["containerStatuses"] if each["name"] != container]
        pod = {**pod, "status": {"containerStatuses": [*statuses, {"name": container, "ready": ready}]}}
        await self._store(PODS, name, pod)
        await self._sync_slice()

    async def delete_pod(self, name: str) -> None:
        """Remove a pod, and what it owned."""
        await self._remove(PODS, name)
        await self._sync_slice()
        for worker, found in list(self._objects[WORKERS].items()):
            if any(owner["uid"] == f"uid-{name}" for owner in found["metadata"].get("ownerReferences", ())):
                await self._remove(WORKERS, worker)

    async def leave_worker(self, name: str, endpoints: Mapping[str, Any]) -> None:
        """The custom resource of a pod, as a process left it that is no more."""
        metadata = {"name": name, "ownerReferences": [{"kind": "Pod", "name": name, "uid": f"uid-{name}"}]}
        await self._store(WORKERS, name, {"metadata": metadata, "spec": {"data": {"endpoints": dict(endpoints)}}})

    async def remove_workers(self) -> None:
        """Remove every custom resource, as somebody with too many rights may."""
        for name in list(self._objects[WORKERS]):
            await self._remove(WORKERS, name)

    def forget(self) -> None:
        """Keep no change up to now: who wants one is told 410."""
        self._oldest = self._version
        self._history.clear()

    def deny(self, collection: str, method: str) -> None:
        self._denied.add((collection, method))

    def workers(self) -> dict[str, dict[str, Any]]:
        return dict(self._objects[WORKERS])

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a change has made the condition true."""
        async with asyncio.timeout(PATIENCE_SECONDS), self._changed:
            await self._changed.wait_for(condition)

    async def _sync_slice(self) -> None:
        endpoints = [
            {
                "targetRef": {"kind": "Pod", "name": name},
                "conditions": {"ready": all(each["ready"] for each in pod["status"]["containerStatuses"])},
            }
            for name, pod in self._objects[PODS].items()
        ]
        await self._store(
            SLICES, "workers-abc", {"metadata": {"name": "workers-abc", "labels": LABELS}, "endpoints": endpoints}
        )

    # -- objects -------------------------------------------------------------------------------------------------

    async def _store(self, collection: str, name: str, found: Mapping[str, Any]) -> dict[str, Any]:
        kind = "MODIFIED" if name in self._objects[collection] else "ADDED"
        self._version += 1
        stored = {**found, "metadata": {**found["metadata"], "resourceVersion": str(self._version)}}
        self._objects[collection][name] = stored
        await self._record(collection, kind, stored)
        return stored

    async def _remove(self, collection: str, name: str) -> None:
        self._version += 1
        found = self._objects[collection].pop(name)
        gone = {**found, "metadata": {**found["metadata"], "resourceVersion": str(self._version)}}
        await self._record(collection, "DELETED", gone)

    async def _record(self, collection: str, kind: str, found: dict[str, Any]) -> None:
        async with self._changed:
            self._history.append((self._version, collection, kind, found))
            self._changed.notify_all()

    # -- HTTP ----------------------------------------------------------------------------------------------------

    def _handler(self, handle: Any, collection: str) -> Any:
        async def handler(request: web.Request) -> web.StreamResponse:
            self.requests.append((request.method, request.path))
            if request.headers.get("Authorization") != f"Bearer {self._token}":
                return status(401, "Unauthorized")
            if (collection, request.method) in self._denied:
                return status(
                    403, f'{collection} is forbidden: user cannot {request.method.lower()} resource "{collection}"'
                )
            if collection == WORKERS and not self.is_defined:
                return status(404, "the server could not find the requested resource")
            answer: web.StreamResponse = await handle(request, collection)
            return answer

        return handler

    async def _list_or_watch(self, request: web.Request, collection: str) -> web.StreamResponse:
        wanted = dict(each.split("=") for each in request.query.get("labelSelector", "").split(",") if each)

        def selects(found: Mapping[str, Any]) -> bool:
            labels = found["metadata"].get("labels", {})
            return all(labels.get(name) == value for name, value in wanted.items())

        if request.query.get("watch") == "true":
            return await self._watch(request, collection, selects)
        items = [found for found in self._objects[collection].values() if selects(found)]
        return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": items})

    async def _watch(self, request: web.Request, collection: str, selects: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        version = int(request.query["resourceVersion"])
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)

        async def send(kind: str, found: Mapping[str, Any]) -> None:
            await response.write(json.dumps({"type": kind, "object": found}).encode() + b"\n")

        try:
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                await send("BOOKMARK", {"metadata": {"resourceVersion": str(version)}})
                while True:
                    if version < self._oldest:
                        await send("ERROR", {"kind": "Status", "code": 410, "message": "too old resource version"})
                        return response
                    for number, where, kind, found in list(self._history):
                        if number > version and where == collection and selects(found):
                            await send(kind, found)
                    version = max(version, self._version)
                    async with self._changed:
                        seen = version
                        await self._changed.wait_for(lambda: self._version > seen)  # noqa: B023 - called in here
        except (TimeoutError, ConnectionResetError):  # its time is over, or its reader has left
            return response
        except asyncio.CancelledError:
            if request.transport is not None:
                request.transport.abort()
            raise
        finally:
            self._streams.discard(task)

    async def _apply(self, request: web.Request, collection: str) -> web.Response:
        if request.content_type != "application/apply-patch+yaml" or "fieldManager" not in request.query:
            return status(415, "only server-side apply with a fieldManager is understood here")
        self.applied_by.add(request.query["fieldManager"])
        body = await request.json()
        name = request.match_info["name"]
        if body["metadata"]["name"] != name:
            return status(400, "the name of the object does not match the name on the URL")
        before = self._objects[collection].get(name)
        if before is not None and {**before, "metadata": None} == {**body, "metadata": None}:
            return web.json_response(before)  # nothing changes, and so does not the version
        return web.json_response(await self._store(collection, name, body))

    async def _delete(self, request: web.Request, collection: str) -> web.Response:
        name = request.match_info["name"]
        if name not in self._objects[collection]:
            return status(404, f'{collection} "{name}" not found')
        await self._remove(collection, name)
        return web.json_response({"kind": "Status", "status": "Success"})


def status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "status": "Failure", "code": code, "message": message}, status=code)
