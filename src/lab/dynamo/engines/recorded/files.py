"""Reads the files of recordings, and bundles of failed requests, as requests with what came of them.

The records of one request (`request_end`, `request_stream`, `request_payload`) are put together by its id.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from msgspec import Struct, field

from dynamo.errors import InvalidArgument

TRACE_SCHEMA: Final = "dynamo.request.trace.v1"
BUNDLE_SCHEMA: Final = "dynamo.failure.v1"
MAX_UNPACKED_BYTES: Final = 1024 * 1024 * 1024
"""What one compressed file may unpack to: four times the size at which a recorder begins a new file by default. A megabyte of
gzip can hold a gigabyte, and a recording may come from a stranger."""

_PIECE_BYTES: Final = 1024 * 1024
_GZIP: Final = b"\x1f\x8b"

T = TypeVar("T")
JsonRecord = Mapping[str, Any]


class RecordedRequest(Struct):
    """One request of a recording, as far as it was recorded."""

    id: str
    received_ms: float = 0.0
    path: str = ""
    model: str = ""
    status: int | None = None  # None: the file does not record how it ended
    error: str = ""  # what went wrong, in the server's words
    body: dict[str, Any] | None = None
    is_whole: bool = False  # `body` is what the client sent, and not a description of it
    response: dict[str, Any] | None = None
    finish_reason: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    ttft_ms: float | None = None
    total_ms: float | None = None
    keys: list[str] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    outputs: list[Any] | None = None


def read_recordings(paths: Iterable[Path]) -> list[RecordedRequest]:
    """Return the requests of some files, in the order in which they came.

    Raises InvalidArgument for a file that cannot be read, and for a line that is neither a record nor a bundle, naming it.
    """
    found: dict[str, RecordedRequest] = {}
    for path in paths:
        for number, line in _objects(path):
            try:
                _take(found, line)
            except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
                raise InvalidArgument(f"{path}, line {number}: not a record of requests: {error!r}") from error
    return sorted(found.values(), key=lambda request: request.received_ms)


def _objects(path: Path) -> Iterator[tuple[int, JsonRecord]]:
    """Yield the JSON objects of a file with their lines. The last line may be torn: its writer may have been killed."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror or error}") from error
    if data[:2] == _GZIP:
        data = _unpacked(data, path)
    whole = _json(data)
    if isinstance(whole, dict):  # one object over several lines, such as a bundle that a person has saved
        yield 1, whole
        return
    lines = data.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        value = _json(line)
        if isinstance(value, dict):
            yield number, value
        elif number < len(lines):
            raise InvalidArgument(f"{path}, line {number}: not a JSON object")
    if len(lines) == 1 and not isinstance(_json(lines[0]), dict):
        raise InvalidArgument(f"{path}, line 1: not a JSON object")


def _unpacked(data: bytes, path: Path) -> bytes:
    """Return what a compressed file holds, up to where it was torn. Raises InvalidArgument."""
    pieces: list[bytes] = []
    size, rest = 0, data
    try:
        while rest:  # a file is one member after the other: each process that appended began its own
            unpacker = zlib.decompressobj(wbits=31)
            while rest and not unpacker.eof:
                pieces.append(unpacker.decompress(rest, _PIECE_BYTES))
                rest = unpacker.unconsumed_tail
                size += len(pieces[-1])
                if size > MAX_UNPACKED_BYTES:
                    raise InvalidArgument(
                        f"{path} unpacks to more than {MAX_UNPACKED_BYTES >> 20} MiB; unpack it, and replay it in parts"
                    )
            rest = unpacker.unused_data.lstrip(b"\0")  # padding between members
    except zlib.error as error:
        if not pieces:
            raise InvalidArgument(f"{path} is not a compressed recording: {error}") from error
        # What came before the tear is in `pieces`.
    return b"".join(pieces)


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _take(found: dict[str, RecordedRequest], line: JsonRecord) -> None:
    if line.get("schema") == BUNDLE_SCHEMA:
        made = _of_bundle(line)
        found[made.id] = made
        return
    event = line.get("event")
    if not isinstance(event, dict) or event.get("schema") != TRACE_SCHEMA:
        raise ValueError(f"neither an event of {TRACE_SCHEMA} nor a bundle of {BUNDLE_SCHEMA}")
    match event.get("event_type"):
        case "request_end":
            _take_end(_of(found, event["request"]), event["request"])
        case "request_stream":
            _take_stream(_of(found, event["stream"]), event["stream"])
        case "request_payload":
            _take_payload(_of(found, event["payload"]), event["payload"])
        case _:
            return  # a record of something else


def _of(found: dict[str, RecordedRequest], record: JsonRecord) -> RecordedRequest:
    id = str(record["request_id"])
    made = found.get(id)
    if made is None:
        made = found[id] = RecordedRequest(id)
    if "request_received_ms" in record:
        made.received_ms = _time(record["request_received_ms"])
    return made


def _take_end(made: RecordedRequest, record: JsonRecord) -> None:
    made.path, made.model = str(record.get("path", "")), str(record.get("model") or made.model)
    made.status = _number(record.get("http_status"), int)
    made.error = str(record.get("error") or "")
    made.input_tokens, made.output_tokens = (
        _number(record.get(name), int) for name in ("input_tokens", "output_tokens")
    )
    made.ttft_ms, made.total_ms = (_number(record.get(name), int, float) for name in ("ttft_ms", "total_time_ms"))
    made.finish_reason = (record.get("finish_reason_metadata") or {}).get("finish_reason")
    if made.body is None and isinstance(record.get("parameters"), dict):
        made.body = dict(record["parameters"])


def _take_stream(made: RecordedRequest, record: JsonRecord) -> None:
    made.keys = list(record.get("content_keys") or made.keys)
    made.gaps_ms = [float(gap) for gap in record["gaps_ms"]]
    made.choices = [int(choice) for choice in record.get("choices", ())]
    made.outputs = record.get("outputs")


def _take_payload(made: RecordedRequest, record: JsonRecord) -> None:
    made.path, made.model = str(record.get("path") or made.path), str(record.get("model") or made.model)
    made.keys = list(record.get("content_keys") or made.keys)
    if made.status is None:
        made.status = _number(record.get("http_status"), int)
    if isinstance(record.get("request"), dict):
        made.body, made.is_whole = dict(record["request"]), True
    if isinstance(record.get("response"), dict):
        made.response = dict(record["response"])


def _of_bundle(bundle: JsonRecord) -> RecordedRequest:
    request, error = bundle["request"], bundle["error"]
    tokens = cast("dict[str, Any]", bundle.get("tokens") or {})
    body = request.get("body")
    return RecordedRequest(
        id=str(bundle["id"]),
        received_ms=_time(bundle["at_ms"]) - _time(bundle.get("elapsed_ms", 0)),
        path=str(request["path"]),
        model=str(request.get("model") or ""),
        status=int(error["status"]),
        error=str(error.get("answered") or error.get("message") or ""),
        body=dict(body) if isinstance(body, dict) else None,
        is_whole=request.get("content") == "whole",
        input_tokens=_number(tokens.get("input"), int),
        output_tokens=_number(tokens.get("output"), int),
        total_ms=_number(bundle.get("elapsed_ms"), int, float),
    )


def _time(value: Any) -> float:
    """Return a time in milliseconds. Raises ValueError for one at which nothing can be sent."""
    if not math.isfinite(made := float(value)):
        raise ValueError(f"not a time: {made}")
    return made


def _number(value: object, *kinds: type[T]) -> T | None:
    """Return a number, or None where there is none. Raises TypeError for anything else."""
    if value is None:
        return None
    if isinstance(value, kinds):
        return value
    raise TypeError(f"not a number: {type(value).__name__}")
