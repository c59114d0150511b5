"""`dynamo serve --config FILE`: a TOML file in place of a long command line."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynamo.cli.usage import UsageError
from dynamo.settings.command import did_you_mean

__all__ = ["ConfigFile", "read_config"]

TABLES: Final = ("frontend-args", "engine-args")
MAX_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The content of a file: options of `dynamo serve` itself, and flags for its frontend and its engine."""

    options: Mapping[str, Any]  # by the name of the flag without its dashes: {"http-port": 9000}
    frontend_args: tuple[str, ...]
    engine_args: tuple[str, ...]


def read_config(path: Path, known: Collection[str]) -> ConfigFile:
    """Read a file whose top-level keys are flags of `dynamo serve` (`known`, without dashes).

    The tables `[frontend-args]` and `[engine-args]` hold flags of theirs: `key = value` becomes `--key value`, `true` becomes
    `--key`, a list repeats the flag. Raises UsageError that names the file and the key.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"--config {path} is larger than {MAX_BYTES} bytes")
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"--config {path} is not valid TOML: {error}") from None
    options = {}
    for key, value in found.items():
        if key in TABLES:
            continue
        name = key.replace("_", "-")
        if name not in known:
            raise UsageError(f"--config {path}: there is no option {key!r}{did_you_mean(name, [*known, *TABLES])}")
        if isinstance(value, dict | list):
            raise UsageError(f"--config {path}: {key} must be a single value")
        options[name] = value
    frontend, engine = (_flags(path, table, found.get(table, {})) for table in TABLES)
    return ConfigFile(options, frontend, engine)


def _flags(path: Path, table: str, entries: object) -> tuple[str, ...]:
    if not isinstance(entries, dict):
        raise UsageError(f"--config {path}: {table} must be a table: write [{table}]")
    flags: list[str] = []
    for key, value in entries.items():
        flag = "--" + key.replace("_", "-")
        for one in value if isinstance(value, list) else [value]:
            if one is True:
                flags.append(flag)
            elif isinstance(one, str | int | float) and one is not False:
                flags += [flag, str(one)]
            else:
                raise UsageError(f"--config {path}: [{table}] {key} must be a text, a number, true, or a list of these")
    return tuple(flags)
