"""`dynamo serve --upstream`: models of another server behind our API, as processes over real sockets."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

from support.fake_upstream import USAGE, fake_upstream
from support.http_client import CHAT, DONE, exchange
from support.patience import PATIENCE_SECONDS, PROMPT_SECONDS
from support.serve_command import ServeCommand, is_running, serve_command


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


LOCAL = "hello from the guide"
REMOTE = "one two three"


async def seen(served: ServeCommand, model: str, *, stream: bool = False) -> tuple[int, str, str | None]:
    """The status of an answer, its text, and the model that served in place of the one of the request."""
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    async with exchange(served.port, CHAT, body) as found:
        reply = await found.reply()
    text = reply.text if reply.status == 200 else reply.body.decode()
    return reply.status, text, reply.headers.get("x-dynamo-fallback")


async def test_a_model_of_this_machine_and_those_of_another_server_are_served_by_one_command(tmp_path: Path) -> None:
    engine = ("local", "--engine", "guide_engine:GuideEngine", "--http-port", "0")
    async with fake_upstream() as fake:
        chain = ("--fallback", "local=big", "--fallback-after-ms", str(int(PROMPT_SECONDS * 1000 / 3)))
        flags = ("--upstream", fake.url, "--model", "big=their-big", *chain)
        with serve_command(tmp_path, *engine, *flags) as served:
            await asyncio.to_thread(served.wait_ready)
            assert '"model": "local"' in served.printed_curl()
            await asyncio.to_thread(served.wait_for, lambda: models(served) == {"local", "big"}, "both models")
            assert await seen(served, "local") == (200, LOCAL, None)
            assert await seen(served, "big") == (200, REMOTE, None)

            worker, upstream = served.pid_of("worker-1"), served.pid_of("upstream")
            os.kill(worker, signal.SIGSTOP)  # it is there, and sends nothing
            try:
                assert await seen(served, "local") == (200, REMOTE, "big")
            finally:
                os.kill(worker, signal.SIGCONT)

            served.process.send_signal(signal.SIGHUP)  # which replaces the workers, and not the other server's
            await asyncio.to_thread(served.wait_for, lambda: served.pid_of("worker-1") != worker, "another worker")
            await asyncio.to_thread(served.wait_for, lambda: not is_running(worker), "the first one to end")
            assert await asyncio.to_thread(served.ask_until_answered, "local") == LOCAL
            assert served.pid_of("upstream") == upstream
            served.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(served.wait_ended) == 0
            assert not is_running(upstream)


async def test_another_server_serves_while_a_model_of_many_is_loaded_and_where_it_cannot_be(tmp_path: Path) -> None:
    broken, hold = tmp_path / "broken", tmp_path / "hold"
    async with fake_upstream() as fake:
        (tmp_path / "serve.toml").write_text(
            f'upstream = "{fake.url}"\nmodel = ["big=their-big"]\nfallback = ["slow=big"]\nfallback-after-ms = 300\n'
            "[upstream-args]\nupstream-retries = 0\n"
            '[models.slow]\nmodel = "slow"\nengine = "guide_engine:GuideEngine"\n'
        )
        broken.touch()
        with serve_command(tmp_path, "--config", "serve.toml", "--http-port", "0") as served:
            await asyncio.to_thread(served.wait_ready)
            await asyncio.to_thread(served.wait_for, lambda: models(served) == {"slow", "big"}, "both models")
            while "this version is broken" not in served.out + served.err:  # it is being loaded, which takes too long
                assert (await seen(served, "slow")) == (200, REMOTE, "big")
            for stream in (False, True):  # and it is not loaded again at once
                status, text, model = await seen(served, "slow", stream=stream)
                assert (status, text) == (200, REMOTE)
                assert model == "big" or stream  # whose headers may have been sent with a comment before
            hold.touch()
            broken.unlink()
            while served.out.count("slow is being loaded") < 2:  # the pause after a failure is over
                status, text, _ = await seen(served, "slow")
                assert (status, text) == (200, REMOTE), f"{text}\n{(served.out + served.err)[-4000:]}"
            async with exchange(served.port, "/residency/v1") as found:
                (slow,) = (await found.reply()).json()["models"]
            assert (slow["state"], slow["running"], slow["waiting"]) == ("loading", 0, 0)
            hold.unlink()
            async with asyncio.timeout(PATIENCE_SECONDS):
                while await seen(served, "slow") != (200, LOCAL, None):
                    await asyncio.sleep(0.05)
