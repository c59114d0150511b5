"""The access log: one JSON line for each request, with no content, no query string and no key.

And the audit log: one line for each action of an operator, on the disk before its answer is sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import ClassVar, Final, NamedTuple

import msgspec
from starlette.types import ASGIApp

from dynamo.frontend.base.access import Access, identity_of
from dynamo.frontend.base.asgi import Message, Receive, Scope, Send
from dynamo.frontend.base.settings.keys import KeySettings
from dynamo.frontend.http.inference_route import EXCHANGE
from dynamo.frontend.http.routes import Site
from dynamo.frontend.parts.keys.door import client_address
from dynamo.frontend.parts.keys.line_file import LineFile
from dynamo.frontend.parts.keys.rules.records import Network
from dynamo.frontend.parts.part import Part
from dynamo.frontend.pipeline.exchange import Exchange, tried_models
from dynamo.frontend.pipeline.request_records import worker_fields
from dynamo.runtime.http.cycle import RESPOND_EXTENSION

MAX_BODY_BYTES: Final = 64 * 1024  # of a request or an answer that the audit log shows
MAX_PATH: Final = 1024  # characters
_ID: Final = b"x-request-id"
_encode: Final = msgspec.json.Encoder().encode


class _Seen:
    """What became of one request, as its messages pass."""

    __slots__ = ("body", "request_id", "status")

    def __init__(self) -> None:
        self.status: int | None = None
        self.request_id = ""
        self.body = b""

    def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.status = status
        for name, value in headers:
            if name == _ID:
                self.request_id = value.decode("latin-1")
                return

    def more(self, body: bytes) -> None:
        if len(self.body) < MAX_BODY_BYTES:
            self.body += body[:MAX_BODY_BYTES]

    @property
    def error_code(self) -> str | None:
        """The code of an error, in the shape of either API; None where it has none."""
        if self.status is None or self.status < 400:
            return None
        try:
            error = msgspec.json.decode(self.body)["error"]
            found = error.get("code") or error.get("type")
        except (msgspec.MsgspecError, LookupError, TypeError, AttributeError):
            return None
        return found if isinstance(found, str) else None


def _watched(scope: Scope, send: Send, seen: _Seen) -> Send:
    """Return a `send` that notes the answer; a whole answer that is written past it is noted, too."""
    respond = (scope.get("extensions") or {}).get(RESPOND_EXTENSION)
    if respond is not None:

        def noted(status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
            seen.start(status, headers)
            if status >= 400:
                seen.more(body)
            return bool(respond(status, headers, body))

        scope["extensions"][RESPOND_EXTENSION] = noted

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            seen.start(message["status"], message.get("headers", ()))
        elif seen.status is not None and seen.status >= 400:
            seen.more(message.get("body", b""))
        await send(message)

    return sending


class AccessLog:
    """Writes a line for each request once its answer has ended, also where its client left."""

    def __init__(
        self, app: ASGIApp, file: LineFile, *, trusted: Sequence[Network], wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._app, self._file, self._trusted, self._wall_clock = app, file, trusted, wall_clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, seen = self._wall_clock(), _Seen()
        remote = client_address(scope, self._trusted)
        scope[EXCHANGE] = None
        try:
            await self._app(scope, receive, _watched(scope, send, seen))
        finally:
            ended = self._wall_clock()
            fields: dict[str, object] = {
                "time": _timestamp(began),
                "request_id": seen.request_id,
                "remote": remote,
                "method": scope["method"],
                "route": scope["path"][:MAX_PATH],
                "status": seen.status or 499,  # nothing was answered: the client had left
                "total_ms": round((ended - began) * 1000, 3),
            }
            identity = identity_of(scope)
            if identity is not None:
                fields["key_id"] = identity.id
            if (code := seen.error_code) is not None:
                fields["code"] = code
            exchange = scope.pop(EXCHANGE)
            if exchange is not None:
                _add_exchange(fields, exchange)
            self._file.add(_encode(fields))


def _timestamp(at: float) -> str:
    second = int(at)
    return f"{_second(second)}.{int((at - second) * 1000):03}Z"


@lru_cache(maxsize=4)  # many requests begin in one second
def _second(at: int) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _add_exchange(fields: dict[str, object], exchange: Exchange) -> None:
    """Add what came of an inference request; what is not known is left out."""
    if exchange.is_client_gone:
        fields["status"] = 499
    if exchange.context.trace_id:
        fields["trace_id"] = exchange.context.trace_id
    if exchange.model is not None:
        fields["model"] = exchange.model
    if exchange.fallbacks:
        fields |= {"served_by": exchange.served_model, "tried": tried_models(exchange.fallbacks)}
    counters, tally = exchange.counters, exchange.tally
    if counters is not None:
        fields["endpoint"], fields["stream"] = counters.key[1], counters.key[2] == "stream"
        if (first := counters.first_token_seconds) is not None:
            fields["ttft_ms"] = round(first * 1000, 3)
    if tally is None:
        return
    fields["input"], fields["output"] = tally.prompt_tokens, tally.completion_tokens
    if (cached := tally.cached_tokens) is not None:
        fields["cached"] = cached
    if tally.finish_reason is not None:
        fields["finish_reason"] = tally.finish_reason
    fields |= worker_fields(tally)
    if tally.moves:
        fields["migrations"] = len(tally.moves)


class AuditedRoute(NamedTuple):
    """What the audit log has to know of a request to an admin route."""

    is_action: bool  # False: it only reads, whatever its method
    can_be_read: bool  # whether a GET of the same path shows what the action changes


class AuditLog:
    """Writes a line for every action on an admin route, before its answer is sent; also for those that were refused.

    Reading is no action, but a reading that was refused is worth a line, without its body. An action whose line cannot be written has taken
    place, and is answered with a 500.
    """

    def __init__(
        self,
        app: ASGIApp,
        file: LineFile,
        audited: Callable[[str, str], AuditedRoute | None],
        *,
        trusted: Sequence[Network],
    ) -> None:
        """`audited`: the route of a method and a path; None: it is none of an operator."""
        self._app, self._file, self._audited, self._trusted = app, file, audited, trusted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._audited(scope["method"], scope["path"]) if scope["type"] == "http" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        # Nothing may be sent before the line is on the disk.
        scope["extensions"] = {k: v for k, v in (scope.get("extensions") or {}).items() if k != RESPOND_EXTENSION}
        remote = client_address(scope, self._trusted)
        seen, held, asked = _Seen(), list[Message](), _Seen()

        async def receiving() -> Message:
            message = await receive()
            asked.more(message.get("body", b""))
            return message

        async def holding(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.start(message["status"], message.get("headers", ()))
            else:
                seen.more(message.get("body", b""))
            if not route.is_action and seen.status not in (401, 403):
                await send(message)  # no line comes of it, and it may go on for hours
            else:
                held.append(message)

        headers = list(scope["headers"])  # with the key, which the door takes out
        before = await self._state(route, scope, headers)
        await self._app(scope, receiving, holding)
        if route.is_action or seen.status in (401, 403):
            identity = identity_of(scope)
            line = {
                "time": _timestamp(time.time()),
                "request_id": seen.request_id,
                "key_id": None if identity is None else identity.id,
                "remote": remote,
                "action": f"{scope['method']} {scope['path']}",
                "asked": _plain(asked.body) if route.is_action else None,
                "before": before,
                "after": await self._state(route, scope, headers),
                "status": seen.status,
                "code": seen.error_code,
            }
            await self._file.add_synced(msgspec.json.encode(line))
        for message in held:
            await send(message)

    async def _state(self, route: AuditedRoute, scope: Scope, headers: list[tuple[bytes, bytes]]) -> object:
        """Return what the route of an action shows to its own caller when it is read; None where that is not a 200."""
        if not route.is_action or not route.can_be_read:
            return None
        seen = _Seen()
        reading: Scope = {
            **scope,
            "method": "GET",
            "extensions": {},
            "query_string": b"",
            "headers": headers,
        }

        async def nothing() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.start(message["status"], ())
            else:
                seen.more(message.get("body", b""))

        await self._app(reading, nothing, noting)
        return _plain(seen.body) if seen.status == 200 else None


def _plain(body: bytes) -> object:
    """Return JSON as what it holds, and anything else as None: it is not known what it may be."""
    if len(body) >= MAX_BODY_BYTES:
        return None
    try:
        return msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return None


class RequestLogs(Part):
    """Both files; None where a log is off."""

    name: ClassVar[str] = "request_logs"
    outlives_models: ClassVar[bool] = True

    def __init__(self, settings: KeySettings) -> None:
        """Raises InvalidArgument for a file that cannot be written."""
        self._trusted = settings.trusted_proxies
        self.access = None if settings.access_log is None else LineFile(settings.access_log)
        self.audit = None if settings.audit_log is None else LineFile(settings.audit_log)

    def in_front_of(self, app: ASGIApp, site: Site) -> ASGIApp:
        if self.audit is not None:
            app = AuditLog(app, self.audit, _audited(site), trusted=self._trusted)
        if self.access is not None and not site.is_for_operators:
            app = AccessLog(app, self.access, trusted=self._trusted)
        return app

    async def aclose(self) -> None:
        """Write the rest."""
        for file in (self.access, self.audit):
            if file is not None:
                await file.aclose()


def _audited(site: Site) -> Callable[[str, str], AuditedRoute | None]:
    """Return what the audit log has to know of a method and a path; None: they are no admin route."""
    of_admins = site.of_admins()

    def find(method: str, path: str) -> AuditedRoute | None:
        found = [route for route in of_admins if route.path_regex.match(path)]
        if not found:
            return None
        route = next((each for each in found if method in (each.methods or ())), found[0])
        is_look = method in ("GET", "HEAD") or route.access is Access.INSPECT  # a question may need a body
        return AuditedRoute(not is_look, "GET" in (route.methods or ()))

    return find
