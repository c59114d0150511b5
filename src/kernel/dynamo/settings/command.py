"""The command line of a program: errors of use in one line, with a suggestion. Light, for every command begins here."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn

EXIT_USAGE: Final = 2
MISSPELT: Final = 0.8  # how alike two flags are of which one is a slip; --prot and --port: 0.83
MOST_IN_USAGE: Final = 12  # flags; about what fits on a few lines
_UNKNOWN: Final = "unrecognized arguments: "  # argparse's words
_OF_A_VARIABLE: Final = re.compile(r"argument [^:]*: (?=[A-Z][A-Z0-9_]+: )")


class CommandParser(argparse.ArgumentParser):
    """argparse with errors of one line that suggest the closest flag, no abbreviations, and help texts that keep their breaks."""

    def __init__(
        self, prog: str | None = None, *, elsewhere: Callable[[str], str] | None = None, **options: Any
    ) -> None:
        """`elsewhere`: returns where a flag belongs that is no other one misspelt, for the error that names it."""
        self._elsewhere = elsewhere
        options.setdefault("allow_abbrev", False)  # an abbreviation breaks on the day a new flag shares its start
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(prog, **options)

    def format_help(self) -> str:
        """Leave the usage of many flags to the list below it: it would fill the screen."""
        flags = [action for action in self._actions if action.option_strings]
        if self.usage is None and len(flags) == len(self._actions) > MOST_IN_USAGE:
            self.usage = "%(prog)s [options]"
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Leave with status 2 and one line on stderr: the usage of thirty flags would bury the sentence that matters."""
        if message.startswith(_UNKNOWN):
            unknown = message.removeprefix(_UNKNOWN).split()[0].partition("=")[0]
            served = (flag for flag, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS)
            if self._elsewhere is None:
                message += did_you_mean(unknown, served)
            else:
                message += did_you_mean(unknown, served, cutoff=MISSPELT) or f"; {self._elsewhere(unknown)}"
        message = _OF_A_VARIABLE.sub("", message).removeprefix("argument ")
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def did_you_mean(given: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return "; did you mean X?" for the closest of `known`, or "" when none is close. `cutoff`: 1: the same."""
    import difflib  # only an error of use needs it

    close = difflib.get_close_matches(given, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""
