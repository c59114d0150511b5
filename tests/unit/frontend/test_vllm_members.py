"""Members that vLLM's clients send, through the whole frontend."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.requests import parse_chat
from support.cases import each_case
from support.frontend_cluster import Cluster, cluster, say
from support.tiny_model import BOS, write_tiny_model


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as found:
        yield found


@pytest.mark.parametrize(("asked", "sent"), [({}, 16), ({"min_tokens": 20}, 20), ({"max_tokens": 3}, 3)])
async def test_a_completion_without_a_limit_has_sixteen_tokens(
    house: Cluster, asked: dict[str, Any], sent: int
) -> None:
    worker = await house.worker(say("a"))
    answer = await house.client.call("POST", "/v1/completions", {"model": "m", "prompt": "hi", **asked})
    assert answer.status == 200
    assert worker.requests[-1]["stop_conditions"]["max_tokens"] == sent


async def test_the_limit_of_completions_without_one_is_a_setting(tmp_path: Path) -> None:
    async with cluster(tmp_path, completions_max_tokens=0) as house:
        worker = await house.worker(say("a"))
        await house.client.call("POST", "/v1/completions", {"model": "m", "prompt": "hi"})
        assert worker.requests[-1]["stop_conditions"]["max_tokens"] is None


def parts_of(answer: Any, *, stream: bool) -> list[dict[str, Any]]:
    return answer.chunks if stream else [answer.json]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_token_ids_stop_reasons_and_names_of_the_clients_own(house: Cluster, path: str, stream: bool) -> None:
    worker = await house.worker(say("ab", "cENDx"))
    given = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    body = {"model": "m", "stop": "END", "return_token_ids": True, "request_id": "mine-1", "stream": stream, **given}
    answer = await house.client.call("POST", path, body)
    parts = parts_of(answer, stream=stream)
    choices = [part["choices"][0] for part in parts]
    assert bytes(token for choice in choices for token in choice.get("token_ids", [])) == b"abcEND"
    holders = parts if "chat" in path else choices
    named = [holder["prompt_token_ids"] for holder in holders if "prompt_token_ids" in holder]
    assert named == [worker.requests[-1]["token_ids"]]
    assert [choice["stop_reason"] for choice in choices if "stop_reason" in choice] == ["END"]
    assert {part["id"] for part in parts} == {("chatcmpl" if "chat" in path else "cmpl") + "-mine-1"}


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_the_prompt_are_returned(house: Cluster, stream: bool) -> None:
    scores = [None, {"105": {"logprob": -0.5, "rank": 1}}]
    await house.worker(say("a", extra={"engine_data": {"prompt_logprobs": scores}}))
    chat = await house.client.chat("hi", prompt_logprobs=1, stream=stream)
    assert [part["prompt_logprobs"] for part in parts_of(chat, stream=stream) if "prompt_logprobs" in part] == [scores]
    body = {"model": "m", "prompt": "hi", "prompt_logprobs": 1, "stream": stream}
    completion = await house.client.call("POST", "/v1/completions", body)
    choices = [part["choices"][0] for part in parts_of(completion, stream=stream)]
    assert [choice["prompt_logprobs"] for choice in choices if "prompt_logprobs" in choice] == [scores]


async def test_bad_words_reach_the_engine_as_texts_and_as_tokens(house: Cluster) -> None:
    worker = await house.worker(say("a"))
    await house.client.chat("hi", bad_words=["no"])
    sampling = worker.requests[-1]["extra_args"]["sampling_options"]
    assert sampling == {"bad_words": ["no"], "bad_words_token_ids": [list(b"no")]}


async def test_a_prompt_is_cut_to_its_last_tokens(house: Cluster) -> None:
    worker = await house.worker(say("a"))
    body = {"model": "m", "prompt": "hello", "truncate_prompt_tokens": 3}
    assert (await house.client.call("POST", "/v1/completions", body)).json["usage"]["prompt_tokens"] == 3
    assert bytes(worker.requests[-1]["token_ids"]) == b"llo"


def write_model_that_begins_with_bos(directory: Path) -> Path:
    """Write a model whose tokenizer puts its first token, of id 0, before every text, as those of Llama do."""
    write_tiny_model(directory, chat_template="{{ bos_token }}{{ messages[0].content }}")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize(
    ("asked", "begins"), [({}, [0]), ({"add_special_tokens": True}, [0]), ({"add_special_tokens": False}, [])]
)
async def test_a_text_prompt_begins_with_the_tokens_of_the_post_processor(
    house: Cluster, tmp_path: Path, asked: dict[str, Any], begins: list[int]
) -> None:
    worker = await house.worker(say("a"), directory=write_model_that_begins_with_bos(tmp_path / "llama"))
    for prompt in ("hello", ["hello"], [5, 6]):
        answer = await house.client.call("POST", "/v1/completions", {"model": "m", "prompt": prompt, **asked})
        ids = worker.requests[-1]["token_ids"]
        assert answer.json["usage"]["prompt_tokens"] == len(ids)
        added = [] if prompt == [5, 6] else begins
        assert (ids[: len(added)], ids.count(0)) == (added, len(added))


@pytest.mark.parametrize("asked", [{}, {"add_special_tokens": True}, {"add_special_tokens": False}])
async def test_a_rendered_chat_has_its_first_token_once(house: Cluster, tmp_path: Path, asked: dict[str, Any]) -> None:
    worker = await house.worker(say("a"), directory=write_model_that_begins_with_bos(tmp_path / "llama"))
    assert (await house.client.chat("hi", **asked)).status == 200
    assert worker.requests[-1]["token_ids"].count(0) == 1


@each_case(
    ("member", "value"),
    [("request_id", "a b"), ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("bad_words", [" "])],
)
def test_members_of_vllm_have_bounds(member: str, value: Any) -> None:
    with pytest.raises(RequestRejected) as caught:
        parse_chat(json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], member: value}).encode())
    assert caught.value.param == member


async def test_a_nul_in_a_text_reaches_the_engine(house: Cluster) -> None:
    worker = await house.worker(say("a"))
    body = {"model": "m", "prompt": "a\0b"}
    assert (await house.client.call("POST", "/v1/completions", body)).status == 200
    assert bytes(worker.requests[-1]["token_ids"]) == b"a\0b"
    await house.client.chat("c\0d")
    assert b"c\0d" in bytes(worker.requests[-1]["token_ids"])
