"""`dynamo serve minilm`: the vectors of all-MiniLM-L6-v2 are those that transformers alone makes of the same texts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from support.real_models import Server, served
from support.real_prompts import greedy_requests

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]

PLAIN: Final = """
import json, sys, torch, transformers
directory, texts = sys.argv[1], json.load(sys.stdin)
tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
found = []
with torch.inference_mode():
    for text in texts:  # one at a time: nothing is filled up
        inputs = tokenizer(text, return_tensors="pt")
        mean = model(**inputs).last_hidden_state[0].mean(dim=0)
        found.append([inputs["input_ids"].shape[1], torch.nn.functional.normalize(mean, dim=0).tolist()])
print(json.dumps(found))
"""
TEXTS: Final = [
    *(body["messages"][-1]["content"] for _, body in greedy_requests(100) if "messages" in body),
    *("a", "The cat sat on the mat.", "word " * 400, "MiXeD CaSe, ÀÉÎ and naïve", "\n\t  spaces \u3000"),
]
CLOSE: Final = 1e-5


@pytest.fixture(scope="module")
def minilm(
    packaged_minilm: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, list[tuple[int, list[float]]]]]:
    """The server, and for each text how many tokens and which vector transformers makes of it."""
    python, directory = packaged_minilm
    ended = subprocess.run(
        [python, "-c", PLAIN, str(directory)], input=json.dumps(TEXTS), capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    with served(tmp_path_factory.mktemp("minilm") / "served", python, "minilm") as server:
        yield server, json.loads(ended.stdout)


async def vectors(server: Server, texts: Any, **more: Any) -> tuple[int, list[list[float]]]:
    reply = await server.reply("/v1/embeddings", {"input": texts, **more})
    assert reply.status == 200, reply.body
    answer = reply.json()
    return answer["usage"]["prompt_tokens"], [item["embedding"] for item in answer["data"]]


async def test_vectors_are_those_of_transformers(minilm: tuple[Server, list[tuple[int, list[float]]]]) -> None:
    server, expected = minilm
    for begin in range(0, len(TEXTS), 16):
        counted, found = await vectors(server, TEXTS[begin : begin + 16])
        assert counted == sum(tokens for tokens, _ in expected[begin : begin + 16])
        for one, (_, other) in zip(found, expected[begin : begin + 16], strict=True):
            assert one == pytest.approx(other, abs=CLOSE)


async def test_a_text_has_the_same_vector_alone(
    minilm: tuple[Server, list[tuple[int, list[float]]]],
) -> None:
    server, expected = minilm
    for text, (tokens, vector) in list(zip(TEXTS, expected, strict=True))[::20]:
        assert await vectors(server, text) == (tokens, [pytest.approx(vector, abs=CLOSE)])


async def test_an_input_that_is_too_long_is_a_400_and_there_is_no_chat(
    minilm: tuple[Server, list[tuple[int, list[float]]]],
) -> None:
    server, _ = minilm
    reply = await server.reply("/v1/embeddings", {"input": "word " * 600})
    assert (reply.status, b"512" in reply.body) == (400, True)
    reply = await server.reply("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    assert reply.status in (400, 404)
