"""What a request needs before it may be computed, and what takes too long for the event loop: its grammar."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

from dynamo.errors import InvalidArgument
from dynamo.reference.guided import FIELD, Guides
from dynamo.reference.request import Job, Limits
from dynamo.reference.steering import Markers, Steering, Thinking, find_markers

__all__ = ["Preparation"]


class Preparation:
    """Makes jobs ready to run. Safe from several threads."""

    def __init__(self, directory: Path, limits: Limits) -> None:
        """Reads nothing yet; the model's `tokenizer.json` is read for the first request that needs it."""
        self._directory = directory
        self._guides = Guides(directory, vocab_size=limits.vocab_size, eos_token_ids=limits.eos_token_ids)
        self._lock = threading.Lock()
        self._markers: Markers | None = None

    def prepare(self, job: Job) -> Job:
        """The job with its steering, brought to where another worker left it. Raises InvalidArgument naming the field."""
        guide = None if job.guided is None else self._guides.guide(job.guided)
        original, produced = job.prompt[: len(job.prompt) - job.produced], job.prompt[len(job.prompt) - job.produced :]
        thinking = None
        if job.awaits_thoughts or (guide is None and job.thinking_tokens is not None):
            thinking = Thinking(self._find_markers(), original, budget=job.thinking_tokens)
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
