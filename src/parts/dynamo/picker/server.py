"""The gRPC side of the picker: external processing and health, with messages as bytes."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Final

from dynamo.errors import CannotConnect, InvalidArgument
from dynamo.picker.choice import Picker
from dynamo.picker.exchange import GatewayExchange
from dynamo.picker.grpc.calls import INVALID_ARGUMENT, CallFailed, CallTable, GrpcCall, failure_of
from dynamo.picker.grpc.connection import Http2Connection
from dynamo.picker.messages import Message, read_message
from dynamo.picker.settings import PickerSettings
from dynamo.picker.wire import MalformedMessage, last_bytes, of_bytes, of_number, read, text_of

logger = logging.getLogger(__name__)

EXT_PROC: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH: Final = "grpc.health.v1.Health"
_SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = 1, 2, 3
_LIVENESS: Final = "liveness"
_READINESS: Final = ("", "readiness", EXT_PROC)
_POLL_SECONDS: Final = 1.0  # of a health watch: no event comes of trouble with the store
_IDLE_SECONDS: Final = 0.05  # between two checks whether the last stream has ended
_MESSAGE_BYTES: Final = 1024 * 1024  # beside the longest body
MAX_CONNECTIONS: Final = 1024


class PickerServer:
    """Serves gateways. Use as `async with`; `port` is known then."""

    def __init__(self, picker: Picker, settings: PickerSettings) -> None:
        self._picker, self._settings = picker, settings
        self._calls = CallTable(
            {
                f"/{EXT_PROC}/Process": self._process,
                f"/{HEALTH}/Check": self._check,
                f"/{HEALTH}/Watch": self._watch,
                f"/{HEALTH}/List": self._list,
            },
            picker.body_limit_bytes + _MESSAGE_BYTES,
        )
        self._connections: set[Http2Connection] = set()
        self._server: asyncio.Server | None = None
        self.port = 0
        self.is_draining = False
        self._streams: set[_GatewayStream] = set()

    async def __aenter__(self) -> PickerServer:
        settings, loop = self._settings, asyncio.get_running_loop()
        tls = None
        if settings.tls_cert_path is not None and settings.tls_key_path is not None:
            tls = _tls(settings.tls_cert_path, settings.tls_key_path)
        try:
            self._server = await loop.create_server(
                lambda: Http2Connection(self._calls.open, self._opened, self._connections.discard),
                settings.host,
                settings.port,
                ssl=tls,
            )
        except OSError as error:
            raise CannotConnect(f"the picker cannot listen on {settings.host}:{settings.port}: {error}") from error
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._server is not None:
            self._server.close()
        await self._calls.aclose()
        for stream in list(self._streams):
            stream.break_off()
        for connection in list(self._connections):
            connection.close()

    def _opened(self, connection: Http2Connection) -> bool:
        if len(self._connections) >= MAX_CONNECTIONS:
            logger.warning("a connection is refused: there are %d", MAX_CONNECTIONS)
            return False
        self._connections.add(connection)
        return True

    async def drain(self, seconds: float) -> None:
        """Report NOT_SERVING and go on for `drain_seconds`, then take no new streams, and let the open ones end for `seconds`."""
        self.is_draining = True
        await asyncio.sleep(self._settings.drain_seconds)
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.go_away()
        end = asyncio.get_running_loop().time() + seconds
        while self.streams and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(_IDLE_SECONDS)

    # -- external processing -------------------------------------------------------------------------------------------

    @property
    def streams(self) -> int:
        """How many streams of gateways are open."""
        return len(self._streams)

    def _process(self, call: GrpcCall) -> None:
        stream = _GatewayStream(call, GatewayExchange(self._picker, self._settings), self._calls, self._ended)
        self._streams.add(stream)
        self._picker.metrics.streams.set(len(self._streams))

    def _ended(self, stream: _GatewayStream) -> None:
        self._streams.discard(stream)
        self._picker.metrics.streams.set(len(self._streams))

    # -- health --------------------------------------------------------------------------------------------------------

    def _status(self, service: str) -> int:
        if service == _LIVENESS:
            return _SERVING
        if service not in _READINESS:
            return _SERVICE_UNKNOWN
        return _SERVING if self._picker.is_ready and not self.is_draining else _NOT_SERVING

    async def _check(self, call: GrpcCall) -> None:
        await call.write(of_number(1, self._status(await _service_of(call))))

    async def _list(self, call: GrpcCall) -> None:
        entries = [(name, of_number(1, self._status(name))) for name in (_LIVENESS, *_READINESS)]
        await call.write(
            b"".join(of_bytes(1, of_bytes(1, name.encode()) + of_bytes(2, status)) for name, status in entries)
        )

    async def _watch(self, call: GrpcCall) -> None:
        service, last = await _service_of(call), 0
        while True:
            if (status := self._status(service)) != last:
                last = status
                await call.write(of_number(1, status))
            await asyncio.sleep(_POLL_SECONDS)


class _GatewayStream:
    """Takes the messages of one stream, each after the last. Most are answered at once; a task is begun for a choice only."""

    __slots__ = ("_call", "_calls", "_ended", "_exchange", "_is_busy")

    def __init__(
        self, call: GrpcCall, exchange: GatewayExchange, calls: CallTable, ended: Callable[[_GatewayStream], None]
    ) -> None:
        self._call, self._exchange, self._calls, self._ended = call, exchange, calls, ended
        self._is_busy = False
        call.on_event = self._go_on

    def break_off(self) -> None:
        """End the stream, as this process ends."""
        self._end(asyncio.CancelledError())

    def _go_on(self) -> None:
        call = self._call
        if self._is_busy:
            if call.is_ended and self._exchange.is_choosing:
                call.cancel()  # its client has gone
            return
        self._is_busy = True
        try:
            call.task = work = self._take_messages()
        except Exception as error:  # the boundary: the call ends with it, and no other one
            self._end(error)
            return
        if work is not None:
            work.add_done_callback(self._chosen)
        elif call.is_gone:
            self._end(asyncio.CancelledError())
        elif (
            self._exchange.is_over or call.is_ended
        ) and not call.unsent:  # the end waits for what the peer has no room for
            self._end(None)
        else:
            self._is_busy = False

    def _take_messages(self) -> asyncio.Task[None] | None:
        """Answer what is here, and return the task that answers the last of it; None: all is answered, or waits for the peer."""
        call, exchange = self._call, self._exchange
        while not (exchange.is_over or call.unsent or call.is_gone) and (data := call.next_message()) is not None:
            answers = exchange.take(_readable(data))
            if not isinstance(answers, list):
                return self._begin(answers)
            if answers:
                call.send(answers)
        return None

    def _begin(self, answers: Coroutine[None, None, list[bytes]]) -> asyncio.Task[None]:
        work = self._calls.start(self._answer(answers), "the choice for a request")
        work.add_done_callback(lambda _: answers.close())  # where the task was cancelled before it began
        return work

    async def _answer(self, answers: Coroutine[None, None, list[bytes]]) -> None:
        """Send the answers to a choice before the next choice of this turn is made, which takes the loop for a millisecond."""
        if found := await answers:
            self._call.send_now(found)

    def _chosen(self, task: asyncio.Task[None]) -> None:
        self._call.task = None
        if (error := failure_of(task)) is not None:
            self._end(error)
            return
        self._is_busy = False
        self._go_on()

    def _end(self, error: BaseException | None) -> None:
        call = self._call
        call.let_go()
        if error is None:
            call.finish()
        else:
            call.fail(error)
        self._exchange.close()
        self._ended(self)


async def _service_of(call: GrpcCall) -> str:
    data = await call.read()
    try:
        return text_of(last_bytes(read(data or b""), 1) or b"")
    except MalformedMessage as error:
        raise CallFailed(INVALID_ARGUMENT, str(error)) from error


def _readable(data: bytes) -> Message:
    try:
        return read_message(data)
    except MalformedMessage as error:
        logger.warning("a gateway sent what cannot be read: %s", error)
        raise CallFailed(INVALID_ARGUMENT, str(error)) from error


def _tls(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["h2"])
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(f"--tls-cert-path {cert} and --tls-key-path {key} cannot be used: {error}") from error
    return context
