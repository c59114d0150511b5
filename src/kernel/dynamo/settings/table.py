"""The table of one owner: a dataclass whose fields carry their settings, and the values that a process reads from it."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeVar, cast

from dynamo.settings.credentials import MASK, without_credentials
from dynamo.settings.readers import SettingReader

logger = logging.getLogger(__name__)

T = TypeVar("T")
NO_FLAGS: Final[Mapping[str, object]] = MappingProxyType({})
_SETTING: Final = "setting"
_SECTION: Final = "section"
_SAME: Final[object] = object()


class Status(enum.StrEnum):
    """What becomes of a setting in this version."""

    SERVED = "served"
    KEPT = "kept"
    """Read and checked; nothing in this version acts on it."""
    IGNORED = "ignored"
    """Not read; a warning names it."""
    INERT = "inert"
    """A flag of the native system, accepted without an effect."""
    REFUSED = "refused"
    """A flag of the native system whose meaning does not exist here; naming it is an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One thing that an operator may set."""

    variable: str | None
    read: SettingReader[object]
    default: Any
    """The value where neither flag nor variable is set. A field may default to something else: see `setting`."""
    meaning: str
    """One or two sentences in Markdown: the page shows them as they are, --help without the marks."""
    flags: tuple[str, ...] = ()
    negative: str | None = None
    """The flag that switches off; None: `--no-` and the flag, in each of its spellings; empty: there is none."""
    dest: str = ""
    """The attribute in the parsed arguments."""
    group: str = ""
    """The heading in --help."""
    shown: str | None = None
    """The default in words, where it depends on something else."""
    status: Status = Status.SERVED
    repeats: bool = False
    """The flag may be given several times, and the values add up to one tuple."""
    is_read_later: bool = False
    """The variable is judged where it is used, and does not become the value of the flag."""

    @property
    def negative_flags(self) -> tuple[str, ...]:
        """The flags that switch off, one for each spelling of the flag."""
        if self.negative is not None:
            return (self.negative,) if self.negative else ()
        return tuple(f"--no-{flag[2:]}" for flag in self.flags if flag.startswith("--"))

    @property
    def shown_default(self) -> str:
        """The default as an operator would type it; empty: none."""
        if self.shown is not None:
            return self.shown
        return "" if self.default is None else self.read.show(self.default)

    def value(self, env: Mapping[str, str]) -> Any:
        """Read the variable; the default where it is unset, blank or (with a warning that names it) cannot be read."""
        given = env.get(self.variable, "").strip() if self.variable else ""
        if not given:
            return self.default
        try:
            return self.read.parse(given)
        except ValueError as error:
            nearest = getattr(error, "nearest", None)
            used = self.default if self.default is None or nearest is None else type(self.default)(nearest)
            shown = "ignoring it" if used is None else f"using {self.read.show(used)}"
            logger.warning("%s: %s; %s", self.variable, error, shown)
            return used


def setting(
    default: T,
    variable: str | None,
    read: SettingReader[T],
    meaning: str,
    *,
    flag: str | tuple[str, ...] = (),
    negative: str | None = None,
    dest: str = "",
    group: str = "",
    shown: str | None = None,
    status: Status = Status.SERVED,
    unset: object = _SAME,
    secret: bool = False,
    repeats: bool = False,
    is_read_later: bool = False,
) -> T:
    """Make a dataclass field that is a setting.

    `flag`: its flag, or several spellings of it. `unset`: the value where neither flag nor variable is set, when it is not
    the field's default. `secret`: its value does not stand in a repr.
    """
    made = declared(
        variable,
        read,
        meaning,
        unset=default if unset is _SAME else unset,
        flag=flag,
        negative=negative,
        dest=dest,
        group=group,
        shown=shown,
        status=status,
        repeats=repeats,
        is_read_later=is_read_later,
    )
    found: T = dataclasses.field(default=default, repr=not secret, metadata={_SETTING: made})
    return found


def declared(
    variable: str | None,
    read: SettingReader[object],
    meaning: str,
    *,
    unset: object = None,
    flag: str | tuple[str, ...] = (),
    **more: Any,
) -> Setting:
    """Make a setting that is not the field of a dataclass, or whose field has no default."""
    flags = (flag,) if isinstance(flag, str) else flag
    if flags and not more.get("dest"):
        more["dest"] = flags[0].removeprefix("--").replace("-", "_")
    return Setting(variable=variable, read=read, meaning=meaning, default=unset, flags=flags, **more)


def section(kind: type[T]) -> T:
    """Make a dataclass field that is a table of its own."""
    found: T = dataclasses.field(default_factory=kind, metadata={_SECTION: kind})
    return found


def metadata_of(made: Setting) -> Mapping[str, object]:
    """Return the metadata of a field without a default: `name: str = field(metadata=metadata_of(declared(...)))`."""
    return {_SETTING: made}


def settings_of(kind: type, *, sections: bool = True) -> Iterator[tuple[str, Setting]]:
    """Walk a table, and its sections, unless `sections` is false: each field's name with its setting; inherited ones last."""
    own = inspect.get_annotations(kind)
    for entry in sorted(dataclasses.fields(kind), key=lambda entry: entry.name not in own):
        if _SECTION in entry.metadata:
            if sections:
                yield from settings_of(entry.metadata[_SECTION])
        elif _SETTING in entry.metadata:
            yield entry.name, entry.metadata[_SETTING]


def setting_of(kind: type, field: str) -> Setting:
    """Return the setting of one field: for code that needs its variable alone, where no table is read."""
    for name, made in settings_of(kind):
        if name == field:
            return made
    raise LookupError(f"{kind.__name__} has no setting {field!r}")


def without_secrets(value: Any) -> Any:
    """Return a table's value as plain dictionaries, for a dump: secrets are masked, sections are nested.

    Passwords within addresses are masked too, in settings of any name: an operator may write one wherever a URL is taken.
    """
    if isinstance(value, str):
        return without_credentials(value)
    if type(value) in (list, tuple):
        return type(value)(without_secrets(each) for each in value)
    if not dataclasses.is_dataclass(value):
        return value
    return {
        entry.name: without_secrets(found) if entry.repr or found is None else MASK
        for entry in dataclasses.fields(value)
        for found in [getattr(value, entry.name)]
    }


def read_settings(kind: type[T], env: Mapping[str, str], given: Mapping[str, object] = NO_FLAGS) -> T:
    """Make the value of a table: what the flags gave, else the variables, else the defaults.

    `given`: parsed arguments by their names (`vars(namespace)`). A class may define `settle(env)`, which returns the value
    to use in place of the one that was read: for what more than one variable decides.
    """
    values: dict[str, object] = {}
    for entry in dataclasses.fields(cast(Any, kind)):
        if _SECTION in entry.metadata:
            values[entry.name] = read_settings(entry.metadata[_SECTION], env, given)
        elif (made := entry.metadata.get(_SETTING)) is not None:
            values[entry.name] = given[made.dest] if made.dest and made.dest in given else made.value(env)
    read = kind(**values)
    settle = getattr(read, "settle", None)
    return read if settle is None else cast(T, settle(env))
