"""OpenAI's Responses API of the faulty server."""

from __future__ import annotations

from typing import Any

from support.faulty_apis.reply import Reply, as_events, as_json, openai_refusal, parsed, words

TOKENS = [f"w{n} " if n % 5 else f"caf\u00e9{n} " for n in range(60)]
KNOWN = {
    *("model", "input", "max_output_tokens", "temperature", "store", "stream", "instructions", "tools", "tool_choice"),
    *("text", "previous_response_id", "reasoning", "include", "metadata", "parallel_tool_calls", "prompt_cache_key"),
    "client_metadata",
}


class FaultyResponses:
    """The API. `fault` names what it does wrongly."""

    def __init__(self, fault: str, model: str) -> None:
        self.fault, self.model = fault, model
        self.kept: dict[str, tuple[dict[str, Any], int]] = {}  # the response, and the words of its conversation

    def reply(self, method: str, path: str, body: bytes) -> Reply | None:
        if path == "/v1/responses":
            if method != "POST" or self.fault == "route missing":
                return openai_refusal(404 if method == "POST" else 405, "no such route")
            return self._create(body)
        if path.startswith("/v1/responses/"):
            return self._kept(method, path.rpartition("/")[2])
        return None

    def _kept(self, method: str, name: str) -> Reply:
        if name not in self.kept:
            return openai_refusal(404, "no such response")
        found, _ = self.kept[name]
        if method == "DELETE":
            if self.fault != "deleted response found":
                del self.kept[name]
            return as_json(200, {"id": name, "object": "response", "deleted": True})
        return as_json(200, {**found, "status": "queued"} if self.fault == "stored object differs" else found)

    def _refusal(self, asked: Any) -> Reply | None:
        if asked is None:
            return openai_refusal(500 if self.fault == "500 for malformed JSON" else 400, "not JSON")
        if "input" not in asked:
            status = 422 if self.fault == "422 for a missing input" else 400
            return openai_refusal(status, "missing", "input", as_text=self.fault == "error as text")
        if asked["model"] != self.model and self.fault != "200 for an unknown model":
            return openai_refusal(404, "no such model", "model")
        if not isinstance(asked.get("max_output_tokens", 1), int) and self.fault != "wrong type taken":
            return openai_refusal(400, "not a number", "max_output_tokens")
        if unknown := asked.keys() - KNOWN:
            status = 500 if self.fault == "unknown member is 500" else 400
            return openai_refusal(status, "not known", min(unknown))
        if self.fault == "client_metadata refused" and "client_metadata" in asked:
            return openai_refusal(400, "not known", "client_metadata")
        earlier = asked.get("previous_response_id")
        if earlier and earlier not in self.kept and self.fault != "unknown previous taken":
            return openai_refusal(400, "no such response", "previous_response_id")
        return self._refused_items(asked["input"])

    def _refused_items(self, given: Any) -> Reply | None:
        given = given if isinstance(given, list) else []
        outputs = [item for item in given if item.get("type") == "function_call_output"]
        if self.fault == "results in another order refused" and [o["call_id"] for o in outputs] == ["call_second", "call_first"] and isinstance(outputs[0]["output"], str):  # fmt: skip
            return openai_refusal(500, "no such call")
        if self.fault == "result parts refused" and any(isinstance(o["output"], list) for o in outputs):
            return openai_refusal(400, "not a text")
        if self.fault == "long list refused" and len(given) > 20:
            return openai_refusal(500, "no more")
        if self.fault == "later developer refused" and any(item.get("role") == "developer" for item in given[1:]):
            return openai_refusal(500, "the template")
        return None

    def _items(self, asked: dict[str, Any]) -> tuple[list[dict[str, Any]], str, int]:
        limit = asked.get("max_output_tokens", 16)
        limit = limit if isinstance(limit, int) else 16
        tokens = TOKENS[:limit]
        text, status = "".join(tokens), "incomplete"
        if asked.get("text"):
            text, status = '{"ok": 1}' if self.fault == "schema broken" else '{"ok": true}', "completed"
        choice = asked.get("tool_choice")
        named = isinstance(choice, dict) or (choice == "required" and self.fault != "required ignored")
        if named or (choice == "none" and self.fault == "tool called in spite of none"):
            broken = self.fault == "arguments not JSON" and not asked.get("stream")
            arguments = '{"ok": tru' if broken else '{"ok": true}'
            call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "report"}
            return [{**call, "arguments": arguments, "status": "completed"}], "completed", 5
        if choice == "required":
            status = "completed"
        if self.fault == "thoughts in the text" and asked.get("reasoning"):
            text = "<think>so</think>" + text
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return [
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": status, "content": [part]},
        ], status, len(tokens)  # fmt: skip

    def _counted(self, asked: dict[str, Any]) -> int:
        found = 3 + words(asked["input"])
        if self.fault == "items counted differently" and isinstance(asked["input"], list):
            found += 1
        if self.fault != "instructions ignored":
            found += words(asked.get("instructions"))
        if self.fault != "earlier turns forgotten":
            found += self.kept.get(asked.get("previous_response_id", ""), ({}, 0))[1]
        return found

    def _create(self, body: bytes) -> Reply:
        asked = parsed(body)
        if refusal := self._refusal(asked):
            return refusal
        output, status, made = self._items(asked)
        count = self._counted(asked)
        usage: dict[str, Any] = {
            "input_tokens": count,
            "output_tokens": made,
            "total_tokens": count + made,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 1},
        }
        response = {
            "id": f"resp_{len(self.kept)}",
            "object": "response",
            "created_at": 1,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": asked.get("tool_choice", "auto"),
            "tools": asked.get("tools", []),
            "previous_response_id": asked.get("previous_response_id"),
            "store": bool(asked.get("store")),
            "usage": usage,
        }
        if asked.get("stream"):
            return self._streamed(response)
        reply = self._whole(response)
        if response["store"]:
            self.kept[response["id"]] = response, count
        return reply

    def _whole(self, response: dict[str, Any]) -> Reply:
        match self.fault:
            case "tools missing":
                del response["tools"]
            case "item without an id":
                response["output"][-1]["id"] = None
            case "error beside an answer":
                response["error"] = {"code": "server_error"}
            case "usage does not add up":
                response["usage"]["total_tokens"] += 1
            case "details missing":
                del response["usage"]["output_tokens_details"]
            case "limit called completed":
                response["status"], response["incomplete_details"] = "completed", None
        return as_json(200, response, **({"Content-Type": "text/plain"} if self.fault == "answer not as JSON" else {}))

    def _streamed(self, response: dict[str, Any]) -> Reply:
        if self.fault == "streamed usage differs":
            response["usage"] |= {"input_tokens": 1, "total_tokens": 1 + response["usage"]["output_tokens"]}
        is_call = response["output"][0]["type"] == "function_call"
        if self.fault == "no usage of streamed calls" and is_call:
            response["usage"] = None
        begun = {**response, "status": "in_progress", "usage": None, "incomplete_details": None, "output": []}
        if self.fault == "output at the start":
            begun["output"] = response["output"]
        events: list[dict[str, Any]] = [{"type": "response.created", "response": begun}]
        if self.fault != "in_progress missing":
            events.append({"type": "response.in_progress", "response": begun})
        for index, item in enumerate(response["output"]):
            events += self._item_events(index, item)
        last = {**response, "id": "resp_other"} if self.fault == "another id at the end" else response
        if self.fault == "usage missing at the end" and not is_call:
            last = {**last, "usage": {}}
        if self.fault == "finished items missing at the end":
            last = {**last, "output": []}
        events += [{"type": f"response.{response['status']}", "response": last}] * (1 + (self.fault == "two ends"))
        events = self._disturbed(events)
        numbered = [{**event, "sequence_number": n - (n > 3 and self.fault == "number twice")} for n, event in enumerate(events)]  # fmt: skip
        named = [("event" if self.fault == "name of events wrong" else event["type"], event) for event in numbered]
        reply = as_events(named, kind="text/plain" if self.fault == "stream as text" else "text/event-stream",
            cache="max-age=9" if self.fault == "stream cached" else "no-cache")  # fmt: skip
        if self.fault == "bytes of a character apart":
            return Reply(200, reply.body.replace("\u00e9".encode(), b"\xc3"), reply.headers)
        return reply

    def _disturbed(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        kinds = [event["type"] for event in events]
        if self.fault == "item not done" and kinds.count("response.output_item.added") > 1:
            del events[-2]
            events[-1]["response"] = {**events[-1]["response"], "output": events[-1]["response"]["output"][:-1]}
        if self.fault == "items overlap" and kinds.count("response.output_item.added") > 1:
            first = kinds.index("response.output_item.done")
            events[first], events[first + 1] = events[first + 1], events[first]
        return events

    def _item_events(self, index: int, item: dict[str, Any]) -> list[dict[str, Any]]:
        index += self.fault == "output_index from 1"
        at = {"item_id": item["id"], "output_index": index}
        inner: list[dict[str, Any]] = []
        begun = item
        if item["type"] == "message":
            part = item["content"][0]
            text = {**at, "content_index": 0}
            pieces = [part["text"][n : n + 5] for n in range(0, len(part["text"]), 5)]
            if self.fault == "delta lost":
                del pieces[1]
            inner.append({"type": "response.content_part.added", **text, "part": {**part, "text": ""}})
            inner += [{"type": "response.output_text.delta", **text, "delta": piece} for piece in pieces]
            inner.append({"type": "response.output_text.done", **text, "text": part["text"]})
            if self.fault != "part not done":
                inner.append({"type": "response.content_part.done", **text, "part": part})
            begun = {**item, "content": [], "status": "in_progress"}
        if item["type"] == "function_call":
            kind, arguments = "response.function_call_arguments", item["arguments"]
            inner += [{"type": f"{kind}.delta", **at, "delta": part} for part in (arguments[:4], arguments[4:])]
            inner.append({"type": f"{kind}.done", **at, "arguments": arguments})
            begun = {**item, "arguments": "", "status": "in_progress"}
            if self.fault == "call_id changes":
                begun["call_id"] = "call_0"
        return [
            {"type": "response.output_item.added", "output_index": index, "item": begun},
            *inner,
            {"type": "response.output_item.done", "output_index": index, "item": item},
        ]
