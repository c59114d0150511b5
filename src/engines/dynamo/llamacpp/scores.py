"""Log probabilities of the tokens that llama.cpp holds back: those with which a text ends within a character.

It sends them with the token that completes the character, and drops their log probabilities.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final

from dynamo.errors import EngineShutdown
from dynamo.llamacpp.slots import LlamaConnection, LlamaProcess

GENERATION: Final = "/completion"
FORCED: Final = "a"  # a text whose token ends with its character, so that llama.cpp sends it
FORCED_BIAS: Final = 1000.0
SEARCHED: Final = (64, 2**20)  # alternatives that are searched for a token: the first ones, then all


class HeldScores:
    """The log probabilities of tokens that llama.cpp has held back, of one request."""

    def __init__(self, process: LlamaProcess, body: Mapping[str, Any]) -> None:
        self._process, self._body = process, body

    async def of(self, sent: Sequence[int], tokens: Sequence[int]) -> list[Any]:
        """Return an entry for each of `tokens`, which follow the prompt and `sent`; none where none were requested.

        llama.cpp reports the probabilities before any sampler. So another token is forced in place of one that would be held.
        """
        if not self._body.get("n_probs") or not tokens:
            return []
        forced = (await self._process.call("POST", "/tokenize", {"content": FORCED}))["tokens"][-1]
        own = {
            "n_predict": 1,
            "stream": False,
            "grammar": "",
            "temperature": 0.0,
            "logit_bias": [[forced, FORCED_BIAS]],
        }
        entries = []
        for number, token in enumerate(tokens):
            asked = {**self._body, **own, "prompt": [*self._body["prompt"], *sent, *tokens[:number]]}
            entries.append(await self._entry(asked, token))
        return entries

    async def _entry(self, asked: Mapping[str, Any], token: int) -> Mapping[str, Any]:
        for count in SEARCHED:
            question = {
                **asked,
                "n_probs": max(count, asked["n_probs"]),
                "response_fields": ["completion_probabilities"],
            }
            (entry,) = (await self._process.call("POST", GENERATION, question))["completion_probabilities"]
            found = next((one for one in entry["top_logprobs"] if one["id"] == token), None)
            if found is not None:
                return {**found, "top_logprobs": entry["top_logprobs"]}
        raise EngineShutdown(f"llama.cpp has no log probability of token {token}, which it has generated")


async def divided(process: LlamaProcess, text: str) -> list[int]:
    """Return the tokens into which llama.cpp divides a text."""
    tokens: list[int] = (await process.call("POST", "/tokenize", {"content": text, "parse_special": False}))["tokens"]
    return tokens


async def walk_chat(
    connection: LlamaConnection, process: LlamaProcess, body: dict[str, Any]
) -> AsyncGenerator[Any, None]:
    """Yield the events of a chat with an entry of log probabilities for each token that a complete character has.

    The tokens of a character are those into which llama.cpp divides its text. An answer that its limit ends within a character
    shows nothing of it, and no entry either.
    """
    scores: HeldScores | None = None
    sent: dict[int, list[int]] = {}  # by choice
    while (event := await connection.next()) is not None:
        for choice in event.get("choices") or ():
            listed = (choice.get("logprobs") or {}).get("content")
            if not listed:
                continue
            text = choice["delta"].get("content") or ""
            before = sent.setdefault(choice["index"], [])
            *held, last = (await divided(process, text)) if not text.isascii() else [listed[-1]["id"]]
            if held and last == listed[0]["id"] and len(listed) == 1:
                if scores is None:
                    prompt = (await process.call("POST", "/apply-template", body))["prompt"]
                    scores = HeldScores(process, {"prompt": [prompt], "n_probs": body["top_logprobs"]})
                found = await scores.of(before, held)
                listed[:0] = [{**one, "top_logprobs": one["top_logprobs"][: body["top_logprobs"]]} for one in found]
                own = sum(len(one["bytes"]) for one in found)
                listed[-1]["bytes"] = listed[-1]["bytes"][own:]  # llama.cpp has those of the whole character there
            before += [entry["id"] for entry in listed]
            for entry in listed:
                for each in (entry, *entry["top_logprobs"]):
                    each["token"] = bytes(each["bytes"]).decode(errors="replace")  # llama.cpp has no text for a part
        yield event
