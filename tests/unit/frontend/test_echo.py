"""`echo` of completions, as those use it who measure how likely a given text is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from support.frontend_cluster import Cluster, cluster, say


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as found:
        yield found


async def scores(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
    """Report that each prompt token had -0.5, and that `z` was likelier, in the last chunk; generate `!`."""
    prompt = body["token_ids"]
    entries = [{str(one): {"logprob": -0.5, "rank": 2}, "122": {"logprob": -0.25, "rank": 1}} for one in prompt[1:]]
    sink.send_tokens([ord("!")], extra={"log_probs": [-0.125]})
    await asyncio.sleep(0)
    data = {"engine_data": {"prompt_logprobs": [None, *entries]}}
    sink.send_tokens([], finish_reason="length", extra=data)


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
async def test_the_prompt_stands_in_front_of_the_answer(house: Cluster, prompt: Any) -> None:
    worker = await house.worker(say("def", "gh"))
    answer = await house.client.completion(prompt, echo=True)
    assert answer.json["choices"][0]["text"] == "abcdefgh"
    assert answer.json["choices"][0]["logprobs"] is None
    streamed = await house.client.completion(prompt, echo=True, stream=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed.chunks) == "abcdefgh"
    assert worker.requests[0]["output_options"]["prompt_logprobs"] is None
    assert answer.json["usage"]["completion_tokens"] == 5


async def test_every_choice_of_every_prompt_has_its_own(house: Cluster) -> None:
    await house.worker(say("!"))
    answer = await house.client.completion(["a", "bc"], echo=True, n=2)
    assert [choice["text"] for choice in answer.json["choices"]] == ["a!", "a!", "bc!", "bc!"]
    streamed = await house.client.completion(["a", "bc"], echo=True, n=2, stream=True)
    for index, expected in enumerate(["a!", "a!", "bc!", "bc!"]):
        pieces = [one["text"] for chunk in streamed.chunks for one in chunk["choices"] if one["index"] == index]
        assert "".join(pieces) == expected


async def test_log_probabilities_cover_the_prompt_and_the_answer(house: Cluster) -> None:
    worker = await house.worker(scores)
    answer = await house.client.completion([[97, 98, 99], [97]], echo=True, logprobs=1, max_tokens=1)
    assert answer.status == 200, answer.body
    assert answer.json["choices"][0]["text"] == "abc!"
    first, second = [choice["logprobs"] for choice in answer.json["choices"]]
    assert first == {
        "tokens": ["a", "b", "c", "!"],
        "token_logprobs": [None, -0.5, -0.5, -0.125],
        "top_logprobs": [None, {"b": -0.5, "z": -0.25}, {"c": -0.5, "z": -0.25}, {"!": -0.125}],
        "text_offset": [0, 1, 2, 3],
    }
    assert second["tokens"] == ["a", "!"]
    assert worker.requests[0]["output_options"]["prompt_logprobs"] == 1


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}])
async def test_with_no_token_to_generate_the_prompt_is_the_answer(house: Cluster, fields: dict[str, Any]) -> None:
    worker = await house.worker(scores)
    answer = await house.client.completion("abc", echo=True, max_tokens=0, **fields)
    (choice,) = answer.json["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert answer.json["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
    assert worker.requests[0]["stop_conditions"]["max_tokens"] == 1  # engines generate one at least
    if fields:
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    else:
        usage: dict[str, Any] = {"stream_options": {"include_usage": True}}
        streamed = await house.client.completion("abc", echo=True, max_tokens=0, stream=True, **usage)
        *chunks, last = streamed.chunks
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc"
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert last["usage"]["completion_tokens"] == 0


async def test_two_ids_of_one_text_keep_the_likelier_and_ids_may_stand_for_texts(house: Cluster) -> None:
    async def broken(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        entry = {"195": {"logprob": -3.0, "rank": 2}, "196": {"logprob": -1.0, "rank": 1}}
        data = {"engine_data": {"prompt_logprobs": [None, entry]}}
        sink.send_tokens([33], finish_reason="length", extra={"log_probs": [float("-inf")], **data})

    await house.worker(broken)
    fields: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 1}
    found = (await house.client.completion([97, 195], **fields)).json["choices"][0]["logprobs"]
    assert found["top_logprobs"][1] == {"\ufffd": -1.0}
    assert found["token_logprobs"] == [None, -3.0, -9999.0]
    found = (await house.client.completion([97, 195], return_tokens_as_token_ids=True, **fields)).json["choices"][0]
    assert found["logprobs"]["tokens"] == ["token_id:97", "token_id:195", "token_id:33"]
    assert found["logprobs"]["top_logprobs"][1] == {"token_id:195": -3.0, "token_id:196": -1.0}


async def test_an_engine_that_does_not_score_prompts_is_a_clear_refusal(house: Cluster) -> None:
    await house.worker(say("!"))
    answer = await house.client.completion("abc", echo=True, logprobs=1)
    assert answer.status == 400
    assert "does not report log probabilities of prompt tokens" in answer.json["message"]
    assert answer.json["error"]["param"] == "echo"


async def two_steps(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
    """Report on the prompt in the middle: `!`, the scores, `?`."""
    prompt = body["token_ids"]
    sink.send_tokens([ord("!")], extra={"log_probs": [-0.125]})
    await asyncio.sleep(0)
    entries = [{str(one): {"logprob": -0.5, "rank": 1}} for one in prompt[1:]]
    sink.send_tokens([], extra={"engine_data": {"prompt_logprobs": [None, *entries]}})
    await asyncio.sleep(0)
    sink.send_tokens([ord("?")], finish_reason="length", extra={"log_probs": [-0.25]})


@pytest.mark.parametrize("script", [scores, two_steps])
async def test_a_stream_waits_for_what_is_known_of_the_prompt(house: Cluster, script: Any) -> None:
    await house.worker(script)
    fields: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 2}
    (whole,) = (await house.client.completion("abc", **fields)).json["choices"]
    answer = await house.client.completion("abc", stream=True, **fields)
    assert answer.status == 200
    pieces = [choice for chunk in answer.chunks for choice in chunk["choices"]]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert pieces[0]["text"] == "abc!"
    assert pieces[-1]["finish_reason"] == whole["finish_reason"]
    for member in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"][member]]
        assert joined == whole["logprobs"][member], member


async def test_a_stream_of_nothing_but_the_prompt_has_its_log_probabilities(house: Cluster) -> None:
    await house.worker(scores)
    usage: dict[str, Any] = {"stream_options": {"include_usage": True}}
    answer = await house.client.completion("abc", echo=True, logprobs=1, max_tokens=0, stream=True, **usage)
    *chunks, last = answer.chunks
    (choice,) = [choice for chunk in chunks for choice in chunk["choices"]]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert last["usage"]["completion_tokens"] == 0


async def test_a_stream_of_an_engine_that_does_not_score_prompts_is_a_clear_refusal(house: Cluster) -> None:
    await house.worker(say("!"))
    answer = await house.client.completion("abc", echo=True, logprobs=1, stream=True)
    assert answer.status == 400
    assert answer.json["error"]["param"] == "echo"
