"""The door of a listener whose routes need keys: nothing passes it without one, whatever is behind it.

What a client sent as its key goes no further than this module.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from starlette.types import ASGIApp

from dynamo.frontend.base.access import CLOSED, IDENTITY, key_rejection
from dynamo.frontend.base.asgi import Receive, Scope, Send
from dynamo.frontend.base.request_id import reject_route
from dynamo.frontend.parts.keys.identity import Identity
from dynamo.frontend.parts.keys.key_store import KeyStore
from dynamo.frontend.parts.keys.rules.records import Network
from dynamo.protocol.dialect import OPENAI, Dialect
from dynamo.protocol.openai.errors import RequestRejected

MAX_KEY_BYTES: Final = 1024
_BEARER: Final = b"bearer "
_AUTHORIZATION: Final = b"authorization"
_KEY_HEADERS: Final = frozenset({_AUTHORIZATION, b"x-api-key"})


def client_address(scope: Scope, trusted: Sequence[Network]) -> str | None:
    """Return the address of the client: the peer's, or what trusted proxies report of the client before them.

    The last address of `X-Forwarded-For` that is not of a trusted proxy counts: what stands before it any client may write.
    """
    client = scope.get("client")
    if client is None:
        return None
    address: str = client[0]
    if not trusted or not _is_in(address, trusted):
        return address
    named = b",".join([value for name, value in scope["headers"] if name == b"x-forwarded-for"])
    for one in reversed(named.decode("latin-1").split(",")):
        written = one.strip()
        if not written:
            continue
        address = written
        if not _is_in(written, trusted):
            break
    return address


def _is_in(address: str, networks: Iterable[Network]) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return any(found in network for network in networks)


class KeyDoor:
    """An application behind a door: every request needs a key, but for those to the open paths."""

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyStore,
        *,
        is_open: Callable[[str], bool],
        dialect_of: Callable[[str], Dialect] = lambda _: OPENAI,
        trusted: Sequence[Network] = (),
        refused: Callable[[Identity | None, RequestRejected], None] = lambda *_: None,
    ) -> None:
        """`is_open`: whether a path needs no key. `dialect_of` gives the shape of errors below a path; `refused` counts a
        refusal, None: of an unknown key.
        """
        self._app, self._keys, self._is_open = app, keys, is_open
        self._dialect_of, self._trusted, self._refused = dialect_of, trusted, refused
        self._protects_clients = keys.sources.protect_clients

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)  # which serves nothing else, and closes it
            return
        if self._protects_clients:
            scope[CLOSED] = True
        identity: Identity | None = None
        try:
            presented = _presented(scope)
            identity = self._known(presented)
            if not identity.is_always_valid:
                identity.check_valid(self._keys.now())
            if identity.record.cidrs is not None:
                identity.check_address(client_address(scope, self._trusted))
        except RequestRejected as refusal:
            if not self._is_open(scope["path"]):
                answer = refusal
                if identity is None and _is_preflight(scope):  # a browser sends it without the key: a 401 helps none
                    answer = RequestRejected(
                        403, "Pages of other origins are not served here (DYN_CORS_ORIGINS, --cors-origin)"
                    )
                else:
                    self._refused(identity, refusal)
                await reject_route(scope, send, answer, self._dialect_of(scope["path"]))
                return
        else:
            scope[IDENTITY] = identity
        await self._app(scope, receive, send)

    def _known(self, presented: bytes | None) -> Identity:
        if presented is None:
            raise key_rejection(
                "missing_api_key",
                "No API key was given. Send it in the header `Authorization: Bearer KEY` or `x-api-key`",
            )
        found = self._keys.authenticate(presented) if 0 < len(presented) <= MAX_KEY_BYTES else None
        if found is None:
            raise key_rejection("invalid_api_key", "Incorrect API key provided")
        return found


def _is_preflight(scope: Scope) -> bool:
    names = {name for name, _ in scope["headers"]} if scope["method"] == "OPTIONS" else ()
    return b"origin" in names and b"access-control-request-method" in names


def _presented(scope: Scope) -> bytes | None:
    """Return what the client sent as its key, and take it out of the headers; None where it sent nothing.

    Raises the 401 of a request with two different keys, or with an authorization that is not a key.
    """
    found: bytes | None = None
    kept: list[tuple[bytes, bytes]] = []
    is_wrong = is_double = False
    for pair in scope["headers"]:
        if pair[0] not in _KEY_HEADERS:
            kept.append(pair)
            continue
        name, value = pair
        if name == _AUTHORIZATION:
            is_wrong = is_wrong or value[:7].lower() != _BEARER
            value = value[7:].strip()
        is_double = is_double or (found is not None and found != value)
        found = value
    scope["headers"] = kept
    if is_wrong:
        raise key_rejection("invalid_api_key", "Incorrect API key provided: the authorization must be `Bearer KEY`")
    if is_double:
        raise key_rejection("invalid_api_key", "Incorrect API key provided: the request has two different ones")
    return found
