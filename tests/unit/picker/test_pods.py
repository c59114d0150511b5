"""Pods of plain vLLM under the picker: real HTTP, real ZMQ, the models and the router of a frontend, in one process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import InvalidArgument
from dynamo.picker.__main__ import parse_picker_args
from dynamo.picker.choice import Picker, Refusal, Request
from dynamo.picker.pods.followed import FollowedPods
from dynamo.picker.pods.listing import PodRecord, read_pod_file, read_pods
from dynamo.picker.pods.probes import read_load, read_models
from dynamo.picker.pods.settings import PodSettings
from dynamo.picker.pods.sources import ListedPods, PodsOfFile, PodsOfKubernetes, PodSource
from dynamo.picker.pods.worker import PodTools
from dynamo.placement.kv_query import KvQuery
from dynamo.router.kv.settings import KvRouterSettings
from dynamo.router.workers.pool import ModelPool
from dynamo.worker.kv_publishing.metrics import KvPublisherMetrics
from support.fails_once import BrokenSteps
from support.fake_kubernetes import NAMESPACE, PODS, FakeKubernetes, patient_requests
from support.fake_vllm import BLOCK, FakeVllm
from support.frontend_cluster import Cluster, cluster
from support.patience import PATIENCE_SECONDS

__all__ = ["patient_requests"]
PROMPT = "the same words as before, and a few more of them, so that there are many blocks. " * 8
POLL = 0.02


class Pods:
    """A picker over pods."""

    def __init__(self, models: Cluster, followed: FollowedPods, pods: list[FakeVllm]) -> None:
        self.models, self.followed, self.pods = models, followed, pods
        self.picker = Picker(models.frontend, followed)

    def pool(self) -> ModelPool:
        return next(iter(self.models.frontend.models.pools()))

    def all_pools(self) -> list[ModelPool]:
        return list(self.models.frontend.models.pools())

    async def ready(self, count: int) -> None:
        await until(lambda: sum(len(each.listed_ids) for each in self.models.frontend.models.pools()) == count)

    async def pick(self, prompt: Any = PROMPT, **members: Any) -> tuple[str, dict[str, str], Any]:
        body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 4, **members}).encode()
        picked = await self.picker.choose(Request("POST", "/v1/completions", [], body))
        return picked.choice.addresses[0], dict(picked.choice.headers), picked

    def blocks_known(self, pod: FakeVllm, prompt: str = PROMPT) -> int:
        """How many blocks of a prompt the router believes to be in a pod."""
        pool = self.pool()
        assert pool.kv is not None
        found = pool.kv.router.look_up(KvQuery(token_ids=pod.tokens(prompt)), 0.0).overlaps
        return sum(each.device for rank, each in found.items() if rank.worker_id == PodRecord(pod.address).instance_id)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


def records(pods: list[FakeVllm], roles: list[str]) -> list[PodRecord]:
    return [
        PodRecord(each.address, role, each.event_port, each.replay_port or None)
        for each, role in zip(pods, roles, strict=True)
    ]


@asynccontextmanager
async def pods(
    tmp_path: Path, count: int, *, roles: list[str] | None = None, source: Callable[[list[PodRecord]], PodSource] = ListedPods,
    fakes: dict[str, Any] | None = None, house: dict[str, Any] | None = None, **settings: Any,
) -> AsyncIterator[Pods]:  # fmt: skip
    kv = KvRouterSettings(policy="default")
    async with AsyncExitStack() as stack:
        models = await stack.enter_async_context(
            cluster(tmp_path, router_mode="kv", kv_router=kv, overload_status=429, **(house or {}))
        )
        found = [await stack.enter_async_context(FakeVllm(**(fakes or {}))) for _ in range(count)]
        read = PodSettings(poll_seconds=POLL, timeout_seconds=PATIENCE_SECONDS, **settings)
        metrics = KvPublisherMetrics(models.frontend.kernel.runtime.metrics)
        tools = PodTools(read, "pods", metrics)
        listed = source(records(found, roles or [""] * count))
        followed = await stack.enter_async_context(FollowedPods(listed, tools))
        yield Pods(models, followed, found)


async def test_a_prompt_goes_to_the_pod_that_holds_its_blocks(tmp_path: Path) -> None:
    async with pods(tmp_path, 3) as house:
        await house.ready(3)
        holder = house.pods[1]
        blocks = len(holder.tokens(PROMPT)) // BLOCK
        holder.hold(holder.tokens(PROMPT))
        await until(lambda: house.blocks_known(holder) == blocks)
        for n in range(4):
            where, headers, picked = await house.pick(f"{PROMPT} and {n}")
            assert (where, headers) == (holder.address, {}), "a plain pod knows no worker of this package"
            picked.close()
        holder.clear()
        await until(lambda: house.blocks_known(holder) == 0)


async def test_blocks_from_before_the_picker_and_those_it_missed_are_requested_again(tmp_path: Path) -> None:
    async with FakeVllm() as pod:
        blocks = len(pod.tokens(PROMPT)) // BLOCK
        pod.hold(pod.tokens(PROMPT))  # nobody has subscribed yet
        async with pods(tmp_path, 0, source=lambda _: ListedPods(records([pod], [""]))) as house:
            await until(lambda: bool(house.models.frontend.models.pools()) and house.blocks_known(pod) == blocks)
            more = PROMPT + "this part was lost on the way " * 8
            pod.hold(pod.tokens(more), is_lost=True)
            assert house.blocks_known(pod, more) == blocks
            pod.hold(pod.tokens("another prompt shows that something is missing " * 4))
            await until(lambda: house.blocks_known(pod, more) == len(pod.tokens(more)) // BLOCK)


async def test_what_a_pod_evicts_is_forgotten(tmp_path: Path) -> None:
    async with pods(tmp_path, 1, fakes={"blocks": 40}) as house:
        await house.ready(1)
        (pod,) = house.pods
        pod.hold(pod.tokens(PROMPT))
        await until(lambda: house.blocks_known(pod) > 0)
        pod.hold(list(range(10, 10 + 40 * BLOCK)))
        await until(lambda: house.blocks_known(pod) == 0)


async def test_a_pod_that_dies_leaves_the_choice_and_comes_back_with_nothing(tmp_path: Path) -> None:
    async with pods(tmp_path, 2) as house:
        await house.ready(2)
        holder, other = house.pods
        holder.hold(holder.tokens(PROMPT))
        await until(lambda: house.blocks_known(holder) > 0)
        await holder.stop()
        await house.ready(1)
        assert (await house.pick())[0] == other.address
        await holder.start()
        await house.ready(2)
        assert house.blocks_known(holder) == 0


async def test_a_pod_that_is_not_well_is_not_chosen(tmp_path: Path) -> None:
    async with pods(tmp_path, 2) as house:
        await house.ready(2)
        sick, other = house.pods
        sick.is_well = False
        await house.ready(1)
        assert (await house.pick())[0] == other.address
        other.is_well = False
        await house.ready(0)
        assert not house.picker.is_ready
        with pytest.raises(Refusal) as raised:
            await house.pick()
        assert raised.value.status in (404, 503)


async def test_pods_in_which_too_many_requests_wait_get_none_and_all_full_is_a_429(tmp_path: Path) -> None:
    async with pods(tmp_path, 2, waiting_limit=3) as house:
        await house.ready(2)
        full, other = house.pods
        full.waiting = 4
        await until(lambda: house.followed.is_full(PodRecord(full.address).instance_id))
        for n in range(4):
            assert (await house.pick(f"{n} prompt"))[0] == other.address
        other.waiting = 4
        await until(lambda: house.followed.is_full(PodRecord(other.address).instance_id))
        with pytest.raises(Refusal) as raised:
            await house.pick()
        assert raised.value.status == 429


async def test_a_full_cache_counts_against_the_busy_threshold(tmp_path: Path) -> None:
    async with pods(tmp_path, 1, fakes={"blocks": 40}, house={"active_decode_blocks_threshold": 0.9}) as house:
        await house.ready(1)
        (pod,) = house.pods
        (await house.pick())[2].close()
        pod.hold(list(range(10, 10 + 40 * BLOCK)))
        await until(lambda: bool(house.pool().busy))
        with pytest.raises(Refusal) as raised:
            await house.pick()
        assert raised.value.status == 429


async def test_a_prefill_pod_is_named_by_its_header_and_booked_until_the_first_output(tmp_path: Path) -> None:
    async with pods(tmp_path, 4, roles=["prefill", "prefill", "decode", "decode"]) as house:
        await house.ready(4)
        prefills, decodes = house.pods[:2], house.pods[2:]
        where, headers, picked = await house.pick()
        assert where in [each.address for each in decodes]
        first = headers["x-prefiller-host-port"]
        assert first in [each.address for each in prefills]
        _, headers, second = await house.pick("quite another prompt " * 30)
        assert headers["x-prefiller-host-port"] != first, "the first prompt is still being computed there"
        picked.hold.first_output(0.0)
        second.hold.first_output(0.0)
        picked.close()
        second.close()
        holder = next(each for each in prefills if each.address != first)
        holder.hold(holder.tokens(PROMPT))

        def is_known() -> bool:
            router = next(
                pool.kv.router for pool in house.all_pools() if pool.kv is not None and len(pool.listed_ids) == 2
                and PodRecord(holder.address).instance_id in pool.listed_ids
            )  # fmt: skip
            return bool(router.look_up(KvQuery(token_ids=holder.tokens(PROMPT)), 0.0).overlaps)

        await until(is_known)
        _, headers, _ = await house.pick(PROMPT + "and more")
        assert headers["x-prefiller-host-port"] == holder.address
        for each in prefills:
            each.is_well = False
        await house.ready(2)
        where, headers, _ = await house.pick("without a prefill pod")
        assert (where in [each.address for each in decodes], headers) == (True, {})


async def test_what_vllm_takes_and_a_frontend_does_not_know_is_placed_as_well(tmp_path: Path) -> None:
    _, settings = parse_picker_args(["--pods", "a:1"], {})
    known = {"ignore_unsupported_fields": settings.ignore_unsupported_fields}
    async with pods(tmp_path, 1, house=known) as house:
        await house.ready(1)
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
        chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [tool], "tool_choice": "auto"}
        for path, body in (
            ("/v1/completions", {"model": "m", "prompt": "hi", "vllm_xargs": {"a": 1}, "truncate_prompt_tokens": 3}),
            ("/v1/chat/completions", {**chat, "guided_regex": "a+", "chat_template_kwargs": {"x": 1}}),
            ("/v1/chat/completions", {**chat, "tool_choice": "required", "stream": True}),
        ):
            picked = await house.picker.choose(Request("POST", path, [], json.dumps(body).encode()))
            assert picked.choice.addresses == [house.pods[0].address]
            picked.close()


async def test_a_file_of_pods_is_read_again_when_it_changes(tmp_path: Path) -> None:
    async with FakeVllm() as first, FakeVllm() as second:
        file = tmp_path / "pods.yaml"

        def write(*listed: FakeVllm) -> None:
            file.write_text(
                "pods:\n" + "".join(
                    f"- {{address: '{each.address}', events: {each.event_port}}}\n" for each in listed
                )
            )  # fmt: skip

        write(first)
        async with pods(tmp_path, 0, source=lambda _: PodsOfFile(file, seconds=POLL)) as house:
            await house.ready(1)
            write(first, second)
            await house.ready(2)
            file.write_text("pods: 7\n")
            await until(lambda: house.followed.trouble is not None)
            assert not house.picker.is_ready, "an operator sees that the list is not what the file says"
            write(second)
            await house.ready(1)
            assert house.followed.trouble is None
            assert (await house.pick())[0] == second.address


async def test_a_loop_that_fails_once_goes_on_and_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = ("dynamo.picker.pods.worker:PodWorker._look", "dynamo.picker.pods.sources:PodsOfFile._changed")
    file = tmp_path / "pods"

    def source(found: list[PodRecord]) -> PodsOfFile:
        file.write_text(json.dumps({"pods": [{"address": each.address} for each in found]}))
        return PodsOfFile(file, seconds=POLL)

    broken = BrokenSteps(monkeypatch, *steps)
    async with pods(tmp_path, 1, source=source) as house:
        await broken.run_again(f"pod {house.pods[0].address}", "the file of pods")
        await house.ready(1)


async def test_pods_of_kubernetes_are_those_with_the_labels_that_are_ready(
    tmp_path: Path, patient_requests: None
) -> None:
    fake = FakeKubernetes()
    await fake.start()
    try:
        async with FakeVllm("127.0.0.2") as first, FakeVllm("127.0.0.3", port=first.port) as second:

            async def put(name: str, pod: FakeVllm, app: str = "vllm", *, ready: bool = True) -> None:
                await fake._store(PODS, name, {
                    "metadata": {"name": name, "labels": {"app": app, "llm-d.ai/role": "decode"}},
                    "status": {
                        "podIP": pod.host, "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
                    },
                })  # fmt: skip

            await put("first", first)
            await put("second", second, ready=False)
            await put("other", second, "nginx")
            source = PodsOfKubernetes(NAMESPACE, "app=vllm", first.port, "role", configuration=fake.configuration())
            async with pods(tmp_path, 0, source=lambda _: source, event_port=None) as house:
                await house.ready(1)
                assert (await house.pick())[0] == first.address
                await put("second", second)
                await house.ready(2)
                await fake._remove(PODS, "first")
                await house.ready(1)
                assert (await house.pick())[0] == second.address
    finally:
        await fake.stop()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("a", "HOST:PORT"), ("a:0", "HOST:PORT"), ("@a:1", "ROLE@HOST:PORT"), ("encode@a:1", "role of a:1"),
        ("a:1,a:1", "stands twice"), ("a:70000", "HOST:PORT"), ("http://a:1", "HOST:PORT"),
    ],
)  # fmt: skip
def test_a_pod_that_is_misspelt_is_one_sentence(given: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_pods(given)


def test_pods_are_read_from_a_flag_and_from_a_file() -> None:
    assert read_pods("a:1, prefill@[::1]:2") == (PodRecord("a:1"), PodRecord("[::1]:2", "prefill"))
    content = b'{"pods": [{"address": "a:1", "role": "decode", "events": 7, "replay": "tcp://b:8"}]}'
    (found,) = read_pod_file(content)
    defaults = PodSettings().defaults
    assert (found.event_address(defaults), found.replay_address(defaults)) == ("tcp://a:7", "tcp://b:8")
    assert PodRecord("a:1").event_address(defaults) == "tcp://a:5557"
    assert PodRecord("a:1", events=0).event_address(defaults) is None
    for wrong in (
        b"pods: [{}]",
        b"[]",
        b"pods: [{address: a:1, rolle: decode}]",
        b"pods: [{address: a:1, events: 99999}]",
    ):
        with pytest.raises(ValueError, match=r"pods|address|rolle|events|object"):
            read_pod_file(wrong)


def test_lists_that_contradict_each_other_end_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, why in (
        (["--pods", "a:1", "--pods-file", "f"], "both name the pods"),
        (["--pods", "a:1", "--pod-card", "f", "--pod-model-path", "d"], "both name the tokenizer"),
        (["--pod-selector", "app=vllm"], "POD_NAMESPACE"),
    ):
        with pytest.raises(SystemExit):
            parse_picker_args(argv, {"POD_NAMESPACE": ""})
        assert why in capsys.readouterr().err
    picker, _ = parse_picker_args(["--pods", "a:1"], {"DYN_EPP_MODE": "standalone", "DYN_EPP_KV_EVENT_PORT": "7"})
    assert (picker.pods.pods, picker.pods.event_port) == ((PodRecord("a:1"),), 7)


def test_figures_that_are_malformed_are_left_out() -> None:
    found = read_load(
        b'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 1\n'
        b"vllm:num_requests_waiting NaN\nvllm:kv_cache_usage_perc{} 1e9\nvllm:num_requests_waiting{} -3\n"
        b'vllm:cache_config_info{block_size="x",num_gpu_blocks="None"} 1.0\nother 7\n'
    )
    assert (found.running, found.waiting, found.cache_usage) == (3, 0, 1.0)
    assert (found.block_size, found.total_blocks) == (None, None)


def test_models_leave_adapters_out() -> None:
    listed = [{"id": "m", "root": "/m", "max_model_len": 8}, {"id": "n", "root": "/m"}, {"id": "l", "parent": "m"}]
    found = read_models(json.dumps({"data": listed}).encode())
    assert (found.name, found.aliases, found.root, found.context_length) == ("m", ("n",), "/m", 8)
    for wrong in (b"{", b"[]", b'{"data": []}', b'{"data": [7]}'):
        with pytest.raises(InvalidArgument, match="/v1/models"):
            read_models(wrong)
