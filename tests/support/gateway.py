"""The proxy's side of external processing: its messages as bytes, and the answers of a picker as records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from dynamo.picker.addresses import Addresses
from dynamo.picker.wire import (
    every_bytes,
    last_bytes,
    last_number,
    of_bytes,
    of_number,
    read,
    read_struct,
    struct_of,
    text_value,
)
from dynamo.runtime.calls.request_plane.base import Instance

BUFFERED = (2, 0)
DUPLEX = (4, 4)
NO_BODY = (0, 0)
ANSWERS = {
    1: "request_headers",
    2: "response_headers",
    3: "request_body",
    4: "response_body",
    5: "request_trailers",
    6: "response_trailers",
    7: "immediate",
}


class NumberedAddresses(Addresses):
    """10.0.0.1:8000 for the first worker that is looked up, and so on."""

    def __init__(self) -> None:
        super().__init__(8000)
        self.by_id: dict[int, str] = {}

    def of(self, instance: Instance | None) -> str | None:
        return None if instance is None else self.by_id.get(instance.instance_id)

    def name(self, *instance_ids: int) -> list[str]:
        """Give these workers an address each, and return the addresses."""
        for each in instance_ids:
            self.by_id.setdefault(each, f"10.0.0.{len(self.by_id) + 1}:8000")
        self.changes += 1
        return [self.by_id[each] for each in instance_ids]


class Answer(Struct):
    """One message of the picker."""

    kind: str
    headers: dict[str, str] = {}
    removed: list[str] = []
    body: bytes = b""
    is_last: bool = False
    status: int = 0
    metadata: dict[str, Any] = {}
    reroutes: bool = False

    @property
    def destination(self) -> str:
        """The address of the header, which must be that of the metadata."""
        named = self.headers["x-gateway-destination-endpoint"]
        assert self.metadata == {"envoy.lb": {"x-gateway-destination-endpoint": named}}
        return named


def read_answer(data: bytes) -> Answer:
    fields = read(data)
    (number,) = [each for each in fields if each in ANSWERS]
    inner = read(last_bytes(fields, number) or b"")
    found = Answer(ANSWERS[number])
    if (metadata := last_bytes(fields, 8)) is not None:
        found.metadata = read_struct(metadata)
    if number == 7:
        found.status = last_number(read(last_bytes(inner, 1) or b""), 1)
        found.body = last_bytes(inner, 3) or b""
        mutation = last_bytes(inner, 2) or b""
    else:
        common = read(last_bytes(inner, 1) or b"")
        mutation, found.reroutes = last_bytes(common, 2) or b"", bool(last_number(common, 5))
        if (changed := last_bytes(common, 3)) is not None:
            streamed = read(last_bytes(read(changed), 3) or b"")
            found.body, found.is_last = last_bytes(streamed, 1) or b"", bool(last_number(streamed, 2))
    headers = read(mutation)
    for option in every_bytes(headers, 1):
        assert last_number(read(option), 3) == 2, "a header of the client must not stand beside that of the picker"
        header = read(last_bytes(read(option), 1) or b"")
        found.headers[(last_bytes(header, 1) or b"").decode()] = (last_bytes(header, 3) or b"").decode()
    found.removed = [name.decode() for name in every_bytes(headers, 2)]
    return found


def _value(value: object) -> bytes:
    if isinstance(value, list):
        return of_bytes(6, b"".join(of_bytes(1, text_value(each)) for each in value))
    assert isinstance(value, str)
    return text_value(value)


def _metadata(by_namespace: Mapping[str, Mapping[str, object]]) -> bytes:
    entries = b""
    for namespace, members in by_namespace.items():
        written = struct_of([(name, _value(value)) for name, value in members.items()])
        entries += of_bytes(1, of_bytes(1, namespace.encode()) + of_bytes(2, written))
    return of_bytes(8, entries) if entries else b""


def headers_message(
    number: int,
    headers: Mapping[str, str],
    *,
    is_last: bool = False,
    modes: tuple[int, int] | None = None,
    metadata: Mapping[str, Mapping[str, object]] | None = None,
) -> bytes:
    """Write the headers of a request (2) or of an answer (3)."""
    table = b"".join(
        of_bytes(1, of_bytes(1, name.encode()) + of_bytes(3, value.encode())) for name, value in headers.items()
    )
    written = of_bytes(number, of_bytes(1, table) + (of_number(3, 1) if is_last else b""))
    if modes is not None:
        written += of_bytes(11, of_number(1, modes[0]) + of_number(2, modes[1]))
    return written + _metadata(metadata or {})


def request_headers(
    path: str = "/v1/completions",
    *,
    method: str = "POST",
    modes: tuple[int, int] = DUPLEX,
    hint: object = None,
    is_last: bool = False,
    **headers: str,
) -> bytes:
    named = {":method": method, ":path": path, "content-type": "application/json"}
    named |= {name.replace("_", "-"): value for name, value in headers.items()}
    metadata = {} if hint is None else {"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": hint}}
    return headers_message(2, named, is_last=is_last, modes=modes, metadata=metadata)


def response_headers(*, served: str | None = None, is_last: bool = False) -> bytes:
    metadata = {} if served is None else {"envoy.lb": {"x-gateway-destination-endpoint-served": served}}
    return headers_message(3, {":status": "200"}, is_last=is_last, metadata=metadata)


def body_message(number: int, body: bytes, *, is_last: bool) -> bytes:
    """Write a part of the body of a request (4) or of an answer (5)."""
    return of_bytes(number, of_bytes(1, body) + (of_number(2, 1) if is_last else b""))


def completion(prompt: object, **members: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt, "max_tokens": 5, **members}).encode()
