"""`/v1/embeddings`: what is refused, what workers get, and what becomes of their answers."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from dynamo.errors import EngineShutdown, InvalidArgument
from dynamo.protocol.model_types import ModelInput, ModelType
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from support.cases import each_case
from support.frontend_cluster import Script, cluster, fail, say
from support.patience import PATIENCE_SECONDS
from support.tiny_model import BOS, EOS, write_tiny_model

Body = dict[str, Any]


def packed(*values: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def vector_of(ids: list[int]) -> tuple[float, float]:
    """What these workers embed an input as: its length and its first id, both exact in float32."""
    return float(len(ids)), float(ids[0])


def embeds(**changes: Any) -> Script:
    """A worker that embeds; `changes` replace members of its answer."""

    async def script(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        inputs = body["token_ids"]
        tokens = sum(map(len, inputs))
        answer = {
            "embeddings": [packed(*vector_of(ids)) for ids in inputs],
            "prompt_tokens": tokens,
            "total_tokens": tokens,
        }
        sink.send_object({"data": {**answer, **changes}})
        sink.end()

    return script


def answers(value: Any) -> Script:
    async def script(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        sink.send_object({"data": value})
        sink.end()

    return script


EMBEDDING: dict[str, Any] = {"model_type": ModelType.Embedding}


async def ask(found: Any, body: Body) -> tuple[int, Body]:
    reply = await found.client.call("POST", "/v1/embeddings", {"model": "m", **body})
    return reply.status, reply.json


async def test_each_input_has_its_vector_in_the_order_of_the_inputs(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        worker = await found.worker(embeds(), **EMBEDDING)
        status, body = await ask(found, {"input": ["abc", "z"]})
        assert status == 200
        assert [entry["embedding"] for entry in body["data"]] == [[3.0, 97.0], [1.0, 122.0]]
        assert [entry["index"] for entry in body["data"]] == [0, 1]
        assert body["object"] == "list"
        assert body["data"][0]["object"] == "embedding"
        assert body["model"] == "m"
        assert body["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
        assert worker.requests[0]["token_ids"] == [[97, 98, 99], [122]]
        assert worker.requests[0]["dimensions"] is None


@pytest.mark.parametrize(
    ("asked", "has_frame"), [({}, True), ({"add_special_tokens": True}, True), ({"add_special_tokens": False}, False)]
)
async def test_texts_get_the_tokens_that_the_tokenizer_adds_once(tmp_path: Path, asked: Body, has_frame: bool) -> None:
    directory = write_tiny_model(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A {EOS}", special_tokens=[(BOS, 0), (EOS, 1)])
    tokenizer.save(str(directory / "tokenizer.json"))
    bare = tokenizer.encode("hello", add_special_tokens=False).ids
    framed = [0, *bare, 1] if has_frame else bare
    async with cluster(tmp_path) as found:
        worker = await found.worker(embeds(), directory=directory, **EMBEDDING)
        for value in ("hello", bare):
            status, body = await ask(found, {"input": value, **asked})
            ids = bare if value == bare else framed
            assert (status, worker.requests[-1]["token_ids"]) == (200, [ids])
            assert body["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("value", ["abc", ["abc"], [97, 98, 99], [[97, 98, 99]]])
async def test_texts_and_token_ids_are_the_same_input(tmp_path: Path, value: Any) -> None:
    async with cluster(tmp_path) as found:
        worker = await found.worker(embeds(), **EMBEDDING)
        status, body = await ask(found, {"input": value})
        assert status == 200
        assert body["data"][0]["embedding"] == [3.0, 97.0]
        assert worker.requests[0]["token_ids"] == [[97, 98, 99]]


async def test_base64_is_little_endian_float32(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await found.worker(embeds(), **EMBEDDING)
        _, body = await ask(found, {"input": "abc", "encoding_format": "base64"})
        assert struct.unpack("<2f", base64.b64decode(body["data"][0]["embedding"])) == (3.0, 97.0)


async def test_a_large_batch_is_shared_out_and_comes_back_in_order(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        workers = [await found.worker(embeds(), **EMBEDDING) for _ in range(2)]
        texts = ["x" * (1 + number % 7) for number in range(300)]
        _, body = await ask(found, {"input": texts})
        assert [entry["embedding"][0] for entry in body["data"]] == [float(len(text)) for text in texts]
        sizes = [len(request["token_ids"]) for worker in workers for request in worker.requests]
        assert sum(sizes) == 300
        assert max(sizes) <= 32
        assert all(worker.requests for worker in workers)
        assert body["usage"]["prompt_tokens"] == sum(map(len, texts))


async def test_parts_of_one_request_take_a_bounded_number_of_places(tmp_path: Path) -> None:
    running = most = 0

    async def slow(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(10):
            await asyncio.sleep(0)
        running -= 1
        await embeds()(body, context, sink)

    async with cluster(tmp_path) as found:
        await found.worker(slow, **EMBEDDING)
        status, _ = await ask(found, {"input": ["x"] * 2048})
        assert status == 200
        assert 2 <= most <= 8


CASES: dict[str, dict[str, Any]] = {
    "nothing": {"body": {}, "param": "input"},
    "an empty text": {"body": {"input": ""}, "param": "input"},
    "an empty list": {"body": {"input": []}, "param": "input"},
    "an empty entry": {"body": {"input": ["a", ""]}, "param": "input[1]"},
    "an empty list of ids": {"body": {"input": [[1], []]}, "param": "input[1]"},
    "a mixture": {"body": {"input": ["a", [1]]}, "param": "input[1]"},
    "ids and texts": {"body": {"input": [1, "a"]}, "param": "input[1]"},
    "too many": {"body": {"input": ["a"] * 2049}, "param": "input"},
    "a number": {"body": {"input": 7}, "param": "input"},
    "a negative id": {"body": {"input": [-1]}, "param": "input[0]"},
    "no dimensions": {"body": {"input": "a", "dimensions": 0}, "param": "dimensions"},
    "text for dimensions": {"body": {"input": "a", "dimensions": "2"}, "param": "dimensions"},
    "a format": {"body": {"input": "a", "encoding_format": "hex"}, "param": "encoding_format"},
    "an unknown member": {"body": {"input": "a", "temperature": 1}, "param": "temperature"},
    "a cut to nothing": {"body": {"input": "a", "truncate_prompt_tokens": 0}, "param": "truncate_prompt_tokens"},
    "no model": {"body": {"input": "a", "model": " "}, "param": "model"},
}


@each_case("body,param", [(case["body"], case["param"]) for case in CASES.values()], ids=list(CASES))
async def test_a_broken_rule_is_a_400_that_names_the_field(tmp_path: Path, body: Body, param: str) -> None:
    async with cluster(tmp_path) as found:
        worker = await found.worker(embeds(), **EMBEDDING)
        status, answer = await ask(found, body)
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert worker.requests == []


async def test_an_input_longer_than_the_model_is_refused_by_its_place_or_cut_where_asked(tmp_path: Path) -> None:
    from dynamo.protocol.records import ModelRuntimeConfig

    async with cluster(tmp_path) as found:
        worker = await found.worker(embeds(), runtime_config=ModelRuntimeConfig(context_length=8), **EMBEDDING)
        status, answer = await ask(found, {"input": ["a", "b" * 9]})
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (
            400,
            "input[1]",
            "context_length_exceeded",
        )
        status, answer = await ask(found, {"input": ["a", "b" * 9], "truncate_prompt_tokens": -1})
        assert [entry["embedding"][0] for entry in answer["data"]] == [1.0, 8.0]
        assert worker.requests[-1]["token_ids"][1] == [98] * 8
        status, answer = await ask(found, {"input": "b" * 8})
        assert status == 200
        status, answer = await ask(found, {"input": "b", "truncate_prompt_tokens": 9})
        assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")


async def test_all_inputs_together_are_bounded(tmp_path: Path) -> None:
    async with cluster(tmp_path, embedding_tokens_limit=10) as found:
        await found.worker(embeds(), **EMBEDDING)
        assert (await ask(found, {"input": ["abcde", "abcde"]}))[0] == 200
        status, answer = await ask(found, {"input": ["abcde", "abcdef"]})
        assert status == 400
        assert "DYN_HTTP_EMBEDDING_TOKENS_LIMIT" in answer["message"]


WRONG: dict[str, dict[str, Any]] = {
    "too few": {"script": embeds(embeddings=[packed(1.0)])},
    "too many": {"script": embeds(embeddings=[packed(1.0)] * 3)},
    "none": {"script": embeds(embeddings=[])},
    "of different lengths": {"script": embeds(embeddings=[packed(1.0), packed(1.0, 2.0)])},
    "no numbers": {"script": embeds(embeddings=[packed(float("nan")), packed(1.0)])},
    "words": {"script": embeds(embeddings=["not base64!", packed(1.0)])},
    "half a number": {"script": embeds(embeddings=[base64.b64encode(b"abc").decode(), packed(1.0)])},
    "text in a list": {"script": embeds(embeddings=[["a"], [1.0]])},
    "empty ones": {"script": embeds(embeddings=[[], []])},
    "another object": {"script": answers({"data": []})},
    "a number": {"script": answers(7)},
    "nothing": {"script": answers(None)},
    "tokens": {"script": say("hello")},
}


@each_case("script", [case["script"] for case in WRONG.values()], ids=list(WRONG))
async def test_a_wrong_answer_of_a_worker_is_one_well_formed_error(tmp_path: Path, script: Script) -> None:
    async with cluster(tmp_path, migration_limit=0) as found:
        worker = await found.worker(script, **EMBEDDING)
        status, body = await ask(found, {"input": ["a", "b"]})
        assert status == 500, body
        assert body["error"]["message"]
        worker.script = embeds()
        assert (await ask(found, {"input": ["a", "b"]}))[0] == 200


async def test_float_lists_are_taken_as_well(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await found.worker(embeds(embeddings=[[1, 0.5]]), **EMBEDDING)
        _, body = await ask(found, {"input": "a"})
        assert body["data"][0]["embedding"] == [1.0, 0.5]


async def test_a_length_that_was_not_asked_for_is_an_error(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await found.worker(embeds(), **EMBEDDING)
        assert (await ask(found, {"input": "a", "dimensions": 2}))[0] == 200
        assert (await ask(found, {"input": "a", "dimensions": 3}))[0] == 500


async def test_what_the_engine_refuses_reaches_the_client(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await found.worker(fail(InvalidArgument("this model makes vectors of 2 dimensions only")), **EMBEDDING)
        status, body = await ask(found, {"input": "a", "dimensions": 3})
        assert status == 400
        assert "2 dimensions" in body["message"]


async def test_a_part_whose_worker_leaves_is_computed_by_another_one(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await found.worker(fail(EngineShutdown("gone")), **EMBEDDING)
        await found.worker(embeds(), **EMBEDDING)
        for _ in range(4):
            status, body = await ask(found, {"input": ["abc"] * 100})
            assert status == 200
            assert len(body["data"]) == 100


async def test_a_client_that_leaves_stops_every_part(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        worker = await found.worker(**EMBEDDING)
        worker.script = worker.hold
        body = {"model": "m", "input": ["x"] * 100}
        exchange = found.client.begin("POST", "/v1/embeddings", body)
        await asyncio.wait_for(worker.started.wait(), PATIENCE_SECONDS)
        exchange.disconnect()
        await asyncio.wait_for(worker.killed.wait(), PATIENCE_SECONDS)
        await exchange.task
        assert all(context.is_stopped() for context in worker.contexts)


async def test_a_model_of_another_kind_is_not_found(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await found.worker(model="m")
        status, body = await ask(found, {"input": "a"})
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        await found.worker(embeds(), model="e", **EMBEDDING)
        reply = await found.client.chat(model="e")
        assert reply.status == 404


async def test_a_model_may_chat_and_embed(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await found.worker(embeds(), model_type=ModelType.Chat | ModelType.Embedding)
        assert (await ask(found, {"input": "abc"}))[1]["data"][0]["embedding"] == [3.0, 97.0]


async def test_a_model_that_takes_text_gets_the_clients_own_body(tmp_path: Path) -> None:
    data = [{"object": "embedding", "index": 1, "embedding": [2.0]}, {"index": 0, "embedding": packed(1.0)}]
    answer = {"object": "list", "data": data, "usage": {"prompt_tokens": 9, "total_tokens": 9}}
    async with cluster(tmp_path) as found:
        worker = await found.worker(answers(answer), model_input=ModelInput.Text, **EMBEDDING)
        _, body = await ask(found, {"input": ["a", "b"], "user": "u"})
        assert worker.requests[0] == {"model": "m", "input": ["a", "b"], "user": "u"}
        assert [entry["embedding"] for entry in body["data"]] == [[1.0], [2.0]]
        assert body["usage"]["prompt_tokens"] == 9


async def test_requests_are_counted_under_their_endpoint(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        await found.worker(embeds(), **EMBEDDING)
        await ask(found, {"input": "abc"})
        await ask(found, {"input": ""})
        labels = {"endpoint": "embeddings", "request_type": "unary"}
        name = "dynamo_frontend_requests_total"
        assert found.metric(name, model="m", **labels, status="success") == 1
        assert found.metric(name, model="unknown_model", **labels, status="error", error_type="validation") == 1
        assert found.metric("dynamo_frontend_inflight_requests", model="m") == 0


async def test_the_kv_router_takes_requests_of_several_inputs(tmp_path: Path) -> None:
    async with cluster(tmp_path, router_mode="kv") as found:
        await found.worker(embeds(), **EMBEDDING)
        status, _ = await ask(found, {"input": ["abc", "d"]})
        assert status == 200
