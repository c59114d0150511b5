"""The native side of the faulty worker."""

from __future__ import annotations

import asyncio
import json
import struct
from contextlib import suppress
from typing import Any

import msgspec

from support.faulty_worker.base import PATH, FaultyWorker, Refusal

MAX_MESSAGE = 32 << 20
HEADERS = {"request-id", "x-endpoint-path"}
MEMBERS = {"id", "request_type", "response_type", "payload_codec", "connection_info"}
SLOW = {"native stop ignored", "native kill ignored", "one answer at a time"}  # so that what is wrong takes its time
UNAVAILABLE = "Server unavailable:"


class Malformed(Exception):
    """What is no request: its connection ends."""


def two_part(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">QQQ", len(header), len(data), 0) + header + data


class NativeSide:
    def __init__(
        self, worker: FaultyWorker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes
    ) -> None:
        self.worker, self.fault, self.reader, self.writer, self.first = worker, worker.fault, reader, writer, first
        self.answers: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        try:
            while True:
                path, headers, payload = await self._request()
                await self._serve(path, headers, payload)
        except asyncio.IncompleteReadError:
            if self.fault == "native garbage ends the listener":
                self.worker.stops_listening()
        except (Malformed, UnicodeDecodeError) as error:
            await self._ack(f"Read error: {error}")
        finally:
            if self.fault == "answers end with the request's connection":
                for task in self.answers:
                    task.cancel()

    async def _exactly(self, count: int) -> bytes:
        first, self.first = self.first[:count], self.first[count:]
        return first + await self.reader.readexactly(count - len(first))

    async def _request(self) -> tuple[str, bytes, bytes]:
        if self.fault == "a read is a request":
            data = self.first + await self.reader.read(1 << 20)
            self.first = b""
            (path_bytes,) = struct.unpack_from(">H", data)
            if len(data) < 100:
                raise Malformed("half of a request")
            (header_bytes,) = struct.unpack_from(">H", data, 2 + path_bytes)
            at = 4 + path_bytes + header_bytes
            return data[2 : 2 + path_bytes].decode(), data[4 + path_bytes : at], data[at + 4 :]
        path = (await self._exactly(struct.unpack(">H", await self._exactly(2))[0])).decode()
        headers = await self._exactly(struct.unpack(">H", await self._exactly(2))[0])
        (length,) = struct.unpack(">I", await self._exactly(4))
        if length > MAX_MESSAGE and self.fault != "long request awaited":
            raise Malformed(f"a request of {length} bytes")
        if self.fault == "half a request blocks all":
            async with self.worker.one_at_a_time:
                return path, headers, await self._exactly(length)
        return path, headers, await self._exactly(length)

    async def _ack(self, text: str) -> None:
        with suppress(ConnectionError):
            await self.worker.write(self.writer, struct.pack(">I", len(text.encode())) + text.encode())

    async def _serve(self, path: str, raw_headers: bytes, payload: bytes) -> None:
        try:
            headers = json.loads(raw_headers) if raw_headers else {}
            control, home, raw = self._control(payload)
            self._check(path, headers, control, home)
        except Refusal as refusal:
            if (self.fault, refusal.kind) in (
                ("malformed control accepted", "control"),
                ("lengths of parts trusted", "parts"),
            ):
                await self._ack("")
                return
            text = str(refusal)
            await self._ack(text if self.fault == "old text for an unknown path" else f"{UNAVAILABLE} {text}")
            return
        try:
            body = msgspec.msgpack.decode(raw) if control.get("payload_codec") == "msgpack" else json.loads(raw)
        except (msgspec.MsgspecError, ValueError):
            await self._ack("" if self.fault == "malformed body swallowed" else f"{UNAVAILABLE} malformed body")
            return
        if self.fault == "ACK with a text":
            await self._ack("OK")
        elif self.fault == "ACKs out of order":
            self.worker.start(self._late_ack())
        else:
            await self._ack("")
        self.answers.append(self.worker.start(self._answer(control, home, body)))

    async def _late_ack(self) -> None:
        await asyncio.sleep(0.05)
        await self._ack("")

    def _control(self, payload: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
        try:
            header_bytes, data_bytes, _ = struct.unpack_from(">QQQ", payload)
            if 24 + header_bytes + data_bytes != len(payload):
                raise Refusal("parts", "the lengths lie")
            control = json.loads(payload[24 : 24 + header_bytes])
            home = json.loads(control["connection_info"]["info"])
            return control, home, payload[24 + header_bytes :]
        except (struct.error, ValueError, TypeError, KeyError, RecursionError) as error:
            raise Refusal("control", f"malformed request: {error}") from error

    def _check(self, path: str, headers: dict[str, str], control: dict[str, Any], home: dict[str, Any]) -> None:
        if path != PATH:
            raise Refusal("path", f"unknown endpoint {path}")
        if not headers and self.fault == "headers required":
            raise Refusal("headers", "no header request-id")
        if (set(headers) - HEADERS or set(control) - MEMBERS) and self.fault == "unknown members refused":
            raise Refusal("members", "an unknown member")
        if home["context"] != control["id"] and self.fault != "another context taken":
            raise Refusal("context", "the context is another one's")

    # -- the answer ----------------------------------------------------------------------------------------------

    async def _answer(self, control: dict[str, Any], home: dict[str, Any], body: Any) -> None:
        host, _, port = home["address"].rpartition(":")
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            if self.fault == "a refused answer ends the connection":
                self.writer.transport.abort()
            return
        work = self.worker.start(self._write(writer, control, home, body))
        try:
            await self._watch(reader, work)
            await asyncio.wait({work})
        finally:
            if self.fault != "answers of lost callers go on":
                work.cancel()
            writer.close()

    async def _watch(self, reader: asyncio.StreamReader, work: asyncio.Task[None]) -> None:
        """Read stop and kill until the answer is written or its caller leaves."""
        reading = asyncio.get_running_loop().create_task(reader.read(1000))
        try:
            while True:
                await asyncio.wait({reading, work}, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    return
                data = b""
                with suppress(ConnectionError):
                    data = reading.result()
                ignored = {"native stop ignored": b'"stop"', "native kill ignored": b'"kill"'}.get(
                    self.fault, b"(none)"
                )
                if ignored not in data:
                    if self.fault != "answers of lost callers go on":
                        work.cancel()
                    return
                reading = asyncio.get_running_loop().create_task(reader.read(1000))
        finally:
            reading.cancel()

    async def _write(
        self, writer: asyncio.StreamWriter, control: dict[str, Any], home: dict[str, Any], body: Any
    ) -> None:
        with suppress(ConnectionError):
            handshake = {"subject": home["subject"], "stream_type": "response"}
            if self.fault == "handshake without stream_type":
                del handshake["stream_type"]
            writer.write(two_part(json.dumps(handshake).encode()))
            if self.fault != "prologue missing":
                writer.write(two_part(b'{"error": null}'))
            is_msgpack = control.get("payload_codec") == "msgpack" or self.fault == "answers in msgpack only"
            encode = msgspec.msgpack.encode if is_msgpack else msgspec.json.encode
            if self.fault == "one answer at a time":
                async with self.worker.one_at_a_time:
                    await self._items(writer, encode, body)
            else:
                async with self.worker.room:
                    await self._items(writer, encode, body)
            if self.fault != "no complete_final":
                writer.write(two_part(b"", encode({"complete_final": True})))
            if self.fault != "no sentinel":
                writer.write(two_part(b'"sentinel"'))
            await writer.drain()

    async def _items(self, writer: asyncio.StreamWriter, encode: Any, body: Any) -> None:
        try:
            count = self.worker.request_tokens(body)
        except Refusal as refusal:
            record = {"error_type": {"Backend": refusal.kind}, "message": str(refusal)}
            envelope: dict[str, Any] = {"event": "error", "error": record}
            if self.fault == "native error without an event":
                envelope = {"data": record}
            writer.write(two_part(b"", encode({"data": envelope, "complete_final": False})))
            return
        async for number in self.worker.tokens(count):
            if self.fault in SLOW:
                await asyncio.sleep(0.004)
            chunk: dict[str, Any] = {"token_ids": [number], "index": 0}
            if number == count - 1:
                chunk["finish_reason"] = "length"
            item = (
                chunk
                if self.fault == "items without an envelope"
                else {"data": {"data": chunk}, "complete_final": False}
            )
            try:
                writer.write(two_part(b"", encode(item)))
                await writer.drain()
            except ConnectionError:
                if self.fault != "answers of lost callers go on":
                    raise
                await asyncio.Event().wait()
