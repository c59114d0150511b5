"""The filter language of the inspector: `model:demo age>30 stalled 52a1`. Pure: the server and the terminal share it.

A filter is a list of terms, separated by spaces, all of which have to hold. A term is one of

* `FIELD:VALUE`, such as `model:demo` or `worker:7e9f`. Letter case does not count, and `*` stands for any characters. The
  value of `worker`, `id` and `endpoint` is the beginning of the field; other fields are compared as a whole;
* `FIGURE>NUMBER`, also with `<`, `>=`, `<=` and `=`. A duration takes a unit (`500ms`, `30s`, `5m`, `2h`; seconds without
  one), and a count may end in `k`. An unknown figure of a row fulfils no comparison;
* a mark: `stalled`, `streaming`, `fallback` (another model serves), `failed` or `quarantined`;
* anything else: a part of an id.

`!` before a term turns it round. A term in double quotes, or a value in them, may have spaces and the signs above.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from msgspec import Struct

from dynamo.errors import InvalidArgument
from dynamo.protocol.inspector.views import RecentView, StreamView, WorkerView
from dynamo.protocol.request_ids import uuid_in

MAX_CHARACTERS: Final = 1024
MAX_TERMS: Final = 32

Row = StreamView | RecentView | WorkerView


class FilterError(InvalidArgument):
    """A filter that is not understood; `part` is the term that is wrong."""

    def __init__(self, part: str, reason: str) -> None:
        super().__init__(f"filter: {reason}")
        self.part = part


def _texts(name: str) -> Callable[[Row], Iterable[str]]:
    def read(row: Row) -> Iterable[str]:
        value = getattr(row, name, None)
        return () if value is None else (str(value),)

    return read


def _models(row: Row) -> Iterable[str]:
    if isinstance(row, WorkerView):
        return row.models
    return [name for name in (row.model, row.served_by) if name is not None]


def _workers(row: Row) -> Iterable[str]:
    return (row.id,) if isinstance(row, WorkerView) else row.workers


def _ids(row: Row) -> Iterable[str]:
    client = getattr(row, "client_request_id", None)
    known = (row.id, uuid_in(row.id))
    return known if client is None else (*known, client)


FIELDS: Final[Mapping[str, Callable[[Row], Iterable[str]]]] = {
    "id": _ids,
    "model": _models,
    "worker": _workers,
    **{name: _texts(name) for name in (
        "key", "phase", "endpoint", "frontend", "outcome", "code", "status", "state", "role", "wire", "address",
    )},
}  # fmt: skip
"""The fields that have texts, by what a filter calls them."""

_BEGINNINGS: Final = frozenset({"id", "worker", "endpoint"})


def _age(row: Row, now_ms: int) -> float | None:
    if isinstance(row, RecentView):
        return (row.ended_ms - row.started_ms) / 1000
    since = row.since_ms if isinstance(row, WorkerView) else row.started_ms
    return None if since is None else (now_ms - since) / 1000


def _silent(row: Row, now_ms: int) -> float | None:
    if isinstance(row, StreamView):
        return None if row.last_token_ms is None else (now_ms - row.last_token_ms) / 1000
    if isinstance(row, WorkerView):
        return None if row.silent_ms is None else (now_ms - row.silent_ms) / 1000
    return None


def _kv(row: Row, now_ms: int) -> float | None:
    if not isinstance(row, WorkerView) or row.kv_blocks_used is None or not row.kv_blocks_total:
        return None
    return 100 * row.kv_blocks_used / row.kv_blocks_total


def _attempts(row: Row, now_ms: int) -> float | None:
    if isinstance(row, WorkerView):
        return None
    return row.attempt if isinstance(row, StreamView) else row.attempts


def _figure(*names: str) -> Callable[[Row, int], float | None]:
    def read(row: Row, now_ms: int) -> float | None:
        for name in names:
            found: float | None = getattr(row, name, None)
            if found is not None:
                return found
        return None

    return read


FIGURES: Final[Mapping[str, Callable[[Row, int], float | None]]] = {
    "age": _age,
    "wait": _figure("queued_seconds", "queue_age_seconds"),
    "ttft": _figure("ttft_seconds"),
    "silent": _silent,
    "in": _figure("prompt_tokens"),
    "cached": _figure("cached_tokens"),
    "out": _figure("output_tokens"),
    "max": _figure("max_tokens"),
    "rate": _figure("tokens_per_second", "output_tokens_per_second"),
    "attempt": _attempts,
    "n": _figure("choices"),
    "priority": _figure("priority"),
    "status": _figure("status"),
    "running": _figure("running"),
    "queued": _figure("queued"),
    "kv": _kv,
}
"""The figures that can be compared; `kv` is a percentage."""

_DURATIONS: Final = frozenset({"age", "wait", "ttft", "silent"})


def _is_failed(row: Row) -> bool:
    return isinstance(row, RecentView) and row.outcome != "ok"


MARKS: Final[Mapping[str, Callable[[Row], bool]]] = {
    "stalled": lambda row: isinstance(row, StreamView) and row.is_stalled,
    "streaming": lambda row: isinstance(row, StreamView) and row.is_streaming,
    "fallback": lambda row: not isinstance(row, WorkerView) and row.served_by is not None,
    "failed": _is_failed,
    "quarantined": lambda row: isinstance(row, WorkerView) and row.state == "quarantined",
}
"""What a row is, in one word."""

_COMPARISONS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    ">": lambda one, other: one > other,
    "<": lambda one, other: one < other,
    ">=": lambda one, other: one >= other,
    "<=": lambda one, other: one <= other,
    "=": lambda one, other: one == other,
}
_UNITS: Final[Mapping[str, float]] = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

_PART: Final = re.compile(r'(?:"[^"]*"|[^\s"])+')
_COMPARED: Final = re.compile(r"([a-z]+)(>=|<=|>|<|=)(.*)", re.DOTALL)
_NAMED: Final = re.compile(r"([a-z_]+):(.*)", re.DOTALL)
_NUMBER: Final = re.compile(r"(-?[0-9]{1,15}(?:\.[0-9]{1,9})?)(ms|s|m|h|k)?")


class _Term(Struct, frozen=True):
    holds: Callable[[Row, int], bool]
    is_turned: bool


class Filter(Struct, frozen=True):
    """A filter that was read. An empty one holds for every row."""

    text: str
    terms: tuple[_Term, ...] = ()

    def matches(self, row: Row, now_ms: int) -> bool:
        """Return whether every term holds for a row; `now_ms` is the time that ages are reckoned at."""
        return all(term.holds(row, now_ms) is not term.is_turned for term in self.terms)


def parse_filter(text: str) -> Filter:
    """Read a filter. Raises FilterError, which names the term that is wrong."""
    if len(text) > MAX_CHARACTERS:
        raise FilterError(text[:32], f"it has {len(text)} characters, and {MAX_CHARACTERS} are read")
    if text.count('"') % 2:
        raise FilterError(text[text.rindex('"') :], 'a double quote (") is not closed')
    parts = _PART.findall(text)
    if len(parts) > MAX_TERMS:
        raise FilterError(parts[MAX_TERMS], f"it has {len(parts)} terms, and {MAX_TERMS} are read")
    return Filter(text, tuple([_read(part) for part in parts]))


def _read(part: str) -> _Term:
    is_turned = part.startswith("!")
    body = part[1:] if is_turned else part
    if not body:
        raise FilterError(part, "a term stands behind `!`")
    if not body.startswith('"'):
        if (found := _COMPARED.fullmatch(body)) is not None:
            return _Term(_comparison(part, *found.groups()), is_turned)
        if (found := _NAMED.fullmatch(body)) is not None:
            return _Term(_equality(part, *found.groups()), is_turned)
        if (mark := MARKS.get(body.lower())) is not None:
            return _Term(lambda row, _: mark(row), is_turned)
    wanted = body.replace('"', "").lower()
    return _Term(lambda row, _: any(wanted in each.lower() for each in _ids(row)), is_turned)


def _comparison(part: str, name: str, sign: str, written: str) -> Callable[[Row, int], bool]:
    figure = FIGURES.get(name)
    if figure is None:
        raise FilterError(part, f"{name!r} is not a figure; there are {', '.join(FIGURES)}")
    found = _NUMBER.fullmatch(written)
    if found is None:
        raise FilterError(part, f"{written[:32]!r} behind {name}{sign} is not a number")
    value, unit = float(found[1]), found[2]
    if unit == "k" and name not in _DURATIONS:
        value *= 1000
    elif unit is not None:
        if name not in _DURATIONS or unit not in _UNITS:
            kind = "a duration (ms, s, m, h)" if name in _DURATIONS else "a count (k)"
            raise FilterError(part, f"{unit!r} is not a unit of {name}, which is {kind}")
        value *= _UNITS[unit]
    compare = _COMPARISONS[sign]

    def holds(row: Row, now_ms: int) -> bool:
        measured = figure(row, now_ms)
        return measured is not None and compare(measured, value)

    return holds


def _equality(part: str, name: str, written: str) -> Callable[[Row, int], bool]:
    read = FIELDS.get(name)
    if read is None:
        raise FilterError(part, f"{name!r} is not a field; there are {', '.join(FIELDS)}")
    wanted = written.replace('"', "").lower()
    if not wanted:
        raise FilterError(part, f"a value stands behind {name}:")
    if name in _BEGINNINGS and not wanted.endswith("*"):
        wanted += "*"
    if "*" not in wanted:
        return lambda row, _: any(wanted == each.lower() for each in read(row))
    pieces = wanted.split("*")
    return lambda row, _: any(_fits(each.lower(), pieces) for each in read(row))


def _fits(text: str, pieces: list[str]) -> bool:
    """Return whether a text is the pieces in their order with anything between them; linear, unlike a pattern."""
    first, last = pieces[0], pieces[-1]
    if not text.startswith(first) or len(text) < len(first) + len(last) or not text.endswith(last):
        return False
    at, end = len(first), len(text) - len(last)
    for piece in pieces[1:-1]:
        found = text.find(piece, at, end)
        if found < 0:
            return False
        at = found + len(piece)
    return True
