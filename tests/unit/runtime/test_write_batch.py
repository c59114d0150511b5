"""The writes of a frame are made together: all of them, in their order, and a failing one costs its own connection only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dynamo.runtime.base.write_batch import WriteBatch
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import StreamItem
from dynamo.runtime.calls.request_plane.mux.connection import MuxConnection
from dynamo.runtime.calls.request_plane.mux.frames import Kind, frame, pack
from dynamo.runtime.http.cycle import FIRST_BODY, Cycle, Splicer
from dynamo.runtime.http.flow import Gate


class Socket:
    """A transport that remembers, in a log shared by all, what is written to it."""

    def __init__(self, name: str, log: list[Any], *, fails: bool = False) -> None:
        self._name, self._log, self._fails = name, log, fails
        self.is_aborted = False

    def write(self, data: bytes) -> None:
        if self._fails:
            raise OSError("no such socket")
        self._log.append((self._name, bytes(data)))

    def abort(self) -> None:
        self.is_aborted = True

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def is_closing(self) -> bool:
        return False


class Lane:
    """Pushes each id to a client."""

    def __init__(self, log: list[Any], cycle: Cycle) -> None:
        self._log, self._cycle = log, cycle

    def take_token(self, token_id: int, now: float) -> bool:
        self._log.append("read")
        return self._cycle.push(b"%d" % token_id)

    def take_tokens(self, ids: list[int]) -> bool:
        return self.take_token(ids[0], 0.0)


async def answer(socket: Socket, **more: Any) -> Cycle:
    """Return an answer whose head is written."""
    http = SimpleNamespace(transport=socket, default_headers=(), answered=lambda: None)
    cycle = Cycle(http, Gate(socket), {"method": "POST", "http_version": "1.1"}, keep_alive=True)  # type: ignore[arg-type]
    await cycle.send({"type": "http.response.start", "status": 200, "headers": [], **more})
    return cycle


async def test_the_first_data_of_an_answer_is_one_write_with_its_head() -> None:
    await answer(Socket("a", log := list[Any]()), **{FIRST_BODY: (b"x", False)})
    assert [data.partition(b"\r\n\r\n")[2] for _, data in log] == [b"1\r\nx\r\n0\r\n\r\n"]


async def frame_of_two(log: list[Any], sockets: list[Socket]) -> None:
    """Hand out one frame with a token for each of two streams whose readers push it to their clients."""
    answers = [await answer(socket) for socket in sockets]
    connection = MuxConnection("here", on_lost=lambda connection: None)
    connection.connection_made(Socket("worker", []))  # type: ignore[arg-type]
    streams = [connection.open("e", b"\x80", Context(str(number))) for number in range(2)]
    log.clear()
    for cycle, stream in zip(answers, streams, strict=True):
        stream.open_lane(Lane(log, cycle), lambda error: None)
    items = [StreamItem(stream.stream_id, 0, 0, [number]) for number, stream in enumerate(streams)]
    connection.data_received(frame(Kind.ITEMS, pack(items)))


async def test_all_streams_of_a_frame_are_read_before_the_first_write() -> None:
    log: list[Any] = []
    await frame_of_two(log, [Socket("one", log), Socket("two", log)])
    assert log == ["read", "read", ("one", b"1\r\n0\r\n"), ("two", b"1\r\n1\r\n")]
    assert not WriteBatch.of_this_loop().is_open


async def test_a_write_that_fails_costs_its_own_connection_only() -> None:
    log: list[Any] = []
    broken = Socket("one", log)
    sockets = [broken, Socket("two", log)]
    answers = [await answer(socket) for socket in sockets]
    broken._fails = True
    batch = WriteBatch.of_this_loop()
    batch.is_open = True
    assert [cycle.push(b"x") for cycle in answers] == [True, True]
    log.clear()
    batch.flush()
    assert (log, broken.is_aborted, sockets[1].is_aborted) == ([("two", b"1\r\nx\r\n")], True, False)


async def test_outside_a_frame_a_push_is_written_at_once() -> None:
    log: list[Any] = []
    cycle = await answer(Socket("one", log))
    assert cycle.push(b"x")
    assert log[-1] == ("one", b"1\r\nx\r\n")


async def test_events_that_are_pushed_together_are_those_that_are_pushed_one_by_one() -> None:
    log: list[Any] = []
    answers = [await answer(Socket(name, log)) for name in ("one", "two", "three", "four")]
    splicers = [cycle.splicer(b"<", b">") for cycle in answers]
    answers[1]._gate.write_paused = True
    answers[2].disconnect()
    log.clear()
    middles = [b"a", b"b", b"c", b"d" * 1100]  # the last one's chunk head is not a ready one
    assert Splicer.push_each(splicers, middles, 5.0) == [1, 2]
    assert log == [("one", b"3\r\n<a>\r\n"), ("four", b"%x\r\n<%b>\r\n" % (1102, middles[3]))]
    assert [splicer.pushed_at for splicer in splicers] == [5.0, 0.0, 0.0, 5.0]
    batch = WriteBatch.of_this_loop()
    batch.is_open = True
    log.clear()
    assert Splicer.push_each(splicers, [b"e"] * 4, 6.0) == [1, 2]
    assert log == []
    batch.flush()
    assert log == [("one", b"3\r\n<e>\r\n"), ("four", b"3\r\n<e>\r\n")]
