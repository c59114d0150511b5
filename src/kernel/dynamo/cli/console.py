"""The output of `dynamo serve`: its own lines on stdout, those of its processes on stderr."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Sequence
from typing import Final, TextIO

from dynamo.settings.foreign import has_colour
from dynamo.supervise.lines import record_of

HELD_LINES: Final = 200  # start-up logs of a handful of processes; older lines go first

COLOURS: Final = ("36", "33", "35", "32", "34", "31")  # ANSI: cyan first, it is the frontend's
BOLD: Final = "1"
OWN_NAME: Final = "dynamo serve"  # as the process of a JSON record


class Console:
    """Lines to a person. Colours and a drawn table only on a terminal, and never where NO_COLOR is set.

    With `jsonl` every line on stderr is a JSON object that names its process: stderr then belongs to a collector.
    """

    def __init__(
        self, out: TextIO | None = None, err: TextIO | None = None, *, jsonl: bool = False, above_table: str = ""
    ) -> None:
        """`above_table`: a line that is printed once the start has gone so far that there is a table."""
        self._above_table = above_table
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._jsonl = jsonl
        self._colours: dict[str, str] = {}
        self._width = 0
        self._held: deque[tuple[str, str]] | None = None
        self._closed: set[int] = set()

    def say(self, text: str, *, strong: bool = False) -> None:
        """Print a line of our own."""
        self._write(self._out, _painted(text, BOLD) if strong and has_colour(self._out, os.environ) else text)

    def complain(self, text: str) -> None:
        """Write a line of our own about something that went wrong."""
        self._write(self._err, record_of(OWN_NAME, text, level="ERROR") if self._jsonl else text)

    def join(self, name: str) -> None:
        """Announce a process, so that prefixes line up and keep their colour."""
        self._colours.setdefault(name, COLOURS[len(self._colours) % len(COLOURS)])
        self._width = max(self._width, len(name))

    def pass_on(self, name: str, line: str) -> None:
        """Write a line of the process `name`."""
        if self._held is not None:
            self._held.append((name, line))
            return
        if self._jsonl:
            self._write(self._err, record_of(name, line))
            return
        prefix = f"{name:{self._width}} |"
        if has_colour(self._err, os.environ):
            prefix = _painted(prefix, self._colours.get(name, COLOURS[0]))
        self._write(self._err, f"{prefix} {line}")

    def hold(self) -> None:
        """Keep the processes' lines back until `release`: an error of use shall not drown in start-up logs."""
        self._held = deque(maxlen=HELD_LINES)

    def release(self, *, forget: bool = False) -> None:
        """Show what was kept back (or `forget` it) and pass lines on from now on."""
        held, self._held = self._held, None
        for name, line in () if forget or held is None else held:
            self.pass_on(name, line)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a small table."""
        if self._above_table:
            self.say(self._above_table)
        if self._out.isatty():
            from rich.console import Console as Terminal
            from rich.table import Table

            drawn = Table(*head)
            for row in rows:
                drawn.add_row(*row)
            Terminal(file=self._out).print(drawn)
            return
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
        for row in (head, *rows):
            padded = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
            self._write(self._out, "  ".join(padded).rstrip())

    def _write(self, stream: TextIO, text: str) -> None:
        if id(stream) in self._closed:
            return
        try:
            print(text, file=stream, flush=True)
        except OSError:  # the reader has gone (`dynamo serve | head`); the models are served all the same
            self._closed.add(id(stream))


def _painted(text: str, colour: str) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m"
