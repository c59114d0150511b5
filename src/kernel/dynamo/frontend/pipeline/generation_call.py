"""The calls of the APIs whose answers are generated token by token: from a preprocessed request to the bytes that its client reads.

Several choices or prompts are fanned out into single-choice requests, so that each can be placed, retried and cancelled alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Final

from dynamo.frontend.base.stage_timer import PARSE, QUEUE
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.pipeline.api import Answer, GenerationApi, Renderer, RenderOptions
from dynamo.frontend.pipeline.choice import Choice, Delta, TokenChoice
from dynamo.frontend.pipeline.collector import CollectedAnswer
from dynamo.frontend.pipeline.events import ChoiceOutput, ParsingStage, TokenSource
from dynamo.frontend.pipeline.exchange import Exchange, Phase
from dynamo.frontend.pipeline.idle_timeout import IdleTimeout
from dynamo.frontend.pipeline.inference import Call, Pipeline
from dynamo.frontend.pipeline.plain import NumberedOutput, PlainOutput
from dynamo.frontend.pipeline.plan import GenerationModel, WorkRequest
from dynamo.frontend.pipeline.reading import Resolved
from dynamo.frontend.pipeline.routing_answer import routing_event, routing_headers
from dynamo.frontend.pipeline.sink import AnswerSink, AnswerStream, HeaderPairs, OpenAnswer
from dynamo.frontend.pipeline.tap import open_tap
from dynamo.frontend.pipeline.text_generation import TextPlan, TextSource, TextStream, TextTally
from dynamo.protocol.openai.errors import not_built
from dynamo.protocol.openai.requests import Request
from dynamo.protocol.openai.shapes import RequestMedia
from dynamo.protocol.openai.sse import annotation_event
from dynamo.router.dispatch.fan_out import FanOut
from dynamo.runtime.calls.context import Context

SCORES_AT_ONCE: Final = 1000
"""Log probabilities, alternatives included, that are written before others have a turn of the loop: some milliseconds. An
answer with 128 choices may have them by the hundred thousand."""


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


class _Delivery:
    """What both ways share: deltas to events, the counters, and how generation ended."""

    __slots__ = ("_answer", "_exchange", "_has_begun", "_idle", "_renderer", "_source", "_stage", "_tap")

    def __init__(self, answer: Answer, renderer: Renderer, silence_limit_seconds: float | None) -> None:
        """`silence_limit_seconds`: how long workers may send nothing; None: for ever."""
        work, model = answer.work, answer.model
        self._answer, self._renderer = answer, renderer
        self._exchange = answer.exchange
        self._has_begun = False
        self._tap = work.tap if work.tap is not None and work.tap.follows else None
        self._source: TokenSource | TextSource
        if isinstance(work.tally, TextTally):
            self._source = TextSource(work.tally, answer.rename)
        else:
            self._source = TokenSource(wants_logprobs=answer.wants_logprobs)
        self._stage: ParsingStage | None = None
        if work.plan.parsing is not None:
            self._stage = ParsingStage(work.plan.parsing, work, None if model.takes_text else model.text.tokenizer)
        limit = silence_limit_seconds
        self._idle = None if limit is None else IdleTimeout(answer.exchange, work.fail_over_idle_streams, limit)

    def _outputs(self, deltas: Sequence[Delta]) -> list[ChoiceOutput]:
        """Count one wake-up and return its events."""
        exchange = self._exchange
        now = exchange.now()
        if self._idle is not None:
            self._idle.last = now
        if not self._has_begun:
            self._has_begun = True
            exchange.enter(Phase.STREAMING, now)
            if exchange.slot is not None:
                exchange.slot.begun(now)
        assert exchange.counters is not None
        exchange.counters.tokens(deltas[0].tokens if len(deltas) == 1 else sum([delta.tokens for delta in deltas]), now)
        outputs = self._source.outputs(deltas)
        if self._stage is not None:
            outputs = self._stage.outputs(outputs)
        if self._tap is not None:
            self._tap.add(outputs, [delta.tokens for delta in deltas], now)
        return outputs

    def _portions(self, deltas: list[Delta]) -> Iterator[list[Delta]]:
        """Yield the deltas of one wake-up in portions, between which others have a turn."""
        scores, portion, each = 0, list[Delta](), 1 + (self._answer.request.requested_logprobs or 0)
        for delta in deltas:
            portion.append(delta)
            scores += each * delta.tokens
            if scores >= SCORES_AT_ONCE:
                yield portion
                scores, portion = 0, []
        if portion:
            yield portion

    def _check_end(self) -> None:
        """Raise unless generation came to its own end. Call it once, before the last bytes are sent."""
        self.close()
        self._exchange.check_end()

    def close(self) -> None:
        """Stop the timer of silence; idempotent."""
        if self._idle is not None:
            self._idle.close()


class StreamDelivery(_Delivery):
    """Sends one streamed answer."""

    __slots__ = ()

    async def send(self, stream: AnswerStream, head: bytes, *, with_usage: bool) -> None:
        """Send the whole answer; `head` comes before its first event."""
        answer, timer = self._answer, self._exchange.timer
        timer.mark(PARSE)
        try:
            if answer.work.plan.is_single:
                head = await self._send_single(stream, head)
            else:
                async with aclosing(generate(answer.model, answer.work, self._exchange.context)) as batches:
                    async for deltas in batches:
                        for some in self._portions(deltas) if answer.wants_logprobs else (deltas,):
                            if data := self._explained(head) + self._encode(some):
                                head = b""
                                await stream.write(data)
                                timer.answering()
                            if some is not deltas:
                                await asyncio.sleep(0)
            self._check_end()
        finally:
            self.close()
        last = self._renderer.end(with_usage=with_usage)
        if (keeping := self._renderer.keeping) is not None:
            await keeping()
        if timer.is_wanted:
            timer.ended()
            last = timer.comment() + last
        await stream.end(head + last)

    @property
    def _holds_last(self) -> bool:
        """Whether the last delta may leave with the end of the stream: nothing is awaited or measured in between."""
        return self._renderer.keeping is None and not self._exchange.timer.is_wanted

    def _explained(self, head: bytes) -> bytes:
        """Return what comes before the data: `head`, and once, for a client with that setting, why the worker was chosen."""
        if not self._answer.explains_routing or self._has_begun:
            return head
        return head + routing_event(self._answer.work.tally)

    def _encode(self, deltas: list[Delta]) -> bytes:
        outputs = self._outputs(deltas)
        render = self._renderer.stream
        return render(outputs[0]) if len(outputs) == 1 else b"".join([render(output) for output in outputs])

    async def _send_single(self, stream: AnswerStream, head: bytes) -> bytes:
        """Send one choice: its first delta waits for its turn, the others go from socket to socket while the client
        keeps up. Return what is still to be sent: the last delta leaves with the end of the stream, in one write."""
        answer, exchange, encode = self._answer, self._exchange, self._encode
        refused: list[bytes] = []  # what could not be pushed; at most one entry
        loop_time = asyncio.get_running_loop().time

        def accept(deltas: list[Delta]) -> bool:
            nonlocal head
            data = encode(deltas)
            if choice.is_over and self._holds_last:
                head = data
                return False
            if not data or stream.push(data, loop_time()):
                return True
            refused.append(data)
            return False

        choice = open_only_choice(answer.model, answer.work, exchange.context)
        try:
            while (delta := await choice.next()) is not None:
                head = self._explained(head) + encode([delta])
                if choice.is_over and self._holds_last:
                    exchange.timer.answering()
                    break
                if head:
                    await stream.write(head)
                    head = b""
                    exchange.timer.answering()
                while stream.can_push and not choice.is_over:
                    splice = self._renderer.splice() if self._tap is None else None  # a tap sees every delta
                    plain = None if splice is None else self._plain(splice, stream, refused)
                    await choice.push(accept, plain)
                    if not refused:
                        break
                    await stream.write(refused.pop())
        finally:
            choice.close()
        return head

    def _plain(
        self, splice: tuple[bytes, bytes] | Callable[[bytes], bytes], stream: AnswerStream, refused: list[bytes]
    ) -> PlainOutput:
        counters = self._exchange.counters
        assert counters is not None
        if isinstance(splice, tuple):
            return PlainOutput(splice, stream, refused, counters, self._idle)
        return NumberedOutput(splice, stream, refused, counters, self._idle)


class UnaryDelivery(_Delivery):
    """Sends one answer as a body."""

    __slots__ = ()

    async def send(self, sink: AnswerSink) -> None:
        """Gather the answer and send it."""
        answer, timer = self._answer, self._exchange.timer
        collected = CollectedAnswer(answer.choices)
        timer.mark(PARSE)
        try:
            if answer.work.plan.is_single:  # the same as through `generate`, without a generator for each request
                choice = open_only_choice(answer.model, answer.work, self._exchange.context)
                try:
                    while not choice.is_over and (delta := await choice.next()) is not None:
                        collected.add(self._outputs([delta]))
                        timer.answering()
                        if answer.wants_logprobs:
                            await self._write_scores(collected, [delta])
                finally:
                    choice.close()
            else:
                async with aclosing(generate(answer.model, answer.work, self._exchange.context)) as batches:
                    async for deltas in batches:
                        collected.add(self._outputs(deltas))
                        timer.answering()
                        if answer.wants_logprobs:
                            await self._write_scores(collected, deltas)
            self._check_end()
        finally:
            self.close()
        body = self._renderer.collect(collected)
        if self._tap is not None:
            self._tap.body = body
        if (keeping := self._renderer.keeping) is not None:
            await keeping()
        headers: HeaderPairs = routing_headers(answer.work.tally.placement) if answer.explains_routing else ()
        if timer.is_wanted:
            timer.ended()
            headers = (*headers, *timer.headers())
        await sink.reply(200, body, headers)

    async def _write_scores(self, collected: CollectedAnswer, deltas: list[Delta]) -> None:
        """Write the log probabilities of one wake-up: their text takes a tenth of the memory, and the end has little to do."""
        for some in self._portions(deltas):
            for delta in some:
                self._renderer.write_scores(delta.choice, collected.choices[delta.choice])
            if len(deltas) > 1:
                await asyncio.sleep(0)


async def send_placement(answer: Answer, renderer: Renderer, sink: AnswerSink, stream: AnswerStream | None) -> None:
    """Answer where the first prompt would go. No worker receives the request."""
    work = answer.work
    body = work.plan.fields.for_prompt(work.plan.prompts[0])
    await answer.model.dispatcher.advise(body, work.tally, pinned=work.plan.pinned_instance_id)
    answer.exchange.end()
    if stream is None:
        headers = routing_headers(work.tally.placement) if answer.explains_routing else ()
        await sink.reply(200, renderer.collect(CollectedAnswer(answer.choices)), headers)
        return
    nvext = answer.nvext(finished=True)
    assert nvext is not None
    event = routing_event(work.tally) if answer.explains_routing else b""
    await stream.end(event + renderer.routed(nvext))


def annotation_events(request: Request, answer: Answer, text: str | None) -> bytes:
    """Return the annotation events that come before any data; the rest are the worker's to answer."""
    events = []
    for name in request.annotations:
        if name == "request_id":
            events.append(annotation_event(name, answer.exchange.context.id()))
        elif name == "token_ids":
            ids = [token for prompt in answer.work.plan.prompts for token in prompt]
            events.append(annotation_event(name, "[" + ",".join(map(str, ids)) + "]"))
        elif name == "formatted_prompt" and text is not None:
            events.append(annotation_event(name, text))
    return b"".join(events)


class GenerationCall(Call):
    """One inference API whose answers are generated token by token."""

    def __init__(self, api: GenerationApi[Any], pipeline: Pipeline) -> None:
        super().__init__(api, pipeline)
        self._generating = api
        settings = pipeline.settings
        self._options, self._continuous = [
            RenderOptions(
                continuous_usage=is_continuous or settings.force_include_usage,
                reasoning_field=settings.reasoning_field_name,
                dispatches_calls=settings.streaming_tool_dispatch,
                dispatches_reasoning=settings.streaming_reasoning_dispatch,
            )
            for is_continuous in (False, True)
        ]

    async def _answer(self, exchange: Exchange, resolved: Resolved, opened: OpenAnswer) -> None:
        request: Request = resolved.request  # type: ignore[assignment]  # its API decodes nothing else
        pipeline, api, settings, media = self._pipeline, self._generating, self._settings, request.media
        effects, model, timer = resolved.effects, resolved.model, exchange.timer
        try:
            if media is not None:
                await self._check_media(media, request.key_owner, model)
            plan, text = await api.prepare(pipeline.preprocessor, request, effects, model, timer)
            work = self._work(exchange, resolved, plan)
            work.tap = open_tap(exchange, request, effects)
            if media is not None and pipeline.media is not None:
                await pipeline.media.fill(media, model, work, text, exchange.context)
                timer.mark(QUEUE)
            exchange.enter(Phase.PREPROCESSED, exchange.now())
            answer = Answer(exchange, request, model, work, explains_routing=effects.explains_routing)
            options = self._continuous if request.continuous_usage else self._options
            opened.renderer = renderer = api.renderer(answer, options)
            limit, stream = settings.backend_stream_timeout_seconds, opened.stream
            if plan.is_query:
                await send_placement(answer, renderer, opened.sink, stream)
            elif stream is None:
                await UnaryDelivery(answer, renderer, limit).send(opened.sink)
            else:
                head = annotation_events(request, answer, text) if request.annotations else b""
                with_usage = request.include_usage or settings.force_include_usage
                await StreamDelivery(answer, renderer, limit).send(stream, head, with_usage=with_usage)
        finally:
            if media is not None:
                media.end()

    async def _check_media(self, media: RequestMedia, owner: str | None, model: ServedModel) -> None:
        taker = self._pipeline.media
        if taker is None:
            raise not_built("Validation: media are not supported by this frontend", media.parts[0].where)
        media.owner = owner or ""
        if any(part.file_id is not None for part in media.parts):
            await taker.take_files(media, owner)
        taker.check_model(model, media)
