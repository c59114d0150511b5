"""The parsers of all commands, for what describes them: completion of a shell, and the test of the settings page."""

from __future__ import annotations

from dynamo.cli import batch, chat, conformance, explain, new, serve, simulate
from dynamo.cli.bench import options as bench
from dynamo.cli.bench.replay import options as replay
from dynamo.settings.command import CommandParser

__all__ = ["command_parsers"]


def command_parsers() -> dict[str, CommandParser]:
    """Make the parser of each command, by its name (`bench replay` is one); no environment is read."""
    return {
        "serve": serve.build_parser({}),
        "chat": chat.build_parser({}),
        "new": new.build_parser(),
        "conformance": conformance.build_parser(),
        "simulate": simulate.build_parser(),
        "batch": batch.build_parser({}),
        "explain": explain.build_parser(),
        "bench": bench.build_parser(),
        "bench replay": replay.build_parser(),
    }
