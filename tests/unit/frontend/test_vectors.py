"""Classes, pooled vectors, scores and rankings: what is refused, what workers get, and what becomes of their answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamo.protocol.model_types import ModelInput, ModelType
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from support.cases import each_case
from support.frontend_cluster import Cluster, Script, cluster

Body = dict[str, Any]
LABELLED = ModelRuntimeConfig(runtime_data={"labels": ["good", "bad"]})
JUDGE = ModelRuntimeConfig(runtime_data={"labels": ["fits"]})


def answers(value: Any) -> Script:
    async def script(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        made = value(body) if callable(value) else value
        sink.send_object({"data": made})
        sink.end()

    return script


def vectors(of: Any, **more: Any) -> Script:
    """A worker that sends `of(ids)` for each input."""
    return answers(lambda body: {"embeddings": [of(ids) for ids in body["token_ids"]], **more})


async def post(found: Cluster, path: str, body: Body) -> tuple[int | None, Any]:
    reply = await found.client.call("POST", path, {"model": "m", **body})
    return reply.status, reply.json


@pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
async def test_classes_have_names_and_shares(tmp_path: Path, path: str) -> None:
    script = vectors(lambda ids: [0.25, 0.75] if ids[0] == 97 else [1.0, 0.0], prompt_tokens=2)
    async with cluster(tmp_path) as found:
        worker = await found.worker(script, model_type=ModelType.Classify, runtime_config=LABELLED)
        status, body = await post(found, path, {"input": ["a", "b"], "use_activation": False})
        assert status == 200
        assert body["data"] == [
            {"index": 0, "label": "bad", "probs": [0.25, 0.75], "num_classes": 2},
            {"index": 1, "label": "good", "probs": [1.0, 0.0], "num_classes": 2},
        ]
        assert body["id"].startswith("classify-")
        assert (body["object"], body["model"]) == ("list", "m")
        assert body["usage"] == {"prompt_tokens": 2, "total_tokens": 2, "completion_tokens": 0}
        assert (worker.requests[0]["task"], worker.requests[0]["use_activation"]) == ("classify", False)


async def test_a_class_without_a_name_has_its_number(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await found.worker(vectors(lambda ids: [0.0, 0.5, 0.25]), model_type=ModelType.Classify)
        assert (await post(found, "/v1/classify", {"input": "a"}))[1]["data"][0]["label"] == "LABEL_1"


async def test_pooling_returns_vectors_and_matrices(tmp_path: Path) -> None:
    def pooled(body: Body) -> Body:
        if body["task"] == "token_embed":
            return {"embeddings": [[1.0, 2.0, 3.0, 4.0]], "shapes": [[2, 2]]}
        return {"embeddings": [[1.0, 2.0]]}

    async with cluster(tmp_path) as found:
        worker = await found.worker(answers(pooled), model_type=ModelType.Pooling)
        _, body = await post(found, "/v1/pooling", {"input": "ab"})
        assert body["data"] == [{"index": 0, "object": "pooling", "data": [1.0, 2.0]}]
        _, body = await post(found, "/pooling", {"input": "ab", "task": "token_embed"})
        assert body["data"][0] == {"index": 0, "object": "pooling", "data": [[1.0, 2.0], [3.0, 4.0]], "shape": [2, 2]}
        _, body = await post(found, "/v1/pooling", {"input": "ab", "encoding_format": "base64", "normalize": False})
        assert body["data"][0]["data"] == "AACAPwAAAEA="
        assert (worker.requests[-1]["encoding_format"], worker.requests[-1]["normalize"]) == ("base64", False)


def direction(ids: list[int]) -> list[float]:
    """A vector whose angle is that of the first letter: a is 0, b is 10 degrees, and so on."""
    angle = math.radians(10 * (ids[0] - 97))
    return [2 * math.cos(angle), 2 * math.sin(angle)]


async def test_scores_of_a_model_that_embeds_are_cosines(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        worker = await found.worker(vectors(direction), model_type=ModelType.Embedding)
        _, body = await post(found, "/v1/score", {"text_1": "a", "text_2": ["a", "b", "j"]})
        assert [entry["score"] for entry in body["data"]] == pytest.approx(
            [1.0, math.cos(math.radians(10)), 0.0], abs=1e-6
        )
        assert body["data"][0] == {"index": 0, "object": "score", "score": pytest.approx(1.0)}
        assert worker.requests[0]["token_ids"] == [[97], [98], [106]]  # each text once
        _, body = await post(found, "/score", {"text_1": ["a", "b"], "text_2": ["a", "c"]})
        assert [entry["score"] for entry in body["data"]] == pytest.approx([1.0, math.cos(math.radians(10))], abs=1e-6)


async def test_a_model_with_one_class_judges_both_texts_together(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        worker = await found.worker(
            vectors(lambda ids: [len(ids) / 8]), model_type=ModelType.Rerank, runtime_config=JUDGE
        )
        _, body = await post(found, "/v1/score", {"text_1": "q", "text_2": ["abc", "d"]})
        assert [entry["score"] for entry in body["data"]] == [0.5, 0.25]
        assert worker.requests[0]["token_ids"] == [[113, 97, 98, 99], [113, 100]]
        assert worker.requests[0]["task"] == "score"


DOCUMENTS = ["c", "a", "j", "b"]


async def test_a_ranking_has_both_shapes(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await found.worker(vectors(direction), model_type=ModelType.Embedding)
        _, ranked = await post(found, "/v1/rerank", {"query": "a", "documents": DOCUMENTS})
        assert [(entry["index"], entry["document"]) for entry in ranked] == [(1, "a"), (3, "b"), (0, "c"), (2, "j")]
        assert [entry["score"] for entry in ranked] == sorted([entry["score"] for entry in ranked], reverse=True)
        for path in ("/rerank", "/v2/rerank"):
            documents = [{"text": text} for text in DOCUMENTS]
            _, body = await post(found, path, {"query": "a", "documents": documents, "top_n": 2})
            assert [(each["index"], each["document"]) for each in body["results"]] == [
                (1, {"text": "a"}),
                (3, {"text": "b"}),
            ]
            assert body["results"][0]["relevance_score"] == pytest.approx(1.0)
            assert (body["model"], body["usage"]["total_tokens"]) == ("m", 4)
        _, ranked = await post(found, "/v1/rerank", {"query": "a", "documents": ["a"], "return_documents": False})
        assert "document" not in ranked[0]


async def test_a_worker_that_ranks_text_by_itself_is_checked_and_sorted(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        made: list[Any] = [{"index": 0, "score": 0.1}, {"index": 1, "relevance_score": 0.9}]
        worker = await found.worker(
            answers(lambda body: made), model_type=ModelType.Rerank, model_input=ModelInput.Text
        )
        _, ranked = await post(found, "/v1/rerank", {"query": "q", "documents": ["a", "b"]})
        assert [entry["index"] for entry in ranked] == [1, 0]
        assert worker.requests[0] == {"model": "m", "query": "q", "documents": ["a", "b"]}
        wrong: Any
        for wrong in (
            [{"index": 2, "score": 1}] * 2,
            [{"index": 0, "score": 1}] * 2,
            [{"index": 0}],
            [],
            {},
            None,
            "x",
        ):
            made = wrong
            status, body = await post(found, "/v1/rerank", {"query": "q", "documents": ["a", "b"]})
            assert (status, set(body)) == (500, {"message", "type", "code", "error", "details"}), wrong


REFUSED: list[tuple[str, Body, int, str]] = [
    ("/v1/classify", {}, 400, "input"),
    ("/v1/classify", {"input": ["a", ""]}, 400, "input[1]"),
    ("/v1/classify", {"messages": []}, 400, "input"),
    ("/v1/pooling", {"input": "a", "dimensions": 4}, 400, "dimensions"),
    ("/v1/pooling", {"input": "a", "task": "paint"}, 400, "task"),
    ("/v1/pooling", {"input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
    ("/v1/pooling", {"input": "a", "encoding_format": "bytes"}, 422, "encoding_format"),
    ("/v1/pooling", {"input": "a", "embed_dtype": "float16"}, 422, "embed_dtype"),
    ("/v1/pooling", {"input": "a", "endianness": "big"}, 422, "endianness"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, 400, "text_1"),
    ("/v1/score", {"text_1": "", "text_2": "a"}, 400, "text_1[0]"),
    ("/v1/score", {"text_1": "a", "text_2": []}, 400, "text_2"),
    ("/v1/rerank", {"query": " ", "documents": ["a"]}, 400, "query"),
    ("/v1/rerank", {"query": "q", "documents": []}, 400, "documents"),
    ("/v1/rerank", {"query": "q", "documents": ["a", " "]}, 400, "documents[1]"),
    ("/v1/rerank", {"query": "q", "documents": [{"title": "a"}]}, 400, "documents[0].text"),
    ("/v2/rerank", {"query": "q", "documents": ["a"], "top_n": 0}, 400, "top_n"),
    ("/v2/rerank", {"query": "q", "documents": ["a"], "max_tokens_per_doc": 9}, 422, "max_tokens_per_doc"),
]


@each_case("path,body,status,param", REFUSED)
async def test_a_broken_rule_names_the_field(tmp_path: Path, path: str, body: Body, status: int, param: str) -> None:
    async with cluster(tmp_path) as found:
        every = ModelType.Classify | ModelType.Pooling | ModelType.Rerank | ModelType.Embedding
        worker = await found.worker(vectors(direction), model_type=every)
        found_status, answer = await post(found, path, body)
        assert (found_status, answer["error"]["param"]) == (status, param), answer
        assert worker.requests == []


async def test_a_route_is_for_models_of_its_kind(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await found.worker(vectors(direction), model_type=ModelType.Embedding)
        assert (await post(found, "/v1/classify", {"input": "a"}))[0] == 404
        assert (await post(found, "/v1/pooling", {"input": "a"}))[0] == 404
