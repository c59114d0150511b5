"""The list of workers for a trainer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynamo.common.rl import RLRouteRegistry
from dynamo.errors import CannotConnect
from dynamo.frontend.parts.rl.part import PATH, RlScope, RlWorkers, TrainerDirectory
from dynamo.frontend.parts.switches import RlSettings
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from dynamo.runtime.distributed import DistributedRuntime
from support.asgi_client import AsgiClient
from support.frontend_cluster import memory_runtime

EVERYWHERE = RlScope(None, None)


async def unhelpful(request: Any) -> AsyncIterator[dict[str, Any]]:
    yield {"status": "error", "message": "not now"}


async def broken(request: Any) -> AsyncIterator[dict[str, Any]]:
    raise RuntimeError("broken")
    yield {}


def sending(handler: Any) -> Any:
    """Return what serves an endpoint with the items of a generator."""

    async def handle(body: Any, context: Context, sink: ResponseSink) -> None:
        async for item in handler(body):
            sink.send_object({"data": item})

    return handle


async def serve(*workers: tuple[str, Any]) -> list[DistributedRuntime]:
    """Serve an endpoint for each path, each in a runtime of its own."""
    runtimes = []
    for path, handler in workers:
        runtime = memory_runtime()
        if handler is None:
            registry = RLRouteRegistry(runtime, world_size=2)
            only_its_name: Any = unhelpful
            registry.add_route("pause_generation", only_its_name)
            handler = registry.dispatch_stream
        runtimes.append(runtime)
        await runtime.endpoint(path).start_serving(sending(handler))
    return runtimes


async def listed(scope: RlScope = EVERYWHERE, **settings: Any) -> dict[str, Any]:
    async with memory_runtime() as runtime:
        await runtime.start()
        app = RlWorkers(TrainerDirectory(runtime, RlSettings(**settings), scope))
        answer = await AsgiClient(app).call("GET", PATH)
        assert answer.status == 200
        found: dict[str, Any] = json.loads(answer.body)
        return found


async def test_workers_are_listed_in_order_with_what_they_report_and_why_not() -> None:
    runtimes = await serve(
        ("b.trained.rl", None), ("a.trained.rl", unhelpful), ("a.other.rl", broken), ("a.trained.x", None)
    )
    try:
        found = await listed()
        assert (found["protocol_version"], found["namespace"]) == (1, None)
        assert [(each["namespace"], each["component"], each["endpoint"]) for each in found["workers"]] == [
            ("a", "other", "rl"), ("a", "trained", "rl"), ("b", "trained", "rl"),
        ]  # fmt: skip
        failed, refused, told = found["workers"]
        assert (told["routes"], told["world_size"], "error" in told) == (["pause_generation"], 2, False)
        assert told["instance_id"] == runtimes[0].connection_id()
        assert told["request_plane_url"] == "dyn://b.trained.rl"
        assert (refused["error"], refused["routes"]) == ("not now", [])
        assert failed["error"]
        assert len((await listed(RlScope("b", None)))["workers"]) == 1
        assert (await listed(RlScope("b", "a")))["namespace"] == "a"
        assert len((await listed(RlScope(None, "a")))["workers"]) == 2
        assert len((await listed(component="other", more_components=("none",)))["workers"]) == 1
        assert len((await listed(endpoint="x"))["workers"]) == 1
    finally:
        for runtime in runtimes:
            await runtime.aclose()


async def test_a_store_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(prefix: str) -> dict[str, bytes]:
        raise CannotConnect("the store is away")

    async with memory_runtime() as runtime:
        await runtime.start()
        client = AsgiClient(RlWorkers(TrainerDirectory(runtime, RlSettings(), EVERYWHERE)))
        monkeypatch.setattr(runtime.discovery, "get_prefix", lost)
        answer = await client.call("GET", PATH)
        assert (answer.status, answer.json) == (500, {"error": "discovery_failed", "message": "the store is away"})
        refused = await client.call("POST", PATH)
        assert (refused.status, refused.headers["allow"], refused.body) == (405, "GET,HEAD", b"")
        assert (await client.call("GET", "/")).status == 404


async def test_a_worker_has_the_model_of_its_card_and_not_of_an_adapter() -> None:
    (runtime,) = await serve(("ns.a.rl", None))
    try:
        endpoint = runtime.endpoint("ns.a.generate")
        await endpoint.publish_model({"display_name": "adapter"}, suffix="adapter")
        await endpoint.publish_model({"display_name": "base"})
        (worker,) = (await listed())["workers"]
        assert worker["model"] == "base"
    finally:
        await runtime.aclose()
