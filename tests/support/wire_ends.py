"""The two ends of a request plane as processes that do as they are told: `python wire_ends.py worker` or `caller`.

What an end lives through is a line on its standard output. A caller reads what to do from its standard input.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from dynamo.errors import DynamoException
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import Handler, Instance, RequestPlaneClient, ResponseSink

PATH = "1f/ns/c/e"
INSTANCE_ID = 31

Note = Callable[[str], None]


def handler(note: Note, die: Callable[[], None]) -> Handler:
    """Say as many tokens as the body asks for; then die, or wait until nobody listens any more."""

    async def handle(body: Any, context: Context, sink: ResponseSink) -> None:
        for _ in range(body["tokens"]):
            sink.send_tokens([1])
        await asyncio.sleep(0)  # what a loop turn says is written at the next one
        await asyncio.sleep(0)
        note(f"began {body['name']}")
        if body["dies"]:
            die()
        await context.async_killed_or_stopped()
        note(f"{'killed' if context.is_killed() else 'stopped'} {body['name']}")

    return handle


async def call(
    client: RequestPlaneClient, instance: Instance, body: dict[str, Any], note: Note, opened: asyncio.Event
) -> None:
    """One request: how many tokens came, and how it ended. `opened` is set when its stream is."""
    tokens = 0
    try:
        stream = await client.open(instance, body, Context())
        opened.set()
        while items := await stream.next_batch():
            tokens += sum(len(item.token_ids) for item in items)
        note(f"{body['name']}: {tokens} tokens, ended")
    except DynamoException as error:
        note(f"{body['name']}: {tokens} tokens, {type(error).__name__}")
    finally:
        opened.set()


def tell(line: str) -> None:
    print(line, flush=True)


async def work() -> None:
    from dynamo.runtime.calls.request_plane.listener import Listener

    listener = Listener("127.0.0.1")
    listener.register(PATH, handler(tell, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    await listener.start()
    tell(f"listens at {listener.address}")
    await asyncio.Event().wait()


async def ask() -> None:
    from dynamo.runtime.calls.request_plane.mux import MuxClient, connection

    connection.PING_SECONDS = 0.1  # type: ignore[misc]
    client = MuxClient()
    calls: list[asyncio.Task[None]] = []
    while line := await asyncio.to_thread(sys.stdin.readline):
        match line.split():
            case ["work", "with", address]:
                transport = {"tcp": f"{address}/{PATH}"}
                instance = Instance(
                    namespace="ns", component="c", endpoint="e", instance_id=INSTANCE_ID, transport=transport, mux=1
                )
                tell("ready")
            case ["call", name, tokens, end]:
                body = {"name": name, "tokens": int(tokens), "dies": end == "dies"}
                opened = asyncio.Event()
                calls.append(asyncio.create_task(call(client, instance, body, tell, opened)))
                await opened.wait()
                await asyncio.sleep(0)  # it is written at the next turn of the loop
                tell(f"called {name}")
            case ["patience", seconds]:
                connection.SILENCE_SECONDS = float(seconds)  # type: ignore[misc]
                tell("waits")
            case ["leave"]:
                await client.close()
                await asyncio.wait(calls)
                tell("left")
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(work() if sys.argv[1] == "worker" else ask())
