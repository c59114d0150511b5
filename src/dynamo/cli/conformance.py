"""`dynamo conformance module:Class`: run the contract's own judge from the shell."""

from __future__ import annotations

import asyncio
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from dynamo.cli.engines import load_engine
from dynamo.cli.usage import UsageError, split_engine_args
from dynamo.settings.command import CommandParser

if TYPE_CHECKING:
    from dynamo.contract.engine import BaseEngine

__all__ = ["engine_factory", "main"]

EXIT_BROKEN: Final = 1

_EPILOG: Final = """\
The engine is made by calling the class without arguments; if that is not possible, or arguments follow a --, it is made
by from_args. Exit status: 0 every promise is kept, 1 one is broken (its name is printed), 2 an error of use.

example:
  dynamo conformance my_backend.engine:MyEngine
  dynamo conformance sample -- --delay 0
"""


def main(argv: list[str]) -> int:
    """Run the kit and return the exit status."""
    own, engine_args = split_engine_args(argv)
    parser = CommandParser(
        "dynamo conformance", description="Hold an engine to the contract, promise by promise.", epilog=_EPILOG
    )
    parser.add_argument("engine", metavar="module:Class", help="the engine class, a function, or a built-in engine")
    parser.add_argument("--encode", action="store_true", help="judge it in the encode role")
    parser.add_argument("--traceback", action="store_true", help="show where a broken promise was broken")
    parser.add_argument(
        "--start-seconds", type=float, default=60.0, metavar="SECONDS", help="what start() may take (default: 60)"
    )
    options = parser.parse_args(own)
    engine_cls = load_engine(options.engine)

    from dynamo.contract.conformance import (
        ConformanceFailure,
        run_conformance,
        run_encode_conformance,
        run_raw_conformance,
    )
    from dynamo.contract.engine import RawEngine
    from dynamo.runtime.process_guard import guard_this_process

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


def engine_factory(engine_cls: type[BaseEngine], engine_args: list[str]) -> Callable[[], Awaitable[Any]]:
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
