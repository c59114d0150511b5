"""The status server over real sockets."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import CannotConnect
from dynamo.runtime.base.settings import StatusLimits, SystemSettings
from dynamo.runtime.calls.health import HealthState
from dynamo.runtime.http.status_server import StatusServer
from dynamo.runtime.observe.metrics import MetricsRegistry
from support.cases import each_case

LIMITS = StatusLimits()


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def read_answer(reader: asyncio.StreamReader, *, method: str = "GET") -> Answer:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    status_line, *lines = head.strip().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    body = b"" if method == "HEAD" else await reader.readexactly(int(headers.get("content-length", 0)))
    return Answer(int(status_line.split()[1]), headers, body)


class Site:
    """A running server and a way to ask it."""

    def __init__(self, server: StatusServer, health: HealthState, metrics: MetricsRegistry) -> None:
        self.server, self.health, self.metrics = server, health, metrics

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.server.port)

    async def raw(self, data: bytes, *, method: str = "GET") -> Answer:
        reader, writer = await self.connect()
        try:
            writer.write(data)
            return await read_answer(reader, method=method)
        finally:
            writer.close()
            await writer.wait_closed()

    async def ask(self, path: str, *, method: str | None = None, body: bytes = b"") -> Answer:
        method = method or ("POST" if path.startswith("/engine/") else "GET")
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        return await self.raw(head.encode() + body, method=method)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    health, metrics = HealthState(), MetricsRegistry()
    settings = SystemSettings(port=0, host="127.0.0.1", lora_enabled=True)
    server = StatusServer(health, metrics, settings=settings)
    await server.start()
    try:
        yield Site(server, health, metrics)
    finally:
        await server.close()


@pytest.mark.parametrize("path", ["/health", "/live"])
async def test_health_turns_from_503_to_200_when_the_endpoint_with_a_payload_is_ready(site: Site, path: str) -> None:
    site.health.register("ns.backend.generate", has_payload=True)
    site.health.set_ready("ns.backend.generate", False)
    before = await site.ask(path)
    site.health.set_ready("ns.backend.generate", True)
    after = await site.ask(path)
    assert (before.status, before.json["status"], before.json["endpoints"]) == (
        503,
        "notready",
        {"generate": "notready"},
    )
    assert (after.status, after.json["status"], after.json["endpoints"]) == (200, "ready", {"generate": "ready"})
    assert set(after.json) == {"status", "uptime", "endpoints"}
    assert set(after.json["uptime"]) == {"secs", "nanos"}
    assert after.headers["content-type"] == "text/plain; charset=utf-8"


async def test_metrics_are_the_registry_and_its_callbacks(site: Site) -> None:
    site.metrics.counter("b_total", "B").inc(2)
    site.metrics.add_callback(lambda: "# TYPE a gauge\na 1\n")
    answer = await site.ask("/metrics?x=1")
    assert answer.status == 200
    text = "# TYPE a gauge\na 1\n# HELP b_total B\n# TYPE b_total counter\nb_total 2\n"
    assert answer.body.decode().startswith(text)


async def test_an_engine_route_gets_its_body_and_answers(site: Site) -> None:
    async def echo(body: Any) -> Any:
        return {"got": body}

    site.server.register_route("control/echo", echo)
    answers = [
        await site.ask("/engine/control/echo", method="POST", body=b'{"a":1}'),
        await site.ask("/engine/control/echo"),
        await site.ask("/engine/control/echo", body=b"[1]"),
    ]
    assert [(a.status, a.json) for a in answers] == [(200, {"got": {"a": 1}}), (200, {"got": {}}), (200, {"got": [1]})]


async def test_a_body_that_is_no_json_is_a_400(site: Site) -> None:
    async def echo(body: Any) -> Any:
        return body

    site.server.register_route("x", echo)
    answer = await site.ask("/engine/x", method="POST", body=b"{nope")
    assert answer.status == 400
    assert answer.json["error"] == "Invalid JSON"
    assert answer.json["message"]


async def test_an_unknown_engine_route_is_a_404_that_names_it(site: Site) -> None:
    answer = await site.ask("/engine/x")
    assert (answer.status, answer.json) == (404, {"error": "Route not found", "message": "Route /engine/x not found"})


async def test_a_route_that_raises_is_a_500_with_the_reason(site: Site) -> None:
    async def fail(body: Any) -> Any:
        raise RuntimeError("nope")

    site.server.register_route("x", fail)
    answer = await site.ask("/engine/x", method="POST")
    assert (answer.status, answer.json) == (
        500,
        {"error": "Handler error", "message": "Python callback failed: RuntimeError: nope"},
    )


async def test_a_route_whose_answer_is_no_json_is_a_500(site: Site) -> None:
    async def odd(body: Any) -> Any:
        return {"x": object()}

    site.server.register_route("x", odd)
    assert (await site.ask("/engine/x")).status == 500


async def test_a_route_that_was_taken_back_is_gone(site: Site) -> None:
    async def echo(body: Any) -> Any:
        return body

    site.server.register_route("x", echo)
    site.server.unregister_route("x")
    assert (await site.ask("/engine/x")).status == 404


async def test_lora_requests_become_updates(site: Site) -> None:
    async def load(body: Any) -> Any:
        return {"loaded": body["name"]}

    async def unload(body: Any) -> Any:
        return {"unloaded": body["lora_name"]}

    async def listed(body: Any) -> Any:
        return {"loras": []}

    site.server.register_route("update/load_lora", load)
    site.server.register_route("update/unload_lora", unload)
    site.server.register_route("update/list_loras", listed)
    answers = [
        await site.ask("/v1/loras"),
        await site.ask("/v1/loras", method="POST", body=b'{"name":"a"}'),
        await site.ask("/v1/loras/a%20b", method="DELETE"),
        await site.ask("/v1/loras", method="DELETE"),
    ]
    assert [a.status for a in answers] == [200, 200, 200, 404]
    assert [a.json for a in answers[:3]] == [{"loras": []}, {"loaded": "a"}, {"unloaded": "a b"}]


@each_case("path", ["/", "/metadata", "/healthz", "/health/", "/v2/loras"])
async def test_other_paths_are_not_found(site: Site, path: str) -> None:
    answer = await site.ask(path)
    assert (answer.status, answer.body) == (404, b"Route not found")


async def test_health_is_read_only_and_knows_head(site: Site) -> None:
    head = await site.ask("/live", method="HEAD")
    post = await site.ask("/live", method="POST")
    assert (head.status, post.status, post.headers["allow"]) == (503, 405, "GET, HEAD")
    assert int(head.headers["content-length"]) > 0


async def test_card_files_are_served_whole_by_name_only(site: Site, tmp_path: Path) -> None:
    content = bytes(range(256)) * 4000
    (tmp_path / "tokenizer.json").write_bytes(content)
    (tmp_path / "secret").write_text("no")
    paths = site.server.add_metadata_files(
        "ns", "backend", "generate", "my model", "_base", {"tokenizer.json": tmp_path / "tokenizer.json"}
    )
    path = paths["tokenizer.json"]
    assert path == "/v1/metadata/ns/backend/generate/my%20model/_base/tokenizer.json"
    good = await site.ask(path)
    assert (good.status, good.body == content) == (200, True)
    for wrong in ("secret", "../secret", "..%2Fsecret", "%2e%2e/secret", "tokenizer.json/", ""):
        answer = await site.ask(path.removesuffix("tokenizer.json") + wrong)
        assert (answer.status, answer.body) == (404, b"Not found")
    site.server.remove_metadata_files("ns", "backend", "generate", "my model", "_base")
    assert (await site.ask(path)).status == 404


async def test_a_card_file_that_vanished_is_not_found(site: Site, tmp_path: Path) -> None:
    paths = site.server.add_metadata_files("n", "c", "e", "m", "_base", {"gone": tmp_path / "gone"})
    assert (await site.ask(paths["gone"])).status == 404


async def test_pipelined_requests_are_answered_in_order_on_one_connection(site: Site) -> None:
    async def slow(body: Any) -> Any:
        await asyncio.sleep(0)
        return body

    site.server.register_route("x", slow)
    reader, writer = await site.connect()
    for n in range(3):
        body = json.dumps({"n": n}).encode()
        writer.write(b"POST /engine/x HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    answers = [await read_answer(reader) for _ in range(3)]
    assert [a.json["n"] for a in answers] == [0, 1, 2]
    writer.close()
    await writer.wait_closed()


REQUEST = b"POST /engine/x HTTP/1.1\r\nhost: localhost\r\ncontent-length: 7\r\n\r\n" + b'{"a":1}'


async def test_a_request_survives_any_split(site: Site) -> None:
    async def echo(body: Any) -> Any:
        return body

    site.server.register_route("x", echo)
    reader, writer = await site.connect()
    for cut in range(1, len(REQUEST)):
        writer.write(REQUEST[:cut])
        await asyncio.sleep(0)
        writer.write(REQUEST[cut:])
        assert (await read_answer(reader)).json == {"a": 1}
    writer.close()
    await writer.wait_closed()


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:  # the server closed while our bytes were on their way
        return b""


@each_case(
    ("data", "status"),
    [
        (b"GET /health HTTP/1.1\r\nx: " + b"a" * (8 * LIMITS.header_limit_bytes), 431),
        (b"GET /health HTTP/1.1\r\n" + b"x: a\r\n" * LIMITS.header_limit_bytes, 431),
        (b"GET /" + b"a" * (8 * LIMITS.header_limit_bytes), 431),
        (
            b"POST /engine/x HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (LIMITS.body_limit_bytes + 1),
            413,
        ),
        (b"rubbish\r\n\r\n", 400),
        (b"POST /engine/x HTTP/1.1\r\nhost: localhost\r\ncontent-length: x\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01", 400),
    ],
)
async def test_a_request_over_a_limit_or_malformed_is_refused_and_the_connection_closed(
    site: Site, data: bytes, status: int
) -> None:
    reader, writer = await site.connect()
    writer.write(data)
    answer = await until_closed(reader)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 %d " % status)
    writer.close()
    assert (await site.ask("/health")).status == 503  # others are served on


async def test_a_chunked_body_over_the_limit_is_refused(site: Site) -> None:
    reader, writer = await site.connect()
    writer.write(b"POST /engine/x HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
    chunk = b"100000\r\n" + b"a" * 0x100000 + b"\r\n"
    for _ in range(LIMITS.body_limit_bytes // 0x100000 + 2):
        writer.write(chunk)
    answer = await until_closed(reader)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 413 ")
    writer.close()


async def test_connection_close_is_honoured(site: Site) -> None:
    reader, writer = await site.connect()
    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    assert b"connection: close" in await reader.read()
    writer.close()
    await writer.wait_closed()


async def test_close_refuses_new_connections_and_cancels_the_route_under_way() -> None:
    entered, ended = asyncio.Event(), asyncio.Event()

    async def hang(body: Any) -> Any:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    server = StatusServer(HealthState(), MetricsRegistry(), settings=SystemSettings(port=0, host="127.0.0.1"))
    await server.start()
    server.register_route("x", hang)
    port = server.port
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /engine/x HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await entered.wait()
    await server.close()
    assert ended.is_set()
    with pytest.raises(OSError):  # noqa: PT011 - refused; the text is the system's
        await asyncio.open_connection("127.0.0.1", port)
    assert server.url is None
    writer.close()


async def test_a_route_goes_on_when_its_caller_leaves() -> None:
    entered, may_end, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def patient(body: Any) -> Any:
        entered.set()
        await may_end.wait()
        ended.set()
        return {}

    server = StatusServer(HealthState(), MetricsRegistry(), settings=SystemSettings(port=0, host="127.0.0.1"))
    await server.start()
    server.register_route("x", patient)
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /engine/x HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await entered.wait()
    writer.close()
    await writer.wait_closed()
    may_end.set()
    await ended.wait()
    await server.close()


async def test_a_taken_port_is_a_clear_error(site: Site) -> None:
    settings = SystemSettings(port=site.server.port, host="127.0.0.1")
    second = StatusServer(HealthState(), MetricsRegistry(), settings=settings)
    with pytest.raises(CannotConnect, match=rf"127.0.0.1:{site.server.port}.*DYN_SYSTEM_PORT"):
        await second.start()


async def test_the_url_names_an_address_others_can_reach() -> None:
    settings = SystemSettings(port=0, host="0.0.0.0")
    server = StatusServer(HealthState(), MetricsRegistry(), settings=settings, advertised_host="10.1.2.3")
    await server.start()
    try:
        assert server.url == f"http://10.1.2.3:{server.port}"
    finally:
        await server.close()


# -- engine routes and the admin port --------------------------------------------------------------------------------------


async def echo(body: Any) -> Any:
    return {"got": body}


@asynccontextmanager
async def admin_site(**settings: Any) -> AsyncIterator[Site]:
    health, metrics = HealthState(), MetricsRegistry()
    server = StatusServer(health, metrics, settings=SystemSettings(port=0, lora_enabled=True, **settings))
    server.register_route("control/echo", echo)
    server.register_route("update/list_loras", echo)
    await server.start()
    try:
        yield Site(server, health, metrics)
    finally:
        await server.close()


async def at_admin(site: Site, path: str, method: str = "GET") -> int:
    assert site.server.admin_url is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", int(site.server.admin_url.rsplit(":", 1)[1]))
    try:
        writer.write(f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n".encode())
        return (await read_answer(reader)).status
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_with_an_admin_port_the_engine_routes_are_there_and_nowhere_else(host: str) -> None:
    async with admin_site(host=host, admin_port=0) as site:
        assert site.server.admin_url != site.server.url
        for path, method in (("/engine/control/echo", "POST"), ("/v1/loras", "GET")):
            answer = await site.ask(path, method=method)
            assert (answer.status, "DYN_ADMIN_PORT" in answer.json["message"]) == (404, True)
            assert await at_admin(site, path, method) == 200
        assert (await site.ask("/metrics")).status == 200
        assert await at_admin(site, "/metrics") == 404


async def test_a_status_server_that_is_open_to_a_network_serves_no_engine_routes_and_names_the_setting() -> None:
    async with admin_site(host="0.0.0.0") as site:
        for path in ("/engine/control/echo", "/v1/loras"):
            answer = await site.ask(path)
            assert (answer.status, "DYN_ADMIN_PORT" in answer.json["message"]) == (404, True)
        assert (await site.ask("/metrics")).status == 200
        assert site.server.admin_url is None


async def test_without_an_admin_port_a_status_server_on_loopback_serves_the_engine_routes() -> None:
    async with admin_site(host="localhost") as site:
        assert (await site.ask("/engine/control/echo")).json == {"got": {}}
        assert site.server.admin_url == site.server.url


async def test_a_page_of_another_site_reaches_no_engine_route(site: Site) -> None:
    site.server.register_route("control/echo", echo)
    for line in ("host: evil.example", "host: localhost\r\norigin: https://evil.example"):
        for path in ("/engine/control/echo", "/v1/loras"):
            answer = await site.raw(f"POST {path} HTTP/1.1\r\n{line}\r\ncontent-length: 0\r\n\r\n".encode())
            assert (answer.status, "another site" in answer.json["message"]) == (403, True)
        for path in ("/health", "/metrics", "/v1/metadata/ns/c/e/m/_base/tokenizer.json"):
            assert (await site.raw(f"GET {path} HTTP/1.1\r\n{line}\r\n\r\n".encode())).status == 403


@each_case("method", ["GET", "HEAD", "PUT", "DELETE"])
async def test_an_engine_route_answers_post_only(site: Site, method: str) -> None:
    called: list[object] = []

    async def sleep(body: object) -> object:
        called.append(body)
        return {}

    site.server.register_route("control/sleep", sleep)
    answer = await site.ask(
        "/engine/control/sleep", method=method
    )  # <img src="http://127.0.0.1:9090/engine/control/sleep">
    assert (answer.status, answer.headers["allow"], called) == (405, "POST", [])
    assert (await site.ask("/engine/control/sleep")).status == 200
    assert called == [{}]


@each_case("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
async def test_an_engine_route_takes_no_form(site: Site, kind: str) -> None:
    site.server.register_route("control/echo", echo)
    for path in ("/engine/control/echo", "/v1/loras"):
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\ncontent-length: 2\r\n\r\n{{}}"
        answer = await site.raw(head.encode())
        assert (answer.status, "application/json" in answer.json["message"]) == (415, True)


async def test_a_name_that_is_allowed_reaches_the_engine_routes() -> None:
    async with admin_site(host="127.0.0.1", allowed_hosts=("worker.example",)) as site:
        head = "POST /engine/control/echo HTTP/1.1\r\nhost: worker.example\r\ncontent-length: 0\r\n\r\n"
        assert (await site.raw(head.encode())).status == 200


async def test_an_admin_port_that_is_taken_is_named_and_leaves_nothing_open(site: Site) -> None:
    taken = SystemSettings(port=0, host="127.0.0.1", admin_port=site.server.port)
    server = StatusServer(HealthState(), MetricsRegistry(), settings=taken)
    with pytest.raises(CannotConnect, match="DYN_ADMIN_PORT"):
        await server.start()
    assert server.url is None


async def test_an_admin_address_that_is_open_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with admin_site(admin_port=0, admin_host="0.0.0.0"):
        warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(warnings) == 1
        assert "DYN_ADMIN_HOST" in warnings[0]


@each_case(
    ("env", "found"),
    [
        ({}, ("127.0.0.1", None)),
        ({"DYN_ADMIN_PORT": "0"}, ("127.0.0.1", 0)),
        ({"DYN_ADMIN_PORT": "9", "DYN_ADMIN_HOST": "::1"}, ("::1", 9)),
        ({"DYN_ADMIN_PORT": "70000"}, ("127.0.0.1", None)),
    ],
)
def test_the_admin_address_comes_from_the_environment(env: dict[str, str], found: tuple[str, int | None]) -> None:
    settings = SystemSettings.from_env(env)
    assert (settings.admin_host, settings.admin_port) == found


@each_case(
    ("env", "port", "starting"),
    [
        ({}, -1, None),
        ({"DYN_SYSTEM_PORT": "0"}, 0, None),
        ({"DYN_SYSTEM_PORT": "70000"}, -1, None),
        ({"DYN_SYSTEM_PORT": "-7"}, -1, None),
        ({"DYN_SYSTEM_STARTING_HEALTH_STATUS": "notready"}, -1, False),
        ({"DYN_SYSTEM_STARTING_HEALTH_STATUS": "ready"}, -1, True),
        ({"DYN_SYSTEM_STARTING_HEALTH_STATUS": "maybe"}, -1, None),
    ],
)
def test_system_settings_from_the_environment(env: dict[str, str], port: int, starting: bool | None) -> None:
    settings = SystemSettings.from_env(env)
    assert (settings.port, settings.starting_ready, settings.enabled) == (port, starting, port >= 0)
