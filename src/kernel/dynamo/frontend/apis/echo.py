"""`echo` of completions: the prompt in front of the answer, with its log probabilities where they are requested.

This is how the likelihood of a given text is measured: the text is the prompt, and at most one token is generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.frontend.pipeline.api import PROMPT_LOGPROBS, Answer
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.escaping import json_line
from dynamo.protocol.openai.requests import CompletionRequest
from dynamo.protocol.openai.responses import TokenLogprob, finite


class EchoedPrompts:
    """What stands in front of each choice of one answer."""

    __slots__ = ("_answer", "_request")

    def __init__(self, answer: Answer, request: CompletionRequest) -> None:
        self._answer, self._request = answer, request

    @property
    def drops_answer(self) -> bool:
        """Whether the prompt is all there is. Engines generate one token at least; it is not shown and not counted."""
        return self._request.max_tokens == 0

    def text(self, choice: int) -> str:
        """Return the prompt of a choice, as the client sent it or as the text of its ids."""
        number = choice // self._answer.work.plan.choices
        source = self._request.prompts()[number]
        if isinstance(source, str):
            return source
        return self._answer.model.text.tokenizer.decode(source, skip_special_tokens=False)

    def logprobs(
        self, choice: int, engine_data: Mapping[str, Any] | None, generated: Sequence[TokenLogprob]
    ) -> tuple[bytes, int]:
        """Return the log probabilities of the prompt and of what was generated behind it, and where their texts end.

        Raises RequestRejected (400: another try would end alike) when the engine did not report those of the prompt.
        """
        prompt = self._answer.work.plan.prompts[choice // self._answer.work.plan.choices]
        positions = (engine_data or {}).get(PROMPT_LOGPROBS)
        if not isinstance(positions, Sequence) or len(positions) < len(prompt):
            raise RequestRejected(
                400,
                f"The engine of model '{self._answer.model_name}' does not report log probabilities of prompt tokens, "
                "which `echo` with `logprobs` needs: leave one of them out",
                param="echo",
            )
        tokens: list[str] = []
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        for token_id, position in zip(prompt, positions, strict=False):
            tokens.append(self._text_of(token_id))
            found = position if isinstance(position, Mapping) else {}
            own = found.get(str(token_id))
            token_logprobs.append(None if own is None else finite(own["logprob"]))
            top_logprobs.append(self._alternatives(found) if found else None)
        if not self.drops_answer:
            for item in generated:
                tokens.append(item.token)
                token_logprobs.append(item.logprob)
                top_logprobs.append({top.token: top.logprob for top in item.top_logprobs})
        offsets, offset = [], 0
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        members = {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }
        return json_line(members), offset

    def _alternatives(self, found: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
        # Two ids may have one text (parts of a character): the more likely one is kept.
        alternatives: dict[str, float] = {}
        for token_id, entry in found.items():
            text, logprob = self._text_of(int(token_id), entry.get("decoded_token")), finite(entry["logprob"])
            alternatives[text] = max(logprob, alternatives.get(text, logprob))
        return alternatives

    def _text_of(self, token_id: int, given: str | None = None) -> str:
        if self._request.return_tokens_as_token_ids is True:
            return f"token_id:{token_id}"
        return self._answer.model.text.tokenizer.token_text(token_id) if given is None else given
