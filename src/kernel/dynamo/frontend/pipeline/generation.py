"""From a preprocessed request to the deltas of its choices.

Several choices or prompts are fanned out into single-choice requests, so that each can be placed, retried and cancelled
alone.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from dynamo.frontend.pipeline.choice import Choice, Delta, TokenChoice
from dynamo.frontend.pipeline.plan import GenerationModel, WorkRequest
from dynamo.frontend.pipeline.text_generation import TextPlan, TextStream
from dynamo.router.dispatch.fan_out import FanOut
from dynamo.runtime.calls.context import Context


async def generate(model: GenerationModel, work: WorkRequest, context: Context) -> AsyncGenerator[list[Delta], None]:
    """Yield the deltas of all choices as they arrive; ends when every choice has its finish reason.

    Close it (`aclosing`) to cancel what is still running. A failure of one choice cancels the others.

    Raises:
        DynamoException: typed, also before the first delta; `errors.rule_of` gives the client's status.
    """
    plan = work.plan
    async with FanOut[Delta](context) as fan_out:
        for prompt_index, prompt in enumerate(plan.prompts):
            for number in range(plan.streams_per_prompt):
                index = prompt_index * plan.choices + number
                choice = _open_choice(model, work, fan_out.child(index), index, prompt)
                work.running = (*work.running, choice.stream)
                fan_out.add(choice)
        async for deltas in fan_out:
            yield deltas


def open_only_choice(model: GenerationModel, work: WorkRequest, context: Context) -> Choice:
    """Open the one stream of a request that needs no more (`Plan.is_single`); close it on every path."""
    choice = _open_choice(model, work, context, 0, work.plan.prompts[0])
    work.running = (choice.stream,)
    return choice


def _open_choice(model: GenerationModel, work: WorkRequest, context: Context, index: int, prompt: list[int]) -> Choice:
    """Make one choice of the request, ready to run."""
    if isinstance(work.plan, TextPlan):
        return TextStream(model, work, context, index, work.plan)
    return TokenChoice(model, work, context, index, prompt)
