from __future__ import annotations

import pytest

from dynamo.cli.inspect import client
from dynamo.cli.inspect.client import EventStreamDecoder, SentEvent, StreamTooLong
from support.cases import each_case


def events(text: str) -> list[SentEvent]:
    decoder = EventStreamDecoder()
    found = (decoder.feed(line.encode()) for line in text.splitlines(keepends=True))
    return [event for event in found if event is not None]


@each_case(
    ("text", "expected"),
    [
        ("event: patch\nid: 4\ndata: {}\n\n", [SentEvent("patch", b"{}", "4")]),
        ("data: a\ndata: b\n\n", [SentEvent("message", b"a\nb")]),
        ("data:a\r\n\r\n", [SentEvent("message", b"a")]),
        (": comment\n\n", []),
        ("event: empty\n\ndata: x\n\n", [SentEvent("message", b"x")]),
        ("id: 1\ndata: x\n\ndata: y\n\n", [SentEvent("message", b"x", "1"), SentEvent("message", b"y", "1")]),
        ("data: cut off\n", []),
        ("unknown: x\ndata\n\n", [SentEvent("message", b"")]),
    ],
)
def test_events(text: str, expected: list[SentEvent]) -> None:
    assert events(text) == expected


def test_an_event_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_EVENT_BYTES", 10)
    with pytest.raises(StreamTooLong):
        events("data: 123456\ndata: 123456\n")
