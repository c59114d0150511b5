"""The gRPC side of the picker: external processing and health, with messages as bytes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dynamo.errors import CannotConnect, InvalidArgument
from dynamo.picker.choice import Picker
from dynamo.picker.exchange import GatewayExchange
from dynamo.picker.messages import read_message
from dynamo.picker.settings import PickerSettings
from dynamo.picker.wire import MalformedMessage, last_bytes, of_bytes, of_number, read, text_of
from dynamo.runtime.base.tasks import first_of
from dynamo.settings.extras import install_command

if TYPE_CHECKING:
    from grpc import aio

try:
    import grpc
except ImportError as error:  # an extra
    raise InvalidArgument(f"the picker needs gRPC, which is not installed: {install_command('gateway')}") from error

logger = logging.getLogger(__name__)

EXT_PROC: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH: Final = "grpc.health.v1.Health"
_SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = 1, 2, 3
_LIVENESS: Final = "liveness"
_READINESS: Final = ("", "readiness", EXT_PROC)
_POLL_SECONDS: Final = 1.0  # of a health watch: no event comes of trouble with the store
_UNANSWERED: Final = 16  # messages of one stream that are read ahead
_MESSAGE_BYTES: Final = 1024 * 1024  # beside the longest body


class PickerServer:
    """Serves gateways. Use as `async with`; `port` is known then."""

    def __init__(self, picker: Picker, settings: PickerSettings) -> None:
        self._picker, self._settings = picker, settings
        self._server: aio.Server | None = None
        self.port = 0
        self.is_draining = False
        self.streams = 0
        """How many streams of gateways are open."""

    async def __aenter__(self) -> PickerServer:
        from grpc import aio

        settings, most = self._settings, self._picker.body_limit_bytes + _MESSAGE_BYTES
        options = [("grpc.max_receive_message_length", most), ("grpc.max_send_message_length", most),
                   ("grpc.so_reuseport", 0)]  # fmt: skip
        self._server = server = aio.server(options=options)
        process = grpc.stream_stream_rpc_method_handler(self._process)
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(EXT_PROC, {"Process": process}),
                grpc.method_handlers_generic_handler(
                    HEALTH,
                    {
                        "Check": grpc.unary_unary_rpc_method_handler(self._check),
                        "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
                        "List": grpc.unary_unary_rpc_method_handler(self._list),
                    },
                ),
            )
        )
        address = f"{settings.host}:{settings.port}"
        try:
            if settings.tls_cert_path is not None and settings.tls_key_path is not None:
                self.port = server.add_secure_port(address, _credentials(settings.tls_cert_path, settings.tls_key_path))
            else:
                self.port = server.add_insecure_port(address)
        except (RuntimeError, OSError) as error:
            raise CannotConnect(f"the picker cannot listen on {address}: {error}") from error
        await server.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._server is not None:
            await self._server.stop(None)

    async def drain(self, seconds: float) -> None:
        """Report NOT_SERVING and go on for `drain_seconds`, then take no new streams, and let the open ones end for `seconds`."""
        self.is_draining = True
        await asyncio.sleep(self._settings.drain_seconds)
        if self._server is not None:
            await self._server.stop(seconds)

    # -- external processing -------------------------------------------------------------------------------------------

    async def _process(self, _requests: object, context: aio.ServicerContext[bytes, bytes]) -> None:
        exchange, messages = GatewayExchange(self._picker, self._settings), asyncio.Queue[bytes](_UNANSWERED)
        self.streams += 1
        try:
            await first_of(_read(context, messages, exchange), _answer(context, messages, exchange))
        finally:
            self.streams -= 1
            exchange.close()

    # -- health --------------------------------------------------------------------------------------------------------

    def _status(self, service: str) -> int:
        if service == _LIVENESS:
            return _SERVING
        if service not in _READINESS:
            return _SERVICE_UNKNOWN
        return _SERVING if self._picker.is_ready and not self.is_draining else _NOT_SERVING

    async def _check(self, request: bytes, context: aio.ServicerContext[bytes, bytes]) -> bytes:
        return of_number(1, self._status(_service_of(request)))

    async def _list(self, _request: bytes, context: aio.ServicerContext[bytes, bytes]) -> bytes:
        entries = [(name, of_number(1, self._status(name))) for name in (_LIVENESS, *_READINESS)]
        return b"".join(of_bytes(1, of_bytes(1, name.encode()) + of_bytes(2, status)) for name, status in entries)

    async def _watch(self, request: bytes, context: aio.ServicerContext[bytes, bytes]) -> AsyncIterator[bytes]:
        service, last = _service_of(request), 0
        while True:
            if (status := self._status(service)) != last:
                last = status
                yield of_number(1, status)
            await asyncio.sleep(_POLL_SECONDS)


def _service_of(request: bytes) -> str:
    return text_of(last_bytes(read(request), 1) or b"")


async def _read(
    context: aio.ServicerContext[bytes, bytes], messages: asyncio.Queue[bytes], exchange: GatewayExchange
) -> None:
    """Read a stream until the gateway ends it. An end before there is a worker means that its client has gone."""
    while (data := await context.read()) is not grpc.aio.EOF:
        await messages.put(data)
    if not exchange.is_choosing:
        await messages.join()


async def _answer(
    context: aio.ServicerContext[bytes, bytes], messages: asyncio.Queue[bytes], exchange: GatewayExchange
) -> None:
    """Answer the messages of a stream in their order, until it is over."""
    while not exchange.is_over:
        data = await messages.get()
        try:
            message = read_message(data)
        except MalformedMessage as error:
            logger.warning("a gateway sent what cannot be read: %s", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        for answer in await exchange.take(message):
            await context.write(answer)
        messages.task_done()


def _credentials(cert: Path, key: Path) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
