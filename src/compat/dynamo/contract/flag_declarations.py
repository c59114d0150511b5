"""Flags whose default comes from an environment variable, declared in groups (the native `configuration` package).

New engines use `add_backend_arguments`; this module is for engines that bring their own groups.
"""

from __future__ import annotations

import argparse
import inspect
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

from dynamo.settings.readers import TRUTHY, read_boolean

__all__ = [
    "ArgGroup", "ConfigBase", "Deprecated", "add_argument", "add_negatable_bool_argument", "env_bool", "env_or_default",
    "nullable_float", "nullable_int", "parse_bool", "split_served_model_names",
]  # fmt: skip

T = TypeVar("T")
_WITHOUT_VALUE: Final = ("count", "store_true", "store_false", "store_const", "append_const", "help", "version")
Reader = Callable[[str], Any]


class ArgGroup(ABC):
    """A group of flags."""

    @abstractmethod
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags of this group."""


class ConfigBase:
    """A configuration whose fields are class annotations; it is read from parsed arguments."""

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Take over every argument, and the defaults of the class for fields without an argument."""
        config = cls()
        defaults = {
            name: getattr(cls, name)
            for base in reversed(cls.__mro__)
            for name in _annotated(base)
            if hasattr(cls, name)
        }
        vars(config).update({**vars(args), **{k: v for k, v in defaults.items() if k not in vars(args)}})
        return config

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({fields})"


@dataclass(frozen=True)
class Deprecated:
    """What takes the place of a flag, and when the flag goes."""

    replacement: str
    remove_in: str

    def message(self, name: str) -> str:
        """Word the warning about `name`."""
        return f"{name} is deprecated and will be removed in {self.remove_in}; use {self.replacement}."

    def warn(self, name: str) -> None:
        """Issue a FutureWarning for the use of `name`: unlike a DeprecationWarning it is shown to its users."""
        warnings.warn(self.message(name), FutureWarning, stacklevel=2)


def env_or_default(env_var: str, default: T, value_type: Reader | None = None) -> T:
    """Return the variable, read as `value_type` or as the type of `default`; unset: `default`."""
    text = os.environ.get(env_var)
    if text is None:
        return default
    read: Any = value_type or (type(default) if default is not None else str)
    if read is bool:
        return text.strip().lower() in TRUTHY  # type: ignore[return-value]
    if read is list:
        return text.split()  # type: ignore[return-value]
    return read(text)  # type: ignore[no-any-return]


def env_bool(name: str, *, default: bool = False) -> bool:
    """Read a variable as 1.6.1 does: 1, true and yes are True in any case, every other text is False ("on", too).

    Unset or empty: `default`. Our own settings are read by `dynamo.settings`, which also knows "on" and "off".
    """
    given = os.environ.get(name)
    return given.strip().lower() in ("1", "true", "yes") if given else default


def add_argument(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    *,
    flag_name: str,
    env_var: str,
    default: Any,
    help: str,
    obsolete_flag: str | None = None,
    arg_type: Reader | None = str,
    env_value_type: Reader | None = None,
    deprecated: Deprecated | None = None,
    **kwargs: Any,
) -> None:
    """Add a flag whose default is the variable, else `default`. `obsolete_flag` is a second spelling.

    `arg_type` reads the value of a flag that has one; an `action` without a value (`count`, `store_true`) has no use for it.
    """
    if deprecated is not None and os.environ.get(env_var) is not None:
        deprecated.warn(env_var)
    read = env_value_type or (arg_type if default is None else None)
    if kwargs.get("action") not in _WITHOUT_VALUE:
        kwargs["type"] = arg_type or str
    added = parser.add_argument(
        *_spellings(flag_name, obsolete_flag),
        dest=kwargs.pop("dest", None) or _dest(flag_name),
        default=env_or_default(env_var, default, read),
        help=_help(help, env_var, default, obsolete_flag, deprecated.message(flag_name) if deprecated else None),
        **kwargs,
    )
    _warn_of_use(added, deprecated)


def add_negatable_bool_argument(
    parser: Any,
    *,
    flag_name: str,
    env_var: str,
    default: bool | None,
    help: str,
    dest: str | None = None,
    obsolete_flag: str | None = None,
    env_value_type: Callable[..., bool] | None = None,
    deprecated: Deprecated | None = None,
) -> None:
    """Add a switch that also has a `--no-` form and a variable."""
    if deprecated is not None and os.environ.get(env_var) is not None:
        deprecated.warn(env_var)
    added = parser.add_argument(
        *_spellings(flag_name, obsolete_flag),
        dest=dest or _dest(flag_name),
        action=argparse.BooleanOptionalAction,
        default=env_or_default(env_var, default, env_value_type or bool),
        help=_help(help, env_var, default, obsolete_flag, deprecated.message(flag_name) if deprecated else None),
    )
    _warn_of_use(added, deprecated)


def parse_bool(value: str) -> bool:
    """Read true/false, 1/0, on/off, yes/no; an empty text is false. Raises ArgumentTypeError for another word."""
    try:
        return read_boolean(value)
    except ValueError:
        raise argparse.ArgumentTypeError("expected one of: true/false, 1/0, on/off, yes/no") from None


def nullable_int(value: str) -> int | None:
    """Read an integer; "None" and an empty text are None."""
    return None if value in ("", "None") else int(value)


def nullable_float(value: str) -> float | None:
    """Read a number; "None" and an empty text are None."""
    return None if value in ("", "None") else float(value)


def split_served_model_names(served_model_name: Any) -> list[str]:
    """Split a comma list, or a list of comma lists, into names."""
    if served_model_name is None:
        return []
    parts = served_model_name if isinstance(served_model_name, list | tuple) else [served_model_name]
    return [name for part in parts for name in (word.strip() for word in str(part).split(",")) if name]


def _annotated(kind: type) -> dict[str, Any]:
    return inspect.get_annotations(kind)


def _dest(flag_name: str) -> str:
    return flag_name.lstrip("-").replace("-", "_")


def _spellings(flag_name: str, obsolete_flag: str | None) -> list[str]:
    return [flag_name, obsolete_flag] if obsolete_flag else [flag_name]


def _warn_of_use(action: argparse.Action, deprecated: Deprecated | None) -> None:
    """Make the use of a deprecated flag a warning that names the flag as it was written."""
    if deprecated is None:
        return
    kind = type(action)

    def take(
        self: argparse.Action,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        deprecated.warn(option_string or action.option_strings[0])
        kind.__call__(self, parser, namespace, values, option_string)

    action.__class__ = type(kind.__name__, (kind,), {"__call__": take})


def _help(text: str, env_var: str, default: Any, obsolete_flag: str | None, deprecation: str | None) -> str:
    shown = f"{f'{deprecation} ' if deprecation else ''}{text} [{env_var}; default: {default}]"
    return (f"{shown} (also {obsolete_flag}, deprecated)" if obsolete_flag else shown).replace("%", "%%")
