"""Which URLs media may be fetched from: rules on the text of a URL and on the addresses of its host, without I/O.

Everything here fails closed: what cannot be read is refused. The same rules hold for every kind of media and every hop.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final, NamedTuple
from urllib.parse import quote, urlsplit

from dynamo.frontend.base.settings.media import FetchRules

MAX_URL_CHARACTERS: Final = 8192
MAX_HOST_CHARACTERS: Final = 253
_SHOWN: Final = 200
_PORTS: Final = {"http": 80, "https": 443}
_BLOCKED_NETWORKS: Final = tuple(
    ipaddress.ip_network(network)
    for network in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4",
        "240.0.0.0/4", "168.63.129.16/32",  # Azure's own services for each machine, at an address that is public elsewhere
        "192.88.99.0/24", "100::/64", "3fff::/20", "5f00::/16", "fec0::/10",  # relays, discarded, documented, segments, sites
        "::/128", "::1/128", "::ffff:0:0/96", "fc00::/7", "fe80::/10", "ff00::/8",
        "::/96", "64:ff9b::/96", "64:ff9b:1::/48", "2001::/32", "2002::/16",  # these carry an IPv4 address
    )
)  # fmt: skip
_BLOCKED_NAMES: Final = frozenset(
    {
        "localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback", "metadata", "metadata.google.internal",
        "metadata.goog", "kubernetes.default", "kubernetes.default.svc",
    }
)  # fmt: skip
_HOST_LABEL: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMERIC_LABEL: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_FORBIDDEN: Final = re.compile(r"[\x00-\x20\x7f\\]")
_SAFE_IN_TARGET: Final = "%/?:@!$&'()*+,;=-._~[]"


class MediaRefused(Exception):
    """Media that are not taken; the text is for the client, and holds nothing of the content."""


class FetchTarget(NamedTuple):
    """Where one request of a fetch goes."""

    scheme: str
    host: str  # ASCII, lower case; an IPv6 address without brackets
    port: int
    path: str  # with the query, as it stands in a request line
    address: str | None  # where the URL names an address instead of a host

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


def check_url(url: str, rules: FetchRules) -> FetchTarget:
    """Read an http or https URL. Raises MediaRefused for what may not be fetched, as far as the text shows it."""
    if len(url) > MAX_URL_CHARACTERS:
        raise MediaRefused(f"the URL has {len(url)} characters, at most {MAX_URL_CHARACTERS} are taken")
    if _FORBIDDEN.search(url):
        raise MediaRefused("the URL holds white space, a control character or a backslash")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise MediaRefused("this is not a valid URL") from None
    scheme = parts.scheme.lower()
    if scheme not in _PORTS:
        raise MediaRefused(
            f'URLs of scheme "{scheme[:32]}" are not fetched: use https, http or data'
            if scheme
            else "this is not a URL"
        )
    if "@" in parts.netloc:
        raise MediaRefused("the URL holds credentials")
    host, address = _host(parts.hostname or "", is_bracketed="[" in parts.netloc)
    if (host.rstrip(".") in _BLOCKED_NAMES or host.endswith(".localhost")) and not rules.allow_private_ips:
        raise MediaRefused("the host is not a public one")
    if port is not None and port != _PORTS[scheme] and not rules.allow_direct_port:
        raise MediaRefused("the URL names a port")
    if port == 0:
        raise MediaRefused("the URL names port 0")
    if address is not None:
        if not rules.allow_direct_ip:
            raise MediaRefused("the URL names an address instead of a host")
        check_address(address, rules)
    if rules.allowed_domains is not None and host not in rules.allowed_domains:
        raise MediaRefused("the host is not among those that this model's media may come from")
    path = quote(parts.path or "/", safe=_SAFE_IN_TARGET)
    if not path.startswith("/"):
        raise MediaRefused("this is not a valid URL")
    if parts.query:
        path += "?" + quote(parts.query, safe=_SAFE_IN_TARGET)
    return FetchTarget(scheme, host, _PORTS[scheme] if port is None else port, path, address)


def check_address(address: str, rules: FetchRules) -> None:
    """Raise MediaRefused unless media may be fetched from this address."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        raise MediaRefused("the host has no valid address") from None
    if found.is_multicast or found.is_unspecified:
        raise MediaRefused("the host is not a public one")
    if rules.allow_private_ips:
        return
    if not found.is_global or any(found in network for network in _BLOCKED_NETWORKS):
        raise MediaRefused("the host is not a public one")


def shown_url(url: str) -> str:
    """Return how a URL is named in errors and logs: without its query, which may be a key, and never a payload."""
    if url[:5].lower() == "data:":
        kind = url[5:80].partition(",")[0].partition(";")[0]
        return f"data:{kind if kind.isprintable() else ''} ({len(url)} chars)"
    plain = url.partition("?")[0].partition("#")[0]
    if "@" in plain:
        plain = plain.partition(":")[0] + ":..."
    shown = "".join(each if each.isprintable() else "?" for each in plain[:_SHOWN])
    return shown if len(plain) <= _SHOWN else shown + "..."


def _host(name: str, *, is_bracketed: bool) -> tuple[str, str | None]:
    """Return the host in its plain form, and the address where it is one."""
    if is_bracketed:
        try:
            return (address := str(ipaddress.IPv6Address(name))), address
        except ValueError:
            raise MediaRefused("this is not a valid URL") from None
    try:
        plain = name.encode("idna").decode("ascii").lower() if not name.isascii() else name.lower()
    except UnicodeError:
        raise MediaRefused("the host is not a valid name") from None
    plain = plain.removesuffix(".")
    if not plain or len(plain) > MAX_HOST_CHARACTERS:
        raise MediaRefused("the URL has no host")
    labels = plain.split(".")
    if _NUMERIC_LABEL.fullmatch(labels[-1]):
        # What a C library reads as an address; only the usual form is one here: 127.1, 0x7f.1 and 2130706433 are not.
        try:
            return (address := str(ipaddress.IPv4Address(plain))), address
        except ValueError:
            raise MediaRefused("the URL names an address in an unusual form") from None
    if any(_HOST_LABEL.fullmatch(label) is None for label in labels):
        raise MediaRefused("the host is not a valid name")
    return plain, None
