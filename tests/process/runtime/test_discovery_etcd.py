"""What only the etcd store promises: its keys, leases that outlive faults, endpoints, users and certificates."""

from __future__ import annotations

import asyncio
import base64
import logging
import signal
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import CannotConnect, InvalidArgument
from dynamo.runtime.base.settings import EtcdSettings, RuntimeSettings
from dynamo.runtime.discovery import Change, Delete, Put
from dynamo.runtime.discovery.etcd import EtcdDiscovery
from dynamo.runtime.discovery.etcd.client import Compacted, EtcdClient, EtcdError, parse_endpoints
from dynamo.runtime.discovery.http_stream import Lines
from dynamo.runtime.discovery.last_view import LastView
from dynamo.runtime.distributed import DistributedRuntime
from support.discovery_rigs import collect
from support.etcd_server import EtcdServer
from support.patience import PATIENCE_SECONDS, PROMPT_SECONDS
from support.ports import free_ports
from support.relay import Relay

KEY = "v1/instances/ns/c/e/1f"
OTHER = "v1/instances/ns/c/e/2a"
MARK = "v1/instances/mark"
TTL = 2.0

Open = Callable[..., Awaitable[EtcdDiscovery]]


@pytest.fixture(autouse=True)
def no_defect(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The stores' loops log a defect and go on; here it is a failure."""
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.fixture
def server(etcd_server: EtcdServer) -> EtcdServer:
    etcd_server.clear()
    return etcd_server


@pytest.fixture
async def open_store(server: EtcdServer) -> AsyncIterator[Open]:
    """Opens stores on the shared server, or with settings of their own; closes them."""
    async with AsyncExitStack() as stack:

        async def open_one(endpoints: str = server.url, **settings: object) -> EtcdDiscovery:
            # A second for an answer: the machine may be busy, and a sixth of this TTL is little.
            usual = EtcdSettings(endpoints=endpoints, lease_ttl_seconds=TTL, keepalive_timeout_seconds=1.0)
            given = replace(usual, **settings)  # type: ignore[arg-type]
            store = EtcdDiscovery(given)
            stack.push_async_callback(store.close)
            await store.start()
            return store

        yield open_one


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


# -- many watches --------------------------------------------------------------------------------------------------------


async def test_one_more_watch_reads_what_it_watches_and_not_all_of_its_bucket(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, read, ranged = await open_store(), list[str](), EtcdClient.range

    async def counted(client: EtcdClient, prefix: str) -> tuple[dict[str, bytes], int]:
        read.append(prefix)
        return await ranged(client, prefix)

    await store.put(KEY, b"{}")
    async with store.watch("v1/instances/ns") as first:
        assert len(await anext(first)) == 1
        monkeypatch.setattr(EtcdClient, "range", counted)
        async with store.watch(KEY) as second:
            assert await anext(second) == [Put(KEY, b"{}")]
    assert read == [KEY]


# -- on the wire ---------------------------------------------------------------------------------------------------------


async def test_keys_are_the_native_ones_and_hang_on_the_lease_that_names_the_instance(server: EtcdServer) -> None:
    settings = RuntimeSettings.from_env({"ETCD_ENDPOINTS": server.url})
    runtime = DistributedRuntime(asyncio.get_running_loop(), "etcd", "tcp", settings=settings)

    async def handler(body: object, context: object, sink: object) -> None: ...

    served = await runtime.endpoint("ns.comp.gen").start_serving(handler)
    await runtime.endpoint("ns.comp.gen").publish_model({"display_name": "m"})
    lease_id = runtime.connection_id()
    found = server.keys()
    assert set(found) == {f"v1/{bucket}/ns/comp/gen/{lease_id:x}" for bucket in ("instances", "mdc")}
    assert {lease for _, lease in found.values()} == {lease_id}
    assert lease_id in server.leases()
    assert f'"instance_id":{lease_id}'.encode() in found[f"v1/instances/ns/comp/gen/{lease_id:x}"][0]
    await served.close()
    await runtime.aclose()
    assert server.keys() == {}
    assert lease_id not in server.leases()


async def test_a_foreign_writer_and_keys_that_are_no_text_are_no_trouble(server: EtcdServer, open_store: Open) -> None:
    store = await open_store()
    async with store.watch("v1/instances") as changes:
        assert await anext(changes) == []
        server.call("kv/put", {"key": base64.b64encode(b"v1/instances/\xff").decode(), "value": "AAAA"})
        server.put(KEY, b"\x00\xff")
        assert await anext(changes) == [Put(KEY, b"\x00\xff")]
    assert await store.get_prefix("v1/instances") == {KEY: b"\x00\xff"}


@given(st.lists(st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"")), max_size=5), st.data())
def test_lines_survive_any_split(lines: list[bytes], data: st.DataObject) -> None:
    wire = b"".join(line + b"\n" for line in lines)
    found: list[bytes] = []
    buffer = Lines(limit=100)
    while wire:
        size = data.draw(st.integers(1, len(wire)))
        found += buffer.feed(wire[:size])
        wire = wire[size:]
    assert found == [line for line in lines if line.strip()]


def test_a_line_without_an_end_is_bounded() -> None:
    with pytest.raises(CannotConnect, match="more than 10 bytes"):
        Lines(limit=10).feed(b"x" * 11)


# -- settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoints", "ca", "expected"),
    [
        ("http://a:1, http://b:2/", None, ("http://a:1", "http://b:2")),
        ("etcd", None, ("http://etcd:2379",)),
        ("etcd:1,etcd:1", "x", ("https://etcd:1",)),
        ("https://[::1]:5", None, ("https://[::1]:5",)),
    ],
)
def test_endpoints_are_urls_or_addresses(endpoints: str, ca: str | None, expected: tuple[str, ...]) -> None:
    assert parse_endpoints(EtcdSettings(endpoints=endpoints, ca=ca)) == expected


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"endpoints": " , "}, "ETCD_ENDPOINTS names no endpoint"),
        ({"endpoints": "ftp://a"}, "ETCD_ENDPOINTS: 'ftp://a'"),
        ({"endpoints": "http://a:99999"}, "ETCD_ENDPOINTS: 'http://a:99999'"),
        ({"endpoints": "http://a/path"}, "ETCD_ENDPOINTS"),
        ({"endpoints": "http://a,https://b"}, "mixes"),
        ({"endpoints": "http://a", "ca": "/x"}, "say https://"),
        ({"endpoints": "https://a", "ca": "/no/such/file"}, "ETCD_AUTH_CA"),
        ({"endpoints": "https://a", "ca": "-----BEGIN nonsense"}, "ETCD_AUTH_CA"),
        ({"endpoints": "https://a", "client_cert": "/x"}, "ETCD_AUTH_CLIENT_KEY is not set"),
        ({"endpoints": "https://a", "client_cert": "/x", "client_key": "/y"}, "ETCD_AUTH_CLIENT_CERT"),
        ({"endpoints": "http://a", "username": "u"}, "ETCD_AUTH_PASSWORD is not set"),
    ],
)
def test_a_setting_that_is_wrong_is_named(settings: dict[str, str], match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        EtcdDiscovery(EtcdSettings(**settings))  # type: ignore[arg-type]


def test_settings_follow_the_environment(caplog: pytest.LogCaptureFixture) -> None:
    assert EtcdSettings.from_env({}) == EtcdSettings()
    found = EtcdSettings.from_env(
        {
            "ETCD_LEASE_TTL": "0",
            "ETCD_KEEPALIVE_INTERVAL_SECONDS": "2.5",
            "ETCD_KEEPALIVE_TIMEOUT_SECONDS": "-1",
            "ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS": "120",
            "ETCD_AUTH_PASSWORD": "secret",
        }
    )
    assert found.lease_ttl_seconds == 10
    assert (found.keepalive_interval_seconds, found.keepalive_timeout_seconds) == (2.5, None)
    assert found.startup_timeout_seconds == 120
    assert "secret" not in repr(found)
    assert "ETCD_LEASE_TTL" in caplog.text
    assert "ETCD_KEEPALIVE_TIMEOUT_SECONDS" in caplog.text


# -- start ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["refused", "silent"])
async def test_an_etcd_that_is_missing_at_the_start_is_an_error_that_names_address_and_flag(
    server: EtcdServer, kind: str
) -> None:
    async with Relay(server.port) as relay:
        if kind == "refused":
            await relay.cut()
        relay.silence()
        store = EtcdDiscovery(EtcdSettings(endpoints=relay.url, startup_timeout_seconds=0.5))
        began = time.monotonic()
        with pytest.raises(CannotConnect, match=rf"{relay.url} .ETCD_ENDPOINTS.*--discovery-backend"):
            await store.start()
        assert time.monotonic() - began < PROMPT_SECONDS
        relay.speak()
        if kind == "refused":
            await relay.restore()
        await store.start()  # another try, on the same store
        await store.put(KEY, b"x")
        assert server.keys()[KEY] == (b"x", store.lease_id)
        await store.close()


async def test_something_that_is_no_etcd_is_said_to_be_none() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as web:
        store = EtcdDiscovery(EtcdSettings(endpoints=f"127.0.0.1:{web.sockets[0].getsockname()[1]}"))
        with pytest.raises(CannotConnect, match="--enable-grpc-gateway"):
            await store.start()
        await store.close()


# -- faults --------------------------------------------------------------------------------------------------------------


async def test_a_store_frozen_for_less_than_the_ttl_changes_nothing(server: EtcdServer, open_store: Open) -> None:
    owner, reader = await open_store(), await open_store()
    await owner.put(KEY, b"1")
    async with reader.watch("v1/instances") as changes:
        assert await anext(changes) == [Put(KEY, b"1")]
        server.freeze()
        await asyncio.sleep(TTL / 4)
        server.thaw()
        await owner.put(MARK, b"")
        assert await anext(changes) == [Put(MARK, b"")]


async def test_a_store_frozen_for_longer_than_the_ttl_loses_nobody(
    server: EtcdServer, open_store: Open, caplog: pytest.LogCaptureFixture
) -> None:
    owner, reader = await open_store(), await open_store()
    lease_id = owner.lease_id
    await owner.put(KEY, b"1")
    async with reader.watch("v1/instances") as changes:
        assert await anext(changes) == [Put(KEY, b"1")]
        server.freeze()
        try:
            assert await reader.get_prefix(KEY) == {KEY: b"1"}  # from the last view
            await asyncio.sleep(TTL * 1.3)
            assert "does not answer" in (reader.trouble() or "")
        finally:
            server.thaw()
        await until(lambda: server.leases() == [] or "again" in caplog.text)  # it knows that they ran out
        await until(lambda: server.keys() == {KEY: (b"1", lease_id)})
        await until(lambda: reader.trouble() is None)
        await owner.put(MARK, b"")
        assert await collect(changes, Put(MARK, b"")) == [Put(MARK, b"")]
        await owner.delete(KEY)
        assert await collect(changes, Delete(KEY)) == [Delete(KEY)]
    assert owner.lease_id == lease_id


async def test_a_record_that_another_program_overwrites_is_written_again_long_before_the_next_renewal(
    server: EtcdServer, open_store: Open
) -> None:
    owner = await open_store(lease_ttl_seconds=100 * PATIENCE_SECONDS)
    keys = [KEY, OTHER, "v1/mdc/ns/c/e/1f"]
    for key in keys:
        await owner.put(key, b"1")
    await until(lambda: server.watchers() == len(keys))
    server.put(OTHER, b"broken")
    await until(lambda: server.keys()[OTHER] == (b"1", owner.lease_id))


async def test_a_store_killed_and_wiped_is_filled_again(server: EtcdServer, open_store: Open) -> None:
    owner, reader = await open_store(), await open_store()
    await owner.put(KEY, b"1")
    async with reader.watch("v1/instances") as changes:
        assert await anext(changes) == [Put(KEY, b"1")]
        server.kill()
        server.wipe()
        await asyncio.to_thread(server.start)
        began = time.monotonic()
        await until(lambda: server.keys() == {KEY: (b"1", owner.lease_id)})
        assert time.monotonic() - began < PROMPT_SECONDS
        await owner.put(MARK, b"")
        assert await collect(changes, Put(MARK, b"")) == [Put(MARK, b"")]


async def test_what_happens_while_the_store_is_down_is_made_up_for(server: EtcdServer, open_store: Open) -> None:
    owner, leaver, reader = await open_store(), await open_store(), await open_store()
    await owner.put(KEY, b"1")
    await owner.put(OTHER, b"1")
    await leaver.put("v1/instances/gone", b"1")
    async with reader.watch("v1/instances") as changes:
        assert len(await anext(changes)) == 3
        server.kill()
        await owner.put(KEY, b"2")
        await owner.put(MARK, b"")
        await owner.delete(OTHER)
        with pytest.raises(CannotConnect):
            await owner.put_new("v1/instances/new", b"")
        with pytest.raises(CannotConnect):
            await owner.get_prefix("v1/mdc")
        began = time.monotonic()
        await leaver.close()
        assert time.monotonic() - began < PROMPT_SECONDS
        await asyncio.to_thread(server.start)
        expected: list[Change] = [Put(KEY, b"2"), Put(MARK, b""), Delete(OTHER), Delete("v1/instances/gone")]
        seen = await collect(changes, *expected)
    assert sorted(seen, key=repr) == sorted(expected, key=repr)
    assert set(server.keys()) == {KEY, MARK}


async def test_a_store_out_of_space_loses_nobody_whose_lease_ran_out_meanwhile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quota = ("--quota-backend-bytes", str(16 * 1024 * 1024))
    with EtcdServer(tmp_path / "small", *quota) as small:
        settings = EtcdSettings(endpoints=small.url, lease_ttl_seconds=TTL, keepalive_timeout_seconds=1.0)
        worker, leaver, frontend = (EtcdDiscovery(settings) for _ in range(3))
        try:
            for store in (worker, leaver, frontend):
                await store.start()
            await worker.put(KEY, b"one")
            await leaver.put(OTHER, b"two")
            async with frontend.watch("v1/instances") as changes:
                assert sorted(put.key for put in await anext(changes)) == [KEY, OTHER]
                seen: list[Change] = []

                async def follow() -> None:
                    async for batch in changes:
                        seen.extend(batch)

                following = asyncio.create_task(follow())
                filled = await asyncio.to_thread(fill, small)
                await leaver.close()
                for lease in (worker.lease_id, frontend.lease_id):  # all leases run out
                    await asyncio.to_thread(small.call, "lease/revoke", {"ID": lease})
                assert small.keys() == {}
                await until(lambda: "out of space" in (frontend.trouble() or ""))
                await asyncio.sleep(2.5 * TTL)  # for longer than any doubt that ends by itself
                assert await frontend.get_prefix("v1/instances") == {KEY: b"one", OTHER: b"two"}
                assert seen == []
                await asyncio.to_thread(make_room, small, filled)
                await until(lambda: KEY in set(small.keys()))
                await until(lambda: seen == [Delete(OTHER)])  # the one that did not come back
                await until(lambda: frontend.trouble() is None)
                following.cancel()
        finally:
            for store in (worker, leaver, frontend):
                await store.close()
    assert "NOSPACE" in caplog.text


def fill(server: EtcdServer) -> int:
    """Write until the quota is reached; how many records that took."""
    block = base64.b64encode(b"z" * 1_000_000).decode()
    for number in range(100):
        try:
            server.call("kv/put", {"key": base64.b64encode(f"fill{number}".encode()).decode(), "value": block})
        except AssertionError as error:
            if "database space exceeded" not in str(error):
                raise
            return number
    raise AssertionError("the quota was never reached")


def make_room(server: EtcdServer, filled: int) -> None:
    """What an operator does about it."""
    for number in range(filled):
        server.call("kv/deleterange", {"key": base64.b64encode(f"fill{number}".encode()).decode()})
    revision = server.call("kv/range", {"key": "AA=="})["header"]["revision"]
    server.call("kv/compaction", {"revision": revision, "physical": True})
    server.call("maintenance/defragment", {})
    for alarm in server.call("maintenance/alarm", {"action": "GET"})["alarms"]:
        server.call("maintenance/alarm", {"action": "DEACTIVATE", **alarm})


async def test_changes_that_were_compacted_away_are_found_by_reading_again(
    server: EtcdServer, open_store: Open, caplog: pytest.LogCaptureFixture
) -> None:
    async with Relay(server.port) as relay:
        reader, owner = await open_store(relay.url), await open_store()
        await owner.put(KEY, b"1")
        await owner.put(OTHER, b"1")
        async with reader.watch("v1/instances") as changes:
            assert len(await anext(changes)) == 2
            await relay.cut()
            await owner.put(KEY, b"2")
            await owner.put(KEY, b"3")
            await owner.delete(OTHER)
            server.compact()
            await relay.restore()
            expected: list[Change] = [Put(KEY, b"3"), Delete(OTHER)]
            assert await collect(changes, *expected) == expected


async def test_a_watch_from_a_compacted_revision_says_so(server: EtcdServer) -> None:
    client = EtcdClient(EtcdSettings(endpoints=server.url), attempt_seconds=5)
    client.open()
    _, revision = await client.range("v1/")
    server.put(KEY)
    server.compact()
    with pytest.raises(Compacted):
        async with client.watch("v1/", revision=revision) as batches:
            await anext(batches)
    await client.close()


async def test_a_process_that_blocks_its_loop_for_longer_than_the_ttl_keeps_its_lease(
    server: EtcdServer, open_store: Open, caplog: pytest.LogCaptureFixture
) -> None:
    store = await open_store()
    await store.put(KEY, b"1")
    time.sleep(TTL * 1.25)  # noqa: ASYNC251 - what an engine must not do, and does
    assert server.keys()[KEY] == (b"1", store.lease_id)
    assert "taking it again" not in caplog.text


DYING = """
import asyncio, sys
from dynamo.runtime.discovery.etcd import EtcdDiscovery
from dynamo.runtime.base.settings import EtcdSettings
async def main():
    store = EtcdDiscovery(EtcdSettings(endpoints=sys.argv[1], lease_ttl_seconds=2))
    await store.start()
    await store.put(sys.argv[2], b"1")
    print("ready", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_a_killed_process_is_gone_after_its_ttl_and_a_frozen_one_comes_back(
    server: EtcdServer, open_store: Open
) -> None:
    reader = await open_store()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DYING, server.url, KEY, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        async with reader.watch("v1/instances") as changes:
            assert await anext(changes) == [Put(KEY, b"1")]
            process.send_signal(signal.SIGSTOP)
            assert await anext(changes) == [Delete(KEY)]
            process.send_signal(signal.SIGCONT)
            assert await anext(changes) == [Put(KEY, b"1")]
            process.kill()
            began = time.monotonic()
            assert await anext(changes) == [Delete(KEY)]
            assert time.monotonic() - began < PROMPT_SECONDS
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


# -- endpoints -----------------------------------------------------------------------------------------------------------


async def test_the_next_endpoint_is_asked_when_one_does_not_answer(server: EtcdServer, open_store: Open) -> None:
    async with Relay(server.port) as first, Relay(server.port) as second:
        (nobody,) = free_ports(1)
        store = await open_store(f"http://127.0.0.1:{nobody},{first.url},{second.url}")
        other = await open_store()
        await store.put(KEY, b"1")
        async with store.watch("v1/instances") as changes:
            assert await anext(changes) == [Put(KEY, b"1")]
            assert (first.connections > 0, second.connections) == (True, 0)
            first.silence()  # as a frozen member: connections stay, and say nothing
            await other.put(MARK, b"")
            assert await collect(changes, Put(MARK, b"")) == [Put(MARK, b"")]
            assert second.connections > 0
            first.speak()
            await second.cut()
            await other.put(OTHER, b"1")
            assert await collect(changes, Put(OTHER, b"1")) == [Put(OTHER, b"1")]
        assert server.keys()[KEY] == (b"1", store.lease_id)


# -- users and certificates ----------------------------------------------------------------------------------------------


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd that asks who is there: root, and `worker`, who may do anything below v1/."""
    with EtcdServer(tmp_path / "guarded") as server:
        for name in ("root", "worker"):
            server.call("auth/user/add", {"name": name, "password": f"{name}-password"})
            server.call("auth/role/add", {"name": name})
            server.call("auth/user/grant", {"user": name, "role": name})
        span = {"key": base64.b64encode(b"v1/").decode(), "range_end": base64.b64encode(b"v10").decode()}
        server.call("auth/role/grant", {"name": "worker", "perm": {"permType": "READWRITE", **span}})
        server.call("auth/enable", {})
        yield server


async def test_a_user_gets_in_and_gets_a_new_token_when_the_old_one_ended(guarded: EtcdServer) -> None:
    settings = EtcdSettings(endpoints=guarded.url, lease_ttl_seconds=TTL, username="worker", password="worker-password")
    wrong = EtcdDiscovery(replace(settings, password="guess"))
    with pytest.raises(CannotConnect, match="ETCD_AUTH_USERNAME"):
        await wrong.start()
    await wrong.close()
    nobody = EtcdDiscovery(replace(settings, username=None, password=None))
    with pytest.raises(CannotConnect, match="user name is empty"):
        await nobody.start()
    await nobody.close()
    store = EtcdDiscovery(settings)
    await store.start()
    async with store.watch("v1/instances") as changes:
        assert await anext(changes) == []
        await store.put(KEY, b"1")
        assert await anext(changes) == [Put(KEY, b"1")]
        guarded.kill()  # tokens live in its memory
        await asyncio.to_thread(guarded.start)
        await store.put(KEY, b"2")
        assert await collect(changes, Put(KEY, b"2")) == [Put(KEY, b"2")]
    with pytest.raises(EtcdError, match="permission denied"):
        await store.put("v2/instances/x", b"")
    await store.close()


@pytest.mark.parametrize("form", ["path", "text"])
async def test_certificates_are_paths_or_text(tmp_path: Path, form: str) -> None:
    authority = trustme.CA()
    files = {}
    for name, cert in (("server", authority.issue_cert("127.0.0.1")), ("client", authority.issue_cert("me@example"))):
        files[name] = (tmp_path / f"{name}.pem", tmp_path / f"{name}.key")
        cert.cert_chain_pems[0].write_to_path(files[name][0])
        cert.private_key_pem.write_to_path(files[name][1])
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca)

    def shown(path: Path) -> str:
        return str(path) if form == "path" else path.read_text()

    chain, key = files["client"]
    settings = EtcdSettings(ca=shown(ca), client_cert=shown(chain), client_key=shown(key), lease_ttl_seconds=TTL)
    context = client_context(ca, chain, key)
    flags = ("--cert-file", *map(str, files["server"][:1]), "--key-file", str(files["server"][1]))
    mutual = ("--client-cert-auth", "--trusted-ca-file", str(ca))
    with EtcdServer(tmp_path / "member", *flags, *mutual, tls=context, scheme="https") as server:
        settings = replace(settings, endpoints=server.url)
        store = EtcdDiscovery(settings)
        await store.start()
        await store.put(KEY, b"1")
        assert server.keys()[KEY] == (b"1", store.lease_id)
        await store.close()
        stranger = EtcdDiscovery(replace(settings, client_cert=None, client_key=None, startup_timeout_seconds=0.5))
        with pytest.raises(CannotConnect, match="ETCD_ENDPOINTS"):
            await stranger.start()
        other_ca = tmp_path / "other.pem"
        trustme.CA().cert_pem.write_to_path(other_ca)
        misled = EtcdDiscovery(replace(settings, ca=str(other_ca), startup_timeout_seconds=0.5))
        with pytest.raises(CannotConnect, match="certificate verify failed"):
            await misled.start()


def client_context(ca: Path, cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca))
    context.load_cert_chain(cert, key)
    return context


# -- the view ------------------------------------------------------------------------------------------------------------

KEYS = st.sampled_from([KEY, OTHER, MARK])
STEPS = st.one_of(
    st.tuples(st.just("put"), KEYS, st.sampled_from([b"1", b"2"])),
    st.tuples(st.just("delete"), KEYS, st.just(b"")),
    st.tuples(st.just("resync"), KEYS, st.just(b"")),
    st.tuples(st.just("doubt"), KEYS, st.just(b"")),
    st.tuples(st.just("time"), KEYS, st.just(b"")),
)


@given(st.lists(STEPS, max_size=30))
def test_what_a_view_tells_adds_up_to_what_it_says_and_in_the_end_to_the_store(
    steps: list[tuple[str, str, bytes]],
) -> None:
    store: dict[str, bytes] = {}
    told: dict[str, bytes] = {}
    view = LastView()
    now, doubted_until = 0.0, -1.0

    def hear(changes: list[Change]) -> None:
        for change in changes:
            if isinstance(change, Put):
                assert told.get(change.key) != change.value  # no repetition
                told[change.key] = change.value
            else:
                assert now >= doubted_until
                del told[change.key]  # a KeyError would be a repetition

    for step, key, value in steps:
        match step:
            case "put":
                store[key] = value
                hear(view.apply([Put(key, value)], now))
            case "delete":
                if store.pop(key, None) is not None:
                    hear(view.apply([Delete(key)], now))
            case "resync":
                hear(view.resync(store, now))
            case "doubt":
                doubted_until = now + 2
                view.doubt(doubted_until)
            case "time":
                now += 1
                if (at := view.settles_at) is not None and at <= now:
                    hear(view.settle(now))
        assert told == view.read("")
        assert store.items() <= told.items()
    now += 3
    hear(view.settle(now))
    assert told == store
