"""`dynamo keys`: the keys of a key file, made, shown and taken away."""

from __future__ import annotations

import json
import os
import re
import secrets
import sqlite3
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import msgspec

from dynamo.cli.usage import UsageError
from dynamo.errors import InvalidArgument
from dynamo.frontend.base.access import KeyRole, RouteGroup
from dynamo.frontend.parts.keys.key_store import change_key_file, load_key_file
from dynamo.frontend.parts.keys.rules.key_file import add_key, remove_key, replace_key
from dynamo.frontend.parts.keys.rules.key_text import RANDOM_BYTES, check_imported, hash_of, key_text, new_id
from dynamo.frontend.parts.keys.rules.records import KeyRecord, Period, Revocation
from dynamo.frontend.parts.keys.usage_store import COUNTS, GROUPS, UsageQuery, usage_rows
from dynamo.settings.command import CommandParser
from dynamo.settings.flags import add_flags
from dynamo.settings.readers import SettingReader, each, integer, number, one_of, placeholder, switch, text, words
from dynamo.settings.table import read_settings, setting, settings_of

DEFAULT_FILE: Final = "keys.toml"

_DESCRIPTION: Final = "Make, show and take away the API keys of a frontend. docs/keys.md has the fields of a key file."
_EPILOG: Final = """\
example:
  dynamo keys create --name alice --rpm 60
  dynamo serve --keys keys.toml

A running frontend reads a file that has changed within a second or two.
"""

_SPAN: Final = re.compile(r"(\d+)([smhdw])")
_LIMITS: Final = "Limits"
_BUDGET: Final = "Budget"
_LIMIT_NAMES: Final = (
    "requests_per_minute", "requests_per_day", "tokens_per_minute", "concurrent", "max_tokens_per_request",
)  # fmt: skip
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def read_span(given: str) -> timedelta:
    """Read a length of time such as 90s, 24h or 30d. Raises ValueError."""
    found = _SPAN.fullmatch(given)
    if found is None:
        raise ValueError(f"{given!r} is not a length of time; write for example 90s, 24h, 30d or 2w")
    try:
        return timedelta(seconds=int(found[1]) * _SECONDS[found[2]])
    except OverflowError:
        raise ValueError(f"{given} is too long") from None


def read_moment(given: str) -> datetime:
    """Read a length of time from now, or a date, or a time with its zone. Raises ValueError."""
    if _SPAN.fullmatch(given):
        try:
            return datetime.now(UTC).replace(microsecond=0) + read_span(given)
        except OverflowError:
            raise ValueError(f"{given} is too long") from None
    try:
        moment = datetime.fromisoformat(given)
    except ValueError:
        raise ValueError(f"{given!r} is neither a length of time (30d) nor a date (2027-01-31)") from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


_span: Final = SettingReader(read_span, metavar="TIME")
_moment: Final = SettingReader(read_moment, metavar="WHEN")
_count: Final = integer()


@dataclass(frozen=True, slots=True)
class KeyFileFlags:
    """Which file."""

    file: str = setting(
        DEFAULT_FILE,
        "DYN_KEYS",
        placeholder("FILE", text),
        "The key file, TOML, or JSON if its name ends in .json",
        flag="--file",
    )


@dataclass(frozen=True, slots=True)
class KeyListFlags(KeyFileFlags):
    """How keys are listed."""

    as_json: bool = setting(False, None, switch, "As JSON", flag="--json", negative="", dest="json")


@dataclass(frozen=True, slots=True)
class KeyRotateFlags(KeyFileFlags):
    """How a key gets a new secret."""

    keep: timedelta | None = setting(None, None, _span, "Take the old secret for so long, too (24h)", flag="--keep")


@dataclass(frozen=True, slots=True)
class KeyUsageFlags:
    """What of the usage is shown."""

    # fmt: off
    usage_db: str | None = setting(None, "DYN_USAGE_DB", placeholder("FILE", text), "The frontend's `--usage-db`", flag="--usage-db")
    by: tuple[str, ...] = setting(("key",), None, placeholder("GROUPS", words), f"Some of {', '.join(GROUPS)}, with commas", flag="--by")
    since: timedelta = setting(timedelta(days=7), None, _span, "How far back", flag="--since", shown="7d")
    as_json: bool = setting(False, None, switch, "As JSON", flag="--json", negative="", dest="json")
    # fmt: on


@dataclass(frozen=True, slots=True)
class KeyCreateFlags(KeyFileFlags):
    """What a new key may do."""

    # fmt: off
    name: str | None = setting(None, None, text, "What people call it", flag="--name")
    project: str | None = setting(None, None, text, "Whose files, batches, limits and budget it shares", flag="--project")
    role: str | None = setting(None, None, one_of(*map(str, KeyRole)), "What the key is for: `user`; `viewer`, `content` or `operator` of the inspector; `admin`, for the admin routes, too", flag="--role", shown="user")
    is_admin: bool = setting(False, None, switch, "The same as `--role admin`", flag="--admin", negative="", dest="admin")
    models: tuple[str, ...] = setting((), None, each(placeholder("PATTERN", text)), "May use these models only (repeatable)", flag="--model", dest="models", repeats=True)
    routes: tuple[str, ...] = setting((), None, each(one_of(*map(str, RouteGroup))), f"May use these routes only (repeatable): {', '.join(RouteGroup)}", flag="--route", dest="routes", repeats=True)
    cidrs: tuple[str, ...] = setting((), None, each(placeholder("NETWORK", text)), "May come from here only (repeatable)", flag="--cidr", dest="cidrs", repeats=True)
    expires: datetime | None = setting(None, None, _moment, "When it ends: 30d, or 2027-01-31", flag="--expires")
    priority: int | None = setting(None, None, _count, "The highest priority of its requests", flag="--priority")
    max_tokens: int | None = setting(None, None, _count, "Output tokens of one answer", flag="--max-tokens")
    requests_per_minute: int | None = setting(None, None, _count, "Requests per minute", flag="--rpm", group=_LIMITS)
    requests_per_day: int | None = setting(None, None, _count, "Requests per day", flag="--rpd", group=_LIMITS)
    tokens_per_minute: int | None = setting(None, None, _count, "Input and output tokens per minute", flag="--tpm", group=_LIMITS)
    concurrent: int | None = setting(None, None, _count, "Requests at once", flag="--concurrent", group=_LIMITS)
    max_tokens_per_request: int | None = setting(None, None, _count, "Input and output tokens of one request", flag="--max-request-tokens", group=_LIMITS)
    budget_tokens: int | None = setting(None, None, _count, "Tokens of a `--budget-period`", flag="--budget-tokens", group=_BUDGET)
    budget_money: float | None = setting(None, None, number(metavar="X"), "Money of a `--budget-period`, by the file's prices", flag="--budget-money", group=_BUDGET)
    budget_period: str = setting("month", None, one_of(*map(str, Period)), "After which time a budget is whole again: day, month or total", flag="--budget-period", group=_BUDGET)
    is_hard: bool = setting(False, None, switch, "End an answer where the budget ends", flag="--hard", negative="", dest="hard", group=_BUDGET)
    revokes_now: bool = setting(False, None, switch, "Removing it cuts its running requests", flag="--revoke-now", negative="", dest="revoke_now")
    is_imported: bool = setting(False, None, switch, "Read the key itself from stdin", flag="--import", negative="", dest="is_imported")
    # fmt: on

    def limits(self) -> dict[str, int]:
        """Return the limits that were given, by the names of a key file."""
        found = {name: getattr(self, name) for name in _LIMIT_NAMES}
        return {name: value for name, value in found.items() if value is not None}


_ACTIONS: Final[Mapping[str, tuple[type, str]]] = {
    "create": (KeyCreateFlags, "make a key, and print it once"),
    "list": (KeyListFlags, "list the keys, without the keys themselves"),
    "usage": (KeyUsageFlags, "show what keys have used"),
    "show": (KeyFileFlags, "show the record of a key as JSON"),
    "disable": (KeyFileFlags, "refuse a key from now on"),
    "enable": (KeyFileFlags, "take a disabled key again"),
    "revoke": (KeyFileFlags, "refuse a key from now on, and cut its running requests"),
    "delete": (KeyFileFlags, "remove a key"),
    "rotate": (KeyRotateFlags, "give a key a new secret, and print it once"),
}
_OF_ONE_KEY: Final = ("show", "disable", "enable", "revoke", "delete", "rotate")


def build_parser(env: Mapping[str, str]) -> CommandParser:
    """Make the parser of this command."""
    parser = CommandParser("dynamo keys", description=_DESCRIPTION, epilog=_EPILOG)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=CommandParser)
    for name, (kind, meaning) in _ACTIONS.items():
        one = commands.add_parser(name, help=meaning)
        if name in _OF_ONE_KEY:
            one.add_argument("id", metavar="ID", help="the id of the key, as `list` shows it")
        add_flags(one, (made for _, made in settings_of(kind)), env)
    return parser


def _usage(options: KeyUsageFlags) -> None:
    """Print what keys have used, from the file that the frontends write."""
    if options.usage_db is None:
        raise UsageError("name the file that the frontend writes: --usage-db FILE (DYN_USAGE_DB)")
    since = int((datetime.now(UTC) - options.since).timestamp()) // 60
    groups = options.by
    try:
        with closing(sqlite3.connect(f"file:{Path(options.usage_db).absolute()}?mode=ro", uri=True)) as database:
            rows = usage_rows(database, UsageQuery(groups, max(0, since)))
    except sqlite3.Error as error:
        raise UsageError(f"{options.usage_db} cannot be read: {error}") from None
    if options.as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    _table([[name.upper() for name in (*groups, *COUNTS)], *[[_cell(name, row[name]) for name in row] for row in rows]])


def _cell(name: str, value: Any) -> str:
    if name in ("minute", "hour", "day"):
        return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d" if name == "day" else "%Y-%m-%dT%H:%MZ")
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main(argv: Sequence[str]) -> int:
    """Run one command; the exit status."""
    given = build_parser(os.environ).parse_args(argv)
    options: Any = read_settings(_ACTIONS[given.command][0], os.environ, vars(given))
    try:
        match options:
            case KeyCreateFlags():
                _create(options)
            case KeyUsageFlags():
                _usage(options)
            case KeyListFlags():
                _list(options.file, as_json=options.as_json)
            case KeyRotateFlags():
                _rotate(options, given.id)
            case KeyFileFlags():
                _change_one(given.command, options.file, given.id)
    except InvalidArgument as error:
        raise UsageError(str(error)) from None
    return 0


def _change_one(action: str, path: str, id: str) -> None:
    """Show, disable, enable, revoke or delete a key."""
    if action == "show":
        print(_json(_find(path, id)))
    elif action == "delete":
        change_key_file(path, lambda text: remove_key(text, id, is_json=_is_json(path)))
        _say(f"deleted the key {id}")
    elif action == "revoke":
        _change(path, id, lambda record: msgspec.structs.replace(record, enabled=False, revoke=Revocation.NOW))
        _say(f"revoked the key {id}; frontends refuse it and cut its requests within two seconds")
    else:
        _change(path, id, lambda record: msgspec.structs.replace(record, enabled=action == "enable"))
        _say(f"{action}d the key {id}")


def _is_json(path: str) -> bool:
    return path.endswith(".json")


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _json(record: KeyRecord) -> str:
    return json.dumps(msgspec.to_builtins(record), indent=2, ensure_ascii=False)


def _find(path: str, id: str) -> KeyRecord:
    found = load_key_file(path).find(id)
    if found is None:
        raise UsageError(f"{path} has no key with the id {id!r}; dynamo keys list shows them")
    return found


def _change(path: str, id: str, change: Callable[[KeyRecord], KeyRecord]) -> None:
    _find(path, id)

    def changed(text: str) -> str:
        # Read again under the lock: another command may have changed the key meanwhile.
        return replace_key(text, change(_find(path, id)), is_json=_is_json(path))

    change_key_file(path, changed)


def _create(options: KeyCreateFlags) -> None:
    key, record = _new_record(options)
    is_json = _is_json(options.file)
    is_new = not Path(options.file).exists()
    change_key_file(options.file, lambda text: add_key(text, record, is_json=is_json), may_create=True)
    _say(f"{'made' if is_new else 'added to'} {options.file}: the key {record.id}. It is shown once, and not kept:")
    if key is not None:
        print(key)


def _new_record(options: KeyCreateFlags) -> tuple[str | None, KeyRecord]:
    """Return a key that was made (None: it was imported) and its record. Raises UsageError."""
    id = new_id(secrets.token_bytes(32))
    if options.is_imported:
        key = sys.stdin.readline().strip()
        try:
            check_imported(key)
        except ValueError as error:
            raise UsageError(f"--import: {error}") from None
    else:
        key = key_text(id, secrets.token_bytes(RANDOM_BYTES))
    members: dict[str, object] = {
        "id": id,
        "hash": hash_of(key.encode()),
        "name": options.name,
        "project": options.project,
        "role": _role(options),
        "revoke": "now" if options.revokes_now else "later",
        "created": datetime.now(UTC).replace(microsecond=0),
        "expires": options.expires,
        "models": options.models or None,
        "routes": options.routes or None,
        "cidrs": options.cidrs or None,
        "priority": options.priority,
        "max_tokens": options.max_tokens,
        "limits": options.limits() or None,
    }
    if options.budget_tokens is not None or options.budget_money is not None:
        budget = {"tokens": options.budget_tokens, "money": options.budget_money, "period": options.budget_period}
        members["budget"] = {**budget, "hard": options.is_hard}
    elif options.is_hard:
        raise UsageError("--hard is about a budget: give --budget-tokens or --budget-money, too")
    try:
        record = msgspec.convert({name: value for name, value in members.items() if value is not None}, KeyRecord)
    except msgspec.ValidationError as error:
        raise UsageError(str(error)) from None
    return None if options.is_imported else key, record


def _role(options: KeyCreateFlags) -> str:
    if options.is_admin and options.role not in (None, "admin"):
        raise UsageError(f"--admin is --role admin, and --role {options.role} was given, too; give one of them")
    return "admin" if options.is_admin else options.role or "user"


def _rotate(options: KeyRotateFlags, id: str) -> None:
    key = key_text(id, secrets.token_bytes(RANDOM_BYTES))

    def rotated(record: KeyRecord) -> KeyRecord:
        kept, until = None, None
        if options.keep is not None:
            kept, until = record.hash, datetime.now(UTC).replace(microsecond=0) + options.keep
        return msgspec.structs.replace(record, hash=hash_of(key.encode()), previous_hash=kept, previous_expires=until)

    _change(options.file, id, rotated)
    _say(f"the key {id} has a new secret, which is shown once, and not kept:")
    print(key)


def _list(path: str, *, as_json: bool) -> None:
    records = load_key_file(path).keys
    if as_json:
        print(json.dumps([msgspec.to_builtins(record) for record in records], indent=2, ensure_ascii=False))
        return
    now = datetime.now(UTC)
    rows = [("ID", "NAME", "PROJECT", "ROLE", "STATE", "EXPIRES", "MODELS")]
    for record in records:
        is_expired = record.expires is not None and record.expires <= now
        state = "disabled" if not record.enabled else "expired" if is_expired else "enabled"
        expires = "" if record.expires is None else record.expires.isoformat()
        models = "all" if record.models is None else ",".join(record.models)
        rows.append((record.id, record.name or "", record.project or "", str(record.role), state, expires, models))
    _table(rows)
