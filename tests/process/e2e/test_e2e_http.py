"""What a client sees besides answers: routes, refusals, ids, traces; and models that come and go."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from dynamo.protocol.openai.validation import LET_PASS
from support.http_client import CHAT, COMPLETIONS, Reply, ask, chat, exchange, script
from support.processes import Stack, until


def is_missing(answer: Reply, name: str) -> bool:
    """Return whether the answer is the 404 that names the model and says what there is."""
    message: str = answer.json()["message"]
    return answer.status == 404 and message.startswith(f"Model not found: '{name}'; served here: ")


def flat(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != "error"}


async def test_health_and_liveness(stack: Stack) -> None:
    health = (await ask(stack.port, "/health")).json()
    assert health["status"] == "healthy"
    assert {"dyn://e2e.scripted.generate", "dyn://e2e.narrow.generate"} <= set(health["endpoints"])
    transports = {one["component"]: one["transport"]["tcp"] for one in health["instances"]}
    assert transports["scripted"].startswith("127.0.0.1:")
    assert (await ask(stack.port, "/live")).json() == {"status": "live", "message": "Service is live"}
    assert (await ask(stack.scripted.system_port, "/health")).json()["status"] == "ready"


async def test_routes_that_do_not_exist_and_methods_that_are_not_allowed(stack: Stack) -> None:
    nowhere = await ask(stack.port, "/nope")
    assert (nowhere.status, flat(nowhere.json())) == (
        404,
        {"message": "Route not found: GET /nope", "type": "Not Found", "code": 404},
    )
    for method, path, allowed in (("GET", CHAT, "POST"), ("DELETE", COMPLETIONS, "POST"), ("POST", "/health", "GET")):
        reply = await ask(stack.port, path, method=method)
        assert (reply.status, reply.body) == (405, b"")
        assert allowed in reply.headers["allow"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_bodies_that_are_refused(stack: Stack, path: str) -> None:
    odd = await ask(stack.port, path, b"{}", headers={"content-type": "text/html"})
    assert (odd.status, odd.json()["message"]) == (415, "Expected request with Content-Type application/json")
    for broken in (b"", b"{", b"[]", b"null", b'{"model": 1}', b"{}", b"\xff\xfe"):
        reply = await ask(stack.port, path, broken)
        assert reply.status == 400
        assert reply.json()["message"].startswith("Failed to deserialize the JSON body into the target type: ")
        assert reply.json()["error"]["message"] == reply.json()["message"]
    big = await ask(stack.port, path, b"{}", headers={"content-length": str(46 * 1024 * 1024)})
    assert big.status == 413
    assert big.json()["message"] == "Request body exceeds the limit of 45 MB set by DYN_HTTP_BODY_LIMIT_MB"


async def test_headers_beyond_any_measure(stack: Stack) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    # Without their end: an answer can only mean that the server has seen enough.
    writer.write(b"GET /health HTTP/1.1\r\nx-padding: " + b"x" * 70_000)
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 431 ")
    writer.transport.abort()


async def test_the_validation_of_fields(stack: Stack) -> None:
    for field, value, message in (
        ("temperature", 3, "Validation: Temperature must be between 0 and 2, got 3"),
        ("top_p", 0, "Validation: Top_p must be between 0 and 1, got 0"),
        ("max_tokens", 0, "Validation: Max tokens must be greater than 0, got 0"),
        ("messages", [], "Validation: The 'messages' field cannot be empty. At least one message is required."),
        ("foo", 1, f"Validation: Unsupported parameter(s): `foo`{LET_PASS}"),
    ):
        reply = await ask(stack.port, CHAT, chat("scripted") | {field: value})
        assert (reply.status, reply.json()["message"]) == (400, message), field


@pytest.mark.parametrize("streamed", [False, True], ids=["unary", "streamed"])
async def test_the_request_id_comes_back(stack: Stack, streamed: bool) -> None:
    named = {"x-request-id": "abc-123"}
    assert (await ask(stack.port, CHAT, chat("scripted", stream=streamed), headers=named)).headers[
        "x-request-id"
    ] == "abc-123"
    refused = await ask(stack.port, CHAT, chat("nobody", stream=streamed), headers=named)
    assert (refused.status, refused.headers["x-request-id"]) == (404, "abc-123")


async def test_the_engine_sees_the_id_of_the_answer_and_the_trace(stack: Stack, tag: str) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    sent = {
        "traceparent": f"00-{trace_id}-b7ad6b7169203331-01",
        "tracestate": "vendor=value",
        "x-request-id": "abc-123",
    }
    reply = await ask(stack.port, CHAT, chat("scripted"), headers=script(["say", "a"], tag=tag) | sent)
    (seen,) = await stack.scripted.sees("generate", tag)
    assert f"chatcmpl-{seen['id']}" == reply.json()["id"]
    assert seen["trace"]["traceparent"].split("-")[1] == trace_id
    assert seen["trace"]["tracestate"] == "vendor=value"
    assert seen["trace"]["x-request-id"] == "abc-123"


async def test_a_model_comes_and_goes(stack: Stack, tag: str, name: str) -> None:
    port, frontend = stack.port, stack.frontend
    before = await ask(port, CHAT, chat(name))
    assert is_missing(before, name)

    guest = stack.cluster.worker(name, name)
    # No grace: whoever is listed can answer, from the first moment.
    await until(lambda: name in frontend.models(), lambda: f"{name} in {frontend.log}")
    assert (await ask(port, CHAT, chat(name))).text == "Hello"
    ready = await ask(port, f"/v1/models/{name}/ready")
    assert (ready.status, ready.json()["ready"]) == (200, True)
    assert (await ask(port, f"/v1/models/{name}")).json()["context_window"] == 1_000_000

    headers = script(["say", "abcdef", 0.15], tag=tag)
    async with exchange(port, CHAT, chat(name, stream=True), headers=headers) as last:
        await guest.sees("first", tag)
        guest.terminate()
        await until(lambda: name not in frontend.models())
        late = await ask(port, CHAT, chat(name))
        assert late.status == 503
        assert late.json()["message"] == (
            f"Model `{name}` is not ready to serve requests yet. The deployment may still be starting up or is not fully "
            "provisioned. Please retry shortly."
        )
        assert (await last.reply()).text == "abcdef"
    assert await guest.ended() == 0
    assert guest.count("abort", tag) == 0
    after = await ask(port, CHAT, chat(name))
    assert (after.status, after.headers["retry-after"]) == (503, "1")  # a worker that restarts comes back
    assert frontend.get(f"/v1/models/{name}/ready")[0] == 503
    assert (await ask(port, f"/v1/models/{name}")).status == 404


async def test_a_model_whose_only_worker_has_left_says_so(stack: Stack, name: str) -> None:
    guest = stack.cluster.worker(name, name)
    await until(lambda: name in stack.frontend.models())
    assert (await ask(stack.port, CHAT, chat(name))).status == 200
    guest.kill()
    await guest.ended()
    for streamed in (False, True):
        reply = await ask(stack.port, CHAT, chat(name, stream=streamed))
        assert reply.status == 503
        # The request that finds the worker gone tells why; the next one finds no worker to ask.
        found = reply.json()["message"]
        assert found == "Service temporarily unavailable" or found.startswith(f"Model `{name}` is not ready to serve")
        assert reply.headers["retry-after"] == "1"


async def test_both_sides_count(stack: Stack, tag: str) -> None:
    async def counted() -> tuple[float, int]:
        text = (await ask(stack.port, "/metrics")).body.decode()
        row = 'dynamo_frontend_output_tokens_total{model="scripted"} '
        tokens = [line.removeprefix(row) for line in text.splitlines() if line.startswith(row)]
        return float(tokens[0]) if tokens else 0.0, int(stack.scripted.metric("dynamo_component_requests_total"))

    tokens, requests = await counted()
    await asyncio.gather(*(ask(stack.port, CHAT, chat("scripted", stream=bool(n % 2))) for n in range(8)))
    await stack.scripted.idle()
    assert await counted() == (tokens + 40, requests + 8)
    assert json.loads(stack.frontend.get("/openapi.json")[1])["paths"][CHAT]
