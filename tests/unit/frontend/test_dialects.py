from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import Overloaded, Unknown
from dynamo.frontend.apis.chat import ChatApi
from dynamo.frontend.base.asgi import BodyBudget
from dynamo.frontend.base.shares import SharedBound
from dynamo.frontend.http.inference_route import InferenceRoute
from dynamo.frontend.http.routes import PathDialects, UnmatchedPath
from dynamo.frontend.pipeline.generation_call import GenerationCall
from dynamo.protocol.dialect import Dialect
from dynamo.protocol.openai.errors import RequestRejected
from support.asgi_client import Exchange
from support.frontend_cluster import Cluster, cluster, fail, say
from support.patience import PATIENCE_SECONDS

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


class OwnDialect(Dialect):
    keep_alive = b"event: ping\n\n"
    id_headers = (b"x-request-id", b"own-id")

    def error_body(self, rejected: RequestRejected, request_id: str) -> bytes:
        return json.dumps({"own": rejected.message, "id": request_id}).encode()

    def stream_failure(self, rejected: RequestRejected, request_id: str) -> bytes:
        return b"event: own-error\ndata: %d\n\n" % rejected.status


class OwnApi(ChatApi):
    dialect = OwnDialect()


def route(house: Cluster, *, body_limit_bytes: int = 1 << 20) -> InferenceRoute:
    call = GenerationCall(OwnApi(), house.frontend.pipeline)
    return InferenceRoute(call, body_limit_bytes=body_limit_bytes, budget=BodyBudget(SharedBound(1 << 20, None)))


async def ask(app: Any, body: Mapping[str, Any] | bytes, path: str = "/own", **headers: str) -> Exchange:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"content-type": "application/json", "x-request-id": "r1", **headers}
    return await Exchange(app, "POST", path, data, sent).done()


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{", {}, 400),
        (CHAT, {"content-type": "text/html"}, 415),
        (CHAT | {"model": "nope"}, {}, 404),
        (CHAT | {"temperature": 9}, {}, 400),
        (b" " * 2000, {}, 413),
    ],
)
async def test_every_rejection_of_a_route_has_the_shape_of_its_api(
    tmp_path: Path, body: Mapping[str, Any] | bytes, headers: dict[str, str], status: int
) -> None:
    async with cluster(tmp_path) as house:
        await house.worker()
        answer = await ask(route(house, body_limit_bytes=1000), body, **headers)
        assert answer.status == status
        assert answer.json["own"]
        assert answer.json["id"] == answer.headers["own-id"] == answer.headers["x-request-id"] == "r1"


async def test_a_shed_request_and_a_failed_one_have_the_shape_of_their_api(tmp_path: Path) -> None:
    async with cluster(tmp_path, max_requests_in_flight=1, migration_limit=0) as house:
        worker = await house.worker(fail(Unknown("broken")))
        failed = await ask(route(house), CHAT)
        assert (failed.status, failed.json["own"]) == (500, "Internal server error")
        worker.script = fail(Overloaded("full"))
        assert (await ask(route(house), CHAT)).json["own"] == "Service temporarily overloaded"
        worker.script = worker.hold
        first = house.client.begin_chat("hi")
        await worker.started.wait()
        shed = await ask(route(house), CHAT)
        assert (shed.status, list(shed.json)) == (529, ["own", "id"])
        assert shed.headers["retry-after"]
        first.disconnect()
        await first.done()


async def test_a_stream_that_fails_ends_as_its_api_says(tmp_path: Path) -> None:
    async with cluster(tmp_path, migration_limit=0) as house:
        await house.worker(fail(Unknown("broken"), after=("a",)))
        answer = await ask(route(house), CHAT | {"stream": True})
        assert answer.status == 200
        assert answer.headers["own-id"] == "r1"
        assert answer.body.endswith(b"\n\nevent: own-error\ndata: 500\n\n")


async def test_a_silent_stream_is_kept_alive_as_its_api_says(tmp_path: Path) -> None:
    async with cluster(tmp_path, peek_seconds=0.0) as house:
        worker = await house.worker()
        worker.script = worker.hold
        data = json.dumps(CHAT | {"stream": True}).encode()
        asked = Exchange(route(house), "POST", "/own", data, {"content-type": "application/json"})
        await asked.until(lambda one: b"event: ping\n\n" in one.body)
        asked.disconnect()
        await asked.done()


async def test_a_path_below_an_api_is_not_found_in_the_shape_of_that_api(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        unmatched = UnmatchedPath(PathDialects({"/own": route(house).dialect}))
        below = await ask(unmatched, b"", "/own/nope")
        assert (below.status, below.json) == (404, {"own": "Route not found: POST /own/nope", "id": "r1"})
        assert below.headers["own-id"] == "r1"
        beside = await ask(unmatched, b"", "/owner")
        assert beside.json["error"]["message"] == "Route not found: POST /owner"


async def test_an_api_may_end_a_failed_stream_with_what_its_renderer_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, migration_limit=0) as house:
        worker = await house.worker(fail(Unknown("broken"), after=("a",)))
        api = OwnApi()
        renderer = api.renderer

        def knowing(*of: Any) -> Any:
            made = renderer(*of)
            monkeypatch.setattr(type(made), "failed", lambda self, rejected: b"event: known\n\n")
            return made

        monkeypatch.setattr(api, "renderer", knowing)
        app = InferenceRoute(
            GenerationCall(api, house.frontend.pipeline),
            body_limit_bytes=1 << 20,
            budget=BodyBudget(SharedBound(1 << 20, None)),
        )
        assert (await ask(app, CHAT | {"stream": True})).body.endswith(b"}\n\nevent: known\n\n")
        worker.script = say("ok")
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert (await ask(app, CHAT)).status == 200
