"""Anthropic's Messages API of the faulty server."""

from __future__ import annotations

from typing import Any

from support.faulty_apis.reply import Reply, as_events, as_json, parsed, words

TOKENS = [f"w{n} " if n % 5 else f"caf\u00e9{n} " for n in range(60)]
KNOWN = {
    *("model", "messages", "max_tokens", "temperature", "stream", "system", "tools", "tool_choice", "thinking"),
    *("stop_sequences", "metadata"),
}
_KINDS = {400: "invalid_request_error", 404: "not_found_error"}


class FaultyMessages:
    """The API. `fault` names what it does wrongly."""

    def __init__(self, fault: str, model: str) -> None:
        self.fault, self.model = fault, model

    def reply(self, method: str, path: str, body: bytes) -> Reply | None:
        where = path.partition("?")[0]
        if where == "/v1/messages/count_tokens":
            return self._count(parsed(body))
        if where != "/v1/messages":
            return None
        if method != "POST" or self.fault == "route missing":
            return self._refuse(404 if method == "POST" else 405, "no such route")
        return self._refusal(path, parsed(body)) or self._answer(parsed(body))

    def listed(self) -> Reply:
        """Return the list of models for Anthropic's clients."""
        model = {"type": "model", "id": self.model, "display_name": self.model, "created_at": "2026-01-01T00:00:00Z"}
        if self.fault == "model without a name":
            del model["display_name"]
        return as_json(200, {"data": [model], "has_more": False, "first_id": self.model, "last_id": self.model})

    def _refuse(self, status: int, message: str) -> Reply:
        kind = "api_error" if self.fault == "error.type does not fit" else _KINDS.get(status, "api_error")
        error: dict[str, Any] = {"type": kind, "message": message}
        if self.fault == "error without its type":
            return as_json(status, {"error": error})
        return as_json(status, {"type": "error", "error": error})

    def _refusal(self, path: str, asked: Any) -> Reply | None:
        if asked is None:
            return self._refuse(500 if self.fault == "500 for malformed JSON" else 400, "not JSON")
        if "messages" not in asked:
            return self._refuse(422 if self.fault == "422 for missing messages" else 400, "messages: field required")
        if "max_tokens" not in asked and self.fault != "max_tokens optional":
            return self._refuse(400, "max_tokens: field required")
        if asked["model"] != self.model and self.fault != "200 for an unknown model":
            return self._refuse(404, "no such model")
        if not isinstance(asked.get("max_tokens", 1), int) and self.fault != "wrong type taken":
            return self._refuse(400, "max_tokens: not a number")
        if unknown := asked.keys() - KNOWN:
            return self._refuse(500 if self.fault == "unknown member is 500" else 400, f"{min(unknown)}: not known")
        if self.fault == "?beta=true refused" and "?" in path:
            return self._refuse(400, "no such beta")
        return self._refused_turns(asked["messages"])

    def _refused_turns(self, turns: list[Any]) -> Reply | None:
        found = [b for turn in turns if isinstance(turn["content"], list) for b in turn["content"]]
        results = [block for block in found if block["type"] == "tool_result"]
        plain = results and isinstance(results[0]["content"], str) and "is_error" not in results[0]
        refused = {
            "results in another order refused": plain,
            "result blocks refused": any(isinstance(r["content"], list) for r in results),
            "is_error refused": any("is_error" in r for r in results),
            "thinking refused": any(block["type"] == "thinking" for block in found),
            "long list refused": len(turns) > 20,
        }
        return self._refuse(500, "not so") if refused.get(self.fault) else None

    def _count(self, asked: Any) -> Reply:
        found = words(asked["messages"]) + 3
        if self.fault == "count far off":
            found *= 3
        return as_json(200, {"tokens" if self.fault == "count without its name" else "input_tokens": found})

    def _content(self, asked: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any], int]:
        limit = asked.get("max_tokens", 16)
        tokens = TOKENS[: (limit if isinstance(limit, int) else 16) + (self.fault == "max_tokens overrun")]
        text, end = "".join(tokens), {"stop_reason": "max_tokens", "stop_sequence": None}
        if limit == 2 and self.fault == "limit called end_turn":
            end["stop_reason"] = "end_turn"
        if limit == 24 and self.fault == "stop_reason of another API":
            end["stop_reason"] = "length"
        for stop in asked.get("stop_sequences", []):
            at = text.find(stop)
            if at >= 0:
                text = text[:at]
                named = None if self.fault == "stop_sequence not named" else stop
                end = {"stop_reason": "stop_sequence", "stop_sequence": named}
        kind = asked.get("tool_choice", {}).get("type")
        if kind == "any" and self.fault == "any ignored":
            return [{"type": "text", "text": "no"}], {"stop_reason": "end_turn", "stop_sequence": None}, 1
        if kind in ("tool", "any") or (kind == "none" and self.fault == "tool called in spite of none"):
            is_text = self.fault == "input as text" and not asked.get("stream")
            call: dict[str, Any] = {"type": "tool_use", "id": "toolu_1", "name": "report"}
            call["input"] = '{"ok": true}' if is_text else {"ok": True}
            return [call], {"stop_reason": "tool_use", "stop_sequence": None}, 5
        thinking = {"type": "thinking", "thinking": "so", "signature": "s"}
        if self.fault == "thoughts in the text" and asked.get("thinking"):
            text = "<think>so</think>" + text
        return [thinking, {"type": "text", "text": text}], end, len(tokens)

    def _answer(self, asked: dict[str, Any]) -> Reply:
        content, end, made = self._content(asked)
        count = 3 + words(asked["messages"])
        system = asked.get("system")
        if self.fault != "system ignored":
            count += words(system)
        if self.fault == "system blocks counted twice" and isinstance(system, list):
            count += words(system)
        if self.fault == "content blocks counted differently" and isinstance(asked["messages"][-1]["content"], list):
            count += 1
        usage: dict[str, Any] = {"input_tokens": count, "cache_read_input_tokens": 0, "output_tokens": made}
        message = {"id": "msg_1", "type": "message", "role": "assistant", "model": self.model, "content": content}
        if asked.get("stream"):
            return self._streamed({**message, **end, "usage": usage})
        match self.fault:
            case "role missing":
                del message["role"]
            case "block of an unknown type":
                message["content"] = [*content, {"type": "output_text", "text": ""}]
            case "count of the cache as text":
                usage["cache_read_input_tokens"] = "0"
        more = {"request-id": "1"} if self.fault != "request-id missing" else {}
        if self.fault == "answer not as JSON":
            more["Content-Type"] = "text/plain"
        return as_json(200, {**message, **end, "usage": usage}, **more)

    def _streamed(self, message: dict[str, Any]) -> Reply:
        content, usage = message["content"], message["usage"]
        is_call = content[0]["type"] == "tool_use"
        if self.fault == "streamed usage differs":
            usage = {**usage, "input_tokens": 1}
        begun: dict[str, Any] = {**message, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
        if self.fault == "content at the start":
            begun["content"] = content
        events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}, {"type": "ping"}]
        for index, block in enumerate(content):
            events += self._block(index + (self.fault == "index from 1"), block)
        delta = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
        if self.fault == "end without stop_reason" and not is_call:
            delta["stop_reason"] = None
        if self.fault == "call ends with end_turn" and is_call:
            delta["stop_reason"] = "end_turn"
        events.append({"type": "message_delta", "delta": delta, "usage": {"output_tokens": usage["output_tokens"]}})
        if self.fault != "message_stop missing":
            events.append({"type": "message_stop"})
        named = [("event" if self.fault == "name of events wrong" else event["type"], event) for event in events]
        reply = as_events(named, kind="text/plain" if self.fault == "stream as text" else "text/event-stream",
            cache="max-age=9" if self.fault == "stream cached" else "no-cache")  # fmt: skip
        if self.fault == "bytes of a character apart":
            return Reply(200, reply.body.replace("\u00e9".encode(), b"\xc3"), reply.headers)
        return reply

    def _block(self, index: int, block: dict[str, Any]) -> list[dict[str, Any]]:
        match block["type"]:
            case "text":
                text = block["text"]
                deltas = [{"type": "text_delta", "text": text[n : n + 5]} for n in range(0, len(text), 5)]
                begun = {**block, "text": ""}
                if self.fault == "text as thinking_delta":
                    deltas[0] = {"type": "thinking_delta", "thinking": text[:5]}
            case "thinking":
                deltas = [{"type": "thinking_delta", "thinking": "so"}, {"type": "signature_delta", "signature": "s"}]
                begun = {**block, "thinking": "", "signature": ""}
            case _:
                text = '{"ok": true}'
                parts = (text[:4], text[4:-1]) if self.fault == "input cut off" else (text[:4], text[4:])
                deltas = [{"type": "input_json_delta", "partial_json": part} for part in parts]
                begun = {**block, "input": {}}
        found: list[dict[str, Any]] = [{"type": "content_block_start", "index": index, "content_block": begun}]
        found += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        if not (self.fault == "block not stopped" and block["type"] == "text"):
            found.append({"type": "content_block_stop", "index": index})
        return found
