"""What a worker does with a request, whichever wire it came in on: look up, admit, run, end.

One core serves every listener of a process, so the limits hold over all wires together. Requests of one connection start
in the order of their arrival, and connections take turns: a connection that opens thousands of requests at once delays those
of another one by a turn of the event loop, and not by thousands of requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from time import perf_counter
from typing import Final, Generic, NamedTuple, TypeVar

from dynamo.errors import (
    Cancelled,
    DynamoException,
    EngineShutdown,
    HttpError,
    InvalidArgument,
    Overloaded,
    ResponseTimeout,
    Unknown,
    WorkerUnavailable,
)
from dynamo.runtime.base.settings import RequestPlaneSettings
from dynamo.runtime.calls.context import Context, on_loop
from dynamo.runtime.calls.request_plane.base import Handler, ResponseSink
from dynamo.runtime.observe.known_failures import LOGGED

logger = logging.getLogger(__name__)

# Requests that wait for a place, one line per connection: the lines are served in turn, and a full queue shrinks the
# longest.


_NONE: Final = object()  # an owner without a line

Item = TypeVar("Item", bound=Hashable)


class FairQueue(Generic[Item]):
    """First come, first served within a line; round-robin over the lines. Adding and taking cost the same at any length."""

    __slots__ = ("_count", "_lines")

    def __init__(self) -> None:
        # Ordered dictionaries: the front of a plain one is found by stepping over everything that was taken before.
        self._lines: OrderedDict[Hashable, OrderedDict[Item, None]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Item]:
        """Iterate over all items, line by line."""
        for line in list(self._lines.values()):
            yield from list(line)

    def first_of_each_line(self) -> list[Item]:
        """Return the longest-waiting item of every line."""
        return [next(iter(line)) for line in self._lines.values()]

    def add(self, owner: Hashable, item: Item) -> None:
        """Put an item at the end of its owner's line."""
        line = self._lines.get(owner)
        if line is None:
            line = self._lines[owner] = OrderedDict()
        line[item] = None
        self._count += 1

    def pop(self, may_go: Callable[[Hashable], bool] | None = None) -> Item:
        """Take the first item of the line whose turn it is, of those whose owner `may_go`. Raises KeyError when none is."""
        owner = next((owner for owner in self._lines if may_go is None or may_go(owner)), _NONE)
        line = self._lines.pop(owner)
        item, _ = line.popitem(last=False)
        self._count -= 1
        if line:
            self._lines[owner] = line  # behind the other lines
        return item

    def remove(self, owner: Hashable, item: Item) -> bool:
        """Take one item out of its line; whether it was there."""
        line = self._lines.get(owner)
        if line is None or item not in line:
            return False
        del line[item]
        self._count -= 1
        if not line:
            del self._lines[owner]
        return True

    def displace_for(self, owner: Hashable) -> Item | None:
        """Take out the newest item of the longest line, to make room for one of `owner`; None where the owner has its share.

        A line shorter than the average gains a place as long as some line is longer than it. So one connection can use the
        whole queue while it is alone, and cannot keep others out.
        """
        own = len(self._lines.get(owner, ()))
        sharing = len(self._lines) + (own == 0)
        if (own + 1) * sharing > self._count:
            return None  # also keeps a flood from searching for the longest line with every request
        longest = max(self._lines, key=lambda each: len(self._lines[each]))
        item = next(reversed(self._lines[longest]))
        self.remove(longest, item)
        return item


CLOSE_TIMEOUT_SECONDS: Final = 5.0
"""How long `close` waits for handlers whose context was killed before it cancels them, and again after that: an engine
that ignores both would otherwise hold the process for ever."""

STARTS_PER_TURN: Final = 64
"""Requests that start in one turn of the event loop. The first step of each runs in the next turn, so this is how long
everything else of the process waits for them: a few milliseconds."""

TIMES_FREE: Final = 7
"""A peer may hold so many times the places that are free: 7 of 8 where it alone is busy, with others each a part of what these
leave (the dynamic threshold of shared switch buffers, Choudhury and Hahne 1998). A flood of requests that run for a minute
otherwise keeps every other peer waiting for that minute. Fewer than 8 places are not divided."""

AT_CAPACITY: Final = "Server overloaded: worker at capacity"


class RunningShares:
    """The running places by peer. A peer that is alone may hold all of them."""

    __slots__ = ("_connected", "_held", "_running", "limit")

    def __init__(self, limit: int) -> None:
        self.limit, self._running = limit, 0
        self._held: Counter[Hashable] = Counter()
        self._connected: Counter[Hashable] = Counter()

    def joined(self, peer: Hashable) -> None:
        """Count one connection of a peer."""
        self._connected[peer] += 1

    def left(self, peer: Hashable) -> None:
        """Take back one connection of a peer. Absent is fine."""
        _take_one(self._connected, peer)

    def may_start(self, peer: Hashable) -> bool:
        """Return whether one more request of a peer may run."""
        free = self.limit - self._running
        if free <= 0:
            return False
        return len(self._connected) < 2 or self._held[peer] < TIMES_FREE * free

    def started(self, peer: Hashable) -> None:
        """Count a request that runs."""
        self._running += 1
        self._held[peer] += 1

    def ended(self, peer: Hashable) -> None:
        """Take back a request that `started` counted."""
        self._running -= 1
        _take_one(self._held, peer)


def _take_one(counts: Counter[Hashable], peer: Hashable) -> None:
    counts[peer] -= 1
    if counts[peer] <= 0:
        del counts[peer]


def _ignore(*_: object) -> None:
    """Do nothing: there is no observer."""


class CoreObservers(NamedTuple):
    """What is called for the requests that a core takes; see `ServerCore.observe`."""

    waited: Callable[[float], object] = _ignore
    rejected: Callable[[], object] = _ignore
    answered: Callable[[float], object] = _ignore  # by the listeners


class ServerCore:
    """Paths, admission and the running requests of one process. Use it on one event loop only."""

    def __init__(self, settings: RequestPlaneSettings | None = None) -> None:
        settings = settings or RequestPlaneSettings.from_env()
        if settings.engine_request_limit is not None:
            run_limit, self._queue_limit = settings.engine_request_limit, settings.engine_queue_limit
        else:
            run_limit, self._queue_limit = settings.worker_pool_size, settings.work_queue_size
        self._handlers: dict[str, Handler] = {}
        self.stream_paths: set[str] = set()  # whose body is a `RequestStream`: bidirectional endpoints
        self._running: dict[asyncio.Task[None], _Request] = {}
        self._waiting: FairQueue[_Request] = FairQueue()
        self.shares = RunningShares(run_limit)
        self._starts_left = STARTS_PER_TURN
        self._closed = False
        self.observers = CoreObservers()

    def observe(
        self,
        *,
        waited: Callable[[float], object],
        rejected: Callable[[], object],
        answered: Callable[[float], object] | None = None,
    ) -> None:
        """Set the observers: `waited` receives how many seconds each request waited for its handler's task to run,
        `rejected` is called for each request that found engine and queue full, `answered` receives how many
        seconds after its arrival a request's first item left.
        """
        self.observers = CoreObservers(waited, rejected, answered or _ignore)

    @property
    def running(self) -> int:
        """Requests whose handler runs."""
        return len(self._running)

    @property
    def queued(self) -> int:
        """Requests that were accepted and wait for a place."""
        return len(self._waiting)

    @property
    def queue_age_seconds(self) -> float:
        """How long the oldest of these has been waiting; 0 when the queue is empty."""
        arrived = min((request.arrived for request in self._waiting.first_of_each_line()), default=None)
        return 0.0 if arrived is None else perf_counter() - arrived

    def register(self, path: str, handler: Handler) -> None:
        """Serve `path`. Raises ValueError if it is taken."""
        if path in self._handlers:
            raise ValueError(f"request path {path!r} is already served; unregister it first")
        self._handlers[path] = handler

    def takes_one(self, path: str) -> bool:
        """Return whether `path` is served and takes one request, not a stream of requests."""
        return path in self._handlers and path not in self.stream_paths

    def unregister(self, path: str) -> None:
        """Decline new requests for `path`; those accepted go on. Absent is fine."""
        self._handlers.pop(path, None)
        self.stream_paths.discard(path)

    def dispatch(
        self, path: str, body: object, context: Context, sink: ResponseSink, connection: Hashable | None = None
    ) -> None:
        """Start one request, or queue it; the sink receives the outcome.

        `connection`: requests with the same one share a line of the queue. A full queue makes room for a connection with
        fewer waiting requests than others: the newest request of the longest line is then ended with `Overloaded`. While
        several have joined `shares`, none takes the last running places.

        Raises `WorkerUnavailable` for an unknown path and `Overloaded` when the queue is full; the sink is then
        untouched. A context with a deadline is killed at that time and its sink ended with `ResponseTimeout`.
        """
        if self._closed:
            raise WorkerUnavailable("Server unavailable: worker is shutting down")
        handler = self._handlers.get(path)
        if handler is None:
            raise WorkerUnavailable(f"Server unavailable: unknown endpoint {path}")
        if len(self._running) + len(self._waiting) >= self.shares.limit + self._queue_limit:
            self._make_room(connection)
        if context.is_stopped():
            sink.end(_never_started())
            return
        timer = None
        if context.deadline is not None:
            timer = asyncio.get_running_loop().call_at(context.deadline, _expire, context, sink)
        request = _Request(handler, body, context, sink, timer, self.observers.waited)
        request.connection = connection
        if not self._waiting and self._starts_left > 0 and self.shares.may_start(connection):
            self._start(request)
        else:
            self._enqueue(request)
            self._start_waiting()  # those that wait may be of peers that have their share, and this one of another

    def _make_room(self, connection: Hashable | None) -> None:
        self.observers.rejected()
        displaced = self._waiting.displace_for(connection)
        if displaced is None:
            raise Overloaded(AT_CAPACITY)
        displaced.left_queue()
        displaced.sink.end(Overloaded(AT_CAPACITY))

    async def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """Decline everything from now on, end what is open with `EngineShutdown`, and wait for the handlers.

        Their contexts are killed first; after `timeout` seconds their tasks are cancelled, and after as long again the
        rest is given up on. Idempotent.
        """
        self._closed = True
        stopping = EngineShutdown("the worker is shutting down")
        for request in list(self._waiting):
            self._leave_queue(request, stopping)
        for request in list(self._running.values()):
            request.sink.end(stopping)
            request.context.kill()
        for patience in ("kill", "cancel"):
            tasks = set(self._running)
            if not tasks:
                return
            if patience == "cancel":
                for task in tasks:
                    task.cancel()
            await asyncio.wait(tasks, timeout=timeout)
        for request in self._running.values():
            logger.warning("request %s ignored its kill and its cancellation; leaving it behind", request.context.id())

    def _start(self, request: _Request) -> None:
        loop = asyncio.get_running_loop()
        if self._starts_left == STARTS_PER_TURN:
            loop.call_soon(self._next_turn)
        self._starts_left -= 1
        # The task is held by `_running` and awaited by `close`; its end is handled in `_finished`.
        task = loop.create_task(request.run(), name=f"request {request.context.id()}")
        self._running[task] = request
        self.shares.started(request.connection)
        task.add_done_callback(self._finished)

    def _next_turn(self) -> None:
        self._starts_left = STARTS_PER_TURN
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self._waiting and self._starts_left > 0 and len(self._running) < self.shares.limit:
            try:
                following = self._waiting.pop(self.shares.may_start)
            except KeyError:
                return  # whatever waits is of peers that have their share
            following.stop_waiting()
            self._start(following)

    def _finished(self, task: asyncio.Task[None]) -> None:
        request = self._running.pop(task)
        self.shares.ended(request.connection)
        if request.timer is not None:
            request.timer.cancel()
        if task.cancelled():  # perhaps before its first step, when `run` had no chance to report it
            request.sink.end(EngineShutdown("the worker is shutting down"))
        self._start_waiting()

    def _enqueue(self, request: _Request) -> None:
        def cancelled(_killed: bool) -> None:
            self._leave_queue(request, _never_started())

        self._waiting.add(request.connection, request)
        request.forget = request.context.on_cancel(on_loop(asyncio.get_running_loop(), cancelled))

    def _leave_queue(self, request: _Request, error: DynamoException) -> None:
        if not self._waiting.remove(request.connection, request):
            return  # it was started, or had left, in the meantime
        request.left_queue()
        request.sink.end(error)


class _Request:
    """One accepted request: all that its task, its place in the queue and its deadline need."""

    __slots__ = ("arrived", "body", "connection", "context", "forget", "handler", "sink", "timer", "waited")

    def __init__(
        self,
        handler: Handler,
        body: object,
        context: Context,
        sink: ResponseSink,
        timer: asyncio.TimerHandle | None,
        waited: Callable[[float], object],
    ) -> None:
        self.handler, self.body, self.context, self.sink, self.timer = handler, body, context, sink, timer
        self.waited = waited
        self.arrived = perf_counter()
        self.connection: Hashable | None = None
        self.forget: Callable[[], None] | None = None  # while it waits: takes its `on_cancel` back

    def stop_waiting(self) -> None:
        """Take the request out of the queue: it starts."""
        if self.forget is not None:
            self.forget()
            self.forget = None

    def left_queue(self) -> None:
        """Take the request out of the queue: it will not start."""
        self.stop_waiting()
        if self.timer is not None:
            self.timer.cancel()

    async def run(self) -> None:
        self.waited(perf_counter() - self.arrived)
        sink = self.sink
        try:
            await self.handler(self.body, self.context, sink)
        except asyncio.CancelledError:
            sink.end(EngineShutdown("the worker is shutting down"))
            raise
        except GeneratorExit:
            sink.end(EngineShutdown("engine shutting down"))
        except Exception as error:
            typed = typed_error(error)
            if not isinstance(error, DynamoException | HttpError):
                LOGGED.log_failure(logger, self.context.id(), error, is_expected=sink.ended)
            sink.end(typed)
        else:
            sink.end()


def typed_error(error: Exception) -> DynamoException:
    """Convert a handler's exception to one of ours: itself, an asserted HTTP status, or `Unknown` caused by it."""
    if isinstance(error, DynamoException):
        return error
    typed: DynamoException
    if isinstance(error, HttpError):
        text = json.dumps({"message": error.message, "code": error.code})
        typed = InvalidArgument(text) if 400 <= error.code < 500 else Unknown(text)
    else:
        typed = Unknown(f"{type(error).__name__}: {error}")
    typed.__cause__ = error
    return typed


def _expire(context: Context, sink: ResponseSink) -> None:
    # End before kill: calls of a sink after a kill are dropped.
    sink.end(ResponseTimeout("the request's deadline passed"))
    context.kill()


def _never_started() -> Cancelled:
    return Cancelled("cancelled before the request was started")
