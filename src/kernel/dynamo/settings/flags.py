"""The flags of a command from the tables of settings: a flag beats its variable, which beats the default."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from dynamo.errors import InvalidArgument
from dynamo.settings.readers import SettingReader
from dynamo.settings.table import Setting, Status

_LINK: Final = re.compile(r"\[([^\]]+)\]\(([^)#]*)[^)]*\)")


def add_flags(parser: argparse.ArgumentParser, settings: Iterable[Setting], env: Mapping[str, str]) -> None:
    """Add the flags of those settings that have one, under the headings of their groups.

    A variable is judged when the arguments are parsed, and only where its flag is not given.
    """
    groups: dict[str, Any] = {}  # argparse keeps the type of its groups private
    for made in settings:
        if not made.flags:
            continue
        if made.status in (Status.REFUSED, Status.INERT):
            _add_native(parser, made)
            continue
        if made.group not in groups:
            groups[made.group] = parser.add_argument_group(made.group) if made.group else parser
        found = None if made.is_read_later else _FromEnvironment.of(made.variable, env)
        options: dict[str, Any] = {
            "dest": made.dest,
            "type": _Checked(made.read),
            "default": made.default if found is None else found,
            "help": help_text(made).replace("%", "%%"),
        }
        if made.read.is_switch:
            options |= {"action": _Switch, "negatives": made.negative_flags}
        else:
            if made.repeats:
                options["action"] = _Collect
            options["metavar"] = made.read.metavar or made.flags[0].rpartition("-")[2].upper()
        groups[made.group].add_argument(*made.flags, **options)


def choices_of(action: argparse.Action) -> tuple[str, ...]:
    """Return what a flag's value may be, where that can be listed."""
    if isinstance(action.type, _Checked):
        return action.type.reader.choices
    return () if action.choices is None else tuple(map(str, action.choices))


def help_text(made: Setting) -> str:
    """Return the --help text of a setting: its meaning without Markdown, its default, unit and variable."""
    meaning = _plain(made.meaning)
    if made.status is Status.KEPT:
        meaning = f"{meaning} (for engines that read it)"
    shown = _plain(made.shown_default)
    if made.read.is_switch and shown == "off":
        shown = ""  # its plain form shows it
    default = f" (default: {shown}{_unit(made, shown)})" if shown else ""
    return f"{meaning}{default}{f' [{made.variable}]' if made.variable else ''}"


def _plain(markdown: str) -> str:
    """Return a text as a terminal shows it: a link to another page names the page."""
    plain = _LINK.sub(lambda link: f"{link[1]} (docs/{link[2]})" if link[2] else link[1], markdown)
    return plain.replace("`", "").replace("\\|", "|")


def _unit(made: Setting, shown: str) -> str:
    return f" {made.read.unit}" if made.read.unit and shown.replace(".", "").isdigit() else ""


def _add_native(parser: argparse.ArgumentParser, made: Setting) -> None:
    hidden: dict[str, Any] = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
    kind = _NotInThisVersion if made.status is Status.REFUSED else _Inert
    if made.read.is_switch:
        parser.add_argument(*made.flags, *made.negative_flags, action=kind, nargs=0, **hidden)
    else:
        parser.add_argument(*made.flags, action=kind, **hidden)


class _Inert(argparse.Action):
    """Accept and forget."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        return None


class _NotInThisVersion(argparse.Action):
    """Reject by name; switching off what does not exist is fine."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        if option is not None and not option.startswith("--no-"):
            parser.error(f"{option} is not in this version")


class _Collected(tuple[object, ...]):
    """What the flag was given so far, as opposed to its default."""

    __slots__ = ()


class _Collect(argparse.Action):
    """Add the values of a flag that is given several times; the first one replaces the default."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, _Collected((*(before if isinstance(before, _Collected) else ()), *values)))


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
    """Positive and negative flags for one value, whose default may be the text of a variable."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, negatives: Sequence[str], **options: Any) -> None:
        super().__init__([*option_strings, *negatives], dest, nargs=0, **options)
        self._negatives = negatives

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, option_string not in self._negatives)

    def format_usage(self) -> str:
        """Show all of the flags."""
        return " | ".join(self.option_strings)


class _Checked:
    """A type for argparse: a reader, whose error becomes one of use."""

    __slots__ = ("reader",)

    def __init__(self, reader: SettingReader[object]) -> None:
        self.reader = reader

    def __call__(self, text: str) -> object:
        try:
            return self.reader.parse(text.strip())
        except (ValueError, InvalidArgument) as error:
            where = f"{text.variable}: " if isinstance(text, _FromEnvironment) else ""
            raise argparse.ArgumentTypeError(f"{where}{error}") from error
