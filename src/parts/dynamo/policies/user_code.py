"""A user's code: read from `FILE.py:NAME`, or `MODULE:NAME` of what is installed, and bounded in the time it may take."""

from __future__ import annotations

import inspect
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from hashlib import blake2b
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final, TypeVar

from dynamo.errors import InvalidArgument

# A bound on how long a user's code may hold the event loop: a signal ends it in the middle of whatever it does.

TIME_LIMIT_SECONDS: Final = 0.05
"""How long one decision of a user's policy may take."""

T = TypeVar("T")


class PolicyStalled(BaseException):
    """The time limit of a policy has passed. Not an Exception, so that no `except Exception` of the policy holds it up."""


class _TimeLimit:
    """The one alarm of a process, and whether a function is being timed."""

    __slots__ = ("is_inside", "main")

    def __init__(self) -> None:
        self.main = threading.main_thread().ident
        self.is_inside = False

    def install(self) -> bool:
        """Take the signal over where that is not done; return False where something else handles it.

        Other code may have taken it back: unhandled, the alarm would end the process.
        """
        handler = signal.getsignal(signal.SIGALRM)
        if handler is signal.SIG_DFL:
            signal.signal(signal.SIGALRM, self.expired)
            return True
        return handler == self.expired

    def expired(self, _number: int, _frame: FrameType | None) -> None:
        """Take the signal. Runs in the main thread, between two steps of the interpreter."""
        if self.is_inside:
            raise PolicyStalled

    def stop(self) -> None:
        """End the timing."""
        self.is_inside = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)


_LIMIT: Final = _TimeLimit()


def call_timed(function: Callable[[], T], seconds: float = TIME_LIMIT_SECONDS) -> T:
    """Return what a function returns. Raises PolicyStalled when its time is over, and whatever the function raises.

    Any loop in Python is interrupted, and nothing outside of the function is. There is no bound in other threads than the main
    one, where SIGALRM has another handler, and within one call into C. Calls must not be nested.
    """
    limit = _LIMIT
    if threading.get_ident() != limit.main or not limit.install():
        return function()
    try:
        # Again and again, as the function may catch the first one.
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
        limit.is_inside = True
        try:
            return function()
        finally:
            limit.stop()
    except PolicyStalled:
        limit.stop()  # it may have come within the first one
        raise


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
