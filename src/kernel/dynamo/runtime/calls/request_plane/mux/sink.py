"""The worker's end of one `mux` stream."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec

from dynamo.errors import Cancelled, describe
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import END_INDEX, OBJECT_CREDIT_BYTES, OBJECT_INDEX
from dynamo.runtime.calls.request_plane.mux.frames import pack
from dynamo.runtime.calls.request_plane.mux.outbox import ItemOutbox
from dynamo.runtime.calls.request_plane.sink_record import SinkRecord

if TYPE_CHECKING:
    from dynamo.runtime.calls.request_plane.mux.server import MuxServerProtocol

TOKEN_BYTES: Final = 10  # of a one-token chunk in a batch


class MuxSink(SinkRecord):
    """One response stream at the worker; implements `ResponseSink`."""

    __slots__ = ("_others", "_stream_id", "_turn", "_waiter", "connection", "credit", "ended", "offset", "outbox")

    def __init__(
        self, connection: MuxServerProtocol, outbox: ItemOutbox, stream_id: int, context: Context, credit: int
    ) -> None:
        """`connection` forgets this stream when it ends; `outbox` sends its items."""
        super().__init__(context)
        self.connection = connection
        self.outbox = outbox
        self._stream_id = stream_id
        self._turn = -1  # that of the outbox when this stream last had something in it
        self._waiter: asyncio.Future[None] | None = None
        self._others: dict[int, int] | None = None  # offsets of the choices other than 0
        self.credit = credit
        self.offset = 0  # of choice 0, nearly always the only one
        self.ended = False

    def send_tokens(
        self,
        token_ids: list[int],
        index: int = 0,
        finish_reason: object = None,
        extra: dict[str, object] | None = None,
    ) -> None:
        if self.ended:
            return
        count = len(token_ids)
        if index == 0:
            offset = self.offset
            self.offset = offset + count
        else:
            offset = self._advance(index, count)
        self.credit -= count or 1
        outbox = self.outbox
        self._turn = outbox.step.turn
        # A plain tuple: encoding it costs half of what a Struct instance would, and no code keeps it.
        if finish_reason is None and extra is None:
            outbox.items.append((self._stream_id, index, offset, token_ids))
        else:
            outbox.items.append((self._stream_id, index, offset, token_ids, finish_reason, extra))
        if not outbox.flush_scheduled:
            outbox.schedule_flush()

    def send_token(self, token_id: int) -> bool:
        outbox = self.outbox
        step = outbox.step
        if self._turn == step.turn or self.ended or not step.is_read:
            # What this stream has sent since the last flush must come first, and a step has one token of each stream.
            self.send_tokens([token_id])
            return not self.ended and self.has_credit()
        self._turn = step.turn
        offset = self.offset
        self.offset = offset + 1
        self.credit -= 1
        step.stream_ids.append(self._stream_id)
        step.offsets.append(offset)
        step.token_ids.append(token_id)
        if not outbox.flush_scheduled:
            outbox.schedule_flush()
        return self.credit > 0 and not outbox.paused

    def _advance(self, index: int, count: int) -> int:
        if self._others is None:
            self._others = {}
        offset = self._others.get(index, 0)
        self._others[index] = offset + count
        return offset

    @property
    def total(self) -> int:
        """Tokens sent so far, over all choices."""
        return self.offset if self._others is None else self.offset + sum(self._others.values())

    def send_object(self, envelope: dict[str, object]) -> None:
        if self.ended:
            return
        # Encoded here, so that a value that cannot travel is this stream's error and not the whole batch's.
        encoded = msgspec.Raw(pack(envelope))
        cost = len(encoded) // OBJECT_CREDIT_BYTES + 1
        self.credit -= cost
        self._object_bytes += len(encoded)
        self._turn = self.outbox.step.turn
        self.outbox.add((self._stream_id, OBJECT_INDEX, cost, (), None, encoded))

    def has_credit(self) -> bool:
        return self.credit > 0 and not self.outbox.paused

    async def wait_credit(self) -> None:
        while not (self.ended or self.has_credit()):
            self._waiter = asyncio.get_running_loop().create_future()
            self.outbox.waiting.add(self)
            starved = self.connection.call_when_starved(self._starved)
            try:
                await self._waiter
            finally:
                starved.cancel()
                self._waiter = None
                self.outbox.waiting.discard(self)

    def _starved(self) -> None:
        """End a stream that its caller has not read for too long: its place in the engine is needed elsewhere."""
        self.connection.refused("credit_stall")
        self.end(Cancelled("the caller did not read its stream for longer than DYN_TCP_CREDIT_STALL_SECS allows"))
        self.context.kill()

    def wake(self) -> None:
        """Let a producer that waits for credit check again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def end(self, error: BaseException | None = None) -> None:
        if self.ended:
            return
        self.ended = True
        self.failure = error
        record = describe(error) if error is not None else None
        self.outbox.add((self._stream_id, END_INDEX, self.total, (), None, record))
        self.connection.forget(self._stream_id)
        self.wake()

    @property
    def response_bytes(self) -> int:
        """Encoded bytes sent so far: exact for objects; token chunks are encoded many streams at a time, so each token
        counts for what a chunk of one token takes."""
        return self._object_bytes + TOKEN_BYTES * self.total

    def abandon(self) -> None:
        """Send nothing more: the caller is gone."""
        self.ended = True
        self.wake()
