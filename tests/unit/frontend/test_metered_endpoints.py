"""Every endpoint that serves models is metered: a row of usage for each, with what its answer says."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynamo.engines.sample.diffusion_engine import SampleDiffusionEngine
from dynamo.frontend.http.inference_route import InferenceRoute
from dynamo.protocol.model_types import ModelInput, ModelType
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from dynamo.worker.serving import RawServing
from support.access import bearer, closed_cluster, key
from support.frontend_cluster import Cluster, routes_of, say
from support.pictures import data_url, plain_png

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
PICTURE = data_url(plain_png((0, 200, 0), 16, 16))
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "/v1/chat/completions": ("m", {**HI, "max_tokens": 8}, "chat_completions"),
    "/v1/completions": ("m", {"prompt": "hi", "max_tokens": 8}, "completions"),
    "/v1/responses": ("m", {"input": "hi", "max_output_tokens": 16}, "responses"),
    "/v1/messages": ("m", {**HI, "max_tokens": 8}, "messages"),
    "/v1/embeddings": ("vectors", {"input": ["hi", "ho"]}, "embeddings"),
    "/v1/classify": ("vectors", {"input": "hi"}, "classify"),
    "/classify": ("vectors", {"input": "hi"}, "classify"),
    "/v1/pooling": ("vectors", {"input": "hi"}, "pooling"),
    "/pooling": ("vectors", {"input": "hi"}, "pooling"),
    "/v1/score": ("vectors", {"text_1": "hi", "text_2": "ho"}, "score"),
    "/score": ("vectors", {"text_1": "hi", "text_2": "ho"}, "score"),
    "/v1/rerank": ("vectors", {"query": "hi", "documents": ["a", "b"]}, "rerank"),
    "/v2/rerank": ("vectors", {"query": "hi", "documents": ["a", "b"]}, "rerank"),
    "/rerank": ("vectors", {"query": "hi", "documents": ["a", "b"]}, "rerank"),
    "/v1/images/generations": ("images", {"prompt": "a fox", "size": "16x16", "n": 2}, "images"),
    "/v1/images/edits": ("images", {"prompt": "a fox", "images": [{"image_url": PICTURE}]}, "images"),
}
COUNTS_TOKENS = {"/v1/responses/input_tokens", "/v1/messages/count_tokens"}  # no worker gets these


async def vectors(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
    sink.send_object({"data": {"embeddings": [[0.5] * 3 for _ in body["token_ids"]]}})
    sink.end()


async def pictures(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
    await RawServing(SampleDiffusionEngine(delay=0)).handle(dict(body), context, sink)


async def rows(found: Cluster, **query: str) -> list[dict[str, Any]]:
    text = "&".join([f"{name}={value}" for name, value in query.items()])
    answer = await found.client.begin("GET", "/admin/usage", headers=bearer("boss"), query=text).done()
    listed: list[dict[str, Any]] = answer.json["data"]
    return listed


def served_paths(found: Cluster) -> set[str]:
    return {route.path for route in routes_of(found.frontend.asgi) if isinstance(route.endpoint, InferenceRoute)}


async def test_a_walk_over_all_endpoints_leaves_a_row_of_each(tmp_path: Path) -> None:
    records = [key(path.strip("/").replace("/", "-")) for path in CASES]
    async with closed_cluster(
        tmp_path, *records, key("boss", role="admin"), usage_db=str(tmp_path / "usage.sqlite")
    ) as found:
        await found.worker(say("hello"))
        kinds = ModelType.Classify | ModelType.Pooling | ModelType.Rerank | ModelType.Embedding
        await found.worker(vectors, model="vectors", model_type=kinds)
        await found.worker(pictures, model="images", model_type=ModelType.Images, model_input=ModelInput.Text)
        assert CASES.keys() <= served_paths(found)
        told = {}
        for record, (path, (model, body, _)) in zip(records, CASES.items(), strict=True):
            answer = await found.client.call("POST", path, {"model": model, **body}, headers=bearer(record.id))
            assert answer.status == 200, (path, answer.body)
            told[record.id] = answer.json
        await asyncio.sleep(0)
        by_key = {row["key"]: row for row in await rows(found, group_by="key,endpoint,model")}
    for record, (path, (model, _, endpoint)) in zip(records, CASES.items(), strict=True):
        row, said = by_key[record.id], told[record.id]
        usage = said.get("usage") or {} if isinstance(said, dict) else {}
        assert (row["endpoint"], row["model"], row["requests"], row["errors"]) == (endpoint, model, 1, 0), path
        assert row["seconds"] > 0
        pictures_made = len(said["data"]) if model == "images" else 0
        assert row["images"] == pictures_made, path
        if model == "images":
            continue
        assert row["input"] == usage.get("prompt_tokens", usage.get("input_tokens", row["input"])) > 0, path
        assert row["output"] == usage.get("completion_tokens", usage.get("output_tokens", row["output"])), path
        assert bool(row["output"]) == (model == "m"), path


async def test_no_endpoint_that_serves_models_is_without_a_charge(tmp_path: Path) -> None:
    async with closed_cluster(
        tmp_path, key("k"), key("boss", role="admin"), usage_db=str(tmp_path / "usage.sqlite")
    ) as found:
        paths = sorted(served_paths(found))
        for number, path in enumerate(paths):
            answer = await found.client.call("POST", path, {"model": "nobody"}, headers=bearer("k"))
            assert 400 <= (answer.status or 0) < 500, path
            (row,) = await rows(found, group_by="key")
            assert (row["requests"], row["errors"]) == (number + 1, number + 1), path
    assert set(paths) >= COUNTS_TOKENS


async def test_a_file_of_the_version_before_gets_its_new_column(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute(
            "CREATE TABLE usage (minute INTEGER NOT NULL, key TEXT NOT NULL, project TEXT NOT NULL, model TEXT NOT NULL, "
            "endpoint TEXT NOT NULL, requests INTEGER NOT NULL, errors INTEGER NOT NULL, input INTEGER NOT NULL, "
            "cached INTEGER NOT NULL, output INTEGER NOT NULL, reasoning INTEGER NOT NULL, seconds REAL NOT NULL, "
            "PRIMARY KEY (minute, key, project, model, endpoint)) WITHOUT ROWID"
        )
        minute = int(time.time() // 60) - 10
        database.execute(
            f"INSERT INTO usage VALUES ({minute}, 'old', '', 'm', 'chat_completions', 7, 0, 1, 2, 3, 4, 0.5)"
        )
        database.execute("PRAGMA user_version = 1")
    for _ in range(2):
        async with closed_cluster(tmp_path, key("k"), key("boss", role="admin"), usage_db=str(path)) as found:
            await found.worker(say("hello"))
            assert (await found.client.chat(headers=bearer("k"))).status == 200
            by_key = {row["key"]: row for row in await rows(found, group_by="key")}
            assert (by_key["old"]["requests"], by_key["old"]["images"], by_key["old"]["seconds"]) == (7, 0, 0.5)
    assert by_key["k"]["requests"] == 2
