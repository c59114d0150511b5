"""etcd's v3 API over its JSON gateway: leases, ranges, transactions and watches, at whichever endpoint answers.

The gateway is part of every etcd server and needs nothing but an HTTP client; what goes over it here (a keep-alive every
few seconds, a stream of rare changes) is far from where JSON would cost anything. One event loop owns a client.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from dynamo.errors import CannotConnect, DynamoException, InvalidArgument
from dynamo.runtime.base.settings import EtcdSettings
from dynamo.runtime.discovery.http_stream import Lines, watch_over
from dynamo.settings.credentials import without_credentials
from dynamo.settings.extras import install_command

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

DEFAULT_PORT: Final = 2379

NOT_FOUND: Final = 5
RESOURCE_EXHAUSTED: Final = 8  # also what an etcd that is out of space declines writes with
FAILED_PRECONDITION: Final = 9
UNAUTHENTICATED: Final = 16
# "Not here, not now" in gRPC's numbers: cancelled, deadline exceeded, resource exhausted, unavailable.
AUTHENTICATE_SECONDS: Final = (
    5.0  # etcd computes a password's hash on purpose slowly; each attempt cut short costs it another
)

_TRY_ANOTHER: Final = frozenset({1, 4, 8, 14})

_HAS_LEADER: Final = {
    "Grpc-Metadata-hasleader": "true"
}  # a member that lost its cluster ends the stream with that reason

T = TypeVar("T")


class EtcdError(DynamoException):
    """etcd answered, and the answer was no. `code` is gRPC's number."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code

    @property
    def is_out_of_space(self) -> bool:
        """Whether etcd declines writes because of its quota; no other member will take them."""
        return self.code == RESOURCE_EXHAUSTED and "space exceeded" in str(self)


class Compacted(EtcdError):
    """The changes from a watch's revision are no longer kept: read everything again."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease as a keep-alive finds it."""

    ttl_seconds: int  # 0: there is no such lease (any more)
    revision: int  # of the whole store: every change of any key makes it higher


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One change of one key."""

    key: str
    value: bytes | None  # None: deleted
    revision: int


class _Login:
    """The user of etcd, and the token that etcd has given for it."""

    def __init__(self, settings: EtcdSettings) -> None:
        """Raises InvalidArgument for a user without a password, and the other way round."""
        if (settings.username is None) != (settings.password is None):
            missing = "ETCD_AUTH_USERNAME" if settings.username is None else "ETCD_AUTH_PASSWORD"
            raise InvalidArgument(f"{missing} is not set; etcd needs a user and a password, or neither")
        self.user, self.password = settings.username, settings.password  # None: etcd needs none
        self.token: str | None = None
        self.lock = asyncio.Lock()  # held while a token is fetched


class EtcdClient:
    """Methods raise `CannotConnect` when no endpoint answered, and `EtcdError` when one declined."""

    def __init__(self, settings: EtcdSettings, *, attempt_seconds: float) -> None:
        """`attempt_seconds` bounds one request to one endpoint, but for those that check a password. Raises InvalidArgument naming a variable that is wrong."""
        self.endpoints = parse_endpoints(settings)
        self._tls = tls_context(settings) if self.endpoints[0].startswith("https:") else None
        self._login = _Login(settings)
        self._attempt_seconds = attempt_seconds
        self._session: aiohttp.ClientSession | None = None
        self._current = 0  # the endpoint that answered last
        self._streams: dict[asyncio.Timeout, int] = {}  # open watches and the endpoint of each

    def open(self) -> None:
        """Call it on the loop that will use the client. Raises CannotConnect when the extra is not installed."""
        try:
            import aiohttp
        except ImportError as error:
            raise CannotConnect(
                f"the etcd discovery backend needs the extra etcd: {install_command('etcd')}; or use "
                "--discovery-backend file (one machine)"
            ) from error
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._tls if self._tls is not None else True, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._attempt_seconds),
        )

    async def close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    # -- leases --------------------------------------------------------------------------------------------------

    async def grant(self, lease_id: int, ttl_seconds: float) -> float:
        """Take a lease of this id; the TTL that the server made of it. An existing one of that id is taken as it is."""
        try:
            answer = await self._call("lease/grant", {"ID": lease_id, "TTL": max(1, round(ttl_seconds))}, _Granted)
        except EtcdError as error:
            if error.code == FAILED_PRECONDITION and "already exists" in str(error):
                return float((await self.keep_alive(lease_id)).ttl_seconds or ttl_seconds)
            raise
        return float(answer.TTL)

    async def keep_alive(self, lease_id: int) -> Lease:
        answer = await self._call("lease/keepalive", {"ID": lease_id}, _KeptAlive, headers=_HAS_LEADER)
        return Lease(max(answer.result.TTL, 0), answer.result.header.revision)

    async def leased_keys(self, lease_id: int) -> set[bytes]:
        """Return the keys that vanish with a lease; none when there is no such lease."""
        answer = await self._call("lease/timetolive", {"ID": lease_id, "keys": True}, _TimeToLive)
        return set(answer.keys)

    async def revoke(self, lease_id: int) -> None:
        """Give a lease back, and its keys with it; absent is fine."""
        try:
            await self._call("lease/revoke", {"ID": lease_id}, _Answer)
        except EtcdError as error:
            if error.code != NOT_FOUND:
                raise

    # -- keys ----------------------------------------------------------------------------------------------------

    async def put(self, key: str, value: bytes, lease_id: int) -> None:
        """Raises EtcdError with `NOT_FOUND` when there is no such lease."""
        await self._call("kv/put", {"key": key.encode(), "value": value, "lease": lease_id}, _Answer)

    async def put_new(self, key: str, value: bytes, lease_id: int) -> tuple[bytes, int] | None:
        """Create a key in one transaction; None when that was done, else the value that is there and its lease."""
        name = key.encode()
        answer = await self._call(
            "kv/txn",
            {
                "compare": [{"key": name, "target": "VERSION", "version": 0}],
                "success": [{"request_put": {"key": name, "value": value, "lease": lease_id}}],
                "failure": [{"request_range": {"key": name}}],
            },
            _Transaction,
        )
        if answer.succeeded:
            return None
        found = answer.responses[0].response_range
        if found is None or not found.kvs:
            raise EtcdError(2, f"etcd answered a transaction on {key} with neither a write nor a value")
        return found.kvs[0].value, found.kvs[0].lease

    async def swap(self, key: str, expected: bytes | None, value: bytes) -> bool:
        """Replace a key that has this value (None: that does not exist), under no lease; whether that was so."""
        name = key.encode()
        compare: dict[str, object] = {"key": name, "target": "VERSION", "version": 0}
        if expected is not None:
            compare = {"key": name, "target": "VALUE", "value": expected}
        write = {"request_put": {"key": name, "value": value}}
        answer = await self._call("kv/txn", {"compare": [compare], "success": [write]}, _Transaction)
        return answer.succeeded

    async def check_access(self, key: str) -> None:
        """Raises EtcdError when this client's user may not read a key, whether or not it exists."""
        await self._call("kv/range", {"key": key.encode(), "count_only": True}, _Answer)

    async def delete(self, key: str) -> None:
        await self._call("kv/deleterange", {"key": key.encode()}, _Answer)

    async def is_out_of_space(self) -> bool:
        """Return whether the NOSPACE alarm is on: etcd then rejects every write, also that of a lease, until it is
        disarmed.
        """
        status = await self._call("maintenance/status", {}, _Status)
        return any("NOSPACE" in error for error in status.errors)

    async def range(self, prefix: str) -> tuple[dict[str, bytes], int]:
        """Return all that starts with `prefix`, and the revision at which this was true."""
        start, end = span(prefix)
        answer = await self._call("kv/range", {"key": start, "range_end": end}, _Range)
        found = {}
        for each in answer.kvs:
            with suppress(UnicodeDecodeError):  # no key of ours
                found[each.key.decode()] = each.value
        return found, answer.header.revision

    @asynccontextmanager
    async def watch(self, *prefixes: str, revision: int = 0) -> AsyncIterator[AsyncIterator[list[WatchEvent]]]:
        """Watch the changes below each prefix from `revision` (0: now) on, in order and without a gap, while the stream lasts.

        Iterating raises `CannotConnect` when the stream broke or its endpoint was given up, `Compacted`, or
        `EtcdError`.
        """
        endpoint = self._current
        ranges = [dict(zip(("key", "range_end"), span(prefix), strict=True)) for prefix in prefixes]
        bodies = [{"create_request": {**each, "start_revision": revision}} for each in ranges]
        where = self.endpoints[endpoint]
        import aiohttp

        try:
            async with asyncio.timeout(None) as scope:
                async with asyncio.timeout(self._attempt_seconds):
                    response = await self._post(where, "watch", bodies, _HAS_LEADER)
                async with response:
                    if response.status != 200:
                        raise self._declined(response.status, await response.read())
                    watch_over(response)
                    self._streams[scope] = endpoint
                    try:
                        async with aclosing(self._events(response)) as events:
                            yield events
                    finally:
                        del self._streams[scope]
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._give_up(endpoint)
            raise CannotConnect(f"the watch at etcd {where} ended: {_reason(error)}") from error

    async def _events(self, response: aiohttp.ClientResponse) -> AsyncGenerator[list[WatchEvent], None]:
        lines = Lines()
        async for data in response.content.iter_any():
            for line in lines.feed(data):
                message = _watched.decode(line)
                if message.error is not None:
                    raise EtcdError(message.error.grpc_code, f"etcd ended a watch: {message.error.message}")
                result = message.result
                if result.compact_revision:
                    raise Compacted(11, f"etcd has forgotten the changes before revision {result.compact_revision}")
                if result.canceled:
                    raise EtcdError(2, f"etcd ended a watch: {result.cancel_reason or 'no reason given'}")
                if events := [event for each in result.events if (event := _event(each)) is not None]:
                    yield events
        raise CannotConnect("etcd closed the stream of a watch")

    # -- requests ------------------------------------------------------------------------------------------------

    async def _call(
        self, path: str, body: dict[str, object], kind: type[T], *, headers: dict[str, str] | None = None
    ) -> T:
        """Send one request to the first endpoint that answers it, beginning with the endpoint that answered last."""
        import aiohttp

        failures: list[str] = []
        for _ in self.endpoints:
            endpoint = self._current
            where = self.endpoints[endpoint]
            try:
                return await self._ask(where, path, body, kind, headers)
            except EtcdError as error:
                if error.code not in _TRY_ANOTHER or error.is_out_of_space:
                    raise
                failures.append(f"{where}: {error}")
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                failures.append(f"{where}: {_reason(error)}")
            except msgspec.MsgspecError as error:
                failures.append(f"{where}: not an answer of etcd's ({error})")
            self._give_up(endpoint)
        raise CannotConnect(f"no etcd answers ({'; '.join(failures)})")

    async def _ask(
        self, where: str, path: str, body: dict[str, object], kind: type[T], headers: dict[str, str] | None
    ) -> T:
        for is_last in (False, True):
            token = await self._credentials(where)
            async with (
                asyncio.timeout(self._attempt_seconds),
                await self._post(where, path, [body], headers) as response,
            ):
                answer = await response.read()
            if response.status == 200:
                return msgspec.json.decode(answer, type=kind, strict=False)
            error = self._declined(response.status, answer)
            if is_last or self._login.user is None or not _is_stale(error):
                raise error
            if self._login.token == token:
                self._login.token = None  # tokens end after minutes, and with a server that restarts
        raise AssertionError("unreachable")

    async def _credentials(self, where: str) -> str | None:
        if self._login.user is None or self._login.token is not None:
            return self._login.token
        async with self._login.lock:
            if self._login.token is None:
                body = {"name": self._login.user, "password": self._login.password}
                async with (
                    asyncio.timeout(max(self._attempt_seconds, AUTHENTICATE_SECONDS)),
                    await self._post(where, "auth/authenticate", [body], None) as response,
                ):
                    answer = await response.read()
                if response.status != 200:
                    error = self._declined(response.status, answer)
                    if error.code in _TRY_ANOTHER:
                        raise error
                    if "not enabled" not in str(error):
                        raise EtcdError(
                            UNAUTHENTICATED,
                            f"etcd at {where} declines the user {self._login.user!r} of ETCD_AUTH_USERNAME and "
                            f"ETCD_AUTH_PASSWORD: {error}",
                        )
                    logger.warning("ETCD_AUTH_USERNAME is set, but etcd at %s has authentication disabled", where)
                    self._login.user = None
                else:
                    self._login.token = msgspec.json.decode(answer, type=_Authenticated, strict=False).token
        return self._login.token

    async def _post(
        self, where: str, path: str, bodies: Sequence[Mapping[str, object]], headers: dict[str, str] | None
    ) -> aiohttp.ClientResponse:
        if self._session is None:
            raise CannotConnect("the etcd client is closed")
        sent = {"Content-Type": "application/json", **(headers or {})}
        if self._login.token is not None:
            sent["Authorization"] = self._login.token
        return await self._session.post(
            f"{where}/v3/{path}",
            data=b"".join(map(msgspec.json.encode, bodies)),  # bytes become base64, as the gateway requires
            headers=sent,
            allow_redirects=False,
        )

    @staticmethod
    def _declined(status: int, body: bytes) -> EtcdError:
        try:
            answer = msgspec.json.decode(body, type=_Declined, strict=False)
        except msgspec.MsgspecError:
            if status == 404:
                return EtcdError(12, "this server has no /v3 JSON gateway (etcd: --enable-grpc-gateway)")
            return EtcdError(14 if status >= 500 else 2, f"HTTP status {status}")  # something in front of etcd
        return EtcdError(answer.code, answer.message or answer.error)

    def _give_up(self, endpoint: int) -> None:
        """Use the next one from now on, and move the watches that hang on this one."""
        if endpoint != self._current or len(self.endpoints) == 1:
            return
        self._current = (endpoint + 1) % len(self.endpoints)
        now = asyncio.get_running_loop().time()
        for scope, used in self._streams.items():
            if used == endpoint:
                scope.reschedule(now)


# -- settings -------------------------------------------------------------------------------------------------------------


def parse_endpoints(settings: EtcdSettings) -> tuple[str, ...]:
    """Parse each endpoint to `http(s)://HOST:PORT`, all with one scheme. Raises InvalidArgument naming
    ETCD_ENDPOINTS.
    """
    has_tls = any((settings.ca, settings.client_cert, settings.client_key))
    found: list[str] = []
    for each in (settings.endpoints or "").split(","):
        text = each.strip()
        if not text:
            continue
        wrong = InvalidArgument(
            f"ETCD_ENDPOINTS: {without_credentials(text)!r} is not http://HOST:PORT or https://HOST:PORT"
        )
        try:
            url = urlsplit(text if "://" in text else f"{'https' if has_tls else 'http'}://{text}")
            port = url.port or DEFAULT_PORT
        except ValueError:
            raise wrong from None
        if url.scheme not in ("http", "https") or not url.hostname or url.path.strip("/") or url.query:
            raise wrong
        host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
        found.append(f"{url.scheme}://{host}:{port}")
    if not found:
        raise InvalidArgument(
            "ETCD_ENDPOINTS names no endpoint; expected http://HOST:2379, with commas between several"
        )
    if len({urlsplit(each).scheme for each in found}) > 1:
        raise InvalidArgument("ETCD_ENDPOINTS mixes http:// and https://; use one of them")
    if has_tls and found[0].startswith("http:"):
        raise InvalidArgument(
            "ETCD_ENDPOINTS says http://, but ETCD_AUTH_CA or ETCD_AUTH_CLIENT_* is set; say https://"
        )
    return tuple(dict.fromkeys(found))


def tls_context(settings: EtcdSettings) -> ssl.SSLContext:
    """Raises InvalidArgument naming the variable whose certificate or key cannot be used."""
    if (settings.client_cert is None) != (settings.client_key is None):
        missing = "ETCD_AUTH_CLIENT_CERT" if settings.client_cert is None else "ETCD_AUTH_CLIENT_KEY"
        raise InvalidArgument(f"{missing} is not set; a client certificate and its key belong together")
    try:
        context = ssl.create_default_context(
            cadata=settings.ca if settings.ca and _is_pem(settings.ca) else None,
            cafile=settings.ca if settings.ca and not _is_pem(settings.ca) else None,
        )
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"ETCD_AUTH_CA is neither certificates nor a file with them: {error}") from error
    if settings.client_cert is not None and settings.client_key is not None:
        try:
            with _as_file(settings.client_cert) as cert, _as_file(settings.client_key) as key:
                context.load_cert_chain(cert, key)
        except (OSError, ValueError) as error:
            raise InvalidArgument(
                f"ETCD_AUTH_CLIENT_CERT and ETCD_AUTH_CLIENT_KEY are no certificate with its key: {error}"
            ) from error
    return context


def _is_pem(value: str) -> bool:
    return "-----BEGIN" in value


@contextmanager
def _as_file(value: str) -> Iterator[str]:
    """Provide a PEM text as a file for the one call that needs a file; a path stays as it is."""
    if not _is_pem(value):
        yield value
        return
    handle, path = tempfile.mkstemp(suffix=".pem")  # readable by this user only
    try:
        with os.fdopen(handle, "w") as file:
            file.write(value)
        yield path
    finally:
        os.unlink(path)


# -- the wire -------------------------------------------------------------------------------------------------------------


def span(prefix: str) -> tuple[bytes, bytes]:
    """Return the keys [start, end) that start with `prefix`, as an etcd range."""
    start = prefix.encode()
    # No byte of UTF-8 is 0xff, so the last one can be raised by one.
    return start, start[:-1] + bytes([start[-1] + 1])


def _event(found: _Event) -> WatchEvent | None:
    try:
        key = found.kv.key.decode()
    except UnicodeDecodeError:
        return None  # no key of ours
    return WatchEvent(key, None if found.type == "DELETE" else found.kv.value, found.kv.mod_revision)


def _is_stale(error: EtcdError) -> bool:
    """Return whether a new token may help."""
    return error.code == UNAUTHENTICATED or "auth token" in str(error) or "auth store is old" in str(error)


def _reason(error: BaseException) -> str:
    """Return why a connection failed, from its innermost cause: the HTTP client wraps that cause in several errors."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    cause = getattr(error, "certificate_error", None) or getattr(error, "os_error", None) or error
    if isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError) and (cause.errno or 0) > 0:
        return os.strerror(cause.errno or 0)
    return str(cause) or type(cause).__name__


# Fields are the gateway's; its integers come as strings (`strict=False`), its bytes as base64.


class _Header(msgspec.Struct):
    revision: int = 0


class _KeyValue(msgspec.Struct):
    key: bytes = b""
    value: bytes = b""
    mod_revision: int = 0
    lease: int = 0


class _Answer(msgspec.Struct):
    header: _Header = msgspec.field(default_factory=_Header)


class _Granted(msgspec.Struct):
    TTL: int


class _Kept(msgspec.Struct):
    header: _Header = msgspec.field(default_factory=_Header)
    TTL: int = 0


class _KeptAlive(msgspec.Struct):
    result: _Kept


class _TimeToLive(msgspec.Struct):
    keys: list[bytes] = []


class _Range(msgspec.Struct):
    header: _Header = msgspec.field(default_factory=_Header)
    kvs: list[_KeyValue] = []


class _Response(msgspec.Struct):
    response_range: _Range | None = None


class _Transaction(msgspec.Struct):
    succeeded: bool = False
    responses: list[_Response] = []


class _Status(msgspec.Struct):
    errors: list[str] = []


class _Authenticated(msgspec.Struct):
    token: str


class _Declined(msgspec.Struct):
    code: int
    message: str = ""
    error: str = ""


class _Event(msgspec.Struct):
    kv: _KeyValue
    type: str = "PUT"


class _Watched(msgspec.Struct):
    canceled: bool = False
    cancel_reason: str = ""
    compact_revision: int = 0
    events: list[_Event] = []


class _StreamError(msgspec.Struct):
    grpc_code: int = 2
    message: str = ""


class _WatchMessage(msgspec.Struct):
    result: _Watched = msgspec.field(default_factory=_Watched)
    error: _StreamError | None = None


_watched = msgspec.json.Decoder(_WatchMessage, strict=False)
