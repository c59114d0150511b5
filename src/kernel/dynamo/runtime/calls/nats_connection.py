"""One NATS connection of a process: reached at start or refused with a clear error, kept afterwards whatever happens."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from dynamo.errors import CannotConnect
from dynamo.runtime.base.settings import NatsSettings
from dynamo.runtime.base.tasks import first_of
from dynamo.runtime.observe.metrics import Family, MetricsRegistry
from dynamo.settings.extras import install_command

if TYPE_CHECKING:
    from nats.aio.client import Client

logger = logging.getLogger(__name__)

ERRORS: Final = Family(
    "dynamo_transport_nats_errors_total", "counter", "Errors of the NATS connection, by class", ("error_type",)
)


class NatsMetrics:
    """Errors of the connection. One per process."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self._errors = ERRORS.counters(registry)

    def failed(self, error_type: str) -> None:
        """Count an error; `error_type` is its class."""
        self._errors.labels(error_type).inc()


RECONNECT_SECONDS: Final = 0.5  # between attempts, for as long as it takes
PING_SECONDS: Final = 10  # a server that vanished without a word is noticed after about two of these
CLOSE_SECONDS: Final = 1.0


class NatsConnection:
    """`await start()`, then `client`; on one event loop. A lost server is awaited for ever: it is the operator's to end."""

    def __init__(
        self, settings: NatsSettings, *, wanted_by: str, count_error: Callable[[str], None] = lambda kind: None
    ) -> None:
        """`wanted_by`: the flag that needs NATS, for the error message. `count_error(kind)` counts what went wrong."""
        self._settings = settings
        self._wanted_by = wanted_by
        self._count_error = count_error
        self._client: Client | None = None
        self._connected = asyncio.Event()
        self._starting = asyncio.Lock()
        self._last_error: BaseException | None = None
        self._refused: asyncio.Future[None] | None = None  # while connecting: fails when trying again cannot help

    @property
    def client(self) -> Client:
        """The client. Raises CannotConnect before `start` and after `close`."""
        if self._client is None:
            raise CannotConnect(f"not connected to NATS at {self._settings.address}")
        return self._client

    @property
    def is_connected(self) -> bool:
        """Whether there is a server right now."""
        return self._connected.is_set()

    async def wait_connected(self) -> None:
        """Return when there is a server."""
        await self._connected.wait()

    async def start(self) -> None:
        """Connect; idempotent. Raises CannotConnect, within the settings' time, naming the address and the flag."""
        async with self._starting:
            if self._client is not None:
                return
            options = _options(self._settings, self._wanted_by)
            client = _client_class(self._wanted_by)()
            callbacks: dict[str, Any] = {
                "error_cb": self._failed,
                "disconnected_cb": self._lost,
                "reconnected_cb": self._back,
            }
            self._refused = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(self._settings.connect_timeout_seconds):
                    await first_of(client.connect(**options, **callbacks), self._refused)
            except Exception as error:
                await _abandon(client)
                why = self._last_error if isinstance(error, TimeoutError) and self._last_error is not None else error
                raise self._unreachable(why) from error
            except asyncio.CancelledError:
                await _abandon(client)
                raise
            finally:
                self._refused = None
            self._client = client
            self._connected.set()

    async def close(self) -> None:
        """Leave; idempotent. What was not sent within a second is dropped."""
        client, self._client = self._client, None
        self._connected.clear()
        if client is None:
            return
        try:
            if client.is_connected:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await client.flush()
        except Exception as error:  # at most once: a leaving process does not wait for a server in trouble
            logger.debug("NATS: the last messages were not flushed: %s", error)
        await _abandon(client)

    def _unreachable(self, why: BaseException) -> CannotConnect:
        said = str(why) or type(why).__name__
        return CannotConnect(
            f"NATS at {self._settings.address} cannot be used ({said}). Start one there, point NATS_SERVER at another, or "
            f"leave out {self._wanted_by}"
        )

    async def _failed(self, error: BaseException) -> None:
        kind = type(error).__name__
        self._count_error(kind)
        # One line for each way to fail, however often it fails so: a reconnect is attempted twice a second.
        level = logging.DEBUG if type(error) is type(self._last_error) else logging.WARNING
        self._last_error = error
        if self._refused is not None and not self._refused.done() and "authorization" in str(error).lower():
            self._refused.set_exception(error)
        if self._client is not None:
            logger.log(level, "NATS at %s: %s: %s", self._settings.address, kind, error)

    async def _lost(self) -> None:
        if self._connected.is_set():
            self._connected.clear()
            logger.warning("lost connection to NATS at %s; reconnecting", self._settings.address)

    async def _back(self) -> None:
        self._last_error = None
        self._connected.set()
        logger.info("NATS at %s is back", self._settings.address)


def _client_class(wanted_by: str) -> type[Client]:
    try:
        from nats.aio.client import Client
    except ModuleNotFoundError as error:
        raise CannotConnect(f"{wanted_by} needs the nats extra: {install_command('nats')}") from error
    return Client


async def _abandon(client: Client) -> None:
    """Close without waiting for a server that may not be there."""
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await client.close()
    except Exception as error:  # it is only left: its tasks are cancelled by then
        logger.debug("NATS: closing failed: %s", error)


def _options(settings: NatsSettings, wanted_by: str) -> dict[str, Any]:
    """Return the options for `connect`. Raises CannotConnect for files that cannot be read."""
    options: dict[str, Any] = {
        "servers": list(settings.servers),
        "name": "dynamo",
        "max_reconnect_attempts": -1,
        "reconnect_time_wait": RECONNECT_SECONDS,
        "connect_timeout": 1,
        "ping_interval": PING_SECONDS,
    }
    if settings.username is not None:
        options |= {"user": settings.username, "password": settings.password}
    elif settings.token is not None:
        options["token"] = settings.token
    elif settings.nkey is not None:
        options["nkeys_seed_str"] = settings.nkey
    elif settings.credentials_file is not None:
        options["user_credentials"] = settings.credentials_file
    else:  # as the native system does; a server without accounts ignores it
        options |= {"user": "user", "password": "user"}
    if settings.wants_tls:
        try:
            options["tls"] = _tls(settings)
        except OSError as error:  # SSLError is one
            raise CannotConnect(
                f"{wanted_by}: the files of NATS_TLS_CA_CERT_PATH, NATS_TLS_CLIENT_CERT_PATH and NATS_TLS_CLIENT_KEY_PATH "
                f"cannot be used: {error}"
            ) from error
    return options


def _tls(settings: NatsSettings) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=settings.tls_ca_path)
    if settings.tls_client_cert_path is not None:
        context.load_cert_chain(settings.tls_client_cert_path, settings.tls_client_key_path)
    if settings.tls_insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
