"""Answers of every API that is replayed, as what can be compared. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec import Struct, field

# The words of the other APIs for how an answer ended.
_REASONS: Final = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "max_output_tokens": "length",
    "tool_use": "tool_calls", "completed": "stop", "refusal": "content_filter"}  # fmt: skip

_STATUSES: Final = {
    "timeout_error": 504,
    "overloaded_error": 529,
    "invalid_request_error": 400,
    "not_found_error": 404,
    "rate_limit_error": 429,
    "request_aborted": 499,
}  # fmt: skip - of errors inside a stream that do not name their status


class ReplayedAnswer(Struct):
    """What a server answered."""

    status: int = 0  # 0: there was no answer; of a stream that failed, the status of its error
    error: str = ""
    finish_reason: str | None = None  # of the choice that came last, in OpenAI's words
    input_tokens: int | None = None
    output_tokens: int | None = None
    texts: dict[int, str] = field(default_factory=dict)  # by choice, with its reasoning and calls
    ttft_ms: float | None = None
    total_ms: float = 0.0
    late_ms: float = 0.0

    def add(self, choice: int, text: Any) -> None:
        """Append text to a choice."""
        if isinstance(text, str) and text:
            self.texts[choice] = self.texts.get(choice, "") + text


def read_body(status: int, body: bytes) -> ReplayedAnswer:
    """Read an answer that came as one body."""
    answer = ReplayedAnswer(status)
    try:
        value = json.loads(body)
    except (ValueError, UnicodeDecodeError):
        answer.error = "" if status == 200 else body[:500].decode("utf-8", "replace")
        return answer
    if not isinstance(value, dict):
        return answer
    if status != 200:
        answer.error = _error_text(value)
        return answer
    take_object(answer, value)
    return answer


def read_stream(body: bytes) -> ReplayedAnswer:
    """Read an answer that came as server-sent events."""
    answer = ReplayedAnswer(200)
    for event in _events(body):
        if event.get("object") == "chat.completion.chunk" or "choices" in event:
            _take_choices(answer, event)
        elif event.get("type") == "error" or ("error" in event and event.get("type") not in _RESPONSE_EVENTS):
            answer.error = _error_text(event)
            answer.status = _status_of(event)
        else:
            _take_event(answer, event)
    return answer


_RESPONSE_EVENTS: Final = ("response.created", "response.in_progress", "response.completed", "response.incomplete")


def take_object(answer: ReplayedAnswer, value: Mapping[str, Any]) -> None:
    """Take over a whole answer of any API."""
    if isinstance(value.get("choices"), list):
        _take_choices(answer, value)
    elif value.get("object") == "response":
        for item in value.get("output") or ():
            _take_item(answer, item)
        details = value.get("incomplete_details") or {}
        answer.finish_reason = _reason(details.get("reason") or value.get("status"))
        _take_usage(answer, value.get("usage"))
    elif value.get("type") == "message":
        for block in value.get("content") or ():
            _take_block(answer, block)
        answer.finish_reason = _reason(value.get("stop_reason"))
        _take_usage(answer, value.get("usage"))
    else:
        answer.add(0, json.dumps(value.get("data"), sort_keys=True) if "data" in value else "")
        _take_usage(answer, value.get("usage"))


def _take_choices(answer: ReplayedAnswer, value: Mapping[str, Any]) -> None:
    for choice in value["choices"]:
        index = int(choice.get("index") or 0)
        part = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
        answer.add(index, part.get("reasoning_content") or part.get("reasoning"))
        answer.add(index, part.get("content"))
        for call in part.get("tool_calls") or ():
            function = call.get("function") or {}
            answer.add(index, function.get("name"))
            answer.add(index, function.get("arguments"))
        if choice.get("finish_reason") is not None:
            answer.finish_reason = _reason(choice["finish_reason"])
    _take_usage(answer, value.get("usage"))


def _take_event(answer: ReplayedAnswer, event: Mapping[str, Any]) -> None:
    match event.get("type"):
        case "message_start":
            _take_usage(answer, event["message"].get("usage"))
        case "content_block_start":
            _take_block(answer, {**event["content_block"], "input": None})
        case "content_block_delta":
            _take_block(answer, event["delta"])
        case "message_delta":
            answer.finish_reason = _reason(event["delta"].get("stop_reason"))
            _take_usage(answer, event.get("usage"))
        case "response.completed" | "response.incomplete":
            take_object(answer, event["response"])
        case "response.failed":
            answer.error, answer.status = _error_text(event["response"]), _status_of(event["response"])
        case _:
            return


def _take_item(answer: ReplayedAnswer, item: Mapping[str, Any]) -> None:
    answer.add(0, item.get("name"))
    answer.add(0, item.get("arguments"))
    for part in (*(item.get("content") or ()), *(item.get("summary") or ())):
        answer.add(0, part.get("text"))


def _take_block(answer: ReplayedAnswer, block: Mapping[str, Any]) -> None:
    for name in ("text", "thinking", "name", "partial_json"):
        answer.add(0, block.get(name))
    if isinstance(block.get("input"), dict):
        answer.add(0, json.dumps(block["input"]))


def _take_usage(answer: ReplayedAnswer, usage: Any) -> None:
    if not isinstance(usage, dict):
        return
    inputs = usage.get("prompt_tokens", usage.get("input_tokens"))
    outputs = usage.get("completion_tokens", usage.get("output_tokens"))
    if isinstance(inputs, int):
        answer.input_tokens = inputs
    if isinstance(outputs, int):
        answer.output_tokens = outputs


def _events(body: bytes) -> Iterator[dict[str, Any]]:
    for line in body.splitlines():
        if line.startswith(b"data:"):
            try:
                value = json.loads(line[5:])
            except (ValueError, UnicodeDecodeError):
                continue  # [DONE]
            if isinstance(value, dict):
                yield value


def _reason(word: Any) -> str | None:
    return None if word is None else _REASONS.get(str(word), str(word))


def _error_text(value: Mapping[str, Any]) -> str:
    error = value.get("error")
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(error or value.get("message") or value)


def _status_of(value: Mapping[str, Any]) -> int:
    """Return the status that an error inside a stream stands for."""
    error = value.get("error")
    for holder in (error, value):
        code = holder.get("code") if isinstance(holder, dict) else None
        if isinstance(code, int):
            return code
    kind = error.get("type") if isinstance(error, dict) else None
    return _STATUSES.get(str(kind), 500)
