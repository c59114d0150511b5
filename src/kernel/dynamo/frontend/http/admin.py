"""Where the admin routes are served: on a listener of their own, or on the port of the API while that is of this machine only.

The admin routes change what all clients get, and no key protects them. So they are not served on a port that is open to a
network. Without an admin port, and with an API that is open, a request for them gets a 404 that names the setting.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from typing import Final, Self

from dynamo.frontend.base.asgi import Receive, Scope, Send, reply_rejected
from dynamo.frontend.base.request_id import reject_route
from dynamo.frontend.http.settings import HttpSettings
from dynamo.frontend.pipeline.settings import ApiLimits
from dynamo.protocol.dialect import OPENAI, Dialect
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.runtime.base.addresses import LOCAL_STORES, LOOPBACK, is_loopback
from dynamo.runtime.base.http_limits import Rejection
from dynamo.runtime.http.cross_site import SameSite

logger = logging.getLogger(__name__)

Route = Callable[[Scope, Receive, Send], Awaitable[None]]

ADMIN_CONNECTIONS: Final = 64  # operators and their tools


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminLimits(ApiLimits):
    """The limits of the API's connections, for fewer of them."""

    max_connections: int = ADMIN_CONNECTIONS

    @classmethod
    def of(cls, limits: ApiLimits) -> Self:
        """Take over everything but the number of connections."""
        values = {entry.name: getattr(limits, entry.name) for entry in fields(limits)}
        return cls(**{**values, "max_connections": ADMIN_CONNECTIONS})

    def too_many_connections(self) -> Rejection:
        text = f"More than {self.max_connections} connections to the admin listener"
        return Rejection(503, text, "connections", retry_after_seconds=1)


def serves_admin_with_api(settings: HttpSettings) -> bool:
    """Return whether the admin routes are served on the port of the API."""
    return settings.admin_port is None and is_loopback(_listens_at(settings))


class AdminElsewhere:
    """An admin route on a port that does not serve it: a 404 that names the way to it."""

    def __init__(self, settings: HttpSettings) -> None:
        self._way = (
            "it is served on the admin port only (--admin-port)"
            if settings.admin_port is not None
            else "admin routes are not served on a port that is open to a network. Start the frontend with --admin-port "
            "PORT (DYN_ADMIN_PORT), which serves them at 127.0.0.1"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await reply_rejected(send, RequestRejected(404, f"{scope['path']} is not here: {self._way}"))


class SameSiteOnly:
    """Routes that do nothing for pages of other sites: 403."""

    def __init__(self, app: Route, rule: SameSite) -> None:
        self._app, self._rule = app, rule

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = self._rule.reason(scope["headers"]) if scope["type"] == "http" else None
        if reason is None:
            await self._app(scope, receive, send)
        else:
            await reject_cross_site(scope, send, reason)


async def reject_cross_site(scope: Scope, send: Send, reason: str, dialect: Dialect = OPENAI) -> None:
    """Answer what the page of another site may have sent."""
    text = f"this request may come from a page of another site: {reason}"
    await reject_route(scope, send, RequestRejected(403, text), dialect)


def _listens_at(settings: HttpSettings) -> str:
    return LOOPBACK if settings.http_port is None else settings.http_host


def rule_of_admins(settings: HttpSettings) -> SameSite:
    """Return whose pages may call the admin routes: those of their own listener."""
    if settings.admin_port is not None:
        return SameSite(settings.admin_host, settings.runtime.system.allowed_hosts)
    return SameSite(_listens_at(settings), settings.runtime.system.allowed_hosts)


def rule_of_clients(settings: HttpSettings) -> SameSite:
    """Return whose pages may call the API."""
    return SameSite(_listens_at(settings), settings.runtime.system.allowed_hosts, settings.cors_origins)


def log_exposure(settings: HttpSettings) -> None:
    """Log, once at start, how far the listeners of a frontend are open."""
    if settings.http_port is None:
        return  # a Unix socket is for one user of this machine
    if is_loopback(settings.http_host):
        logger.info(
            "the API is served at %s only; --http-host 0.0.0.0 (DYN_HTTP_HOST) opens it to the network",
            settings.http_host,
        )
    elif settings.tls_cert_path is None and settings.key_sources.protect_clients:
        logger.warning(
            "API keys are sent to %s:%d in plain text: DYN_TLS_CERT_PATH is not set (docs/security.md). Leave this as it "
            "is only where a proxy in front, on a trusted network, speaks TLS",
            settings.http_host,
            settings.http_port,
        )
    elif settings.store not in LOCAL_STORES and settings.tls_cert_path is None:
        logger.warning(
            "the API at %s:%d is open to its network: there are no API keys (--keys), and DYN_TLS_CERT_PATH is not set "
            "(docs/security.md)",
            settings.http_host,
            settings.http_port,
        )
