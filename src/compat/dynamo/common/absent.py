"""What the native system has and this one has not, with what to use in its place (`absent.toml`), and what is loaded late."""

from __future__ import annotations

import functools
import importlib
import sys
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Final

__all__ = ["LATE", "absent", "load_name"]

LATE: Final = (
    "ApproxKvIndexer", "FirstTokenSource", "FpmDirectPublisher", "FpmEventRelay", "FpmEventSubscriber", "KvIndexer", "KvRouter",
    "KvRouterConfig", "LLMUnaryClient", "LoadThresholdConfig", "RouterConfig", "RoutingConstraints", "RuntimeMetrics", "SelectionCacheConfig",
    "SelectionService", "UnaryChatModel",
)  # fmt: skip
"""What is loaded at first use: an engine's worker needs none of it."""


@functools.cache
def absent(kind: str) -> dict[str, dict[str, str]]:
    """Return the `names` or the `modules` that are not here, each with `instead` and, of a module, `what` it is."""
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))[kind]
    return {name: table for table in tables for name in table["names"].split()}


def load_name(module: str, name: str) -> Any:
    """Return a name that is loaded late. For a known name that is absent raises ImportError with what to use in its place,
    else AttributeError."""
    if name in LATE:
        return getattr(importlib.import_module("dynamo.bindings"), name)
    if not name.startswith("_") and (found := absent("names").get(name)) is not None:
        raise ImportError(f"{module}.{name} is not part of dynamo-unified; {found['instead']}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


class _Absent:
    """The last finder: it is used for a module that no folder has, and its error names what takes the place."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Raise the ImportError of a module that is not part of this system; None for any other."""
        if name.startswith("dynamo.") and (found := absent("modules").get(name)) is not None:
            instead = f"{name} ({found['what']}) is not part of dynamo-unified; {found['instead']}"
            raise ModuleNotFoundError(instead, name=name)
        return None


sys.meta_path.append(_Absent)
