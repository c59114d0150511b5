"""`dynamo serve --upstream`: models of another server behind our API, as processes over real sockets."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

from support.fake_upstream import USAGE, fake_upstream
from support.http_client import CHAT, DONE, exchange
from support.patience import PATIENCE_SECONDS, PROMPT_SECONDS
from support.serve_command import ServeCommand, serve_command


def models(served: ServeCommand) -> set[str]:
    with urllib.request.urlopen(f"{served.url}/v1/models", timeout=PATIENCE_SECONDS) as answer:
        return {model["id"] for model in json.load(answer)["data"]}


async def test_the_models_of_another_server_are_served_here(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-secret")
    flags = [
        "--http-port",
        "0",
        "--upstream-key-file",
        "key",
        "--model",
        "big=their-big",
        "--model",
        "small=their-small",
    ]
    async with fake_upstream(key="sk-secret") as fake:
        with serve_command(tmp_path, "--upstream", fake.url, *flags) as served:
            await asyncio.to_thread(served.wait_ready)
            await asyncio.to_thread(served.wait_for, lambda: models(served) == {"big", "small"}, "both models")
            for name in ("big", "small"):
                body: dict[str, Any] = {"model": name, "messages": [{"role": "user", "content": "hi"}], "stream": True}
                body["stream_options"] = {"include_usage": True}
                async with exchange(served.port, CHAT, body) as found:
                    reply = await found.reply()
                assert (reply.status, reply.text) == (200, "one two three")
                assert {event["model"] for event in reply.events} == {name}
                usage = reply.events[-1]["usage"]
                assert {member: usage[member] for member in USAGE} == USAGE
            assert [body["model"] for body in fake.bodies] == ["their-big", "their-small"]

            fake.behaviour = "stall"
            async with exchange(served.port, CHAT, {**body, "model": "big"}) as found:
                assert await found.head() == 200
                assert await found.event() != DONE
                found.leave()
                async with asyncio.timeout(PROMPT_SECONDS):
                    await fake.left.wait()

            fake.behaviour = 404
            async with exchange(served.port, CHAT, {**body, "model": "big"}) as found:
                reply = await found.reply()
            assert (reply.status, "upstream says 404" in reply.body.decode()) == (404, True)

            await fake.die()
            await asyncio.to_thread(served.wait_for, lambda: not models(served), "no model to be ready")
            assert "secret" not in served.out + served.err
