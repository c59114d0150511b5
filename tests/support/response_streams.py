"""A strict reader of the events of the Responses API: it puts the response together again, and refuses what is out of order."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["ResponseReader", "read_events", "without_ids"]

_ENDS = ("response.completed", "response.incomplete", "response.failed")


def read_events(body: bytes) -> list[dict[str, Any]]:
    """Every event of a stream as its data, which must name the event's own type; the terminator must be the last block."""
    blocks = [block for block in body.decode().split("\n\n") if block and not block.startswith(":")]
    assert blocks[-1] == "data: [DONE]", blocks[-1:]
    found = []
    for block in blocks[:-1]:
        head, _, data = block.partition("\n")
        assert head.startswith("event: "), block
        assert data.startswith("data: "), block
        event = json.loads(data.removeprefix("data: "))
        assert event["type"] == head.removeprefix("event: ")
        assert not event.get("error"), "a top-level `error` makes clients raise"
        found.append(event)
    return found


class ResponseReader:
    """Takes events one by one; `response` is there after the last."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self.items: list[dict[str, Any]] = []
        self.response: dict[str, Any] | None = None
        self.kinds = [event["type"] for event in events]
        self._open: dict[str, Any] | None = None
        self._parts: dict[str, dict[str, Any]] = {}  # that are open, by kind
        assert self.kinds[:2] == ["response.created", "response.in_progress"]
        self.id = events[0]["response"]["id"]
        for number, event in enumerate(events):
            assert event["sequence_number"] == number
            assert self.response is None, "an event behind the last"
            self._take(event)
        assert self.response is not None
        assert self._open is None
        assert self.response["output"] == self.items

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind in ("response.created", "response.in_progress"):
            response = event["response"]
            assert (response["id"], response["status"], response["output"]) == (self.id, "in_progress", [])
        elif kind in _ENDS:
            self.response = event["response"]
            assert self.response is not None
            assert self.response["id"] == self.id
            assert self.response["status"] == kind.removeprefix("response.")
        elif kind == "response.output_item.added":
            assert self._open is None, "two items are open"
            assert event["output_index"] == len(self.items)
            self._open = event["item"]
            assert event["item"]["status"] == "in_progress"
        else:
            assert self._open is not None, f"{kind} without an item"
            assert event["output_index"] == len(self.items)
            if kind == "response.output_item.done":
                assert not self._parts, "a part is still open"
                self._end_item(event["item"])
            else:
                assert event["item_id"] == self._open["id"]
                self._take_part(kind, event)

    def _take_part(self, kind: str, event: dict[str, Any]) -> None:
        item = self._open
        assert item is not None
        match kind:
            case "response.content_part.added" | "response.reasoning_summary_part.added":
                part = event["part"]
                assert part["text"] == ""
                assert part["type"] not in self._parts
                self._parts[part["type"]] = part
                listed = item["summary" if part["type"] == "summary_text" else "content"]
                assert event.get("content_index", event.get("summary_index")) == len(listed)
                listed.append(part)
            case "response.content_part.done" | "response.reasoning_summary_part.done":
                assert self._parts.pop(event["part"]["type"]) == event["part"]
            case "response.output_text.delta":
                self._parts["output_text"]["text"] += event["delta"]
                self._parts["output_text"]["logprobs"] += event["logprobs"]
            case "response.output_text.done":
                assert self._parts["output_text"]["text"] == event["text"]
                assert self._parts["output_text"]["logprobs"] == event["logprobs"]
            case "response.reasoning_text.delta":
                self._parts["reasoning_text"]["text"] += event["delta"]
            case "response.reasoning_text.done":
                assert self._parts["reasoning_text"]["text"] == event["text"]
            case "response.reasoning_summary_text.delta":
                self._parts["summary_text"]["text"] += event["delta"]
            case "response.reasoning_summary_text.done":
                assert self._parts["summary_text"]["text"] == event["text"]
            case "response.function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "response.function_call_arguments.done":
                assert (item["arguments"], item["name"]) == (event["arguments"], event["name"])
            case "response.custom_tool_call_input.delta":
                item["input"] += event["delta"]
            case "response.custom_tool_call_input.done":
                assert item["input"] == event["input"]
            case _:
                raise AssertionError(f"an unknown event: {kind}")

    def _end_item(self, done: dict[str, Any]) -> None:
        item, self._open = self._open, None
        assert item is not None
        begun = {name: value for name, value in done.items() if name != "encrypted_content"}  # only the end has it
        assert {**item, "status": done["status"]} == begun
        assert done["status"] in ("completed", "incomplete")
        self.items.append(done)


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs between two answers that say the same."""
    kept = {
        name: value for name, value in response.items() if name not in ("id", "created_at", "completed_at", "nvext")
    }
    kept["output"] = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]
    ]
    return kept
