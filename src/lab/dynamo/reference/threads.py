"""What runs in threads beside the event loop: the steps of a core, and the grammar that a request needs before it may be computed."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from dynamo.errors import DynamoException, EngineShutdown, InvalidArgument, Overloaded
from dynamo.reference.blocks import BlockEvent
from dynamo.reference.core import Core, Emission, Failure, RunningChoice
from dynamo.reference.guided import COMPILE_SECONDS, FIELD, Guides, GuideSpec
from dynamo.reference.job_stream import JobStream
from dynamo.reference.pooling import Pooled, RunningInput
from dynamo.reference.request import Job, Limits
from dynamo.reference.steering import Markers, Steering, ThoughtState, find_markers
from dynamo.reference.vector_stream import VectorStream

T = TypeVar("T")

logger = logging.getLogger(__name__)

Command = Callable[[Core], object]
"""Something to do between two steps."""

IDLE_SECONDS: Final = 5.0  # an idle thread checks this often whether it is still needed; everything else wakes it


class StepThread:
    """Runs a core's steps in a thread of its own, and delivers what they yield on the event loop: one call a step."""

    def __init__(
        self,
        core: Core,
        loop: asyncio.AbstractEventLoop,
        after_step: Callable[[Sequence[BlockEvent], Core], None],
        on_failure: Callable[[DynamoException], None],
    ) -> None:
        """`after_step` is called in the thread, `on_failure` at most once on the loop: no step comes after it."""
        self.results: dict[RunningChoice, JobStream] = {}  # of the choices on their way; touched by the thread only
        self.vectors: dict[RunningInput, VectorStream] = {}  # of the inputs on their way; as `results`
        self._core, self._loop = core, loop
        self._after_step, self._on_failure = after_step, on_failure
        self._inbox: list[Command] = []  # bounded by the requests in flight: two commands each
        self._asked: set[asyncio.Future[Any]] = set()  # questions on their way; on the loop only
        self._wake = threading.Condition()
        self._is_closing = False
        self._failure: DynamoException | None = None
        self._thread = threading.Thread(target=self._run, name="reference-steps", daemon=True)
        self._thread.start()

    @property
    def limits(self) -> Limits:
        """What a request may need."""
        return self._core.limits

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text."""
        return self._core.model.config.bos_token_id

    def submit(self, command: Command) -> None:
        """Run `command` between two steps. Raises EngineShutdown where no step will come."""
        with self._wake:
            if self._failure is not None:
                raise EngineShutdown(str(self._failure)) from self._failure
            if self._is_closing:
                raise EngineShutdown("the reference engine is shutting down")
            self._inbox.append(command)
            self._wake.notify()

    def submit_if_running(self, command: Command) -> None:
        """Run `command` between two steps, if one will come."""
        with suppress(EngineShutdown):  # an engine that is gone holds no blocks
            self.submit(command)

    async def ask(self, question: Callable[[Core], T]) -> T:
        """Put a question between two steps; its answer, or what it raised. Raises EngineShutdown where no step will come."""
        answer: asyncio.Future[T] = self._loop.create_future()

        def command(core: Core) -> None:
            try:
                result = question(core)
            except Exception as error:  # it is the asker's
                self._call([partial(_settle, answer, answer.set_exception, error)])
            else:
                self._call([partial(_settle, answer, answer.set_result, result)])

        self._asked.add(answer)
        try:
            self.submit(command)
            return await answer
        finally:
            self._asked.discard(answer)

    def answer_nobody(self, error: DynamoException) -> None:
        """Fail every waiting caller with `error`: no step will come. Call it on the loop."""
        for answer in self._asked:
            _settle(answer, answer.set_exception, error)

    def close(self) -> None:
        """End the thread after the step it is in. Blocks until then; safe twice."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while (commands := self._next()) is not None:
                for command in commands:
                    command(self._core)
                emissions = self._core.step()
                self._tell()
                reserved = self._core.take_reserved()
                if emissions or reserved:
                    self._deliver(emissions, reserved)
                if pooled := self._core.take_pooled():
                    self._deliver_vectors(pooled)
        except Exception as error:  # the cache may be half written: nothing after this could be trusted
            logger.exception("the reference engine failed; its requests end")
            failure = EngineShutdown(f"the reference engine failed: {type(error).__name__}: {error}")
            with self._wake:
                self._failure = failure
            self._call([partial(self.answer_nobody, failure), partial(self._on_failure, failure)])

    def _next(self) -> list[Command] | None:
        """Wait for the next step; return what to do before the step; None: end."""
        with self._wake:
            while not self._is_closing and not self._inbox and self._core.is_idle:
                self._wake.wait(IDLE_SECONDS)
            commands, self._inbox = self._inbox, []
            return None if self._is_closing else commands

    def _tell(self) -> None:
        try:
            self._after_step(self._core.take_events(), self._core)
        except Exception:  # an event less is a worse placement, not a wrong answer
            logger.exception("the reference engine's KV events were not published")

    def _deliver(self, emissions: Sequence[Emission | Failure], reserved: Sequence[RunningChoice]) -> None:
        calls: list[Callable[[], None]] = [self.results[choice].reserve for choice in reserved]
        for emission in emissions:
            stream = self.results[emission.choice]
            if isinstance(emission, Failure):
                del self.results[emission.choice]
                calls.append(partial(stream.fail, emission.error))
                continue
            if emission.reason is not None:
                del self.results[emission.choice]
            calls.append(partial(stream.put, emission))
        self._call(calls)

    def _deliver_vectors(self, pooled: Sequence[Pooled]) -> None:
        self._call([partial(self.vectors.pop(each.choice).put, each) for each in pooled])

    def _call(self, calls: Sequence[Callable[[], None]]) -> None:
        try:
            self._loop.call_soon_threadsafe(_each, calls)
        except RuntimeError:  # the loop is closed, so nothing is waiting
            logger.debug("results of a last step had no event loop to go to")


def _settle(future: asyncio.Future[Any], settle: Callable[[Any], None], value: Any) -> None:
    if not future.done():  # its asker may have left
        settle(value)


def _each(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


# What a request needs before it may be computed, and what takes too long for the event loop: its grammar.

MAX_WAITING: Final = 64  # requests whose grammar is new, at once; they are compiled one after the other


class Preparation:
    """Makes jobs ready to run. Safe from several threads."""

    def __init__(self, directory: Path, limits: Limits, *, compile_seconds: float = COMPILE_SECONDS) -> None:
        """Read nothing yet; the model's `tokenizer.json` is read for the first request that needs it."""
        self._directory = directory
        self._guides = Guides(
            directory,
            vocab_size=limits.vocab_size,
            eos_token_ids=limits.eos_token_ids,
            compile_seconds=compile_seconds,
        )
        self._lock = threading.Lock()
        self._markers: Markers | None = None
        # A thread of its own: slow grammars must not fill the pool in which the process does everything else.
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="guided")
        self._waiting = 0

    async def compile(self, spec: GuideSpec) -> None:
        """Return when `prepare` finds the grammar compiled. Raises as `Guides.guide`, and Overloaded for a crowd."""
        if self._guides.has(spec):
            return
        if self._waiting >= MAX_WAITING:
            raise Overloaded(f"{self._waiting} requests with new grammars wait to be compiled on this worker")
        self._waiting += 1
        try:
            await asyncio.get_running_loop().run_in_executor(self._compiler, self._guides.guide, spec)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Compile nothing more."""
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._guides.close()

    @property
    def refusals(self) -> dict[str, int]:
        """How many requests were refused for their grammar, by why."""
        return dict(self._guides.refusals)

    def prepare(self, job: Job) -> Job:
        """Return the job with its steering, advanced to where another worker stopped. Raises InvalidArgument naming the field."""
        guide = None if job.guided is None else self._guides.guide(job.guided)
        original, produced = job.prompt[: len(job.prompt) - job.produced], job.prompt[len(job.prompt) - job.produced :]
        thinking = None
        if job.awaits_thoughts or (guide is None and job.thinking_tokens is not None):
            thinking = ThoughtState(self._find_markers(), original, budget=job.thinking_tokens)
        steering = Steering(guide, thinking, awaits_thoughts=job.awaits_thoughts)
        try:
            for token in produced:
                steering.accept(token)
        except InvalidArgument as error:
            raise InvalidArgument(
                f"{FIELD} does not allow what was generated so far, in the last {job.produced} of token_ids"
            ) from error
        return replace(job, steering=steering)

    def _find_markers(self) -> Markers:
        with self._lock:
            self._markers = self._markers or find_markers(self._directory)
            return self._markers
