"""`dynamo serve`: a frontend and workers on this machine, with nothing else installed or running."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Final

from dynamo.cli.console import Console
from dynamo.cli.engine_choice import HUB_PREFIX, Fetch, choose_engine, fetch_from_hub, locate_model, upstream_args
from dynamo.cli.engines import BUILT_IN, class_path
from dynamo.cli.local_processes import MadeResidents
from dynamo.cli.packaged_models import DEMO, default_model
from dynamo.cli.readiness import Address, bind
from dynamo.cli.serve_flags import CONFIG_FILE, ConfigFile, ServeFlags, converted, read_config
from dynamo.cli.usage import UsageError, split_engine_args
from dynamo.settings.command import CommandParser
from dynamo.settings.flags import add_flags
from dynamo.settings.readers import each, text
from dynamo.settings.table import declared, read_settings, settings_of

_EPILOG: Final = f"""\
A MODEL is a directory in the Hugging Face layout, a GGUF file, a short name that `dynamo models` lists (smollm2), or
hub:OWNER/NAME (a file: hub:OWNER/NAME/FILE.gguf), which is fetched first. Without a MODEL and an engine, smollm2 is served
where it is installed, else the demonstration model (demo), a toy that comes with this package. Without --engine, GGUF goes to
llama.cpp; a directory to vLLM, where that is installed and knows the model, else to transformers, else to the reference
engine, which is for small models only. What was chosen, and why, is printed.

engines: {", ".join(sorted(BUILT_IN))}, or module:Class, module:function (also from the current directory) or
file.py:function. A function that takes messages, prompt or token_ids and yields text or token ids is an engine.
Everything after -- goes to the engine's from_args unchanged. The frontend reads its variables as always
(DYN_TLS_CERT_PATH, DYN_HTTP_BODY_LIMIT_MB, ...).

Only this machine can connect, unless --host names an address of a network (0.0.0.0: all of them).

--config FILE is a TOML file: the options above as keys (workers = 2), flags of the frontend in a table [frontend-args]
(max-requests-in-flight = 100), and those of the engine in [engine-args]. What may be repeated is a list there. The command
line wins over the file, and the file over the environment.

Several MODELs are served by one frontend, each loaded at its first request: --memory 12GB is what they may take together,
--pin MODEL loads one at once and keeps it, --idle 10m unloads what is not used. In the file: tables [models.NAME] (model,
engine, engine-args, pin) and [presets.NAME] (model, system, temperature, ...).

With --upstream URL the models of another server, each a --model NAME=THEIR-NAME, are served beside those of this machine,
or alone. --fallback A=B lets B serve what A cannot. In the file: upstream = "URL", model = ["NAME=THEIR-NAME"] (a MODEL is
a table [models.NAME] then), and further flags of the engine for it in [upstream-args].

--workers 1..4 adds a worker when those there are full, and takes one away when it was not missed for --scale-down-after
seconds; with 0..4 the last one goes, too, and the next request waits for a new one.

A process that dies is started again. Ctrl-C lets requests in flight end; a second one does not. Exit status: 0 after a
clean stop, 2 for an error of use, else that of the process that could not be kept running.

SIGHUP replaces the workers one after the other, without losing a request: for new code of the engine, or new libraries.
Each replacement has to serve before its worker is told to end; the first one that does not ends the restart, and what
was served goes on. The frontend stays as it is.

example:
  dynamo serve ~/models/Qwen3-0.6B
  dynamo serve --engine app.py:answer --reload
  dynamo serve --engine my_backend.engine:MyEngine --workers 2 --http-port 9000 -- --delay 0.02
  dynamo serve ~/models/Qwen3-0.6B --workers 1..4
  dynamo serve --upstream https://host/v1 --upstream-key-file ~/key --model big=their-name
  dynamo serve smollm2 --upstream https://host/v1 --model big=their-name --fallback smollm2=big
"""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What to serve and where: the flags, and what follows from them."""

    flags: ServeFlags
    engine: str
    engine_args: tuple[str, ...]
    engine_reason: str = ""  # why this engine, where the command line names none
    frontend_args: tuple[str, ...] = ()
    chaos: Path | None = None  # a plan of faults, allowed
    many: Mapping[str, ServeOptions] = field(default_factory=dict)  # of each of many models: its engine and arguments
    residents: MadeResidents | None = None  # what loads and unloads them
    inherited: tuple[int, ...] = ()  # descriptors for the frontend
    serve_as: str = ""  # the name of one of many models
    upstream_args: tuple[str, ...] = ()  # of another server whose models are served beside those of this machine
    own_key: str | None = field(default=None, repr=False)  # with which this command calls a frontend that needs keys


def main(argv: list[str]) -> int:
    """Serve until a signal; the exit status."""
    options = read_options(argv, os.environ)
    reason = options.engine_reason and f"engine {options.engine}: {options.engine_reason} (--engine takes another)"
    console = Console(jsonl=_logs_jsonl(os.environ), above_table=reason)
    flags = options.flags
    with ExitStack() as bound:
        listeners = [bound.enter_context(closing(each)) for each in bind(flags.http_host, flags.http_port, flags.uds)]
        port = None if flags.http_port is None else listeners[0].getsockname()[1]
        address = Address.of(flags.http_host, port, os.environ, options.own_key)
        address = replace(address, uds=flags.uds or "", root_path=flags.root_path)
        if flags.in_process:
            from dynamo.cli.in_process import serve_in_process

            return serve_in_process(options, console, listeners, address)
        from dynamo.cli.local import LocalCluster

        store = bound.enter_context(_store(flags.store))
        return asyncio.run(LocalCluster(options, console, listeners, address, store).run())


def _logs_jsonl(env: Mapping[str, str]) -> bool:
    if not env.get("DYN_LOGGING_CONSOLE_FORMAT") and not env.get("DYN_LOGGING_JSONL"):
        return False  # without an import that the supervisor can do without
    from dynamo.runtime.observe.logging import LoggingSettings

    return LoggingSettings.from_env(env).jsonl


def read_options(argv: list[str], env: Mapping[str, str], *, fetch: Fetch = fetch_from_hub) -> ServeOptions:
    """Merge the command line, the configuration file and the environment, in this order of precedence.

    `fetch` gets a model from the hub, if the command line requests that. Raises UsageError; leaves as argparse does for
    `--help`.
    """
    own, engine_args = split_engine_args(argv)
    parser = build_parser(env)
    file = _config_file(own)
    parser.set_defaults(**file.options)
    given = parser.parse_args(own)
    flags = read_settings(ServeFlags, env, vars(given))
    engine_args = [*file.engine_args, *engine_args]
    if flags.in_process and (flags.frontend_workers or 1) > 1:
        raise UsageError("--frontend-workers has no meaning with --in-process: that is one process")
    if flags.in_process and flags.store is not None:
        raise UsageError("--store has no meaning with --in-process: one process finds itself in memory")
    if flags.engine is not None:
        class_path(flags.engine)
    _check_planes(engine_args)
    for flag in ("--http-host", "--http-port", "--uds", "--root-path"):
        if flag in file.frontend_args:
            raise UsageError(f"--config: [frontend-args] {flag[2:]}: write it as an option, above the tables")
    if flags.served_names and "--served-model-name" in [argument.partition("=")[0] for argument in engine_args]:
        raise UsageError("--served-model-name is given twice: leave it out behind the --")
    upstream = upstream_args(flags, file.upstream_args)
    engine, reason, model_args = "", "", list[str]()
    if is_many := len(given.model) > 1 or bool(file.many or flags.pin or flags.memory or flags.idle):
        if flags.served_names:
            raise UsageError("--served-model-name is for one model: the names of several are those of [models.NAME]")
    elif upstream and not given.model and flags.engine is None:
        if flags.served_names:
            raise UsageError("--served-model-name is for a model that runs here: write --model NAME=THEIR-NAME")
        engine, model_args, upstream = "upstream", upstream, []
    else:
        engine, reason, model_args = _engine_of(next(iter(given.model), None), flags, engine_args, fetch)
    if flags.reload and engine in BUILT_IN:
        raise UsageError(
            f"--reload watches the files of your own engine, and {engine} comes with this package; add --engine"
        )
    if flags.reload and flags.in_process:
        raise UsageError("--reload replaces worker processes, and --in-process has none")
    if flags.in_process and not flags.workers.is_fixed:
        raise UsageError(f"--workers {flags.workers} adds and removes processes, and --in-process has one")
    if flags.scale_advise and flags.workers.is_fixed:
        raise UsageError(f"--scale-advise needs a range of workers: --workers MIN..MAX, not {flags.workers}")
    of_kv = {
        "--router-policy": flags.router_policy,
        "--shadow-policy": flags.shadow_policy,
        "--router-decisions": flags.router_decisions,
    }
    router_mode = flags.router_mode or ("kv" if any(of_kv.values()) else None)
    if router_mode != "kv" and (named := [flag for flag, value in of_kv.items() if value]):
        raise UsageError(f"{named[0]} needs --router-mode kv, not {router_mode}")
    if flags.in_process and (router_mode or flags.files_dir or flags.fallback or file.frontend_args):
        raise UsageError(
            "--router-mode, --files-dir, --fallback and [frontend-args] have no meaning with --in-process: there is one "
            "worker, and no frontend process"
        )
    if flags.in_process and upstream:
        raise UsageError("--upstream beside a model of this machine is a process of its own, and --in-process has one")
    passed = {"--router-mode": router_mode, **of_kv, "--files-dir": flags.files_dir}
    passed |= {"--fallback-on": flags.fallback_on, "--fallback-after-ms": flags.fallback_after_ms}
    pairs = [*passed.items(), *(("--fallback", chain) for chain in flags.fallback)]
    if flags.http_port is None and flags.uds is None:
        raise UsageError("--http-port off leaves no way to the API: add --uds PATH")
    options = ServeOptions(
        flags,
        engine,
        (*model_args, *engine_args),
        reason,
        frontend_args=(*file.frontend_args, *(part for flag, value in pairs if value for part in (flag, value))),
        upstream_args=tuple(upstream),
        chaos=_chaos(flags, engine_args),
        own_key=_own_key(flags.keys, env),
    )
    if not is_many:
        return options
    choose = partial(_engine_of, flags=flags, fetch=fetch)
    # By its name, as the kernel imports nothing of another wing.
    found: ServeOptions = import_module("dynamo.cli.many").with_models(options, given.model, file.many, choose)
    return found


def _own_key(keys: str | None, env: Mapping[str, str]) -> str | None:
    """Return the key with which this command gets from its frontend what it serves; None where no key is needed.

    What a key file holds are hashes: beside one, the frontend gets a random key that this process alone knows.
    """
    if given := env.get("DYN_API_KEY", "").strip():
        return given
    return secrets.token_urlsafe(32) if keys or env.get("DYN_KEYS", "").strip() else None


def build_parser(env: Mapping[str, str]) -> CommandParser:
    """Make the parser of this command."""
    parser = CommandParser(
        "dynamo serve",
        description="Start a frontend and workers on this machine. No service is needed.",
        usage="dynamo serve [MODEL ...] [options] [-- ENGINE ARGUMENTS]",
        epilog=_EPILOG,
        elsewhere=_elsewhere,
    )
    parser.add_argument(
        "model",
        nargs="*",
        default=[],
        metavar="MODEL",
        help="a directory, a GGUF file, a short name, or hub:OWNER/NAME; see below, also for several",
    )
    add_flags(parser, (CONFIG_FILE, *(made for _, made in settings_of(ServeFlags))), env)
    return parser


def _elsewhere(flag: str) -> str:
    if flag == "--api-key":
        return "keys are in a file here: --keys FILE, made by dynamo keys create"
    return f"a flag of the engine goes behind two dashes: dynamo serve MODEL -- {flag} ..."


def _engine_of(
    named: str | None, flags: ServeFlags, engine_args: list[str], fetch: Fetch
) -> tuple[str, str, list[str]]:
    """Return the engine, why ("" where it was named), and its arguments that name the model. Raises UsageError."""
    if flags.engine is not None:
        return flags.engine, "", [] if named is None else ["--model-name", named]
    given = {argument.partition("=")[0] for argument in engine_args}
    if named is None and (installed := default_model()) is not None:
        named = installed.name
    elif named == DEMO and not Path(DEMO).exists():
        named = None
    model = None if named is None else locate_model(named, allow_download=flags.allow_download, fetch=fetch)
    choice = choose_engine(model, has_tokenizer_flag="--tokenizer" in given)
    if named is None or choice.model is None:
        return choice.engine, choice.reason, []
    # A model from the hub is requested by its name there, and not by the directory it is kept in.
    is_here = Path(named).expanduser().exists()
    name = "" if is_here else named.removeprefix(HUB_PREFIX)
    if is_here and choice.engine == "vllm":  # the other engines take the directory's name by themselves
        name = Path(choice.model).resolve().name
    alias = ["--served-model-name", name] if name and "--served-model-name" not in given else []
    further = [flag for flag in choice.args if flag not in given]
    return choice.engine, choice.reason, ["--model-name", choice.model, *alias, *further]


def _config_file(own: list[str]) -> ConfigFile:
    """Read the file that `--config` names, before the other options: it sets their defaults."""
    finder = CommandParser("dynamo serve", add_help=False)
    add_flags(finder, [CONFIG_FILE], {})
    path = finder.parse_known_args(own)[0].config
    if path is None:
        return ConfigFile({}, (), ())
    known = {flag.removeprefix("--"): made for _, made in settings_of(ServeFlags) for flag in made.flags}
    file = read_config(path, known.keys(), [name for name, made in known.items() if made.repeats])
    if "upstream" not in file.options:  # else `model` names those of the other server
        known["model"] = declared(None, each(text), "", dest="model", repeats=True)
    options = {known[name].dest: converted(path, name, value, known[name]) for name, value in file.options.items()}
    return replace(file, options=options)


def _chaos(flags: ServeFlags, engine_args: list[str]) -> Path | None:
    """Read the fault plan, so that a mistake in the plan is reported before anything starts."""
    if any(argument.partition("=")[0] == "--chaos" for argument in engine_args):
        raise UsageError("--chaos is an option of dynamo serve itself: write it before the --")
    if flags.chaos is None:
        return None
    if flags.in_process:
        raise UsageError("--chaos has no meaning with --in-process: a fault would end everything")
    from dynamo.errors import InvalidArgument
    from dynamo.runtime.base.settings import ChaosSettings
    from dynamo.runtime.calls.faults import injection

    try:
        injection().check(ChaosSettings(plan=str(flags.chaos), is_allowed=flags.allow_chaos))
    except InvalidArgument as error:
        raise UsageError(f"--chaos: {error}") from None
    return flags.chaos.absolute()


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
