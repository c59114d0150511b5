"""`dynamo keys`: the keys of a key file, made, shown and taken away."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import sqlite3
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import msgspec

from dynamo.access.key_file import add_key, remove_key, replace_key
from dynamo.access.key_text import RANDOM_BYTES, check_imported, hash_of, key_text, new_id
from dynamo.access.records import KeyRecord, Period, RouteGroup
from dynamo.cli.usage import UsageError
from dynamo.errors import InvalidArgument
from dynamo.frontend.access.key_editor import change_key_file
from dynamo.frontend.access.key_store import load_key_file
from dynamo.frontend.access.usage_store import COUNTS, GROUPS, UsageQuery, usage_rows
from dynamo.settings.command import CommandParser

__all__ = ["main"]

DEFAULT_FILE: Final = "keys.toml"

_DESCRIPTION: Final = "Make, show and take away the API keys of a frontend. docs/keys.md has the fields of a key file."
_EPILOG: Final = """\
example:
  dynamo keys create --name alice --rpm 60
  dynamo serve --keys keys.toml

A running frontend reads a file that has changed within a second or two.
"""

_SPAN: Final = re.compile(r"(\d+)([smhdw])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_LIMIT_FLAGS: Final = {
    "rpm": ("requests_per_minute", "requests per minute"),
    "rpd": ("requests_per_day", "requests per day"),
    "tpm": ("tokens_per_minute", "input and output tokens per minute"),
    "concurrent": ("concurrent", "requests at once"),
    "max-request-tokens": ("max_tokens_per_request", "input and output tokens of one request"),
}


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


def _argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a type for argparse that keeps the text of a ValueError."""

    def parse(given: str) -> Any:
        try:
            return read(given)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def build_parser() -> CommandParser:
    """Make the parser of this command."""
    parser = CommandParser("dynamo keys", description=_DESCRIPTION, epilog=_EPILOG)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=CommandParser)
    file = CommandParser(add_help=False)
    file.add_argument(
        "--file",
        default=os.environ.get("DYN_KEYS", "").strip() or DEFAULT_FILE,
        metavar="FILE",
        help="the key file, TOML, or JSON if its name ends in .json [DYN_KEYS] (default: %(default)s)",
    )
    create = commands.add_parser("create", parents=[file], help="make a key, and print it once")
    _add_create_flags(create)
    listed = commands.add_parser("list", parents=[file], help="list the keys, without the keys themselves")
    listed.add_argument("--json", action="store_true", help="as JSON")
    _add_usage_flags(commands.add_parser("usage", help="show what keys have used"))
    for name, meaning in (
        ("show", "show the record of a key as JSON"),
        ("disable", "refuse a key from now on"),
        ("enable", "take a disabled key again"),
        ("delete", "remove a key"),
        ("rotate", "give a key a new secret, and print it once"),
    ):
        one = commands.add_parser(name, parents=[file], help=meaning)
        one.add_argument("id", metavar="ID", help="the id of the key, as `list` shows it")
        if name == "rotate":
            one.add_argument(
                "--keep", type=_argument(read_span), metavar="TIME", help="take the old secret for so long, too (24h)"
            )
    return parser


def _add_usage_flags(usage: argparse.ArgumentParser) -> None:
    usage.add_argument(
        "--usage-db",
        default=os.environ.get("DYN_USAGE_DB", "").strip() or None,
        metavar="FILE",
        help="the frontend's --usage-db [DYN_USAGE_DB]",
    )
    usage.add_argument("--by", default="key", metavar="GROUPS", help=f"some of {', '.join(GROUPS)}, with commas (key)")
    usage.add_argument(
        "--since", type=_argument(read_span), default=read_span("7d"), metavar="TIME", help="default: 7d"
    )
    usage.add_argument("--json", action="store_true", help="as JSON")


def _usage(options: argparse.Namespace) -> None:
    """Print what keys have used, from the file that the frontends write."""
    if options.usage_db is None:
        raise UsageError("name the file that the frontend writes: --usage-db FILE (DYN_USAGE_DB)")
    since = int((datetime.now(UTC) - options.since).timestamp()) // 60
    groups = tuple(options.by.split(","))
    try:
        with closing(sqlite3.connect(f"file:{Path(options.usage_db).absolute()}?mode=ro", uri=True)) as database:
            rows = usage_rows(database, UsageQuery(groups, max(0, since)))
    except sqlite3.Error as error:
        raise UsageError(f"{options.usage_db} cannot be read: {error}") from None
    if options.json:
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


def _add_create_flags(create: argparse.ArgumentParser) -> None:
    create.add_argument("--name", help="what people call it")
    create.add_argument("--project", help="whose files, batches, limits and budget it shares")
    create.add_argument("--admin", action="store_true", help="may use the admin routes, too")
    create.add_argument("--model", action="append", metavar="PATTERN", help="may use these models only (repeatable)")
    create.add_argument(
        "--route", action="append", choices=list(map(str, RouteGroup)), help="may use these routes only (repeatable)"
    )
    create.add_argument("--cidr", action="append", metavar="NETWORK", help="may come from here only (repeatable)")
    create.add_argument("--expires", type=_argument(read_moment), metavar="WHEN", help="30d, or 2027-01-31")
    create.add_argument("--priority", type=int, metavar="N", help="the highest priority of its requests")
    create.add_argument("--max-tokens", type=int, metavar="N", help="output tokens of one request")
    for flag, (_, meaning) in _LIMIT_FLAGS.items():
        create.add_argument(f"--{flag}", type=int, metavar="N", help=meaning)
    create.add_argument("--budget-tokens", type=int, metavar="N", help="tokens of a --budget-period")
    create.add_argument(
        "--budget-money", type=float, metavar="X", help="money of a --budget-period, by the file's prices"
    )
    create.add_argument("--budget-period", choices=list(map(str, Period)), default="month", help="default: %(default)s")
    create.add_argument("--hard", action="store_true", help="end an answer where the budget ends")
    create.add_argument("--revoke-now", action="store_true", help="removing it cuts its running requests")
    create.add_argument("--import", action="store_true", dest="is_imported", help="read the key itself from stdin")


def main(argv: Sequence[str]) -> int:
    """Run one command; the exit status."""
    options = build_parser().parse_args(argv)
    try:
        match options.command:
            case "create":
                _create(options)
            case "usage":
                _usage(options)
            case "list":
                _list(options.file, as_json=options.json)
            case "show":
                print(_json(_find(options.file, options.id)))
            case "rotate":
                _rotate(options)
            case "delete":
                is_json = _is_json(options.file)
                change_key_file(options.file, lambda text: remove_key(text, options.id, is_json=is_json))
                _say(f"deleted the key {options.id}")
            case _:
                is_enabled = options.command == "enable"
                _change(options.file, options.id, lambda record: msgspec.structs.replace(record, enabled=is_enabled))
                _say(f"{options.command}d the key {options.id}")
    except InvalidArgument as error:
        raise UsageError(str(error)) from None
    return 0


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


def _create(options: argparse.Namespace) -> None:
    key, record = _new_record(options)
    is_json = _is_json(options.file)
    is_new = not Path(options.file).exists()
    change_key_file(options.file, lambda text: add_key(text, record, is_json=is_json), may_create=True)
    _say(f"{'made' if is_new else 'added to'} {options.file}: the key {record.id}. It is shown once, and not kept:")
    if key is not None:
        print(key)


def _new_record(options: argparse.Namespace) -> tuple[str | None, KeyRecord]:
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
    limits = {
        name: value
        for flag, (name, _) in _LIMIT_FLAGS.items()
        if (value := getattr(options, flag.replace("-", "_"))) is not None
    }
    members: dict[str, Any] = {
        "id": id,
        "hash": hash_of(key.encode()),
        "name": options.name,
        "project": options.project,
        "role": "admin" if options.admin else "user",
        "revoke": "now" if options.revoke_now else "later",
        "created": datetime.now(UTC).replace(microsecond=0),
        "expires": options.expires,
        "models": options.model,
        "routes": options.route,
        "cidrs": options.cidr,
        "priority": options.priority,
        "max_tokens": options.max_tokens,
        "limits": limits or None,
    }
    if options.budget_tokens is not None or options.budget_money is not None:
        budget = {"tokens": options.budget_tokens, "money": options.budget_money, "period": options.budget_period}
        members["budget"] = {**budget, "hard": options.hard}
    elif options.hard:
        raise UsageError("--hard is about a budget: give --budget-tokens or --budget-money, too")
    try:
        record = msgspec.convert({name: value for name, value in members.items() if value is not None}, KeyRecord)
    except msgspec.ValidationError as error:
        raise UsageError(str(error)) from None
    return None if options.is_imported else key, record


def _rotate(options: argparse.Namespace) -> None:
    key = key_text(options.id, secrets.token_bytes(RANDOM_BYTES))

    def rotated(record: KeyRecord) -> KeyRecord:
        kept, until = None, None
        if options.keep is not None:
            kept, until = record.hash, datetime.now(UTC).replace(microsecond=0) + options.keep
        return msgspec.structs.replace(record, hash=hash_of(key.encode()), previous_hash=kept, previous_expires=until)

    _change(options.file, options.id, rotated)
    _say(f"the key {options.id} has a new secret, which is shown once, and not kept:")
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
