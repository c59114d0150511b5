"""The `mux` side of the faulty worker."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import struct
from contextlib import suppress
from typing import Any

import msgspec

from support.faulty_worker.base import PATH, FaultyWorker, Refusal

HELLO, PING, PONG, GOAWAY, OPEN, BODY, CANCEL, CREDIT, ITEMS, ITEM_PART, ERROR, AUTH, STEP = range(1, 14)
FROM_CALLERS = {HELLO, PING, PONG, GOAWAY, OPEN, BODY, CANCEL, CREDIT, ERROR, AUTH}
MAX_PAYLOAD = 65536
MAX_BODY = 32 << 20
HELLO_KEYS = {"version", "capabilities", "credits", "auth", "agent"}
pack = msgspec.msgpack.encode
unpack = msgspec.msgpack.decode


class Broken(Exception):
    """The caller broke the wire."""


class Stream:
    def __init__(self, stream_id: int, credit: int) -> None:
        self.id, self.credit = stream_id, credit
        self.sent = 0
        self.is_stopped = self.is_killed = False
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def wake(self) -> None:
        self.changed.set()


class MuxSide:
    def __init__(
        self, worker: FaultyWorker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes
    ) -> None:
        self.worker, self.fault, self.reader, self.writer, self.first = worker, worker.fault, reader, writer, first
        self.streams: dict[int, Stream] = {}
        self.half_sent: dict[int, tuple[dict[str, Any], bytearray]] = {}
        self.hello: dict[str, Any] | None = None
        self.nonces: tuple[str, str] | None = None  # until the secret is proven

    async def run(self) -> None:
        timer = asyncio.get_running_loop().call_later(self.worker.hello_seconds, self._late)
        try:
            if self.first + await self.reader.readexactly(7) != b"\xffDYNMUX\n":
                if self.fault == "garbage ends the listener":
                    self.worker.stops_listening()
                return
            while True:
                kind, flags, stream_id, payload = await self._frame()
                await self._take(kind, flags, stream_id, payload)
        except asyncio.IncompleteReadError:
            if self.fault == "half-closed kept":
                await asyncio.Event().wait()
        except (Broken, msgspec.MsgspecError, ValueError, TypeError, AttributeError, KeyError) as error:
            await self.send(ERROR, pack({"message": str(error)}))
        finally:
            timer.cancel()
            for stream in list(self.streams.values()):
                if self.fault != "requests of a lost connection go on":
                    self.kill(stream)

    def _late(self) -> None:
        if self.hello is None and self.fault != "no HELLO timer":
            self.writer.transport.abort()

    async def _frame(self) -> tuple[int, int, int, bytes]:
        if self.fault == "a read is a frame" and self.hello is not None:
            data = await self.reader.read(1 << 20)
            if not data:
                raise asyncio.IncompleteReadError(data, 12)
            if len(data) < 12 or len(data) < 12 + struct.unpack_from(">I", data)[0]:
                return await self._frame()
            length, kind, flags, _, stream_id = struct.unpack_from(">IBBHI", data)
            return kind, flags, stream_id, data[12 : 12 + length]
        length, kind, flags, _, stream_id = struct.unpack(">IBBHI", await self.reader.readexactly(12))
        if length > MAX_PAYLOAD and self.fault != "long frames awaited":
            raise Broken(f"a frame of {length} bytes")
        if self.fault == "half a frame blocks all":
            async with self.worker.one_at_a_time:
                return kind, flags, stream_id, await self.reader.readexactly(length)
        return kind, flags, stream_id, await self.reader.readexactly(length)

    async def send(self, kind: int, payload: bytes, stream_id: int = 0, flags: int = 0) -> None:
        reserved = 7 if self.fault == "reserved is 7" else 0
        with suppress(ConnectionError):
            await self.worker.write(
                self.writer, struct.pack(">IBBHI", len(payload), kind, flags, reserved, stream_id) + payload
            )

    async def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self.hello is None:
            if kind == HELLO:
                await self._greet(payload)
                return
            if self.fault != "first frame unchecked":
                raise Broken("the first frame is not HELLO")
        if self.nonces is not None and self.fault != "requests before AUTH taken" and kind not in (AUTH, ERROR):
            raise Broken("the secret is not proven")
        match kind:
            case 2:
                await self.send(PONG, payload[::-1] if self.fault == "PONG with other bytes" else payload)
            case 4 if self.fault == "GOAWAY closes":
                raise asyncio.IncompleteReadError(b"", 1)
            case 5:
                await self._open(stream_id, payload)
            case 6:
                await self._body(stream_id, flags, payload)
            case 7:
                await self._cancel(stream_id, payload)
            case 8:
                for target, amount in unpack(payload):
                    self._credit(target, amount)
            case 11 if self.fault != "ERROR of a caller ignored":
                raise asyncio.IncompleteReadError(b"", 1)
            case 12:
                self._auth(payload.decode())
            case _ if kind not in FROM_CALLERS and self.fault == "unknown kind refused":
                raise Broken(f"kind {kind} is not known")

    # -- greeting ------------------------------------------------------------------------------------------------

    async def _greet(self, payload: bytes) -> None:
        try:
            hello = unpack(payload)
            version = hello["version"]
            if type(version) is not int:
                raise Broken("the version is no number")
        except (msgspec.MsgspecError, Broken, KeyError, TypeError):
            if self.fault != "malformed HELLO taken":
                raise
            hello, version = {}, 1
        if version < 1 and self.fault != "version 0 taken":
            raise Broken("there is no version 0")
        if set(hello) - HELLO_KEYS and self.fault == "unknown keys refused":
            raise Broken("an unknown key")
        if self.fault == "frames behind HELLO dropped":
            with suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await self.reader.read(1 << 20)
        self.hello = hello
        reply: dict[str, Any] = {"version": version if self.fault == "version echoed" else min(version, 1)}
        if self.fault == "HELLO without a version":
            reply = {}
        reply["capabilities"] = ["steps"]
        if self.worker.secret:
            nonce = "a" * 64 if self.fault == "nonce used again" else secrets.token_hex(32)
            if "auth" not in hello and self.fault != "no auth taken":
                raise Broken("the secret is not proven")
            self.nonces = (hello.get("auth", ""), nonce)
            reply["auth"] = f"{nonce}:{self._proof('worker')}"
        await self.send(HELLO, pack(reply))

    def _proof(self, role: str) -> str:
        caller, worker = self.nonces or ("", "")
        said = f"dynamo mux 1 {role}\0{caller}\0{worker}".encode()
        return hmac.new(self.worker.secret, said, hashlib.sha256).hexdigest()

    def _auth(self, proof: str) -> None:
        is_right = proof == self._proof("caller")
        if self.fault == "right proof refused":
            is_right = False
        if not is_right and self.fault != "any proof taken":
            raise Broken("the proof is wrong")
        self.nonces = None

    # -- requests ------------------------------------------------------------------------------------------------

    async def _open(self, stream_id: int, payload: bytes) -> None:
        try:
            head, body = unpack(payload)
            if not isinstance(head["path"], str) or not isinstance(head["id"], str):
                raise Broken("path and id are texts")
        except (msgspec.MsgspecError, Broken, KeyError, TypeError, ValueError):
            if self.fault == "malformed OPEN ignored":
                return
            raise
        if set(head) - {"path", "id", "deadline_ms", "size"} and self.fault == "unknown keys refused":
            raise Broken("an unknown key")
        if stream_id == 0 and self.fault != "stream 0 taken":
            raise Broken("stream 0 is the connection")
        if stream_id in self.streams and self.fault != "id in use taken":
            raise Broken(f"stream {stream_id} is in use")
        if self.fault == "streams of all connections in one table":
            if stream_id in self.worker.ids:
                raise Broken(f"stream {stream_id} is in use")
            self.worker.ids.add(stream_id)
        if self.fault == "ids of 16 bits":
            stream_id &= 0xFFFF
        if body is not None:
            await self._start(stream_id, head, body)
        elif head["size"] > MAX_BODY and self.fault != "large body awaited":
            await self._end(stream_id, 0, Refusal("InvalidArgument", "the body is too large"))
        else:
            self.half_sent[stream_id] = (head, bytearray())

    async def _body(self, stream_id: int, flags: int, payload: bytes) -> None:
        if stream_id not in self.half_sent:
            if self.fault == "BODY of a killed stream refused":
                raise Broken(f"stream {stream_id} is not open")
            return
        head, parts = self.half_sent[stream_id]
        if self.fault == "BODY pieces mixed":
            parts = next(iter(self.half_sent.values()))[1]
        parts += payload
        if not flags & 1:
            return
        del self.half_sent[stream_id]
        if len(parts) != head["size"] and self.fault not in ("size unchecked", "BODY pieces mixed"):
            raise Broken(f"{len(parts)} bytes in place of {head['size']}")
        await self._start(stream_id, head, bytes(parts))

    async def _start(self, stream_id: int, head: dict[str, Any], raw: bytes) -> None:
        stream = self.streams[stream_id] = Stream(stream_id, (self.hello or {}).get("credits", 1024))
        try:
            if head["path"] != PATH:
                kind = "InvalidArgument" if self.fault == "unknown path is an InvalidArgument" else "WorkerUnavailable"
                raise Refusal(kind, f"Server unavailable: unknown endpoint {head['path']}")
            try:
                body = unpack(raw)
            except (msgspec.MsgspecError, ValueError) as error:
                if self.fault == "a malformed body ends the connection":
                    raise Broken("the body is no msgpack") from error
                kind = "Unknown" if self.fault == "malformed body is Unknown" else "InvalidArgument"
                raise Refusal(kind, "the body is no msgpack") from error
            if self.fault == "requests declined":
                raise Refusal("Unknown", "not today")
            count = self.worker.request_tokens(body)
        except Refusal as refusal:
            del self.streams[stream_id]
            await self._end(stream_id, 0, refusal)
            return
        stream.task = self.worker.start(self._serve(stream, count, head.get("deadline_ms")))
        if self.fault == "reading stops while a stream stalls":
            await stream.task

    async def _serve(self, stream: Stream, count: int, deadline: int | None) -> None:
        seconds = None if deadline is None or self.fault == "deadline ignored" else deadline / 1000
        error = None
        try:
            async with asyncio.timeout(seconds):
                if self.fault == "a stalled stream holds the others":
                    async with self.worker.one_at_a_time:
                        await self._generate(stream, count)
                else:
                    async with self.worker.room:
                        await self._generate(stream, count)
        except TimeoutError:
            error = Refusal("ResponseTimeout", "the deadline passed")
        if self.streams.get(stream.id) is stream:
            del self.streams[stream.id]
        if not stream.is_killed:
            while self.fault == "END waits for credit" and stream.credit <= 0:
                await self._wait(stream)
            await self._end(stream.id, 0 if self.fault == "END without the total" else stream.sent, error)

    async def _wait(self, stream: Stream) -> None:
        stream.changed.clear()
        await stream.changed.wait()

    async def _generate(self, stream: Stream, count: int) -> None:
        if self.fault == "a token less for some":
            count -= stream.id % 4 == 3
        async for number in self.worker.tokens(count):
            while stream.credit <= 0 and self.fault != "credits ignored":
                await self._wait(stream)
            if stream.is_stopped and self.fault != "stop ignored":
                await self._item(stream, [], "cancelled")
                return
            await self._item(stream, [number], "length" if number == count - 1 else None)

    async def _item(self, stream: Stream, ids: list[Any], reason: str | None) -> None:
        offset = stream.sent + (self.fault == "offsets from one")
        stream.sent += len(ids)
        stream.credit -= max(1, len(ids))
        if stream.is_killed:
            return
        if self.fault == "finish_reason unknown" and reason is not None:
            reason = "done"
        if self.fault == "token ids as text":
            ids = [str(one) for one in ids]
        wants_steps = "steps" in (self.hello or {}).get("capabilities", []) or self.fault == "STEP unasked"
        if wants_steps and len(ids) == 1 and reason is None:
            columns = [[stream.id], [offset], [*ids, 1] if self.fault == "STEP columns unequal" else ids]
            await self.send(STEP, pack(columns))
            return
        target = min(self.streams, default=stream.id) if self.fault == "streams mixed" else stream.id
        await self.send(ITEMS, pack([[target, 0, offset, ids, reason]]))

    async def _end(self, stream_id: int, sent: int, error: Refusal | None) -> None:
        record: dict[str, Any] | None = None
        if error is not None:
            kind = error.kind
            record = {"error_type": kind if kind.startswith("Worker") else {"Backend": kind}, "message": str(error)}
            if self.fault == "error without a message":
                del record["message"]
        item = [stream_id, -2, sent, [], None, record]
        whole = pack(item)
        if len(whole) + 1 > MAX_PAYLOAD and self.fault != "large item in one frame":
            for at in range(0, len(whole), MAX_PAYLOAD):
                is_last = at + MAX_PAYLOAD >= len(whole)
                await self.send(ITEM_PART, whole[at : at + MAX_PAYLOAD], stream_id, int(is_last))
            return
        await self.send(ITEMS, pack([item] * (2 if self.fault == "END twice" else 1)))

    def _credit(self, target: int, amount: int) -> None:
        stream = self.streams.get(target)
        if stream is None:
            if self.fault == "CREDIT for an unknown stream refused":
                raise Broken(f"stream {target} is not open")
        elif self.fault != "CREDIT ignored":
            stream.credit += amount
            stream.wake()

    async def _cancel(self, stream_id: int, how: bytes) -> None:
        self.half_sent.pop(stream_id, None)
        stream = self.streams.get(stream_id)
        if stream is None:
            if self.fault == "CANCEL for an unknown stream refused":
                raise Broken(f"stream {stream_id} is not open")
        elif how == b"\x00":
            stream.is_stopped = True
            stream.wake()
        elif self.fault == "killed requests go on":
            stream.is_killed = True
        else:
            self.kill(stream)
            if self.fault == "END after a kill":
                await self._end(stream_id, stream.sent, None)

    def kill(self, stream: Stream) -> None:
        stream.is_killed = True
        self.streams.pop(stream.id, None)
        if stream.task is not None:
            stream.task.cancel()
