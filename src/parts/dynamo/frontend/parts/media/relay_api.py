"""What an inference API over a raw engine is: a body for one worker, and a writer of the objects that the worker answers with.

The engine takes the client's own body and yields objects: pictures, sound, transcripts. Each API is a `RelayedApi`
(decode, validate, plan, writer).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Final, TypeVar

from msgspec import Struct

from dynamo.errors import Unknown
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.parts.media.intake import MediaIntake
from dynamo.frontend.pipeline.api import Api
from dynamo.frontend.pipeline.plan import Tally, reported_count
from dynamo.frontend.pipeline.preprocess import Preprocessor
from dynamo.frontend.pipeline.result_api import ResultReply
from dynamo.frontend.pipeline.result_plan import ResultPlan
from dynamo.protocol.openai.errors import RequestRejected, not_built
from dynamo.runtime.calls.context import Context

R = TypeVar("R", bound=Any)

MAX_RESULT_BYTES: Final = 64 * 1024 * 1024  # of all that is kept of one answer until it is whole


class Planning(Struct, frozen=True):
    """What is at hand when a request is planned."""

    preprocessor: Preprocessor
    media: MediaIntake
    model: ServedModel
    context: Context


class Relayed(Struct, frozen=True):
    """What is known of the request that is answered."""

    id: str
    model: ServedModel
    tally: Tally
    key_owner: str  # whose its results are
    base_url: str  # what comes before the path of a link


class RelayWriter(ABC):
    """Makes one answer of the objects of one worker. Used by one task at a time; its methods may run in a thread."""

    content_type: bytes | None = None
    """Of an answer that goes out as bytes as they come, known once the first object was taken; None: it is one body."""

    def __init__(self) -> None:
        self._kept_bytes = 0

    def keep(self, size: int) -> None:
        """Count what is kept until the answer is whole. Raises Unknown where that is too much."""
        self._kept_bytes += size
        if self._kept_bytes > MAX_RESULT_BYTES:
            raise Unknown(f"the worker's answer has more than {MAX_RESULT_BYTES} bytes")

    @abstractmethod
    def take(self, found: Any) -> bytes:
        """Take the next object; return what a stream sends of it. Raises Unknown for one that breaks the contract."""

    @abstractmethod
    def end(self) -> bytes:
        """Return the last bytes of a stream. Raises Unknown where something is missing."""

    @abstractmethod
    def whole(self) -> ResultReply:
        """Return the answer as one body. Raises Unknown where something is missing."""


class RelayedApi(Api[R]):
    """One whose answers are what a raw engine yields."""

    takes_media: ClassVar[bool] = True

    @abstractmethod
    async def plan(self, at: Planning, request: R) -> ResultPlan:
        """Return the work, which has one part. Raises `RequestRejected` for what this model cannot do."""

    @abstractmethod
    def writer(self, request: R, relayed: Relayed) -> RelayWriter:
        """Return what writes one answer."""


def check_raw(model: ServedModel, what: str) -> None:
    """Refuse a model whose workers take token ids."""
    if not model.takes_text:
        raise not_built(f"{what} of a model that takes token ids are not in this version", "model")


def note_usage(tally: Tally, usage: Any) -> None:
    """Take over what an engine counts, if it does: `input_tokens` and `output_tokens`."""
    if not isinstance(usage, Mapping):
        return
    for member, counter in (("input_tokens", "prompt_tokens"), ("output_tokens", "completion_tokens")):
        value = reported_count(usage.get(member))
        if value is not None:
            setattr(tally, counter, value)


def check_status(found: Mapping[str, Any]) -> None:
    """Raise the failure that an object reports in place of a result: `status` "failed", with `error`."""
    if found.get("status") != "failed":
        return
    error = found.get("error")
    message = error.get("message") if isinstance(error, Mapping) else error
    text = message if isinstance(message, str) and message else "the engine could not make it"
    raise RequestRejected(500, text[:1024])
