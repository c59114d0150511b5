"""From a preprocessed request to the deltas of its choices.

Several choices or prompts are fanned out into single-choice requests, so that each can be placed, retried and cancelled
alone.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from dynamo.frontend.pipeline.choice import Choice, Delta, TokenChoice
from dynamo.frontend.pipeline.plain import PlainOutput
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
    if work.plan.is_single:
        single = SingleGeneration(model, work, context)
        try:
            while (deltas := await single.next()) is not None:
                yield deltas
        finally:
            single.close()
    else:
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


class SingleGeneration:
    """`generate` for one choice of one prompt, which can also push."""

    __slots__ = ("_choice",)

    def __init__(self, model: GenerationModel, work: WorkRequest, context: Context) -> None:
        self._choice = _open_choice(model, work, context, 0, work.plan.prompts[0])
        work.running = (self._choice.stream,)

    async def next(self) -> list[Delta] | None:
        """Return what has arrived, waiting for something; None when the choice has ended. Raises as `generate`."""
        delta = await self._choice.next()
        return None if delta is None else [delta]

    async def push(self, accept: Callable[[list[Delta]], bool], plain: PlainOutput | None = None) -> None:
        """Call `accept` with what arrives, at once and without waking a task for it.

        `plain`, where given, gets instead what comes of tokens with nothing else to report: no stop, no end, no log
        probabilities. That is nearly every token, and saves a `Delta` for each.

        Returns when `accept` returned False or `plain` could not send (go on with `next`), or when the choice has ended; raises
        as `generate`, and what they raise. To be called after `next` has returned something.
        """
        await self._choice.push(accept, plain)

    def close(self) -> None:
        """Cancel what is still running; idempotent."""
        self._choice.close()


def _open_choice(model: GenerationModel, work: WorkRequest, context: Context, index: int, prompt: list[int]) -> Choice:
    """Make one choice of the request, ready to run."""
    if isinstance(work.plan, TextPlan):
        return TextStream(model, work, context, index, work.plan)
    return TokenChoice(model, work, context, index, prompt)
