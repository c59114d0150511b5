"""Slashes too many in a path go around no check: keys, roles, groups of routes, origins, names of hosts, the admin port."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dynamo.frontend.http.routes import GuardedRoute
from support.access import bearer, key, write_keys
from support.asgi_client import AsgiClient, asgi_client
from support.frontend_cluster import cluster, routes_of

RECORDS = (
    key("good"),
    key("metrics", routes=["metrics"]),
    key("viewer", role="viewer"),
    key("operator", role="operator"),
    key("boss", role="admin"),
)
CALLERS = [{}, *[bearer(record.id) for record in RECORDS]]
HERE = {"host": "localhost"}
OTHER_SITE = {"host": "localhost", "origin": "https://evil.example"}
REBOUND = {"host": "evil.example"}
SITES: dict[str, dict[str, Any]] = {
    "keys of clients": {"http_host": "127.0.0.1"},
    "keys of clients, open to a network": {"http_host": "0.0.0.0"},
    "keys of clients, an admin port": {"http_host": "127.0.0.1", "admin_port": 0},
    "keys of admins": {"http_host": "127.0.0.1"},
    "no keys": {"http_host": "127.0.0.1"},
}


def spellings(path: str) -> list[str]:
    """A path with slashes too many, some of them encoded."""
    return [f"/{path}", f"{path}//", path.replace("/", "///"), f"/%2F/{path}%2F"]


async def refusals(client: AsgiClient, route: GuardedRoute, path: str, headers: dict[str, str]) -> list[str]:
    """By which check each caller is refused at one spelling of a path; "" where none does so."""
    found = []
    for caller in CALLERS:
        exchange = client.begin(sorted(route.methods or ())[0], path, {}, headers=headers | caller)
        await exchange.until(lambda it: it.status is not None)
        exchange.disconnect()
        if not exchange.is_complete:  # a view that is streamed
            exchange.task.cancel()
        is_elsewhere = exchange.status == 404 and b" is not here: " in exchange.body
        is_refused = is_elsewhere or exchange.status in (401, 403)
        found.append(str(exchange.status) if is_refused else "")
    return found


@pytest.mark.parametrize("site", SITES)
async def test_slashes_too_many_go_around_no_check_of_any_route(tmp_path: Path, site: str) -> None:
    settings: dict[str, Any] = {**SITES[site], "root_path": "/x", "files_dir": tmp_path / "files", "autoscale": True}
    if site != "no keys":
        name = "admin_keys_file" if site == "keys of admins" else "keys_file"
        records = RECORDS[-1:] if site == "keys of admins" else RECORDS
        settings[name] = str(write_keys(tmp_path / "keys.toml", *records))
    refused, served = 0, 0
    async with cluster(tmp_path, **settings) as house:
        await house.worker()
        for app, prefixes in ((house.frontend.asgi, ["", "//x/", "/x"]), (house.frontend.admin_asgi, [""])):
            async with asgi_client(app) as client:
                for route in routes_of(app):
                    path = re.sub(r"{[^}]*}", "some", route.path)
                    for headers in (HERE, OTHER_SITE, REBOUND):
                        plain = await refusals(client, route, path, headers)
                        refused, served = refused + len(plain) - plain.count(""), served + plain.count("")
                        for spelling in [*spellings(path), *[prefix + path for prefix in prefixes]]:
                            assert (spelling, await refusals(client, route, spelling, headers)) == (spelling, plain)
    assert min(refused, served) > 40  # or nothing was checked
