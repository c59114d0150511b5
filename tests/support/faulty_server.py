"""A small server with OpenAI's API that answers rightly, but for one named fault."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from support.faulty_apis.chat_agents import calls_tool, refused
from support.faulty_apis.embeddings import FaultyEmbeddings
from support.faulty_apis.files import FaultyFiles
from support.faulty_apis.messages import FaultyMessages
from support.faulty_apis.reply import Reply
from support.faulty_apis.responses import FaultyResponses

MODEL = "faulty"
TOKENS = [f"w{n} " if n % 5 else f"caf\u00e9{n} " for n in range(60)]
MAX_PROMPT = 10_000
LOOKS_BEFORE = 3  # at the metrics: by the check of them, before the stream, and once during it


class FaultyApi(Protocol):
    """An API that answers a whole request at once."""

    def reply(self, method: str, path: str, body: bytes) -> Reply | None: ...


APIS: dict[str, Callable[[str, str], FaultyApi]] = {
    "responses": FaultyResponses,
    "messages": FaultyMessages,
    "embeddings": FaultyEmbeddings,
    "files": FaultyFiles,
}


class FaultySite:
    """One server. `fault` names what it does wrongly; an empty text is nothing. `api: fault` is one of another API."""

    def __init__(self, fault: str = "") -> None:
        api, _, of_api = fault.partition(": ")
        self.fault = fault
        self.running = self.looks = 0
        self.looked_at = asyncio.Event()
        self.messages = FaultyMessages(of_api if api == "messages" else "", MODEL)
        self.apis = [make(of_api if api == name else "", MODEL) for name, make in APIS.items()]

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has left
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        try:
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        except asyncio.LimitOverrunError:
            status = 500 if self.fault == "large headers are 500" else 431
            writer.write(b"HTTP/1.1 %d Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % status)
            await writer.drain()
            return False
        method, path, _ = lines[0].split(" ")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:] if line)}
        if "expect" in headers and self.fault != "no 100":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = b""
        if "transfer-encoding" in headers:
            if self.fault == "chunked body refused":
                return self._send(writer, 411, {"error": {"message": "no chunks", "type": "x"}}, close=True)
            while size := int(await reader.readline(), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readline()
        else:
            body = await reader.readexactly(int(headers.get("content-length", "0")))
        kept = await self._route(method, path, body, writer, headers)
        await writer.drain()
        return kept

    async def _route(
        self, method: str, path: str, body: bytes, writer: asyncio.StreamWriter, headers: dict[str, str]
    ) -> bool:
        model = {"id": MODEL, "object": "model", "created": 1, "owned_by": "tests"}
        if path in ("/v1/chat/completions", "/v1/completions"):
            if method != "POST":
                return self._send(writer, 404 if self.fault == "404 for a method" else 405, {}, {"Allow": "POST"})
            return await self._generate(path == "/v1/chat/completions", body, writer)
        if path == "/v1/models" and "anthropic-version" in headers:
            models = self.messages.listed()
            return self._raw(writer, models.status, models.body, models.headers)
        if path == "/v1/models" and self.fault == f"{method} is 500":
            return self._send(writer, 500, {}, is_head=method == "HEAD")
        if path == "/v1/models":
            listed: Any = {"object": "list", "data": [model]}
            if self.fault == "list without object":
                del listed["object"]
            close = self.fault == "connection closed"
            return self._send(writer, 200, listed, is_head=method == "HEAD", close=close)
        if path == f"/v1/models/{MODEL}":
            return self._send(writer, 200, {**model, "id": "another"} if self.fault == "another model" else model)
        if path.startswith("/v1/models/") and self.fault == "any model found":
            return self._send(writer, 200, {**model, "id": path.rpartition("/")[2]})
        if path == "/metrics":
            self.looks += 1
            if self.looks > LOOKS_BEFORE:
                self.looked_at.set()
        if path == "/metrics" and self.fault != "no metrics":
            text = f"faulty:requests_running {self.running}\n"
            if self.fault == "metrics not Prometheus":
                text += "so many requests\n"
            return self._raw(writer, 200, text.encode(), {"Content-Type": "text/plain"})
        for api in self.apis:
            if reply := api.reply(method, path, body):
                return self._raw(writer, reply.status, reply.body, reply.headers)
        if path in ("/health", "/ready"):
            down = {"not healthy": "/health", "not ready": "/ready"}.get(self.fault) == path
            return self._send(writer, 503 if down else 200, {})
        return self._refuse(writer, 404, "not here")

    def _refuse(self, writer: asyncio.StreamWriter, status: int, message: str, param: str | None = None) -> bool:
        if self.fault == "error as HTML":
            return self._raw(writer, status, b"<h1>no</h1>", {"Content-Type": "text/html"})
        named = {"param not named": None, "wrong param named": "model", "path named": f"body.{param}"}.get(
            self.fault, param
        )
        error = {"message": message, "type": "invalid_request_error", "param": named, "code": None}
        body: Any = {"error": message} if self.fault == "error as text" else {"error": error}
        if self.fault == "unknown member named" and "referee_of_tests" in message:
            body = error  # as the native frontend sends it; that errors have an object is the promise of another check
        announced = self._send(writer, status, body, close=self.fault == "end announced after an error")
        return announced and self.fault != "connection closed after an error"

    def _send(
        self, writer: asyncio.StreamWriter, status: int, body: Any, more: dict[str, str] | None = None, **how: bool
    ) -> bool:
        return self._raw(writer, status, json.dumps(body).encode(), more or {}, **how)

    def _raw(self, writer: asyncio.StreamWriter, status: int, data: bytes, more: dict[str, str], **how: bool) -> bool:
        lines = {"Content-Type": "application/json", "X-Request-Id": "1", **more, "Content-Length": str(len(data))}
        if self.fault == "no request id":
            del lines["X-Request-Id"]
        if self.fault == "no length" and b'"choices"' in data:
            how["close"] = bool(lines.pop("Content-Length"))
        if how.get("close"):
            lines["Connection"] = "close"
        head = f"HTTP/1.1 {status} Status\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items())
        writer.write(head.encode() + b"\r\n" + (b"" if how.get("is_head") else data))
        return not how.get("close")

    def _refusal(self, is_chat: bool, body: bytes) -> tuple[int, str, str | None] | None:
        try:
            asked = json.loads(body)
        except ValueError:
            return (500 if self.fault == "500 for malformed JSON" else 400), "not JSON", None
        prompt = "messages" if is_chat else "prompt"
        if prompt not in asked:
            return (422 if self.fault == "422 for a missing prompt" else 400), "missing", prompt
        if asked["model"] != MODEL and self.fault != "200 for an unknown model":
            return 404, "no such model", "model"
        if not isinstance(asked.get("max_tokens", 1), int) and self.fault != "wrong type taken":
            return 400, "not a number", "max_tokens"
        if len(str(asked[prompt])) > MAX_PROMPT:
            return 400, "too long" if self.fault == "limit not named" else f"more than {MAX_PROMPT}", prompt
        return refused(self.fault, asked)

    async def _generate(self, is_chat: bool, body: bytes, writer: asyncio.StreamWriter) -> bool:
        if refusal := self._refusal(is_chat, body):
            return self._refuse(writer, *refusal)
        asked = json.loads(body)
        if asked.get("ignore_eos"):
            return await self._endless(writer)
        choices, made = self._choices(is_chat, asked)
        usage = {"prompt_tokens": 7, "completion_tokens": made, "total_tokens": 7 + made}
        if self.fault == "parts counted differently" and isinstance(
            asked.get("messages", [{}])[-1].get("content"), list
        ):
            usage = {"prompt_tokens": 8, "completion_tokens": made, "total_tokens": 8 + made}
        if self.fault == "no usage of streamed calls" and asked.get("tools") and asked.get("stream"):
            usage = {"prompt_tokens": 7, "completion_tokens": 0, "total_tokens": 7}
        if self.fault == "usage does not add up":
            usage["total_tokens"] += 1
        if asked.get("stream"):
            if self.fault == "streamed usage differs":
                usage = {"prompt_tokens": 8, "completion_tokens": made, "total_tokens": 8 + made}
            return self._stream(writer, is_chat, choices, usage)
        answer = self._named(is_chat, choices, is_chunk=False)
        if self.fault != "usage missing":
            answer["usage"] = usage
        if self.fault == "id missing":
            del answer["id"]
        kind = "text/plain" if self.fault == "answer not as JSON" else "application/json"
        return self._send(writer, 200, answer, {"Content-Type": kind})

    async def _endless(self, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {}\n\n")
        await writer.drain()
        if self.fault == "load counted after the headers":
            await self.looked_at.wait()
        self.running += 1
        try:
            while not writer.transport.is_closing():
                writer.write(b": more\n\n")
                await asyncio.sleep(0.01)
        finally:
            if self.fault != "cancelled work goes on":
                self.running -= 1
        return False

    def _named(self, is_chat: bool, choices: Any, *, is_chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if is_chunk else "chat.completion") if is_chat else "text_completion"
        if is_chunk and self.fault == "object of a chunk wrong":
            kind = "chunk"
        return {"id": "1", "object": kind, "created": 1, "model": MODEL, "choices": choices}

    def _choices(self, is_chat: bool, asked: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
        limit = asked.get("max_tokens", 16)
        tokens = TOKENS[: limit + (self.fault == "max_tokens overrun")]
        text, reason = "".join(tokens), "stop" if self.fault == "length called stop" else "length"
        for stop in asked.get("stop", []):
            at = text.find(stop)
            if at >= 0:
                text = text[: at + len(stop) if self.fault == "stop string shown" else at]
                reason = "length" if self.fault == "stop called length" else "stop"
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if asked.get("response_format"):
            text, reason = '{"ok": 1}' if self.fault == "schema broken" else '{"ok": true}', "stop"
            message["content"] = text
        if asked.get("reasoning_effort"):
            kind = "streamed text" if asked.get("stream") else "text"
            message["reasoning_content"] = "so"
            message["content"] = f"<think>so</think>{text}" if self.fault == f"thoughts in the {kind}" else text
        if asked.get("tool_choice") == "required":
            reason = "stop"
        if asked.get("tools") and calls_tool(self.fault, asked):
            arguments = '{"ok": tru' if self.fault == "tool arguments not JSON" else '{"ok": true}'
            call = {"id": "c", "type": "function", "function": {"name": "report", "arguments": arguments}}
            message, reason = {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"
            if self.fault == "required called stop" and asked["tool_choice"] == "required":
                reason = "stop"
        choices: list[dict[str, Any]] = []
        for index in range(asked.get("n", 1)):
            choice: dict[str, Any] = {"index": index, "finish_reason": reason}
            if self.fault == "finish_reason unknown":
                choice["finish_reason"] = "eos"
            if self.fault == "index wrong":
                choice["index"] = index + 1
            if self.fault == "choices of n alike":
                choice["index"] = 0
            if self.fault == "second choice unfinished" and index:
                choice["finish_reason"] = None
            choice |= {"message": message} if is_chat else {"text": text}
            if asked.get("logprobs"):
                values = [-0.5] * (len(tokens) - (self.fault == "logprobs too few"))
                many = {"content": [{"token": "t", "logprob": v, "top_logprobs": []} for v in values]}
                choice["logprobs"] = many if is_chat else {"token_logprobs": values}
            choices.append(choice)
        return choices, len(tokens) * len(choices)

    def _events(self, is_chat: bool, choices: list[dict[str, Any]], usage: dict[str, int]) -> list[str]:
        choice = choices[0]
        if is_chat:
            message = choice["message"]
            role = {} if self.fault == "role missing" else {"role": "assistant"}
            deltas: list[dict[str, Any]] = [{**role, "content": ""}]
            if "reasoning_content" in message:
                deltas.append({"reasoning_content": message["reasoning_content"]})
            for call in message.get("tool_calls", []):
                text = call["function"]["arguments"]
                deltas.append(
                    {"tool_calls": [{**call, "index": 0, "function": {"name": "report", "arguments": text[:4]}}]}
                )
                again = {"id": "c"} if self.fault == "tool id twice" else {}
                deltas.append({"tool_calls": [{**again, "index": 0, "function": {"arguments": text[4:]}}]})
            deltas += [{"content": part} for part in self._parts(message["content"] or "")]
            found = [{"index": choice["index"], "delta": delta, "finish_reason": None} for delta in deltas]
            last: dict[str, Any] = {"index": choice["index"], "delta": {}}
        else:
            found = [{"index": choice["index"], "text": p, "finish_reason": None} for p in self._parts(choice["text"])]
            last = {"index": choice["index"], "text": ""}
        found.append(
            {**last, "finish_reason": None if self.fault == "finish_reason missing" else choice["finish_reason"]}
        )
        if self.fault == "finish_reason twice":
            found[-2]["finish_reason"] = choice["finish_reason"]
        if self.fault == "wrong order of events":
            found.insert(-2, found.pop())
        events = [self._named(is_chat, [each], is_chunk=True) for each in found]
        if self.fault == "several ids":
            events[-1]["id"] = "2"
        if self.fault != "usage chunk missing":
            with_choices = found[-1:] if self.fault == "usage chunk with choices" else []
            for each in with_choices:
                events.pop()
                each["finish_reason"] = choice["finish_reason"]
            if self.fault == "empty choice beside the usage":
                with_choices = [last]
            events.append({**self._named(is_chat, with_choices, is_chunk=True), "usage": usage})
        return [json.dumps(event, ensure_ascii=False) for event in events]

    def _parts(self, text: str) -> list[str]:
        if self.fault == "character broken":
            text = text.replace("\u00e9", "\ufffd\ufffd")
        return [text[at : at + 5] for at in range(0, len(text), 5)]

    def _stream(self, writer: asyncio.StreamWriter, is_chat: bool, choices: Any, usage: dict[str, int]) -> bool:
        events = self._events(is_chat, choices, usage)
        if self.fault == "chunk not JSON":
            events.insert(1, "{half")
        done = [] if self.fault == "[DONE] missing" else ["[DONE]"]
        if self.fault == "[DONE] early":
            events.insert(-1, done.pop())
        data = "".join(f"data: {event}\n\n" for event in [*events, *done]).encode()
        if self.fault == "bytes of a character apart":
            data = data.replace("\u00e9".encode(), b"\xc3")
        kind = "text/plain" if self.fault == "stream not as events" else "text/event-stream"
        value = {"stream cached": "public, max-age=60", "stream without Cache-Control": ""}.get(self.fault, "no-cache")
        kept = {"Cache-Control": value} if value else {}
        return self._raw(writer, 200, data, {"Content-Type": kind, **kept})


@asynccontextmanager
async def faulty_server(fault: str = "") -> AsyncIterator[str]:
    """Serve on a free port, and yield the URL."""
    server = await asyncio.start_server(FaultySite(fault).handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
