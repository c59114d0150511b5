"""Traces as JSONL in the format of Mooncake: one request a line. Pure.

`hash_ids` names the blocks of the prompt, one id for each `block_tokens` tokens (512 in the published traces): equal ids are
equal blocks with equal blocks before them. So an id is a stretch of a `Trace`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from dynamo.errors import InvalidArgument
from dynamo.replay.trace import Stretch, Trace, TraceRequest

TRACE_BLOCK_TOKENS: Final = 512
MAX_REQUESTS: Final = 1_000_000  # a request takes about a kilobyte here
MAX_LENGTH: Final = 4_000_000  # tokens of a prompt or an answer
_AGENTIC: Final = ("wait_for", "branches", "prefix_reset", "tool_wait_ms", "tool_events")
_AT_FIELD: Final = re.compile(r" - at `\$\.?([^`]*)`$")


class BadTraceLine(InvalidArgument):
    """A line of a trace cannot be replayed; names the line and the field."""

    def __init__(self, line: int, field: str, problem: str) -> None:
        super().__init__(f"line {line}: {field}: {problem}")
        self.line = line
        self.field = field  # "line" where the whole line is not valid
        self.problem = problem


class _Row(msgspec.Struct):
    """A line as it stands in the file. Members that are not known are ignored, as are those of other tools."""

    timestamp: float | None = None
    created_time: float | None = None
    input_length: int | None = None
    input_tokens: int | None = None
    output_length: int | None = None
    output_tokens: int | None = None
    hash_ids: list[int] | None = None
    request_id: str | int | None = None
    session_id: str | int | None = None
    delay: float | None = None
    delay_ms: float | None = None
    priority: int = 0
    strict_priority: int = 0
    policy_class: str | None = None
    output_token_ids: list[int] | None = None
    wait_for: msgspec.Raw | None = None
    branches: msgspec.Raw | None = None
    prefix_reset: msgspec.Raw | None = None
    tool_wait_ms: msgspec.Raw | None = None
    tool_events: msgspec.Raw | None = None


_decoder: Final = msgspec.json.Decoder(_Row)


def read_mooncake(
    lines: Iterable[bytes | str],
    name: str = "trace",
    *,
    block_tokens: int = TRACE_BLOCK_TOKENS,
    limit: int | None = None,
) -> Trace:
    """Read a trace; `limit`: only the first so many requests. Empty lines are skipped.

    Raises BadTraceLine naming the line (from 1) and the field.
    """
    sessions: set[str] = set()
    requests: list[TraceRequest] = []
    fresh = -1  # keys of stretches that the file gives no id; ids of files are not negative
    for number, line in enumerate(lines, 1):
        if limit is not None and len(requests) >= limit:
            break
        if not line.strip():
            continue
        if len(requests) >= MAX_REQUESTS:
            raise BadTraceLine(number, "line", f"a trace has at most {MAX_REQUESTS:,} requests")
        row = _decode(number, line)
        request = _request(number, row, block_tokens, sessions, fresh)
        fresh -= 1
        if request.session_id is not None:
            sessions.add(request.session_id)
        requests.append(request)
    if not requests:
        raise BadTraceLine(1, "line", "the trace has no request")
    requests.sort(key=lambda request: request.arrival_ms)  # stable: turns of one time keep their order
    return Trace(name, requests)


def _decode(number: int, line: bytes | str) -> _Row:
    try:
        return _decoder.decode(line)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _AT_FIELD.search(text)
        field = found[1] if found is not None and found[1] else "line"
        raise BadTraceLine(number, field, _AT_FIELD.sub("", text)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadTraceLine(number, "line", f"not valid JSON: {error}") from None


def _request(number: int, row: _Row, block_tokens: int, sessions: set[str], fresh: int) -> TraceRequest:
    for field in _AGENTIC:
        if getattr(row, field) is not None:
            raise BadTraceLine(number, field, "agentic traces are not replayed")
    prompt_tokens = _length(number, "input_length", row.input_length, row.input_tokens)
    output_tokens = _length(number, "output_length", row.output_length, row.output_tokens)
    session_id = None if row.session_id is None else str(row.session_id)
    delay = row.delay if row.delay is not None else row.delay_ms
    if delay is not None:
        _check_time(number, "delay", delay)
        if session_id is None:
            raise BadTraceLine(number, "delay", "is the time after the session's turn before; give session_id, too")
    arrival = row.timestamp if row.timestamp is not None else row.created_time
    if session_id not in sessions or delay is None:
        if arrival is None:
            raise BadTraceLine(number, "timestamp", "is missing")
        delay = None
    _check_time(number, "timestamp", arrival or 0.0)
    answer = row.output_token_ids or []
    if answer and len(answer) != output_tokens:
        raise BadTraceLine(number, "output_token_ids", f"has {len(answer)} ids, output_length is {output_tokens}")
    return TraceRequest(
        request_id=str(row.request_id) if row.request_id is not None else f"line-{number}",
        arrival_ms=arrival or 0.0,
        prompt=tuple(_stretches(number, row.hash_ids, prompt_tokens, block_tokens, fresh)),
        output_tokens=output_tokens,
        session_id=session_id,
        delay_ms=delay,
        priority=row.priority,
        strict_priority=row.strict_priority,
        policy_class=row.policy_class,
        output_token_ids=tuple(answer),
    )


def _length(number: int, field: str, value: int | None, alias: int | None) -> int:
    found = value if value is not None else alias
    if found is None:
        raise BadTraceLine(number, field, "is missing")
    if not 1 <= found <= MAX_LENGTH:
        raise BadTraceLine(number, field, f"must be from 1 to {MAX_LENGTH:,}, got {found}")
    return found


def _check_time(number: int, field: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise BadTraceLine(number, field, f"must be a number of milliseconds from 0 on, got {value}")


def _stretches(
    number: int, hash_ids: list[int] | None, prompt_tokens: int, block_tokens: int, fresh: int
) -> Iterator[Stretch]:
    if not hash_ids:
        yield Stretch(fresh, prompt_tokens)  # shares nothing with any other prompt
        return
    needed = -(-prompt_tokens // block_tokens)
    if len(hash_ids) != needed:
        raise BadTraceLine(
            number,
            "hash_ids",
            f"has {len(hash_ids)} ids; {prompt_tokens} tokens in blocks of {block_tokens} need {needed}",
        )
    for index, hash_id in enumerate(hash_ids):
        if not 0 <= hash_id < 2**64:
            raise BadTraceLine(number, f"hash_ids[{index}]", f"must be from 0 to 2^64 - 1, got {hash_id}")
        yield Stretch(hash_id, min(block_tokens, prompt_tokens - index * block_tokens))


def write_mooncake(trace: Trace, *, block_tokens: int = TRACE_BLOCK_TOKENS) -> Iterator[str]:
    """Yield the lines of a trace, each with its line break.

    Two prompts that part inside a block share it no longer: with `block_tokens` of the replay's KV block nothing is lost.
    """
    ids: dict[tuple[int, tuple[tuple[int, int, int], ...]], int] = {}
    for request in trace.requests:
        row: dict[str, object] = {
            "timestamp": request.arrival_ms,
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "hash_ids": list(_hash_ids(request, block_tokens, ids)),
            "request_id": request.request_id,
        }
        for name in ("session_id", "policy_class"):
            if (text := getattr(request, name)) is not None:
                row[name] = text
        for name in ("priority", "strict_priority"):
            if value := getattr(request, name):
                row[name] = value
        if request.delay_ms is not None:
            row["delay"] = request.delay_ms
        if request.output_token_ids:
            row["output_token_ids"] = list(request.output_token_ids)
        yield msgspec.json.encode(row).decode() + "\n"


def _hash_ids(
    request: TraceRequest, block_tokens: int, ids: dict[tuple[int, tuple[tuple[int, int, int], ...]], int]
) -> Iterator[int]:
    """Number the blocks of a prompt: one number for each block and what stands before it."""
    parent = -1
    pieces: list[tuple[int, int, int]] = []  # (key, from, to) of the stretches in the block at hand
    room = block_tokens
    for key, tokens in request.prompt:
        start = 0
        while start < tokens:
            taken = min(room, tokens - start)
            pieces.append((key, start, start + taken))
            start += taken
            room -= taken
            if not room:
                parent = ids.setdefault((parent, tuple(pieces)), len(ids))
                yield parent
                pieces, room = [], block_tokens
    if pieces:
        yield ids.setdefault((parent, tuple(pieces)), len(ids))
