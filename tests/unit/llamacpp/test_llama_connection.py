"""One request to llama.cpp's server over a socket, against a server that sends what llama.cpp sends."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dynamo.contract.requests.generation import GenerationLimits, read_generation
from dynamo.errors import EngineShutdown
from dynamo.llamacpp.arguments import LlamaArguments
from dynamo.llamacpp.engine import LlamaAnswer, completion_body, walk_tokens
from dynamo.llamacpp.gguf_header import GgufHeader
from dynamo.llamacpp.scores import walk_chat
from dynamo.llamacpp.slots import SOCKET, LlamaConnection, LlamaRefusal, LlamaSlots, call_llama, open_llama
from dynamo.runtime.calls.context import Context
from support.patience import PATIENCE_SECONDS

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@asynccontextmanager
async def answering(
    *pieces: bytes, closes: bool = True, plain: bytes | Callable[[Any], bytes] = b""
) -> AsyncIterator[tuple[Path, Callable[[], bytes]]]:
    """A socket that answers each request with `pieces`, one write each; and what it was asked.

    `plain`: the JSON that answers every request but the first, or what makes it of the body of a request.
    """
    requests = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r")[0])
        body = await reader.readexactly(length)
        is_plain = bool(plain and requests)
        requests.extend(head + body)
        reply = plain if isinstance(plain, bytes) else plain(json.loads(body)) if is_plain else b""
        whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(reply), reply)
        for piece in (whole,) if is_plain else pieces:
            writer.write(piece)
            await writer.drain()
        if not closes:
            await reader.read()
        writer.close()

    with tempfile.TemporaryDirectory(prefix="llama-") as directory:  # a path of pytest may be too long for a socket
        path = Path(directory) / SOCKET
        server = await asyncio.start_unix_server(serve, path)
        try:
            yield path, lambda: bytes(requests)
        finally:
            server.close()
            await server.wait_closed()


async def objects(connection: LlamaConnection) -> list[object]:
    found = []
    while (item := await asyncio.wait_for(connection.next(), PATIENCE_SECONDS)) is not None:
        found.append(item)
    return found


EVENTS = chunked(b'data: {"tokens":[1]}\n\n') + chunked(b'data: {"tokens":[2]}\n\ndata: [DONE]\n\n') + b"0\r\n\r\n"


@pytest.mark.parametrize("cut", range(0, len(EVENTS) + 1, 7))
async def test_events_survive_any_split(cut: int) -> None:
    async with answering(STREAM + EVENTS[:cut], EVENTS[cut:]) as (path, sent):
        connection = await open_llama(path)
        connection.send("POST", "/completion", "key", {"prompt": [1]})
        assert await objects(connection) == [{"tokens": [1]}, {"tokens": [2]}]
        connection.close()
        assert b"Authorization: Bearer key" in sent()


async def test_a_plain_answer_is_one_object_and_an_error_is_raised() -> None:
    body = b'{"a": 1}'
    async with answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body) as (path, _):
        assert await call_llama(path, "GET", "/props", "key") == {"a": 1}
    body = b'{"error":{"code":400,"message":"bad","type":"invalid_request_error"}}'
    async with answering(b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n" % len(body) + body) as (path, _):
        with pytest.raises(LlamaRefusal, match="bad") as raised:
            await call_llama(path, "GET", "/props", "key")
        assert raised.value.status == 400


async def test_an_error_in_the_middle_of_a_stream_is_raised_behind_what_came_before() -> None:
    events = chunked(b'data: {"tokens":[1]}\n\ndata: {"error":{"code":500,"message":"broke"}}\n\n')
    async with answering(STREAM + events) as (path, _):
        connection = await open_llama(path)
        connection.send("POST", "/completion", "key", {})
        assert await connection.next() == {"tokens": [1]}
        with pytest.raises(LlamaRefusal, match="broke"):
            await connection.next()
        connection.close()


async def test_a_process_that_dies_in_the_middle_is_an_engine_that_is_gone() -> None:
    async with answering(STREAM + chunked(b'data: {"tokens":[1]}\n\n')) as (path, _):
        connection = await open_llama(path)
        connection.send("POST", "/completion", "key", {})
        assert await connection.next() == {"tokens": [1]}
        with pytest.raises(EngineShutdown, match="middle of an answer"):
            await connection.next()
        connection.close()
    with pytest.raises(EngineShutdown, match="not running"):
        await open_llama(path)


async def test_closing_wakes_whoever_waits() -> None:
    async with answering(STREAM, closes=False) as (path, _):
        connection = await open_llama(path)
        connection.send("POST", "/completion", "key", {})
        waiting = asyncio.ensure_future(connection.next())
        await asyncio.sleep(0)
        connection.close()
        connection.close()
        assert await asyncio.wait_for(waiting, PATIENCE_SECONDS) is None


async def test_a_slow_reader_holds_the_socket_back() -> None:
    event = chunked(b'data: {"x":"' + b"y" * 10_000 + b'"}\n\n')
    async with answering(STREAM, *[event] * 200, b"0\r\n\r\n") as (path, _):
        connection = await open_llama(path)
        connection.send("POST", "/completion", "key", {})
        first = await asyncio.wait_for(connection.next(), PATIENCE_SECONDS)
        assert len([first, *await objects(connection)]) == 200
        connection.close()


# -- tokens within a character ----------------------------------------------------------------------------------------


def slots_at(socket: Path) -> LlamaSlots:
    header = GgufHeader("llama", "", 64, has_chat_template=False, parts=1, part=0, has_pooling=False)
    slots = LlamaSlots(LlamaArguments(Path("m.gguf"), header, None, "m", context_length=64, slots=1))
    slots._process._directory = socket.parent
    return slots


def generated(*events: dict[str, object]) -> bytes:
    """A stream as llama.cpp writes it: none for a token with which the text ends within a character."""
    data = b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events)
    return STREAM + chunked(data) + b"0\r\n\r\n"


CAKE = "\U0001f382"


def scored(*tokens: int) -> list[dict[str, Any]]:
    """Entries of log probabilities: each token has its own id, as hundredths below zero."""
    parts = {10813: CAKE.encode()[:2], 232: CAKE.encode()[2:3], 220: CAKE.encode()[3:]}
    return [{"id": token, "token": "", "bytes": [*parts.get(token, b"?")], "logprob": -token / 100} for token in tokens]


class HeldTokens:
    """llama.cpp's other answers about a cake of three tokens; none of its log probabilities comes with an event."""

    TOKENS = (10813, 232, 220)
    OTHERS: ClassVar = {"a": [9], "é": [8]}

    def __init__(self, *, is_first: bool) -> None:
        """`is_first`: whether each token is among the first alternatives."""
        self._is_first = is_first
        self.prompts: list[list[Any]] = []

    def reply(self, body: Any) -> bytes:
        if "messages" in body:
            return b'{"prompt": "<user>hi"}'
        if "content" in body:
            return json.dumps({"tokens": self.OTHERS.get(body["content"], self.TOKENS)}).encode()
        if body["n_predict"] > 1:
            return json.dumps({"tokens": self.TOKENS[:2]}).encode()
        self.prompts.append(body["prompt"])
        assert (body["logit_bias"], body["grammar"], body["stream"]) == ([[9, 1000.0]], "", False)
        others = scored(*range(1, 3), *(self.TOKENS if self._is_first or body["n_probs"] > 1000 else ()))
        return json.dumps({"completion_probabilities": [{**scored(9)[0], "top_logprobs": others}]}).encode()


async def log_probs_of(slots: LlamaSlots, held: HeldTokens) -> list[tuple[int, float]]:
    """What the chunks of an answer have of each token."""
    asked = read_generation(
        {"token_ids": [1, 2], "stop_conditions": {"max_tokens": 9}, "output_options": {"logprobs": 2}},
        GenerationLimits("llama.cpp", context_length=100, vocab_size=20_000),
    )
    answer, found = LlamaAnswer(asked), list[tuple[int, float]]()
    body = completion_body(asked, None, 100)
    async with slots.events("/completion", body, Context(), walk_tokens) as events:
        async for event in events:
            chunk = answer.chunk(event)
            if chunk is not None and chunk["token_ids"]:
                found += zip(chunk["token_ids"], chunk["log_probs"], strict=True)
                assert [len(one) for one in chunk["top_logprobs"]] == [2] * len(chunk["token_ids"])
    return found


@pytest.mark.parametrize("is_first", [True, False])
async def test_each_token_within_a_character_has_a_log_probability(is_first: bool) -> None:
    alternatives = {"top_logprobs": scored(1, 2)}
    events = generated(
        {"content": "a", "tokens": [7], "tokens_predicted": 1, "completion_probabilities": [scored(7)[0] | alternatives]},
        {
            "content": CAKE, "tokens": [220], "tokens_predicted": 4, "completion_probabilities": [scored(220)[0] | alternatives],
        },
        {"content": "", "tokens": [], "stop": True, "stop_type": "limit", "tokens_predicted": 6},
    )  # fmt: skip
    held = HeldTokens(is_first=is_first)
    async with answering(events, plain=held.reply) as (socket, _):
        found = await log_probs_of(slots_at(socket), held)
    assert found == [(token, -token / 100) for token in (7, 10813, 232, 220, 10813, 232)]
    before = [[1, 2, 7], [1, 2, 7, 10813], [1, 2, 7, 10813, 232, 220], [1, 2, 7, 10813, 232, 220, 10813]]
    assert held.prompts == [prompt for prompt in before for _ in range(1 if is_first else 2)]


def said(text: str, token: int) -> dict[str, Any]:
    """One event of a chat. llama.cpp has the bytes of the whole text beside its last token."""
    entry = {**scored(token)[0], "bytes": [*text.encode()], "top_logprobs": scored(1, 2)}
    return {"choices": [{"index": 0, "delta": {"content": text}, "logprobs": {"content": [entry]}}]}


async def test_each_token_within_a_character_of_a_chat_has_an_entry_with_its_own_bytes() -> None:
    held = HeldTokens(is_first=True)
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
    entries: list[Any] = []
    async with (
        answering(generated(said("a", 7), said(CAKE, 220), said("é", 8)), plain=held.reply) as (socket, _),
        slots_at(socket).events("/v1/chat/completions", body, Context(), walk_chat) as events,
    ):
        async for event in events:
            entries += event["choices"][0]["logprobs"]["content"]
    assert [(entry["id"], entry["logprob"]) for entry in entries] == [
        (token, -token / 100) for token in (7, 10813, 232, 220, 8)
    ]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == f"a{CAKE}é"
    assert [entry["token"] for entry in entries] == ["a", "\ufffd", "\ufffd", "\ufffd", "é"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * 5
    assert held.prompts == [["<user>hi", 7], ["<user>hi", 7, 10813]]


async def tokens_of(slots: LlamaSlots) -> list[list[int]]:
    body = {"prompt": [1, 2], "n_predict": 9, "stream": True, "grammar": "root ::= [a-z]"}
    async with slots.events("/completion", body, Context(), walk_tokens) as events:
        return [event["tokens"] async for event in events if event["tokens"]]


CAKE_EVENTS = generated(
    {"content": "a", "tokens": [7], "stop": False, "tokens_predicted": 1},
    {"content": CAKE, "tokens": [220], "stop": False, "tokens_predicted": 4},
    {"content": "b", "tokens": [8], "stop": False, "tokens_predicted": 5},
    {"content": "", "tokens": [], "stop": True, "tokens_predicted": 5},
)


async def test_tokens_that_end_within_a_character_come_with_the_one_that_ends_it() -> None:
    async with answering(CAKE_EVENTS, plain=b'{"tokens":[10813,232,220]}') as (socket, sent):
        assert await tokens_of(slots_at(socket)) == [[7], [10813, 232], [220], [8]]
        assert f'"{CAKE}"'.encode() in sent()  # that text, and no other
        assert sent().count(b"/tokenize") == 1


async def test_a_character_that_was_written_in_other_tokens_keeps_its_text() -> None:
    async with answering(CAKE_EVENTS, plain=b'{"tokens":[991]}') as (socket, _):
        assert await tokens_of(slots_at(socket)) == [[7], [991], [8]]


async def test_an_answer_that_its_limit_ends_within_a_character_has_all_of_its_tokens() -> None:
    events = generated(
        {"content": "a", "tokens": [7], "stop": False, "tokens_predicted": 1},
        {"tokens": [], "stop": True, "stop_type": "limit", "tokens_predicted": 3},
    )
    async with answering(events, plain=b'{"tokens":[10813,232]}') as (socket, sent):
        assert await tokens_of(slots_at(socket)) == [[7], [10813, 232]]
        _, _, again = sent().rpartition(b"\r\n\r\n")
        wanted = {"prompt": [1, 2, 7], "n_predict": 2, "stream": False, "n_probs": 0, "grammar": ""}
        assert json.loads(again) == wanted


async def test_other_answers_ask_nothing_more() -> None:
    events = generated(
        {"content": "a", "tokens": [7], "stop": False, "tokens_predicted": 1},
        {"tokens": [], "stop": True, "stop_type": "limit", "tokens_predicted": 1},
    )
    async with answering(events) as (socket, sent):
        assert await tokens_of(slots_at(socket)) == [[7]]
        assert sent().count(b"POST") == 1
