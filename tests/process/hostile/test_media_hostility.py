"""Media from strangers: every known way to make a fetcher reach what it should not, or to make it hold too much.

Real sockets. 127.0.0.1 plays a public server of the attacker, 127.0.0.2 the inside of the network: what it is asked for is
counted, and must be nothing. Names are looked up by a resolver of the test.
"""

from __future__ import annotations

import asyncio
import gzip
import os
import ssl
import struct
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dynamo.frontend.base.offload import keep_large_blocks_apart
from dynamo.frontend.base.settings.media import FetchRules, MediaSettings
from dynamo.frontend.parts.media import fetcher as fetcher_module
from dynamo.frontend.parts.media import http_get
from dynamo.frontend.parts.media.addresses import check_address
from dynamo.protocol.records import MEDIA_KINDS, ModelRuntimeConfig
from support.asgi_client import Exchange
from support.certificates import Authority
from support.frontend_cluster import Cluster, ScriptedWorker, cluster, say
from support.media_server import MediaServer, media_server, ok, redirect
from support.patience import PATIENCE_SECONDS
from support.pictures import RED, WAV, data_url, png_of

MIB = 1024 * 1024
SETTINGS = MediaSettings(file_bytes=4 * MIB, data_url_bytes=2 * MIB, request_bytes=8 * MIB)
CARD = {"allow_direct_port": True, "timeout": {"secs": 2, "nanos": 0}}  # servers of a test have no port 80
SEES = ModelRuntimeConfig(runtime_data={MEDIA_KINDS: ["image", "audio", "video"]})
FLAT_BYTES = 64 * MIB


class Net:
    """The attacker's server, the inside, and a frontend between them."""

    def __init__(self, house: Cluster, worker: ScriptedWorker, public: MediaServer, inside: MediaServer) -> None:
        self.house, self.worker, self.public, self.inside = house, worker, public, inside
        self.lookups: list[str] = []
        self.addresses: dict[str, list[Sequence[str]]] = {"public.test": [["127.0.0.1"]]}
        """The answers of each lookup of a name, in order; the last one stays."""

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.lookups.append(host)
        found = self.addresses.get(host)
        if found is None:
            raise OSError("no such host")
        return found.pop(0) if len(found) > 1 else found[0]

    async def ask(self, url: Any, kind: str = "image") -> Exchange:
        part = {"type": f"{kind}_url", f"{kind}_url": {"url": url}}
        content = [{"type": "text", "text": "what?"}, part]
        body = {"model": "m", "messages": [{"role": "user", "content": content}]}
        return await self.house.client.begin("POST", "/v1/chat/completions", body).done(PATIENCE_SECONDS)

    async def refused(self, url: str, kind: str = "image") -> str:
        """Send a part that must be refused; return why."""
        answer = await self.ask(url, kind)
        assert answer.status == 400, (url[:100], answer.body[:500])
        error = answer.json["error"]
        assert error["param"] == "messages[0].content[1]"
        assert len(error["message"]) < 700
        assert self.worker.requests == []
        assert self.inside.heads == [], self.inside.heads
        message: str = error["message"]
        return message


@pytest.fixture
async def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Net]:
    def check(address: str, rules: FetchRules) -> None:
        if address != "127.0.0.1":
            check_address(address, rules)

    monkeypatch.setattr(fetcher_module, "check_address", check)
    async with (
        media_server("127.0.0.1") as public,
        media_server("127.0.0.2") as inside,
        cluster(tmp_path, media=SETTINGS, inline=False) as house,
    ):
        inside.answers["/secret.png"] = ok(RED)
        public.answers["/red.png"] = ok(RED)
        worker = await house.worker(say("x"), runtime_config=SEES, media_fetcher=CARD)
        made = Net(house, worker, public, inside)
        house.media.fetcher._resolve = made.resolve
        yield made


async def test_the_public_server_of_these_tests_is_reached_at_all(net: Net) -> None:
    assert (await net.ask(net.public.url("/red.png", "public.test"))).status == 200
    assert net.public.hits == ["/red.png"]
    assert net.public.heads[0].split("\r\n")[1] == f"Host: public.test:{net.public.port}"


INSIDE_HOSTS = [
    "127.0.0.2", "127.2", "127.0.2", "2130706434", "0x7f000002", "0x7f.2", "0177.0.0.2", "017700000002", "127.0.0.2.",
    "[::ffff:127.0.0.2]", "[::ffff:7f00:2]", "[0:0:0:0:0:ffff:127.0.0.2]", "[::127.0.0.2]", "[::1]", "[64:ff9b::127.0.0.2]",
    "[2002:7f00:2::]", "localhost", "LOCALHOST", "localhost.", "x.localhost", "ip6-localhost", "metadata.google.internal",
    "user:pass@127.0.0.2", "public.test@127.0.0.2", "public.test%40127.0.0.2", "127.0.0.2#@public.test", "127.0.0.2\\@public.test",
    "１２７.0.0.2", "127。0。0。2", "①②⑦.⓪.⓪.②", "%31%32%37.0.0.2", "169.254.169.254", "10.0.0.1", "0", "0.0.0.0",
]  # fmt: skip


@pytest.mark.parametrize("host", INSIDE_HOSTS)
async def test_no_spelling_of_an_address_reaches_the_inside(net: Net, host: str) -> None:
    for kind in ("image", "video", "audio"):
        await net.refused(f"http://{host}:{net.inside.port}/secret.png", kind)
    assert net.public.heads == []


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "file://127.0.0.2/x", "FILE:///etc/passwd", "ftp://public.test/x", "gopher://127.0.0.2:6379/_INFO", "dict://public.test/x",
     "s3://bucket/x", "jar:http://public.test!/x", "netdoc:///etc/passwd", "unix:/var/run/docker.sock", "http:///x", "//public.test/x", "/etc/passwd",
     "http://public.test/\r\nX: y", "http://public.test/ x", "http://public.test:0/", "javascript:alert(1)", "blob:x", "\x00http://public.test/"],
)  # fmt: skip
async def test_no_other_scheme_is_read(net: Net, url: str) -> None:
    await net.refused(url)
    assert net.public.heads == []


@pytest.mark.parametrize(
    "addresses",
    [["127.0.0.2"], ["127.0.0.1", "127.0.0.2"], ["::ffff:127.0.0.1"], ["::1"], ["10.0.0.1"], ["169.254.169.254"], ["64:ff9b::7f00:2"], ["fe80::1%eth0"], []],
)  # fmt: skip
async def test_a_name_with_an_address_inside_is_refused_whole(net: Net, addresses: list[str]) -> None:
    net.addresses["evil.test"] = [addresses]
    await net.refused(f"http://evil.test:{net.inside.port}/secret.png")
    assert net.public.heads == []


async def test_a_second_answer_of_the_resolver_is_never_asked_for(net: Net) -> None:
    net.addresses["rebind.test"] = [["127.0.0.1"], ["127.0.0.2"]]
    answer = await net.ask(f"http://rebind.test:{net.public.port}/red.png")
    assert answer.status == 200
    assert (net.lookups, net.public.hits, net.inside.heads) == (["rebind.test"], ["/red.png"], [])


async def test_a_redirect_to_the_same_name_is_checked_by_its_own_lookup(net: Net) -> None:
    net.addresses["rebind.test"] = [["127.0.0.1"], ["127.0.0.2"]]
    net.public.answers["/hop"] = redirect("/secret.png")
    await net.refused(f"http://rebind.test:{net.public.port}/hop")
    assert net.lookups == ["rebind.test", "rebind.test"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize(
    "location",
    ["http://127.0.0.2:{port}/secret.png", "http://2130706434:{port}/secret.png", "http://[::ffff:127.0.0.2]:{port}/secret.png",
     "//127.0.0.2:{port}/secret.png", "http://inside.test:{port}/secret.png", "http://u:p@inside.test:{port}/secret.png",
     "http://localhost:{port}/secret.png", "file:///etc/passwd", "ftp://public.test/x", "data:image/png;base64,AAAA", "http://[::1", "\t"],
)  # fmt: skip
async def test_no_redirect_leads_inside(net: Net, status: int, location: str) -> None:
    net.addresses["inside.test"] = [["127.0.0.2"]]
    net.public.answers["/hop"] = redirect(location.format(port=net.inside.port), status)
    await net.refused(net.public.url("/hop", "public.test"))
    assert net.public.hits == ["/hop"]


async def test_redirects_are_followed_three_times(net: Net) -> None:
    for number in range(5):
        net.public.answers[f"/{number}"] = redirect(f"/{number + 1}")
    net.public.answers["/3"] = ok(RED)
    assert (await net.ask(net.public.url("/0", "public.test"))).status == 200
    net.worker.requests.clear()
    net.public.answers["/3"] = redirect("/4")
    net.public.heads.clear()
    message = await net.refused(net.public.url("/00", "public.test").replace("/00", "/0?again"))
    assert "404" in message
    net.public.answers["/loop"] = redirect("/loop")
    assert "more than 3 times" in await net.refused(net.public.url("/loop", "public.test"))
    assert net.public.hits.count("/loop") == 4


async def test_a_redirect_from_https_to_http_is_refused(
    net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path / "tls")
    certificate, key = authority.issue("public.test")
    served, trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=authority.path)
    served.load_cert_chain(certificate, key)
    monkeypatch.setattr(http_get, "_context", trusted)
    secure = MediaServer()
    secure.answers = {"/red.png": ok(RED), "/down": redirect(net.public.url("/red.png", "public.test"))}
    server = await asyncio.start_server(secure.handle, "127.0.0.1", 0, ssl=served)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert "from https to http" in await net.refused(f"https://public.test:{port}/down")
        assert net.public.heads == []
        net.addresses["other.test"] = [["127.0.0.1"]]  # the certificate is another one's
        assert "TLS" in await net.refused(f"https://other.test:{port}/red.png")
        assert (await net.ask(f"https://public.test:{port}/red.png")).status == 200


# -- what a server may send ----------------------------------------------------------------------------------------------


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def drip(writer: asyncio.StreamWriter) -> None:
    """A byte now and then, for ever."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


async def dripping_head(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X")
        await writer.drain()
        await asyncio.sleep(0.05)


async def silent(writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"x" * 65536)
        await writer.drain()


async def endless_chunks(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        await writer.drain()


async def endless_headers(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X-More: " + b"x" * 1000 + b"\r\n")
        await writer.drain()


async def endless_informational(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)
        await writer.drain()


BOMB = gzip.compress(b"\0" * (200 * MIB), 9)
SVG = b'<?xml version="1.0"?><!DOCTYPE svg [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]><svg xmlns="http://www.w3.org/2000/svg">&b;</svg>'
XXE = b'<!DOCTYPE svg [<!ENTITY x SYSTEM "file:///etc/passwd">]><svg>&x;</svg>'
ANSWERS: dict[str, tuple[Any, str]] = {
    "slow-drip": (drip, "not fetched within 2 s"),
    "slow-head": (dripping_head, "not fetched within 2 s"),
    "silent": (silent, "not fetched within 2 s"),
    "endless": (endless, "more than the"),
    "endless-chunks": (endless_chunks, "more than the"),
    "endless-headers": (endless_headers, "headers"),
    "endless-100": (endless_informational, "headers"),
    "announced": (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", "more than the"),
    "huge-number": (b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", "HTTP/1.1"),
    "cut": (b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n" + RED, "too early"),
    "empty": (ok(b""), "empty"),
    "no-answer": (b"", "too early"),
    "not-http": (b"220 ftp ready\r\n" * 10, "HTTP/1.1"),
    "gzip-bomb": (ok(BOMB, "Content-Encoding: gzip"), "more than the"),
    "gzip-cut": (ok(gzip.compress(RED)[:-9], "Content-Encoding: gzip"), "too early"),
    "gzip-broken": (ok(b"\x1f\x8b" + b"x" * 50, "Content-Encoding: gzip"), "cannot be read"),
    "brotli": (ok(b"x", "Content-Encoding: br"), "not asked for"),
    "zip": (ok(b"PK\x03\x04" + b"\0" * 100), "in a format that is taken"),
    "svg": (ok(SVG, "Content-Type: image/png"), "in a format that is taken"),
    "xxe": (ok(XXE, "Content-Type: image/svg+xml"), "in a format that is taken"),
    "html": (ok(b"<html>secret</html>", "Content-Type: image/png"), "in a format that is taken"),
    "sound": (ok(WAV, "Content-Type: image/png"), "in a format that is taken"),
    "hundred-megapixels": (ok(png_of(10_000, 10_000, b"x")), "10000 x 10000 pixels"),
    "four-gigapixels": (ok(png_of(65_535, 65_535, b"x")), "pixels"),
    "gif-header": (ok(b"GIF89a" + struct.pack("<HH", 65_535, 65_535) + b"\0" * 10), "pixels"),
    "png-without-size": (ok(RED[:14]), "header"),
    "status-404": (ok(b"", status="404 Not Found"), "404"),
    "status-206": (ok(RED, status="206 Partial Content"), "206"),
    "status-204": (b"HTTP/1.1 204 No Content\r\n\r\n", "204"),
    "nowhere": (b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n", "nowhere"),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_that_is_too_much_or_too_odd_is_refused(net: Net, name: str) -> None:
    answer, reason = ANSWERS[name]
    net.public.answers["/x?signature=geheim"] = answer
    before = rss_bytes()
    message = await net.refused(net.public.url("/x?signature=geheim", "public.test"), "image")
    assert reason in message
    assert "geheim" not in message
    assert rss_bytes() - before < FLAT_BYTES


DATA: dict[str, tuple[str, str]] = {
    "too-long": (data_url(b"\0" * (3 * MIB)), "exceeds the 2097152-byte limit"),
    "broken": ("data:image/png;base64," + "@" * 1000, "base64"),
    "not-base64": ("data:image/png," + "%89PNG" * 100, "base64"),
    "svg": (data_url(SVG, "image/svg+xml"), "in a format that is taken"),
    "html": (data_url(b"<html>", "text/html"), "in a format that is taken"),
    "hundred-megapixels": (data_url(png_of(10_000, 10_000, b"x")), "10000 x 10000 pixels"),
    "gzip": (data_url(BOMB), "in a format that is taken"),
    "no-comma": ("data:image/png;base64", "base64"),
    "nested": (data_url(data_url(RED).encode()), "in a format that is taken"),
}


@pytest.mark.parametrize("name", DATA)
async def test_a_data_url_is_no_way_around_the_rules(net: Net, name: str) -> None:
    url, reason = DATA[name]
    before = rss_bytes()
    message = await net.refused(url)
    assert reason in message
    assert url[30:] == "" or url[-40:] not in message
    assert rss_bytes() - before < FLAT_BYTES


async def test_hundreds_of_bombs_at_once_keep_memory_flat_and_others_served(net: Net) -> None:
    net.public.answers["/bomb"] = ok(BOMB, "Content-Encoding: gzip")
    net.public.answers["/endless"] = endless
    for number in range(20):
        net.public.answers[f"/{number}"] = net.public.answers["/bomb"]
    keep_large_blocks_apart({})  # as a frontend of its own process does
    seen: list[int] = []
    for _ in range(12):
        asked = [net.refused(net.public.url(f"/{number}", "public.test")) for number in range(20)]
        await asyncio.gather(*asked, net.refused(net.public.url("/endless", "public.test")))
        seen.append(rss_bytes())
    assert (await net.house.client.chat("hi")).status == 200
    assert max(seen[6:]) - max(seen[:6]) < FLAT_BYTES, [
        size // MIB for size in seen
    ]  # what 21 fetches hold at once is held in the first rounds
    fetcher = net.house.media.fetcher
    assert (fetcher._fetching_bytes, len(fetcher._flights), fetcher.cache.bytes) == (0, 0, 0)


async def test_slow_servers_keep_no_place_from_others(net: Net) -> None:
    net.public.answers["/slow"] = silent
    content = [
        {"type": "image_url", "image_url": {"url": net.public.url(f"/slow?{n}", "public.test")}} for n in range(32)
    ]
    for number in range(32):
        net.public.answers[f"/slow?{number}"] = silent
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    greedy = net.house.client.begin("POST", "/v1/chat/completions", body)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await net.public.came.wait()
    assert (await net.ask(net.public.url("/red.png", "public.test"))).status == 200
    assert len([path for path in net.public.hits if path.startswith("/slow")]) <= 4
    assert (await greedy.done(PATIENCE_SECONDS)).status == 400
