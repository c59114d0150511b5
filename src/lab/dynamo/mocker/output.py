"""The token ids that a mock engine answers with: seeded by request, or those of a trace."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from dynamo.errors import InvalidArgument

FIRST_ID: Final = 1000
LAST_ID: Final = 1999
_IDS: Final = range(FIRST_ID, LAST_ID + 1)
_CHUNK: Final = 64  # ids drawn at a time

MAX_TRACE_ROWS: Final = 1_000_000


def prompt_seed(prompt: Sequence[int]) -> int:
    """Return a number that stands for a prompt, the same one in every process."""
    return xxhash.xxh3_64_intdigest(array("I", prompt).tobytes())


def random_ids(seed: str) -> Iterator[int]:
    """Yield ids without end, the same ones for the same seed."""
    chance = random.Random(seed)
    while True:
        yield from chance.choices(_IDS, k=_CHUNK)


@dataclass(frozen=True, slots=True)
class ReasoningShape:
    """How the ids of an answer begin with a thought: a start id, `thinking_ratio` of the tokens in all, an end id."""

    start_thinking_token_id: int
    end_thinking_token_id: int
    thinking_ratio: float

    def __post_init__(self) -> None:
        for name in ("start_thinking_token_id", "end_thinking_token_id"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < 2**32:
                raise InvalidArgument(f"reasoning.{name} must be a token id, got {value!r}")
        if type(self.thinking_ratio) not in (int, float) or not 0 <= self.thinking_ratio <= 1:
            raise InvalidArgument(f"reasoning.thinking_ratio must be in 0..1, got {self.thinking_ratio!r}")

    def thinking_tokens(self, output_tokens: int) -> int:
        """Return how many of the tokens are the thought, both ids included."""
        thinking = int(output_tokens * self.thinking_ratio)
        return 0 if output_tokens < 2 or not thinking else max(2, thinking)

    def shaped(self, ids: Iterator[int], output_tokens: int) -> Iterator[int]:
        """Yield `ids` with the thought's ids in their places."""
        thinking = self.thinking_tokens(output_tokens)
        for number, token_id in enumerate(ids, 1):
            if number == 1 and thinking:
                yield self.start_thinking_token_id
            elif number == thinking:
                yield self.end_thinking_token_id
            else:
                yield token_id


class ResponseTrace:
    """Answers by their keys, from a trace of one JSON object a line.

    A row's key is its request_id, else "session_id:turn", where turn counts the rows of the session from 0, else the
    number of its line from 0.
    """

    def __init__(self, rows: Mapping[str, list[int]]) -> None:
        self._rows = rows

    @classmethod
    def read(cls, path: Path) -> ResponseTrace:
        """Read a file; blocking. Raises InvalidArgument that names the line for a row that is not right, or a second key."""
        rows: dict[str, list[int]] = {}
        turns: dict[str, int] = {}
        try:
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines):
                    if line.strip():
                        where = f"{path}, line {number + 1}"
                        if len(rows) == MAX_TRACE_ROWS:
                            raise InvalidArgument(f"{where}: at most {MAX_TRACE_ROWS} rows")
                        key, ids = _row(line, number, turns, where)
                        if key in rows:
                            raise InvalidArgument(f"{where}: a second row with the key {key!r}")
                        rows[key] = ids
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"response replay trace {path} cannot be read: {error}") from error
        return cls(rows)

    def find(self, key: str) -> list[int] | None:
        """Return the ids of a row; None: no row has this key."""
        return self._rows.get(key)


def _row(line: str, number: int, turns: dict[str, int], where: str) -> tuple[str, list[int]]:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise InvalidArgument(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise InvalidArgument(f"{where}: expected an object, got {type(row).__name__}")
    ids = row.get("output_token_ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < 2**32 for i in ids):
        raise InvalidArgument(f"{where}: output_token_ids must be a list of token ids")
    expected = row.get("output_length", row.get("output_tokens", len(ids)))
    if expected != len(ids):
        raise InvalidArgument(f"{where}: output_length is {expected!r}, but there are {len(ids)} output_token_ids")
    session = row.get("session_id")
    turn = turns.get(str(session), 0)
    turns[str(session)] = turn + 1
    if row.get("request_id") is not None:
        return str(row["request_id"]), ids
    return (f"{session}:{turn}" if session is not None else str(number)), ids
