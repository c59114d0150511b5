"""A picker under a real Envoy: two workers with a frontend beside them, and requests through the gateway."""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from dynamo.frontend.app import Frontend as Models
from dynamo.frontend.settings import FrontendSettings
from dynamo.picker.addresses import Addresses
from dynamo.picker.choice import Picker
from dynamo.picker.server import PickerServer
from dynamo.picker.settings import PickerSettings
from dynamo.placement.kv_query import KvQuery
from dynamo.runtime.calls.request_plane.base import Instance
from dynamo.runtime.distributed import DistributedRuntime
from support.envoy import BUFFERED, DUPLEX, REPOSITORY, configuration, envoy_binary
from support.http_client import Reply, ask, exchange
from support.patience import PATIENCE_SECONDS, PROMPT_SECONDS
from support.ports import free_ports
from support.processes import Cluster, Frontend, Process, get, until, wait

pytestmark = [
    pytest.mark.gateway,
    pytest.mark.skipif(envoy_binary() is None, reason="needs Envoy: make test-gateway fetches it"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs 127.0.0.2: Linux"),
]

HOSTS: Final = ("127.0.0.2", "127.0.0.3")
SUBSET: Final = "x-gateway-destination-endpoint-subset"
EXPLAIN: Final = {"x-dynamo-explain-routing": "1"}
TIMED: Final = 100  # requests, for each of the latencies
STALL_SECONDS: Final = 2.5
RATE: Final = 40  # of them in a second


class Gateway:
    """Envoy, two workers of which each has an address of its own, and the frontend that serves both addresses."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.buffered, self.duplex, self.admin, self.picker_port, self.pod_port, self.closed_port = free_ports(6)
        """The ports: fails open and buffers; fails closed, in full duplex."""
        self.frontend: Frontend = cluster.frontend(
            "pods", "--router-mode", "round-robin", "--http-host", "0.0.0.0", "--http-port", str(self.pod_port)
        )
        for host in HOSTS:
            flags = ["--block-size", "16", "--speedup-ratio", "10"]
            argv = [sys.executable, "-m", "dynamo.mocker", "--discovery-backend", "file", "--model-path", "m", *flags]
            cluster.process(f"worker-{host}", argv, DYN_TCP_RPC_HOST=host)
        listeners = {self.buffered: (BUFFERED, True), self.duplex: (DUPLEX, False)}
        file = cluster.root / "envoy.json"
        pool = [(HOSTS[0], self.closed_port), *((host, self.pod_port) for host in HOSTS)]
        file.write_text(configuration(self.admin, listeners, self.picker_port, pool))
        binary = envoy_binary()
        assert binary is not None
        self.envoy = cluster.process(
            "envoy", [binary, "-c", str(file), "--concurrency", "1", "--use-dynamic-base-id", "-l", "warning"]
        )

    @property
    def addresses(self) -> list[str]:
        return [f"{host}:{self.pod_port}" for host in HOSTS]

    def wait_ready(self) -> None:
        self.frontend.wait_ready()
        wait(lambda: _workers(self.frontend) == 2, lambda: self.frontend.log)
        wait(lambda: _answers(self.admin, "/ready"), lambda: self.envoy.log)

    def sees_picker(self, *, healthy: bool) -> bool:
        """Whether Envoy's own checks find the picker so."""
        _, body = get(self.admin, "/stats?filter=cluster.picker.membership_healthy")
        return body.strip().endswith(b": 1" if healthy else b": 0")

    def counters(self) -> str:
        """What Envoy counts of the picker, for a test that fails."""
        _, body = get(self.admin, "/stats?filter=(ext_proc|cluster.picker)&usedonly")
        return body.decode()

    @property
    def refusals(self) -> str:
        """What Envoy wrote of requests that it answered with an error, and of the picker's health."""
        lines = self.envoy.log.splitlines()
        return "\n".join(line for line in lines if '"status":5' in line or "health" in line)

    async def start_picker(self, name: str) -> Process:
        """Start one once Envoy has noticed the end of that before."""
        await until(lambda: self.sees_picker(healthy=False), lambda: self.envoy.log)
        argv = [sys.executable, "-m", "dynamo.picker", "--discovery-backend", "file", "--host", "127.0.0.1"]
        ports = ["--port", str(self.picker_port), "--target-port", str(self.pod_port)]
        made = self.cluster.process(name, [*argv, *ports])
        made.wait_log("picking endpoints")
        await self.reach_picker()
        return made

    async def reach_picker(self) -> None:
        """Return once a request that needs the picker is served: the threads of Envoy see it later than its counters."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await ask(self.duplex, "/v1/models")).status != 200:
                await asyncio.sleep(0.05)


def _workers(frontend: Frontend) -> int:
    status, body = frontend.get("/v1/models/m/ready")
    roles = [
        role
        for namespace in (json.loads(body)["namespaces"].values() if status == 200 else ())
        for role in namespace["worker_types"].values()
    ]
    return sum(role["workers"] for role in roles)


def _answers(port: int, path: str) -> bool:
    try:
        return get(port, path)[0] == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Cluster(tmp_path_factory.mktemp("gateway")) as cluster:
        made = Gateway(cluster)
        made.wait_ready()
        yield made


class OwnPicker:
    """A picker in this process, whose accounts a test can read."""

    def __init__(self, models: Models, server: PickerServer, addresses: Addresses) -> None:
        self.models, self.server, self.addresses = models, server, addresses

    @property
    def running(self) -> dict[str, int]:
        """How many requests are booked at each address."""
        (pool,) = self.models.models.pools()
        assert pool.kv is not None
        load, found = pool.kv.router.load, dict[str, int]()
        for rank in pool.kv.router.ranks:
            address = self.addresses.of(pool.instance(rank.worker_id))
            assert address is not None
            found[address] = len(load.of(rank).booked)
        return found

    @property
    def total(self) -> int:
        return sum(self.running.values())


class HalfClosed(Addresses):
    """Names a port at which nothing listens for the worker of the first host."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway.pod_port)
        self._first, self._closed = gateway.addresses[0], f"{HOSTS[0]}:{gateway.closed_port}"

    def of(self, instance: Instance | None) -> str | None:
        found = super().of(instance)
        return self._closed if found == self._first else found


@asynccontextmanager
async def own_picker(
    gateway: Gateway, addresses: Addresses | None = None, *, fallbacks: int = 0
) -> AsyncIterator[OwnPicker]:
    settings = FrontendSettings.from_env(
        {**gateway.cluster.environment, "DYN_ROUTER_MODE": "kv", "DYN_ROUTER_POLICY": "default"}
    )
    await until(lambda: gateway.sees_picker(healthy=False), lambda: gateway.envoy.log)
    runtime = DistributedRuntime(asyncio.get_running_loop(), None, None, settings=settings.runtime)
    addresses = addresses or Addresses(gateway.pod_port)
    try:
        async with Models(settings, runtime) as models:
            picker = Picker(models, addresses, fallbacks=fallbacks)
            async with PickerServer(picker, PickerSettings(host="127.0.0.1", port=gateway.picker_port)) as server:
                await until(lambda: any(each.workers == 2 for each in models.models.pools()), lambda: "two workers")
                await gateway.reach_picker()
                yield OwnPicker(models, server, addresses)
    finally:
        await runtime.aclose()


def completion(prompt: str, **members: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt, "max_tokens": 4, **members}).encode()


async def complete(port: int, prompt: str, headers: dict[str, str] | None = None, **members: Any) -> Reply:
    return await ask(port, "/v1/completions", completion(prompt, **members), headers={**EXPLAIN, **(headers or {})})


async def test_a_request_reaches_the_worker_that_the_picker_chose(gateway: Gateway) -> None:
    async with own_picker(gateway) as picker:
        for port in (gateway.buffered, gateway.duplex):
            for host in gateway.addresses:
                reply = await complete(port, f"a prompt for {host} on {port}", {SUBSET: host})
                assert (reply.status, reply.headers["x-upstream"]) == (200, host), reply
                (pool,) = picker.models.models.pools()
                worker = pool.instance(int(reply.headers["x-dynamo-worker-instance-id"]))
                assert picker.addresses.of(worker) == host, "the frontend of the pod sent it to the same worker"
            reply = await complete(port, "x", {SUBSET: "10.9.9.9:1"})
            assert reply.status == 503
            assert (await ask(port, "/v1/models", method="GET")).status == 200
            assert (await ask(port, "/v1/completions", b"{")).status == 400
        await until(lambda: picker.total == 0, lambda: str(picker.running))


async def test_a_prompt_goes_where_its_blocks_lie(gateway: Gateway) -> None:
    async with own_picker(gateway) as picker:
        prompt = "a prompt of many blocks, which one of the workers holds. " * 12
        holder = gateway.addresses[1]
        reply = await complete(gateway.buffered, prompt, {SUBSET: holder})
        assert reply.headers.get("x-upstream") == holder, f"{reply}; {gateway.counters()}"
        (pool,) = picker.models.models.pools()

        def is_known() -> bool:
            assert pool.kv is not None
            tokens = list(prompt.encode())
            found = pool.kv.router.look_up(KvQuery(token_ids=tokens), 0.0).overlaps
            return any(each.device > 30 for each in found.values())

        await until(is_known, lambda: "the events of the worker")
        for _ in range(6):
            reply = await complete(gateway.duplex, prompt + "and more")
            assert reply.headers["x-upstream"] == holder


async def test_loads_are_true_while_answers_run_and_when_clients_leave(gateway: Gateway) -> None:
    async with own_picker(gateway) as picker:
        for port in (gateway.buffered, gateway.duplex):
            long = [completion(f"{n} a long answer on {port}", max_tokens=4000, stream=True) for n in range(2)]
            async with exchange(port, "/v1/completions", long[0]) as first:
                assert await first.head() == 200
                await first.event()
                async with exchange(port, "/v1/completions", long[1]) as second:
                    assert await second.head() == 200
                    await second.event()
                    assert picker.running == dict.fromkeys(gateway.addresses, 1), (
                        "the second goes where the first is not"
                    )
                await until(lambda: picker.total == 1, lambda: str(picker.running))
            await until(lambda: picker.total == picker.server.streams == 0, lambda: str(picker.running))


async def test_a_retry_goes_down_the_list_and_the_account_goes_with_it(gateway: Gateway) -> None:
    closed, served = f"{HOSTS[0]}:{gateway.closed_port}", gateway.addresses[1]
    async with own_picker(gateway, HalfClosed(gateway), fallbacks=1) as picker:
        seen = set()
        for n in range(4):
            body = completion(f"{n} a long answer", max_tokens=4000, stream=True)
            async with exchange(gateway.buffered, "/v1/completions", body) as opened:
                assert await opened.head() == 200
                await opened.event()
                seen.add(opened.headers["x-upstream"])
                assert picker.running == {closed: 0, served: 1}
            await until(lambda: picker.total == 0, lambda: str(picker.running))
        assert seen == {served}


async def test_a_picker_that_is_killed_lets_requests_through_or_refuses_them_as_is_set(gateway: Gateway) -> None:
    picker = await gateway.start_picker("picker-1")
    assert (await complete(gateway.duplex, "before")).status == 200
    picker.kill()
    picker.exit_code()
    began = time.monotonic()
    assert (await complete(gateway.buffered, "open")).status == 200
    assert (await complete(gateway.duplex, "closed")).status == 503
    await until(lambda: gateway.sees_picker(healthy=False), lambda: gateway.envoy.log)
    assert (await complete(gateway.buffered, "open")).status == 200
    assert (await complete(gateway.duplex, "closed")).status == 503
    assert time.monotonic() - began < PATIENCE_SECONDS / 2, "nothing hangs"
    again = await gateway.start_picker("picker-2")
    assert (await complete(gateway.duplex, "after")).status == 200
    again.terminate()
    await until(lambda: again.has_ended or gateway.sees_picker(healthy=False), lambda: again.log)
    assert not again.has_ended, "Envoy notices before the picker is gone"
    assert again.exit_code() == 0, again.log


async def test_a_picker_that_stalls_for_a_moment_is_waited_for(gateway: Gateway) -> None:
    """A busy machine stalled it for a second, its health check ran out, and requests that need it were a 503."""
    picker = await gateway.start_picker("picker-stalled")
    try:
        picker.signal(signal.SIGSTOP)
        stall = asyncio.get_running_loop().call_later(STALL_SECONDS, picker.signal, signal.SIGCONT)
        seen = set()
        while asyncio.get_running_loop().time() < stall.when():
            seen.add(gateway.sees_picker(healthy=True))
            await asyncio.sleep(0.1)
        assert seen == {True}, gateway.refusals
        assert (await complete(gateway.duplex, "after the stall")).status == 200, gateway.refusals
    finally:
        picker.signal(signal.SIGCONT)
        picker.kill()
        picker.exit_code()


def _worker_ids(frontend: Frontend) -> list[int]:
    return [each["instance_id"] for each in json.loads(frontend.get("/health")[1])["instances"]]


async def test_what_a_picker_adds_to_a_request(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    (worker_id, *_) = _worker_ids(gateway.frontend)
    picker = await gateway.start_picker("picker-timed")
    try:
        named = {"x-dynamo-worker-instance-id": str(worker_id)}
        found = {
            "the pod itself": await _timed(gateway, gateway.pod_port, named),
            "Envoy and the picker, buffered": await _timed(gateway, gateway.buffered, {}),
            "Envoy and the picker, full duplex": await _timed(gateway, gateway.duplex, {}),
        }
    finally:
        picker.kill()
        picker.exit_code()
    with capsys.disabled():
        print()
        for what, times in found.items():
            cuts = statistics.quantiles(times, n=100)
            print(f"{what}: p50 {cuts[49] * 1000:.1f} ms, p99 {cuts[98] * 1000:.1f} ms, {RATE} requests/s")
    assert statistics.median(found["Envoy and the picker, buffered"]) < PROMPT_SECONDS


async def _timed(gateway: Gateway, port: int, headers: dict[str, str]) -> list[float]:
    """Send requests at a steady rate, and return how long each answer of one token took."""

    async def one(n: int) -> float:
        await asyncio.sleep(n / RATE)
        began = time.perf_counter()
        reply = await ask(port, "/v1/completions", completion(f"{n} " + "words " * 80, max_tokens=1), headers=headers)
        assert reply.status == 200, f"{reply}\n{gateway.refusals}\n{gateway.counters()}"
        return time.perf_counter() - began

    return await asyncio.gather(*(one(n) for n in range(TIMED)))


def test_the_envoy_of_the_docs_is_valid(tmp_path: Path) -> None:
    binary = envoy_binary()
    assert binary is not None
    with Cluster(tmp_path) as cluster:
        checked = cluster.process(
            "envoy", [binary, "--mode", "validate", "-c", str(REPOSITORY / "deploy" / "gateway" / "envoy.yaml")]
        )
        assert checked.exit_code() == 0, checked.log


def test_the_process_ends_with_a_sentence_where_it_cannot_do_what_is_set(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        wrong = cluster.process("mode", [sys.executable, "-m", "dynamo.picker", "--router-mode", "least-loaded"])
        plain = cluster.process("plain", [sys.executable, "-m", "dynamo.picker"], DYN_EPP_MODE="standalone")
        assert (wrong.exit_code(), plain.exit_code()) == (2, 2)
        assert "a picker has none" in wrong.log
        assert "needs their list" in plain.log
