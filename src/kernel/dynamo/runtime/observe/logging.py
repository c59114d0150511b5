"""Log records as an operator reads them (`readable`) or as a collector does (`jsonl`), filtered by `DYN_LOG`.

Everything goes through the standard library's `logging`. Fields are given as `extra={"request_id": ...}` and appear
flattened; `log_span` adds fields to every record of the running task, the engine's own records included.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import tomllib
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

import msgspec

from dynamo.runtime.base.settings import FromEnvironment
from dynamo.runtime.observe.log_text import MAX_FIELD_CHARACTERS, one_line, safe_lines
from dynamo.settings.foreign import has_colour
from dynamo.settings.readers import path, switch, text
from dynamo.settings.table import setting

if TYPE_CHECKING:
    from dynamo.runtime.observe.tracing import TracedRequest

TRACE: Final = 5
LEVELS: Final[Mapping[str, int]] = {
    "trace": TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "off": logging.CRITICAL + 10,
}
SYSTEM_CONFIG: Final = Path("/opt/dynamo/etc/logging.toml")
ALWAYS_ENABLED: Final = "request_span"  # the target whose spans carry the request ids

# -- the filter -----------------------------------------------------------------------------------------------------------

_DIRECTIVE: Final = re.compile(r"^([\w.:\-]*)(?:\[([\w.\-]*)(?:\{([^}]*)\})?\])?(?:=(\w+))?$")


class _Selector(msgspec.Struct, frozen=True):
    """A directive that matches a record's fields: `target[span{field=value}]=level`."""

    target: str
    span: str
    fields: tuple[tuple[str, str | None], ...]  # value None: the field must be there
    level: int

    def matches(self, target: str, fields: Mapping[str, object]) -> bool:
        return (
            _covers(self.target, target)
            and (not self.span or fields.get("span_name") == self.span)
            and all(n in fields and (v is None or str(fields[n]) == v) for n, v in self.fields)
        )


class LogFilter(msgspec.Struct, frozen=True):
    """Which records pass: the longest target that covers a record decides; without one, the default.

    Targets are logger names, matched by whole dotted segments; `a::b` is read as `a.b`.
    """

    default: int = logging.INFO
    targets: tuple[tuple[str, int], ...] = ()
    selectors: tuple[_Selector, ...] = ()
    rejected: tuple[str, ...] = ()  # directives that could not be read

    @classmethod
    def parse(cls, text: str, *, base: LogFilter | None = None) -> LogFilter:
        """Read `level,target=level,...`; on top of `base`, whose default stays if `text` gives none.

        A text of targets only silences every other target. A bare dotted name is a target at its most verbose; any
        other bare word that is no level is a mistake, which is kept in `rejected` and counts as INFO.
        """
        default: int | None = None
        targets = dict(base.targets) if base else {}
        selectors = list(base.selectors) if base else []
        rejected: list[str] = []
        parts = [part.strip() for part in _split(text) if part.strip()]
        for part in parts:
            found = _DIRECTIVE.match(part)
            level = None if found is None or found[4] is None else LEVELS.get(found[4].lower())
            if found is None or (found[4] is not None and level is None):
                rejected.append(part)
            elif part.lower() in LEVELS:
                default = LEVELS[part.lower()]
            elif "[" in part:
                fields = tuple(_field(item) for item in (found[3] or "").split(",") if item.strip())
                selectors.append(_Selector(_dotted(found[1]), found[2], fields, TRACE if level is None else level))
            elif level is None and "." not in part and "::" not in part:
                rejected.append(part)
                default = logging.INFO if default is None else default
            else:
                targets[_dotted(found[1])] = TRACE if level is None else level
        if default is None:
            if base is not None:
                default = base.default
            else:
                default = LEVELS["off"] if len(parts) > len(rejected) else logging.INFO
        ordered = tuple(sorted(targets.items(), key=lambda item: -len(item[0])))
        return cls(default, ordered, tuple(selectors), tuple(rejected))

    @property
    def lowest(self) -> int:
        """The most verbose level that any directive enables: below it nothing need be formatted."""
        return min((self.default, *(level for _, level in self.targets), *(s.level for s in self.selectors)))

    def level_for(self, target: str) -> int:
        """Return the lowest level that passes for a target, selectors aside."""
        for prefix, level in self.targets:
            if _covers(prefix, target):
                return level
        return self.default

    def allows(self, target: str, level: int, fields: Mapping[str, object] | None = None) -> bool:
        """Return whether a record passes."""
        if level >= self.level_for(target) or _covers(ALWAYS_ENABLED, target):
            return True
        return any(level >= s.level and s.matches(target, fields or {}) for s in self.selectors)


def _split(text: str) -> Iterable[str]:
    """Split at commas outside braces."""
    return re.split(r",(?![^{}]*\})", text)


def _field(item: str) -> tuple[str, str | None]:
    name, equals, value = item.partition("=")
    return name.strip(), value.strip().strip('"') if equals else None


def _dotted(target: str) -> str:
    return target.replace("::", ".").strip(".")


def _covers(prefix: str, target: str) -> bool:
    return not prefix or target == prefix or target.startswith(prefix + ".")


# -- settings -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoggingVariables(FromEnvironment):
    """What an operator sets for the log. `LoggingSettings` is what follows from it."""

    # fmt: off
    directives: str = setting("", "DYN_LOG", text,
        "A level, or `target=level` pairs, separated by commas: `info,dynamo.frontend=debug`", shown="info")
    style: str = setting("", "DYN_LOGGING_CONSOLE_FORMAT", text, "`readable` or `jsonl`; see [logs](logs.md)",
        shown="readable")
    jsonl: bool = setting(False, "DYN_LOGGING_JSONL", switch, "The older way to say `jsonl`")
    config_path: Path | None = setting(None, "DYN_LOGGING_CONFIG_PATH", path,
        "A TOML file with levels; `DYN_LOG` wins over it")
    span_events: bool = setting(False, "DYN_LOGGING_SPAN_EVENTS", switch,
        "Also log the beginning and the end of each span: of every request, and of blocks that code opens with "
        "`log_span`")
    local_time: bool = setting(False, "DYN_LOG_USE_LOCAL_TZ", switch, "Local time instead of UTC")
    no_ansi: bool = setting(False, "DYN_SDK_DISABLE_ANSI_LOGGING", switch, "No colours")
    # fmt: on


@dataclass(frozen=True, slots=True)
class LoggingSettings:
    """How this process logs."""

    filter: LogFilter = field(default_factory=LogFilter)
    jsonl: bool = False
    ansi: bool = False
    local_time: bool = False
    span_events: bool = False
    complaints: tuple[str, ...] = ()  # what could not be read, for stderr once logging works

    @classmethod
    def from_env(
        cls, env: Mapping[str, str] | None = None, *, is_tty: bool = False, system_config: Path = SYSTEM_CONFIG
    ) -> LoggingSettings:
        """Read `DYN_LOG` over the file of `DYN_LOGGING_CONFIG_PATH` over the system's file. `RUST_LOG` is ignored."""
        given = LoggingVariables.from_env(env)
        complaints: list[str] = []
        base: LogFilter | None = None
        for file in (system_config, given.config_path):
            if file is not None and (file.is_file() or file is not system_config):
                try:
                    base = _from_toml(file, base)
                except (OSError, ValueError) as error:  # also a TOMLDecodeError
                    complaints.append(f"the logging configuration {file} cannot be read: {error}")
        chosen = LogFilter.parse(given.directives, base=base) if given.directives else base or LogFilter()
        complaints += [f"DYN_LOG: {part!r} is neither a level nor target=level" for part in chosen.rejected]
        style = given.style.lower()
        if style not in ("", "readable", "jsonl"):
            complaints.append(f"DYN_LOGGING_CONSOLE_FORMAT={style!r} is neither readable nor jsonl; using readable")
            style = "readable"
        return cls(
            filter=chosen,
            jsonl=style == "jsonl" or (not style and given.jsonl),
            ansi=is_tty and not given.no_ansi,
            local_time=given.local_time,
            span_events=given.span_events,
            complaints=tuple(complaints),
        )


def _from_toml(path: Path, base: LogFilter | None) -> LogFilter:
    with path.open("rb") as file:
        values = tomllib.load(file)
    parts: list[str] = []
    if "log_level" in values:
        parts.append(str(values["log_level"]))
    filters = values.get("log_filters", {})
    if not isinstance(filters, dict):
        raise ValueError("log_filters must be a table of target = level")
    parts += [f"{target}={level}" for target, level in filters.items()]
    return LogFilter.parse(",".join(parts), base=base or LogFilter())


# -- fields ---------------------------------------------------------------------------------------------------------------

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_SPAN: ContextVar[dict[str, object] | None] = ContextVar("dynamo_log_span", default=None)


def enter_log_span(name: str, fields: Mapping[str, object]) -> None:
    """Log the rest of the running task, and of the tasks it starts, with these fields: for tasks that serve one request.

    None values are left out. It costs a dict. The fields end with the task; `close_log_span` only reports the end.
    """
    _SPAN.set(_span_fields(name, fields))
    if _Process.span_events:
        _spans.info(SPAN_ENTRY)


def enter_request_span(endpoint_fields: Mapping[str, object], context: TracedRequest) -> None:
    """Log the rest of this task as the request `context` at an endpoint; `endpoint_fields` are made once for all.

    The engine's own records get the fields too: a traceback then names the request it belongs to.
    """
    fields = {**endpoint_fields, "span_name": "handle_payload", "request_id": context.id()}
    trace = context.trace
    if trace is not None:
        fields["trace_id"] = trace.trace_id
        fields["parent_id"] = trace.span_id
        if trace.x_request_id is not None:
            fields["x_request_id"] = trace.x_request_id
    _SPAN.set(fields)
    if _Process.span_events:
        _spans.info(SPAN_ENTRY)


def annotate_log_span(**fields: object) -> None:
    """Add fields to the span of the running task: what is known only later belongs to its last records, too."""
    span = _SPAN.get()
    if span is not None:
        span.update({key: value for key, value in fields.items() if value is not None})


def close_log_span(seconds: float) -> None:
    """Report the end of the running task's span after `seconds`, where `DYN_LOGGING_SPAN_EVENTS` is set."""
    if _Process.span_events:
        _spans.info(SPAN_CLOSE, extra={"duration_us": int(seconds * 1e6)})


@contextmanager
def log_span(name: str, **fields: object) -> Iterator[None]:
    """Log a block with these fields. With `DYN_LOGGING_SPAN_EVENTS` its beginning and end are records of their own."""
    token = _SPAN.set(_span_fields(name, fields))
    began = time.monotonic()
    try:
        if _Process.span_events:
            _spans.info(SPAN_ENTRY)
        yield
    finally:
        close_log_span(time.monotonic() - began)
        _SPAN.reset(token)


def has_span_events() -> bool:
    """Return whether spans are records, too: `DYN_LOGGING_SPAN_EVENTS` is set."""
    return _Process.span_events


@contextmanager
def span_events(name: str, **fields: object) -> Iterator[None]:
    """Log the beginning and end of a block as those of a span; the records between keep the fields of the span around it."""
    own = {"span_name": name, **{key: value for key, value in fields.items() if value is not None}}
    _spans.info(SPAN_ENTRY, extra=own)
    began = time.monotonic()
    try:
        yield
    finally:
        _spans.info(SPAN_CLOSE, extra={**own, "duration_us": int((time.monotonic() - began) * 1e6)})


def request_level() -> int:
    """Return the level of the records that accompany every request: INFO for a collector, DEBUG for a reader.

    A collector pairs records; a person reads one line for each request, which is the frontend's `request completed`.
    """
    return logging.INFO if _Process.jsonl else logging.DEBUG


SPAN_ENTRY: Final = "SPAN_FIRST_ENTRY"
SPAN_CLOSE: Final = "SPAN_CLOSED"
_spans: Final = logging.getLogger(ALWAYS_ENABLED)


def _span_fields(name: str, fields: Mapping[str, object]) -> dict[str, object]:
    if None in fields.values():
        fields = {key: value for key, value in fields.items() if value is not None}
    return {**(_SPAN.get() or {}), "span_name": name, **fields}


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """Return the fields of a record: those of its span, then its own `extra`."""
    own = {key: value for key, value in vars(record).items() if key not in _STANDARD and key[:1] != "_"}
    span = _SPAN.get()
    return {**span, **own} if span else own


def target_of(record: logging.LogRecord) -> str:
    """Return the logger's name, which is the path of a module by convention: where a reader and `DYN_LOG` expect it."""
    return record.module if record.name == "root" else record.name


def _function_target(record: logging.LogRecord) -> str:
    """Return `module.function`, which directives of `DYN_LOG` that were written for the native system may name."""
    return target_of(record) if record.funcName in (None, "", "<module>") else f"{target_of(record)}.{record.funcName}"


# -- formats --------------------------------------------------------------------------------------------------------------

_NAMES: Final = ((logging.ERROR, "ERROR"), (logging.WARNING, "WARN"), (logging.INFO, "INFO"), (logging.DEBUG, "DEBUG"))
_LEVEL_NAMES: Final = dict(_NAMES)
_COLORS: Final = {"ERROR": "31", "WARN": "33", "INFO": "32", "DEBUG": "34", "TRACE": "35"}
_QUOTED: Final = re.compile(r'[\s"=]')
MAX_FIELDS: Final = 48  # of one record; ours have ten at most
MAX_NAME_CHARACTERS: Final = 128  # of a field, a span or a target


def _level_name(level: int) -> str:
    return next((name for floor, name in _NAMES if level >= floor), "TRACE")


def _time_text(created: float, *, local: bool) -> str:
    if local:
        return datetime.fromtimestamp(created).astimezone().isoformat(timespec="microseconds")
    micros = round((created - int(created)) * 1e6)
    return f"{_second_text(int(created) + micros // 1_000_000)}.{micros % 1_000_000:06d}Z"


@lru_cache(maxsize=4)
def _second_text(second: int) -> str:
    return datetime.fromtimestamp(second, timezone.utc).isoformat()[:19]  # noqa: UP017 - `datetime` is the class


@lru_cache(maxsize=512)
def _safe_name(text: str) -> str:
    """Return the name of a logger or span as one safe line; nearly every record has one of a few dozen."""
    return one_line(text, MAX_NAME_CHARACTERS)


def _text(value: object) -> str:
    """Return a field's value for a reader; in quotes where a bare one could be taken for two fields."""
    text = value if isinstance(value, str) else str(value)
    if text and _QUOTED.search(text) is None:
        return one_line(text, MAX_FIELD_CHARACTERS)
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{one_line(quoted, MAX_FIELD_CHARACTERS)}"'


def _bounded(fields: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the fields of one record, of bounded number, under safe names."""
    for number, (key, value) in enumerate(fields.items()):
        if number == MAX_FIELDS:
            yield "fields_cut", len(fields) - MAX_FIELDS
            return
        yield one_line(key, MAX_NAME_CHARACTERS), value


def _fields_text(fields: Mapping[str, object]) -> str:
    """Return the fields of a record as ` key=value`, each safe and of bounded length.

    Nearly every record has short fields of plain words, and all of them together show it: printable ASCII without a quote,
    and no more blanks and equals signs than fields. Patterns take thirty times as long to find that.
    """
    written, count = "".join([f" {key}={value}" for key, value in fields.items()]), len(fields)
    if (
        len(written) <= MAX_FIELD_CHARACTERS
        and written.isascii()
        and written.isprintable()
        and written.count(" ") == written.count("=") == count <= MAX_FIELDS
        and not ('"' in written or " =" in written or "= " in f"{written} ")
        and max(map(len, fields), default=0) <= MAX_NAME_CHARACTERS
    ):
        return written
    return "".join([f" {key}={_text(value)}" for key, value in _bounded(fields)])


def _trouble(record: logging.LogRecord) -> list[str]:
    """Return the lines of the traceback and stack of a record, safe and bounded."""
    parts: list[str] = []
    if record.exc_info and record.exc_info[0] is not None:
        parts.append("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"))
    elif record.exc_text:
        parts.append(record.exc_text)
    if record.stack_info:
        parts.append(record.stack_info)
    return safe_lines("\n".join(parts)) if parts else []


def _line(moment: str, levelno: int, name: str, message: str, fields: dict[str, object], *, ansi: bool) -> str:
    """Return the first line of a readable record; `fields`, those of its span included, lose the span's name."""
    span = fields.pop("span_name", None)
    level = _LEVEL_NAMES.get(levelno) or _level_name(levelno)
    target = _safe_name(name)
    padded = f"{level:>5}"
    if ansi:
        moment, target = f"\x1b[2m{moment}\x1b[0m", f"\x1b[2m{target}\x1b[0m"
        padded = f"\x1b[{_COLORS[level]}m{padded}\x1b[0m"
    opened = f"{_safe_name(str(span))}: " if span else ""
    return f"{moment} {padded} {opened}{target}: {one_line(message)}{_fields_text(fields)}"


def format_readable(
    record: logging.LogRecord, *, ansi: bool = False, local_time: bool = False, prefix: str = ""
) -> str:
    """Return `<time>  LEVEL span: target: message key=value`, then the traceback on indented lines of its own.

    Only the first line of a record begins with a time, whatever the record contains.
    """
    message = prefix + record.getMessage()
    moment = _time_text(record.created, local=local_time)
    line = _line(moment, record.levelno, target_of(record), message, fields_of(record), ansi=ansi)
    if record.exc_info or record.exc_text or record.stack_info:
        return "\n    ".join([line, *_trouble(record)])
    return line


def format_jsonl(record: logging.LogRecord, *, local_time: bool = False, prefix: str = "") -> str:
    """Return one JSON object; the record's own keys win over fields of the same name. Ids are strings.

    Values are escaped as in a readable line: a program that prints them later need not escape them. Only `exception`
    keeps its line breaks.
    """
    values: dict[str, object] = {
        "time": _time_text(record.created, local=local_time),
        "level": _level_name(record.levelno),
        "file": one_line(record.pathname, MAX_FIELD_CHARACTERS),
        "line": record.lineno,
        "target": one_line(target_of(record), MAX_NAME_CHARACTERS),
        "message": one_line(prefix + record.getMessage()),
    }
    for key, value in _bounded(fields_of(record)):
        if key not in values:
            values[key] = _plain(key, value)
    if trouble := _trouble(record):
        values.setdefault("exception", "\n".join(trouble))
    return msgspec.json.encode(values).decode()


def _plain(key: str, value: object) -> object:
    # Collectors read numbers as doubles, and an id or a u64 would lose its last digits.
    is_number = isinstance(value, float) or (isinstance(value, int) and abs(value) <= 2**53)
    if value is None or isinstance(value, bool) or (is_number and not key.endswith("_id")):
        return value
    return one_line(value if isinstance(value, str) else str(value), MAX_FIELD_CHARACTERS)


# -- the handler ----------------------------------------------------------------------------------------------------------


class LogHandler(logging.Handler):
    """Writes to the standard error of the moment, so that redirecting it later works."""

    def __init__(
        self, settings: LoggingSettings | None = None, *, prefix: str = "", stream: TextIO | None = None
    ) -> None:
        """`prefix` stands before every message; `stream` None: `sys.stderr`, looked up at each record."""
        super().__init__()
        self._settings = settings or LoggingSettings()
        self._prefix = prefix
        self._stream = stream

    @property
    def settings(self) -> LoggingSettings:
        return self._settings

    @property
    def prefix(self) -> str:
        return self._prefix

    def handle(self, record: logging.LogRecord) -> bool:
        """Write one record. The same as the inherited one, without three calls where nothing filters."""
        if self.filters or self.lock is None:
            return super().handle(record)
        with self.lock:
            self.emit(record)
        return True

    def write_plain(self, name: str, level: int, message: str, fields: Mapping[str, object]) -> bool:
        """Write what a record of the logger `name` with this message and these fields would be, without making the record.

        Return False, and write nothing, where only the record can decide what is to be written.
        """
        settings = self._settings
        chosen = settings.filter
        if settings.jsonl or self.formatter is not None or self.filters or self.lock is None:
            return False
        is_let_in = level >= chosen.default and not chosen.targets  # as nearly always
        if level < self.level or not (is_let_in or chosen.allows(name, level)):
            return level < self.level or not (chosen.targets or chosen.selectors)
        span = _SPAN.get()
        merged = {**span, **fields} if span else {**fields}
        moment = _time_text(time.time(), local=settings.local_time)
        line = _line(moment, level, name, self._prefix + message, merged, ansi=settings.ansi)
        stream = self._stream or sys.stderr
        with self.lock:
            stream.write(line + "\n")
            stream.flush()
        return True

    def emit(self, record: logging.LogRecord) -> None:
        try:
            settings = self._settings
            chosen = settings.filter
            if not chosen.allows(record.name, record.levelno) and not (
                # The slow ways in: the function's part of the target, and selectors over the fields.
                (chosen.targets or chosen.selectors)
                and chosen.allows(_function_target(record), record.levelno, fields_of(record))
            ):
                return
            stream = self._stream or sys.stderr
            stream.write(self.format(record) + "\n")
            stream.flush()
        except Exception:  # what logging does with a record that cannot be written
            self.handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        settings = self._settings
        if self.formatter is not None:
            return super().format(record)
        if settings.jsonl:
            return format_jsonl(record, local_time=settings.local_time, prefix=self._prefix)
        return format_readable(record, ansi=settings.ansi, local_time=settings.local_time, prefix=self._prefix)


class _Process:
    """What spans and the records of requests must know of this process's configuration."""

    span_events = False
    jsonl = False


def configure_dynamo_logging(service_name: str | None = None, worker_id: int | str | None = None) -> None:
    """Take over the root logger, by the environment; a call with the same outcome changes nothing.

    With `service_name` every message begins with `[service:worker]`. The root handlers that are there are replaced,
    because two of them would print every line twice.
    """
    prefix = f"[{service_name}{'' if worker_id is None else f':{worker_id}'}] " if service_name else ""
    settings = LoggingSettings.from_env(is_tty=has_colour(sys.stderr, os.environ))
    root = logging.getLogger()
    logging.addLevelName(TRACE, "TRACE")
    held = root.handlers
    if (
        len(held) == 1
        and isinstance(held[0], LogHandler)
        and (held[0].settings, held[0].prefix) == (settings, prefix)
        and root.level == _root_level(settings)
    ):
        return
    root.handlers[:] = [LogHandler(settings, prefix=prefix)]
    root.setLevel(_root_level(settings))
    _spans.setLevel(logging.INFO)  # whatever the root's level is
    _Process.span_events, _Process.jsonl = settings.span_events, settings.jsonl
    for complaint in settings.complaints:
        logging.getLogger(__name__).warning("%s", complaint)


def _root_level(settings: LoggingSettings) -> int:
    return max(settings.filter.lowest, logging.DEBUG)  # records below DEBUG are not made for us
