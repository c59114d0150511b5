"""How many tokens an engine takes per request, for frontends that reject longer requests themselves."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final, Protocol

__all__ = ["TOKEN_BUDGET_RUNTIME_KEY", "TokenBudget", "publish_token_budget"]

TOKEN_BUDGET_RUNTIME_KEY: Final = "token_budget"


class _RuntimeData(Protocol):
    def set_engine_specific(self, key: str, value: str) -> None: ...


@dataclass(frozen=True)
class TokenBudget:
    """The limit on prompt and completion together, and what happens to a request above it."""

    combined_limit: int
    """Tokens of prompt and completion together."""
    reject_prompt_overflow: bool
    """Reject a request whose prompt alone is above the limit."""
    reject_total_overflow: bool
    """Reject a request whose prompt and `max_tokens` together are above the limit."""

    def __post_init__(self) -> None:
        if self.combined_limit < 0:
            raise ValueError(f"combined_limit must be non-negative, got {self.combined_limit}")


def publish_token_budget(runtime_config: _RuntimeData, token_budget: TokenBudget) -> None:
    """Put the budget on the model card that `runtime_config` belongs to."""
    runtime_config.set_engine_specific(TOKEN_BUDGET_RUNTIME_KEY, json.dumps(asdict(token_budget)))
