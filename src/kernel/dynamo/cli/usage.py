"""Errors of use, and the arguments that are not ours."""

from __future__ import annotations


class UsageError(Exception):
    """An error of use; the message names what to write instead."""


class PlainRefusal(UsageError):
    """A line that is shown exactly as it is, because another program of ours words it too."""


def split_engine_args(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split into our own arguments and the engine's: everything after the first `--`."""
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]
