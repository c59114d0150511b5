"""The client of etcd against a server that this test plays."""

from __future__ import annotations

import asyncio

from aiohttp import web

from dynamo.runtime.base.settings import EtcdSettings
from dynamo.runtime.discovery.etcd.client import EtcdClient

ATTEMPT_SECONDS = 0.2


async def test_a_password_may_take_longer_to_check_than_any_other_request() -> None:
    asked = 0

    async def authenticate(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        await asyncio.sleep(ATTEMPT_SECONDS * 2)
        return web.json_response({"token": "t"})

    async def grant(request: web.Request) -> web.Response:
        return web.json_response(
            {"ID": "7", "TTL": "10"}, status=200 if request.headers["Authorization"] == "t" else 401
        )

    app = web.Application()
    app.add_routes([web.post("/v3/auth/authenticate", authenticate), web.post("/v3/lease/grant", grant)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    settings = EtcdSettings(endpoints=f"http://127.0.0.1:{runner.addresses[0][1]}", username="u", password="p")
    client = EtcdClient(settings, attempt_seconds=ATTEMPT_SECONDS)
    client.open()
    try:
        assert await asyncio.gather(client.grant(7, 10.0), client.grant(7, 10.0)) == [10.0, 10.0]
        assert asked == 1
    finally:
        await client.close()
        await runner.cleanup()
