"""Discovery against a real API server of Kubernetes (`make test-kube`): what goes wrong between the two, case by case."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dynamo.errors import CannotConnect
from dynamo.runtime.base.settings import KubernetesSettings
from dynamo.runtime.discovery import Delete, Put
from dynamo.runtime.discovery.kubernetes import KubernetesDiscovery
from dynamo.runtime.discovery.kubernetes import api as api_module
from dynamo.runtime.discovery.kubernetes.api import KubernetesApi, KubernetesError
from support.discovery_rigs import collect
from support.kube_server import NAMESPACE, READER, ROLES, SLICES, WORKERS, KubeServer, kube_binary
from support.patience import PATIENCE_SECONDS
from support.processes import until
from support.relay import Relay

pytestmark = [
    pytest.mark.kube,
    pytest.mark.skipif(kube_binary() is None, reason="no API server of Kubernetes: make test-kube builds one"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("patient_requests"),
]

KEY, OTHER = "v1/instances/ns/c/e/1f", "v1/instances/ns/c/e/2a"
INSIDE, OTHER_INSIDE = "ns/c/e/1f", "ns/c/e/2a"
Open = Callable[..., Awaitable[KubernetesDiscovery]]


@pytest.fixture
def patient_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_module, "REQUEST_SECONDS", PATIENCE_SECONDS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[KubeServer]:
    async with KubeServer(tmp_path_factory.mktemp("kube")) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def kube(shared: KubeServer) -> AsyncIterator[KubeServer]:
    yield shared
    for path in (WORKERS, SLICES):
        assert (await shared.call("DELETE", path))[0] == 200


@pytest_asyncio.fixture(loop_scope="module")
async def relay(kube: KubeServer) -> AsyncIterator[Relay]:
    async with Relay(kube.server.port) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def open_store(kube: KubeServer) -> AsyncIterator[Open]:
    """Opens the store of one pod; closes it."""
    async with AsyncExitStack() as stack:

        async def open_one(pod: str, *, port: int | None = None, token: str | None = None) -> KubernetesDiscovery:
            store = KubernetesDiscovery(
                KubernetesSettings(pod, NAMESPACE, f"uid-{pod}", None, "pod"),
                configuration=await kube.configuration(port=port, token=token),
                debounce_seconds=0.005,
                keep_seconds=0.2,
            )
            stack.push_async_callback(store.close)
            await store.start()
            return store

        yield open_one


async def api_of(kube: KubeServer) -> KubernetesApi:
    api = KubernetesApi(NAMESPACE, await kube.configuration())
    await api.open()
    return api


# -- records, readiness ----------------------------------------------------------------------------------------------


async def test_a_record_counts_while_its_pod_is_ready_and_goes_with_its_process(
    kube: KubeServer, open_store: Open
) -> None:
    worker, reader = await open_store("w-0"), await open_store("frontend")
    async with reader.watch("v1/instances") as changes:
        assert await anext(changes) == []
        await worker.put(KEY, b'{"instance_id":31}')
        assert await reader.get_prefix("v1/instances") == {}
        await kube.pod("w-0")
        assert await collect(changes, Put(KEY, b'{"instance_id":31}'))
        await kube.pod("w-0", ready=False)
        assert await collect(changes, Delete(KEY))
        await kube.pod("w-0")
        assert await collect(changes, Put(KEY, b'{"instance_id":31}'))
        await worker.close()
        assert await collect(changes, Delete(KEY))
    assert await kube.workers() == {}


@pytest.mark.parametrize(
    ("conditions", "counts"),
    [
        ({"ready": True, "serving": True, "terminating": False}, True),
        ({}, True),
        ({"ready": False, "serving": False, "terminating": False}, False),
        ({"ready": False, "serving": True, "terminating": True}, False),
        ({"ready": False, "serving": False, "terminating": True}, False),
    ],
    ids=["ready", "unknown", "not ready", "terminating and serving", "terminating"],
)
async def test_slices_with_endpoints_that_are_not_ready_or_terminate(
    kube: KubeServer, open_store: Open, conditions: dict[str, bool], counts: bool
) -> None:
    await kube.worker("w-0", {"endpoints": {INSIDE: 1}})
    await kube.worker("w-1", {"endpoints": {OTHER_INSIDE: 1}})
    await kube.slice("two", [("w-0", conditions), ("w-1", {"ready": True})])
    reader = await open_store("frontend")
    assert (KEY in await reader.get_prefix("v1/instances")) == counts
    assert OTHER in await reader.get_prefix("v1/instances")


# -- watches ---------------------------------------------------------------------------------------------------------


async def test_what_happened_while_the_connection_was_cut_is_made_up_for(
    kube: KubeServer, relay: Relay, open_store: Open
) -> None:
    await kube.slice("all", [("w-0", {"ready": True}), ("w-1", {"ready": True})])
    await kube.worker("w-0", {"endpoints": {INSIDE: 1}})
    reader = await open_store("frontend", port=relay.port)
    async with reader.watch("v1/instances") as changes:
        assert await anext(changes) == [Put(KEY, b"1")]
        await relay.cut()
        await kube.worker("w-1", {"endpoints": {OTHER_INSIDE: 1}})
        assert (await kube.call("DELETE", f"{WORKERS}/w-0"))[0] == 200
        assert await reader.get_prefix("v1/instances") == {KEY: b"1"}  # the last view
        assert reader.trouble()
        await relay.restore()
        assert set(await collect(changes, Put(OTHER, b"1"), Delete(KEY))) == {Put(OTHER, b"1"), Delete(KEY)}
    assert reader.trouble() is None


async def test_a_server_that_restarts_answers_410_to_old_watches_and_nothing_is_lost(
    kube: KubeServer, open_store: Open
) -> None:
    await kube.slice("all", [("w-0", {"ready": True}), ("w-1", {"ready": True})])
    worker, reader = await open_store("w-0"), await open_store("frontend")
    await worker.put(KEY, b"1")
    async with reader.watch("v1/instances") as changes:
        assert await anext(changes) == [Put(KEY, b"1")]
        version = (await kube.call("GET", WORKERS))[1]["metadata"]["resourceVersion"]
        for number in range(3):  # the version of the watch is older than all that a new server knows
            await kube.worker("w-1", {"endpoints": {OTHER_INSIDE: number}})
        await collect(changes, Put(OTHER, b"2"))
        kube.server.kill()
        await worker.put(KEY, b"2")  # noted, and made right later
        with pytest.raises(CannotConnect):
            await worker.put_new("v1/instances/new", b"1")
        await asyncio.to_thread(kube.etcd.compact)
        kube.server.start()
        await kube.ready()
        status, answer = await kube.call("GET", f"{WORKERS}?watch=true&resourceVersion={version}&timeoutSeconds=2")
        assert (status, answer["object"]["code"]) == (200, 410), answer
        await collect(changes, Put(KEY, b"2"))
    found = await kube.workers()
    assert found["w-0"]["spec"]["data"]["endpoints"] == {INSIDE: 2}


async def test_a_watch_from_a_version_that_is_gone_is_begun_again(kube: KubeServer, open_store: Open) -> None:
    """Our own watch gets the 410: its version is put back to one that the server has forgotten."""
    await kube.pod("w-0")
    api = await api_of(kube)
    await asyncio.to_thread(kube.etcd.compact)
    with pytest.raises(KubernetesError) as gone:
        async with api.watch(api.resources, None, 1) as events:
            await anext(events)
    await api.close()
    assert gone.value.status == 410
    reader = await open_store("frontend")
    async with reader.watch("v1/instances") as changes:
        assert await anext(changes) == []
        reader._resources.version = 1
        kube.server.kill()  # so the watch begins again, from there
        kube.server.start()
        await kube.ready()
        await kube.worker("w-0", {"endpoints": {INSIDE: 1}})
        assert await collect(changes, Put(KEY, b"1"))


async def test_bookmarks_carry_a_watch_over_changes_of_others(
    kube: KubeServer, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "WATCH_SECONDS", 4)  # the server sends a bookmark before a watch ends
    reader = await open_store("frontend")
    other = WORKERS.replace(NAMESPACE, "default")
    body = {"apiVersion": "nvidia.com/v1alpha1", "kind": "DynamoWorkerMetadata", "metadata": {"name": "far"}}
    made = await kube.made(other, body)
    version = int(made["metadata"]["resourceVersion"])
    assert reader._resources.version < version
    await until(lambda: reader._resources.version >= version, lambda: "a bookmark")
    assert reader._resources.objects == {}
    assert (await kube.call("DELETE", f"{other}/far"))[0] == 200


async def test_clients_that_go_from_one_server_to_another_notice_nothing(kube: KubeServer, open_store: Open) -> None:
    """What a change of the leading server, or a balancer before several, looks like."""
    second = await kube.add_server()
    await kube.pod("w-0")
    async with Relay(kube.server.port) as relay:
        worker, reader = await open_store("w-0", port=relay.port), await open_store("frontend", port=relay.port)
        async with reader.watch("v1/instances") as changes:
            assert await anext(changes) == []
            for value, server in ((b"1", second), (b"2", kube.server), (b"3", second)):
                relay._target_port = server.port
                await relay.cut()
                await relay.restore()
                await worker.put(KEY, value)
                assert await collect(changes, Put(KEY, value)) == [Put(KEY, value)]
    second.kill()
    kube.servers.remove(second)


# -- a server that has too much to do ------------------------------------------------------------------------------


async def test_a_server_that_answers_429_is_left_alone_and_the_record_is_written_later(
    kube: KubeServer, open_store: Open, caplog: pytest.LogCaptureFixture
) -> None:
    limits = ("--max-requests-inflight=2", "--max-mutating-requests-inflight=1")
    busy = await kube.add_server(*limits, "--enable-priority-and-fairness=false")
    await kube.pod("w-0")
    worker = await open_store("w-0", port=busy.port)
    api = KubernetesApi(NAMESPACE, await kube.configuration(port=busy.port))
    await api.open()
    body = {"apiVersion": "nvidia.com/v1alpha1", "kind": "DynamoWorkerMetadata"}
    kube.etcd.freeze()  # so requests stay in the server, and are as many as it takes
    try:
        writes = [asyncio.create_task(api.apply(f"hung-{number}", body)) for number in range(3)]
        reads = [asyncio.create_task(api.read_all(api.slices, None)) for _ in range(4)]
        for tasks in (writes, reads):
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_SECONDS)
            error = next(iter(done)).exception()
            assert isinstance(error, api_module.Throttled)
            assert error.pause_seconds == 1.0  # what this server asks for
        with caplog.at_level(logging.WARNING):
            await worker.put(KEY, b"1")
            await until(lambda: "answers 429" in caplog.text, lambda: caplog.text)
    finally:
        kube.etcd.thaw()
    await asyncio.gather(*writes, *reads, return_exceptions=True)
    await kube.ready()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await kube.workers()).get("w-0", {}).get("spec", {}).get("data", {}).get("endpoints") != {INSIDE: 1}:
            await asyncio.sleep(0.05)
    await api.close()
    await worker.close()
    busy.kill()
    kube.servers.remove(busy)


# -- tokens, rights --------------------------------------------------------------------------------------------------


async def test_a_token_whose_file_is_replaced_is_used_from_then_on(
    kube: KubeServer, relay: Relay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datetime

    from kubernetes_asyncio.config import incluster_config

    secrets = f"/api/v1/namespaces/{NAMESPACE}/secrets"
    for name in ("first", "second"):
        await kube.made(secrets, {"metadata": {"name": name}})
    file = tmp_path / "token"
    file.write_text(await kube.token(bound_to="first"))
    monkeypatch.setattr(incluster_config, "TOKEN_REFRESH_PERIOD", datetime.timedelta(seconds=0.2))  # a minute
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(relay.port))
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(file))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(kube.server.authority))
    await kube.pod("w-0")
    store = KubernetesDiscovery(
        KubernetesSettings("w-0", NAMESPACE, "uid", None, "pod"), debounce_seconds=0.005, keep_seconds=0.2
    )
    await store.start()
    await store.put(KEY, b"1")
    first = file.read_text()
    file.write_text(await kube.token(bound_to="second"))
    assert (await kube.call("DELETE", f"{secrets}/first"))[0] == 200
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await kube.call("GET", WORKERS, token=first))[0] != 401:  # the server keeps a good token for 10 s
            await asyncio.sleep(0.2)
    async with store.watch("v1/instances") as changes:
        assert await anext(changes) == [Put(KEY, b"1")]
        await store.put(KEY, b"2")
        assert await collect(changes, Put(KEY, b"2"))
        await relay.cut()  # a watch that begins now has the new token, too
        await relay.restore()
        await kube.worker("w-0", {"endpoints": {INSIDE: 3}})
        assert await collect(changes, Put(KEY, b"3"))
    await store.close()


@pytest.mark.parametrize(
    ("resource", "verb"),
    [("dynamoworkermetadatas", "delete"), ("dynamoworkermetadatas", "list"), ("endpointslices", "list")],
)
async def test_a_right_that_is_missing_at_the_start_is_named_in_one_sentence(
    kube: KubeServer, open_store: Open, resource: str, verb: str
) -> None:
    async with without(kube, resource, verb):
        with pytest.raises(CannotConnect) as refused:
            await open_store("w-0")
    text = str(refused.value)
    assert "\n" not in text
    assert f'cannot {verb} resource "{resource}"' in text
    assert 'in the namespace "prod"' in text
    assert "let the service account" in text


async def test_a_right_to_write_that_is_missing_is_named_to_the_caller(kube: KubeServer, open_store: Open) -> None:
    store = await open_store("w-0")
    async with without(kube, "dynamoworkermetadatas", "patch"):
        with pytest.raises(KubernetesError, match='cannot patch resource "dynamoworkermetadatas" in API group'):
            await store.put(KEY, b"1")
    await store.put(KEY, b"1")
    assert "w-0" in await kube.workers()


async def test_a_right_to_watch_that_is_missing_is_said_once_and_changes_still_arrive(
    kube: KubeServer, open_store: Open, caplog: pytest.LogCaptureFixture
) -> None:
    await kube.pod("w-0")
    async with without(kube, "dynamoworkermetadatas", "watch"):
        with caplog.at_level(logging.WARNING):
            reader = await open_store("frontend")
            async with reader.watch("v1/instances") as changes:
                assert await anext(changes) == []
                for value in (1, 2, 3):
                    await kube.worker("w-0", {"endpoints": {INSIDE: value}})
                    assert await collect(changes, Put(KEY, str(value).encode()))
    said = [each.getMessage() for each in caplog.records if 'cannot watch resource "dynamow' in each.getMessage()]
    assert len(said) == 1


class without:
    """A role without one verb, for as long as the block lasts and the server has noticed both ends of it."""

    def __init__(self, kube: KubeServer, resource: str, verb: str) -> None:
        self._kube, self._resource, self._verb = kube, resource, verb

    async def __aenter__(self) -> None:
        self._role = (await self._kube.call("GET", f"{ROLES}/dynamo-discovery"))[1]
        rules = json.loads(json.dumps(self._role["rules"]))
        for rule in rules:
            if self._resource in rule["resources"]:
                rule["verbs"].remove(self._verb)
        await self._put(rules, allowed=False)

    async def __aexit__(self, *_: object) -> None:
        await self._put(self._role["rules"], allowed=True)

    async def _put(self, rules: list[Any], *, allowed: bool) -> None:
        patch = {"rules": rules}
        path = f"{ROLES}/dynamo-discovery"
        status, _ = await self._kube.call("PATCH", path, patch, kind="application/merge-patch+json")
        assert status == 200
        group = "nvidia.com" if self._resource.startswith("dynamo") else "discovery.k8s.io"
        attributes = {"namespace": NAMESPACE, "verb": self._verb, "group": group, "resource": self._resource}
        review = {"spec": {"resourceAttributes": attributes, "user": f"system:serviceaccount:{NAMESPACE}:dynamo"}}
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                found = await self._kube.made("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
                if found["status"]["allowed"] == allowed:
                    return
                await asyncio.sleep(0.05)


async def test_an_account_without_any_right_is_told_what_to_allow(kube: KubeServer, open_store: Open) -> None:
    with pytest.raises(CannotConnect, match='User "reader" cannot delete resource "dynamoworkermetadatas"'):
        await open_store("w-0", token=READER)


# -- writers of one resource -----------------------------------------------------------------------------------------


async def test_our_apply_wins_over_another_writer_and_removes_what_we_removed(
    kube: KubeServer, open_store: Open
) -> None:
    store = await open_store("w-0")
    await store.put(KEY, b"1")
    await store.put(OTHER, b"1")
    body = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoWorkerMetadata",
        "spec": {"data": {"endpoints": {INSIDE: 9}}},
    }
    refused, _ = await kube.apply(f"{WORKERS}/w-0", body, manager="other", force=False)
    assert refused == 409  # a real conflict
    assert (await kube.apply(f"{WORKERS}/w-0", body, manager="other"))[0] == 200

    async def reaches(expected: dict[str, int]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await kube.workers())["w-0"]["spec"]["data"]["endpoints"] != expected:
                await asyncio.sleep(0.02)

    await reaches({INSIDE: 1, OTHER_INSIDE: 1})  # what another writer changed is written again
    await store.delete(OTHER)
    await reaches({INSIDE: 1})


async def test_a_resource_that_is_deleted_by_hand_is_written_again(kube: KubeServer, open_store: Open) -> None:
    await kube.pod("w-0")
    store = await open_store("w-0")
    await store.put(KEY, b"1")
    before = (await kube.workers())["w-0"]["metadata"]["uid"]
    assert (await kube.call("DELETE", f"{WORKERS}/w-0"))[0] == 200
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await kube.workers()).get("w-0", {}).get("metadata", {}).get("uid", before) == before:
            await asyncio.sleep(0.02)


async def test_of_processes_that_create_one_key_at_once_one_keeps_it(kube: KubeServer, open_store: Open) -> None:
    stores = [await open_store(f"w-{number}") for number in range(3)]
    kept = await asyncio.gather(*(store.put_new(KEY, b"1") for store in stores))
    assert sorted(kept) == [False, False, True]


# -- many ------------------------------------------------------------------------------------------------------------


async def many(kube: KubeServer, count: int) -> None:
    for number in range(count):
        await kube.worker(f"w-{number}", {"endpoints": {f"ns/c/e/{number:x}": number}})
    await kube.slice("many", [(f"w-{number}", {"ready": True}) for number in range(count)])


async def test_a_large_list_is_read_by_pages(
    kube: KubeServer, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "PAGE_OBJECTS", 10)
    await many(kube, 35)
    asked = counted_answers(monkeypatch)
    reader = await open_store("frontend")
    assert len(await reader.get_prefix("v1/instances")) == 35
    assert asked[0]["limit"] == "10"
    assert sum("continue" in each for each in asked) >= 3


async def test_pages_that_the_server_has_forgotten_are_read_anew(
    kube: KubeServer, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "PAGE_OBJECTS", 10)
    await many(kube, 25)
    api = await api_of(kube)
    statuses: list[int] = []
    answer = KubernetesApi._answer

    async def forgetful(self: KubernetesApi, method: str, path: str, query: Any = None, body: Any = None) -> Any:
        if "continue" in dict(query or ()):
            await kube.worker("w-0", {"endpoints": {"ns/c/e/0": 1000 + len(statuses)}})
            await asyncio.to_thread(kube.etcd.compact)
        try:
            return await answer(self, method, path, query, body)
        except KubernetesError as error:
            statuses.append(error.status)
            raise

    monkeypatch.setattr(KubernetesApi, "_answer", forgetful)
    found, version = await api.read_all(api.resources, None)
    await api.close()
    assert statuses == [410, 410]  # then as a whole
    assert len(found) == 25
    assert version > 0


def counted_answers(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Have the queries of each request that lists something noted."""
    asked: list[dict[str, str]] = []
    answer = KubernetesApi._answer

    async def noting(self: KubernetesApi, method: str, path: str, query: Any = None, body: Any = None) -> Any:
        if method == "GET":
            asked.append(dict(query or ()))
        return await answer(self, method, path, query, body)

    monkeypatch.setattr(KubernetesApi, "_answer", noting)
    return asked
