"""Reads a user's policy from its file: `FILE.py:NAME`, or `MODULE:NAME` of what is installed."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from hashlib import blake2b
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from dynamo.errors import InvalidArgument

METHODS: Final[Mapping[str, int]] = {"filter": 2, "score": 2, "pick": 3, "classify": 2}
"""The methods of a policy, with the number of their arguments."""


def load_policy(name: str, parameters: Mapping[str, object]) -> Any:
    """Return the policy of `FILE.py:NAME` or `MODULE:NAME`, made with these parameters.

    Raises InvalidArgument, with what to write instead: no such file or name, an error of the file or of the class, a method that
    takes other arguments, or none of the methods.
    """
    source, _, attribute = name.rpartition(":")
    if not source or not attribute.isidentifier():
        raise InvalidArgument(f"policy {name!r}: write FILE.py:CLASS, such as policy.py:MyPolicy")
    found = getattr(_module(source), attribute, None)
    if not inspect.isclass(found):
        raise InvalidArgument(f"policy {name}: {source} has no class {attribute}")
    try:
        policy = found(**parameters)
    except Exception as error:  # the class is the user's: whatever its constructor raises is shown
        raise InvalidArgument(f"policy {name}: {attribute}(): {type(error).__name__}: {error}") from error
    _check(name, policy)
    return policy


def _module(source: str) -> ModuleType:
    path = Path(source)
    if path.suffix != ".py":
        try:
            return import_module(source)
        except Exception as error:  # an import runs the user's code
            raise InvalidArgument(f"policy module {source}: {type(error).__name__}: {error}") from error
    if not path.is_file():
        raise InvalidArgument(f"policy file {source}: there is no such file")
    name = f"dynamo_policy_{path.stem}_{blake2b(str(path.resolve()).encode(), digest_size=4).hexdigest()}"
    known = sys.modules.get(name)
    if known is not None:
        return known
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InvalidArgument(f"policy file {source}: cannot be read as Python")
    module = sys.modules[name] = module_from_spec(spec)  # registered first: dataclasses need their module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception):
            raise
        raise InvalidArgument(f"policy file {source}: {type(error).__name__}: {error}") from error
    return module


def _check(name: str, policy: object) -> None:
    present = [method for method in METHODS if getattr(policy, method, None) is not None]
    if not present:
        raise InvalidArgument(f"policy {name} has none of the methods {', '.join(METHODS)}")
    for method in present:
        function = getattr(policy, method)
        if not callable(function):
            raise InvalidArgument(f"policy {name}: {method} is not a method")
        if inspect.iscoroutinefunction(function):
            raise InvalidArgument(f"policy {name}: {method} must not be async: a decision is made at once")
        try:
            inspect.signature(function).bind(*range(METHODS[method]))
        except TypeError as error:
            raise InvalidArgument(
                f"policy {name}: {method} must take {METHODS[method]} arguments besides self: {error}"
            ) from error
