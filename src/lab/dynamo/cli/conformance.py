"""`dynamo conformance`: an engine by the contract's own judge here, a server or a worker by the referee."""

from __future__ import annotations

import asyncio
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dynamo.cli.engines import load_engine
from dynamo.cli.usage import UsageError, split_engine_args
from dynamo.settings.command import CommandParser
from dynamo.settings.flags import add_flags
from dynamo.settings.readers import above_zero, switch
from dynamo.settings.table import read_settings, setting, settings_of

if TYPE_CHECKING:
    from dynamo.contract.engine import BaseEngine

EXIT_BROKEN: Final = 1

_EPILOG: Final = """\
The engine is made by calling the class without arguments; if that is not possible, or arguments follow a --, it is made
by from_args. Exit status: 0 every promise is kept, 1 one is broken (its name is printed), 2 an error of use.

example:
  dynamo conformance my_backend.engine:MyEngine
  dynamo conformance sample -- --delay 0

three forms:
  dynamo conformance module:Class      an engine in this process, held to the contract: this page
  dynamo conformance http://HOST/v1    a server with OpenAI's or Anthropic's APIs: http://HOST/v1 --help, --list
  dynamo conformance worker ADDRESS    a worker in any language, held to its wires: worker --help, worker --list
docs/conformance.md describes the second and the third.
"""


@dataclass(frozen=True, slots=True)
class ConformanceFlags:
    """How the engine is judged."""

    # fmt: off
    encode: bool = setting(False, None, switch, "Judge it in the encode role", flag="--encode", negative="")
    traceback: bool = setting(False, None, switch, "Show where a broken promise was broken", flag="--traceback",
        negative="")
    start_seconds: float = setting(60.0, None, above_zero(unit="s", metavar="SECONDS"), "What `start()` may take",
        flag="--start-seconds")
    # fmt: on


def build_parser() -> CommandParser:
    """Make the parser of this command."""
    parser = CommandParser(
        "dynamo conformance", description="Hold an engine to the contract, promise by promise.", epilog=_EPILOG
    )
    parser.add_argument("engine", metavar="module:Class", help="the engine class, a function, or a built-in engine")
    add_flags(parser, (made for _, made in settings_of(ConformanceFlags)), {})
    return parser


def main(argv: list[str]) -> int:
    """Run the kit and return the exit status."""
    own, engine_args = split_engine_args(argv)
    if own[:1] == ["worker"]:
        from dynamo.cli.referee.wire.command import main as judge_worker

        return judge_worker(argv[1:])
    if {"--list", "--schema"} & set(own) or any(word.startswith(("http://", "https://")) for word in own):
        from dynamo.cli.referee.command import main as judge_server

        return judge_server(argv)
    given = build_parser().parse_args(own)
    options = read_settings(ConformanceFlags, {}, vars(given))
    if "://" in given.engine or given.engine.rpartition(":")[2].partition("/")[0].isdecimal():
        raise UsageError(f"{given.engine!r} is no address of a server: that begins with http:// or https://")
    engine_cls = load_engine(given.engine)

    from dynamo.contract.conformance import (
        ConformanceFailure,
        run_conformance,
        run_encode_conformance,
        run_raw_conformance,
    )
    from dynamo.contract.engine import RawEngine
    from dynamo.runtime.base.process_guard import guard_this_process

    if engine_cls.has_child_processes:
        guard_this_process()  # an engine that breaks the contract may leave them
    is_raw = issubclass(engine_cls, RawEngine)
    if is_raw and options.encode:
        raise UsageError("--encode is for token engines; a raw engine has no encode role")
    judge: Callable[..., Awaitable[None]] = run_raw_conformance if is_raw else run_conformance
    if options.encode:
        judge = run_encode_conformance
    passed = 0

    def report(name: str) -> None:
        nonlocal passed
        passed += 1
        print(f"ok  {name}", flush=True)

    async def judged() -> None:
        await judge(engine_factory(engine_cls, engine_args), report=report, start_seconds=options.start_seconds)

    try:
        asyncio.run(judged())
    except ConformanceFailure as failure:
        if options.traceback:
            traceback.print_exception(failure)
        print(failure, file=sys.stderr)
        return EXIT_BROKEN
    print(f"{engine_cls.__name__} keeps the contract ({passed} checks)")
    return 0


def engine_factory(engine_cls: type[BaseEngine], engine_args: list[str]) -> Callable[[], Awaitable[object]]:
    """Return what makes engines as this command promises: `cls()` where that is possible, else `from_args`."""

    async def make() -> Any:
        if not engine_args and _takes_nothing(engine_cls):
            return engine_cls()
        engine, _ = await engine_cls.from_args(list(engine_args))
        return engine

    return make


def _takes_nothing(engine_cls: type[BaseEngine]) -> bool:
    if inspect.isabstract(engine_cls):
        missing = ", ".join(sorted(engine_cls.__abstractmethods__))
        raise UsageError(f"{engine_cls.__name__} is abstract: it does not implement {missing}")
    try:
        inspect.signature(engine_cls).bind()
    except TypeError:
        return False
    return True
