"""`dynamo COMMAND ...`: find the command, run it, turn an error of use into one line and exit status 2.

A command's module is imported only when it is run, so that `dynamo --help` answers at once.
"""

from __future__ import annotations

import importlib
import os
import select
import sys
from collections.abc import Sequence
from typing import Final

from dynamo import __version__
from dynamo.cli.usage import PlainRefusal, UsageError
from dynamo.settings.command import EXIT_USAGE, did_you_mean

NATIVE_WIRE: Final = "1.6.1"  # the release of the native system whose processes share a cluster with ours
COMMANDS: Final = {
    # name: (module with `main(argv) -> int`, what it does)
    "serve": ("dynamo.cli.serve", "start a frontend and workers on this machine, ready for curl"),
    "models": ("dynamo.cli.packaged_models", "list the models that have a short name, and what installs them"),
    "chat": ("dynamo.cli.chat", "talk to a served model in the terminal"),
    "new": ("dynamo.cli.new", "write the package of a new backend, with tests that pass"),
    "conformance": ("dynamo.cli.conformance", "hold an engine or a server to its contract and name what it breaks"),
    "keys": ("dynamo.cli.keys", "make, show and take away API keys"),
    "simulate": ("dynamo.cli.simulate", "run clusters under virtual time with seeded faults"),
    "batch": ("dynamo.cli.batch", "run a file of requests as a batch, and look after batches"),
    "files": ("dynamo.cli.files", "look after a directory of files: repair its index"),
    "replay": ("dynamo.cli.replay.command", "send recorded requests again and compare, or answer from the recording"),
    "explain": ("dynamo.cli.explain", "say why requests went where they went, and what another policy would have done"),
    "replay-policy": ("dynamo.cli.replay_policy", "compare routing policies on recorded decisions"),
    "top": ("dynamo.cli.top", "show what a served system is doing, live in the terminal or once as text"),
    "status": ("dynamo.cli.status", "say whether everything is ready, and what is wrong"),
    "drain": ("dynamo.cli.drain", "take a worker out of service, and wait until it can be deleted"),
    "doctor": (
        "dynamo.cli.doctor.command",
        "examine this machine and its settings, and say what to do about what is wrong",
    ),
    "bench": ("dynamo.cli.bench.command", "load a server and report throughput and latency"),
    "size": ("dynamo.cli.size.command", "report how many replicas meet a target of latency, by simulation"),
    "completion": ("dynamo.cli.completion", "print a script that completes this command in bash, zsh or fish"),
}

EXIT_INTERRUPTED: Final = 130
EXIT_READER_GONE: Final = 141  # as of a process that SIGPIPE ends


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. A reader of the output that leaves, as `head -1` does, ends it without a word."""
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _has_lost_reader():  # a connection of the command broke
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what the interpreter flushes at its end
        return EXIT_READER_GONE


def _has_lost_reader() -> bool:
    """Return whether the reader of standard output has left. A second flush would not fail: the first one drops its bytes."""
    try:
        poll = select.poll()  # not on Windows
        poll.register(sys.stdout.fileno(), 0)
    except (AttributeError, OSError):
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run(args: list[str]) -> int:
    if args[:1] in (["-h"], ["--help"], ["help"]):
        print(_help(), end="")
        return 0
    if args[:1] in (["-V"], ["--version"]):
        wire = importlib.import_module("dynamo.runtime.calls.request_plane.mux.frames")
        print(f"dynamo {__version__} (wire: mux {wire.VERSION}, native {NATIVE_WIRE})")
        return 0
    if not args or args[0] not in COMMANDS:
        problem = f"there is no command {args[0]!r}{did_you_mean(args[0], COMMANDS)}" if args else "no command given"
        print(f"dynamo: error: {problem}; use one of {', '.join(COMMANDS)} (see dynamo --help)", file=sys.stderr)
        return EXIT_USAGE
    module = importlib.import_module(COMMANDS[args[0]][0])
    try:
        status: int = module.main(args[1:])
    except PlainRefusal as refusal:
        print(refusal, file=sys.stderr)
        return EXIT_USAGE
    except UsageError as error:
        print(f"dynamo {args[0]}: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return status


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {what}" for name, (_, what) in COMMANDS.items())
    return f"""\
usage: dynamo COMMAND ...

Put any LLM engine behind a production API.

commands:
{commands}

example:
  dynamo serve

dynamo COMMAND --help explains a command; dynamo --version prints the version.
"""


if __name__ == "__main__":
    sys.exit(main())
