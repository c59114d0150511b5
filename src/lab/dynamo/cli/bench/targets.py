"""Where requests go: a URL taken apart once, and the bytes of a request to it."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self
from urllib.parse import urlsplit

from dynamo.cli.usage import UsageError

ENDPOINT_PATHS: Final = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True, slots=True)
class Target:
    """One server."""

    host: str
    port: int
    prefix: str  # of every path: "" or "/something"
    tls: ssl.SSLContext | None
    headers: bytes  # those of every request: Host and what the user added, each line with its end

    @classmethod
    def of(cls, url: str, *, headers: Mapping[str, str] | None = None, verify: bool = True) -> Self:
        """Raises UsageError. A trailing /v1 is understood, because other tools require it."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query or parts.fragment:
            raise UsageError(f"{url!r} is not a server's URL; use one such as http://127.0.0.1:8000")
        tls = None
        if parts.scheme == "https":
            tls = ssl.create_default_context()
            if not verify:
                tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        lines = {"Host": parts.netloc.rpartition("@")[2], **(headers or {})}
        return cls(
            host=parts.hostname,
            port=port or (443 if tls else 80),
            prefix=parts.path.rstrip("/").removesuffix("/v1"),
            tls=tls,
            headers="".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode("latin-1", "replace"),
        )

    @property
    def url(self) -> str:
        """Without what the user added."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"

    def get(self, path: str) -> bytes:
        """Build a GET request, ready to send."""
        return f"GET {self.prefix}{path} HTTP/1.1\r\n".encode() + self.headers + b"\r\n"

    def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Build a POST request with a JSON body, ready to send."""
        data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        return b"POST %b HTTP/1.1\r\n%bContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
            f"{self.prefix}{path}".encode(),
            self.headers,
            len(data),
            data,
        )


def header_from(line: str) -> tuple[str, str]:
    """Parse one `Name: value`. Raises ValueError."""
    name, colon, value = line.partition(":")
    if not colon or not name.strip() or any(ord(c) < 32 for c in line):
        raise ValueError(f"{line!r} is not a header; use 'Name: value'")
    return name.strip(), value.strip()
