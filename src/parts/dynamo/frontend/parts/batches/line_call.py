"""One line of a batch, executed by the very call that serves the online route of its API."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
from msgspec import Struct

from dynamo.errors import Cancelled
from dynamo.frontend.base.access import Caller, RouteGroup
from dynamo.frontend.pipeline.exchange import Arrival, Exchange
from dynamo.frontend.pipeline.inference import Call
from dynamo.frontend.pipeline.sink import AnswerBytes, AnswerStream, HeaderPairs
from dynamo.protocol.dialect import Dialect
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.runtime.base.identifiers import random_uuid

_PRIORITY: Final = (b"x-dynamo-request-priority", b"-1")  # below every request of a person
_GROUPS: Final = {"/v1/embeddings": RouteGroup.EMBEDDINGS}
_LATER: Final = frozenset({408, 500, 502, 504})  # may go better another time
_LIMITED: Final = 429


def check_endpoint(caller: Caller | None, endpoint: str) -> None:
    """Raise the 403 of a key that may not use the online route of an endpoint, and so may not by a batch either."""
    if caller is not None:
        caller.check_group(_GROUPS.get(endpoint, RouteGroup.INFERENCE))


class Fate(enum.Enum):
    """What becomes of a line after one attempt."""

    DONE = "done"  # its answer, a success or a failure, is its result
    RETRY = "retry"  # it failed in a way that another attempt may not
    LIMITED = "limited"  # its key has used up a limit: it comes again, however often
    NO_ROOM = "no_room"  # no worker had room: no attempt was made


class LineAnswer(Struct):
    """The answer to one line."""

    status: int = 0  # 0: it was stopped before there was one
    body: bytes = b""
    fate: Fate = Fate.DONE
    retry_after_seconds: float | None = None


class LineSink:
    """Takes the answer of one line."""

    def __init__(self, dialect: Dialect, request_id: str) -> None:
        self._dialect, self._request_id = dialect, request_id
        self.answer = LineAnswer()

    async def reply(
        self, status: int, body: bytes, headers: HeaderPairs = (), *, content_type: bytes = b"application/json"
    ) -> None:
        # A result is one line. Our own answers are; an engine that takes text may have written others.
        one_line = body if b"\n" not in body else msgspec.json.format(body, indent=-1)
        self.answer = LineAnswer(status, one_line)

    async def reject(self, rejected: RequestRejected) -> None:
        body = self._dialect.error_body(rejected, self._request_id)
        self.answer = LineAnswer(rejected.status, body, retry_after_seconds=rejected.retry_after_seconds)

    def open_stream(
        self, *, peek_seconds: float, keep_alive_seconds: float | None, late_headers: Callable[[], HeaderPairs]
    ) -> AnswerStream:
        """Raise RequestRejected: a line is not streamed, which its check has seen to before."""
        raise RequestRejected(400, "A line of a batch is not streamed", param="stream")

    def open_bytes(self, content_type: bytes, headers: HeaderPairs = ()) -> AnswerBytes:
        """Raise RequestRejected: a line is answered with JSON."""
        raise RequestRejected(400, "A line of a batch is answered with JSON")


class LineCalls:
    """Executes lines by the calls of a frontend."""

    def __init__(self, calls: Mapping[str, Call], *, overload_status: int) -> None:
        """`calls`: by endpoint, as batches name it."""
        self._calls = calls
        self._overload_status = overload_status
        self._running: dict[str, Exchange] = {}

    @property
    def endpoints(self) -> frozenset[str]:
        """The endpoints of which lines can be executed."""
        return frozenset(self._calls)

    @property
    def running(self) -> int:
        """How many lines run now."""
        return len(self._running)

    def is_line(self, exchange: Exchange) -> bool:
        """Return whether a request is a line that runs."""
        return self._running.get(exchange.arrival.client_request_id or "") is exchange

    async def run(self, endpoint: str, request_id: str, body: bytes, identity: Caller | None) -> LineAnswer:
        """Execute one line for a key (None: there are none); never raises for what goes wrong with it."""
        call = self._calls[endpoint]
        arrival = Arrival(
            body,
            asyncio.get_running_loop().time(),
            {b"x-request-id": request_id.encode(), _PRIORITY[0]: _PRIORITY[1]},
            (_PRIORITY,),
            request_id,
            f" (x-request-id {request_id})",
            path=endpoint,
            identity=identity,
        )
        exchange = call.open(random_uuid(), arrival)
        sink = LineSink(call.dialect, request_id)
        self._running[request_id] = exchange
        try:
            try:
                check_endpoint(identity, endpoint)  # of each line: what the key may do can have changed
            except RequestRejected as rejected:
                await call.refuse(exchange, rejected, sink)
            else:
                await call.run(exchange, sink)
        finally:
            del self._running[request_id]
        answer = sink.answer
        answer.fate = self._fate(answer.status)
        return answer

    def stop(self, request_id: str) -> None:
        """End a line that runs; its answer is that of a cancelled request."""
        exchange = self._running.get(request_id)
        if exchange is not None:
            exchange.end_with(Cancelled("the batch was ended"))

    def _fate(self, status: int) -> Fate:
        if status in (503, self._overload_status):
            return Fate.NO_ROOM
        if status == _LIMITED:
            return Fate.LIMITED
        return Fate.RETRY if status in _LATER else Fate.DONE
