from __future__ import annotations

import asyncio
from pathlib import Path

from dynamo.errors import ResponseTimeout, WorkerUnavailable
from dynamo.frontend.apis.chat import ChatApi
from dynamo.frontend.base.stage_timer import StageTimer
from dynamo.frontend.pipeline.exchange import Arrival, Exchange, ExchangeRegister, Phase
from dynamo.frontend.pipeline.generation_call import GenerationCall
from dynamo.frontend.pipeline.sink import AnswerStream, HeaderPairs
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.runtime.base.identifiers import random_uuid
from support.frontend_cluster import Cluster, cluster, say

BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]%b}'


class ListSink:
    """The sink of a caller in this process: it keeps what it gets."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, bytes]] = []
        self.streamed = b""
        self.is_committed = False
        self.can_push = False

    async def reply(self, status: int, body: bytes, headers: HeaderPairs = ()) -> None:
        self.answers.append((status, body))

    async def reject(self, rejected: RequestRejected) -> None:
        self.answers.append((rejected.status, rejected.body()))

    def open_stream(self, **options: object) -> AnswerStream:
        return self  # type: ignore[return-value]

    async def write(self, data: bytes) -> None:
        self.is_committed = True
        self.streamed += data

    def push(self, data: bytes, now: float) -> bool:
        return False

    async def settle(self) -> None: ...

    async def end(self, data: bytes) -> None:
        self.streamed += data

    def close(self) -> None: ...


def make(body: bytes = b"") -> Exchange:
    return Exchange("chatcmpl-1", Arrival(body, asyncio.get_running_loop().time()), StageTimer())


async def run(house: Cluster, more: bytes = b"") -> ListSink:
    call, sink = GenerationCall(ChatApi(), house.frontend.pipeline), ListSink()
    await call.run(call.open(random_uuid(), Arrival(BODY % more, asyncio.get_running_loop().time())), sink)  # type: ignore[arg-type]
    return sink


async def test_a_caller_in_this_process_enters_at_the_same_door(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        await house.worker(say("hel", "lo"))
        unary = await run(house)
        assert [status for status, _ in unary.answers] == [200]
        assert b'"content":"hello"' in unary.answers[0][1]
        streamed = await run(house, b',"stream":true')
        assert streamed.streamed.endswith(b"data: [DONE]\n\n")
        refused = await run(house, b',"temperature":9')
        assert [status for status, _ in refused.answers] == [400]
        assert house.metric("dynamo_frontend_output_sequence_tokens_count", model="m") == 2


async def test_a_caller_in_this_process_is_bounded_by_the_same_admission(tmp_path: Path) -> None:
    async with cluster(tmp_path, max_requests_in_flight=1) as house:
        worker = await house.worker()
        worker.script = worker.hold
        first = house.client.begin_chat("hi")
        await worker.started.wait()
        assert [status for status, _ in (await run(house)).answers] == [529]
        assert len(house.frontend.pipeline.register) == 1
        first.disconnect()
        await first.done()
        assert len(house.frontend.pipeline.register) == 0


async def test_the_register_shows_how_far_a_request_has_come(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        go_on = asyncio.Event()

        async def script(body: object, context: object, sink: object) -> None:
            sink.send_tokens(list(b"a"))  # type: ignore[attr-defined]
            await go_on.wait()
            sink.send_tokens(list(b"b"), finish_reason="stop")  # type: ignore[attr-defined]

        worker = await house.worker()
        worker.script = worker.hold
        asked = house.client.begin_chat("hi")
        await worker.started.wait()
        (exchange,) = house.frontend.pipeline.register
        assert (exchange.phase, exchange.model, exchange.context.id()) == (
            Phase.DISPATCHED,
            "m",
            worker.contexts[0].id(),
        )
        asked.disconnect()
        await asked.done()
        assert exchange.phase is Phase.ENDED

        worker.script = script
        streamed = house.client.begin_chat("hi", stream=True)
        await streamed.until(lambda one: b'"a"' in one.body)
        (exchange,) = house.frontend.pipeline.register
        assert exchange.phase is Phase.STREAMING
        go_on.set()
        await streamed.done()
        assert list(house.frontend.pipeline.register) == []
        times = [time for time in exchange.phase_times if time is not None]
        assert len(times) == len(Phase)
        assert times == sorted(times)


async def test_phases_never_go_back_and_an_end_is_final() -> None:
    exchange = make()
    exchange.enter(Phase.STREAMING, 2.0)
    exchange.enter(Phase.DISPATCHED, 3.0)  # a request that is moved is handed to a worker again
    assert (exchange.phase, exchange.phase_times[Phase.DISPATCHED]) == (Phase.STREAMING, None)
    exchange.end()
    exchange.client_left()
    exchange.end_with(ResponseTimeout("late"))
    assert (exchange.is_client_gone, exchange.reason, exchange.context.is_killed()) == (False, None, False)


async def test_ending_all_reaches_every_exchange_and_the_first_reason_stays() -> None:
    register, first, second = ExchangeRegister(), make(), make()
    register.add(first)
    register.add(second)
    late = ResponseTimeout("late")
    first.end_with(late)
    stopping = WorkerUnavailable("stopping")
    assert register.end_all(stopping) == 2
    assert (first.reason, second.reason) == (late, stopping)
    assert first.context.is_killed()
    assert second.context.is_killed()
    register.remove(first)
    register.remove(first)
    assert list(register) == [second]
