"""Many log probabilities of many choices: bounded together, written as they come, and in turns with what others do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dynamo.frontend.apis.chat import _ChatRenderer
from dynamo.frontend.pipeline import generation_call
from dynamo.frontend.pipeline.collector import CollectedAnswer
from dynamo.frontend.pipeline.events import Logprobs
from dynamo.protocol.openai.validation import MAX_SCORES
from support.frontend_cluster import Script, cluster

TOP = [{"rank": rank, "token_id": 98 + rank, "logprob": -0.25 * (rank + 1)} for rank in range(5)]
LETTERS = "abcdefgh"


def scored(text: str = LETTERS) -> Script:
    """A worker that sends two letters in each chunk, with their alternatives."""

    async def script(body: Any, context: Any, sink: Any) -> None:
        for place in range(0, len(text), 2):
            extra = {"log_probs": [-0.5, -0.75], "top_logprobs": [TOP, TOP]}
            is_last = place + 2 == len(text)
            ids = list(text[place : place + 2].encode())
            sink.send_tokens(ids, finish_reason="stop" if is_last else None, extra=extra)
            await asyncio.sleep(0)

    return script


async def test_all_of_them_are_in_the_answer_streamed_or_not(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        await house.worker(scored())
        asked: dict[str, Any] = {"n": 3, "logprobs": True, "top_logprobs": 5, "max_tokens": 8}
        whole = (await house.client.chat(**asked)).json["choices"]
        chunks = (await house.client.chat(stream=True, **asked)).chunks
        for choice in whole:
            items = choice["logprobs"]["content"]
            assert "".join(item["token"] for item in items) == LETTERS
            assert [item["logprob"] for item in items] == [-0.5, -0.75] * 4
            assert [[top["token"] for top in item["top_logprobs"][:5]] for item in items] == [list("bcdef")] * 8
            parts = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
            assert [item for part in parts for item in (part.get("logprobs") or {}).get("content", [])] == items


async def test_the_lists_of_completions_follow_one_another(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        await house.worker(scored("aé" + LETTERS[:4]))
        asked: dict[str, Any] = {"n": 2, "logprobs": 5, "max_tokens": 8}
        whole = (await house.client.completion("x", **asked)).json["choices"]
        chunks = (await house.client.completion("x", stream=True, **asked)).chunks
        for choice in whole:
            found = choice["logprobs"]
            assert found["text_offset"] == [
                sum(map(len, found["tokens"][:place])) for place in range(len(found["tokens"]))
            ]
            parts = [one["logprobs"] for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert [value for part in parts if part for value in part[name]] == found[name]


async def test_others_have_a_turn_between_any_two_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_call, "SCORES_AT_ONCE", 12)  # of one delta
    written: list[str] = []
    write = _ChatRenderer.write_scores

    def noted(self: Any, index: int, choice: Any) -> None:
        written.append("scores")
        write(self, index, choice)

    async def others() -> None:
        while True:
            written.append("others")
            await asyncio.sleep(0)

    async with cluster(tmp_path) as house:
        await house.worker(scored())
        monkeypatch.setattr(_ChatRenderer, "write_scores", noted)
        beside = asyncio.ensure_future(others())
        answer = await house.client.chat(n=16, logprobs=True, top_logprobs=5, max_tokens=8)
        beside.cancel()
    assert answer.status == 200
    assert written.count("scores") >= 16
    assert "scores scores" not in " ".join(written)


async def test_nothing_but_their_text_is_held_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[CollectedAnswer] = []
    collect = _ChatRenderer.collect

    def kept(self: Any, collected: CollectedAnswer) -> bytes:
        held.append(collected)
        return collect(self, collected)

    monkeypatch.setattr(_ChatRenderer, "collect", kept)
    async with cluster(tmp_path) as house:
        await house.worker(scored())
        await house.client.chat(n=2, logprobs=True, top_logprobs=5, max_tokens=8)
    (collected,) = held
    for choice in collected.choices:
        assert choice.logprobs == []
        assert not any(isinstance(event, Logprobs) for events in choice.outputs for event in events)
        assert b"".join(piece for pieces in choice.scores for piece in pieces).count(b'"token_id"') == len(LETTERS)


async def test_an_answer_of_several_choices_has_a_bound_for_all_of_them(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        worker = await house.worker(scored())
        most = MAX_SCORES // (128 * 21)
        asked: dict[str, Any] = {"n": 128, "logprobs": True, "top_logprobs": 20}
        refused = await house.client.chat(**asked, max_tokens=most + 1)
        assert (refused.status, refused.json["error"]["param"]) == (400, "max_tokens")
        assert f"must not exceed {most}, got {most + 1}" in refused.json["error"]["message"]
        of_text = await house.client.completion(["x"] * 64, n=2, logprobs=20, max_tokens=most + 1)
        assert (of_text.status, of_text.json["error"]["param"]) == (400, "max_tokens")
        assert worker.requests == []

        assert (await house.client.chat(**asked)).status == 200
        assert {request["stop_conditions"]["max_tokens"] for request in worker.requests} == {most}
        worker.requests.clear()
        free: list[dict[str, Any]] = [{"n": 1, "logprobs": True, "top_logprobs": 20}, {"n": 2}]
        for alone in free:
            assert (await house.client.chat(**alone)).status == 200
        assert {request["stop_conditions"]["max_tokens"] for request in worker.requests} == {None}
        assert (await house.client.chat(n=1, logprobs=True, top_logprobs=20, max_tokens=100_000)).status == 200


async def test_those_of_prompts_have_a_bound(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        worker = await house.worker()
        prompt = [97] * (MAX_SCORES // 128 + 1)
        refused = await house.client.completion(prompt, n=128, prompt_logprobs=0, max_tokens=1)
        assert (refused.status, refused.json["error"]["param"]) == (400, "prompt_logprobs")
        assert worker.requests == []
        assert (await house.client.completion(prompt, n=1, prompt_logprobs=0, max_tokens=1)).status == 200
