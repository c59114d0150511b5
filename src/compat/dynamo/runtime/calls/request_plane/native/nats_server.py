"""The native wire over NATS, worker's side: requests come as messages, answers leave over TCP as they always do."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from dynamo.runtime.base.limits import Refused, uncounted
from dynamo.runtime.base.settings import RequestPlaneSettings
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.calls.nats_connection import NatsConnection
from dynamo.runtime.calls.request_plane.base import Handler, TransportMembers
from dynamo.runtime.calls.request_plane.core import ServerCore
from dynamo.runtime.calls.request_plane.listener import detect_device_type
from dynamo.runtime.calls.request_plane.native.server import NativeServer
from dynamo.runtime.calls.request_plane.security import PlaneSecurity

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

logger = logging.getLogger(__name__)

TRANSPORT: Final = "nats_tcp"
QUEUE_GROUP: Final = "q"
SUBSCRIBE_SECONDS: Final = 5  # for the server to confirm; whole, as its client requires

_SLUG_CHARS: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-")


def subject_of(path: str) -> str:
    """Return the subject of a routing path "HEX/NS/COMPONENT/ENDPOINT"; any other path gets a subject of its own."""
    instance, *names = path.split("/")
    scope, endpoint = ("_".join(names[:-1]), names[-1]) if len(names) == 3 else ("", "_".join(names))
    slug = "".join(c if c in _SLUG_CHARS else "_" for c in scope.lower()).lstrip("_")
    return f"{slug or 'dynamo'}.{endpoint}-{instance}"


class NatsServer:
    """Implements `RequestPlaneServer`. A rejection is sent on the response stream: a NATS reply carries no reason.

    A server that is lost takes no new requests with it for long: the subscriptions come back with the connection, and
    answers do not pass through NATS.
    """

    def __init__(
        self,
        connection: NatsConnection,
        settings: RequestPlaneSettings,
        *,
        refused: Refused = uncounted,
        security: PlaneSecurity | None = None,
    ) -> None:
        """`connection` may be shared; the code that made it closes it. `security`: how answers reach callers."""
        self._connection = connection
        self.core = ServerCore(settings)
        self._native = NativeServer(self.core, settings, refused=refused)
        self._native.security = security or PlaneSecurity()
        self._refused = refused
        self._subscriptions: dict[str, Subscription] = {}  # by path
        self._subscribing = Background()

    async def start(self) -> None:
        """Connect, and return when the registered paths can be reached; idempotent. Raises `CannotConnect`."""
        await self._connection.start()
        await self._subscribing.wait()

    def register(self, path: str, handler: Handler) -> None:
        """Serve `path`. Raises ValueError if it is taken."""
        self.core.register(path, handler)
        if path not in self._subscriptions:
            self._subscribing.start(self._subscribe(path), f"subscribe {path}")

    def unregister(self, path: str) -> None:
        """Decline new requests for `path`; streams in flight go on. The subject stays ours, so that callers receive the
        reason.
        """
        self.core.unregister(path)

    def transport(self, path: str) -> TransportMembers:
        """Return the members of an instance record for reaching `path`."""
        return {
            "transport": {TRANSPORT: subject_of(path)},
            "device_type": detect_device_type(),
            "request_plane_codec": "msgpack",
        }

    async def close(self) -> None:
        """Leave the subjects, end what is open with `EngineShutdown`, and drop the streams; idempotent."""
        await self._subscribing.wait(SUBSCRIBE_SECONDS)
        await self._subscribing.close()
        subscriptions, self._subscriptions = self._subscriptions, {}
        for path, subscription in subscriptions.items():
            try:
                await subscription.unsubscribe()
            except Exception as error:  # no server, or closed before us: it has no subscriptions either way
                logger.debug("unsubscribing %s failed: %s", path, error)
        await self.core.close()
        await self._native.close()

    async def _subscribe(self, path: str) -> None:
        subject = subject_of(path)

        async def arrived(message: Msg) -> None:
            await self._serve(path, message)

        client = self._connection.client
        try:
            self._subscriptions[path] = await client.subscribe(subject, queue=QUEUE_GROUP, cb=arrived)
            # The server has read it when it answers the second PING: the client writes the first one ahead of what waits.
            await client.flush(timeout=SUBSCRIBE_SECONDS)
            await client.flush(timeout=SUBSCRIBE_SECONDS)
        except Exception as error:  # of many kinds; a subscription that was made comes back with the server
            logger.warning(
                "NATS: %s is not known to serve %s yet: %s", subject, path, str(error) or type(error).__name__
            )

    async def _serve(self, path: str, message: Msg) -> None:
        refusal = self._native.begin(path, message.headers or {}, message.data)
        if refusal is not None:
            self._refused("malformed")
        if message.reply:
            await message.respond((refusal or "").encode())
