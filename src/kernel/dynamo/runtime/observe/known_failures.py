"""Which exceptions are in the log already: an engine that died raises the same one for every request from then on."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

_MARK: Final = "_dynamo_is_logged"
MAX_LINKS: Final = 32  # of a chain of causes


def first_sight(error: BaseException) -> BaseException | None:
    """Return the exception, to be logged whole; None where it, or what it came from, was returned before.

    A known one loses its traceback, which every `raise` makes longer.
    """
    links = [error]
    while len(links) < MAX_LINKS:
        link = links[-1]
        before = link.__cause__ if link.__cause__ is not None or link.__suppress_context__ else link.__context__
        if before is None:
            break
        links.append(before)
    is_known = any(getattr(link, _MARK, False) for link in links)
    for link in links:
        with suppress(AttributeError):  # a class with slots
            setattr(link, _MARK, True)
    if not is_known:
        return error
    error.__traceback__ = None
    return None


def summary(error: BaseException, *, is_known: bool) -> str:
    """Return what a line of the log has of an exception beside its traceback."""
    return f": {type(error).__name__}: {error} (logged before with its traceback)" if is_known else ""
