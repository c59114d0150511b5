"""The autoscale signals of a frontend with workers, as JSON and as metrics. Under virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.testing.simulation.loop import run_virtual
from support.frontend_cluster import Cluster, ScriptedWorker, cluster, say
from support.inspecting import Lens

MODEL = {"model": "m", "namespace": "ns", "role": "aggregated"}


def virtually(tmp_path: Path, scene: Callable[[Cluster], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        async with cluster(tmp_path, **({"autoscale": True} | settings)) as house:
            await scene(house)

    run_virtual(main())


async def busy_worker(house: Cluster, places: int = 4, **members: Any) -> ScriptedWorker:
    worker = await house.worker(say("x"), runtime_config=ModelRuntimeConfig(max_num_seqs=places), **members)
    worker.script = worker.hold
    return worker


async def ask(house: Cluster, path: str, query: str = "") -> Any:
    return await house.client.begin("GET", path, query=query).done()


async def signal(house: Cluster, query: str = "", model: str = "m") -> Any:
    answer = await ask(house, f"/autoscale/v1/{model}", query)
    assert answer.status == 200, answer.json
    return answer.json


def test_the_signal_follows_the_requests(tmp_path: Path) -> None:
    async def scene(house: Cluster) -> None:
        await busy_worker(house, places=4)
        await asyncio.sleep(2.0)
        quiet = await signal(house)
        assert (quiet["value"], quiet["desired"], quiet["ready"], quiet["limit"]) == (0.0, 1, 1, 4)
        requests = [house.client.begin_chat("hi", stream=True) for _ in range(8)]
        await asyncio.sleep(8.0)
        full = await signal(house)
        assert (full["value"], full["part"], full["running"]) == (2.0, "running", 8)
        assert 0 < full["average"] < 2
        assert (full["desired"], full["reason"]) == (2, "piled_up")
        assert full["workers"][0]["running"] == 8
        labels = MODEL | {}
        assert house.metric("dynamo_autoscale_desired_replicas", **labels) == 2
        assert house.metric("dynamo_autoscale_ready_replicas", **labels) == 1
        assert house.metric("dynamo_autoscale_reason", **labels, reason="piled_up") == 1
        assert house.metric("dynamo_autoscale_reason", **labels, reason="hold") == 0
        # What was decided stays until it was done, and then a further one may follow.
        await asyncio.sleep(20.0)
        assert (await signal(house))["desired"] == 2
        await busy_worker(house, places=4)
        await asyncio.sleep(3.0)
        both = await signal(house)
        assert (both["value"], both["ready"], both["desired"]) == (1.0, 2, 2)
        for request in requests:
            request.disconnect()

    virtually(tmp_path, scene)


def test_a_decision_is_an_event_of_the_inspector_once_with_its_figures(tmp_path: Path) -> None:
    async def scene(house: Cluster) -> None:
        await busy_worker(house, places=4)
        await asyncio.sleep(2.0)
        requests = [house.client.begin_chat("hi", stream=True) for _ in range(8)]
        await asyncio.sleep(2000.0)  # nobody follows it: it is decided again, and is no news
        assert (await signal(house))["desired"] == 2
        events = (await Lens(house).get("events"))["data"]
        (event,) = [each for each in events if each["kind"] == "scale"]
        assert event["text"].startswith("the load of m asks for 2 aggregated workers, not 1 (piled_up): load 2.0 of 1")
        assert event["model"] == "m"
        await busy_worker(house, places=4)
        for request in requests:
            request.disconnect()
        await asyncio.sleep(300.0)
        events = (await Lens(house).get("events"))["data"]
        assert [each["text"].split(" (")[0] for each in events if each["kind"] == "scale"][:-1] == [
            "the load of m asks for 0 aggregated workers, not 1",
            "the load of m asks for 1 aggregated worker, not 2",
        ]

    virtually(tmp_path, scene)


def test_a_model_that_goes_takes_its_metrics_along(tmp_path: Path) -> None:
    async def scene(house: Cluster) -> None:
        worker = await busy_worker(house)
        await asyncio.sleep(2.0)
        assert house.metric("dynamo_autoscale_ready_replicas", **MODEL) == 1
        await worker.stop()
        await house.gone("m")
        await asyncio.sleep(2.0)
        assert "dynamo_autoscale_ready_replicas{" not in house.frontend.metrics.expose().decode()
        answer = await house.client.get("/autoscale/v1/m")
        assert (answer.status, answer.json["error"]["param"]) == (404, "model")

    virtually(tmp_path, scene)


def test_mistakes_are_told(tmp_path: Path) -> None:
    async def scene(house: Cluster) -> None:
        await busy_worker(house)
        await asyncio.sleep(2.0)
        for query, param in (("role=writer", "role"), ("rolle=decode", "rolle")):
            answer = await ask(house, "/autoscale/v1/m", query)
            assert (answer.status, answer.json["error"]["param"]) == (400, param)
        assert (await ask(house, "/autoscale/v1/m", "namespace=other")).status == 404
        assert (await signal(house, "role=aggregated&namespace=ns"))["ready"] == 1
        assert [each["model"] for each in (await house.client.get("/autoscale/v1")).json["data"]] == ["m"]

    virtually(tmp_path, scene)


def test_switched_off_it_says_how_to_switch_it_on(tmp_path: Path) -> None:
    async def scene(house: Cluster) -> None:
        answer = await house.client.get("/autoscale/v1/m")
        assert answer.status == 501
        assert "--autoscale" in answer.json["error"]["message"]
        assert "dynamo_autoscale" not in house.frontend.metrics.expose().decode()

    virtually(tmp_path, scene, autoscale=False)


class TestWithoutAnyWorker:
    """A model whose workers are started on demand."""

    def test_it_stays_listed_and_its_request_waits_for_a_worker(self, tmp_path: Path) -> None:
        async def scene(house: Cluster) -> None:
            await (await house.worker(say("x"))).stop()
            await asyncio.sleep(3600.0)  # long after any replacement wait
            listed = (await house.client.get("/v1/models")).json["data"]
            assert [each["id"] for each in listed] == ["m"]
            assert (await signal(house))["desired"] == 0
            request = house.client.begin_chat("hi")
            await asyncio.sleep(2.0)
            asked = await signal(house)
            assert (asked["running"], asked["ready"], asked["desired"], asked["reason"]) == (1, 0, 1, "first_request")
            await house.worker(say("here"))
            answer = await request.done(10.0)
            assert (answer.status, answer.json["choices"][0]["message"]["content"]) == (200, "here")

        virtually(tmp_path, scene, cold_start_wait_seconds=30.0)

    def test_each_request_waits_as_long_from_its_own_arrival(self, tmp_path: Path) -> None:
        async def scene(house: Cluster) -> None:
            await (await house.worker(say("x"))).stop()
            await asyncio.sleep(600.0)
            for _ in range(2):
                began = asyncio.get_running_loop().time()
                answer = await house.client.begin_chat("hi").done(100.0)
                assert answer.status == 503
                assert answer.headers["retry-after"]
                assert 30.0 <= asyncio.get_running_loop().time() - began < 31.0

        virtually(tmp_path, scene, cold_start_wait_seconds=30.0)
