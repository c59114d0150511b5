"""The judge's end of the native wire: a request connection, and the listener to which a worker brings its answers.

It is written from docs/native-wire.md with `struct` alone: a mistake of this package's own codec must not hide itself.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import msgspec

from dynamo.cli.referee.checks import Broken, demand
from dynamo.cli.referee.exchange import Json
from dynamo.cli.referee.wire.mux_seen import error_type
from dynamo.cli.referee.wire.run import SHORT, WireProbe, as_json, connected, encoded, shown, stop_reading

MAX_ACK: Final = 64 << 10
MAX_PART: Final = 32 << 20
TURNS_OF_A_CLOSE: Final = 4  # of the loop, until a connection that was being accepted has come and gone
SENTINEL: Final = "sentinel"
PREFIX: Final = struct.Struct(">QQQ")


def two_part(header: bytes, data: bytes = b"") -> bytes:
    """Encode a two-part frame."""
    return PREFIX.pack(len(header), len(data), 0) + header + data


def request_frame(path: bytes, headers: bytes, payload: bytes) -> bytes:
    """Encode the frame of a request."""
    parts = (struct.pack(">H", len(path)), path, struct.pack(">H", len(headers)), headers)
    return b"".join([*parts, struct.pack(">I", len(payload)), payload])


class NativeAnswer:
    """The answer of one request, on a connection that the worker opened."""

    def __init__(self, probe: WireProbe, codec: str) -> None:
        self.probe, self.codec = probe, codec
        self.handshake: Json = None
        self._joined: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
        self._joined = asyncio.get_running_loop().create_future()

    def join(self, handshake: Json, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take the connection that names this answer."""
        if not self._joined.done():
            self.handshake = handshake
            self._joined.set_result((reader, writer))

    @property
    def has_come(self) -> bool:
        """Whether the worker has opened the connection."""
        return self._joined.done()

    async def streams(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the connection. Raises Broken where the worker opens none."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._joined), self.probe.timeout)
        except TimeoutError:
            raise Broken(f"the worker did not bring its answer within {self.probe.timeout:g} s") from None

    async def frame(self, what: str) -> tuple[bytes, bytes] | None:
        """Read one two-part frame; None at the end of the connection."""
        reader, _ = await self.streams()
        try:
            async with asyncio.timeout(self.probe.timeout):
                found = await read_two_part(reader)
        except TimeoutError:
            raise Broken(f"{what} did not come within {self.probe.timeout:g} s") from None
        if found is None:
            self.probe.note_seen("(the answer's connection is closed)")
        else:
            self.probe.note_seen(f"header {found[0][:120]!r} data {shown(found[1]) if found[1] else ''}")
        return found

    async def prologue(self) -> Json:
        """Read the frame after the handshake."""
        found = await self.frame("the prologue")
        demand(found is not None, "the answer's connection ended before its prologue")
        header, data = found or (b"", b"")
        demand(not data, "the first frame after the handshake is no prologue: it has data")
        return parsed(header, "the prologue")

    async def item(self) -> Json:
        """Read one item, decoded; "sentinel" as that word; None at the end of the connection."""
        found = await self.frame("the next item")
        if found is None:
            return None
        header, data = found
        demand(not (header and data), "a frame of an answer has a header and data")
        if header:
            return parsed(header, "a control frame")
        try:
            return msgspec.msgpack.decode(data) if self.codec == "msgpack" else json.loads(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise Broken(f"an item is not {self.codec}: {error}") from error

    async def everything(self) -> list[Json]:
        """Read the prologue and all items, the sentinel included, until the worker is done; then close."""
        prologue = await self.prologue()
        demand(prologue == {"error": None}, f"the prologue is {prologue!r:.200}")
        found: list[Json] = []
        while (item := await self.item()) is not None:
            found.append(item)
            if item == SENTINEL:
                break
        await self.leave()
        return found

    async def send(self, word: str) -> None:
        """Send "stop" or "kill"."""
        _, writer = await self.streams()
        self.probe.note_sent(f"control {word!r} on the answer's connection")
        with suppress(ConnectionError):
            writer.write(two_part(as_json(word)))
            await writer.drain()

    async def leave(self) -> None:
        """Lose the connection."""
        _, writer = await self.streams()
        writer.transport.abort()


class NativeLine:
    """A request connection, and the listener for the answers of its requests."""

    def __init__(self, probe: WireProbe, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.probe, self._reader, self._writer = probe, reader, writer
        self._answers: dict[str, NativeAnswer] = {}
        self._homes: list[asyncio.StreamWriter] = []
        self.strange: list[str] = []  # what came in place of a handshake
        self.port = 0
        self._is_over = False

    @property
    def home(self) -> str:
        """The address of this end: where the worker can reach the listener."""
        return str(self._writer.get_extra_info("sockname")[0])

    async def take_home(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take a connection that a worker opened."""
        if self._is_over:
            writer.transport.abort()
            return
        self._homes.append(writer)
        try:
            async with asyncio.timeout(self.probe.timeout):
                found = await read_two_part(reader)
            handshake = None if found is None or found[1] else parsed(found[0], "the handshake")
        except (Broken, TimeoutError) as error:
            handshake, found = None, (str(error).encode(), b"")
        answer = self._answers.get(handshake.get("subject", "")) if isinstance(handshake, dict) else None
        if answer is None:
            self.strange.append(repr(found)[:200])
            writer.close()
        else:
            self.probe.note_seen(f"handshake {handshake}")
            answer.join(handshake, reader, writer)

    def close(self) -> None:
        """Lose every connection, also those that the listener is still taking."""
        self._is_over = True
        for writer in [self._writer, *self._homes]:
            writer.transport.abort()

    def request(
        self,
        body: Json,
        *,
        codec: str | None = "msgpack",
        path: str | None = None,
        headers: Mapping[str, str] | None = None,
        raw: bytes | None = None,
        **control: Json,
    ) -> tuple[bytes, NativeAnswer]:
        """Make the frame of a request, and expect its answer. `raw` replaces the body's bytes, `control` its message's members."""
        request_id, subject = f"conformance-{secrets.token_hex(6)}", secrets.token_hex(16)
        answer = self._answers[subject] = NativeAnswer(self.probe, codec or "json")
        where = {"address": f"{self._bracketed}:{self.port}", "subject": subject}
        info = {**where, "context": request_id, "stream_type": "response"}
        message: dict[str, Json] = {"id": request_id, "request_type": "single_in", "response_type": "many_out"}
        message["connection_info"] = {"transport": "tcp_server", "info": as_json(info).decode()}
        if codec is not None:
            message["payload_codec"] = codec
        data = encoded(body) if codec == "msgpack" else as_json(body)
        payload = two_part(as_json({**message, **control}), data if raw is None else raw)
        full = self.probe.shared.path if path is None else path
        given = {"request-id": request_id, "x-endpoint-path": full} if headers is None else headers
        return request_frame(full.encode(), as_json(given) if given else b"", payload), answer

    @property
    def _bracketed(self) -> str:
        return f"[{self.home}]" if ":" in self.home else self.home

    async def send(self, data: bytes, note: str) -> None:
        """Write bytes."""
        self.probe.note_sent(note)
        with suppress(ConnectionError):
            self._writer.write(data)
            await self._writer.drain()

    def stop_reading(self) -> None:
        """Read no ACK any more, so that what the worker writes fills the sockets."""
        stop_reading(self._writer)

    def close_half(self) -> None:
        """Send nothing more."""
        with suppress(OSError):
            self._writer.write_eof()

    async def ack(self) -> str | None:
        """Read one ACK: its text, or None at the end of the connection."""
        try:
            async with asyncio.timeout(self.probe.timeout):
                (length,) = struct.unpack(">I", await self._reader.readexactly(4))
                demand(length <= MAX_ACK, f"an ACK of {length} bytes came")
                text = (await self._reader.readexactly(length)).decode(errors="replace")
        except TimeoutError:
            raise Broken(f"no ACK came within {self.probe.timeout:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            self.probe.note_seen("(the request connection is closed)")
            return None
        self.probe.note_seen(f"ACK {text!r}")
        return text

    async def accepted(self) -> None:
        """Demand an ACK that accepts."""
        found = await self.ack()
        demand(found == "", f"the ACK is {found!r:.300}, not the four zero bytes of an accepted request")

    async def call(self, tokens: int = SHORT, **options: Any) -> NativeAnswer:
        """Send a request that is accepted."""
        frame, answer = self.request(self.probe.shared.sized(tokens), **options)
        await self.send(frame, f"request for {tokens} tokens, {len(frame)} bytes")
        await self.accepted()
        return answer

    async def served(self) -> list[Json]:
        """Send a request, and return its whole answer, which has no error."""
        found = await (await self.call()).everything()
        demand_clean(found)
        return found

    async def closes(self, seconds: float = 0) -> None:
        """Wait until the worker closes the request connection; what it sends first is skipped."""
        seconds = seconds or self.probe.timeout
        try:
            async with asyncio.timeout(seconds):
                with suppress(ConnectionError):
                    while await self._reader.read(MAX_ACK):
                        pass
        except TimeoutError:
            raise Broken(f"the request connection was not closed within {seconds:g} s") from None


async def read_two_part(reader: asyncio.StreamReader) -> tuple[bytes, bytes] | None:
    """Read one frame; None at the end. Raises Broken for one that is too long, and for half of one."""
    try:
        prefix = await reader.readexactly(PREFIX.size)
    except asyncio.IncompleteReadError as error:
        demand(not error.partial, f"the connection ended inside of a frame: {error.partial.hex(' ')}")
        return None
    except ConnectionError:
        return None
    header_bytes, data_bytes, checksum = PREFIX.unpack(prefix)
    demand(header_bytes + data_bytes <= MAX_PART, f"a frame of {header_bytes} and {data_bytes} bytes came")
    demand(checksum == 0, f"the checksum of a frame is {checksum}, not 0")
    try:
        return await reader.readexactly(header_bytes), await reader.readexactly(data_bytes)
    except (asyncio.IncompleteReadError, ConnectionError):
        raise Broken("the connection ended inside of a frame") from None


def parsed(header: bytes, what: str) -> Json:
    """Return the JSON of a header. Raises Broken."""
    try:
        return json.loads(header)
    except ValueError as error:
        raise Broken(f"{what} is not JSON: {header[:100]!r}") from error


def error_of(items: list[Json]) -> Json:
    """Return the error of an answer; None where it has none."""
    for item in items:
        data = item.get("data") if isinstance(item, dict) else None
        if isinstance(data, dict) and data.get("event") == "error":
            return data.get("error") or {"message": data.get("comment")}
    return None


def demand_clean(items: list[Json]) -> None:
    """Demand an answer without an error."""
    record = error_of(items)
    demand(record is None, f"the request ended with the error {error_type(record)} {record!r:.300}")


@asynccontextmanager
async def native_line(probe: WireProbe) -> AsyncIterator[NativeLine]:
    """Connect, and listen at the address from which the worker was reached."""
    reader, writer = await connected(probe)
    line = NativeLine(probe, reader, writer)
    server = await asyncio.start_server(line.take_home, line.home, 0)
    line.port = server.sockets[0].getsockname()[1]
    try:
        yield line
    finally:
        # A connection that is being accepted while the listener closes would be left open by asyncio: accept no more first.
        asyncio.get_running_loop().remove_reader(server.sockets[0].fileno())
        line.close()
        for _ in range(TURNS_OF_A_CLOSE):
            await asyncio.sleep(0)
        server.close()


async def demand_served(probe: WireProbe, when: str) -> None:
    """Raise Broken unless a new connection is served."""
    try:
        async with native_line(probe) as line:
            await line.served()
    except (Broken, OSError) as error:
        raise Broken(f"another caller is not served {when}: {error}") from error
