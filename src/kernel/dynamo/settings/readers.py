"""Readers: each turns the text of a flag or variable into a value, or raises ValueError with what is allowed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

TRUTHY: Final = frozenset({"1", "true", "on", "yes"})
FALSY: Final = frozenset({"", "0", "false", "off", "no"})

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class OutOfRange(ValueError):
    """A number outside its bounds; `nearest` is the value closest to it that is allowed."""

    def __init__(self, message: str, nearest: float) -> None:
        super().__init__(message)
        self.nearest = nearest


@dataclass(frozen=True, slots=True)
class SettingReader(Generic[T_co]):
    """How the text of one kind of setting becomes a value, and how a value is shown."""

    parse: Callable[[str], T_co]
    """Raises ValueError with what is wrong and what is allowed; the text comes without blanks around it."""
    show: Callable[[Any], str] = str
    """Write a value as an operator would type it."""
    unit: str = ""
    """Unit of the text, which may differ from the unit of the value: "s", "ms", "MiB"."""
    metavar: str = ""
    """Stands for the text in --help; empty: the last word of the flag."""
    is_switch: bool = False
    """The flag takes no text and has a negative form."""
    choices: tuple[str, ...] = ()
    """All texts that are allowed, where they can be listed."""


# -- texts -----------------------------------------------------------------------------------------------------------------

text: Final[SettingReader[str]] = SettingReader(str)
folder: Final[SettingReader[Path]] = SettingReader(Path, metavar="DIR")
path: Final[SettingReader[Path]] = SettingReader(Path, metavar="FILE")


def _writable(given: str) -> Path:
    found = Path(given)
    if found.is_dir() or not found.absolute().parent.is_dir():
        raise ValueError(f"cannot write {given}: there is no such directory")
    return found


new_file: Final[SettingReader[Path]] = SettingReader(_writable, metavar="FILE")


def placeholder(metavar: str, reader: SettingReader[T]) -> SettingReader[T]:
    """Return a reader that is shown in --help as `metavar`."""
    return replace(reader, metavar=metavar)


def each(reader: SettingReader[T]) -> SettingReader[tuple[T, ...]]:
    """Make the reader of a flag that may be repeated: the values of `reader` add up to one tuple."""
    return SettingReader(
        lambda given: (reader.parse(given),),
        show=lambda value: ", ".join(map(reader.show, value)),
        unit=reader.unit,
        metavar=reader.metavar,
        choices=reader.choices,
    )


def _existing_file(path: str) -> str:
    found = Path(path).expanduser()
    if not found.is_file():
        raise ValueError(f"no such file: {path}")
    return str(found)


file_path: Final[SettingReader[str]] = SettingReader(_existing_file, metavar="FILE")


def one_of(*allowed: str, metavar: str = "") -> SettingReader[str]:
    """Make the reader of a word that must be one of `allowed`, in any case."""

    def parse(given: str) -> str:
        word = given.lower()
        if word not in allowed:
            import difflib  # only a mistake needs it

            near = difflib.get_close_matches(word, allowed)
            hint = f" (near: {', '.join(near)})" if near else ""
            raise ValueError(f"{given!r} is unknown; use one of {', '.join(allowed)}{hint}")
        return word

    return SettingReader(parse, metavar=metavar, choices=allowed)


def _split(given: str) -> tuple[str, ...]:
    return tuple(word for word in (part.strip() for part in given.split(",")) if word)


words: Final[SettingReader[tuple[str, ...]]] = SettingReader(_split, show=",".join)
names: Final[SettingReader[frozenset[str]]] = SettingReader(
    lambda given: frozenset(_split(given.lower())), show=lambda value: ",".join(sorted(value))
)

_HOST_NAME: Final = re.compile(r"\*|[a-z0-9._-]+")


def _read_host_names(given: str) -> tuple[str, ...]:
    found = words.parse(given.lower())
    for name in found:
        if _HOST_NAME.fullmatch(name) is None:
            raise ValueError(
                f"{name!r} is not the name of a host; write for example api.example.com, without scheme and port"
            )
    return found


host_names: Final[SettingReader[tuple[str, ...]]] = SettingReader(_read_host_names, show=",".join, metavar="NAME")

# -- true and false --------------------------------------------------------------------------------------------------------


def read_boolean(given: str) -> bool:
    """Read true or false in any of their spellings."""
    word = given.strip().lower()
    if word in TRUTHY:
        return True
    if word in FALSY:
        return False
    raise ValueError(f"{given!r} is neither true nor false")


switch: Final[SettingReader[bool]] = SettingReader(
    read_boolean, show=lambda value: "on" if value else "off", is_switch=True
)

# -- numbers ---------------------------------------------------------------------------------------------------------------


def _in_range(value: float, minimum: float | None, maximum: float | None, times: float) -> None:
    if minimum is not None and maximum is not None and not minimum <= value <= maximum:
        nearest = minimum if value < minimum else maximum
        raise OutOfRange(f"{value} is out of range: use {minimum} to {maximum}", nearest * times)
    if minimum is not None and value < minimum:
        raise OutOfRange(f"{value} is below {minimum}", minimum * times)
    if maximum is not None and value > maximum:
        raise OutOfRange(f"{value} is above {maximum}", maximum * times)


def _bounds(minimum: float | None, maximum: float | None) -> str:
    if maximum is None:
        return "" if minimum is None else f" of at least {minimum}"
    return f" from {minimum} to {maximum}"


def integer(
    minimum: int | None = None, maximum: int | None = None, *, times: int = 1, unit: str = "", metavar: str = "N"
) -> SettingReader[int]:
    """Make the reader of a whole number in `unit`; the value is `times` as much."""

    def parse(given: str) -> int:
        try:
            value = int(given)
        except ValueError:
            raise ValueError(f"{given!r} is not an integer{_bounds(minimum, maximum)}") from None
        _in_range(value, minimum, maximum, times)
        return value * times

    return SettingReader(parse, show=lambda value: str(value // times), unit=unit, metavar=metavar)


def kibibytes(minimum: int) -> SettingReader[int]:
    """Make the reader of a size in KiB; the value is in bytes."""
    return integer(minimum, times=1024, unit="KiB")


mebibytes: Final[SettingReader[int]] = integer(1, times=1024 * 1024, unit="MiB")


def number(
    minimum: float | None = None, maximum: float | None = None, *, parts: int = 1, unit: str = "", metavar: str = "N"
) -> SettingReader[float]:
    """Make the reader of a finite number in `unit`; the value is that divided by `parts`."""

    def parse(given: str) -> float:
        try:
            value = float(given)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(f"{given!r} is not a number{_bounds(minimum, maximum)}")
        _in_range(value, minimum, maximum, 1 / parts)
        return value / parts

    return SettingReader(parse, show=lambda value: f"{value * parts:g}", unit=unit, metavar=metavar)


def above_zero(most: float | None = None, *, unit: str = "", metavar: str = "N") -> SettingReader[float]:
    """Make the reader of a finite number above 0."""
    reader = number(None, most, unit=unit, metavar=metavar)

    def parse(given: str) -> float:
        value = reader.parse(given)
        if value <= 0:
            raise ValueError(f"{given} is not above 0")
        return value

    return replace(reader, parse=parse)


def seconds(minimum: float = 0) -> SettingReader[float]:
    """Make the reader of a time in seconds."""
    return number(minimum, unit="s", metavar="SECONDS")


def milliseconds(minimum: float = 0) -> SettingReader[float]:
    """Make the reader of a time that is written in milliseconds; the value is in seconds."""
    return number(minimum, parts=1000, unit="ms", metavar="MILLISECONDS")


def off_at_zero(reader: SettingReader[float]) -> SettingReader[float | None]:
    """Make a reader whose 0 means off (None)."""
    return SettingReader(
        lambda given: reader.parse(given) or None,
        show=lambda value: "0" if value is None else reader.show(value),
        unit=reader.unit,
        metavar=reader.metavar,
    )


def _read_port(given: str, kind: str = "not") -> int:
    try:
        value = int(given)
    except ValueError:
        raise ValueError(f"{given!r} is {kind} an integer from 0 to 65535") from None
    if not 0 <= value <= 65535:
        raise ValueError(f"{given} is not a port: use 0..65535")
    return value


port: Final[SettingReader[int]] = SettingReader(_read_port, metavar="PORT")
port_or_off: Final[SettingReader[int | None]] = SettingReader(
    lambda given: None if given.lower() == "off" else _read_port(given, "neither off nor"),
    show=lambda value: "off" if value is None else str(value),
    metavar="PORT|off",
)
"""None: no port."""

# -- paths of URLs ---------------------------------------------------------------------------------------------------------

_PATH_PREFIX: Final = re.compile(r"(/[A-Za-z0-9._~-]+)*/?")


def _read_path_prefix(given: str) -> str:
    if _PATH_PREFIX.fullmatch(given) is None:
        raise ValueError(f"{given!r} is not the prefix of a path; write for example /llm")
    return given.rstrip("/")


path_prefix: Final[SettingReader[str]] = SettingReader(_read_path_prefix, metavar="/PREFIX")
