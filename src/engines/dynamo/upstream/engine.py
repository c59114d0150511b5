"""Any OpenAI-compatible server as an engine of text: requests go to it as they are, and its chunks come back as they are.

Nothing here imports aiohttp before an engine starts: it comes with the extra `upstream`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import urllib.request
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self
from urllib.parse import urlsplit

import msgspec

from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import EngineConfig, RawEngine, RawRequest, RawResponseChunk
from dynamo.errors import (
    CannotConnect,
    Disconnected,
    DynamoException,
    EngineShutdown,
    HttpError,
    InvalidArgument,
    Overloaded,
    ResponseTimeout,
    Unknown,
    WorkerUnavailable,
)
from dynamo.protocol.model_types import ModelInput, parse_endpoint_types
from dynamo.protocol.records import slugify
from dynamo.runtime.calls.context import Context, on_loop
from dynamo.runtime.endpoint import Endpoint
from dynamo.upstream.arguments import UpstreamArguments, read_arguments
from dynamo.worker.registration import build_card

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

CHAT: Final = "/chat/completions"
COMPLETIONS: Final = "/completions"
COMPLETION_TOKENS: Final = 16  # OpenAI's default of a completion, where ours is the frontend's setting
OWN: Final = frozenset({"model", "stream", "nvext", "cache_salt"})  # members that are not the server's
DONE: Final = b"[DONE]"
MAX_BODY_BYTES: Final = 64 * 1024  # of an error, as far as it is read
CHECK_SECONDS: Final = 10.0  # for the answer to a check

_decode: Final = msgspec.json.Decoder().decode


MAX_EVENT_BYTES: Final = 8 * 1024 * 1024  # an event with many log probabilities has some hundred kilobytes


class EventTooLong(Exception):
    """An event without an end."""


class EventReader:
    """Bytes in, the data of whole server-sent events out. Comments, names and ids are left out; an event is bounded."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that are complete now. Raises EventTooLong."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
                self._size += len(line)
            elif not line and self._data:
                found.append(b"\n".join(self._data))
                self._data, self._size = [], 0
        if self._size + len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLong(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return found


MAX_MESSAGE_CHARS: Final = 2000
FIRST_WAIT_SECONDS: Final = 0.1  # doubled with each attempt
TRIED_AGAIN: Final = frozenset({429, 502, 503, 504})


def message_of(body: bytes, key: str) -> str:
    """Return the text of an error body of any shape, without the key that a server may repeat."""
    text = body.decode("utf-8", "replace")
    try:
        found = json.loads(text)
        error = found.get("error", found)
        text = str(error.get("message") or error) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        pass  # it is no JSON object: the text itself is all there is
    text = text.replace(key, "***") if key else text
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 3] + "..."


def refusal(status: int, message: str) -> Exception:
    """Return the error that a status of the upstream stands for."""
    match status:
        case 400:
            return InvalidArgument(message)
        case 401 | 403 | 407:  # of our key, which is no matter of the client
            return WorkerUnavailable(f"the upstream refuses this server ({status}): {message}")
        case 408 | 504:
            return ResponseTimeout(f"the upstream answered {status}: {message}")
        case 429:
            return Overloaded(f"the upstream is full: {message}")
        case 502 | 503:
            return WorkerUnavailable(f"the upstream answered {status}: {message}")
        case _ if 400 < status < 500:
            return HttpError(status, message)
    return Unknown(f"the upstream answered {status}: {message}")


def wait_before(
    error: Exception, status: int | None, retry_after: str | None, attempt: int, most: float
) -> float | None:
    """Return how many seconds to wait before the next attempt; None: there is none.

    `status`: None where there was no answer. `attempt`: 0 for the first. `most`: the longest `Retry-After` that is obeyed.
    """
    if not (isinstance(error, CannotConnect) if status is None else status in TRIED_AGAIN):
        return None
    wait = FIRST_WAIT_SECONDS * 2**attempt
    if retry_after is None:
        return None if status == 429 else wait
    try:
        given = float(retry_after)
    except ValueError:  # a date
        return None
    return max(wait, given) if 0 <= given <= most else None


class UpstreamClient:
    """One server. Open it on the loop that uses it."""

    def __init__(self, arguments: UpstreamArguments) -> None:
        import aiohttp

        self._arguments = arguments
        self._key = arguments.key()
        self._proxy = proxy_for(arguments.url)
        tls: Any = True if arguments.tls is None else arguments.tls
        limits = aiohttp.ClientTimeout(
            total=None, sock_connect=arguments.connect_seconds, sock_read=arguments.silence_seconds
        )
        # The worker admits the requests, so the pool needs no limit of its own; cookies of a server are not kept.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls), timeout=limits, cookie_jar=aiohttp.DummyCookieJar()
        )

    async def close(self) -> None:
        """End every connection. Safe twice."""
        await self._session.close()

    async def check(self) -> str:
        """Return why the server cannot serve; "": it can. Reads the key again, as keys are replaced while we run."""
        import aiohttp

        try:
            self._key = self._arguments.key()
            limit = aiohttp.ClientTimeout(total=min(CHECK_SECONDS, self._arguments.silence_seconds))
            async with self._session.get(f"{self._arguments.url}/models", **self._options(timeout=limit)) as response:
                if response.status < 500 and response.status not in (401, 403, 407):
                    return ""  # a server without a list of its models may still serve them
                return str(refusal(response.status, message_of(await _head_of(response), self._key)))
        except DynamoException as error:
            return str(error)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return f"{type(error).__name__}: {error}"

    async def chunks(self, path: str, body: dict[str, Any], context: Context) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the objects of a streamed answer as they come; ends at once where `context` is stopped.

        Raises DynamoException or HttpError; CannotConnect and WorkerUnavailable only before the first object.
        """
        import aiohttp

        response = await self._open(path, body, context)
        if response is None:
            return
        forget = context.on_cancel(on_loop(asyncio.get_running_loop(), lambda _killed: response.close()))
        try:
            reader, is_finished = EventReader(), False
            async for data in response.content.iter_any():
                for event in reader.feed(data):
                    if event == DONE:
                        return
                    chunk = _decode(event)
                    if not isinstance(chunk, dict):
                        raise Unknown("the upstream sent an event that is no object")
                    if chunk.get("error") is not None:
                        self._raise_of(event, chunk["error"])
                    is_finished = is_finished or any(one.get("finish_reason") for one in chunk.get("choices") or ())
                    yield chunk
            if not is_finished and not context.is_stopped():
                raise Disconnected("the upstream ended its answer without an end")
        except TimeoutError as error:  # aiohttp's are of this kind, too
            if not context.is_stopped():
                raise ResponseTimeout("the upstream was silent for too long") from error
        except (aiohttp.ClientError, OSError) as error:
            if not context.is_stopped():
                raise Disconnected(f"the upstream was lost in mid-stream: {type(error).__name__}") from error
        except (msgspec.DecodeError, EventTooLong, AttributeError) as error:
            raise Unknown(f"the upstream's answer cannot be read: {error}") from error
        finally:
            forget()
            response.close()  # of a whole answer the connection is back in the pool already

    def _raise_of(self, event: bytes, error: Any) -> NoReturn:
        """Raise what an error in mid-stream stands for; one without a status is the server's."""
        code = error.get("code") if isinstance(error, dict) else None
        raise refusal(code if type(code) is int and 400 <= code < 600 else 500, message_of(event, self._key))

    async def _open(self, path: str, body: dict[str, Any], context: Context) -> aiohttp.ClientResponse | None:
        """Return an answer that has begun, at the first attempt that gets one; None: `context` was stopped.

        Raises DynamoException or HttpError.
        """
        import aiohttp

        content = msgspec.json.encode(body)
        lost = 0  # requests that were not written, as the kept connection had just been closed: one is no attempt
        for attempt in itertools.count():
            status: int | None = None
            again: str | None = None
            try:
                response = await self._sent(path, content, context)
                if response is None:
                    return None
                status, again = response.status, response.headers.get("Retry-After")
                if status == 200 and response.content_type == "text/event-stream":
                    return response
                error = await self._refused(response)
            except TimeoutError as found:
                is_late = isinstance(found, aiohttp.SocketTimeoutError) and not isinstance(
                    found, aiohttp.ConnectionTimeoutError
                )
                error = (ResponseTimeout if is_late else CannotConnect)("the upstream did not answer in time")
                error.__cause__ = found
            except (aiohttp.ClientError, OSError) as found:
                error = CannotConnect(f"the upstream cannot be reached: {type(found).__name__}")
                error.__cause__ = found
                # With a number it is an error of the socket, and the server may have all of the request.
                is_unwritten = isinstance(found.__cause__, ConnectionResetError) and getattr(found, "errno", 0) is None
                if is_unwritten and not lost:
                    lost = 1
                    continue
            wait = wait_before(error, status, again, attempt - lost, self._arguments.retry_seconds)
            if wait is None or attempt - lost >= self._arguments.retries or context.is_stopped():
                raise error
            await asyncio.sleep(wait)
            if context.is_stopped():  # meanwhile: the answer would not be read
                raise error
        raise AssertionError("the attempts have no end of their own")

    async def _sent(self, path: str, content: bytes, context: Context) -> aiohttp.ClientResponse | None:
        """Send a request and return the head of its answer; None, and nothing stays open: `context` was stopped.

        A server computes a long prompt before its first byte, which is paid for: it must not do so for a client that left.
        """
        loop, url, options = asyncio.get_running_loop(), f"{self._arguments.url}{path}", self._options(context.id())
        scope = asyncio.timeout(None)

        def give_up(_killed: bool) -> None:
            with suppress(RuntimeError):  # the answer has begun meanwhile
                scope.reschedule(loop.time())

        try:
            async with scope:
                forget = context.on_cancel(on_loop(loop, give_up))
                try:
                    return await self._session.post(url, data=content, **options)
                finally:
                    forget()
        except TimeoutError:
            if not context.is_stopped():
                raise
            return None

    async def _refused(self, response: aiohttp.ClientResponse) -> DynamoException | HttpError | Exception:
        try:
            if response.status == 200:
                return Unknown(f"the upstream answered {response.content_type} where a stream was requested")
            return refusal(response.status, message_of(await _head_of(response), self._key))
        finally:
            response.release()

    def _options(self, request_id: str = "", **more: Any) -> dict[str, Any]:
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if request_id:
            headers["X-Request-Id"] = request_id
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        return {"headers": headers, "proxy": self._proxy, "allow_redirects": False, **more}


def proxy_for(url: str) -> str | None:
    """Return the proxy that the environment names for an address; None: none. Its files of passwords are not read."""
    parts = urlsplit(url)
    proxies = urllib.request.getproxies_environment()
    if urllib.request.proxy_bypass_environment(parts.netloc, proxies):  # type: ignore[attr-defined]
        return None
    return proxies.get(parts.scheme) or proxies.get("all")


async def _head_of(response: aiohttp.ClientResponse) -> bytes:
    """Return the beginning of a body."""
    found = b""
    while len(found) < MAX_BODY_BYTES and (data := await response.content.read(MAX_BODY_BYTES - len(found))):
        found += data
    return found


class UpstreamEngine(RawEngine):
    """Serves models of another server."""

    def __init__(self, arguments: UpstreamArguments, surfaces: str = "chat,completions") -> None:
        self._arguments, self._surfaces = arguments, surfaces
        self._client: UpstreamClient | None = None
        self._endpoint: Endpoint | None = None
        self._suspected = asyncio.Event()  # a request could not be sent: the next check is due

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        arguments, worker = await asyncio.to_thread(read_arguments, argv)
        return cls(arguments, worker.endpoint_types), worker

    async def start(self, worker_id: int) -> EngineConfig:
        self._client = UpstreamClient(self._arguments)
        name = next(iter(self._arguments.models))
        return EngineConfig(model=name, served_model_name=name)

    async def on_endpoint_ready(self, endpoint: Endpoint) -> None:
        """Publish the further models, each with a card of its own beside that of the worker."""
        self._endpoint = endpoint
        for name in list(self._arguments.models)[1:]:
            card = build_card(name, model_input=ModelInput.Text, model_type=parse_endpoint_types(self._surfaces))
            await endpoint.publish_model(card.to_json(), slugify(name))

    async def wait_dead(self) -> str:
        """Check the server for as long as this worker serves: while it cannot be reached, the worker is out of discovery."""
        assert self._client is not None
        assert self._endpoint is not None
        is_up = True
        while True:
            self._suspected.clear()
            reason = await self._client.check()
            if reason:
                if is_up:
                    logger.warning("%s cannot serve, so its models are not ready: %s", self._arguments.url, reason)
                await self._endpoint.unregister_endpoint_instance()
            elif not is_up:
                logger.info("%s serves again", self._arguments.url)
                await self._endpoint.register_endpoint_instance()
            is_up = not reason
            try:
                async with asyncio.timeout(self._arguments.check_seconds):
                    await self._suspected.wait()
            except TimeoutError:
                continue  # no request failed meanwhile: it is time for the next check

    async def generate(self, request: RawRequest, context: Context) -> AsyncGenerator[RawResponseChunk, None]:
        if self._client is None:
            raise EngineShutdown("this engine is not running")
        name, path, body = self._call(request)
        head = {"id": context.id(), "model": name}
        try:
            async with aclosing(self._client.chunks(path, body, context)) as chunks:
                async for chunk in chunks:
                    yield {**chunk, **head}
        except CannotConnect:
            self._suspected.set()
            raise

    def _call(self, request: RawRequest) -> tuple[str, str, dict[str, Any]]:
        """Return the model's name here, where a request goes, and its body. Raises InvalidArgument for another kind."""
        models = self._arguments.models
        name = str(request.get("model") or next(iter(models)))
        if name not in models:
            raise InvalidArgument(f"this worker serves {', '.join(models)}, and no model {name}")
        body = {member: value for member, value in request.items() if member not in OWN and value is not None}
        body |= {"model": models[name], "stream": True, "stream_options": {"include_usage": True}}
        if isinstance(body.get("messages"), list):
            return name, CHAT, body
        if isinstance(body.get("prompt"), str | list):
            return name, COMPLETIONS, {"max_tokens": COMPLETION_TOKENS, **body}
        raise InvalidArgument("a request needs messages or a prompt: chat and completions are passed on")

    async def cleanup(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()
