"""How long the prompts and answers of a model may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.records import ModelCard
from dynamo.protocol.worker_request import StopFields


class LengthLimits(NamedTuple):
    """How long the prompt and the answer of a model may be, in tokens."""

    context: int | None  # of prompt and answer together, as the model has it; None: the worker did not report it
    prompt: int | None  # a prompt has fewer; None: the worker did not report it
    combined: int | None = None  # of prompt and answer together, where a budget of the worker's sets it
    rejects_total: bool = False  # what is requested beyond `combined` is refused, and not cut by the engine

    @classmethod
    def of(cls, card: ModelCard, context_length: int | None) -> LengthLimits:
        """Read the limits from a model's card. `context_length`: of the model, from wherever it is known."""
        budget = card.runtime_config.runtime_data.get("token_budget")
        combined = budget.get("combined_limit") if isinstance(budget, dict) else None
        if not isinstance(budget, dict) or not isinstance(combined, int):
            return cls(context_length, context_length)
        limit = context_length
        limit = combined if limit is None or budget.get("reject_prompt_overflow") else min(limit, combined)
        return cls(context_length, limit, combined, bool(budget.get("reject_total_overflow")))

    def check(self, prompts: Sequence[list[int]], *, is_chat: bool) -> None:
        """Refuse a prompt that cannot fit, before a worker is bothered."""
        longest = max(map(len, prompts), default=0)
        if self.prompt is not None and longest >= self.prompt:
            raise PromptTooLong(self.prompt, str(longest), is_chat=is_chat)

    def cut(self, ids: list[int], count: int, answer: int | None) -> list[int]:
        """Return the last `count` tokens of a prompt; with -1 as many as leave room for the `answer`."""
        if count == -1:
            if self.prompt is None:
                return ids
            count = max(1, self.prompt - max(1, answer or 1))
        return ids[-count:]

    def clamp(self, stops: StopFields, prompt_tokens: int) -> None:
        """Cut the token limit of a request to what the model has left behind the prompt."""
        limits = [limit for limit in (self.context, self.combined) if limit is not None]
        if limits and stops.max_tokens is not None:
            stops.max_tokens = max(1, min(stops.max_tokens, min(limits) - prompt_tokens))

    def fill_in(self, stops: StopFields, prompts: Sequence[list[int]], *, is_chat: bool) -> None:
        """Check or set the token limit of a request to a model with a budget."""
        combined = self.combined
        assert combined is not None
        longest = max(map(len, prompts), default=0)
        asked = stops.max_tokens
        if asked is None:
            if not is_chat:
                stops.max_tokens = max(1, combined - longest)
        elif self.rejects_total and longest + asked > combined:
            raise RequestRejected(
                400,
                f"This model configuration accepts at most {combined} combined input and output tokens. However, your "
                f"request has {longest} input tokens and asks for {asked} output tokens ({longest + asked} tokens "
                "total). Please reduce the input length or requested output length.",
                param="max_tokens",
                code="context_length_exceeded",
            )


class PromptTooLong(RequestRejected):
    """A prompt of `found` tokens, a number or a lower bound in words, where fewer than `limit_tokens` fit."""

    def __init__(self, limit_tokens: int, found: str, *, is_chat: bool) -> None:
        super().__init__(
            400,
            f"This model's maximum context length is {limit_tokens} tokens. However, your messages resulted in {found} "
            "tokens. Please reduce the length of the messages.",
            param="messages" if is_chat else "prompt",
            code="context_length_exceeded",
        )
        self.limit_tokens, self.found = limit_tokens, found
