"""Which failures are in the log already: a broken engine raises the same one for every request from then on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, NamedTuple

_FAILED: Final = "request %s failed"
_MARK: Final = "_dynamo_is_logged"
MAX_LINKS: Final = 32  # of a chain of causes
MAX_KINDS: Final = 256  # an engine has a few places that fail; those seen longest ago are forgotten first
WHOLE_AGAIN_SECONDS: Final = 600.0  # so that a log that was rotated meanwhile has the traceback, too

_Place = tuple[type[BaseException], str, int]  # class, file and line
_Kind = tuple[int, float]  # how many were seen, and when one was logged whole


class Sighting(NamedTuple):
    """What a line of the log has of an exception."""

    whole: BaseException | None  # to be logged with its traceback
    text: str  # behind the message; empty beside a traceback


class KnownFailures:
    """The failures that were logged, by object and by kind.

    Of one kind are exceptions of one class from one line of source, with causes of which the same is true.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic seconds."""
        self._clock = clock
        self._kinds: dict[tuple[_Place, ...], _Kind] = {}  # the one seen last is at the end

    def sighting(self, error: BaseException) -> Sighting:
        """Return what to log of an exception: a traceback for the first of its kind, later ones in a line.

        It is a line also where the same object, or one that it came from, was logged before. Such an exception loses its
        traceback, which every `raise` makes longer.
        """
        links = _links(error)
        kind = tuple(map(_place, links))
        is_known = any(getattr(link, _MARK, False) for link in links)
        for link in links:
            with suppress(AttributeError):  # a class with slots
                setattr(link, _MARK, True)
        now = self._clock()
        before = self._kinds.pop(kind, None)
        count, whole_at = (0, now) if before is None else before
        count += 1
        is_whole = not is_known if before is None else now - whole_at >= WHOLE_AGAIN_SECONDS
        self._kinds[kind] = count, now if is_whole else whole_at
        if len(self._kinds) > MAX_KINDS:
            self._kinds.pop(next(iter(self._kinds)), None)
        if is_whole:
            return Sighting(error, "")
        error.__traceback__ = None
        text = f": {type(error).__name__}: {error} (logged before with its traceback; number {count} of its kind)"
        return Sighting(None, text)

    def log_failure(
        self, log: logging.Logger, id: str, error: BaseException, *, what: str = _FAILED, is_expected: bool = False
    ) -> None:
        """Log the failure of a request: an ERROR, or a line of INFO for one that is `is_expected`.

        A stream that was cut, and one beside a planned stop, may raise anything. `what` has one place, for the id.
        """
        if is_expected:
            log.info("request %s was interrupted: %s: %s", id, type(error).__name__, error, extra={"request_id": id})
            return
        seen = self.sighting(error)
        log.error(what + "%s", id, seen.text, exc_info=seen.whole, extra={"request_id": id})

    def forget(self) -> None:
        """Forget all kinds."""
        self._kinds.clear()


LOGGED: Final = KnownFailures()
"""Those of this process, which has one log."""


def _links(error: BaseException) -> list[BaseException]:
    """Return an exception and what it came from."""
    links = [error]
    while len(links) < MAX_LINKS:
        link = links[-1]
        before = link.__cause__ if link.__cause__ is not None or link.__suppress_context__ else link.__context__
        if before is None:
            break
        links.append(before)
    return links


def _place(error: BaseException) -> _Place:
    innermost: TracebackType | None = error.__traceback__
    if innermost is None:
        return type(error), "", 0
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    return type(error), innermost.tb_frame.f_code.co_filename, innermost.tb_lineno
