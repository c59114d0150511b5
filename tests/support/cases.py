"""One test over many small cases: it tries all of them, then names those that failed.

What `pytest.mark.parametrize` makes of a table is a test for each row, and each costs milliseconds before it begins.
Rows that take microseconds and share nothing but fixtures that do not change are cheaper in one test.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import pytest
from _pytest.mark.structures import ParameterSet

LONGEST_NAME: Final = 120
# A failed `pytest.raises` and a skip are no Exceptions. A case may not skip: all that come after it would not be tried.
OUTCOMES: Final = (pytest.fail.Exception, pytest.skip.Exception)


def each_case(
    names: str | Sequence[str], cases: Iterable[Any], *, ids: Callable[[Any], Any] | Iterable[Any] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run the test with each of `cases`; takes what `pytest.mark.parametrize` takes, but for marks and `indirect`.

    The fixtures are made once for all cases. Of pytest's own, `monkeypatch` is undone after each case, `capsys` and
    `caplog` are emptied before each; a test that changes any other fixture has to stay parametrised.
    """
    argnames = [one.strip() for one in names.split(",")] if isinstance(names, str) else list(names)
    rows = list(_rows(argnames, cases, ids))
    assert rows, "no case"

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(test)
        missing = set(argnames) - set(signature.parameters)
        assert not missing, f"{test.__name__} takes no {sorted(missing)}"
        if inspect.iscoroutinefunction(test):

            @functools.wraps(test)
            async def run(*args: Any, **fixtures: Any) -> None:
                tally = _Tally(len(rows))
                for case in rows:
                    with tally.of(case), _fresh(fixtures) as given:
                        await test(*args, **given, **case.values)
                tally.judge()
        else:

            @functools.wraps(test)
            def run(*args: Any, **fixtures: Any) -> None:
                tally = _Tally(len(rows))
                for case in rows:
                    with tally.of(case), _fresh(fixtures) as given:
                        test(*args, **given, **case.values)
                tally.judge()

        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[one for name, one in signature.parameters.items() if name not in argnames]
        )
        return run

    return decorate


@dataclass(frozen=True, slots=True)
class Case:
    """The arguments of one run of the test."""

    values: dict[str, Any]
    given_name: str | None
    shown: Callable[[Any], Any]

    @property
    def name(self) -> str:
        """What a failure calls it; made when it is needed, since a value can be long."""
        if self.given_name is not None:
            return self.given_name
        words = ((value, self.shown(value)) for value in self.values.values())
        return ", ".join(repr(value) if word is None else str(word) for value, word in words)[:LONGEST_NAME]


def _rows(
    argnames: list[str], cases: Iterable[Any], ids: Callable[[Any], Any] | Iterable[Any] | None
) -> Iterator[Case]:
    shown = ids if callable(ids) else lambda _: None
    names = iter(ids) if ids is not None and not callable(ids) else itertools.repeat(None)
    for case, given_name in zip(cases, names, strict=False):
        name, values = given_name, case
        if isinstance(case, ParameterSet):
            assert not case.marks, f"{case}: a case can have no marks of its own"
            name, values = case.id or name, case.values
        elif len(argnames) == 1:
            values = (case,)
        yield Case(dict(zip(argnames, values, strict=True)), None if name is None else str(name), shown)


@contextmanager
def _fresh(fixtures: dict[str, Any]) -> Iterator[dict[str, Any]]:
    given = dict(fixtures)
    if "capsys" in given:
        given["capsys"].readouterr()
    if "caplog" in given:
        given["caplog"].clear()
    if "monkeypatch" not in given:
        yield given
        return
    with given["monkeypatch"].context() as given["monkeypatch"]:
        yield given


class _Tally:
    """What the cases of one test came to."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._failed: list[tuple[str, Exception]] = []

    @contextmanager
    def of(self, case: Case) -> Iterator[None]:
        try:
            yield
        except OUTCOMES as outcome:
            self._note(case.name, AssertionError(str(outcome)).with_traceback(outcome.__traceback__))
        except Exception as error:
            self._note(case.name, error)

    def _note(self, name: str, error: Exception) -> None:
        error.add_note(f"case: {name}")
        self._failed.append((name, error))

    def judge(self) -> None:
        """Raise what the failed cases raised: a single one as it came, several as a group that names them."""
        if len(self._failed) == 1:
            raise self._failed[0][1]
        if self._failed:
            named = "; ".join(name for name, _ in self._failed)
            raise ExceptionGroup(
                f"{len(self._failed)} of {self._count} cases failed: {named}", [error for _, error in self._failed]
            )
