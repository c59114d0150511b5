"""One request for vectors between the step thread, which computes them, and the generator that hands them on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dynamo.contract.embedding import Embedding, embedding
from dynamo.errors import DynamoException
from dynamo.reference.core import Core
from dynamo.reference.pooling import InputJob, Pooled, RunningInput
from dynamo.runtime.base.tasks import OneWaiter


class VectorStream:
    """Used on the loop, except `open` and `abort`. What waits here is bounded by the inputs of the request."""

    def __init__(self, jobs: Sequence[InputJob]) -> None:
        self._jobs = jobs
        self._running: list[RunningInput] = []
        self._ready: deque[Embedding] = deque()
        self._missing = len(jobs)
        self._waiter = OneWaiter()
        self._error: DynamoException | None = None

    @property
    def is_complete(self) -> bool:
        """Every vector was taken."""
        return not self._missing

    def open(self, core: Core, vectors: dict[RunningInput, VectorStream]) -> None:
        """Queue the inputs. Raises InvalidArgument for one that cannot be computed."""
        self._running = core.add_inputs(self._jobs)
        vectors.update(dict.fromkeys(self._running, self))

    def abort(self, core: Core, vectors: dict[RunningInput, VectorStream]) -> None:
        core.abort(self._running)
        for running in self._running:
            vectors.pop(running, None)

    def put(self, pooled: Pooled) -> None:
        """Take the vector of one input."""
        self._ready.append(embedding(pooled.choice.index, pooled.vector))
        self.wake()

    def fail(self, error: DynamoException) -> None:
        self._error = self._error or error
        self.wake()

    def wake(self) -> None:
        self._waiter.wake()

    async def wait(self) -> None:
        """Wait until there is a vector, or for a wake-up. Raises what `fail` was given."""
        if not self._ready and self._error is None:
            await self._waiter.wait()
        if self._error is not None:
            raise self._error

    def take(self) -> list[Embedding]:
        """Return the vectors that have arrived."""
        found = list(self._ready)
        self._ready.clear()
        self._missing -= len(found)
        return found
