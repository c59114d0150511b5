"""`dynamo serve`: a frontend and workers on this machine, with nothing else installed or running."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dynamo.cli.console import Console
from dynamo.cli.engine_choice import HUB_PREFIX, Fetch, choose_engine, fetch_from_hub, locate_model
from dynamo.cli.engines import BUILT_IN, class_path
from dynamo.cli.readiness import Address, bind
from dynamo.cli.serve_config import ConfigFile, read_config
from dynamo.cli.usage import UsageError, split_engine_args
from dynamo.settings.command import CommandParser

__all__ = ["ServeOptions", "main", "read_options"]

DEFAULT_REPLACE_SECONDS: Final = 1800.0  # half an hour to load a model, as the start-up probes of `deploy/` allow
MAX_WORKERS: Final = 256  # a slip of the keyboard should not start ten thousand processes
MAX_FRONTEND_WORKERS: Final = 64  # as the frontend itself says
DEFAULT_HOST: Final = "127.0.0.1"  # nothing is open to a network before somebody asks for it
# Those of the frontend, whose import takes longer than all of this command; a test holds them to be the same.
ROUTER_MODES: Final = (
    "round-robin", "random", "power-of-two", "least-loaded", "kv", "direct", "device-aware-weighted",
)  # fmt: skip

_EPILOG: Final = f"""\
Without a MODEL and an engine, the small demonstration model is served that comes with this package. A MODEL is a directory
in the Hugging Face layout, a GGUF file, or hub:OWNER/NAME (a file: hub:OWNER/NAME/FILE.gguf), which is fetched first. Without
--engine, GGUF goes to llama.cpp; a directory to vLLM, where that is installed and knows the model, else to transformers, else to
the reference engine, which is for small models only. What was chosen, and why, is printed.

engines: {", ".join(sorted(BUILT_IN))}, or module:Class, module:function (also from the current directory) or
file.py:function. A function that takes messages, prompt or token_ids and yields text or token ids is an engine.
Everything after -- goes to the engine's from_args unchanged. The frontend reads its variables as always
(DYN_TLS_CERT_PATH, DYN_HTTP_BODY_LIMIT_MB, ...).

Only this machine can connect, unless --host names an address of a network (0.0.0.0: all of them).

--config FILE is a TOML file: the options above as keys (workers = 2), flags of the frontend in a table [frontend-args]
(max-requests-in-flight = 100), and those of the engine in [engine-args]. The command line wins over the file, and the file
over the environment.

A process that dies is started again. Ctrl-C lets requests in flight end; a second one does not. Exit status: 0 after a
clean stop, 2 for an error of use, else that of the process that could not be kept running.

SIGHUP replaces the workers one after the other, without losing a request: for new code of the engine, or new libraries.
Each replacement has to serve before its worker is told to end; the first one that does not ends the restart, and what
was served goes on. The frontend stays as it is.

example:
  dynamo serve ~/models/Qwen3-0.6B
  dynamo serve --engine app.py:answer --reload
  dynamo serve --engine my_backend.engine:MyEngine --workers 2 --http-port 9000 -- --delay 0.02
"""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What to serve and where."""

    engine: str
    engine_args: tuple[str, ...]
    workers: int
    http_host: str
    http_port: int
    store: Path | None  # None: a private directory, removed at the end
    in_process: bool
    frontend_workers: int | None = None  # None: as DYN_FRONTEND_WORKERS says
    replace_seconds: float = DEFAULT_REPLACE_SECONDS
    chaos: Path | None = None  # a plan of faults on purpose, allowed
    frontend_args: tuple[str, ...] = ()
    admin_port: int | None = None  # None: admin routes are on the HTTP port, while that is bound to loopback
    reload: bool = False  # replace the workers when the engine's files change
    engine_reason: str = ""  # why this engine, where nobody named one
    keys: str | None = None  # a file of API keys; None: as DYN_KEYS says
    own_key: str | None = field(default=None, repr=False)  # with which this command asks a frontend that needs keys


def main(argv: list[str]) -> int:
    """Serve until a signal; the exit status."""
    options = read_options(argv, os.environ)
    console = Console(jsonl=_logs_jsonl(os.environ))
    if options.engine_reason:
        console.say(f"engine {options.engine}: {options.engine_reason} (--engine takes another)")
    with closing(bind(options.http_host, options.http_port)) as listener:
        address = Address.of(options.http_host, listener.getsockname()[1], os.environ, options.own_key)
        if options.in_process:
            from dynamo.cli.in_process import serve_in_process

            return serve_in_process(options, console, listener, address)
        from dynamo.cli.local import LocalCluster

        with _store(options.store) as store:
            return asyncio.run(LocalCluster(options, console, listener, address, store).run())


def _logs_jsonl(env: Mapping[str, str]) -> bool:
    if not env.get("DYN_LOGGING_CONSOLE_FORMAT") and not env.get("DYN_LOGGING_JSONL"):
        return False  # without an import that the supervisor can do without
    from dynamo.runtime.logging import LoggingSettings

    return LoggingSettings.from_env(env).jsonl


def read_options(argv: list[str], env: Mapping[str, str], *, fetch: Fetch = fetch_from_hub) -> ServeOptions:
    """Merge the command line, the configuration file and the environment, in this order of precedence.

    `fetch` gets a model from the hub, if the command line asks for that. Raises UsageError; leaves as argparse does for
    `--help`.
    """
    own, engine_args = split_engine_args(argv)
    parser = _parser(env)
    file = _config_file(parser, own)
    parser.set_defaults(**{name.replace("-", "_"): value for name, value in file.options.items()})
    given = parser.parse_args(own)
    engine_args = [*file.engine_args, *engine_args]
    if not 1 <= given.workers <= MAX_WORKERS:
        raise UsageError(f"--workers {given.workers} is out of range; use 1 to {MAX_WORKERS}")
    if given.frontend_workers is not None and not 1 <= given.frontend_workers <= MAX_FRONTEND_WORKERS:
        raise UsageError(
            f"--frontend-workers {given.frontend_workers} is out of range; use 1 to {MAX_FRONTEND_WORKERS}"
        )
    if given.in_process and (given.frontend_workers or 1) > 1:
        raise UsageError("--frontend-workers has no meaning with --in-process: that is one process")
    if not 0 < given.replace_timeout < math.inf:
        raise UsageError(f"--replace-timeout {given.replace_timeout:g} is out of range; use seconds above 0")
    if given.in_process and given.store is not None:
        raise UsageError("--store has no meaning with --in-process: one process finds itself in memory")
    if given.engine is not None:
        class_path(given.engine)
    _check_planes(engine_args)
    engine, reason, model_args = _engine_of(given, engine_args, fetch)
    if given.reload and engine in BUILT_IN:
        raise UsageError(
            f"--reload watches the files of your own engine, and {engine} comes with this package; add --engine"
        )
    if given.reload and given.in_process:
        raise UsageError("--reload replaces worker processes, and --in-process has none")
    if given.in_process and (given.router_mode or file.frontend_args):
        raise UsageError("--router-mode and [frontend-args] have no meaning with --in-process: there is one worker")
    router = ("--router-mode", given.router_mode) if given.router_mode else ()
    return ServeOptions(
        engine=engine,
        engine_args=(*model_args, *engine_args),
        workers=given.workers,
        http_host=given.http_host,
        http_port=_port(str(given.http_port)),
        store=given.store,
        in_process=given.in_process,
        frontend_workers=given.frontend_workers,
        replace_seconds=given.replace_timeout,
        chaos=_chaos(given.chaos, given.allow_chaos, engine_args, env, is_one_process=given.in_process),
        frontend_args=(*file.frontend_args, *router),
        admin_port=None if given.admin_port is None else _port(str(given.admin_port), flag="--admin-port"),
        reload=given.reload,
        engine_reason=reason,
        keys=given.keys,
        own_key=_own_key(given.keys, env),
    )


def _own_key(keys: str | None, env: Mapping[str, str]) -> str | None:
    """Return the key with which this command asks its frontend what it serves; None where no key is needed.

    What a key file holds are hashes: beside one, the frontend gets a random key that this process alone knows.
    """
    if given := env.get("DYN_API_KEY", "").strip():
        return given
    return secrets.token_urlsafe(32) if keys or env.get("DYN_KEYS", "").strip() else None


def _engine_of(given: argparse.Namespace, engine_args: list[str], fetch: Fetch) -> tuple[str, str, list[str]]:
    """Return the engine, why ("" where it was named), and its arguments that name the model. Raises UsageError."""
    if given.engine is not None:
        return given.engine, "", [] if given.model is None else ["--model-name", given.model]
    flags = {argument.partition("=")[0] for argument in engine_args}
    model = None
    if given.model is not None:
        model = locate_model(given.model, allow_download=given.allow_download, fetch=fetch)
    choice = choose_engine(model, has_tokenizer_flag="--tokenizer" in flags)
    if choice.model is None:
        return choice.engine, "", []  # the demonstration model goes without saying
    # A model from the hub is asked for by its name there, and not by the directory it is kept in.
    is_here = Path(given.model).expanduser().exists()
    name = "" if is_here else given.model.removeprefix(HUB_PREFIX)
    if is_here and choice.engine == "vllm":  # the other engines take the directory's name by themselves
        name = Path(choice.model).resolve().name
    named = ["--served-model-name", name] if name and "--served-model-name" not in flags else []
    return choice.engine, choice.reason, ["--model-name", choice.model, *named]


def _parser(env: Mapping[str, str]) -> CommandParser:
    parser = CommandParser(
        "dynamo serve",
        description="Start a frontend and workers on this machine. No service is needed.",
        usage="dynamo serve [MODEL] [options] [-- ENGINE ARGUMENTS]",
        epilog=_EPILOG,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="passed to the engine as --model-name MODEL")
    parser.add_argument("--engine", metavar="NAME|module:NAME", help="the engine (default: by the model, see below)")
    parser.add_argument(
        "--allow-download", action="store_true", help="fetch a MODEL that is not here from the hub, as hub:MODEL does"
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="how many workers (default: 1)")
    parser.add_argument(
        "--host",
        "--http-host",
        dest="http_host",
        default=env.get("DYN_HTTP_HOST", "").strip() or DEFAULT_HOST,
        metavar="HOST",
        help="address the frontend listens on; 0.0.0.0 opens it to the network (default: %(default)s) [DYN_HTTP_HOST]",
    )
    parser.add_argument(
        "--port",
        "--http-port",
        dest="http_port",
        default=env.get("DYN_HTTP_PORT", "").strip() or "8000",
        metavar="PORT",
        help="its port; 0 takes any free one (default: %(default)s) [DYN_HTTP_PORT]",
    )
    parser.add_argument(
        "--admin-port",
        default=env.get("DYN_ADMIN_PORT", "").strip() or None,
        metavar="PORT",
        help="serve the frontend's admin routes at 127.0.0.1 on this port, and nowhere else; 0 takes any free one (default: on "
        "the HTTP port, while that is bound to loopback) [DYN_ADMIN_PORT]",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file with these options (see below)")
    parser.add_argument(
        "--keys",
        metavar="FILE",
        help="a file of API keys, made by dynamo keys create: every request needs one [DYN_KEYS]",
    )
    parser.add_argument(
        "--router-mode",
        choices=ROUTER_MODES,
        metavar="MODE",
        help=f"how a worker is chosen: {', '.join(ROUTER_MODES)} (default: round-robin) [DYN_ROUTER_MODE]",
    )
    parser.add_argument(
        "--reload", action="store_true", help="replace the workers, one by one, when the engine's Python files change"
    )
    parser.add_argument(
        "--store",
        type=Path,
        metavar="DIR",
        help="directory in which the processes find each other; kept at the end (default: a private one)",
    )
    parser.add_argument(
        "--frontend-workers",
        type=int,
        metavar="N",
        help="processes of the frontend, on its one port (default: 1) [DYN_FRONTEND_WORKERS]",
    )
    parser.add_argument(
        "--replace-timeout",
        type=float,
        default=DEFAULT_REPLACE_SECONDS,
        metavar="SECONDS",
        help="SIGHUP: how long a replacement may take to load its model (default: %(default)g)",
    )
    parser.add_argument("--in-process", action="store_true", help="all of it in one process, over memory")
    parser.add_argument(
        "--chaos",
        type=Path,
        metavar="FILE",
        help="inject the faults of this plan (TOML); needs --allow-chaos, too [DYN_CHAOS]",
    )
    parser.add_argument(
        "--allow-chaos", action="store_true", help="permit fault injection in these processes [DYN_ALLOW_CHAOS]"
    )
    return parser


def _config_file(parser: CommandParser, own: list[str]) -> ConfigFile:
    """Read the file that `--config` names, before the other options: it sets their defaults."""
    finder = CommandParser("dynamo serve", add_help=False)
    finder.add_argument("--config", type=Path)
    path = finder.parse_known_args(own)[0].config
    if path is None:
        return ConfigFile({}, (), ())
    actions = {
        name.removeprefix("--"): action
        for action in parser._actions
        for name in (action.option_strings or [action.dest])
        if action.dest not in {"help", "config"}
    }
    file = read_config(path, actions.keys())
    options = {actions[name].dest: _converted(path, name, value, actions[name]) for name, value in file.options.items()}
    return ConfigFile(options, file.frontend_args, file.engine_args)


def _converted(path: Path, name: str, value: object, action: argparse.Action) -> object:
    """Return the value of one key as its flag would give it. Raises UsageError."""
    if isinstance(action, argparse._StoreTrueAction) or isinstance(value, bool):
        if not (isinstance(action, argparse._StoreTrueAction) and isinstance(value, bool)):
            wanted = "true or false" if isinstance(action, argparse._StoreTrueAction) else "a value, not true or false"
            raise UsageError(f"--config {path}: {name} must be {wanted}")
        return value
    kind = action.type if callable(action.type) else str
    try:
        converted: object = kind(str(value))
    except (TypeError, ValueError):
        raise UsageError(f"--config {path}: {name} = {value!r} is not a valid value") from None
    if action.choices is not None and converted not in action.choices:
        raise UsageError(f"--config {path}: {name} = {value!r} is not one of {', '.join(map(str, action.choices))}")
    return converted


def _chaos(
    path: Path | None, is_allowed: bool, engine_args: list[str], env: Mapping[str, str], *, is_one_process: bool
) -> Path | None:
    """Read the fault plan, so that a mistake in the plan is reported before anything starts."""
    named = env.get("DYN_CHAOS", "").strip()
    path = path or (Path(named) if named else None)
    if any(argument.partition("=")[0] == "--chaos" for argument in engine_args):
        raise UsageError("--chaos is an option of dynamo serve itself: write it before the --")
    if path is None:
        return None
    if is_one_process:
        raise UsageError("--chaos has no meaning with --in-process: a fault would end everything")
    from dynamo.errors import InvalidArgument
    from dynamo.runtime.chaos.admission import admitted
    from dynamo.runtime.settings import env_bool

    try:
        admitted(str(path), is_allowed or env_bool("DYN_ALLOW_CHAOS", env=env))
    except InvalidArgument as error:
        raise UsageError(f"--chaos: {error}") from None
    return path.absolute()


def _port(text: str, *, flag: str = "--http-port") -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise UsageError(f"{flag} {text!r} is not a port; use 0 to 65535")
    return int(text)


def _check_planes(engine_args: list[str]) -> None:
    """Refuse what would be overridden: a flag that is silently ignored is a trap."""
    allowed = {
        "--discovery-backend": "file",
        "--request-plane": "tcp",
        "--response-plane": "tcp",
        "--event-plane": "zmq",
    }
    for position, argument in enumerate(engine_args):
        flag, equals, value = argument.partition("=")
        if not equals:
            value = engine_args[position + 1] if position + 1 < len(engine_args) else ""
        if flag in allowed and value != allowed[flag]:
            raise UsageError(
                f"{flag} {value} needs more than this machine; dynamo serve uses {allowed[flag]}. Start the backend and "
                "python -m dynamo.frontend by themselves"
            )


@contextmanager
def _store(kept: Path | None) -> Iterator[Path]:
    """Provide the discovery directory for the time of the block."""
    if kept is not None:
        try:
            kept.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--store {kept}: {error.strerror}") from None
        yield kept.absolute()
        return
    private = Path(tempfile.mkdtemp(prefix="dynamo-serve-"))
    try:
        yield private
    finally:
        shutil.rmtree(private, ignore_errors=True)
