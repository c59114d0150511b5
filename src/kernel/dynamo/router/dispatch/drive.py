"""The shell around a course: carries out what the machine instructs, and reports to it what came of that.

One loop serves the dispatch, both stages before it and the router as a service. What differs between them is a `Leg`: how a
worker is chosen, what one attempt at it is, how a request waits, and what is done before the next attempt.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final, Protocol

from dynamo.errors import DynamoException, WorkerUnavailable
from dynamo.router.dispatch.course import (
    Choose,
    Course,
    Event,
    Fail,
    Failed,
    Instruction,
    Items,
    Lost,
    NoWorker,
    OpenStream,
    RequestCancelled,
    StreamOpened,
    Wait,
)

OPENED: Final = StreamOpened()
ITEMS: Final = Items()
CANCELLED: Final = RequestCancelled()


class Leg(Protocol):
    """What a course comes to at one group of workers."""

    def choose(self, order: Choose) -> Awaitable[Event]:
        """Choose a worker and return `Chosen`, `WorkerFound` where `order` only checks that there is one, or `RequestCancelled`.

        Raises WorkerUnavailable where there is none, and why else the choice failed.
        """
        ...

    async def attempt(self) -> Event:
        """Send the request to the worker that was chosen, wait for what comes first, and return what became of it."""
        ...

    def no_worker(self, error: WorkerUnavailable) -> NoWorker:
        """Return what the course is to know of a choice that found no worker."""
        ...

    async def again(self, error: DynamoException) -> bool:
        """Prepare another attempt after `error`; False: the request was cancelled meanwhile."""
        ...

    def wait(self, seconds: float) -> Awaitable[Event]:
        """Return `Tick` when the workers have changed or the time is up, `RequestCancelled` when the request is stopped first."""
        ...


async def drive(course: Course, leg: Leg) -> Instruction:
    """Carry out a course until there is an answer to read, a stage to do, or nothing more to do; return which of these.

    Raises the error that the course ends with.
    """
    instruction = course.instruction  # of these final types; `isinstance` costs more where it does not hold
    while type(instruction) is not Fail:
        try:
            if type(instruction) is Choose:
                instruction = course.step(await leg.choose(instruction))
            elif type(instruction) is OpenStream:
                event = await leg.attempt()
                instruction = course.step(event)
                if type(event) is Lost and type(instruction) is Choose:
                    instruction = await _prepare_again(course, leg, event.error)
            elif type(instruction) is Wait:
                instruction = course.step(await leg.wait(instruction.seconds))
            else:
                return instruction
        except WorkerUnavailable as error:
            instruction = course.step(leg.no_worker(error))
        except DynamoException as error:
            instruction = course.step(Failed(error))
    raise instruction.error


async def _prepare_again(course: Course, leg: Leg, error: DynamoException) -> Instruction:
    try:
        return course.instruction if await leg.again(error) else course.step(CANCELLED)
    except DynamoException as failure:
        return course.step(Failed(failure))
