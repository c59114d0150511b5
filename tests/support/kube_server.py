"""A real API server of Kubernetes (`make test-kube` builds it) on a real etcd, and what an administrator does with it.

The server is that of Kubernetes 1.20, unchanged. No other part of Kubernetes runs: nothing starts pods, and no controller writes
endpoint slices. The test writes those, as the controller would. Discovery reads `discovery.k8s.io/v1`, which the server has by
itself from 1.21 on; here that kind is a custom resource, without a schema, and the server's own beta of it is off.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import trustme
import yaml
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from support.etcd_server import EtcdServer
from support.patience import PATIENCE_SECONDS
from support.ports import free_ports

REPOSITORY = Path(__file__).parents[2]
NAMESPACE = "prod"
LABELS = {
    "nvidia.com/dynamo-discovery-backend": "kubernetes",
    "nvidia.com/dynamo-discovery-enabled": "true",
}
WORKERS = f"/apis/nvidia.com/v1alpha1/namespaces/{NAMESPACE}/dynamoworkermetadatas"
SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
ROLES = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles"
ADMIN, READER = "token-of-the-administrator", "token-of-a-reader"
SLICE_KIND = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": "endpointslices.discovery.k8s.io",
        "annotations": {"api-approved.kubernetes.io": "unapproved, in place of the kind that newer servers have"},
    },
    "spec": {
        "group": "discovery.k8s.io",
        "scope": "Namespaced",
        "names": {"kind": "EndpointSlice", "listKind": "EndpointSliceList", "plural": "endpointslices"},
        "versions": [
            {"name": "v1", "served": True, "storage": True,
             "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}}
        ],
    },
}  # fmt: skip


def kube_binary() -> str | None:
    """Return the program; None: it is not there."""
    own = REPOSITORY / ".clients" / "kube" / "kube-apiserver"
    return os.environ.get("KUBE_APISERVER") or (str(own) if own.exists() else None)


class ApiServer:
    """One API server on an etcd. It can be killed, and come back on the same port."""

    def __init__(self, root: Path, etcd: EtcdServer, authority: trustme.CA, *flags: str) -> None:
        self.root, self._etcd, self._flags = root, etcd, flags
        (self.port,) = free_ports(1)
        self.authority = root / "ca.pem"
        authority.cert_pem.write_to_path(str(self.authority))
        certificate = authority.issue_cert("127.0.0.1")
        certificate.private_key_pem.write_to_path(str(root / "server.key"))
        for number, pem in enumerate(certificate.cert_chain_pems):
            pem.write_to_path(str(root / "server.pem"), append=bool(number))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return (self.root / "log").read_text(errors="replace")

    def start(self) -> None:
        binary, root = kube_binary(), self.root
        assert binary is not None
        argv = [
            *(binary, f"--etcd-servers={self._etcd.url}", f"--secure-port={self.port}", "--bind-address=127.0.0.1"),
            *(f"--tls-cert-file={root}/server.pem", f"--tls-private-key-file={root}/server.key"),
            *(f"--cert-dir={root}/unused", "--service-account-issuer=https://kubernetes.default.svc"),
            f"--service-account-key-file={root.parent}/accounts.key",
            f"--service-account-signing-key-file={root.parent}/accounts.key",
            *("--service-cluster-ip-range=10.0.0.0/24", "--authorization-mode=RBAC"),
            *(f"--token-auth-file={root.parent}/tokens.csv", "--disable-admission-plugins=ServiceAccount"),
            *("--runtime-config=discovery.k8s.io/v1beta1=false", "--endpoint-reconciler-type=none"),
            *self._flags,
        ]
        with (root / "log").open("ab") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None


class KubeServer:
    """An etcd, one API server or several on it, the kinds and the rights of deploy/kubernetes, and an administrator."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.etcd = EtcdServer(root / "etcd")
        self.servers: list[ApiServer] = []
        self._authority = trustme.CA()
        self._stack = AsyncExitStack()
        self._session: aiohttp.ClientSession | None = None
        self._is_prepared = False

    @property
    def server(self) -> ApiServer:
        return self.servers[0]

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._stack.enter_context, self.etcd)
        self._stack.callback(lambda: [server.kill() for server in self.servers])
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
        (self.root / "accounts.key").write_bytes(pem)
        (self.root / "tokens.csv").write_text(f'{ADMIN},admin,admin,"system:masters"\n{READER},reader,reader\n')
        trust = ssl.create_default_context()
        self._authority.configure_trust(trust)
        connector = aiohttp.TCPConnector(ssl=trust, force_close=True)
        self._session = await self._stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        await self.add_server()
        await self._prepare()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def add_server(self, *flags: str) -> ApiServer:
        """Start one more API server on the same etcd."""
        root = Path(tempfile.mkdtemp(prefix="server-", dir=self.root))
        server = ApiServer(root, self.etcd, self._authority, *flags)
        self.servers.append(server)
        server.start()
        await self.ready(server)
        return server

    async def ready(self, server: ApiServer | None = None) -> None:
        """Return when a server answers for both kinds."""
        server = server or self.server
        ends_at = time.monotonic() + 2 * PATIENCE_SECONDS
        paths = ("/readyz", *((WORKERS, SLICES) if self._is_prepared else ()))
        for path in paths:
            while True:
                with suppress(aiohttp.ClientError, OSError):
                    if (await self.call("GET", path, server=server))[0] == 200:
                        break
                assert not server.has_ended, server.log[-3000:]
                assert time.monotonic() < ends_at, server.log[-3000:]
                await asyncio.sleep(0.1)

    async def _prepare(self) -> None:
        await self.made("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        kinds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        deploy = REPOSITORY / "deploy" / "kubernetes"
        await self.made(kinds, SLICE_KIND)
        for found in yaml.safe_load_all(next(deploy.rglob("definition.yaml")).read_text()):
            await self.made(kinds, found)
        for found in yaml.safe_load_all(next(deploy.rglob("access.yaml")).read_text()):
            await self.made(collection_of(found), found)
        self._is_prepared = True
        await self.ready()

    # -- the administrator -------------------------------------------------------------------------------------------

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        server: ApiServer | None = None,
        token: str = ADMIN,
        kind: str = "application/json",
    ) -> tuple[int, Any]:
        """One request; the status and the answer."""
        assert self._session is not None
        url = f"https://127.0.0.1:{(server or self.server).port}{path}"
        headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
        data = None if body is None else json.dumps(body)
        async with self._session.request(method, url, data=data, headers=headers) as response:
            text = await response.text()
        return response.status, json.loads(text) if text.startswith("{") else text

    async def made(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object."""
        status, answer = await self.call("POST", path, body)
        assert status in (200, 201), answer
        found: dict[str, Any] = answer
        return found

    async def apply(
        self, path: str, body: Any, *, manager: str = "administrator", force: bool = True
    ) -> tuple[int, Any]:
        """Apply on the server's side; the status and the answer."""
        query = f"?fieldManager={manager}&force={'true' if force else 'false'}"
        return await self.call("PATCH", path + query, body, kind="application/apply-patch+yaml")

    async def slice(self, name: str, endpoints: Sequence[tuple[str, Mapping[str, bool]]]) -> None:
        """Write a slice, as the controller would: pods and their conditions."""
        body = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": name, "labels": LABELS},
            "addressType": "IPv4",
            "endpoints": [
                {"addresses": ["10.0.0.9"], "conditions": conditions, "targetRef": {"kind": "Pod", "name": pod}}
                for pod, conditions in endpoints
            ],
        }
        assert (await self.apply(f"{SLICES}/{name}", body))[0] in (200, 201)

    async def pod(self, name: str, *, ready: bool = True) -> None:
        """Have a pod be ready, or not."""
        await self.slice(f"slice-{name}", [(name, {"ready": ready})])

    async def worker(self, name: str, data: Mapping[str, Any]) -> None:
        """Write the resource of a worker of which no process runs."""
        body = {
            "apiVersion": "nvidia.com/v1alpha1",
            "kind": "DynamoWorkerMetadata",
            "metadata": {"name": name},
            "spec": {"data": data},
        }
        assert (await self.apply(f"{WORKERS}/{name}", body, manager="dynamo-worker"))[0] in (200, 201)

    async def workers(self) -> dict[str, dict[str, Any]]:
        """Name -> resource."""
        status, found = await self.call("GET", WORKERS)
        assert status == 200, found
        return {each["metadata"]["name"]: each for each in found["items"]}

    async def token(self, *, account: str = "dynamo", bound_to: str | None = None) -> str:
        """Have the server write a token of a service account, as the kubelet does for a pod."""
        spec: dict[str, Any] = {"expirationSeconds": 600}
        if bound_to:
            spec["boundObjectRef"] = {"kind": "Secret", "apiVersion": "v1", "name": bound_to}
        path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}/token"
        made = await self.made(path, {"spec": spec})
        token: str = made["status"]["token"]
        return token

    async def configuration(self, *, port: int | None = None, token: str | None = None) -> Any:
        """A client's, with a token of the service account of deploy/kubernetes."""
        import kubernetes_asyncio.client

        found = kubernetes_asyncio.client.Configuration(host=f"https://127.0.0.1:{port or self.server.port}")
        found.ssl_ca_cert = str(self.server.authority)
        found.api_key["BearerToken"] = f"Bearer {token or await self.token()}"
        return found


def collection_of(found: Mapping[str, Any]) -> str:
    """The path of the collection that an object of ours belongs into."""
    group = "/api/v1" if found["apiVersion"] == "v1" else f"/apis/{found['apiVersion']}"
    plural = f"{found['kind'].lower()}s".replace("policys", "policies")
    place = "" if found["kind"] == "CustomResourceDefinition" else f"/namespaces/{NAMESPACE}"
    return f"{group}{place}/{plural}"
