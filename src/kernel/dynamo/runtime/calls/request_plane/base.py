"""What every request plane promises: a request goes to one instance, a stream of items comes back.

Promises, held by one set of contract tests over all planes:

* Items arrive in order, each exactly once; an item carries its choice index and the offset of its first token.
* A stream ends with one END: clean, or with a typed error. A lost peer is an error (`Disconnected`), never an end.
* Stop and kill reach the other side; a caller that goes away is a kill; a stream dropped inside the process is too.
* A sink never buffers more than the caller's credit: `send_*` is synchronous and cheap, and the producer awaits
  `wait_credit()` when `has_credit()` is false.
* All items of all streams of a connection that were sent in one turn of the event loop leave in one frame.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import lru_cache
from typing import Any, Final, Protocol, Required, TypedDict

import msgspec

from dynamo.errors import DynamoException
from dynamo.runtime.calls.context import Context

OBJECT_INDEX: Final = -1  # the item is no token chunk: `extra` is an annotated envelope {data?, event?, comment?, id?}
END_INDEX: Final = -2  # the last item of a stream: `extra` is None (clean) or an error record

INITIAL_CREDITS: Final = 1024
"""Tokens a producer may be ahead of its consumer. A fast reader renews half a window at a time, so this is also how
seldom credit frames travel; 1024 tokens of a stalled stream are a few KiB."""

FINISH_SECONDS: Final = 5.0
"""How long a worker may take from its terminal chunk to the END: a generator's `finally` runs in between where a bare
handler serves, and a request that is done must not appear cancelled to it."""

OBJECT_CREDIT_BYTES: Final = 64  # an object item costs one credit per started 64 bytes of its encoding


class StreamItem(msgspec.Struct, array_like=True, gc=False):
    """One chunk of one stream, as it travels: a msgpack array whose trailing members may be absent."""

    stream_id: int
    index: int  # choice index, or OBJECT_INDEX / END_INDEX
    offset: int  # number of tokens of this choice sent before this item; END: tokens sent over all choices
    token_ids: list[int]
    finish_reason: object = None  # str, {"error": message} or None; set on the terminal chunk only
    extra: dict[str, Any] | None = None  # every other key of the engine's chunk


class ResponseSink(Protocol):
    """The worker's end of one response stream. Not thread-safe: use it on the event loop."""

    request_bytes: int  # encoded size of the request's body; 0 where nothing was encoded

    @property
    def response_bytes(self) -> int:
        """About how many bytes were sent so far. The count grows with every item that has content."""

    def send_tokens(
        self,
        token_ids: list[int],
        index: int = 0,
        finish_reason: object = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Queue one token chunk. The offset is counted here. Silently ignored after `end` or a kill."""

    def send_token(self, token_id: int) -> bool:
        """Queue one token (a u32) of choice 0 and nothing else, as nearly every chunk is; return `has_credit`, and False after
        `end` or a kill. `send_tokens` does the same, and costs more."""

    def send_object(self, envelope: dict[str, Any]) -> None:
        """Queue one object chunk: {"data": ..., "event": ..., "comment": [...], "id": ...}, absent keys omitted."""

    def has_credit(self) -> bool:
        """Return whether the caller has room. Sending without credit is allowed once (the sink may overdraw by one
        item).
        """

    async def wait_credit(self) -> None:
        """Return when there is room again, or at once when the stream was killed or lost."""

    def end(self, error: BaseException | None = None) -> None:
        """End the stream; idempotent, the first call wins."""

    @property
    def ended(self) -> bool:
        """Whether `end` was called or the caller is gone."""


class RequestStream(AsyncIterator[Any]):
    """The requests of one call to a bidirectional endpoint, as they come. Iterate over it once.

    Its end is no cancellation: the caller has sent everything, and reads on. A caller that is lost kills the context.
    """

    @abstractmethod
    def close(self) -> None:
        """Leave; what still comes is dropped. Idempotent."""


Handler = Callable[[object, Context, ResponseSink], Awaitable[None]]
"""Serve one request: (decoded body, context, sink). Returning ends the stream cleanly; an exception ends it with that
error. The server runs one task per request and cancels it only when the process shuts down or the handler requested it."""


class TokenLane(Protocol):
    """Takes token ids that came with nothing else. Called on the event loop; must not wait.

    A class of lanes may also have a static `take_step(lanes, ids, now)`, for ids that come together, one for each lane. It
    takes those that concern nothing but their own lane, and returns the places of the others in order: for these,
    `take_token` is called. It must not raise.
    """

    def take_token(self, token_id: int, now: float) -> bool:
        """Take one id. `now` is the loop time of the frame it came with. False: the lane is to be closed."""

    def take_tokens(self, ids: list[int]) -> bool:
        """Do the same for ids that came together."""


class ResponseStream(Protocol):
    """The caller's end of one response stream."""

    async def next_batch(self) -> list[StreamItem]:
        """Return all that has arrived since the last call, waiting for at least one item; [] at a clean end.

        Raises the stream's typed error after all items before it were delivered. Offsets were checked: a gap or an
        overlap is `StreamIncomplete`. Taking a batch grants the producer its credit back.
        """

    def take(self) -> list[StreamItem] | None:
        """Take a batch without waiting: [] when nothing has arrived yet, None at a clean end. Raises as `next_batch`
        does.
        """

    def listen(self, arrived: Callable[[], None] | None) -> None:
        """Call `arrived` whenever there may be something to take, once for all that came together; None: no more.

        It need take only once: where the end came together with the last items, `arrived` is called again for it.
        This is how a fast reader is fed without a task switch per token. It is called on the event loop, must not raise,
        and may be called without need; not while a reader waits in `next_batch`.
        """

    def open_lane(self, lane: TokenLane, closed: Callable[[BaseException | None], None]) -> bool:
        """Pass the token ids of items that hold nothing else straight to `lane`, in their order among the other items,
        which go the way of `listen`. Return whether this stream does so; where it does not, everything goes that way.

        Call it after `listen`; the next `listen` closes the lane. `closed` is called once: with None after `lane` has
        returned False, or with what it raised; not by `listen`.
        """

    def book(
        self, *, first: Callable[[DynamoException | None], None] | None, released: Callable[[], None] | None
    ) -> None:
        """Call `first` once with what comes first: None for items, or the error. Call `released` when the reader releases the
        stream by `finish` or `close`, once. Several bookings of one stream are called in their order."""

    @property
    def tokens_taken(self) -> int:
        """How many tokens of choice 0 the reader has taken."""

    @property
    def failure(self) -> DynamoException | None:
        """What the stream ended with; None: it has not failed so far."""

    def stop(self) -> None:
        """Request a graceful end from the worker; keep reading."""

    def kill(self) -> None:
        """Report to the worker that the reader is gone; nothing more is delivered."""

    def finish(self) -> None:
        """Release the stream without a kill: the reader has the terminal chunk, and the END is on its way.

        What still arrives is dropped. A worker that has not ended the stream within `FINISH_SECONDS` receives a kill.
        """

    def close(self) -> None:
        """Release the stream; kills it if it has not ended. Idempotent; call it on every path."""


class RequestPlaneClient(Protocol):
    """The caller's side of a plane, shared by all endpoints of a process."""

    async def open(self, instance: Instance, body: object, context: Context) -> ResponseStream:
        """Send `body` to one instance and return its stream; stop and kill of `context` are passed on.

        Raises `CannotConnect` when nothing was sent, `Overloaded` or `WorkerUnavailable` when the worker declined at
        once, and otherwise lets the stream raise.
        """

    async def close(self) -> None:
        """Close every connection; open streams end with `Disconnected`."""


class RequestPlaneServer(Protocol):
    """The worker's side of a plane: one listener for all endpoints of a process."""

    async def start(self) -> None:
        """Begin to listen, and return when the registered paths can be reached; idempotent."""

    def register(self, path: str, handler: Handler) -> None:
        """Serve `path`. Raises ValueError if it is taken."""

    def unregister(self, path: str) -> None:
        """Decline new requests for `path` with `WorkerUnavailable`; streams in flight go on."""

    def transport(self, path: str) -> TransportMembers:
        """Return the members of an instance record for reaching `path`: at least {"transport": {...}}; merged into
        the record.
        """

    async def close(self) -> None:
        """Stop listening and drop the connections; in-flight handlers see their context killed."""


class TransportMembers(TypedDict, total=False):
    """The members of an instance record with which a caller reaches it."""

    transport: Required[dict[str, str]]
    device_type: str | None
    request_plane_codec: str | None
    mux: int | None


class Instance(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An instance record (`v1/instances`), as 1.6 writes it. Unknown fields are tolerated."""

    namespace: str
    component: str
    endpoint: str
    instance_id: int  # u64; may exceed 2**53, so never a float
    transport: dict[str, str]  # {"tcp": "HOST:PORT/PATH"} | {"nats_tcp": SUBJECT} | {"mem": PATH}
    device_type: str | None = None
    request_plane_codec: str | None = None  # absent: the native wire speaks JSON
    mux: int | None = None  # ours: the same address also speaks `mux` of this version

    @property
    def key(self) -> str:
        """The key inside `v1/instances`."""
        return f"{self.namespace}/{self.component}/{self.endpoint}/{self.instance_id:x}"

    def __str__(self) -> str:
        return f"{self.namespace}/{self.component}/{self.endpoint}/{self.instance_id}"


@lru_cache(maxsize=4096)
def split_tcp(address: str) -> tuple[str, int, str]:
    """Split a `transport.tcp` value into ("HOST", PORT, "PATH"); the path is opaque. Raises ValueError when
    malformed.
    """
    where, _, path = address.partition("/")
    host, colon, port = where.rpartition(":")
    if not colon or not host or not path or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"malformed tcp transport {address!r}: expected HOST:PORT/PATH")
    return host.removeprefix("[").removesuffix("]"), int(port), path


class OffsetCounter:
    """Counts tokens per choice on either end of a stream: the sender stamps, the receiver checks."""

    __slots__ = ("_first", "_others", "total")

    def __init__(self) -> None:
        self._first = 0  # choice 0 is nearly always the only one
        self._others: dict[int, int] | None = None
        self.total = 0

    def advance(self, index: int, count: int) -> int:
        """Book `count` tokens of a choice and return the offset of the first of them."""
        self.total += count
        if index == 0:
            offset = self._first
            self._first = offset + count
            return offset
        if self._others is None:
            self._others = {}
        offset = self._others.get(index, 0)
        self._others[index] = offset + count
        return offset
