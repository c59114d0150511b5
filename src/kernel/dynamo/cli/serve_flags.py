"""The flags of `dynamo serve`: one table, from which come its command line, the keys of its file, and the settings page."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, cast

from dynamo.cli.usage import UsageError
from dynamo.settings.choices import FAILURE_KINDS, ROUTER_MODES
from dynamo.settings.command import did_you_mean
from dynamo.settings.readers import (
    SettingReader,
    above_zero,
    each,
    folder,
    integer,
    one_of,
    path,
    path_prefix,
    placeholder,
    port,
    port_or_off,
    switch,
    text,
    words,
)
from dynamo.settings.table import Setting, declared, setting

MAX_WORKERS: Final = 256  # a slip of the keyboard should not start ten thousand processes
MAX_FRONTEND_WORKERS: Final = 64  # the limit of the frontend itself
DEFAULT_HOST: Final = "127.0.0.1"  # nothing is open to a network unless the command line opens it
DEFAULT_REPLACE_SECONDS: Final = 1800.0  # half an hour to load a model, as the start-up probes of `deploy/` allow


@dataclass(frozen=True, slots=True)
class WorkerRange:
    """How many workers there are: at least and at most."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least}..{self.most}"

    @property
    def is_fixed(self) -> bool:
        """Whether there are always as many."""
        return self.least == self.most

    @property
    def at_first(self) -> int:
        """How many are started with the command: one at least, as a worker reports what its model is."""
        return max(1, self.least)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse "2" or "1..4". Raises ValueError naming what is wrong."""
        least, dots, most = text.partition("..")
        try:
            numbers = int(least), int(most) if dots else int(least)
        except ValueError:
            raise ValueError(
                f"{text!r} is neither an integer from 1 to {MAX_WORKERS} nor a range of them (1..4)"
            ) from None
        lowest = 0 if dots else 1
        if not all(lowest <= number <= MAX_WORKERS for number in numbers) or not numbers[1]:
            raise ValueError(f"{text} is out of range: use {lowest} to {MAX_WORKERS}")
        if numbers[0] > numbers[1]:
            raise ValueError(f"{text} has the larger number first: write {most}..{least}")
        return cls(*numbers)


_workers: Final = SettingReader(WorkerRange.parse, metavar="N|MIN..MAX")

SIZES: Final = {
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
TIMES: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


def _with_unit(given: str, units: Mapping[str, float], example: str) -> float:
    """Read a number above 0 with a unit. Raises ValueError."""
    number = given.rstrip("".join({*"".join(units), *"".join(units).lower()}))
    unit = given[len(number) :].strip()
    found = {name.lower(): value for name, value in units.items()}.get(unit.lower())
    try:
        value = float(number) * (found or 0)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{given!r} is not a number with one of the units {', '.join(units)}: write {example}")
    return value


size: Final = SettingReader(lambda given: int(_with_unit(given, SIZES, "12GB")), metavar="SIZE")
duration: Final = SettingReader(lambda given: _with_unit(given, TIMES, "10m"), metavar="TIME")

CONFIG_FILE: Final = declared(
    None, path, "A TOML file with these options, for the frontend and for the engine; see below", flag="--config"
)


@dataclass(frozen=True, slots=True)
class ServeFlags:
    """What to serve and where, as the command line has it."""

    # fmt: off
    engine: str | None = setting(None, None, placeholder("NAME|module:NAME", text),
        "[Which one](engines.md#which-engine-serves-a-model): a built-in engine, `module:Class`, `module:function`, or "
        "`file.py:function` ([any Python callable](writing-a-backend.md#any-python-callable))",
        flag="--engine", shown="by the model")
    upstream: str | None = setting(None, None, placeholder("URL", text),
        "Serve models of [another OpenAI-compatible server](upstream.md), such as `https://host/v1`; beside a `MODEL`, too",
        flag="--upstream")
    upstream_key_file: str | None = setting(None, None, placeholder("FILE", text), "A file with the key for it",
        flag="--upstream-key-file")
    upstream_ca_file: str | None = setting(None, None, placeholder("FILE", text),
        "Certificate authorities (PEM) that it may have beside those of the system", flag="--upstream-ca-file")
    upstream_models: tuple[str, ...] = setting((), None, each(placeholder("NAME[=THEIRS]", text)),
        "A model of it, by its name here and there; may be repeated", flag="--model", dest="upstream_models", repeats=True)
    served_names: tuple[str, ...] = setting((), None, placeholder("NAME[,ALIAS]", words),
        "The name that clients use for the model, and further ones; may be repeated", flag="--served-model-name",
        repeats=True, shown="the model's")
    fallback: tuple[str, ...] = setting((), "DYN_FALLBACK", each(placeholder("MODEL=OTHER,...", text)),
        "Models that serve [in place of one](upstream.md#fallbacks) that fails or waits; may be repeated", flag="--fallback",
        repeats=True, is_read_later=True)
    fallback_on: str | None = setting(None, "DYN_FALLBACK_ON", placeholder("KINDS", text), "Which failures count",
        flag="--fallback-on", shown=",".join(FAILURE_KINDS), is_read_later=True)
    fallback_after_ms: str | None = setting(None, "DYN_FALLBACK_AFTER_MS", placeholder("N", text),
        "Without a first token by then the next model serves", flag="--fallback-after-ms", is_read_later=True)
    allow_download: bool = setting(False, None, switch,
        "Fetch a `MODEL` that is not here from the hub, as `hub:MODEL` does", flag="--allow-download", negative="")
    workers: WorkerRange = setting(WorkerRange(1, 1), None, _workers,
        "How many workers; `MIN..MAX`: as many as [the load](scaling.md) needs", flag="--workers")
    scale_target: float = setting(0.7, "DYN_AUTOSCALE_TARGET", above_zero(1),
        "With `MIN..MAX`: how full workers are meant to be; 1: full", flag="--scale-target")
    scale_down_after: float = setting(120.0, None, above_zero(unit="s", metavar="SECONDS"),
        "How long a worker must not be missed before it goes", flag="--scale-down-after")
    scale_advise: bool = setting(False, None, switch, "Say what would be done about the number of workers, and do nothing",
        flag="--scale-advise", negative="")
    cold_start_wait: float = setting(120.0, "DYN_COLD_START_WAIT_SECS", above_zero(unit="s", metavar="SECONDS"),
        "With `MIN` 0: how long a request waits for a worker that is started for it", flag="--cold-start-wait")
    memory: int | None = setting(None, None, size,
        "With [many models](many-models.md): what they may take together (`12GB`); one makes room for another",
        flag="--memory", shown="no limit")
    idle: float | None = setting(None, None, duration,
        "With many models: unload one that had no request for so long (`10m`)", flag="--idle", shown="never")
    pin: tuple[str, ...] = setting((), None, placeholder("MODEL", each(text)),
        "With many models: load this one at once, and keep it; may be repeated", flag="--pin", shown="",
        repeats=True)
    http_host: str = setting(DEFAULT_HOST, "DYN_HTTP_HOST", text,
        "Address the frontend listens on; `0.0.0.0` opens it to the network", flag=("--host", "--http-host"),
        dest="http_host")
    http_port: int | None = setting(8000, "DYN_HTTP_PORT", port_or_off,
        "Its port; 0: any free port; `off`: none, with `--uds`", flag=("--port", "--http-port"), dest="http_port")
    uds: str | None = setting(None, "DYN_HTTP_UDS", placeholder("PATH", text),
        "Serve at this [Unix socket](deployment.md#a-unix-socket), too", flag="--uds")
    root_path: str = setting("", "DYN_HTTP_ROOT_PATH", path_prefix,
        "A prefix of all paths that [a proxy in front](deployment.md#a-proxy-that-leaves-a-prefix-before-the-paths) does "
        "not remove", flag="--root-path")
    admin_port: int | None = setting(None, "DYN_ADMIN_PORT", port,
        "Serve the frontend's [admin routes](security.md#admin-routes) at 127.0.0.1 on this port, and nowhere else; 0: any "
        "free port, which the log names", flag="--admin-port", shown="on the HTTP port, while that is bound to loopback")
    router_mode: str | None = setting(None, "DYN_ROUTER_MODE", placeholder("MODE", one_of(*ROUTER_MODES)),
        f"How a worker is chosen: {', '.join(f'`{mode}`' for mode in ROUTER_MODES)}", flag="--router-mode",
        shown="round-robin", is_read_later=True)
    router_policy: str | None = setting(None, "DYN_ROUTER_POLICY", placeholder("POLICY", text),
        "How `kv`, which it switches on, decides: `time`, `default`, `two-tier`, or [a class of yours](policies.md), "
        "`FILE.py:CLASS`", flag="--router-policy", shown="time", is_read_later=True)
    shadow_policy: str | None = setting(None, "DYN_ROUTER_SHADOW_POLICY", placeholder("POLICY", text),
        "Let this policy decide, too, without effect", flag="--shadow-policy", is_read_later=True)
    router_decisions: str | None = setting(None, "DYN_ROUTER_DECISIONS", placeholder("FILE", text),
        "Append every decision to this file, for `dynamo explain` and `dynamo replay-policy`", flag="--router-decisions",
        is_read_later=True)
    reload: bool = setting(False, None, switch,
        "Replace the workers, one by one, when a Python file in the engine's directory changes", flag="--reload",
        negative="")
    keys: str | None = setting(None, "DYN_KEYS", placeholder("FILE", text),
        "File of [API keys](keys.md), made by `dynamo keys create`: every request needs one", flag="--keys",
        is_read_later=True)
    files_dir: str | None = setting(None, "DYN_FILES_DIR", placeholder("DIR", text),
        "Serve [files and batches](batches.md), and keep them in this directory", flag="--files-dir", is_read_later=True)
    store: Path | None = setting(None, None, folder,
        "Directory in which the processes find each other, kept at the end", flag="--store", shown="a private one")
    frontend_workers: int | None = setting(None, "DYN_FRONTEND_WORKERS", integer(1, MAX_FRONTEND_WORKERS),
        "Processes of the frontend, on its one port", flag="--frontend-workers", shown="1", is_read_later=True)
    replace_seconds: float = setting(DEFAULT_REPLACE_SECONDS, None, above_zero(unit="s", metavar="SECONDS"),
        "SIGHUP: how long a replacement may take to load its model "
        "([rolling restart](deployment.md#a-rolling-restart-on-one-machine))", flag="--replace-timeout")
    in_process: bool = setting(False, None, switch, "All of it in one process, over memory", flag="--in-process",
        negative="")
    chaos: Path | None = setting(None, "DYN_CHAOS", path,
        "A [chaos plan](chaos.md) (TOML) for the frontend and the workers, each once; one that is started again is well. "
        "Needs the next one, too", flag="--chaos")
    allow_chaos: bool = setting(False, "DYN_ALLOW_CHAOS", switch, "Permit fault injection in these processes",
        flag="--allow-chaos", negative="")
    # fmt: on


# `dynamo serve --config FILE`: a TOML file in place of a long command line.

TABLES: Final = ("frontend-args", "engine-args", "upstream-args")
MANY: Final = ("models", "presets")  # tables of many models
MAX_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The content of a file: options of `dynamo serve` itself, and flags for its frontend and its engine."""

    options: Mapping[str, Any]  # by the name of the flag without its dashes: {"http-port": 9000}
    frontend_args: tuple[str, ...]
    engine_args: tuple[str, ...]
    upstream_args: tuple[str, ...] = ()
    many: Mapping[str, Any] = field(default_factory=dict)  # the tables of many models


def read_config(path: Path, known: Collection[str], lists: Collection[str]) -> ConfigFile:
    """Read a file whose top-level keys are flags of `dynamo serve` (`known`, without dashes). `lists`: those that repeat.

    The tables `[frontend-args]`, `[engine-args]` and `[upstream-args]` hold flags of theirs: `key = value` becomes
    `--key value`, `true` becomes `--key`, a list repeats the flag. Raises UsageError that names the file and the key.
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
        if key in TABLES or key in MANY:
            continue
        name = key.replace("_", "-")
        if name not in known:
            raise UsageError(
                f"--config {path}: there is no option {key!r}{did_you_mean(name, [*known, *TABLES, *MANY])}"
            )
        if isinstance(value, dict) or (isinstance(value, list) and name not in lists):
            raise UsageError(f"--config {path}: {key} must be a single value")
        options[name] = value
    frontend, engine, upstream = (table_flags(path, table, found.get(table, {})) for table in TABLES)
    many: dict[str, Any] = {key: found[key] for key in MANY if key in found}
    return ConfigFile(options, frontend, engine, upstream, many)


def table_flags(path: Path, table: str, entries: object) -> tuple[str, ...]:
    """Return the flags that a table of the file stands for. Raises UsageError."""
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


def converted(path: Path, name: str, value: object, made: Setting) -> object:
    """Return the value of one key as its flag would give it. Raises UsageError."""
    if isinstance(value, list):
        return tuple(part for each in value for part in cast(Sequence[object], converted(path, name, each, made)))
    if made.read.is_switch or isinstance(value, bool):
        if not (made.read.is_switch and isinstance(value, bool)):
            wanted = "true or false" if made.read.is_switch else "a value, not true or false"
            raise UsageError(f"--config {path}: {name} must be {wanted}")
        return value
    try:
        found: object = made.read.parse(str(value))
    except ValueError as error:
        raise UsageError(f"--config {path}: {name}: {error}") from None
    return found
