"""From what a person writes after `--engine` to an engine class."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Final

from dynamo.cli.usage import UsageError

if TYPE_CHECKING:
    from dynamo.contract.engine import BaseEngine

__all__ = ["BUILT_IN", "class_path", "load_engine"]

BUILT_IN: Final[dict[str, str]] = {
    "reference": "dynamo.reference.engine:ReferenceEngine",
    "sample": "dynamo.engines.sample.engine:SampleLLMEngine",
}
"""The engines that come with us, by the name a person types."""

EXTRAS: Final = frozenset({"reference"})  # built-in engines that need the extra of their name


def class_path(engine: str) -> str:
    """`module:Class` (or `module:function`) of a name or of a path; imports nothing. Raises UsageError for what can be neither."""
    path = BUILT_IN.get(engine, engine)
    module, colon, name = path.partition(":")
    if colon and name.isidentifier() and all(part.isidentifier() for part in module.split(".")):
        return path
    raise UsageError(
        f"there is no engine {engine!r}; use one of {', '.join(sorted(BUILT_IN))}, or module:Class or module:function for "
        "one of your own"
    )


def load_engine(engine: str) -> type[BaseEngine]:
    """Import an engine class, also from the current directory; a function becomes one (`callable_engine`).

    Raises UsageError that says which of module, class, base class and signature is wrong. What the module itself raises
    passes.
    """
    module_name, _, class_name = class_path(engine).partition(":")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            hint = f"; try: pip install 'dynamo-unified[{engine}]'" if engine in EXTRAS else ""
            raise UsageError(f"module {module_name!r} needs {error.name!r}, which is not installed{hint}") from error
        raise UsageError(
            f"there is no module {error.name!r}; is its package installed, or the current directory the right one?"
        ) from error
    found = getattr(module, class_name, None)
    if found is None:
        raise UsageError(f"module {module_name!r} has no {class_name!r}{_suggest(module)}")

    from dynamo.contract.engine import LLMEngine, RawEngine

    if isinstance(found, type) and issubclass(found, LLMEngine | RawEngine):
        return found
    if isinstance(found, type) or not callable(found):
        raise UsageError(f"{module_name}:{class_name} is neither a subclass of LLMEngine or RawEngine nor a function")

    from dynamo.engines.callable.engine import engine_class
    from dynamo.errors import InvalidArgument

    try:
        return engine_class(found, class_name)
    except InvalidArgument as error:
        raise UsageError(f"{module_name}:{error}") from error


def _suggest(module: object) -> str:
    from dynamo.contract.engine import LLMEngine, RawEngine

    name = getattr(module, "__name__", "")
    engines = [
        key
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, LLMEngine | RawEngine) and value.__module__ == name
    ]
    return f"; it has {', '.join(engines)}" if engines else ""
