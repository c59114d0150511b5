"""What may go wrong, and a plan of it: the vocabulary that the simulation and real processes share. Pure.

A plan is TOML, a list of `[[fault]]`. `parse_plan` reads it, `plan_text` writes it; `docs/chaos.md` explains the fields.
"""

from __future__ import annotations

import enum
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynamo.errors import InvalidArgument

MAX_FAULTS: Final = 1000  # each request checks all that have not fired
MAX_NUMBER: Final = 2**31 - 1
MAX_TEXT: Final = 1024
MAX_SECONDS: Final = 86_400.0
_LAST_NUMBER: Final = re.compile(r"\d+$")


class FaultKind(enum.StrEnum):
    """The kinds of faults. Each happens at a logical point: an item of a worker's stream, or a chunk at the client."""

    DELAY = "delay"  # a connection holds everything back for a while
    DROP = "drop"  # a connection is lost
    DUPLICATE = "duplicate"  # an item arrives twice
    CUT = "cut"  # an item is missing
    REORDER = "reorder"  # an item arrives after its successor
    PARTITION = "partition"  # nothing arrives, in one direction or both; both ends give up after the ping limit
    CRASH = "crash"  # a worker process is killed, and another is started later
    FREEZE = "freeze"  # a worker process neither computes nor answers for a while
    STALL = "stall"  # an engine sends nothing more for one request
    ENGINE_ERROR = "engine-error"  # an engine raises
    DRAIN = "drain"  # a worker receives a SIGTERM, and another takes its place
    LEASE = "lease"  # a lease is lost, and taken again
    STORE_CUT = "store-cut"  # one process cannot reach the store
    STORE_STOP = "store-stop"  # no process can
    STORE_WIPE = "store-wipe"  # no process can, and it comes back empty
    FRONTEND_DRAIN = "frontend-drain"  # a frontend receives a SIGTERM, and another takes its place
    FRONTEND_CRASH = "frontend-crash"  # a frontend process is killed, and another is started later
    CLOCK_JUMP = "clock-jump"  # the machine was suspended: all timers are late
    SLOW_CLIENT = "slow-client"  # a client reads slowly
    VANISH = "vanish"  # a client leaves


ALL_KINDS: Final = frozenset(FaultKind)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. It fires when a request that it is meant for reaches `point`; one whose point is never reached does not."""

    kind: FaultKind
    request: int | None = None  # its number, from 0: of the scenario, or of those a process gets. None: any
    point: int = 0  # 0: the request was sent; n: the nth item (of the client's body, for client faults)
    seconds: float = 0.0
    way: str = "both"  # a partition's direction, seen from the worker: "up", "down", "both"
    is_patient: bool = True  # a stalled engine notices its cancellation; False: only being cancelled by force ends it
    process: str | int | None = None  # a process by name, or a worker by the number in its name. None: any
    request_id: str | None = None  # only the request with this id
    metadata: tuple[tuple[str, str], ...] = ()  # only requests that bring all of these
    times: int = 1  # how often it fires in one process

    def __str__(self) -> str:
        more = f" for {self.seconds:g} s" if self.seconds else ""
        way = f" ({self.way})" if self.kind is FaultKind.PARTITION else ""
        where = f" at {self.process}" if self.process is not None else ""
        return f"{self.kind} at item {self.point} of {self._whose}{more}{way}{where}"

    def is_at(self, name: str) -> bool:
        """Return whether the fault applies to the process of this name."""
        if isinstance(self.process, int):
            number = _LAST_NUMBER.search(name)
            return number is not None and int(number[0]) == self.process
        return self.process in (None, name)

    @property
    def _whose(self) -> str:
        named = [] if self.request is None else [f"request {self.request}"]
        named += [] if self.request_id is None else [f"request id {self.request_id}"]
        named += [f"a request with {name}={value}" for name, value in self.metadata]
        return " and ".join(named) or "any request"


class InvalidPlan(InvalidArgument):
    """A plan that cannot be read. Names the fault, the field and what is allowed."""


# -- reading ----------------------------------------------------------------------------------------------------------

_FIELDS: Final = ("kind", "process", "request", "id", "metadata", "point", "seconds", "way", "patient", "times")
_ITEM_KINDS: Final = frozenset({FaultKind.DUPLICATE, FaultKind.CUT, FaultKind.REORDER})
_LASTING: Final = frozenset(
    {FaultKind.DELAY, FaultKind.PARTITION, FaultKind.FREEZE, FaultKind.CLOCK_JUMP, FaultKind.SLOW_CLIENT}
    | {FaultKind.STORE_CUT, FaultKind.STORE_STOP, FaultKind.STORE_WIPE}
)  # without a time these mean nothing

# What belongs to some kinds only; for the others it is refused, as it would be ignored.
_ONLY_OF: Final[Mapping[str, frozenset[FaultKind]]] = {
    # After a crash or a drain the time is what passes until the simulation starts a replacement; a stall without one has
    # no end.
    "seconds": _LASTING
    | {FaultKind.STALL, FaultKind.CRASH, FaultKind.DRAIN, FaultKind.FRONTEND_CRASH, FaultKind.FRONTEND_DRAIN},
    "way": frozenset({FaultKind.PARTITION, FaultKind.STORE_CUT}),
    "patient": frozenset({FaultKind.STALL}),
}
_WAYS: Final = ("up", "down", "both")


def read_plan(path: Path | str) -> tuple[Fault, ...]:
    """Read the faults of a file. Raises InvalidPlan, also for a file that cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidPlan(f"chaos plan {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InvalidPlan(f"chaos plan {path}: this is not UTF-8 text") from None
    return parse_plan(text, name=f"chaos plan {path}")


def parse_plan(text: str, *, name: str = "chaos plan") -> tuple[Fault, ...]:
    """Parse the faults of a plan's text. Raises InvalidPlan."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidPlan(f"{name}: this is not TOML: {error}") from None
    unknown = sorted(set(document) - {"fault"})
    if unknown:
        raise InvalidPlan(f"{name}: there is no {unknown[0]!r} in a plan; it is a list of [[fault]]")
    tables = document.get("fault", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise InvalidPlan(f"{name}: fault must be a list of tables; write [[fault]], with two brackets")
    if len(tables) > MAX_FAULTS:
        raise InvalidPlan(f"{name}: {len(tables)} faults; at most {MAX_FAULTS} are allowed")
    return tuple(_Reader(f"{name}: fault {number}", table).fault() for number, table in enumerate(tables, 1))


class _Reader:
    """Reads one `[[fault]]`."""

    def __init__(self, where: str, table: Mapping[str, Any]) -> None:
        self._where, self._table = where, table

    def fault(self) -> Fault:
        for field in self._table:
            if field not in _FIELDS:
                raise self._wrong(f"there is no field {field!r}; a fault has {', '.join(_FIELDS)}")
        kind = self._kind()
        for field, kinds in _ONLY_OF.items():
            if field in self._table and kind not in kinds:
                raise self._wrong(f"{field} has no meaning for {kind}; it belongs to {', '.join(sorted(kinds))}")
        point = self._whole("point", 0, least=1 if kind in _ITEM_KINDS else 0)
        return Fault(
            kind,
            self._whole("request", None),
            1 if point is None else point,
            self._seconds(kind),
            self._one_of("way", _WAYS, "both"),
            self._flag("patient", True),
            self._process(),
            self._text("id"),
            self._metadata(),
            self._whole("times", 1, least=1) or 1,
        )

    def _wrong(self, text: str) -> InvalidPlan:
        return InvalidPlan(f"{self._where}: {text}")

    def _kind(self) -> FaultKind:
        allowed = ", ".join(sorted(FaultKind))
        if "kind" not in self._table:
            raise self._wrong(f"kind is missing; it is one of {allowed}")
        value = self._table["kind"]
        try:
            return FaultKind(value)
        except ValueError:
            raise self._wrong(f"kind: there is no kind {value!r}; it is one of {allowed}") from None

    def _whole(self, field: str, default: int | None, *, least: int = 0) -> int | None:
        if field not in self._table and least > 0:
            return max(default or 0, least)
        value = self._table.get(field, default)
        if value is None:
            return None
        if type(value) is not int or not least <= value <= MAX_NUMBER:
            raise self._wrong(f"{field} must be a whole number from {least}, got {value!r}")
        return value

    def _seconds(self, kind: FaultKind) -> float:
        value = self._table.get("seconds", 0.0)
        least = "above 0" if kind in _LASTING else "from 0"
        is_number = type(value) in (int, float) and math.isfinite(value)
        if not is_number or not 0 <= value <= MAX_SECONDS or (kind in _LASTING and value == 0):
            got = repr(value) if "seconds" in self._table else "none"
            raise self._wrong(f"seconds must be a number {least} to {MAX_SECONDS:g} for {kind}, got {got}")
        return float(value)

    def _one_of(self, field: str, allowed: tuple[str, ...], default: str) -> str:
        value = self._table.get(field, default)
        if not isinstance(value, str) or value not in allowed:
            raise self._wrong(f"{field} must be one of {', '.join(allowed)}, got {value!r}")
        return value

    def _flag(self, field: str, default: bool) -> bool:
        value = self._table.get(field, default)
        if not isinstance(value, bool):
            raise self._wrong(f"{field} must be true or false, got {value!r}")
        return value

    def _process(self) -> str | int | None:
        value = self._table.get("process")
        if type(value) is int:
            return self._whole("process", None)
        if value is not None and not isinstance(value, str):
            raise self._wrong(f"process must be a name, or the number of a worker, got {value!r}")
        return self._text("process")

    def _text(self, field: str) -> str | None:
        value = self._table.get(field)
        if value is None:
            return None
        if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT:
            raise self._wrong(f"{field} must be a text of 1 to {MAX_TEXT} characters, got {value!r:.100}")
        return value

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        value = self._table.get("metadata", {})
        if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
            raise self._wrong(f'metadata must be a table of texts, like {{ tag = "x" }}, got {value!r:.100}')
        return tuple(sorted(value.items()))


# -- writing ----------------------------------------------------------------------------------------------------------


def plan_text(faults: Iterable[Fault]) -> str:
    """Write the plan as TOML: `parse_plan` gives the same faults again, except for fields without a meaning for
    their kind.
    """
    return "\n".join(_table_text(fault) for fault in faults)


def _table_text(fault: Fault) -> str:
    lines = ["[[fault]]", f"kind = {_quoted(fault.kind)}"]
    if fault.process is not None:
        lines.append(f"process = {fault.process if isinstance(fault.process, int) else _quoted(fault.process)}")
    if fault.request is not None:
        lines.append(f"request = {fault.request}")
    if fault.request_id is not None:
        lines.append(f"id = {_quoted(fault.request_id)}")
    if fault.metadata:
        pairs = ", ".join(f"{_quoted(name)} = {_quoted(value)}" for name, value in fault.metadata)
        lines.append(f"metadata = {{ {pairs} }}")
    lines.append(f"point = {fault.point}")
    if fault.seconds and fault.kind in _ONLY_OF["seconds"]:
        lines.append(f"seconds = {fault.seconds!r}")
    if fault.way != "both" and fault.kind in _ONLY_OF["way"]:
        lines.append(f"way = {_quoted(fault.way)}")
    if not fault.is_patient and fault.kind in _ONLY_OF["patient"]:
        lines.append("patient = false")
    if fault.times != 1:
        lines.append(f"times = {fault.times}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    # A JSON string is a TOML string, once it is left in Unicode (TOML has no surrogates) and DEL is escaped.
    return json.dumps(str(text), ensure_ascii=False).replace("\x7f", "\\u007f")
