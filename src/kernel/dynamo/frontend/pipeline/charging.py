"""Between a request and its charge: the tokens it may need once its prompt is known, and those it took in the end."""

from __future__ import annotations

from typing import Any, Final

from dynamo.frontend.models.length_limits import LengthLimits
from dynamo.frontend.parts.keys.quotas import Charge, TokenDemand, TokenUse
from dynamo.frontend.pipeline.exchange import Exchange
from dynamo.frontend.pipeline.plan import Plan
from dynamo.frontend.pipeline.result_plan import ResultPlan
from dynamo.frontend.pipeline.text_generation import TextPlan

__all__ = ["close_charge", "reserve_tokens"]

_NAMES: Final = ("max_completion_tokens", "max_tokens")  # of OpenAI's bodies; the first one counts


def reserve_tokens(charge: Charge, plan: Plan, limits: LengthLimits) -> None:
    """Reserve what a request may need of its key's limits, and hold its answers to what the key may have.

    Raises RequestRejected: 400 for more than the key may have in one request, 429 where a limit or budget has not enough.
    """
    if isinstance(plan, ResultPlan):
        charge.reserve(TokenDemand(plan.input_tokens, 0))
        return
    prompts = plan.prompts
    if len(prompts) == 1:
        longest = input_tokens = len(prompts[0])
    else:
        longest, input_tokens = max(map(len, prompts), default=0), sum(map(len, prompts))
    most = limits.context if limits.combined is None else limits.combined
    if limits.context is not None and most is not None and limits.context < most:
        most = limits.context
    if isinstance(plan, TextPlan):
        # The words of a prompt are counted by its worker. Bytes are more than its tokens, and are given back at the end.
        input_tokens = plan.tally().prompt_tokens
        asked = next((body[name] for body in plan.bodies[:1] for name in _NAMES if body.get(name) is not None), None)
    else:
        asked = plan.body["stop_conditions"]["max_tokens"]
    room = None if most is None else max(1, most - longest)
    cap = charge.reserve(TokenDemand(input_tokens, asked, len(prompts) * plan.choices, room))
    if cap is None or cap == asked:
        return
    if isinstance(plan, TextPlan):
        for body in plan.bodies:
            _limit_text(body, cap)
    else:
        plan.body["stop_conditions"]["max_tokens"] = cap


def _limit_text(body: dict[str, Any], cap: int) -> None:
    named = [name for name in _NAMES if body.get(name) is not None]
    for name in named or _NAMES[1:]:
        body[name] = cap


def close_charge(exchange: Exchange) -> None:
    """End the charge of a request with what it took: nothing where no worker got it, else its prompt and what was made."""
    charge = exchange.arrival.charge
    if charge is None:
        return
    work, seconds = exchange.work, exchange.now() - exchange.arrival.at
    tally = None if work is None else work.tally
    if tally is None or not (tally.instances or tally.completion_tokens):
        charge.close(TokenUse(), seconds)
    else:
        cached, reasoning = tally.cached_tokens or 0, tally.reasoning_tokens or 0
        used = TokenUse(tally.prompt_tokens, cached, tally.completion_tokens, reasoning, tally.images_made)
        charge.close(used, seconds)
