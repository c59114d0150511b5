"""The flags of a command from the tables of settings: a flag beats its variable, which beats the default."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from dynamo.errors import InvalidArgument
from dynamo.settings.table import Setting, Status

__all__ = ["add_flags", "help_text"]

_LINK: Final = re.compile(r"\[([^\]]+)\]\([^)]*\)")


def add_flags(parser: argparse.ArgumentParser, settings: Iterable[Setting], env: Mapping[str, str]) -> None:
    """Add the flags of those settings that have one, under the headings of their groups.

    A variable is judged when the arguments are parsed, and only where its flag is not given.
    """
    groups: dict[str, Any] = {}  # argparse keeps the type of its groups private
    for made in settings:
        if not made.flags:
            continue
        if made.group not in groups:
            groups[made.group] = parser.add_argument_group(made.group) if made.group else parser
        found = _FromEnvironment.of(made.variable, env)
        options: dict[str, Any] = {
            "dest": made.dest,
            "type": _checked(made.read.parse),
            "default": made.default if found is None else found,
            "help": help_text(made).replace("%", "%%"),
        }
        if made.read.is_switch:
            options |= {"action": _Switch, "negative": made.negative_flag}
        else:
            options["metavar"] = made.read.metavar or made.flags[0].rpartition("-")[2].upper()
        groups[made.group].add_argument(*made.flags, **options)


def help_text(made: Setting) -> str:
    """Return what --help says of a setting: its meaning without Markdown, its default, unit and variable."""
    meaning = _LINK.sub(r"\1", made.meaning).replace("`", "").replace("\\|", "|")
    if made.status is Status.KEPT:
        meaning = f"{meaning} (for engines that read it)"
    shown = _LINK.sub(r"\1", made.shown_default).replace("`", "")
    if made.read.is_switch and shown == "off":
        shown = ""  # its plain form says so
    default = f" (default: {shown}{_unit(made, shown)})" if shown else ""
    return f"{meaning}{default}{f' [{made.variable}]' if made.variable else ''}"


def _unit(made: Setting, shown: str) -> str:
    return f" {made.read.unit}" if made.read.unit and shown.replace(".", "").isdigit() else ""


class _FromEnvironment(str):
    """The text of a variable; argparse passes it to the flag's reader when the flag is not given."""

    __slots__ = ("variable",)
    variable: str

    @classmethod
    def of(cls, variable: str | None, env: Mapping[str, str]) -> _FromEnvironment | None:
        """Take the variable's text; None where it is unset or blank."""
        text = env.get(variable, "").strip() if variable else ""
        if variable is None or not text:
            return None
        value = cls(text)
        value.variable = variable
        return value


class _Switch(argparse.Action):
    """A positive and a negative flag for one value, whose default may be the text of a variable."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, negative: str, **options: Any) -> None:
        super().__init__([*option_strings, negative], dest, nargs=0, **options)
        self._negative = negative

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, option_string != self._negative)

    def format_usage(self) -> str:
        """Show both flags."""
        return " | ".join(self.option_strings)


def _checked(read: Callable[[str], Any]) -> Callable[[str], Any]:
    def checked(text: str) -> Any:
        try:
            return read(text.strip())
        except (ValueError, InvalidArgument) as error:
            where = f"{text.variable}: " if isinstance(text, _FromEnvironment) else ""
            raise argparse.ArgumentTypeError(f"{where}{error}") from error

    return checked
