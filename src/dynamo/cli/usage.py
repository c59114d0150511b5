"""What a person gets who typed something else than she meant: one line, exit status 2, no traceback."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Final, NoReturn

__all__ = ["EXIT_USAGE", "CommandParser", "PlainRefusal", "UsageError", "split_engine_args"]

EXIT_USAGE: Final = 2


class UsageError(Exception):
    """An error of use; the message says what to write instead."""


class PlainRefusal(UsageError):
    """A line that is shown exactly as it is, because another program of ours words it too."""


class CommandParser(argparse.ArgumentParser):
    """argparse with one-line errors, no abbreviations, and help texts that keep their line breaks."""

    def __init__(self, prog: str, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(prog, **options)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(EXIT_USAGE)


def split_engine_args(argv: list[str]) -> tuple[list[str], list[str]]:
    """Our own arguments, and the engine's: everything after the first `--`."""
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]
