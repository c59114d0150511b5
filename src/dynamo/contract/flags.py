"""How a flag finds its environment variable: a flag beats the variable, which beats the default."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo.contract.flag_values import read_boolean
from dynamo.errors import InvalidArgument

__all__ = ["FlagGroup"]


class _FromEnvironment(str):
    """The text of a variable; argparse passes it to the flag's reader when the flag is not given."""

    __slots__ = ("variable",)
    variable: str

    @classmethod
    def read(cls, variable: str, env: Mapping[str, str]) -> _FromEnvironment | None:
        """Take the variable's text; None where it is unset or blank."""
        text = env.get(variable, "").strip()
        if not text:
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


@dataclass(frozen=True)
class FlagGroup:
    """Adds flags to one group of a parser, each with its variable."""

    env: Mapping[str, str]
    target: Any = None  # argparse keeps the type of its groups private

    def group(self, parser: argparse.ArgumentParser, title: str) -> FlagGroup:
        """Open a group of the parser's --help."""
        return FlagGroup(self.env, parser.add_argument_group(title))

    def add(
        self,
        flag: str,
        variable: str | None,
        default: str | None,
        what: str,
        *,
        read: Callable[[str], Any] = str,
        aliases: Iterable[str] = (),
        dest: str | None = None,
    ) -> None:
        """Add a flag with a value. `read` turns its text, or the variable's, into the value."""
        self.target.add_argument(
            flag,
            *aliases,
            type=_reader(read),
            default=self._default(variable, default),
            metavar=_metavar(flag),
            dest=dest or _dest(flag),
            help=_help(what, variable, default),
        )

    def switch(self, flag: str, variable: str, default: bool | None, what: str, *, negative: str | None = None) -> None:
        """Add a flag and its negative form (`--no-...` unless given)."""
        self.target.add_argument(
            flag,
            action=_Switch,
            negative=negative or f"--no-{flag[2:]}",
            type=_reader(read_boolean),
            default=self._default(variable, default),
            dest=_dest(flag),
            help=_help(what, variable, {True: "on", False: None, None: None}[default]),
        )

    def _default(self, variable: str | None, default: Any) -> Any:
        found = _FromEnvironment.read(variable, self.env) if variable else None
        return default if found is None else found


def _reader(read: Callable[[str], Any]) -> Callable[[str], Any]:
    def checked(text: str) -> Any:
        try:
            return read(text)
        except (ValueError, InvalidArgument) as error:
            where = f"{text.variable}: " if isinstance(text, _FromEnvironment) else ""
            raise argparse.ArgumentTypeError(f"{where}{error}") from error

    return checked


def _help(what: str, variable: str | None, default: str | None) -> str:
    shown = f" (default: {default})" if default is not None else ""
    return f"{what}{shown}{f' [{variable}]' if variable else ''}".replace("%", "%%")


def _dest(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _metavar(flag: str) -> str:
    return flag.rpartition("-")[2].upper()
