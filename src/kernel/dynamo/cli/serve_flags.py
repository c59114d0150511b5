"""The flags of `dynamo serve`: one table, from which come its command line, the keys of its file, and the settings page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from dynamo.settings.choices import ROUTER_MODES
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
)
from dynamo.settings.table import declared, setting

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
        "Serve models of [another OpenAI-compatible server](upstream.md), such as `https://host/v1`", flag="--upstream")
    upstream_key_file: str | None = setting(None, None, placeholder("FILE", text), "A file with the key for it",
        flag="--upstream-key-file")
    upstream_ca_file: str | None = setting(None, None, placeholder("FILE", text),
        "Certificate authorities (PEM) that it may have beside those of the system", flag="--upstream-ca-file")
    upstream_models: tuple[str, ...] = setting((), None, each(placeholder("NAME[=THEIRS]", text)),
        "A model of it, by its name here and there; may be repeated", flag="--model", dest="upstream_models", repeats=True)
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
        "With many models: load this one at once, and keep it; may be repeated", flag="--pin", shown="")
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
