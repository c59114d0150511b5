"""The API of the inspector as a terminal uses it: one picture, a watch that survives its server, and actions."""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Final, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from dynamo.cli.api_client import MAX_LINE_BYTES, ApiClient, ServerError
from dynamo.cli.inspect.store import PatchMismatch, patched
from dynamo.protocol.inspector.views import Patch, Picture, RequestDetail, RoutingView

# Server-sent events from bytes. Pure.

MAX_EVENT_BYTES: Final = 64 * 1024 * 1024  # a picture of 10,000 streams has some 5 MB


class StreamTooLong(ValueError):
    """An event that is larger than any picture: the server is not an inspector."""


@dataclass(frozen=True, slots=True)
class SentEvent:
    """One event."""

    kind: str
    data: bytes
    id: str | None = None


class EventStreamDecoder:
    """Takes lines, each as it was read with its end, and returns an event with the line that ends it.

    Of the standard: a comment is skipped, lines of data are joined with a line feed, an event without data is none, and
    what the stream ends in is dropped. Lines end in LF or CRLF; a lone CR, which no server writes, does not end one.
    """

    def __init__(self) -> None:
        self._kind = ""
        self._data: list[bytes] = []
        self._size = 0
        self.last_id: str | None = None

    def feed(self, line: bytes) -> SentEvent | None:
        """Take one line. Raises StreamTooLong."""
        line = line.rstrip(b"\r\n")
        if not line:
            return self._ended()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._size += len(value)
            if self._size > MAX_EVENT_BYTES:
                raise StreamTooLong(f"an event of more than {MAX_EVENT_BYTES >> 20} MiB")
            self._data.append(value)
        elif name == b"event":
            self._kind = value.decode("utf-8", "replace")
        elif name == b"id" and b"\0" not in value:
            self.last_id = value.decode("utf-8", "replace")
        return None

    def _ended(self) -> SentEvent | None:
        kind, data = self._kind, self._data
        self._kind, self._data, self._size = "", [], 0
        return SentEvent(kind or "message", b"\n".join(data), self.last_id) if data else None


MAX_PICTURE_BYTES: Final = 64 * 1024 * 1024
ANSWER_SECONDS: Final = 10.0  # a picture needs the members of a group; each has less than that
SILENCE_SECONDS: Final = 30.0  # a watch brings a patch or a comment far more often
FIRST_DELAY_SECONDS: Final = 0.5
LONGEST_DELAY_SECONDS: Final = 8.0  # a person is watching: a server that is back should show soon
REFUSED_DELAY_SECONDS: Final = 15.0  # another key or another server is needed, and both need a person
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ViewQuery:
    """What to request."""

    views: tuple[str, ...]
    limit: int | None = None
    filter: str = ""

    def __str__(self) -> str:
        """Return it as the query of a URL."""
        given = {"views": ",".join(self.views), "limit": self.limit, "filter": self.filter}
        return urlencode({name: value for name, value in given.items() if value not in (None, "")}, safe=",")


class _Explained(msgspec.Struct):
    """The answer about a prompt that was only placed: a decision for each stage."""

    routing: list[RoutingView]


class InspectorClient(ApiClient):
    """Calls the inspector of one frontend."""

    @contextlib.contextmanager
    def answered(self, path: str) -> Iterator[http.client.HTTPResponse]:
        """Request a path, and give its answer. Raises ServerError."""
        with closing(self.connect()) as connection:
            yield self.ask(connection, "GET", path, timeout_seconds=ANSWER_SECONDS)

    def picture_bytes(self, query: ViewQuery) -> bytes:
        """Return one picture as JSON, as the server gave it. Raises ServerError."""
        return self._read("GET", f"/admin/v1/snapshot?{query}")

    def picture(self, query: ViewQuery) -> Picture:
        """Return one picture. Raises ServerError."""
        return _decoded(self.picture_bytes(query), Picture)

    def detail(self, request_id: str) -> RequestDetail:
        """Return what is known of one request. Raises ServerError."""
        return _decoded(self._read("GET", f"/admin/v1/requests/{quote(request_id, safe='')}"), RequestDetail)

    def abort(self, request_id: str, reason: str) -> object:
        """End one request in flight. Raises ServerError."""
        return self._act(f"/admin/v1/requests/{quote(request_id, safe='')}/abort", {"reason": reason})

    def change_worker(self, worker_id: str, action: str, reason: str) -> object:
        """Send `drain`, `undrain` or `quarantine` for a worker. Raises ServerError."""
        return self._act(f"/admin/v1/workers/{quote(worker_id, safe='')}/{action}", {"reason": reason})

    def explain(self, model: str, prompt: str) -> list[RoutingView]:
        """Return where a prompt would go, stage by stage, without running it. Raises ServerError."""
        body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
        return _decoded(self._read("POST", "/admin/v1/routing/explain", body), _Explained).routing

    def _act(self, path: str, body: Mapping[str, object]) -> object:
        answer = self._read("POST", path, body)
        return _decoded(answer, object) if answer else None

    def _read(self, method: str, path: str, body: Mapping[str, object] | None = None) -> bytes:
        with closing(self.connect()) as connection:
            answer = self.ask(connection, method, path, body, ANSWER_SECONDS)
            try:
                data: bytes = answer.read(MAX_PICTURE_BYTES + 1)
            except (OSError, http.client.HTTPException) as error:
                raise ServerError(
                    f"the answer to {method} {path} broke off: {error or type(error).__name__}"
                ) from error
            if len(data) > MAX_PICTURE_BYTES:
                raise ServerError(f"the answer to {method} {path} has more than {MAX_PICTURE_BYTES >> 20} MiB")
            return data

    def ask(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        timeout_seconds: float = SILENCE_SECONDS,
        headers: dict[str, str] | None = None,
    ) -> http.client.HTTPResponse:
        """Send one request whose answer may pause for `timeout_seconds`. Raises ServerError, with what to do about it."""
        try:
            return self.request(connection, method, path, body, headers=headers, timeout_seconds=timeout_seconds)
        except ServerError as error:
            if hint := _HINTS.get(error.status or 0):
                raise ServerError(f"{error}; {hint}", error.status) from error
            raise


_HINTS: Final = {
    401: "give an admin key with --key or DYN_API_KEY",
    403: "this key may not do that: give another one with --key or DYN_API_KEY",
}


def _decoded(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ServerError(f"the server's answer is not one of an inspector that this version knows: {error}") from error


# -- the watch ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WatchState:
    """How current the newest picture is."""

    picture: Picture | None = None
    received_at: float = 0.0  # by the monotonic clock of this process
    problem: str | None = None  # why the connection is lost; None: it is there
    retry_at: float = 0.0  # by the same clock

    def now_ms(self, monotonic: float) -> int:
        """Return the server's time, as far as it is known: that of the picture, and what has gone by since it came."""
        if self.picture is None:
            return int(time.time() * 1000)
        return self.picture.taken_ms + int(1000 * (monotonic - self.received_at))


class PictureWatch:
    """Keeps a picture current until it is stopped. Runs in a thread of its own; a lost server is tried again and again."""

    def __init__(
        self,
        client: InspectorClient,
        query: ViewQuery,
        on_change: Callable[[WatchState], None],
        *,
        first: WatchState | None = None,
    ) -> None:
        """`on_change` is called in the thread of the watch, with every change. `first`: what is shown until the first."""
        self._client = client
        self._query = query
        self._on_change = on_change
        self._state = first or WatchState()
        self._is_stopped = threading.Event()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._last_id: str | None = None

    def stop(self) -> None:
        """End the watch: at once, also while it waits. May be called from any thread."""
        self._is_stopped.set()
        with self._lock:
            if self._socket is not None:
                with contextlib.suppress(OSError):  # the server was faster
                    self._socket.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        """Watch until `stop`."""
        failures = 0
        while not self._is_stopped.is_set():
            before = self._state.received_at
            try:
                self._watch_once()
                problem, status = "the server ended the watch", None
            except ServerError as error:
                problem, status = str(error), error.status
            except (OSError, http.client.HTTPException) as error:
                problem, status = f"the connection is lost: {error or type(error).__name__}", None
            except (PatchMismatch, StreamTooLong, msgspec.DecodeError) as error:
                problem, status = f"the server sent what this version cannot read: {error}", None
                self._last_id = None
            if self._is_stopped.is_set():
                return
            failures = 1 if self._state.received_at != before else failures + 1
            delay = retry_delay(failures, status, random.random())
            self._report(problem=problem, retry_at=time.monotonic() + delay)
            self._is_stopped.wait(delay)

    def _watch_once(self) -> None:
        headers = {} if self._last_id is None else {"Last-Event-ID": self._last_id}
        with closing(self._client.connect()) as connection:
            self._client.open(connection)
            with self._held(connection.sock):
                answer = self._client.ask(connection, "GET", f"/admin/v1/watch?{self._query}", headers=headers)
                for event in _events(answer):
                    self._take(event)

    @contextlib.contextmanager
    def _held(self, connected: socket.socket | None) -> Iterator[None]:
        """Let `stop` reach the socket, for as long as it is open."""
        with self._lock:
            self._socket = connected
            if self._is_stopped.is_set():
                raise OSError("the watch was stopped while it connected")
        try:
            yield
        finally:
            with self._lock:
                self._socket = None

    def _take(self, event: SentEvent) -> None:
        if event.kind == "snapshot":
            picture = msgspec.json.decode(event.data, type=Picture)
        elif event.kind == "patch":
            patch = msgspec.json.decode(event.data, type=Patch)
            if self._state.picture is None:
                raise PatchMismatch("a patch before any picture")
            picture = patched(self._state.picture, patch)
        else:
            return
        self._last_id = event.id
        self._report(picture=picture, received_at=time.monotonic())

    def _report(
        self,
        picture: Picture | None = None,
        received_at: float | None = None,
        problem: str | None = None,
        retry_at: float = 0.0,
    ) -> None:
        before = self._state
        self._state = WatchState(
            picture or before.picture, before.received_at if received_at is None else received_at, problem, retry_at
        )
        if not self._is_stopped.is_set():
            self._on_change(self._state)


def _events(answer: http.client.HTTPResponse) -> Iterator[SentEvent]:
    decoder = EventStreamDecoder()
    parts: list[bytes] = []
    while line := answer.readline(MAX_LINE_BYTES):
        parts.append(line)
        if not line.endswith(b"\n"):
            if sum(map(len, parts)) > MAX_PICTURE_BYTES:
                raise StreamTooLong(f"a line of more than {MAX_PICTURE_BYTES >> 20} MiB")
            continue  # a picture of thousands of streams is one long line
        whole = b"".join(parts)
        parts.clear()
        if (event := decoder.feed(whole)) is not None:
            yield event


def retry_delay(failures: int, status: int | None, chance: float) -> float:
    """Return the seconds until the next try, after so many failures in a row. `chance`, 0 to 1, spreads the viewers."""
    if status in (400, 401, 403, 404, 422):
        return REFUSED_DELAY_SECONDS
    longest = min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** min(failures - 1, 16))
    return longest * (0.5 + chance / 2)
