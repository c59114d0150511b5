"""Every kind of failure of an engine has its status and its text, the same for whoever asked in whatever way."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from support.http_client import CHAT, COMPLETIONS, ask, chat, exchange, script
from support.processes import Stack, until


class Row(NamedTuple):
    """What the engine does, and what its client is told."""

    step: list[Any]
    status: int
    message: str
    phrase: str  # `type` of the flat body
    type: str  # `type` of the nested object, and of an event
    event: tuple[str, int] | None = None  # (message, code) of the event where they are not those of the body


def bad(kind: str | int, message: str) -> list[Any]:
    return ["raise", kind, message]


INTERNAL = (500, "Internal server error", "Internal Server Error", "internal_server_error")
UNAVAILABLE = (503, "Service temporarily unavailable", "Service Unavailable", "service_unavailable")
TIMEOUT = (504, "Request deadline exceeded", "Gateway Timeout", "gateway_timeout")
OVERLOADED = (529, "Service temporarily overloaded", "Overloaded", "overloaded")
CANCELLED = (499, "Request cancelled", "Client Closed Request", "request_cancelled")

ROWS = {
    "InvalidArgument": Row(
        bad("InvalidArgument", 'no "such" thing: ü'),
        *(400, 'no "such" thing: ü', "Bad Request", "invalid_request_error"),
    ),
    "Unknown": Row(bad("Unknown", "secret"), *INTERNAL),
    "DynamoException": Row(bad("DynamoException", "secret"), *INTERNAL),
    "RuntimeError": Row(bad("RuntimeError", "secret"), *INTERNAL),
    "ValueError": Row(bad("ValueError", "secret"), *INTERNAL),
    "CannotConnect": Row(bad("CannotConnect", "secret"), *UNAVAILABLE),
    "Disconnected": Row(bad("Disconnected", "secret"), *UNAVAILABLE),
    "EngineShutdown": Row(bad("EngineShutdown", "secret"), *UNAVAILABLE),
    "StreamIncomplete": Row(bad("StreamIncomplete", "secret"), *UNAVAILABLE),
    "WorkerUnavailable": Row(bad("WorkerUnavailable", "secret"), *UNAVAILABLE),
    "no terminal chunk": Row(["return"], *UNAVAILABLE),
    "cancelled by nobody": Row(["end", "cancelled"], *UNAVAILABLE),
    "ConnectionTimeout": Row(bad("ConnectionTimeout", "secret"), *TIMEOUT),
    "ResponseTimeout": Row(bad("ResponseTimeout", "secret"), *TIMEOUT),
    "TimeoutError": Row(bad("TimeoutError", "secret"), *TIMEOUT),
    "Cancelled": Row(bad("Cancelled", "secret"), *CANCELLED),
    "Overloaded": Row(bad("Overloaded", "secret"), *OVERLOADED),
    "error finish": Row(["end", {"error": "secret"}], *INTERNAL),
    "error finish in words": Row(["end", "error: secret"], *INTERNAL),
    "bare error finish": Row(["end", "error"], *INTERNAL),
    "HTTP 422": Row(bad(422, "too odd"), 422, "too odd", "Unprocessable Entity", "invalid_request_error"),
    "HTTP 404": Row(bad(404, "no adapter"), 404, "no adapter", "Not Found", "not_found_error"),
    "HTTP 415": Row(bad(415, "no video"), 415, "no video", "Unsupported Media Type", "invalid_request_error"),
    "HTTP 429": Row(bad(429, "slow down"), 429, "slow down", "Too Many Requests", "rate_limit_error"),
    "HTTP 499": Row(bad(499, "secret"), *CANCELLED),
    "HTTP 500": Row(bad(500, "secret"), *INTERNAL),
    "HTTP 502": Row(bad(502, "secret"), *INTERNAL, ("Bad gateway", 502)),
    "HTTP 503": Row(bad(503, "secret"), *UNAVAILABLE),
    "HTTP 529": Row(bad(529, "secret"), *OVERLOADED),
    "no chunk": Row(["yield", "rubbish"], *INTERNAL),
    "negative token": Row(["yield", {"token_ids": [-1], "index": 0}], *INTERNAL),
    "no such choice": Row(["yield", {"token_ids": [1], "index": 7}], *INTERNAL),
}

EVERY_ROW = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())


def check_body(row: Row, body: Any) -> None:
    assert (body["code"], body["message"], body["type"]) == (row.status, row.message, row.phrase)
    asserted = row.event[1] if row.event else row.status
    assert body.get("details") == ({"backend_status": asserted} if row.status == 500 else None)
    assert (body["error"]["message"], body["error"]["type"]) == (row.message, row.type)


@EVERY_ROW
@pytest.mark.parametrize("streamed", [False, True], ids=["unary", "streamed"])
async def test_before_the_first_token_it_is_a_status(stack: Stack, tag: str, row: Row, streamed: bool) -> None:
    reply = await ask(stack.port, CHAT, chat("scripted", stream=streamed), headers=script(row.step, tag=tag))
    assert (reply.status, reply.headers["content-type"]) == (row.status, "application/json")
    check_body(row, reply.json())
    assert ("retry-after" in reply.headers) == (row.status in (503, 529))
    await stack.scripted.idle()
    assert stack.scripted.count("finally", tag) == 1
    assert (await ask(stack.port, CHAT, chat("scripted"))).text == "Hello"


@EVERY_ROW
async def test_after_tokens_it_is_a_status_for_an_answer_in_one_piece(stack: Stack, tag: str, row: Row) -> None:
    headers = script(["say", "ab"], row.step, tag=tag)
    reply = await ask(stack.port, COMPLETIONS, {"model": "scripted", "prompt": "hi"}, headers=headers)
    assert reply.status == row.status
    check_body(row, reply.json())


@EVERY_ROW
async def test_after_tokens_it_is_an_event_of_the_stream(stack: Stack, tag: str, row: Row) -> None:
    reply = await ask(
        stack.port, CHAT, chat("scripted", stream=True), headers=script(["say", "ab", 0.01], row.step, tag=tag)
    )
    assert reply.status == 200
    *chunks, last = reply.events  # `[DONE]` came behind it
    assert "".join(choice["delta"]["content"] for chunk in chunks for choice in chunk["choices"]) == "ab"
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
    message, code = row.event or (row.message, row.status)
    assert last["error"] == {"message": message, "type": row.type, "code": code}


async def test_one_failed_choice_ends_all_of_them(stack: Stack, tag: str) -> None:
    steps = script(["say", "ab", 0.01], bad("InvalidArgument", "no"), tag=tag)
    reply = await ask(stack.port, CHAT, chat("scripted", n=3), headers=steps)
    assert (reply.status, reply.json()["message"]) == (400, "no")
    await stack.scripted.sees("finally", tag, 3)
    await stack.scripted.idle()


async def test_a_full_worker_declines_at_once_and_serves_on(stack: Stack, tag: str) -> None:
    async with exchange(stack.port, CHAT, chat("narrow"), headers=script(["wait"], tag=tag)) as running:
        await stack.narrow.sees("generate", tag)
        async with exchange(stack.port, CHAT, chat("narrow")) as queued:
            await until(lambda: stack.narrow.metric("dynamo_work_handler_queue_depth") == 1)
            for streamed in (False, True):
                reply = await ask(stack.port, CHAT, chat("narrow", stream=streamed))
                assert (reply.status, reply.json()["message"]) == (529, "Service temporarily overloaded")
                assert 1 <= int(reply.headers["retry-after"]) <= 60
            running.leave()
            assert (await queued.reply()).text == "Hello"


async def test_an_error_of_the_engine_does_not_disturb_its_neighbours(stack: Stack, tag: str) -> None:
    headers = script(["say", "abcdefgh", 0.02], tag=tag)
    async with exchange(stack.port, CHAT, chat("scripted", stream=True), headers=headers) as neighbour:
        await stack.scripted.sees("first", tag)
        for row in ROWS.values():
            reply = await ask(stack.port, CHAT, chat("scripted"), headers=script(row.step))
            assert reply.status == row.status
        assert (await neighbour.reply()).text == "abcdefgh"
