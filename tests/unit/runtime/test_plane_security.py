"""TLS, mutual TLS and the shared secret, over real sockets: who gets in, who does not, and what both sides are told."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import CannotConnect, Disconnected, DynamoException, InvalidArgument
from dynamo.runtime.base import tls as tls_module
from dynamo.runtime.base.settings import RequestPlaneSettings
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import Instance, RequestPlaneClient, ResponseSink
from dynamo.runtime.calls.request_plane.listener import Listener
from dynamo.runtime.calls.request_plane.mux.client import MuxClient
from dynamo.runtime.calls.request_plane.mux.frames import (
    HEADER,
    MAGIC,
    FrameDecoder,
    Hello,
    Kind,
    decode_hello,
    decode_message,
    frame,
    pack,
)
from dynamo.runtime.calls.request_plane.native.call_home import CallHomeListener
from dynamo.runtime.calls.request_plane.native.client import NativeClient
from dynamo.runtime.calls.request_plane.secret import SharedSecret, WrongSecret, new_nonce
from dynamo.runtime.calls.request_plane.security import PlaneSecurity
from support.certificates import Authority
from support.patience import PATIENCE_SECONDS

PATH = "1f/ns/c/e"


async def count(body: Any, context: Context, sink: ResponseSink) -> None:
    for n in range(body["n"]):
        if not sink.has_credit():
            await sink.wait_credit()
        sink.send_tokens([n])
    sink.send_tokens([], 0, "stop")


class Worker:
    """A listener that counts what it refused."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.refused: Counter[str] = Counter()
        self.listener = Listener(
            "127.0.0.1",
            settings=RequestPlaneSettings(**settings),
            refused=lambda limit: self.refused.update([limit]),
        )

    @property
    def where(self) -> tuple[str, int]:
        host, _, port = self.listener.address.rpartition(":")
        return host, int(port)


@asynccontextmanager
async def listening(**settings: Any) -> AsyncIterator[Worker]:
    worker = Worker(settings)
    await worker.listener.start()
    worker.listener.register(PATH, count)
    try:
        yield worker
    finally:
        await worker.listener.close()


@asynccontextmanager
async def calling(wire: str = "mux", **settings: Any) -> AsyncIterator[RequestPlaneClient]:
    parsed = RequestPlaneSettings(**settings, response_host="127.0.0.1")
    security = PlaneSecurity.of(parsed)
    client: RequestPlaneClient
    if wire == "mux":
        client = MuxClient(security=security)
    else:
        client = NativeClient(parsed, CallHomeListener(parsed, security.server), security=security)
    try:
        yield client
    finally:
        await client.close()


async def tokens(client: RequestPlaneClient, worker: Worker, n: int = 5, size: int = 0) -> list[int]:
    """Return the tokens that answer a body of so many bytes and a few more."""
    record: dict[str, Any] = dict(worker.listener.transport(PATH))
    instance = Instance(namespace="ns", component="c", endpoint="e", instance_id=31, **record)
    stream = await client.open(instance, {"n": n, "rest": "x" * size}, Context())
    found: list[int] = []
    try:
        while batch := await stream.next_batch():
            for item in batch:
                found.extend(item.token_ids)
    finally:
        stream.close()
    return found


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at for every connection."""
    monkeypatch.setattr(tls_module, "LOOK_SECONDS", 0.0)


def of_worker(authority: Authority, *names: str, clients: Authority | None = None) -> dict[str, Any]:
    cert, key = authority.issue(*names)
    asked = {} if clients is None else {"tls_client_ca_cert_path": clients.path}
    return {"tls_cert_path": cert, "tls_key_path": key, **asked}


def of_caller(authority: Authority, shown: Authority | None = None, **more: Any) -> dict[str, Any]:
    found = {"tls_ca_cert_path": authority.path, **more}
    if shown is not None:
        found["tls_client_cert_path"], found["tls_client_key_path"] = shown.issue("caller")
    return found


# -- TLS -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["mux", "native"])
@pytest.mark.parametrize("is_mutual", [False, True])
async def test_tokens_travel_over_tls(authority: Authority, wire: str, is_mutual: bool) -> None:
    # On the native wire both sides listen and both sides call.
    both = of_worker(authority, clients=authority if is_mutual else None) | of_caller(
        authority, authority if is_mutual else None
    )
    async with listening(**both) as worker, calling(wire, **both) as client:
        assert await tokens(client, worker, 3000) == list(range(3000))
        for size in (0, 300_000, 0, 400_000):  # what does not fit in one frame
            assert await tokens(client, worker, 3, size) == [0, 1, 2]
        assert not worker.refused


@pytest.mark.parametrize("loop_name", ["asyncio", "uvloop"])
@pytest.mark.process  # starts processes
def test_both_event_loops_serve_tls(authority: Authority, loop_name: str) -> None:
    make: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    if loop_name == "uvloop":
        make = pytest.importorskip("uvloop").new_event_loop

    async def run() -> list[int]:
        async with listening(**of_worker(authority)) as worker, calling(**of_caller(authority)) as client:
            for size in (0, 300_000, 0, 400_000):
                await tokens(client, worker, 3, size)
            return await tokens(client, worker, 200_000)

    with asyncio.Runner(loop_factory=make) as runner:
        assert len(runner.run(run())) == 200_000


async def test_a_certificate_of_another_authority_is_refused_and_the_setting_named(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    other = Authority(tmp_path / "other")
    async with listening(**of_worker(authority)) as worker, calling(**of_caller(other)) as client:
        with pytest.raises(CannotConnect, match="DYN_TCP_TLS_CA_CERT_PATH"):
            await tokens(client, worker)
        await until(lambda: "DYN_TCP_TLS_CERT_PATH" in caplog.text)


async def test_a_certificate_of_another_name_needs_the_setting_that_says_so(authority: Authority) -> None:
    async with listening(**of_worker(authority, "workers.example")) as worker:
        async with calling(**of_caller(authority)) as client:
            with pytest.raises(CannotConnect, match="DYN_TCP_TLS_SERVER_NAME"):
                await tokens(client, worker)
        async with calling(**of_caller(authority, tls_server_name="workers.example")) as client:
            assert await tokens(client, worker) == [0, 1, 2, 3, 4]
        async with calling(tls_insecure=True) as client:
            assert await tokens(client, worker) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("shown", ["none", "foreign"])
async def test_a_caller_without_a_certificate_that_is_known_gets_nothing(
    authority: Authority, tmp_path: Path, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = Authority(tmp_path / "foreign")
    settings = of_caller(authority, foreign if shown == "foreign" else None)
    async with listening(**of_worker(authority, clients=authority)) as worker, calling(**settings) as client:
        with pytest.raises(CannotConnect, match="DYN_TCP_TLS_CLIENT_CERT_PATH"):
            await tokens(client, worker)
        await until(lambda: worker.refused["handshake"] == 1)
    assert "DYN_TCP_TLS_CLIENT_CA_CERT_PATH" in caplog.text


async def test_plain_text_and_tls_do_not_meet_in_silence(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening(**of_worker(authority)) as worker, calling() as client:
        with pytest.raises(DynamoException, match="DYN_TCP_TLS_CA_CERT_PATH"):
            await tokens(client, worker)
        await until(lambda: worker.refused["handshake"] == 1)
        assert "does not speak TLS" in caplog.text
    async with listening() as worker, calling(**of_caller(authority)) as client:
        with pytest.raises(CannotConnect, match="DYN_TCP_TLS_CERT_PATH"):
            await tokens(client, worker)
        assert worker.refused["handshake"] == 1
        assert "began with TLS" in caplog.text


@pytest.mark.usefixtures("at_once")
async def test_a_new_certificate_serves_the_next_connection(authority: Authority) -> None:
    settings = of_worker(authority)
    cert, key = settings["tls_cert_path"], settings["tls_key_path"]
    async with listening(**settings) as worker:
        old = await serial(worker, authority)
        async with calling(**of_caller(authority)) as client:
            assert await tokens(client, worker) == [0, 1, 2, 3, 4]
            authority.issue_to(cert, key)
            new = await serial(worker, authority)
            assert new != old
            assert await tokens(client, worker) == [0, 1, 2, 3, 4]  # on the connection that there was
        authority.spoil(cert)
        assert await serial(worker, authority) == new


@pytest.mark.usefixtures("at_once")
async def test_an_authority_that_is_replaced_lets_the_old_ones_in_no_more(authority: Authority, tmp_path: Path) -> None:
    clients = Authority(tmp_path / "clients")
    trusted = tmp_path / "trusted.pem"
    clients.ca.cert_pem.write_to_path(trusted)
    settings = of_worker(authority) | {"tls_client_ca_cert_path": str(trusted)}
    async with listening(**settings) as worker:
        async with calling(**of_caller(authority, clients)) as client:
            assert await tokens(client, worker) == [0, 1, 2, 3, 4]
        Authority(tmp_path / "new").ca.cert_pem.write_to_path(trusted)
        async with calling(**of_caller(authority, clients)) as client:
            with pytest.raises(CannotConnect):
                await tokens(client, worker)


async def serial(worker: Worker, authority: Authority) -> int:
    """Of the certificate that the worker shows now."""
    context = ssl.create_default_context(cafile=authority.path)
    _, writer = await asyncio.open_connection(*worker.where, ssl=context)
    found = writer.get_extra_info("ssl_object").getpeercert()["serialNumber"]
    writer.transport.abort()
    return int(found, 16)


async def test_native_answers_never_fall_back_to_plain_text(authority: Authority) -> None:
    one_way = of_worker(authority)
    both = one_way | of_caller(authority)
    async with listening(**one_way) as worker, calling("native", **both) as client:
        with pytest.raises(DynamoException, match="DYN_TCP_TLS_CA_CERT_PATH is not set there"):
            await tokens(client, worker)
    async with listening(**both) as worker, calling("native", **of_caller(authority)) as client:
        with pytest.raises(CannotConnect, match="DYN_TCP_TLS_CERT_PATH"):
            await tokens(client, worker)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"tls_cert_path": "CERT"}, "DYN_TCP_TLS_KEY_PATH"),
        ({"tls_key_path": "KEY"}, "DYN_TCP_TLS_CERT_PATH"),
        ({"tls_cert_path": "/nowhere", "tls_key_path": "KEY"}, "DYN_TCP_TLS_CERT_PATH"),
        ({"tls_cert_path": "KEY", "tls_key_path": "CERT"}, "DYN_TCP_TLS_CERT_PATH"),
        ({"tls_client_ca_cert_path": "CERT"}, "DYN_TCP_TLS_CLIENT_CA_CERT_PATH"),
        ({"tls_ca_cert_path": "KEY"}, "DYN_TCP_TLS_CA_CERT_PATH"),
        ({"tls_client_cert_path": "CERT"}, "DYN_TCP_TLS_CLIENT_KEY_PATH"),
        ({"secret_path": "/nowhere"}, "DYN_TCP_SECRET_PATH"),
        ({"secret_path": "EMPTY"}, "DYN_TCP_SECRET_PATH"),
        ({"secret_path": "SHORT"}, "DYN_TCP_SECRET_PATH"),
    ],
)
async def test_a_file_that_cannot_be_used_is_named_by_its_setting(
    authority: Authority, tmp_path: Path, settings: dict[str, str], names: str
) -> None:
    cert, key = authority.issue()
    (tmp_path / "empty").write_text("\n \n")
    (tmp_path / "short").write_text("letmein\n")
    paths = {"CERT": cert, "KEY": key, "EMPTY": str(tmp_path / "empty"), "SHORT": str(tmp_path / "short")}
    given = {name: paths.get(value, value) for name, value in settings.items()}
    with pytest.raises(InvalidArgument, match=names):
        await Worker(given).listener.start()


# -- the shared secret ---------------------------------------------------------------------------------------------------


def secret_file(folder: Path, name: str, *lines: str) -> dict[str, Any]:
    path = folder / name
    path.write_text("".join(f"{line}\n" for line in lines))
    return {"secret_path": str(path)}


OLD, NEW = "an old secret of some length", "a new secret of some length"


async def test_both_sides_that_know_the_secret_meet(tmp_path: Path) -> None:
    settings = secret_file(tmp_path, "secret", OLD)
    async with listening(**settings) as worker, calling(**settings) as client:
        assert await tokens(client, worker, 3000) == list(range(3000))
        assert await tokens(client, worker) == [0, 1, 2, 3, 4]
        assert not worker.refused


@pytest.mark.parametrize(
    ("of_worker_lines", "of_caller_lines"),
    [((OLD,), (NEW,)), ((OLD,), None), (None, (OLD,))],
    ids=["another one", "the caller has none", "the worker has none"],
)
async def test_who_does_not_know_the_secret_is_told_which_setting_it_is(
    tmp_path: Path,
    of_worker_lines: tuple[str, ...] | None,
    of_caller_lines: tuple[str, ...] | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker_settings = {} if of_worker_lines is None else secret_file(tmp_path, "worker", *of_worker_lines)
    caller_settings = {} if of_caller_lines is None else secret_file(tmp_path, "caller", *of_caller_lines)
    async with listening(**worker_settings) as worker, calling(**caller_settings) as client:
        with pytest.raises((CannotConnect, Disconnected), match="DYN_TCP_SECRET_PATH"):
            await tokens(client, worker)
        await until(lambda: "a caller reported" in caplog.text or worker.refused["secret"] == 1)
        assert "DYN_TCP_SECRET_PATH" in caplog.text
    assert OLD not in caplog.text
    assert NEW not in caplog.text


@pytest.mark.usefixtures("at_once")
async def test_a_secret_is_replaced_without_a_pause(tmp_path: Path) -> None:
    worker_settings, caller_settings = (secret_file(tmp_path, name, OLD) for name in ("worker", "caller"))
    async with listening(**worker_settings) as worker:
        steps = [(name, lines) for lines in ((OLD, NEW), (NEW, OLD), (NEW,)) for name in ("worker", "caller")]
        for name, lines in steps:
            secret_file(tmp_path, name, *lines)
            async with calling(**caller_settings) as client:
                assert await tokens(client, worker) == [0, 1, 2, 3, 4]


def test_a_proof_is_good_for_one_connection_and_one_direction(tmp_path: Path) -> None:
    secret = SharedSecret(
        **{key.removeprefix("secret_"): path for key, path in secret_file(tmp_path, "s", OLD).items()}
    )
    ours, theirs = new_nonce(), new_nonce()
    proof = secret.prove("caller", ours, theirs)
    secret.check(proof, "caller", ours, theirs)
    for role, first, second in (("worker", ours, theirs), ("caller", new_nonce(), theirs), ("caller", theirs, ours)):
        with pytest.raises(WrongSecret):
            secret.check(proof, role, first, second)  # type: ignore[arg-type]
    assert OLD not in proof


class Stranger:
    """A caller that says what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._decoder = FrameDecoder()

    @classmethod
    async def at(cls, worker: Worker) -> Stranger:
        return cls(*await asyncio.open_connection(*worker.where))

    async def frame(self) -> tuple[int, bytes]:
        async with asyncio.timeout(PATIENCE_SECONDS):
            header = await self.reader.readexactly(HEADER.size)
            length, kind, *_ = HEADER.unpack(header)
            return kind, await self.reader.readexactly(length)

    async def error(self) -> str:
        kind, payload = await self.frame()
        assert kind == Kind.ERROR
        assert await self.reader.read() == b""
        self.writer.close()
        return str(decode_message(payload)["message"])

    async def is_cut(self) -> bool:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                return await self.reader.read() == b""
        except ConnectionError:
            return True
        finally:
            self.writer.close()


async def test_nothing_is_served_before_the_proof(tmp_path: Path) -> None:
    async with listening(**secret_file(tmp_path, "secret", OLD)) as worker:
        for early in (
            frame(Kind.OPEN, pack((1, 2)), stream_id=1),
            frame(Kind.PING, b"\0" * 8),
            frame(Kind.AUTH, b"0" * 64),
            frame(Kind.AUTH, b""),
        ):
            stranger = await Stranger.at(worker)
            stranger.writer.write(MAGIC + frame(Kind.HELLO, pack(Hello(version=1, auth=new_nonce()))))
            kind, payload = await stranger.frame()
            assert kind == Kind.HELLO
            assert decode_hello(payload).capabilities[-1] == "secret"
            stranger.writer.write(early)
            assert "DYN_TCP_SECRET_PATH" in await stranger.error()
        assert worker.refused["secret"] == 4


async def test_a_short_nonce_is_refused(tmp_path: Path) -> None:
    async with listening(**secret_file(tmp_path, "secret", OLD)) as worker:
        stranger = await Stranger.at(worker)
        stranger.writer.write(MAGIC + frame(Kind.HELLO, pack(Hello(version=1, auth="1"))))
        assert "nonce" in await stranger.error()


async def test_the_native_wire_has_no_place_for_a_secret(tmp_path: Path) -> None:
    settings = secret_file(tmp_path, "secret", OLD)
    async with listening(**settings) as worker:
        async with calling("native") as client:
            with pytest.raises(DynamoException, match="DYN_TCP_SECRET_PATH"):
                await tokens(client, worker)
        assert worker.refused["secret"] == 1
    async with listening() as worker, calling("native", **settings) as client:
        with pytest.raises(CannotConnect, match="DYN_TCP_SECRET_PATH"):
            await tokens(client, worker)


# -- limits --------------------------------------------------------------------------------------------------------------


async def test_strangers_are_few_and_do_not_stay(tmp_path: Path) -> None:
    settings = secret_file(tmp_path, "secret", OLD)
    async with listening(**settings, max_unauthenticated=3, handshake_timeout_seconds=0.5) as worker:
        known: RequestPlaneClient
        async with calling(**settings) as known:
            assert await tokens(known, worker) == [0, 1, 2, 3, 4]
            waiting = [await Stranger.at(worker) for _ in range(3)]
            for one in waiting[:2]:
                one.writer.write(MAGIC + frame(Kind.HELLO, pack(Hello(version=1, auth=new_nonce()))))
            for one in waiting[:2]:
                assert (await one.frame())[0] == Kind.HELLO
            assert await (await Stranger.at(worker)).is_cut()
            assert worker.refused["unauthenticated"] == 1
            assert await tokens(known, worker) == [0, 1, 2, 3, 4]  # who is known pays for none of it
            for one in waiting[:2]:
                assert "DYN_TCP_HANDSHAKE_TIMEOUT_SECS" in await one.error()
            assert await waiting[2].is_cut()
            assert worker.refused["handshake_time"] == 3


async def test_handshakes_are_few_and_end(authority: Authority) -> None:
    settings = of_worker(authority)
    async with listening(**settings, max_unauthenticated=2, tls_handshake_timeout_seconds=0.5) as worker:
        waiting = [await Stranger.at(worker) for _ in range(2)]
        assert await (await Stranger.at(worker)).is_cut()
        assert worker.refused["handshakes"] == 1
        assert [await one.is_cut() for one in waiting] == [True, True]
        assert worker.refused["handshake_time"] == 2
        async with calling(**of_caller(authority)) as client:
            assert await tokens(client, worker) == [0, 1, 2, 3, 4]


async def test_who_connects_and_leaves_is_no_failure(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with listening(**of_worker(authority)) as worker:
        probe = await Stranger.at(worker)
        probe.writer.close()
        await probe.writer.wait_closed()
        async with calling(**of_caller(authority)) as client:
            assert await tokens(client, worker) == [0, 1, 2, 3, 4]
        assert not worker.refused
    assert caplog.text == ""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)
