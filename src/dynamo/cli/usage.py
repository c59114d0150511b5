"""Turns an error of use into one line with a suggestion and exit status 2."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable
from typing import Any, Final, NoReturn

__all__ = ["EXIT_USAGE", "CommandParser", "PlainRefusal", "UsageError", "did_you_mean", "split_engine_args"]

EXIT_USAGE: Final = 2
_UNKNOWN: Final = "unrecognized arguments: "  # argparse's words


class UsageError(Exception):
    """An error of use; the message names what to write instead."""


class PlainRefusal(UsageError):
    """A line that is shown exactly as it is, because another program of ours words it too."""


class CommandParser(argparse.ArgumentParser):
    """argparse with one-line errors that suggest the closest flag, no abbreviations, and help texts that keep their breaks."""

    def __init__(self, prog: str, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(prog, **options)

    def error(self, message: str) -> NoReturn:
        if message.startswith(_UNKNOWN):
            unknown = message.removeprefix(_UNKNOWN).split()[0].partition("=")[0]
            message += did_you_mean(unknown, self._option_string_actions)
        print(f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(EXIT_USAGE)


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the closest of `known`, or "" when none is close."""
    close = difflib.get_close_matches(given, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def split_engine_args(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split into our own arguments and the engine's: everything after the first `--`."""
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]
