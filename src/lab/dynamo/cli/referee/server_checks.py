"""Checks of the server as such: HTTP, the list of models, the operator's routes, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Final
from urllib.parse import quote

from dynamo.cli.referee.apis import embeddings, messages, responses
from dynamo.cli.referee.checks import CannotJudge, Cause, Check, Level, Probe, Run, demand, served
from dynamo.cli.referee.exchange import Json, member
from dynamo.cli.referee.text_checks import CHAT, COMPLETIONS, UNKNOWN, refused

CONTINUE_SECONDS: Final = 3.0
SEEN_SECONDS: Final = 1.0
FREED_SECONDS: Final = 5.0
LOOKS: Final = 20  # at the load within each of these
_LOAD: Final = re.compile(
    r"^([\w:]*(?:inflight_requests|in_flight|requests_running|active_requests|requests_processing)\w*)(\{.*\})? ([0-9.e+]+)",
    re.M,
)
_SAMPLE: Final = re.compile(r"[a-zA-Z_:][\w:]*(\{.*\})? \S+( -?\d+)?")


def _small(probe: Probe, limit: int = 2, **more: Json) -> bytes:
    """Build a small request of the API that the checks of the server use."""
    match probe.shared.api_path:
        case responses.PATH:
            asked = responses.body(probe.model, **{"max_output_tokens": max(limit, responses.LEAST), **more})
        case messages.PATH:
            asked = messages.body(probe.model, **{"max_tokens": limit, **more})
        case embeddings.PATH:
            asked = embeddings.body(
                probe.embedding_model
            )  # without a stream: that of a client that leaves is not judged
        case path:
            api = CHAT if path == CHAT.path else COMPLETIONS
            asked = api.body(probe.model, **{"max_tokens": limit, **more})
    return json.dumps(asked).encode()


async def check_list(probe: Probe) -> None:
    answer = served(await probe.get("/v1/models")).json()
    demand(member(answer, "object") == "list", "object is not 'list'")
    models = member(answer, "data")
    demand(isinstance(models, list) and models, "data is not a list with a model")
    for model in models:
        demand(isinstance(member(model, "id"), str), "a model has no id")
        demand(member(model, "object") == "model", "the object of a model is not 'model'")


async def check_retrieve(probe: Probe) -> None:
    answer = served(await probe.get(f"/v1/models/{quote(probe.model)}")).json()
    demand(member(answer, "id") == probe.model, f"id is {member(answer, 'id')!r}")


async def check_retrieve_unknown(probe: Probe) -> None:
    refused(await probe.get(f"/v1/models/{UNKNOWN}"), 404)


async def _twice(probe: Probe, first: bytes) -> None:
    async with probe.server.line() as line:
        await line.send(first)
        answer = await line.answer()
        probe.note(first.decode(errors="replace"), answer)
        if answer.status >= 400 and "close" in answer.headers.get("connection", "").lower():
            raise CannotJudge("the refusal announces the end of the connection, which RFC 9112 section 9.6 allows")
        demand(answer.keeps_alive, f"the server closes the connection after status {answer.status}")
        try:
            await line.send(probe.server.request("GET", "/v1/models"))
            second = await line.answer()
        except ConnectionError as error:
            demand(False, f"a second request on the connection failed: {error}")
            return
        demand(second.status == 200, f"a second request on the connection got status {second.status}")


async def check_kept(probe: Probe) -> None:
    await _twice(probe, probe.server.request("GET", "/v1/models"))


async def check_kept_after_error(probe: Probe) -> None:
    await _twice(probe, probe.server.request("POST", probe.shared.api_path, b'{"model": '))


async def check_method(probe: Probe) -> None:
    answer = await probe.get(probe.shared.api_path)
    demand(answer.status == 405, f"GET got status {answer.status}, not 405")
    demand("POST" in answer.headers.get("allow", ""), "the 405 has no Allow with POST")


async def check_head(probe: Probe) -> None:
    answer = await probe.get("/v1/models", "HEAD")
    demand(answer.status in (200, 204, 405), f"HEAD got status {answer.status}")


async def check_options(probe: Probe) -> None:
    answer = await probe.get("/v1/models", "OPTIONS")
    demand(answer.status < 500, f"OPTIONS got status {answer.status}")


async def check_length(probe: Probe) -> None:
    headers = (await probe.post(probe.shared.api_path, _small(probe))).headers
    demand({"content-length", "transfer-encoding"} & headers.keys(), "neither Content-Length nor Transfer-Encoding")


async def check_chunked(probe: Probe) -> None:
    body = _small(probe)
    parts = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:9], body[9:]))
    head = probe.server.request(
        "POST", probe.shared.api_path, None, {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
    )
    probe.note((head + parts).decode(errors="replace"))
    async with probe.server.line() as line:
        await line.send(head + parts + b"0\r\n\r\n")
        answer = await line.answer()
    probe.note((head + parts).decode(errors="replace"), answer)
    served(answer)


async def check_large_header(probe: Probe) -> None:
    probe.note("GET /v1/models with a header of 100,000 bytes")
    async with probe.server.line() as line:
        await line.send(probe.server.request("GET", "/v1/models", None, {"X-Large": "a" * 100_000}))
        answer = await line.answer()
    probe.note(probe.sent, answer)
    demand(answer.status == 200 or 400 <= answer.status < 500, f"status {answer.status}")


async def check_expect(probe: Probe) -> None:
    body = _small(probe)
    request = probe.server.request("POST", probe.shared.api_path, body, {"Expect": "100-continue"})
    head = request.removesuffix(body)
    probe.note(head.decode(errors="replace"))
    async with probe.server.line() as line:
        await line.send(head)
        try:
            async with asyncio.timeout(CONTINUE_SECONDS):
                first = await line.reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            demand(False, f"nothing came within {CONTINUE_SECONDS:g} s: neither 100 nor a final status")
            return
        except asyncio.IncompleteReadError:
            demand(False, "the connection was closed without an answer")
            return
        if not re.match(rb"HTTP/1\.1 100\b", first):
            demand(re.match(rb"HTTP/1\.[01] 4\d\d", first), f"the answer to Expect is {first[:60]!r}")
            return
        await line.send(body)
        answer = await line.answer()
    probe.note(probe.sent, answer)
    served(answer)


async def check_health(probe: Probe) -> None:
    served(await probe.get("/health"))


async def check_ready(probe: Probe) -> None:
    answer = await probe.get("/ready")
    if answer.status == 404:
        raise CannotJudge("the server has no /ready", Cause.NOT_OFFERED)
    served(answer)


async def check_metrics(probe: Probe) -> None:
    answer = await probe.get("/metrics")
    if answer.status in (404, 501):
        raise CannotJudge(f"the server has no metrics at this address: {answer.message}")
    kind = served(answer).headers.get("content-type", "")
    demand(kind.startswith(("text/plain", "application/openmetrics-text")), f"Content-Type is {kind!r}")
    lines = [line for line in answer.body.decode(errors="replace").splitlines() if line and line[0] != "#"]
    demand(lines, "there is no sample")
    bad = next((line for line in lines if not _SAMPLE.fullmatch(line)), None)
    demand(bad is None, f"a line is not Prometheus text: {str(bad)[:100]!r}")


async def _load(probe: Probe) -> float:
    answer = await probe.get("/metrics")
    found = _LOAD.findall(answer.body.decode(errors="replace")) if answer.status == 200 else []
    found = [(name, value) for name, _, value in found if not name.endswith(("_total", "_bucket", "_sum", "_count"))]
    if not found:
        raise CannotJudge("the server has no metric of its load at /metrics", Cause.NOT_OFFERED)
    return sum(float(value) for _, value in found)


async def check_cancel(probe: Probe) -> None:
    before = await _load(probe)
    # With the first body an answer does not end by itself, on the many servers that understand it.
    for more in ({"ignore_eos": True}, {}):
        body = _small(probe, 1024, stream=True, **more)
        async with probe.server.line() as line:
            await line.send(probe.server.request("POST", probe.shared.api_path, body))
            first = await line.reader.read(4096)
            if not first.startswith(b"HTTP/1.1 200"):
                continue
            for _ in range(LOOKS):  # some count a request at the first token, after the headers
                during = await _load(probe)
                if during > before:
                    break
                await asyncio.sleep(SEEN_SECONDS / LOOKS)
        break
    else:
        raise CannotJudge("the server refuses a long stream", Cause.NOT_OFFERED)
    if during <= before:
        raise CannotJudge("the answer was over before its load was seen")
    for _ in range(LOOKS):
        now = await _load(probe)
        if now <= before:
            return
        await asyncio.sleep(FREED_SECONDS / LOOKS)
    demand(False, f"the load is {now:g} after {FREED_SECONDS:g} s, {before:g} before and {during:g} during the stream")


_CORE, _AGENT, _OPERATOR = Level.CORE, Level.AGENT, Level.OPERATOR
_ROWS: Final[tuple[tuple[str, Run, Level, str, str, str], ...]] = (
    ("models.list", check_list, _CORE, "major", "OpenAI reference, Models: a list of objects with ids", "List every model"),
    ("models.retrieve", check_retrieve, _AGENT, "minor", "OpenAI reference, Models: a model by its id", "Serve /v1/models/ID"),
    ("models.unknown", check_retrieve_unknown, _AGENT, "minor", "OpenAI reference, Error codes: an unknown model is 404", "Refuse it with 404"),
    ("http.keep-alive", check_kept, _CORE, "major", "RFC 9112 section 9.3: a connection stays open after an answer", "Keep it open"),
    ("http.keep-alive-after-error", check_kept_after_error, _CORE, "minor", "RFC 9112 section 9.6: a connection stays open after a refusal, or its end is announced", "Read the body, then refuse; or send Connection: close"),
    ("http.content-length", check_length, _CORE, "major", "RFC 9112 section 6.3: an answer tells its length", "Send Content-Length or chunks"),
    ("http.chunked-body", check_chunked, _CORE, "major", "RFC 9112 section 7.1: a chunked body is understood", "Read chunked bodies"),
    ("http.method", check_method, _AGENT, "minor", "RFC 9110 section 15.5.6: a wrong method is 405 with Allow", "Send 405 with Allow"),
    ("http.head", check_head, _AGENT, "minor", "RFC 9110 section 9.3.2: HEAD is GET without a body", "Answer HEAD where GET is served"),
    ("http.options", check_options, _AGENT, "minor", "RFC 9110 section 9.3.7: OPTIONS asks for what is possible", "Answer or refuse OPTIONS"),
    ("http.large-header", check_large_header, _AGENT, "minor", "RFC 6585 section 5: headers that are too large are 431", "Refuse them with 431"),
    ("http.expect-continue", check_expect, _AGENT, "minor", "RFC 9110 section 10.1.1: Expect is met with 100 or a final status", "Send 100 Continue"),
    ("operator.health", check_health, _OPERATOR, "minor", "Practice of orchestrators: /health is 200 while requests are served", "Serve /health"),
    ("operator.ready", check_ready, _OPERATOR, "minor", "Practice of orchestrators: /ready is 200 once requests are served", "Serve /ready"),
    ("operator.metrics", check_metrics, _OPERATOR, "minor", "Prometheus, Exposition formats: samples one a line", "Serve /metrics"),
    ("cancel.frees-server", check_cancel, _OPERATOR, "major", "Practice of operators: a client that leaves frees what its request held", "End the work when the connection closes"),
)  # fmt: skip
ALONE: Final = "cancel.frees-server"  # runs after all others, whose load it would see


def server_checks() -> list[Check]:
    """Return the checks of the server as such."""
    return [Check(name, level, severity, clause, fix, run) for name, run, level, severity, clause, fix in _ROWS]
