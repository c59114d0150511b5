"""Requests that a raw engine answers: one worker gets the body, and what it yields is written object by object."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, ClassVar, Final, TypeVar, cast

from msgspec import Struct

from dynamo.errors import Unknown
from dynamo.frontend.base.offload import Offload
from dynamo.frontend.base.stage_timer import PARSE
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.parts.media.intake import MediaIntake
from dynamo.frontend.pipeline.api import Api
from dynamo.frontend.pipeline.exchange import Exchange, Phase
from dynamo.frontend.pipeline.inference import Call, Pipeline
from dynamo.frontend.pipeline.plan import Tally, reported_count
from dynamo.frontend.pipeline.preprocess import Preprocessor
from dynamo.frontend.pipeline.reading import Resolved
from dynamo.frontend.pipeline.result_api import ResultReply
from dynamo.frontend.pipeline.result_plan import ResultPlan
from dynamo.frontend.pipeline.results import object_of
from dynamo.frontend.pipeline.sink import AnswerStream, HeaderPairs, OpenAnswer
from dynamo.protocol.openai.errors import RequestRejected, not_built
from dynamo.protocol.worker_request import WorkerRequest
from dynamo.router.dispatch.failover import AnswerSoFar, DispatchRequest
from dynamo.router.dispatch.stream import RoutedStream
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
    def take(self, found: object) -> bytes:
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


def note_usage(tally: Tally, usage: object) -> None:
    """Take over what an engine counts, if it does: `input_tokens` and `output_tokens`."""
    if not isinstance(usage, Mapping):
        return
    for member, counter in (("input_tokens", "prompt_tokens"), ("output_tokens", "completion_tokens")):
        value = reported_count(usage.get(member))
        if value is not None:
            setattr(tally, counter, value)


def check_status(found: Mapping[str, object]) -> None:
    """Raise the failure that an object reports in place of a result: `status` "failed", with `error`."""
    if found.get("status") != "failed":
        return
    error = found.get("error")
    message = error.get("message") if isinstance(error, Mapping) else error
    text = message if isinstance(message, str) and message else "the engine could not make it"
    raise RequestRejected(500, text[:1024])


class RelayCall(Call):
    """One inference API whose answers are what a raw engine yields."""

    def __init__(
        self, api: RelayedApi[object], pipeline: Pipeline, media: MediaIntake, link_prefix: str | None
    ) -> None:
        """`link_prefix`: what comes before the path of a link; None: the address that the client used."""
        super().__init__(api, pipeline)
        self._relayed, self._media, self._link_prefix = api, media, link_prefix

    @property
    def _offload(self) -> Offload:
        return self._pipeline.preprocessor.offload

    async def _answer(self, exchange: Exchange, resolved: Resolved, opened: OpenAnswer) -> None:
        request: Any = resolved.request
        try:
            await self._serve_request(exchange, resolved, opened)
        finally:
            if request.media is not None:
                request.media.end()

    async def _serve_request(self, exchange: Exchange, resolved: Resolved, opened: OpenAnswer) -> None:
        pipeline, timer, model = self._pipeline, exchange.timer, resolved.model
        request: object = resolved.request
        at = Planning(pipeline.preprocessor, self._media, model, exchange.context)
        plan = await self._relayed.plan(at, request)
        work = self._work(exchange, resolved, plan)
        exchange.enter(Phase.PREPROCESSED, exchange.now())
        timer.mark(PARSE)
        owner = "" if exchange.identity is None else exchange.identity.owner
        known = Relayed(exchange.response_id, model, work.tally, owner, _base_url(exchange, self._link_prefix))
        writer = self._relayed.writer(request, known)
        dispatch = DispatchRequest(
            cast(WorkerRequest, plan.parts[0]),
            (),
            record=work.tally,
            timer=timer,
            limits=plan.limits,
            pinned_instance_id=plan.pinned_instance_id,
            answer=AnswerSoFar(takes_text=True),
            stall_detector=work.stall_detector,
        )
        stream = model.dispatcher.open(dispatch, exchange.context)
        work.running = (stream,)
        try:
            async with aclosing(_objects(stream, dispatch)) as objects:
                if opened.stream is not None:
                    await self._send_events(exchange, writer, objects, opened.stream)
                else:
                    await self._send_plain(exchange, writer, objects, opened)
        finally:
            stream.close()

    async def _send_events(
        self, exchange: Exchange, writer: RelayWriter, objects: AsyncIterator[object], stream: AnswerStream
    ) -> None:
        async for found in objects:
            self._note_progress(exchange)
            if data := await self._offload(partial(writer.take, found)):
                await stream.write(data)
                exchange.timer.answering()
        last = await self._offload(writer.end)
        exchange.check_end()
        await stream.end(last)

    async def _send_plain(
        self, exchange: Exchange, writer: RelayWriter, objects: AsyncIterator[object], opened: OpenAnswer
    ) -> None:
        """Send bytes as they come, where the writer declares what they are; else one body."""
        timer, sent = exchange.timer, None
        try:
            async for found in objects:
                self._note_progress(exchange)
                data = await self._offload(partial(writer.take, found))
                if writer.content_type is not None:
                    if sent is None:
                        opened.stream = sent = opened.sink.open_bytes(writer.content_type, timer.headers())
                    await sent.write(data)
                    timer.answering()
            if sent is None:
                await self._reply(exchange, writer, opened)
                return
            last = await self._offload(writer.end)
            exchange.check_end()
        except Exception:
            if sent is not None:
                await sent.cut()  # what comes of the failure otherwise is the boundary's affair
            raise
        await sent.end(last)

    async def _reply(self, exchange: Exchange, writer: RelayWriter, opened: OpenAnswer) -> None:
        reply = await self._offload(writer.whole)
        exchange.check_end()
        timer = exchange.timer
        timer.answering()
        headers: HeaderPairs = reply.headers
        if timer.is_wanted:
            timer.ended()
            headers = (*headers, *timer.headers())
        await opened.sink.reply(200, reply.body, headers, content_type=reply.content_type)

    def _note_progress(self, exchange: Exchange) -> None:
        now, counters = exchange.now(), exchange.counters
        assert counters is not None
        counters.tokens(0, now)
        if exchange.phase < Phase.STREAMING:
            exchange.enter(Phase.STREAMING, now)
            if exchange.slot is not None:
                exchange.slot.begun(now)


def _base_url(exchange: Exchange, prefix: str | None) -> str:
    """Return what comes before the path of a link: what the operator set, or else the name in the client's request."""
    if prefix is not None:
        return prefix.rstrip("/")
    host = exchange.arrival.headers.get(b"host", b"").decode("latin-1")
    return f"http://{host}" if host else ""


async def _objects(stream: RoutedStream, request: DispatchRequest) -> AsyncGenerator[Any, None]:
    """Yield what the worker sends until its stream ends; nothing more once the request was cancelled.

    Raises:
        DynamoException: typed; a worker that is lost after its first object is not replaced.
    """
    while items := await stream.next_batch():
        request.answer.is_complete = True  # the end of a raw stream is its only terminal, and may come from here on
        for item in items:
            yield object_of(item)
