"""Recognises requests that a page of another site makes through a browser on this machine.

An address of loopback is no protection from them: a browser sends what any page requests, and a page whose name was made to
resolve to 127.0.0.1 may even read the answer.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from dynamo.runtime.base.addresses import is_loopback

FORM_TYPES: Final = (b"application/x-www-form-urlencoded", b"multipart/form-data", b"text/plain")
_NOT_OF_FORMS: Final = frozenset({b"authorization", b"x-api-key"})

_TYPES_OF_TOOLS: Final = frozenset({b"", b"application/x-www-form-urlencoded", b"text/plain"})
# Every browser sends Accept-Language, and no page can leave it out; all since 2020 send Origin with each POST that a page of
# another site makes (`null` at the least), and Sec-Fetch-Site to loopback and over TLS. One of them is enough.
_OF_BROWSERS: Final = frozenset(
    {
        b"accept-language",
        b"cookie",
        b"origin",
        b"referer",
        b"sec-fetch-dest",
        b"sec-fetch-mode",
        b"sec-fetch-site",
    }
)

MAX_PERMITTED: Final = 256

SEND_JSON: Final = "web pages of any site can send forms: send it with Content-Type application/json"


class SameSite:
    """The names by which one listener is reached, and the origins whose pages may call it."""

    def __init__(self, listens_at: str, hosts: Collection[str] = (), origins: Collection[str] = ()) -> None:
        """`listens_at`: the address that the listener is bound to. `hosts`: the only names, beside addresses and localhost; `*`: any.

        Without `hosts` a listener that is open to a network may have any name.
        """
        self._hosts = frozenset(hosts)
        self._has_any_name = "*" in self._hosts or not (self._hosts or is_loopback(listens_at))
        self._origins = frozenset(origins)
        self.permitted: set[tuple[bytes | None, bytes | None]] = set()
        """Some pairs of Host and Origin that were permitted: a hot path looks here first."""

    def reason(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """Return why a request may come from a page of another site; None: it does not. `headers`: names in lower case."""
        found = dict(headers)
        host, origin = found.get(b"host"), found.get(b"origin")
        reason = self._judge((host or b"").decode("latin-1").strip().lower(), origin)
        if reason is None and len(self.permitted) < MAX_PERMITTED:
            self.permitted.add((host, origin))
        return reason

    def _judge(self, reached: str, origin: bytes | None) -> str | None:
        if origin is not None and not self._permits(origin.decode("latin-1").strip().lower(), reached):
            return "its Origin is another site"
        if not (self._has_any_name or self._is_ours(reached)):
            return (
                "its Host is a name that is not known here. This port is reached by 127.0.0.1, [::1], localhost and the "
                "names given by --allowed-host (DYN_ALLOWED_HOSTS)"
            )
        return None

    def _permits(self, origin: str, reached: str) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        host = origin.partition("://")[2]
        return bool(host) and (host == reached or _name_in(host) in self._hosts)

    def _is_ours(self, reached: str) -> bool:
        name = _name_in(reached)
        # HTTP/1.0 has no Host, and browsers always send one; they resolve .localhost by themselves (RFC 6761).
        if not name or name == "localhost" or name.endswith(".localhost") or name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _name_in(host: str) -> str:
    """Return a Host or an authority without its port."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def is_of_tool(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a body came with the type that a tool writes by itself (`curl -d`), and no browser can have sent it.

    Such a body may be taken for what the route reads. That of a browser may be the form of any page.
    """
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    return kind in _TYPES_OF_TOOLS and _OF_BROWSERS.isdisjoint(headers)


def is_form(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether the form of any page could be this request: a body of a form, and no header that no form can have."""
    found = dict(headers)
    kind = found.get(b"content-type", b"").partition(b";")[0].strip().lower()
    return kind in FORM_TYPES and _NOT_OF_FORMS.isdisjoint(found)
