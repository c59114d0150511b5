"""The settings in force, and where each is from. A secret is never shown."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from dynamo.frontend.http.settings import HttpSettings
from dynamo.protocol.inspector.views import SettingView
from dynamo.settings.table import Setting, settings_of, without_secrets

_LINK: Final = re.compile(r"\[([^\]]+)\]\([^)]*\)")  # of the page that this text is written for


def setting_rows(settings: HttpSettings, environment: Mapping[str, str] = os.environ) -> list[SettingView]:
    """Return every setting of a frontend.

    A value that differs from the default is from its variable where that is set to it, else from a flag.
    """
    shown = dict(_values(settings, without_secrets(settings)))
    rows = []
    for name, made in settings_of(type(settings)):
        if name not in shown:
            continue
        value = shown[name]
        rows.append(
            SettingView(
                name=_name_of(name, made),
                value=_plain(value),
                origin=_origin(made, value, environment),
                help=_LINK.sub(r"\1", made.meaning).replace("\\|", "|"),
            )
        )
    return rows


def _values(table: Any, shown: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for entry in dataclasses.fields(table):
        value = getattr(table, entry.name)
        if dataclasses.is_dataclass(value) and isinstance(shown[entry.name], Mapping):
            yield from _values(value, shown[entry.name])
        else:
            yield entry.name, shown[entry.name]


def _name_of(name: str, made: Setting) -> str:
    return made.flags[0] if made.flags else made.variable or name


def _origin(made: Setting, value: Any, environment: Mapping[str, str]) -> str:
    if value == made.default or (value is None and made.default is None):
        return "default"
    if made.variable and environment.get(made.variable, "").strip():
        return "environment"
    return "flag" if made.flags else "default"


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value)
