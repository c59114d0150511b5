"""The protocol of endpoint pickers, clause by clause (docs/gateway.md has the list): a real Envoy, and pods that speak vLLM's wire."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from dynamo.frontend.app import Frontend
from dynamo.picker.__main__ import parse_picker_args
from dynamo.picker.choice import Picker
from dynamo.picker.pods.followed import FollowedPods
from dynamo.picker.pods.listing import PodRecord
from dynamo.picker.pods.settings import PodSettings
from dynamo.picker.pods.sources import ListedPods
from dynamo.picker.pods.worker import PodTools
from dynamo.picker.server import PickerServer
from dynamo.picker.settings import PickerSettings
from dynamo.placement.kv_query import KvQuery
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.worker.kv_publishing.metrics import KvPublisherMetrics
from support.envoy import BUFFERED, DUPLEX, SKIPPED, configuration, envoy_binary
from support.fake_vllm import FakeVllm
from support.http_client import Reply, ask, exchange
from support.patience import PATIENCE_SECONDS
from support.ports import free_ports
from support.processes import Cluster, Process, get, until

pytestmark = [
    pytest.mark.gateway,
    pytest.mark.skipif(envoy_binary() is None, reason="needs Envoy: make test-gateway fetches it"),
]
DESTINATION: Final = "x-gateway-destination-endpoint"
SUBSET: Final = f"{DESTINATION}-subset"
PROMPT: Final = "a prompt of many blocks, which one of the pods holds already. " * 12
MODES: Final = pytest.mark.parametrize("mode", ["buffered", "duplex"])


class House:
    """Envoy with a listener for each body mode, a picker in this process, and pods."""

    def __init__(self, envoy: Process, picker: Picker, server: PickerServer, pods: list[FakeVllm]) -> None:
        self.envoy, self.picker, self.server, self.pods = envoy, picker, server, pods
        self.ports: dict[str, int] = {}

    async def complete(
        self, mode: str, prompt: str = PROMPT, headers: dict[str, str] | None = None, **more: Any
    ) -> Reply:
        return await ask(self.ports[mode], "/v1/completions", body(prompt, **more), headers=headers or {})

    async def logged(self, count: int) -> list[dict[str, Any]]:
        """The access log of Envoy, once it has so many lines of completions."""

        def lines() -> list[dict[str, Any]]:
            found = [json.loads(line) for line in self.envoy.log.splitlines() if line.startswith("{")]
            return [each for each in found if each["path"] == "/v1/completions"]

        await until(lambda: len(lines()) >= count, lambda: self.envoy.log)
        return lines()

    @property
    def booked(self) -> dict[str, int]:
        """How many requests are counted at each pod."""
        found = dict[str, int]()
        for pool in self.picker._frontend.models.pools():
            assert pool.kv is not None
            for rank in pool.kv.router.ranks:
                address = self.picker._addresses.of(pool.instance(rank.worker_id))
                if address is not None:
                    found[address] = len(pool.kv.router.load.of(rank).booked)
        return found

    async def nothing_is_held(self) -> None:
        await until(
            lambda: sum(self.booked.values()) == self.server.streams == 0,
            lambda: f"{self.booked}, {self.server.streams} streams",
        )


def body(prompt: str, **more: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt, "max_tokens": 4, **more}).encode()


@asynccontextmanager
async def house(
    tmp_path: Path, *, roles: tuple[str, ...] = ("", ""), fallbacks: int = 0, poll_seconds: float = 0.05, **more: Any
) -> AsyncIterator[House]:
    buffered, duplex, skipped, admin, port = free_ports(5)
    binary = envoy_binary()
    assert binary is not None
    _, settings = parse_picker_args(["--pods", "127.0.0.1:1", "--router-policy", "default"], {})
    read = PodSettings(poll_seconds=poll_seconds, timeout_seconds=PATIENCE_SECONDS, **more)
    runtime = DistributedRuntime(asyncio.get_running_loop(), "mem", "mem", settings=settings.runtime)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(runtime.aclose)
        pods = [await stack.enter_async_context(FakeVllm()) for _ in roles]
        records = [
            PodRecord(each.address, role, each.event_port, each.replay_port)
            for each, role in zip(pods, roles, strict=True)
        ]
        cluster = stack.enter_context(Cluster(tmp_path))
        file = tmp_path / "envoy.json"
        listeners = {buffered: (BUFFERED, True), duplex: (DUPLEX, False), skipped: (SKIPPED, True)}
        pool = [(each.host, each.port) for each, role in zip(pods, roles, strict=True) if role != "prefill"]
        file.write_text(configuration(admin, listeners, port, pool, checked="liveness"))
        argv = [binary, "-c", str(file), "--concurrency", "1", "--use-dynamic-base-id", "-l", "warning"]
        frontend = await stack.enter_async_context(Frontend(settings, runtime))
        tools = PodTools(read, "pods", KvPublisherMetrics(runtime.metrics))
        followed = await stack.enter_async_context(FollowedPods(ListedPods(records), tools))
        picker = Picker(frontend, followed, fallbacks=fallbacks)
        server = await stack.enter_async_context(PickerServer(picker, PickerSettings(host="127.0.0.1", port=port)))
        made = House(cluster.process("envoy", argv), picker, server, pods)
        made.ports = {"buffered": buffered, "duplex": duplex, "answers skipped": skipped}
        await until(
            lambda: sum(len(each.listed_ids) for each in frontend.models.pools()) == len(roles), lambda: "the pods"
        )
        await until(lambda: is_healthy(admin), lambda: made.envoy.log)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await ask(duplex, "/v1/models", method="GET")).status != 200:
                await asyncio.sleep(0.05)
        yield made


def is_healthy(admin: int) -> bool:
    try:
        return get(admin, "/stats?filter=cluster.picker.membership_healthy")[1].strip().endswith(b": 1")
    except OSError:
        return False


async def holds(home: House, pod: FakeVllm) -> None:
    """Let a pod hold the prompt, and wait until the picker knows it."""
    pod.hold(pod.tokens(PROMPT))
    router = next(pool.kv.router for pool in home.picker._frontend.models.pools() if pool.kv is not None)
    await until(lambda: bool(router.look_up(KvQuery(token_ids=pod.tokens(PROMPT)), 0.0).overlaps), lambda: "the events")


@MODES
async def test_the_header_and_the_dynamic_metadata_name_the_pod_that_is_chosen(tmp_path: Path, mode: str) -> None:
    async with house(tmp_path, roles=("", "", "")) as home:
        holder = home.pods[1]
        await holds(home, holder)
        for n in range(3):
            reply = await home.complete(mode, f"{PROMPT}{n}", {DESTINATION: "10.9.9.9:1"})
            assert (reply.status, reply.headers["x-pod"]) == (200, holder.address)
        assert [each[DESTINATION] for each in holder.seen] == [holder.address] * 3, "the client's own is overwritten"
        for line in await home.logged(3):
            assert line["destination"] == line["served"] == line["upstream"] == holder.address


@MODES
async def test_a_list_names_the_best_pods_first_and_a_retry_goes_down_the_list(tmp_path: Path, mode: str) -> None:
    async with house(tmp_path, roles=("", "", ""), fallbacks=1, poll_seconds=600) as home:
        holder = home.pods[2]
        await holds(home, holder)
        await holder.stop()  # the picker will not look at it for ten minutes
        async with exchange(home.ports[mode], "/v1/completions", body(PROMPT, stream=True, max_tokens=400)) as opened:
            home.pods[0].seconds_per_token = home.pods[1].seconds_per_token = 1.0
            assert await opened.head() == 200
            await opened.event()
            served = opened.headers["x-pod"]
            assert home.booked == {each.address: int(each.address == served) for each in home.pods}, "its account moved"
        await home.nothing_is_held()
        (line,) = await home.logged(1)
        assert line["destination"] == f"{holder.address},{served}"
        assert (line["served"], line["sent"]) == (served, 2)
        await holder.start()


@MODES
async def test_only_pods_of_the_subset_hint_are_chosen_and_none_of_them_is_a_503(tmp_path: Path, mode: str) -> None:
    async with house(tmp_path, roles=("", "", "")) as home:
        await holds(home, home.pods[0])
        for pod in home.pods[1:]:
            reply = await home.complete(mode, headers={SUBSET: f"10.9.9.9:1, {pod.address}"})
            assert (reply.status, reply.headers["x-pod"]) == (200, pod.address)
            assert SUBSET not in pod.seen[-1]
        assert (await home.complete(mode, headers={SUBSET: "10.9.9.9:1"})).status == 503


@MODES
async def test_without_a_ready_pod_the_answer_is_a_503_of_the_picker(tmp_path: Path, mode: str) -> None:
    async with house(tmp_path) as home:
        for each in home.pods:
            each.is_well = False
        await until(lambda: not home.picker.is_ready, lambda: "no pod")
        reply = await home.complete(mode)
        assert (reply.status, reply.headers["content-type"]) == (503, "application/json")
        assert sum(each.served for each in home.pods) == 0
        home.pods[0].is_well = True
        await until(lambda: home.picker.is_ready, lambda: "a pod")
        assert (await home.complete(mode)).status == 200


@MODES
async def test_a_request_that_is_shed_is_a_429_with_the_time_to_wait(tmp_path: Path, mode: str) -> None:
    async with house(tmp_path, waiting_limit=2) as home:
        for each in home.pods:
            each.waiting = 3
        await until(lambda: all(map(home.picker._addresses.is_full, ids(home))), lambda: "full pods")
        reply = await home.complete(mode)
        assert (reply.status, reply.headers["retry-after"]) == (429, "1")
        home.pods[1].waiting = 0
        await until(lambda: not all(map(home.picker._addresses.is_full, ids(home))), lambda: "room")
        reply = await home.complete(mode)
        assert (reply.status, reply.headers["x-pod"]) == (200, home.pods[1].address)


def ids(home: House) -> list[int]:
    return [PodRecord(each.address).instance_id for each in home.pods]


@pytest.mark.parametrize("mode", ["buffered", "duplex", "answers skipped"])
@pytest.mark.parametrize("how", ["whole", "streamed", "left by the client", "reset by the pod"])
async def test_every_end_of_an_answer_ends_its_booking(tmp_path: Path, mode: str, how: str) -> None:
    async with house(tmp_path, roles=("",)) as home:
        (pod,) = home.pods
        pod.seconds_per_token = 0.05
        pod.breaks_after = 3 if how == "reset by the pod" else None
        more: dict[str, Any] = {} if how == "whole" else {"stream": True, "max_tokens": 10}
        if how == "left by the client":
            more["max_tokens"] = 10_000
        async with exchange(home.ports[mode], "/v1/completions", body(PROMPT, **more)) as opened:
            await until(lambda: home.booked.get(pod.address) == 1, lambda: f"{home.booked}")
            assert await opened.head() == 200
            if how != "whole":
                await opened.event()
                assert home.booked == {pod.address: 1}, "it counts for as long as it runs"
            if how == "left by the client":
                opened.leave()
            else:
                await read_all(opened.rest)
        await home.nothing_is_held()
        await until(lambda: pod.running == 0, lambda: "the pod")


async def read_all(rest: Callable[[], Any]) -> None:
    with contextlib.suppress(ConnectionError):  # what a client sees of a pod that reset its connection
        await rest()


async def test_a_prefill_pod_is_named_for_the_sidecar_of_the_decode_pod(tmp_path: Path) -> None:
    async with house(tmp_path, roles=("prefill", "prefill", "decode", "decode")) as home:
        prefills, decodes = home.pods[:2], home.pods[2:]
        for mode in ("buffered", "duplex"):
            reply = await home.complete(mode, f"{mode} {PROMPT}")
            (decode,) = [each for each in decodes if each.address == reply.headers["x-pod"]]
            assert decode.seen[-1]["x-prefiller-host-port"] in [each.address for each in prefills]
            assert sum(each.served for each in prefills) == 0, "the sidecar would call it"
        await home.nothing_is_held()


@MODES
async def test_a_body_of_several_megabytes_reaches_the_pod_unchanged(tmp_path: Path, mode: str) -> None:
    async with house(tmp_path) as home:
        reply = await home.complete(mode, "short", note="x" * 3_000_000)
        assert reply.status == 200, reply
        (got,) = [each for pod in home.pods for each in pod.bodies]
        assert got["note"] == "x" * 3_000_000


@MODES
async def test_requests_without_a_body_and_unknown_paths_go_to_any_pod(tmp_path: Path, mode: str) -> None:
    async with house(tmp_path) as home:
        assert (await ask(home.ports[mode], "/v1/models", method="GET")).status == 200
        assert (await ask(home.ports[mode], "/version", b"{}")).status == 404, "an answer of the pod"
        await home.nothing_is_held()


async def test_many_requests_at_once_share_one_connection(tmp_path: Path) -> None:
    async with house(tmp_path, roles=("", "", "")) as home:
        for each in home.pods:
            each.seconds_per_token = 0.01
        replies = await asyncio.gather(*(
            home.complete(mode, f"{n} {PROMPT}", stream=n % 2 == 0) for n in range(60) for mode in ("buffered", "duplex")
        ))  # fmt: skip
        assert {each.status for each in replies} == {200}
        assert all(each.served > 10 for each in home.pods)
        await home.nothing_is_held()
