"""The body of a request as it arrives: who waits for it is woken, and nothing of it is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynamo.runtime.http.cycle import HIGH_WATER_BYTES, RequestBody
from dynamo.runtime.http.flow import Gate


class Socket:
    """Remembers what was written, and whether it is read."""

    def __init__(self) -> None:
        self.written = b""
        self.is_read = True

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True


def body_on(socket: Socket, *, expects_continue: bool = False) -> RequestBody:
    return RequestBody(socket, Gate(socket), expects_continue=expects_continue)  # type: ignore[arg-type]


def part(data: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


async def test_pieces_that_came_before_the_first_receive_are_one() -> None:
    body = body_on(Socket())
    for data in (b"a", b"bc"):
        body.add(data)
    body.end()
    assert await body.receive() == part(b"abc", more=False)


@pytest.mark.parametrize("readers", [1, 2])
async def test_each_reader_that_waits_is_woken(readers: int) -> None:
    body = body_on(Socket())
    waiting = [asyncio.ensure_future(body.receive()) for _ in range(readers)]
    await asyncio.sleep(0)
    body.add(b"a")
    assert [await reader for reader in waiting] == [part(b"a", more=True), part(b"", more=True)][:readers]
    later = asyncio.ensure_future(body.receive())
    await asyncio.sleep(0)
    assert not later.done()
    body.end()
    assert await later == part(b"", more=False)


async def test_a_reader_that_is_cancelled_takes_nothing_away() -> None:
    body = body_on(Socket())
    reader = asyncio.ensure_future(body.receive())
    await asyncio.sleep(0)
    reader.cancel()
    body.add(b"a")
    body.end()
    assert await body.receive() == part(b"a", more=False)


async def test_a_closed_body_is_a_disconnect_for_ever_and_takes_nothing_more() -> None:
    body = body_on(Socket())
    waiting = asyncio.ensure_future(body.receive())
    await asyncio.sleep(0)
    body.close()
    body.add(b"late")
    body.end()
    assert [await waiting, await body.receive()] == [{"type": "http.disconnect"}] * 2


async def test_the_socket_is_not_read_while_much_waits_for_the_application() -> None:
    socket = Socket()
    body = body_on(socket)
    body.add(bytes(HIGH_WATER_BYTES))
    assert socket.is_read
    body.add(b"a")
    assert not socket.is_read
    assert len((await body.receive())["body"]) == HIGH_WATER_BYTES + 1
    assert socket.is_read


async def test_a_client_that_waits_for_it_is_told_once_to_continue() -> None:
    socket = Socket()
    body = body_on(socket, expects_continue=True)
    body.add(b"a")
    await body.receive()
    body.end()
    await body.receive()
    assert socket.written == b"HTTP/1.1 100 Continue\r\n\r\n"
