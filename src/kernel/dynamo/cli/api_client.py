"""A small client of a served API for the commands of a terminal: the standard library, and errors that are sentences."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Self
from urllib.parse import SplitResult, urlsplit

from dynamo.cli.usage import UsageError
from dynamo.settings.readers import placeholder, port, text
from dynamo.settings.table import setting

DEFAULT_PORT: Final = 8000
CONNECT_SECONDS: Final = 5.0
READ_SECONDS: Final = 600.0  # a long prompt on a slow machine
MAX_LINE_BYTES: Final = 1 << 20
EXIT_FAILED: Final = 1


class ServerError(Exception):
    """The server did not answer, or answered with an error; the message is for a person."""

    def __init__(self, message: str, status: int | None = None) -> None:
        """`status`: of the answer; None where there was none."""
        super().__init__(message)
        self.status = status


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CONNECT_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(CONNECT_SECONDS)
        self.sock.connect(self._path)


class ApiClient:
    """One server."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """`url`: `unix:PATH` for a Unix socket. Raises UsageError for a URL that is not HTTP."""
        self._uds = url.removeprefix("unix:") if url.startswith("unix:") else ""
        if self._uds:
            url = "http://localhost"
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise UsageError(f"{url!r} is not an HTTP address; write for example http://127.0.0.1:{DEFAULT_PORT}")
        self._parts: SplitResult = parts
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    @property
    def url(self) -> str:
        """Where it is."""
        return f"unix:{self._uds}" if self._uds else self._parts.geturl()

    def connect(self) -> http.client.HTTPConnection:
        """Return a connection that is made with its first request; the caller closes it."""
        if self._uds:
            return _UnixConnection(self._uds)
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(self._parts.hostname or "", self._parts.port, timeout=CONNECT_SECONDS)

    def request(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        raw: bytes | Iterable[bytes] | None = None,
        headers: dict[str, str] | None = None,
        timeout_seconds: float = READ_SECONDS,
    ) -> http.client.HTTPResponse:
        """Send one request and return its answer, once its headers are there. Raises ServerError unless it is a success.

        `raw`: a body that is sent as it is (bytes, or an iterable of them), with `headers` that describe it.
        `timeout_seconds`: how long the answer may pause.
        """
        content = raw if body is None else json.dumps(body).encode()
        try:
            if connection.sock is None:
                connection.connect()
            connection.sock.settimeout(timeout_seconds)
        except OSError as error:
            raise self._no_answer(error) from error
        try:
            answer = self._exchange(connection, method, path, content, headers or {})
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"no answer from {self.url}: {error or type(error).__name__}") from error
        if not 200 <= answer.status < 300:
            raise ServerError(f"{answer.status}: {error_text(_json(answer.read(MAX_LINE_BYTES)))}", answer.status)
        return answer

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        content: bytes | Iterable[bytes] | None,
        headers: Mapping[str, str],
    ) -> http.client.HTTPResponse:
        """Send a request and return its answer, also one that the server gave before it had read all of the request."""
        try:
            connection.request(method, self._base + path, content, self._headers | dict(headers))
        except (BrokenPipeError, ConnectionResetError) as error:
            # A server that refuses a body answers and closes: the answer may lie there already.
            with suppress(OSError, http.client.HTTPException):
                return _answer_at_once(connection, method)
            raise ServerError(
                f"{self._parts.geturl()} closed the connection while the request was being sent; it may be too large"
            ) from error
        return connection.getresponse()

    def open(self, connection: http.client.HTTPConnection) -> None:
        """Make a connection, for a caller that needs its socket before there is an answer. Raises ServerError."""
        try:
            connection.connect()
        except OSError as error:
            raise self._no_answer(error) from error

    def _no_answer(self, error: Exception) -> ServerError:
        return ServerError(
            f"no answer from {self.url}: {error or type(error).__name__}; is it running? `dynamo serve` starts one"
        )

    def call(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Any:
        """Send one request and return its answer, read as JSON. Raises ServerError."""
        with closing(self.connect()) as connection:
            answer = self.request(connection, method, path, body)
            try:
                return json.loads(answer.read())
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise ServerError(f"the answer to {method} {path} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class ServerFlags:
    """The server to call, and the key for it."""

    # fmt: off
    url: str = setting("", None, placeholder("URL", text), "The server; `unix:PATH`: at a Unix socket", flag="--url", shown="this machine, at `DYN_HTTP_PORT`")
    port: int = setting(DEFAULT_PORT, "DYN_HTTP_PORT", port, "Where the server listens, without `--url`")
    api_key: str | None = setting(None, "OPENAI_API_KEY", text, "Sent as `Authorization: Bearer`", flag="--api-key", secret=True)
    # fmt: on

    def settle(self, env: Mapping[str, str]) -> Self:
        """Find the server of this machine where no other is named."""
        return self if self.url else replace(self, url=f"http://127.0.0.1:{self.port}")


def _answer_at_once(connection: http.client.HTTPConnection, method: str) -> http.client.HTTPResponse:
    """Read the answer to a request that could not be sent as a whole."""
    answer = http.client.HTTPResponse(connection.sock, method=method)
    answer.begin()
    return answer


def error_text(body: object) -> str:
    """Return the message of an error body of any shape."""
    if isinstance(body, dict):
        error = body.get("error")
        return str((error.get("message") if isinstance(error, dict) else None) or body.get("message") or error or body)
    return str(body)


def _json(data: bytes) -> object:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode("utf-8", "replace")[:500]
