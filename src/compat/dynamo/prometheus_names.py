"""The names of metrics and labels, without their prefix: dashboards and engines build on them.

A full name is `prefix_name`: `f"{name_prefix.COMPONENT}_{work_handler.REQUESTS_TOTAL}"`. The classes stand in
`prometheus_names.toml`: all of the native system, also of parts that this one does not have. docs/metrics.md lists the metrics
there are.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def _class(name: str, table: dict[str, Any]) -> type:
    prefix = table.pop("prefix", "")
    words = f"{table.pop('names', '')} {table.pop('own', '')}".split()
    members = {word: prefix + word.lower() for word in words}
    members |= {key: _class(key, value) if isinstance(value, dict) else value for key, value in table.items()}
    return type(name, (), {"__module__": __name__, **members})


_CLASSES = {
    name: _class(name, table)
    for name, table in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
}

__all__ = sorted(_CLASSES)


def __getattr__(name: str) -> Any:
    try:
        return _CLASSES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
