"""Pages of other sites at the listener of the API: nothing of it answers them, whether they read, change or upload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dynamo.runtime.base.settings import RuntimeSettings, SystemSettings
from support.asgi_client import asgi_client
from support.cases import each_case
from support.frontend_cluster import cluster

REBOUND = {"host": "evil.example:8000"}  # a name that was made to resolve to 127.0.0.1
FORM = {"host": "localhost:8000", "origin": "https://evil.example"}
FIELDS = {"content-type": "application/x-www-form-urlencoded"}
UPLOAD = {"content-type": "multipart/form-data; boundary=x"}
FILE = (
    b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}\r\n--x--\r\n'
)

ROUTES = [
    ("GET", "/"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/v1/files"),
    ("POST", "/v1/files"),
    ("GET", "/v1/files/file-1/content"),
    ("DELETE", "/v1/files/file-1"),
    ("POST", "/v1/batches/batch-1/cancel"),
    ("GET", "/v1/responses/resp_1"),
    ("DELETE", "/v1/responses/resp_1"),
    ("POST", "/v1/responses/resp_1/cancel"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/busy_threshold"),
    ("GET", "/inspect/"),
    ("GET", "/nowhere"),
]


def files(tmp_path: Path) -> dict[str, Any]:
    return {"files_dir": tmp_path / "files", "batch_model_wait_seconds": 0.0}


async def test_a_page_of_another_site_reaches_no_route(tmp_path: Path) -> None:
    async with cluster(tmp_path, http_host="127.0.0.1") as house, asgi_client(house.frontend.asgi) as client:
        await house.worker()
        for method, path in ROUTES:
            for headers in (REBOUND, FORM):
                answer = await client.call(method, path, headers=headers)
                assert (answer.status, "another site" in answer.body.decode()) == (403, True), (method, path, headers)
                assert "x-request-id" in answer.headers
        answer = await client.call("POST", "/v1/messages", headers=FORM)
        assert answer.json["error"]["type"] == "permission_error"  # in the shape of that API


async def test_clients_of_this_machine_are_answered(tmp_path: Path) -> None:
    async with cluster(tmp_path, http_host="127.0.0.1") as house, asgi_client(house.frontend.asgi) as client:
        await house.worker()
        for headers in (
            {"host": "localhost:8000"},
            {"host": "127.0.0.1:8000"},
            {"host": "[::1]:8000"},
            {"host": "localhost:8000", "origin": "http://localhost:8000"},  # the page /docs
        ):
            assert (await client.chat(headers=headers)).status == 200
            assert (await client.get("/v1/models", **headers)).status == 200


async def test_behind_a_proxy_the_names_that_are_allowed_are_answered(tmp_path: Path) -> None:
    runtime = RuntimeSettings(system=SystemSettings(allowed_hosts=("api.example",)))
    async with (
        cluster(tmp_path, http_host="127.0.0.1", runtime=runtime) as house,
        asgi_client(house.frontend.asgi) as client,
    ):
        await house.worker()
        for headers in (
            {"host": "api.example"},
            {"host": "api.example", "origin": "https://api.example"},
            {"host": "127.0.0.1:8000", "origin": "https://api.example"},  # a proxy that sends its own Host
        ):
            assert (await client.chat(headers=headers)).status == 200
        assert (await client.chat(headers=REBOUND)).status == 403


async def test_a_listener_that_is_open_to_a_network_has_any_name(tmp_path: Path) -> None:
    async with cluster(tmp_path, http_host="0.0.0.0") as house, asgi_client(house.frontend.asgi) as client:
        await house.worker()
        assert (await client.chat(headers={"host": "frontend.cluster:8000"})).status == 200
        assert (await client.chat(headers={**FORM, "host": "frontend.cluster:8000"})).status == 403


async def test_origins_of_cors_reach_the_api_and_no_admin_route(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"http_host": "127.0.0.1", "cors_origins": ("https://app.example",)}
    async with cluster(tmp_path, **settings) as house, asgi_client(house.frontend.asgi) as client:
        await house.worker()
        app = {"host": "localhost", "origin": "https://app.example"}
        assert (await client.chat(headers=app)).status == 200
        assert (await client.call("POST", "/busy_threshold", {"model": "m"}, headers=app)).status == 403
        assert (await client.chat(headers=FORM)).status == 403


async def test_an_upload_from_a_form_of_another_page_writes_nothing(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path, http_host="127.0.0.1", **files(tmp_path)) as house,
        asgi_client(house.frontend.asgi) as client,
    ):
        assert (await client.call("POST", "/v1/files", FILE, headers={**UPLOAD, **FORM})).status == 403
        assert (await client.get("/v1/files", host="localhost")).json["data"] == []
        assert (await client.call("POST", "/v1/files", FILE, headers={**UPLOAD, "host": "localhost"})).status == 200


@each_case("path", ["/v1/batches/batch-1/cancel", "/v1/responses/resp_1/cancel", "/busy_threshold", "/v1/loras"])
async def test_a_route_that_changes_something_takes_no_form_of_a_browser(tmp_path: Path, path: str) -> None:
    async with (
        cluster(tmp_path, http_host="127.0.0.1", **files(tmp_path)) as house,
        asgi_client(house.frontend.asgi) as client,
    ):
        is_admins = not path.endswith("cancel")
        for kind in (FIELDS, UPLOAD, PLAIN):
            for sign in SIGNS:
                answer = await client.call("POST", path, b"", headers={**kind, **sign, "host": "localhost"})
                assert (answer.status, "application/json" in answer.json["message"]) == (415, True), (kind, sign)
            tool = await client.call("POST", path, b"", headers={**kind, "host": "localhost"})
            assert (tool.status == 415) == (is_admins or kind is UPLOAD), kind


PLAIN = {"content-type": "text/plain"}
SIGNS: list[dict[str, str]] = [  # of a browser; none of them from a page of another site, which has an Origin
    {"accept-language": "en"},
    {"referer": "http://evil.example/"},
    {"cookie": "a=b"},
    {"sec-fetch-site": "none"},
    {"origin": "http://localhost"},  # the page of this server
]
CHAT: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}], "model": "m"}
BODIES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "m", "prompt": "hi"},
    "/v1/responses": {"model": "m", "input": "hi"},
    "/v1/messages": {**CHAT, "max_tokens": 4},
    "/api/chat": CHAT,
    "/api/generate": {"model": "m", "prompt": "hi"},
    "/api/show": {"model": "m"},
    "/tokenize": {"model": "m", "prompt": "hi"},
}
OF_TOOLS: list[dict[str, str]] = [  # what curl -d, wget --post-data, PowerShell and urllib.request write by themselves
    {**FIELDS, "user-agent": "curl/8.5.0", "accept": "*/*"},
    {
        **FIELDS,
        "user-agent": "Mozilla/5.0 (Windows NT; Windows NT 10.0; en-US) WindowsPowerShell/5.1",
        "expect": "100-continue",
    },
    {**PLAIN, "user-agent": "Go-http-client/1.1"},
    {"user-agent": "a program"},
]


async def test_a_tool_need_not_name_the_type_of_its_body(tmp_path: Path) -> None:
    async with cluster(tmp_path, http_host="127.0.0.1") as house, asgi_client(house.frontend.asgi) as client:
        await house.worker()
        for path, body in BODIES.items():
            for headers in OF_TOOLS:
                sent = {"content-type": "", **headers, "host": "localhost:8000"}
                assert (await client.call("POST", path, body, headers=sent)).status == 200, (path, headers)


@each_case("http_host", ["127.0.0.1", "0.0.0.0"])
async def test_a_simple_request_of_a_browser_reaches_no_model(tmp_path: Path, http_host: str) -> None:
    """What a page can send without a preflight: forms, fetch in the mode no-cors, sendBeacon, also by older browsers."""
    async with cluster(tmp_path, http_host=http_host) as house, asgi_client(house.frontend.asgi) as client:
        worker = await house.worker()
        local = {"host": "localhost:8000", "user-agent": "Mozilla/5.0 (X11)", "accept-language": "en"}
        browsers: list[dict[str, str]] = [
            {**local, "origin": "https://evil.example", "sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
            {**local, "origin": "null", "sec-fetch-site": "cross-site"},  # of a frame in a sandbox, or a file
            {**local, "referer": "https://evil.example/"},  # a form, before browsers sent Origin with it
        ]
        if http_host == "127.0.0.1":  # elsewhere a name that leads here now is known by --allowed-host only
            rebound = {**local, "host": "evil.example:8000"}
            browsers += [
                {**rebound, "origin": "http://evil.example:8000"},
                {**rebound, "sec-fetch-site": "same-origin"},
            ]
        for path, body in BODIES.items():
            for browser in browsers:
                for kind in (FIELDS, PLAIN, UPLOAD, {"content-type": ""}):
                    answer = await client.call("POST", path, body, headers={**kind, **browser})
                    assert answer.status in (403, 415), (path, kind, browser)
        assert worker.requests == []
