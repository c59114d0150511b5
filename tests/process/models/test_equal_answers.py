"""Greedy answers of SmolLM2 through `dynamo serve` are those of llama.cpp's own server on the same file.

Every server has one slot and gets the same requests in the same order. llama.cpp computes a token in a batch, or behind a
cached prompt, with sums in another order; where two tokens are nearly as likely, that may decide. So both sides cache alike,
and what comes of batches is judged in test_at_once.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from support.http_client import CHAT, COMPLETIONS, Reply
from support.real_models import PROMPTS, UNFINISHED, Answer, Server, bare_llama, served_llama
from support.real_prompts import greedy_requests

pytestmark = [pytest.mark.models, pytest.mark.timeout(3600)]

TAKEN: Final = greedy_requests(PROMPTS)
REQUESTS: Final = sorted(TAKEN, key=lambda each: isinstance(each[1].get("prompt"), list))  # what is left out, last
END: Final = ("", "<|im_end|>")
SHOWN: Final = 5


@pytest.fixture(scope="module")
def servers(smollm2: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """llama.cpp's own, and ours: llama.cpp tokenizes, or the frontend does."""
    root = tmp_path_factory.mktemp("equal")
    python, file = smollm2
    with ExitStack() as stack:
        yield {
            "bare": stack.enter_context(bare_llama(python, file, 1)),
            "text": stack.enter_context(served_llama(root / "text", python, str(file), 1, engine="llamacpp-text")),
            "tokens": stack.enter_context(served_llama(root / "tokens", python, "smollm2", 1)),
        }


def takes(mode: str, body: dict[str, Any]) -> bool:
    """Whether a server takes a request: a model that takes text takes no token ids."""
    return mode != "text" or not isinstance(body.get("prompt"), list)


async def answers_of(mode: str, server: Server) -> list[tuple[Answer, Answer] | None]:
    """What it answers to each request, whole and streamed; None for what it does not take."""
    return [
        (await server.answer(path, body), await server.answer(path, body, stream=True)) if takes(mode, body) else None
        for path, body in REQUESTS
    ]


async def test_greedy_answers_are_those_of_llama_cpp(servers: dict[str, Server]) -> None:
    found = dict(zip(servers, await asyncio.gather(*(answers_of(*each) for each in servers.items())), strict=True))
    expected = found.pop("bare")
    for mode, answers in found.items():
        for place, kind in enumerate(("whole", "streamed")):
            pairs = [
                (number, ours[place], theirs[place])
                for number, (ours, theirs) in enumerate(zip(answers, expected, strict=True))
                if ours is not None and theirs is not None
            ]
            differing = [(*REQUESTS[number], *pair) for number, *pair in pairs if not pair[0].agrees_with(pair[1])]
            assert not differing, f"{mode}, {kind}: {len(differing)} of {len(pairs)} differ: {differing[:SHOWN]}"
            print(f"{mode}, {kind}: {len(pairs)} of {len(pairs)} answers equal")


Scored = list[tuple[str, float, dict[str, float]]]


def scored(reply: Reply) -> Scored:
    """Of each token: its text, its log probability, and the alternatives. Reads both shapes: of chats, and of completions."""
    is_stream = reply.headers["content-type"].startswith("text/event-stream")
    found: Scored = []
    for part in reply.events if is_stream else [reply.json()]:
        for logprobs in [choice["logprobs"] for choice in part["choices"] if choice.get("logprobs")]:
            if "content" in logprobs:
                entries = [(one["token"], one["logprob"], one["top_logprobs"]) for one in logprobs["content"]]
                found += [
                    (text, value, {each["token"]: each["logprob"] for each in top}) for text, value, top in entries
                ]
            else:
                found += zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    return found


async def test_log_probabilities_are_those_of_llama_cpp(servers: dict[str, Server]) -> None:
    """Of text in one script: llama.cpp reports only the last one of the tokens of a character.

    The end token counts for nothing here: llama.cpp's streams leave it out, its other answers do not.
    """
    compared = 0
    for path, body in [each for each in REQUESTS[:100] if str(each[1]).isascii() and takes("text", each[1])]:
        wanted = {**body, "logprobs": True, "top_logprobs": 3} if path == CHAT else {**body, "logprobs": 3}
        for stream in (False, True):
            replies = await asyncio.gather(*(each.reply(path, wanted, stream=stream) for each in servers.values()))
            theirs, *others = [[one for one in scored(reply) if one[0] not in END] for reply in replies]
            for ours in others:
                assert [text for text, _, _ in ours] == [text for text, _, _ in theirs]
                for (_, value, top), (_, their_value, their_top) in zip(ours, theirs, strict=True):
                    assert value == pytest.approx(their_value, abs=1e-6)
                    assert named(top) == pytest.approx(named(their_top), abs=1e-6)
                    compared += 1
    assert compared > 100


def named(top: Mapping[str, float]) -> dict[str, float]:
    """The alternatives: llama.cpp gives the end token and parts of characters an empty text, we give them names."""
    return {"" if text in (*END, UNFINISHED) else text: value for text, value in top.items()}


async def test_a_repeated_prompt_is_read_from_the_cache(servers: dict[str, Server]) -> None:
    body = {"prompt": "The cat sat on the mat. " * 30, "max_tokens": 2, "temperature": 0.0}
    found = {}
    for mode, server in servers.items():
        usages = [(await server.reply(COMPLETIONS, body)).json()["usage"] for _ in range(2)]
        found[mode] = [(one["prompt_tokens"], one["prompt_tokens_details"]["cached_tokens"]) for one in usages]
    assert found["text"] == found["tokens"] == found["bare"]
    (prompt, before), (_, cached) = found["bare"]
    assert cached > 0.9 * prompt > before
