"""Reads streams of the Messages API strictly: what a client must be able to rely on."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["accumulated", "events_of_stream"]

_PIECES = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
_OWN = {"text": {"text_delta"}, "thinking": {"thinking_delta", "signature_delta"}, "tool_use": {"input_json_delta"}}


def events_of_stream(body: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, data) of every event; comments and pings are left out."""
    events = []
    for block in body.decode().split("\n\n"):
        if not block or block.startswith(":"):
            continue
        first, second = block.split("\n")
        name, data = first.removeprefix("event: "), json.loads(second.removeprefix("data: "))
        assert data["type"] == name, block
        if name != "ping":
            events.append((name, data))
    return events


def accumulated(body: bytes) -> dict[str, Any]:
    """Return the message of a whole stream. Asserts the order of its events."""
    events = events_of_stream(body)
    assert events[0][0] == "message_start"
    message: dict[str, Any] = events[0][1]["message"]
    assert message["content"] == []
    assert [name for name, _ in events[-2:]] == ["message_delta", "message_stop"], events[-2:]
    blocks: list[dict[str, Any]] = message["content"]
    open_index: int | None = None
    pieces: list[str] = []
    for name, data in events[1:-2]:
        if name == "content_block_start":
            assert open_index is None, "a block begins inside another one"
            open_index = data["index"]
            assert open_index == len(blocks), "indices have gaps"
            blocks.append(dict(data["content_block"]))
            pieces = []
            continue
        assert data["index"] == open_index, f"{name} of a block that is not open"
        block = blocks[-1]
        if name == "content_block_delta":
            kind = data["delta"]["type"]
            assert kind in _OWN[block["type"]]
            if kind == "signature_delta":
                assert block["signature"] == ""
                block["signature"] = data["delta"]["signature"]
            else:
                pieces.append(data["delta"][_PIECES[kind]])
                assert pieces[-1], "an empty delta"
        else:
            assert name == "content_block_stop"
            whole = "".join(pieces)
            if block["type"] == "tool_use":
                assert block["input"] == {}
                block["input"] = json.loads(whole) if whole else {}
                assert isinstance(block["input"], dict)
            else:
                block[block["type"]] += whole
            open_index = None
    assert open_index is None, "a block was never closed"
    last = events[-2][1]
    assert set(last["delta"]) == {"stop_reason", "stop_sequence"}
    return {**message, **last["delta"], "usage": message["usage"] | last["usage"]}
