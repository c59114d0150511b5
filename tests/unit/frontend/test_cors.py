"""Pages of other origins: what browsers may do on every route, with keys and without, and the id on every answer."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from dynamo.frontend.app import Frontend
from support.access import bearer, closed_cluster, key
from support.frontend_cluster import Cluster, cluster, routes_of

ORIGIN = "https://app.example"
PLACES = {
    "{model:path}": "a/b",
    "{response_id}": "resp_1",
    "{file_id}": "file-1",
    "{batch_id}": "batch_1",
    "{name:path}": "x",
    "{rest:path}": "x",
}


def opened(tmp_path: Path, *, with_keys: bool, **settings: Any) -> AbstractAsyncContextManager[Cluster]:
    settings |= {"files_dir": tmp_path / "files"}
    return closed_cluster(tmp_path, key("k"), **settings) if with_keys else cluster(tmp_path, **settings)


def table(frontend: Frontend) -> list[tuple[str, frozenset[str]]]:
    """The paths of a frontend without CORS, and their methods."""
    found = []
    for route in routes_of(frontend.asgi):
        path = route.path
        for name, value in PLACES.items():
            path = path.replace(name, value)
        found.append((path.split("{")[0], frozenset(route.methods or ()) - {"HEAD"}))
    return found


def preflight(method: str, origin: str = ORIGIN) -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }


@pytest.mark.parametrize("with_keys", [False, True])
async def test_a_preflight_is_a_204_without_a_key_on_every_route(tmp_path: Path, with_keys: bool) -> None:
    async with opened(tmp_path, with_keys=with_keys) as found:
        routes = table(found.frontend)
    assert {"/v1/chat/completions", "/v1/files", "/v1/files/file-1/content", "/v1/batches/batch_1/cancel"} <= {
        path for path, _ in routes
    }
    async with opened(tmp_path, with_keys=with_keys, cors_origins=(ORIGIN,)) as found:
        for path, methods in routes:
            for method in methods:
                answer = await found.client.call("OPTIONS", path, headers=preflight(method))
                assert (answer.status, answer.body) == (204, b""), (method, path)
                headers = answer.headers
                assert headers["access-control-allow-origin"] == ORIGIN
                assert "Origin" in headers["vary"].split(", ")
                assert method in headers["access-control-allow-methods"]
                assert "authorization" in headers["access-control-allow-headers"]
                assert headers["access-control-allow-credentials"] == "true"
                assert headers["x-request-id"]
                assert "content-length" not in headers


async def test_a_preflight_needs_no_key_where_no_origin_is_let_in_either(tmp_path: Path) -> None:
    async with opened(tmp_path, with_keys=True) as found:
        for path in ("/v1/chat/completions", "/v1/models", "/nothing"):
            answer = await found.client.call("OPTIONS", path, headers=preflight("POST"))
            assert (answer.status, "www-authenticate" in answer.headers) == (403, False), path
            assert "access-control-allow-origin" not in answer.headers
            plain = await found.client.call("OPTIONS", path)
            assert plain.status == 401, path
        refused = "dynamo_frontend_key_rejections_total"
        assert found.metric(refused, key_id="unknown", limit="missing_api_key") == 3


@pytest.mark.parametrize("with_keys", [False, True])
async def test_every_answer_has_its_id_and_tells_the_origin(tmp_path: Path, with_keys: bool) -> None:
    async with opened(tmp_path, with_keys=with_keys) as found:
        routes = table(found.frontend)
    async with opened(tmp_path, with_keys=with_keys, cors_origins=(ORIGIN,)) as found:
        await found.worker()
        for headers in ({}, bearer("k")):
            for path, methods in [*routes, ("/nothing", frozenset({"GET"})), ("/v1/nothing", frozenset({"POST"}))]:
                for method in sorted(methods | {"PUT"}):
                    body: dict[str, Any] | None = {} if method == "POST" else None
                    answer = await found.client.call(method, path, body, headers={**headers, "origin": ORIGIN})
                    where = (method, path, answer.status)
                    assert answer.headers["x-request-id"], where
                    assert answer.headers["access-control-allow-origin"] == ORIGIN, where
                    assert "x-request-id" in answer.headers["access-control-expose-headers"], where
                    assert "x-ratelimit-remaining-tokens" in answer.headers["access-control-expose-headers"], where
                    if path.startswith("/v1/messages"):
                        assert answer.status == 405 or answer.headers["request-id"], where
        own = await found.client.call(
            "GET", "/v1/models", headers={**bearer("k"), "x-request-id": "mine", "origin": ORIGIN}
        )
        assert own.headers["x-request-id"] == "mine"


async def test_other_origins_and_other_methods_are_not_let_in(tmp_path: Path) -> None:
    async with opened(tmp_path, with_keys=True, cors_origins=(ORIGIN,)) as found:
        for headers in (preflight("POST", "https://evil.example"), preflight("PATCH")):
            refused = await found.client.call("OPTIONS", "/v1/files", headers=headers)
            assert refused.status == 400
            assert refused.headers["x-request-id"]
        strange = await found.client.call(
            "GET", "/v1/models", headers={**bearer("k"), "origin": "https://evil.example"}
        )
        assert strange.status == 403
        assert "access-control-allow-origin" not in strange.headers


async def test_any_origin_is_let_in_without_credentials(tmp_path: Path) -> None:
    async with opened(tmp_path, with_keys=True, cors_origins=("*",)) as found:
        answer = await found.client.call("OPTIONS", "/v1/files", headers=preflight("POST"))
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (204, "*")
        assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("with_keys", [False, True])
async def test_it_is_off_by_default(tmp_path: Path, with_keys: bool) -> None:
    async with opened(tmp_path, with_keys=with_keys) as found:
        answer = await found.client.call("OPTIONS", "/v1/models", headers=preflight("GET"))
        assert answer.status == 403
        assert not [name for name in answer.headers if name.startswith("access-control")]
