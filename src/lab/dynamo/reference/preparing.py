"""What a request needs before it may be computed, and what takes too long for the event loop: its grammar."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

from dynamo.errors import InvalidArgument, Overloaded
from dynamo.reference.guided import COMPILE_SECONDS, FIELD, Guides, GuideSpec
from dynamo.reference.request import Job, Limits
from dynamo.reference.steering import Markers, Steering, ThoughtState, find_markers

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
