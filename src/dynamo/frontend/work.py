"""What passes between a route and the generation core: the work to do, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Usage", "WorkRequest"]


@dataclass(slots=True)
class Usage:
    """Tokens so far, over all choices; complete when generation has ended."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None  # None: the engine did not say
    reasoning_tokens: int | None = None
    prompt_logprobs: Any = None


@dataclass(slots=True)
class WorkRequest:
    """A request ready for workers. Choice `prompt_index * choices_per_prompt + i` answers `prompts[prompt_index]`."""

    prompts: list[list[int]]
    choices_per_prompt: int
    fields: dict[str, Any]  # the worker request without `token_ids`; shared by all choices
    usage: Usage = field(default_factory=Usage)
    formatted_prompt: str | None = None  # the rendered template; None when the client sent text or ids

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.choices_per_prompt
