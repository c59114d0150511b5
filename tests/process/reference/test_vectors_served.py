"""Embeddings, classes and rankings of the reference engine as processes, asked by the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from support.http_client import ask
from support.processes import Cluster, Frontend
from support.random_weights import random_tensors
from support.reference_models import LLAMA, write_model
from support.tiny_model import tiny_tokenizer

TEXTS = ["a fox", "the quick brown fox jumps", "numbers: 0 1 2 3", "naïve café"]


def written(directory: Path, architecture: str, labels: int) -> Path:
    """A random model with a tokenizer; `labels` classes, 0: a model that generates."""
    tokenizer = tiny_tokenizer(320)
    config: dict[str, Any] = {**LLAMA, "architectures": [architecture], "vocab_size": tokenizer.get_vocab_size()}
    config["eos_token_id"] = 1
    config["bos_token_id"] = 0
    tensors = random_tensors(config)
    if labels:
        config["id2label"] = {str(number): f"class-{number}" for number in range(labels)}
        tensors.pop("lm_head.weight", None)
        shape = (labels, config["hidden_size"])
        tensors["score.weight"] = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    write_model(directory, config, tensors)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    root = tmp_path_factory.mktemp("vectors")
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        small = ("--kv-cache-mb", "4", "--endpoint-types")
        vector = written(root / "vector", "LlamaForCausalLM", 0)
        workers = [
            cluster.reference(f"vector-{number}", "vector", vector, *small, "chat,completions,embeddings,pooling")
            for number in range(2)
        ]
        judge = written(root / "judge", "LlamaForSequenceClassification", 3)
        workers.append(cluster.reference("judge", "judge", judge, *small, "classify"))
        ranker = written(root / "ranker", "LlamaForSequenceClassification", 1)
        workers.append(cluster.reference("ranker", "ranker", ranker, *small, "rerank"))
        frontend = cluster.frontend("frontend")
        cluster.wait_ready(frontend, *workers)
        yield frontend


def client(served: Frontend) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def test_the_official_client_reads_base64_and_floats_alike(served: Frontend) -> None:
    with client(served) as opened:
        packed = opened.embeddings.create(model="vector", input=TEXTS)  # asks for base64 by itself
        plain = opened.embeddings.create(model="vector", input=TEXTS, encoding_format="float")
        assert [item.index for item in packed.data] == [0, 1, 2, 3]
        for one, other in zip(packed.data, plain.data, strict=True):
            assert np.abs(np.array(one.embedding) - np.array(other.embedding)).max() < 1e-6
            assert np.linalg.norm(one.embedding) == pytest.approx(1.0, abs=1e-5)
        assert packed.usage.prompt_tokens == packed.usage.total_tokens > len(TEXTS)
        alone = opened.embeddings.create(model="vector", input=TEXTS[1]).data[0].embedding
        assert np.abs(np.array(alone) - np.array(packed.data[1].embedding)).max() < 1e-5


def test_a_large_batch_is_what_its_inputs_are_alone(served: Frontend) -> None:
    texts = [f"{TEXTS[number % 4]} {number}" for number in range(200)]
    with client(served) as opened:
        together = opened.embeddings.create(model="vector", input=texts).data
        for number in (0, 31, 32, 199):
            alone = opened.embeddings.create(model="vector", input=texts[number]).data[0].embedding
            assert np.abs(np.array(alone) - np.array(together[number].embedding)).max() < 1e-5


def test_the_official_client_gets_typed_errors(served: Frontend) -> None:
    with client(served) as opened:
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            opened.embeddings.create(model="vector", input="a", dimensions=8)
        with pytest.raises(openai.BadRequestError) as empty:
            opened.embeddings.create(model="vector", input=["a", ""])
        assert empty.value.param == "input[1]"
        with pytest.raises(openai.NotFoundError):
            opened.embeddings.create(model="judge", input="a")


async def post(served: Frontend, path: str, body: Any) -> Any:
    reply = await ask(served.port, path, body)
    assert reply.status == 200, reply.body
    return json.loads(reply.body)


async def test_classes_pooled_vectors_and_rankings(served: Frontend) -> None:
    judged = await post(served, "/v1/classify", {"model": "judge", "input": TEXTS})
    for entry in judged["data"]:
        assert sum(entry["probs"]) == pytest.approx(1.0, abs=1e-5)
        assert entry["label"] == f"class-{int(np.argmax(entry['probs']))}"
    pooled = await post(served, "/v1/pooling", {"model": "vector", "input": TEXTS[1], "task": "token_embed"})
    assert len(pooled["data"][0]["data"]) == pooled["usage"]["prompt_tokens"]
    query = {"query": TEXTS[0], "documents": TEXTS[1:]}
    for model in ("ranker", "vector"):
        listed = await post(served, "/v1/rerank", {"model": model, **query})
        ranked = await post(served, "/rerank", {"model": model, **query, "top_n": 2})
        scores = [entry["score"] for entry in listed]
        assert scores == sorted(scores, reverse=True)
        assert [entry["index"] for entry in ranked["results"]] == [entry["index"] for entry in listed[:2]]
        body = {"model": model, "text_1": TEXTS[0], "text_2": TEXTS[1:]}
        scored = await post(served, "/v1/score", body)
        by_index = {entry["index"]: entry["score"] for entry in listed}
        assert [entry["score"] for entry in scored["data"]] == pytest.approx([by_index[n] for n in range(3)], abs=1e-5)


async def test_generation_and_embeddings_share_a_worker(served: Frontend) -> None:
    body = {"model": "vector", "prompt": "a fox", "max_tokens": 20, "temperature": 0}
    before = (await post(served, "/v1/completions", body))["choices"][0]["text"]
    embeddings = [post(served, "/v1/embeddings", {"model": "vector", "input": TEXTS * 20}) for _ in range(4)]
    answers = await asyncio.gather(*[post(served, "/v1/completions", body) for _ in range(8)], *embeddings)
    assert {answer["choices"][0]["text"] for answer in answers[:8]} == {before}
