"""Another server's models: what goes to it, what comes back, and what its failures become. Over real sockets."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from dynamo.errors import (
    CannotConnect,
    Disconnected,
    HttpError,
    InvalidArgument,
    Overloaded,
    ResponseTimeout,
    Unknown,
    WorkerUnavailable,
)
from dynamo.runtime.calls.context import Context
from dynamo.upstream.arguments import read_arguments
from dynamo.upstream.engine import (
    MAX_EVENT_BYTES,
    EventReader,
    EventTooLong,
    UpstreamEngine,
    proxy_for,
    wait_before,
)
from support.certificates import Authority
from support.fake_upstream import USAGE, FakeUpstream, fake_upstream
from support.patience import PATIENCE_SECONDS, PROMPT_SECONDS

CHAT = {"model": "here", "messages": [{"role": "user", "content": "hi"}], "nvext": {"x": 1}, "temperature": 0.5}


@asynccontextmanager
async def engine_of(url: str, *flags: str) -> AsyncIterator[UpstreamEngine]:
    engine, _ = await UpstreamEngine.from_args(["--upstream", url, "--model", "here=theirs", *flags])
    await engine.start(1)
    try:
        yield engine
    finally:
        await engine.cleanup()


async def answer(engine: UpstreamEngine, body: dict[str, Any] | None = None) -> list[Any]:
    async with asyncio.timeout(PATIENCE_SECONDS):
        return [chunk async for chunk in engine.generate(CHAT if body is None else body, Context("id-1"))]


def said(chunks: list[Any]) -> str:
    return "".join(choice["delta"]["content"] for chunk in chunks for choice in chunk["choices"])


async def test_a_chat_goes_out_under_their_name_and_comes_back_under_ours() -> None:
    async with fake_upstream() as fake, engine_of(fake.url) as engine:
        chunks = await answer(engine)
    (body,) = fake.bodies
    assert body == {
        "model": "theirs", "messages": CHAT["messages"], "temperature": 0.5, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert said(chunks) == "one two three"
    assert {(chunk["id"], chunk["model"]) for chunk in chunks} == {("id-1", "here")}
    assert len(chunks) == 4  # one for each event
    assert chunks[-1]["usage"] == USAGE


async def test_a_completion_goes_to_completions() -> None:
    async with fake_upstream() as fake, engine_of(fake.url) as engine:
        chunks = await answer(engine, {"model": "here", "prompt": "hi"})
    assert [choice["text"] for chunk in chunks for choice in chunk["choices"]] == ["one", " two", " three"]
    assert fake.bodies[0]["max_tokens"] == 16


REFUSED = {
    400: InvalidArgument, 401: WorkerUnavailable, 403: WorkerUnavailable, 404: HttpError, 413: HttpError,
    422: HttpError, 429: Overloaded, 500: Unknown, 502: WorkerUnavailable, 503: WorkerUnavailable, 504: ResponseTimeout,
}  # fmt: skip


@pytest.mark.parametrize("status", REFUSED)
async def test_a_refusal_is_a_typed_error_with_the_upstreams_message(status: int) -> None:
    async with fake_upstream(behaviour=status) as fake, engine_of(fake.url, "--upstream-retries", "0") as engine:
        with pytest.raises(REFUSED[status], match=f"upstream says {status}") as failed:
            await answer(engine)
    if isinstance(failed.value, HttpError):
        assert failed.value.code == status


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_what_may_pass_is_tried_again(status: int) -> None:
    async with fake_upstream(behaviour=status, then="well") as fake, engine_of(fake.url) as engine:
        assert said(await answer(engine)) == "one two three"
    assert len(fake.bodies) == 2


@pytest.mark.parametrize(("retry_after", "is_tried"), [("0", True), ("3600", False), (None, False)])
async def test_429_is_tried_again_only_after_a_bounded_time(retry_after: str | None, is_tried: bool) -> None:
    async with (
        fake_upstream(behaviour=429, then="well", retry_after=retry_after) as fake,
        engine_of(fake.url) as engine,
    ):
        if is_tried:
            assert said(await answer(engine)) == "one two three"
        else:
            with pytest.raises(Overloaded):
                await answer(engine)
    assert len(fake.bodies) == 1 + is_tried


async def test_a_client_that_leaves_before_the_next_attempt_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context("id-1")
    pause = asyncio.sleep

    async def leaves(seconds: float) -> None:
        context.stop_generating()
        await pause(0)

    async with fake_upstream(behaviour=503, then="well") as fake, engine_of(fake.url) as engine:
        monkeypatch.setattr("dynamo.upstream.engine.asyncio.sleep", leaves)
        with pytest.raises(WorkerUnavailable):
            [chunk async for chunk in engine.generate(CHAT, context)]
        monkeypatch.undo()
    assert len(fake.bodies) == 1


@pytest.mark.parametrize("status", [400, 404, 500])
async def test_what_would_fail_again_is_not_tried_again(status: int) -> None:
    async with fake_upstream(behaviour=status) as fake, engine_of(fake.url) as engine:
        with pytest.raises((InvalidArgument, HttpError, Unknown)):
            await answer(engine)
    assert len(fake.bodies) == 1


async def test_a_connection_that_ends_before_the_first_byte_is_tried_again() -> None:
    async with fake_upstream(behaviour="first", then="well") as fake, engine_of(fake.url) as engine:
        assert said(await answer(engine)) == "one two three"
    assert len(fake.bodies) == 2


@pytest.mark.parametrize(("times", "number", "is_answered"), [(1, None, True), (2, None, False), (1, 104, False)])
async def test_a_request_that_a_closed_connection_did_not_take_is_sent_again_once(
    monkeypatch: pytest.MonkeyPatch, times: int, number: int | None, is_answered: bool
) -> None:
    failures = [aiohttp.ClientOSError(number, "Can not write request body") for _ in range(times)]
    post = aiohttp.ClientSession.post

    def closing(session: aiohttp.ClientSession, url: str, **options: Any) -> Any:
        if failures:
            raise failures.pop() from aiohttp.ClientConnectionResetError("Cannot write to closing transport")
        return post(session, url, **options)

    async with fake_upstream() as fake, engine_of(fake.url, "--upstream-retries", "0") as engine:
        monkeypatch.setattr(aiohttp.ClientSession, "post", closing)
        if is_answered:
            assert said(await answer(engine)) == "one two three"
        else:
            with pytest.raises(CannotConnect):
                await answer(engine)


async def test_a_dead_server_cannot_be_reached() -> None:
    async with fake_upstream() as fake, engine_of(fake.url, "--upstream-retries", "1") as engine:
        await fake.die()
        with pytest.raises(CannotConnect):
            await answer(engine)


async def test_a_stream_that_is_cut_is_never_sent_again() -> None:
    async with fake_upstream(behaviour="cut") as fake, engine_of(fake.url) as engine:
        with pytest.raises(Disconnected):
            await answer(engine)
    assert len(fake.bodies) == 1


async def test_an_error_in_mid_stream_is_typed() -> None:
    async with fake_upstream(behaviour="error") as fake, engine_of(fake.url) as engine:
        with pytest.raises(Unknown, match="it broke"):
            await answer(engine)


@pytest.mark.parametrize("behaviour", ["slow", "stall"])
async def test_silence_has_a_limit(behaviour: str) -> None:
    async with fake_upstream(behaviour=behaviour) as fake, engine_of(fake.url, "--upstream-timeout", "0.1") as engine:
        with pytest.raises(ResponseTimeout):
            await answer(engine)


async def test_a_client_that_leaves_closes_the_connection_at_once() -> None:
    async with fake_upstream(behaviour="stall") as fake, engine_of(fake.url) as engine:
        context = Context("id-1")
        chunks = engine.generate(CHAT, context)
        await anext(chunks)
        context.kill()
        async with asyncio.timeout(PROMPT_SECONDS):
            assert [chunk async for chunk in chunks] == []
            await fake.left.wait()


async def test_a_client_that_leaves_before_the_first_byte_closes_the_connection_at_once() -> None:
    async with fake_upstream(behaviour="slow") as fake, engine_of(fake.url) as engine:
        context = Context("id-1")
        answering = asyncio.ensure_future(anext(engine.generate(CHAT, context), None))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not fake.bodies:
                await asyncio.sleep(0.005)
        context.stop_generating()
        async with asyncio.timeout(PROMPT_SECONDS):
            assert await answering is None
            await fake.left.wait()
    assert len(fake.bodies) == 1


async def test_the_key_is_sent_read_again_and_never_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "key"
    file.write_text("sk-first-secret\n")
    async with fake_upstream(key="sk-second-secret") as fake:
        async with engine_of(fake.url, "--upstream-key-file", str(file)) as engine:
            with pytest.raises(WorkerUnavailable) as failed:
                await answer(engine)
            assert "secret" not in str(failed.value)
            assert engine._client is not None
            assert "401" in await engine._client.check()
            file.write_text("sk-second-secret")
            assert await engine._client.check() == ""
            assert said(await answer(engine)) == "one two three"
        assert "secret" not in repr(engine._arguments)
    assert "secret" not in caplog.text


async def test_tls_trusts_the_given_authority_and_no_other(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("127.0.0.1")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert, key)
    async with fake_upstream(tls=tls) as fake:
        url = fake.url.replace("http:", "https:")
        async with engine_of(url, "--upstream-ca-file", authority.path) as engine:
            assert said(await answer(engine)) == "one two three"
        async with engine_of(url, "--upstream-retries", "0") as engine:
            with pytest.raises(CannotConnect):
                await answer(engine)


async def test_a_proxy_of_the_environment_gets_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    async with fake_upstream() as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
        async with engine_of("http://model.invalid/v1") as engine:
            assert said(await answer(engine)) == "one two three"
        assert proxy.headers[0]["host"] == "model.invalid"
        monkeypatch.setenv("NO_PROXY", "model.invalid")
        assert proxy_for("http://model.invalid/v1") is None


class Record:
    """The instance record of a worker, as an engine changes it."""

    def __init__(self) -> None:
        self.changes: asyncio.Queue[str] = asyncio.Queue()

    async def unregister_endpoint_instance(self) -> None:
        self.changes.put_nowait("out")

    async def register_endpoint_instance(self) -> None:
        self.changes.put_nowait("in")

    async def next(self) -> str:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.changes.get()


async def test_a_worker_is_ready_only_while_its_server_answers() -> None:
    record = Record()
    async with fake_upstream() as fake, engine_of(fake.url, "--upstream-check", "0.02") as engine:
        await engine.on_endpoint_ready(cast(Any, record))
        watch = asyncio.ensure_future(engine.wait_dead())
        port = fake.port
        await fake.die()
        assert await record.next() == "out"
        again = FakeUpstream(port=port)
        await again.listen()
        while (change := await record.next()) == "out":
            pass
        assert change == "in"
        watch.cancel()
        await again.die()


async def test_a_request_that_finds_no_server_makes_the_check_due() -> None:
    record = Record()
    async with (
        fake_upstream() as fake,
        engine_of(fake.url, "--upstream-check", "3600", "--upstream-retries", "0") as engine,
    ):
        await engine.on_endpoint_ready(cast(Any, record))
        watch = asyncio.ensure_future(engine.wait_dead())
        await answer(engine)
        await fake.die()
        with pytest.raises(CannotConnect):
            await answer(engine)
        assert await record.next() == "out"
        watch.cancel()


WIRE = b': hi\r\ndata: {"a":1}\r\n\r\nevent: x\ndata:two\n\ndata: 1\ndata: 2\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("cut", range(len(WIRE) + 1))
def test_events_survive_any_split(cut: int) -> None:
    reader = EventReader()
    assert [*reader.feed(WIRE[:cut]), *reader.feed(WIRE[cut:])] == [b'{"a":1}', b"two", b"1\n2", b"[DONE]"]


def test_an_event_without_an_end_is_refused() -> None:
    reader = EventReader()
    with pytest.raises(EventTooLong):
        reader.feed(b"data: " + b"x" * MAX_EVENT_BYTES)


@pytest.mark.parametrize(
    ("status", "retry_after", "attempt", "wait"),
    [
        (None, None, 0, 0.1), (None, None, 1, 0.2), (503, None, 2, 0.4), (503, "2", 0, 2.0), (503, "11", 0, None),
        (429, "1", 0, 1.0), (429, None, 0, None), (429, "-1", 0, None), (429, "Fri, 27 Nov 2026", 0, None),
        (500, "1", 0, None), (400, None, 0, None),
    ],
)  # fmt: skip
def test_when_an_attempt_is_made_again(
    status: int | None, retry_after: str | None, attempt: int, wait: float | None
) -> None:
    assert wait_before(CannotConnect("x"), status, retry_after, attempt, 10.0) == wait


@pytest.mark.parametrize(
    "flags",
    [
        ["--upstream", "ftp://x", "--model", "a"], ["--upstream", "http://u:p@x/v1", "--model", "a"],
        ["--upstream", "http://x/v1", "--model", "=b"], ["--upstream", "http://x/v1", "--model", "a="],
        ["--upstream", "http://x/v1", "--model", "a", "--upstream-key-file", "/nowhere"],
        ["--upstream", "https://x/v1", "--model", "a", "--upstream-ca-file", "/nowhere"],
    ],
)  # fmt: skip
def test_a_mistake_of_the_command_line_is_one_sentence(flags: list[str]) -> None:
    with pytest.raises(InvalidArgument):
        read_arguments(flags)


def test_without_its_package_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidArgument, match="pip install"):
        read_arguments(["--upstream", "http://x/v1", "--model", "a"])
