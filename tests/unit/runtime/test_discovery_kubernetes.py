"""What only the Kubernetes store promises: its resource, readiness as a lease, and clear words about what is missing.

Over a fake of the API server; the docstring there says how far it goes.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import CannotConnect, InvalidArgument
from dynamo.runtime.base.settings import KubernetesSettings, RuntimeSettings
from dynamo.runtime.discovery import Change, Delete, Put
from dynamo.runtime.discovery.kubernetes import KubernetesDiscovery
from dynamo.runtime.discovery.kubernetes.records import instance_id_of
from dynamo.runtime.distributed import DistributedRuntime
from support.discovery_rigs import collect
from support.fake_kubernetes import NAMESPACE, SLICES, WORKERS, FakeKubernetes
from support.ports import free_ports

KEY = "v1/instances/ns/c/e/1f"
OTHER = "v1/instances/ns/c/e/2a"

Open = Callable[..., Awaitable[KubernetesDiscovery]]
pytestmark = pytest.mark.usefixtures("patient_requests")


@pytest.fixture(autouse=True)
def no_defect(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The stores' loops log a defect and go on; here it is a failure."""
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.fixture
async def cluster() -> AsyncIterator[FakeKubernetes]:
    found = FakeKubernetes()
    await found.start()
    yield found
    await found.stop()


@pytest.fixture
async def open_store(cluster: FakeKubernetes) -> AsyncIterator[Open]:
    """Opens the store of one pod's container; closes it."""
    async with AsyncExitStack() as stack:

        async def open_one(pod: str, container: str | None = None, **options: Any) -> KubernetesDiscovery:
            store = KubernetesDiscovery(
                identity(pod, container),
                configuration=cluster.configuration(),
                **{"debounce_seconds": 0.005, "keep_seconds": 0.2, **options},
            )
            stack.push_async_callback(store.close)
            await store.start()
            return store

        yield open_one


def identity(pod: str, container: str | None = None) -> KubernetesSettings:
    mode = "pod" if container is None else "container"
    return KubernetesSettings(pod, NAMESPACE, f"uid-{pod}", container, mode)


# -- the resource --------------------------------------------------------------------------------------------------------


async def test_a_workers_records_lie_in_one_resource_that_goes_with_its_pod(
    cluster: FakeKubernetes, open_store: Open
) -> None:
    await cluster.set_pod("w-0")
    store = await open_store("w-0")
    await store.put(KEY, b'{"instance_id":31}')
    await store.put("v1/mdc/ns/c/e/1f", b'{"card_json":{}}')
    (found,) = cluster.workers().values()
    assert (found["apiVersion"], found["kind"]) == ("nvidia.com/v1alpha1", "DynamoWorkerMetadata")
    assert found["metadata"]["name"] == "w-0"
    (owner,) = found["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Pod", "w-0", "uid-w-0")
    assert found["spec"]["data"] == {
        "endpoints": {"ns/c/e/1f": {"instance_id": 31}},
        "model_cards": {"ns/c/e/1f": {"card_json": {}}},
        "event_channels": {},
        "event_sources": {},
    }
    assert cluster.applied_by == {"dynamo-worker"}
    await store.close()
    await cluster.until(lambda: cluster.workers() == {})


@pytest.mark.parametrize(("container", "name"), [(None, "w-0"), ("main", "w-0"), ("prefill", "w-0-prefill")])
async def test_the_resource_is_named_for_the_pod_or_its_container(
    cluster: FakeKubernetes, open_store: Open, container: str | None, name: str
) -> None:
    store = await open_store("w-0", container)
    await store.put(KEY, b"{}")
    await cluster.until(lambda: list(cluster.workers()) == [name])
    assert store.lease_id == instance_id_of(name)


def test_the_instance_id_is_the_hash_that_the_native_system_makes_of_the_name() -> None:
    names = ["", "a", "worker-0", "abcdefg", "abcdefgh", "dynamo-backend-7d9c5b8f6-x2x9k", "ü" * 100]
    # Python's own strings are hashed with the same function, and without a random key when it is told so.
    script = "import sys; print([hash(name.encode() + b'\\xff') & (2**53 - 1) for name in sys.argv[1:]])"
    run = subprocess.run(
        [sys.executable, "-c", script, *names],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    if sys.hash_info.algorithm != "siphash13":
        pytest.skip("this Python hashes with another function")
    assert str([instance_id_of(name) for name in names]) == run.stdout.strip()
    assert all(0 < instance_id_of(name) < 2**53 for name in names)


async def test_what_an_earlier_container_of_the_pod_left_is_removed_at_the_start(
    cluster: FakeKubernetes, open_store: Open
) -> None:
    await cluster.set_pod("w-0")
    await cluster.leave_worker("w-0", {"ns/c/e/1f": {}})
    reader = await open_store("frontend")
    assert await reader.get_prefix("v1/instances") == {KEY: b"{}"}
    await open_store("w-0")
    assert await reader.get_prefix("v1/instances") == {}


@pytest.mark.parametrize(("key", "value", "match"), [(KEY, b"no json", "JSON"), ("v1/other/a", b"{}", "v1/instances")])
async def test_what_does_not_fit_into_the_resource_is_refused(
    open_store: Open, key: str, value: bytes, match: str
) -> None:
    store = await open_store("w-0")
    with pytest.raises(InvalidArgument, match=match):
        await store.put(key, value)


# -- readiness -----------------------------------------------------------------------------------------------------------


async def test_a_record_counts_while_its_pod_is_ready(cluster: FakeKubernetes, open_store: Open) -> None:
    await cluster.set_pod("w-0", ready=False)
    worker, reader = await open_store("w-0"), await open_store("frontend")
    async with reader.watch("v1/instances") as changes:
        assert await anext(changes) == []
        await worker.put(KEY, b"{}")
        assert await reader.get_prefix("v1/instances") == {}
        await cluster.set_pod("w-0")
        assert await anext(changes) == [Put(KEY, b"{}")]
        await cluster.set_pod("w-0", ready=False)
        assert await anext(changes) == [Delete(KEY)]
        await cluster.set_pod("w-0")
        assert await anext(changes) == [Put(KEY, b"{}")]
        await cluster.delete_pod("w-0")
        assert await anext(changes) == [Delete(KEY)]


async def test_in_the_container_mode_each_container_is_ready_by_itself(
    cluster: FakeKubernetes, open_store: Open
) -> None:
    await cluster.set_pod("w-0", container="main")
    await cluster.set_pod("w-0", container="second", ready=False)
    main, second = await open_store("w-0", "main"), await open_store("w-0", "second")
    await main.put(KEY, b"1")
    await second.put(OTHER, b"2")
    assert await main.get_prefix("v1/instances") == {KEY: b"1"}
    await cluster.set_pod("w-0", container="second")
    assert await main.get_prefix("v1/instances") == {KEY: b"1", OTHER: b"2"}


async def test_changes_that_come_together_are_told_together(cluster: FakeKubernetes, open_store: Open) -> None:
    for pod in ("w-0", "w-1"):
        await cluster.set_pod(pod)
    reader = await open_store("frontend", debounce_seconds=0.2)
    async with reader.watch("v1/instances") as changes:
        assert await anext(changes) == []
        for pod, key in (("w-0", KEY), ("w-1", OTHER)):
            await (await open_store(pod)).put(key, b"{}")
        assert await anext(changes) == [Put(KEY, b"{}"), Put(OTHER, b"{}")]


# -- faults --------------------------------------------------------------------------------------------------------------


async def test_what_happens_while_the_server_is_down_is_made_up_for(cluster: FakeKubernetes, open_store: Open) -> None:
    for pod in ("w-0", "w-1"):
        await cluster.set_pod(pod)
    await cluster.leave_worker("w-1", {"ns/c/e/2a": 1})
    worker, reader = await open_store("w-0"), await open_store("frontend")
    await worker.put(KEY, b"1")
    async with reader.watch("v1/instances") as changes:
        assert len(await anext(changes)) == 2
        await cluster.stop()
        await worker.put(KEY, b"2")
        assert await reader.get_prefix("v1/instances") == {KEY: b"1", OTHER: b"1"}  # the last view
        with pytest.raises(CannotConnect):
            await worker.put_new("v1/instances/new", b"1")
        await cluster.delete_pod("w-1")
        cluster.forget()
        await cluster.start()
        expected: list[Change] = [Put(KEY, b"2"), Delete(OTHER)]
        assert sorted(await collect(changes, *expected), key=repr) == sorted(expected, key=repr)
    assert list(cluster.workers()) == ["w-0"]
    assert list(cluster.workers()["w-0"]["spec"]["data"]["endpoints"]) == ["ns/c/e/1f"]


async def test_a_watch_whose_changes_were_forgotten_reads_again(cluster: FakeKubernetes, open_store: Open) -> None:
    await cluster.set_pod("w-0")
    worker, reader = await open_store("w-0"), await open_store("frontend")
    async with reader.watch("v1/instances") as changes:
        assert await anext(changes) == []
        cluster.forget()
        await cluster.set_pod("w-9")  # wakes the watches, which are too old now
        await worker.put(KEY, b"1")
        assert await collect(changes, Put(KEY, b"1")) == [Put(KEY, b"1")]


# -- start ---------------------------------------------------------------------------------------------------------------


def test_a_process_that_does_not_know_its_pod_says_so() -> None:
    with pytest.raises(InvalidArgument, match="POD_NAME, POD_UID"):
        KubernetesDiscovery(KubernetesSettings(pod_namespace="prod"))


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        ("collection", "let the service account get, list.*DynamoWorkerMetadata"),
        ("readiness", "endpointslices"),
        ("definition", "install the definition of the custom resource DynamoWorkerMetadata"),
        ("token", "Unauthorized"),
        ("down", "does not answer.*--discovery-backend"),
    ],
)
async def test_what_is_missing_at_the_start_is_named(cluster: FakeKubernetes, fault: str, match: str) -> None:
    configuration = cluster.configuration()
    match fault:
        case "collection":
            cluster.deny(WORKERS, "GET")
        case "readiness":
            cluster.deny(SLICES, "GET")
        case "definition":
            cluster.is_defined = False
        case "token":
            configuration.api_key["BearerToken"] = "Bearer nonsense"
        case _:
            configuration.host = f"http://127.0.0.1:{free_ports(1)[0]}"
    store = KubernetesDiscovery(identity("w-0"), configuration=configuration)
    with pytest.raises(CannotConnect, match=match):
        await store.start()
    await store.close()


def test_a_pods_own_data_comes_from_files_or_variables(tmp_path: Path) -> None:
    (tmp_path / "pod_name").write_text("w-0\n")
    env = {"POD_NAME": "other", "POD_NAMESPACE": "prod", "CONTAINER_NAME": "c", "DYN_KUBE_DISCOVERY_MODE": "Container"}
    found = KubernetesSettings.from_env(env).settle(env, tmp_path)
    assert found == KubernetesSettings("w-0", "prod", None, "c", "container")
    assert found.resource_name == "w-0-c"
    assert KubernetesSettings.from_env({"DYN_KUBE_DISCOVERY_MODE": "node"}).mode == "pod"


async def test_a_runtime_finds_the_cluster_by_its_kubeconfig(
    cluster: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config"
    config.write_text(cluster.kubeconfig())
    # The library reads the variable when it is imported, which another test may have done.
    monkeypatch.setattr("kubernetes_asyncio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(config))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    await cluster.set_pod("w-0")
    env = {"POD_NAME": "w-0", "POD_NAMESPACE": NAMESPACE, "POD_UID": "uid-w-0"}
    runtime = DistributedRuntime(None, "kubernetes", "mem", settings=RuntimeSettings.from_env(env))

    async def handler(body: object, context: object, sink: object) -> None: ...

    await runtime.endpoint("ns.comp.gen").start_serving(handler)
    key = f"ns/comp/gen/{instance_id_of('w-0'):x}"
    assert cluster.workers()["w-0"]["spec"]["data"]["endpoints"][key]["instance_id"] == instance_id_of("w-0")
    await runtime.aclose()
    assert cluster.workers() == {}
