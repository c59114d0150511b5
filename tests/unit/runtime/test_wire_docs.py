"""docs/wire.md tells the truth: its example is what the codec produces, its kinds are the codec's."""

from __future__ import annotations

import re
from pathlib import Path

from dynamo.runtime.calls.request_plane.mux.frames import (
    HEADER,
    MAGIC,
    MAX_PAYLOAD,
    FrameDecoder,
    Kind,
    decode_hello,
    decode_items,
    decode_open,
)

PAGE = (Path(__file__).parents[3] / "docs" / "wire.md").read_text()


def example(side: str) -> bytes:
    """The bytes of one side of the page's example: hex pairs and quoted text, comments and prose dropped."""
    block = PAGE.rsplit("```text", 1)[1].split("```", 1)[0]
    wire, current = b"", ""
    for line in block.strip().splitlines():
        if line.startswith(("caller", "worker")):
            current = line[:6]
        if current != side:
            continue
        code = re.split(r"\s{6,}(?=[A-Z\[m])", line[6:].strip() and line[8:])[0]
        for token in re.findall(r'"[^"]*"|\b[0-9a-f]{2}\b', code):
            wire += token[1:-1].encode() if token.startswith('"') else bytes.fromhex(token)
    return wire


def test_the_callers_example_is_what_we_read() -> None:
    wire = example("caller")
    assert wire.startswith(MAGIC)
    hello, request = FrameDecoder().feed(wire[len(MAGIC) :])
    assert (hello[0], decode_hello(hello[3]).version) == (Kind.HELLO, 1)
    head, body = decode_open(request[3])
    assert (request[0], request[2], head.path, head.id, body) == (Kind.OPEN, 1, "p", "r", b"\x80")


def test_the_workers_example_is_what_we_read() -> None:
    hello, items = FrameDecoder().feed(example("worker"))
    assert hello[0] == Kind.HELLO
    found = [(i.stream_id, i.index, i.offset, i.token_ids, i.finish_reason) for i in decode_items(items[3])]
    assert found == [(1, 0, 0, [5], None), (1, 0, 1, [6], "stop"), (1, -2, 2, [], None)]


def test_every_kind_stands_in_the_table() -> None:
    table = {int(number): name for number, name in re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", PAGE, re.MULTILINE)}
    assert table == {kind.value: kind.name for kind in Kind}
    assert f"{MAX_PAYLOAD:,}" in PAGE
    assert HEADER.size == 12
