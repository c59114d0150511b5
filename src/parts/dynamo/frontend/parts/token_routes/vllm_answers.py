"""The answers of vLLM's route of tokens, as one body or as events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from dynamo.errors import Unknown
from dynamo.frontend.parts.token_routes.vllm_requests import LoweredGenerate
from dynamo.frontend.pipeline.api import PROMPT_LOGPROBS, Answer, Renderer, RenderOptions
from dynamo.frontend.pipeline.collector import CollectedAnswer
from dynamo.frontend.pipeline.events import ChoiceOutput, Finished, Logprobs
from dynamo.protocol.openai.responses import token_logprobs
from dynamo.protocol.openai.sse import DONE

ROUTED_EXPERTS: Final = "routed_experts"
SAMPLING_MASK: Final = "sampling_mask"
TRANSFER: Final = "kv_transfer_params"
"""Members of an engine's `engine_data`, of the last chunk."""

LOWEST: Final = -9999.0


def no_text(token_id: int) -> str:
    """Return how a token is written where texts have no place."""
    return f"token_id:{token_id}"


def written(found: Sequence[Logprobs], alternatives: int) -> dict[str, object]:
    """Return the log probabilities of a choice; `alternatives`: how many are shown of each token, -1: all that came."""
    content: list[dict[str, object]] = []
    for each in found:
        items = token_logprobs(each.token_ids, each.log_probs, each.top_logprobs, no_text, as_token_ids=True)
        for item in items:
            shown = item.top_logprobs if alternatives < 0 else item.top_logprobs[:alternatives]
            tops = [_entry(top.token, top.logprob) for top in shown]
            content.append({**_entry(item.token, item.logprob), "top_logprobs": tops})
    return {"content": content}


def _entry(token: str, logprob: float) -> dict[str, object]:
    return {"token": token, "logprob": max(logprob, LOWEST), "bytes": list(token.encode())}


class VllmRenderer(Renderer):
    """One answer of the route."""

    def __init__(self, answer: Answer, options: RenderOptions) -> None:
        super().__init__(answer, options)
        request = answer.request
        assert isinstance(request, LoweredGenerate)
        self._id, self._alternatives = request.answer_id, request.logprobs

    def stream(self, output: ChoiceOutput) -> bytes:
        finished = next((event for event in output.events if isinstance(event, Finished)), None)
        if not output.token_ids and finished is None:
            return b""
        choice = {
            "index": output.choice,
            "logprobs": self._logprobs(
                [event for event in output.events if isinstance(event, Logprobs)], output.token_ids
            ),
            "finish_reason": None if finished is None else finished.reason,
            "token_ids": output.token_ids,
        }
        return self._event([choice], with_usage=self._options.continuous_usage)

    def splice(self) -> None:
        return None

    def end(self, *, with_usage: bool) -> bytes:
        return (self._event([], with_usage=True) if with_usage else b"") + DONE

    def routed(self, nvext: bytes) -> bytes:
        return DONE

    def _event(self, choices: Sequence[object], *, with_usage: bool) -> bytes:
        event: dict[str, object] = {"request_id": self._id, "choices": choices}
        if with_usage and (usage := self._answer.usage()) is not None:
            event["usage"] = msgspec.Raw(usage)
        return b"data: %b\n\n" % msgspec.json.encode(event)

    def collect(self, collected: CollectedAnswer) -> bytes:
        of_prompt = (collected.engine_data or {}).get(PROMPT_LOGPROBS)
        if self._answer.request.prompt_logprobs is not None and of_prompt is None:
            raise Unknown("the engine did not report the log probabilities of the prompt")
        choices = []
        for index, choice in enumerate(collected.choices):
            data: Mapping[str, object] = choice.engine_data or {}
            choices.append(
                {
                    "index": index,
                    "token_ids": choice.token_ids,
                    "logprobs": self._logprobs(choice.logprobs, choice.token_ids),
                    "finish_reason": None if choice.finished is None else choice.finished.reason,
                    ROUTED_EXPERTS: data.get(ROUTED_EXPERTS),
                    SAMPLING_MASK: data.get(SAMPLING_MASK),
                }
            )
        transfer = (collected.engine_data or {}).get(TRANSFER)
        body = {"request_id": self._id, "choices": choices, PROMPT_LOGPROBS: of_prompt, TRANSFER: transfer}
        return msgspec.json.encode(body)

    def _logprobs(self, found: Sequence[Logprobs], token_ids: Sequence[int]) -> dict[str, object] | None:
        """Return what was requested. Raises Unknown for an engine that gave none."""
        if self._alternatives is None:
            return None
        shown = written(found, self._alternatives)
        if token_ids and not shown["content"]:
            raise Unknown("the engine did not report log probabilities")
        return shown
