"""A value that all threads of a process share, and that is made at its first use."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Final, Generic, TypeVar, cast

__all__ = ["OnceLock"]

T = TypeVar("T")

_ABSENT: Final = object()


class OnceLock(Generic[T]):
    """Holds nothing until a first `get_or_init` has succeeded, and from then on the same value."""

    __slots__ = ("_making", "_value")

    def __init__(self) -> None:
        self._value: object = _ABSENT
        self._making = Lock()

    def get(self) -> T | None:
        """Return the value; None while there is none."""
        return None if self._value is _ABSENT else cast(T, self._value)

    def get_or_init(self, init: Callable[[], T]) -> T:
        """Return the value, made by `init` where there is none. What `init` raises is raised, and a later call tries again."""
        if self._value is _ABSENT:
            with self._making:
                if self._value is _ABSENT:  # no other thread has made it meanwhile
                    self._value = init()
        return cast(T, self._value)
