"""Any Python callable as an engine.

A callable that takes `messages` or `prompt` yields text and needs no tokenizer: the worker is a `RawEngine` that takes
text (`ModelInput.Text`) and answers in OpenAI's chunks. A callable that takes `token_ids` yields token ids and is an `LLMEngine`
like any other. `signature` decides how it is called. What is not an `async def` runs in a thread of its own per request.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing, suppress
from typing import Any, ClassVar, Final, Self

from dynamo.contract.args import BackendArgumentParser, add_backend_arguments, worker_config_from
from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import (
    BaseEngine,
    EngineConfig,
    GenerateChunk,
    GenerateRequest,
    LLMEngine,
    RawEngine,
    RawRequest,
    RawResponseChunk,
    chunk,
    final_chunk,
    usage,
)
from dynamo.contract.requests.token_ids import normalize_request_token_ids
from dynamo.engines.callable.signature import CallableKind, CallPlan, Source, plan_call
from dynamo.engines.native_flags import refuse_media_output
from dynamo.errors import Unknown
from dynamo.protocol.model_types import ModelInput
from dynamo.protocol.openai.plain_text import TextPiece, count, cut, prompt_tokens, stream_piece
from dynamo.runtime.calls.context import Context

MAX_THREADS: Final = 64  # requests to a sync callable that run at a time; the others wait their turn
TERMINAL_SECONDS: Final = 4.0  # for the code behind the last `yield`; less than the worker gives to the whole close
READ_AHEAD: Final = 16  # items a thread may be ahead of its reader

_REASONS: Final = ("stop", "length", "content_filter")


def engine_class(function: Callable[..., Any], name: str | None = None) -> type[CallableEngine]:
    """Make an engine class around `function`; `name` is the model's name unless the command line gives one.

    Raises InvalidArgument when the signature cannot be understood.
    """
    if name is None:
        name = str(getattr(function, "__name__", type(function).__name__))
    call = plan_call(function, name)
    base = TokenCallableEngine if call.source is Source.TOKEN_IDS else TextCallableEngine
    members = {"call": call, "__doc__": function.__doc__, "__module__": getattr(function, "__module__", __name__)}
    return type(name, (base,), members)


class CallableEngine(BaseEngine):
    """What both kinds share. Subclasses made by `engine_class` carry the call."""

    call: ClassVar[CallPlan]
    model_input: ClassVar[ModelInput]

    def __init__(self, model_name: str | None = None) -> None:
        self.model_name = model_name or self.call.name
        self._threads: ThreadPoolExecutor | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        what = "text" if cls.model_input is ModelInput.Text else "token ids"
        parser = BackendArgumentParser(cls.call.name, description=f"Serves {cls.call.name}(), a callable of {what}.")
        parser.add_argument(
            "--model-name", default=cls.call.name, help=f"name clients use (default: {cls.call.name}, the callable's)"
        )
        if cls.model_input is ModelInput.Tokens:
            parser.add_argument("--model-path", default="", help="directory with the tokenizer (default: bytes)")
        add_backend_arguments(parser)
        refuse_media_output(argv)
        args = parser.parse_args(argv)
        config = worker_config_from(
            args,
            model_name=getattr(args, "model_path", ""),
            served_model_name=args.model_name,
            model_input=cls.model_input,
            enable_kv_routing=False,
        )
        return cls(args.model_name), config

    async def start(self, worker_id: int) -> EngineConfig:
        if self.call.kind is CallableKind.SYNC:
            self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix=self.call.name)
        return EngineConfig(model=self.model_name, served_model_name=self.model_name)

    async def cleanup(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    def _items(self, arguments: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Yield what the callable yields. Closing the generator closes the callable's generator."""
        if self.call.kind is CallableKind.SYNC:
            if self._threads is None:
                raise Unknown("the engine is not started")
            return _in_thread(lambda: self.call.function(**arguments), self._threads)
        if self.call.kind is CallableKind.COROUTINE:
            return _awaited(self.call.function(**arguments))
        return _closing(self.call.function(**arguments))


class TextCallableEngine(CallableEngine, RawEngine):
    """Serves a callable that yields text; see `callables` for what it is called with.

    It may yield strings, or dicts with any of `text`, `finish_reason` (stop, length, content_filter) and `usage`. Without
    a `usage` of its own a token is one byte of UTF-8. `max_tokens` cuts the answer unless the callable takes it.
    """

    model_input = ModelInput.Text

    async def generate(self, request: RawRequest, context: Context) -> AsyncGenerator[RawResponseChunk, None]:
        is_chat = isinstance(request.get("messages"), list)
        head = {"id": context.id(), "created": int(time.time()), "model": request.get("model") or self.model_name}
        choices = request.get("n") or 1
        total: Mapping[str, Any] = usage(prompt_tokens(request), 0)
        begun: set[int] = set()
        ended = 0
        runs = [self._pieces(_of_choice(request, number), context) for number in range(choices)]
        async with aclosing(_side_by_side(runs)) as pieces:
            async for index, piece in pieces:
                if piece.usage is not None:
                    ended += 1
                    total = piece.usage if choices == 1 else _added(total, piece.usage)
                shown = TextPiece(piece.text, piece.finish_reason, total if ended == choices else None)
                yield stream_piece(head, shown, is_chat=is_chat, is_first=index not in begun, index=index)
                begun.add(index)

    async def _pieces(self, request: RawRequest, context: Context) -> AsyncGenerator[TextPiece, None]:
        """Yield one choice; the last piece has the reason and the usage. A choice that is stopped just ends."""
        arguments = self.call.for_text(request, context)
        limit = None if self.call.limits_itself else _limit(request)
        stops = [] if self.call.takes("stop") else _stops(request)
        longest = max(map(len, stops), default=0)
        said, tail = 0, ""
        reason: str | None = None
        counts: Mapping[str, Any] | None = None
        is_ended_by_callable = False
        async with aclosing(self._items(arguments)) as items:
            async for item in items:
                if context.is_stopped():
                    return
                piece = self._piece(item)
                reason, counts = piece.finish_reason or reason, piece.usage or counts
                is_ended_by_callable = piece.finish_reason is not None
                text = piece.text
                if limit is not None and said + count(text) >= limit:
                    text, reason = cut(text, limit - said), "length"
                said += count(text)
                if text:
                    yield TextPiece(text)
                if longest and reason is None:  # the frontend cuts the text at the stop string
                    tail += text
                    reason = "stop" if any(stop in tail for stop in stops) else None
                    tail = tail[-longest:]
                if reason is not None:
                    break
            if not context.is_stopped():
                yield TextPiece("", reason or "stop", counts or usage(prompt_tokens(request), said))
                if is_ended_by_callable:
                    await _step_past_terminal(items)

    def _piece(self, item: Any) -> TextPiece:
        if isinstance(item, str):
            return TextPiece(item)
        if not isinstance(item, Mapping) or not item.keys() <= {"text", "finish_reason", "usage"}:
            raise Unknown(
                f"{self.call.name}() gave {_shown(item)}; a callable of text gives strings, or dicts with text, "
                "finish_reason and usage"
            )
        text, reason, counts = item.get("text") or "", item.get("finish_reason"), item.get("usage")
        if not isinstance(text, str):
            raise Unknown(f"{self.call.name}(): text must be a string, got {type(text).__name__}")
        if reason is not None and reason not in _REASONS:
            raise Unknown(f"{self.call.name}(): finish_reason must be one of {', '.join(_REASONS)}, got {reason!r}")
        if counts is not None and not isinstance(counts, Mapping):
            raise Unknown(f"{self.call.name}(): usage must be a dict, got {type(counts).__name__}")
        return TextPiece(text, reason, counts)


class TokenCallableEngine(CallableEngine, LLMEngine):
    """Serves a callable that yields token ids: ints, lists of ints, or whole chunks as an `LLMEngine` yields them.

    `max_tokens` cuts the answer unless the callable takes it.
    """

    model_input = ModelInput.Tokens

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        prompt = len(normalize_request_token_ids(request)["token_ids"])  # they may arrive packed
        limit = None if self.call.limits_itself else (request.get("stop_conditions") or {}).get("max_tokens")
        said = 0
        async with aclosing(self._items(self.call.for_tokens(request, context))) as items:
            if not context.is_stopped():
                async for item in items:
                    if context.is_stopped():
                        break
                    step = self._chunk(item)
                    ids = step["token_ids"]
                    if limit is not None and said + len(ids) >= limit:
                        yield final_chunk("length", ids[: limit - said], usage=usage(prompt, limit))
                        return
                    said += len(ids)
                    if step.get("finish_reason") is not None:
                        yield {**step, "completion_usage": step.get("completion_usage") or usage(prompt, said)}
                        await _step_past_terminal(items)
                        return
                    yield step
        yield final_chunk("cancelled" if context.is_stopped() else "stop", usage=usage(prompt, said))

    def _chunk(self, item: Any) -> GenerateChunk:
        """Turn one yielded item into a chunk; the worker checks the ids."""
        if isinstance(item, int):
            return chunk([item])
        if isinstance(item, Mapping) and "token_ids" in item:
            return {**item, "token_ids": list(item["token_ids"]), "index": 0}  # type: ignore[typeddict-item]
        if hasattr(item, "tolist"):
            item = item.tolist()
        if not isinstance(item, list | tuple):
            raise Unknown(
                f"{self.call.name}() gave {_shown(item)}; a callable of token_ids gives ints or lists of ints"
            )
        return chunk(list(item))


def _limit(body: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if isinstance(value, int):
            return value
    return None


def _stops(body: Mapping[str, Any]) -> list[str]:
    stop = body.get("stop")
    return [stop] if isinstance(stop, str) else [one for one in stop or () if isinstance(one, str) and one]


def _shown(item: Any) -> str:
    if isinstance(item, Mapping):
        return f"a dict with {', '.join(sorted(map(str, item)))}"
    return type(item).__name__


def _of_choice(body: RawRequest, number: int) -> RawRequest:
    """Return the request of one of n choices. With a seed, each gets another one: the same seed twice is the same text."""
    seed = body.get("seed")
    return body if number == 0 or seed is None else {**body, "seed": seed + number}


def _added(total: Mapping[str, Any], one: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the usage of several choices: the prompt counts once."""
    prompt = one.get("prompt_tokens", total["prompt_tokens"])
    return usage(prompt, total["completion_tokens"] + one.get("completion_tokens", 0))


async def _side_by_side(
    streams: Sequence[AsyncGenerator[TextPiece, None]],
) -> AsyncGenerator[tuple[int, TextPiece], None]:
    """Yield (index, piece) of streams that run at once. A failure of one ends all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for piece in only:
                yield 0, piece
        return
    arrived: asyncio.Queue[tuple[int, TextPiece | Exception | None]] = asyncio.Queue(READ_AHEAD)

    async def pump(index: int, stream: AsyncGenerator[TextPiece, None]) -> None:
        end: Exception | None = None
        try:
            async with aclosing(stream):
                async for piece in stream:
                    await arrived.put((index, piece))
        except Exception as error:  # the reader below raises it
            end = error
        await arrived.put((index, end))

    # Ended and awaited in the `finally` below.
    tasks = [asyncio.create_task(pump(*pair), name=f"choice {pair[0]}") for pair in enumerate(streams)]
    running = len(tasks)
    try:
        while running:
            index, entry = await arrived.get()
            if isinstance(entry, Exception):
                raise entry
            if entry is None:
                running -= 1
            else:
                yield index, entry
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _step_past_terminal(items: AsyncGenerator[Any, None]) -> None:
    """Run the code that a callable has behind the `yield` of its last item, and drop what it yields there."""
    with suppress(TimeoutError):  # the caller closes the generator where it stands
        async with asyncio.timeout(TERMINAL_SECONDS):
            await anext(items, None)


# -- three ways to get at what a callable yields ------------------------------------------------------------------------


async def _closing(stream: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    async with aclosing(stream):
        async for item in stream:
            yield item


async def _awaited(answer: Any) -> AsyncGenerator[Any, None]:
    """Yield a coroutine's one answer, or the items of the async iterator that it returns."""
    found = await answer
    if not isinstance(found, AsyncIterator):
        yield found
        return
    try:
        async for item in found:
            yield item
    finally:
        if isinstance(found, AsyncGenerator):
            await found.aclose()


_END: Final = object()


async def _in_thread(call: Callable[[], Any], threads: ThreadPoolExecutor) -> AsyncGenerator[Any, None]:
    """Run a sync callable, and the generator it may return, in one thread from its beginning to its `finally`."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[tuple[Any, Exception | None]] = asyncio.Queue()  # `room` bounds it
    room = threading.Semaphore(READ_AHEAD)
    is_left = threading.Event()

    def run() -> None:
        try:
            with closing(_iterate(call())) as items:
                for item in items:
                    room.acquire()
                    if is_left.is_set():
                        return
                    loop.call_soon_threadsafe(arrived.put_nowait, (item, None))
        except Exception as error:  # the boundary: the reader of the stream raises it
            _tell(loop, arrived, error)
        else:
            _tell(loop, arrived, None)

    job = threads.submit(run)
    try:
        while True:
            item, error = await arrived.get()
            room.release()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        is_left.set()
        room.release()
        if not job.cancel():  # it runs: wait for its `finally`; the worker bounds how long
            await asyncio.shield(asyncio.wrap_future(job))


def _tell(loop: asyncio.AbstractEventLoop, arrived: asyncio.Queue[Any], error: Exception | None) -> None:
    if not loop.is_closed():  # a thread that outlived the loop has nothing to wake
        loop.call_soon_threadsafe(arrived.put_nowait, (_END, error))


def _iterate(found: Any) -> Generator[Any, None, None]:
    if not isinstance(found, Iterator):
        yield found
        return
    try:
        yield from found
    finally:
        close = getattr(found, "close", None)
        if close is not None:
            close()
