"""What browsers get: the page at `/`, the reference at `/docs`, and calls from pages of other origins."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo.frontend.args import parse_args
from dynamo.frontend.http.server import HttpServer
from support.cases import each_case
from support.frontend_cluster import cluster, routes_of, say
from support.http_client import CHAT, Reply, ask

BROWSER = {"Accept": "text/html,application/xhtml+xml"}
PAGE = "https://app.example.com"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def served(tmp_path: Path, model: str | None = "m", **settings: Any) -> AsyncIterator[int]:
    async with cluster(tmp_path, http_host="127.0.0.1", http_port=0, **settings) as house:
        if model is not None:
            await house.worker(say("hello"), model=model)
        server = HttpServer(house.frontend)
        await server.start()
        try:
            yield server.port
        finally:
            await server.close()


async def get(port: int, path: str, **headers: str) -> Reply:
    return await ask(port, path, method="GET", headers=headers)


async def test_the_front_page_names_the_models_and_a_request_that_works(tmp_path: Path) -> None:
    async with served(tmp_path) as port:
        plain = await get(port, "/")
        assert (plain.status, plain.headers["content-type"]) == (200, "text/plain; charset=utf-8")
        text = plain.body.decode()
        assert text.startswith("models: m\n")
        body = json.loads(re.findall(r"-d '(.*)'$", text, re.MULTILINE)[0])
        assert (await ask(port, CHAT, body)).json()["choices"][0]["message"]["content"] == "hello"
        page = await get(port, "/", **BROWSER)
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in page.headers["content-security-policy"]
        for link in re.findall(r'href="([^"]+)"', page.body.decode()):
            assert (await get(port, link)).status == 200


async def test_a_front_page_without_models_says_so(tmp_path: Path) -> None:
    async with served(tmp_path, None) as port:
        assert b"models: none yet" in (await get(port, "/")).body
        assert b"no worker has registered" in (await get(port, "/", **BROWSER)).body


async def test_the_name_of_a_model_is_no_markup(tmp_path: Path) -> None:
    async with served(tmp_path, "<script>alert(1)</script>") as port:
        page = (await get(port, "/", **BROWSER, Host="<b>evil</b>")).body.decode()
        assert "<script>" not in page
        assert "<b>" not in page


async def test_the_reference_and_its_script_come_from_here(tmp_path: Path) -> None:
    async with served(tmp_path) as port:
        page = (await get(port, "/docs")).body.decode()
        (script,) = re.findall(r'src="([^"]+)"', page)
        (document,) = re.findall(r'spec-url="([^"]+)"', page)
        assert "//" not in script + document
        found = await get(port, script)
        assert (found.status, found.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
        assert b"RapiDoc" in found.body[:200]
        assert "/v1/chat/completions" in (await get(port, document)).json()["paths"]


# -- other origins --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_page_of_a_named_origin_may_call_and_read_the_answer(tmp_path: Path, stream: bool) -> None:
    async with served(tmp_path, cors_origins=(PAGE,)) as port:
        asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-any"}
        before = await ask(port, CHAT, method="OPTIONS", headers=asked)
        assert (before.status, before.headers["access-control-allow-origin"]) == (204, PAGE)
        assert before.headers["x-request-id"]
        answer = await ask(port, CHAT, {**BODY, "stream": stream}, headers={"Origin": PAGE})
        assert (answer.status, answer.text) == (200, "hello")
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert answer.headers["vary"] == "Origin"


async def test_a_page_of_another_origin_may_not_and_without_the_setting_no_page_may(tmp_path: Path) -> None:
    async with served(tmp_path, cors_origins=(PAGE,)) as port:
        assert (
            "access-control-allow-origin" not in (await ask(port, CHAT, BODY, headers={"Origin": "http://x"})).headers
        )
    async with served(tmp_path) as port:
        assert "access-control-allow-origin" not in (await ask(port, CHAT, BODY, headers={"Origin": PAGE})).headers


async def test_any_origin_gets_no_credentials(tmp_path: Path) -> None:
    async with served(tmp_path, cors_origins=("*",)) as port:
        headers = (await ask(port, CHAT, BODY, headers={"Origin": "http://x"})).headers
        assert headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in headers


def test_origins_come_from_flags_or_the_environment() -> None:
    assert parse_args(["--cors-origin", PAGE, "--cors-origin", "http://localhost:3000"], {}).cors_origins == (
        PAGE,
        "http://localhost:3000",
    )
    assert parse_args([], {"DYN_CORS_ORIGINS": f"{PAGE}, http://b"}).cors_origins == (PAGE, "http://b")


@each_case("origin", ["app.example.com", "https://app.example.com/", "ftp://x", "https://"])
def test_what_is_not_an_origin_is_refused(origin: str, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, env in ((["--cors-origin", origin], {}), ([], {"DYN_CORS_ORIGINS": origin})):
        with pytest.raises(SystemExit) as leaving:
            parse_args(argv, env)
        assert leaving.value.code == 2
        assert "is not an origin; write for example" in capsys.readouterr().err


NOT_DESCRIBED = {
    "/", "/docs", "/docs/rapidoc-min.js",  # pages
    "/classify", "/pooling", "/rerank", "/score",  # other names of routes below /v1
    "/autoscale/v1", "/autoscale/v1/{}",  # of autoscalers: docs/scaling.md
    "/v1/images/variations", "/v1/videos/characters", "/v1/videos/edits", "/v1/videos/extensions", "/v1/videos/stream",
    "/v1/videos/{}/content", "/v1/videos/{}/remix",  # not built
}  # fmt: skip


async def test_every_route_of_clients_is_in_the_document_or_named_here(tmp_path: Path) -> None:
    async with cluster(tmp_path, files_dir=tmp_path / "files", autoscale=True) as house:
        document = (await house.client.get("/openapi.json")).json
        routes = [route for route in routes_of(house.frontend.asgi) if not route.is_admin]
    paths = {re.sub(r"{[^}]*}", "{}", route.path) for route in routes}
    assert paths - {re.sub(r"{[^}]*}", "{}", path) for path in document["paths"]} == NOT_DESCRIBED
