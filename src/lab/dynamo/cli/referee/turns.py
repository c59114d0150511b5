"""The turns of a run: a few checks at once, until its limit, and what each found."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Final

from dynamo.cli.referee.checks import Broken, CannotJudge, Cause, CheckOutcome, Evidence, Promise, Result

AT_ONCE: Final = 4
MAX_REASON: Final = 500  # characters

Running = Callable[[], Awaitable[None]]


class RunTurns:
    """The places of checks that run at once, and the time of the run."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._places = asyncio.Semaphore(AT_ONCE)
        self._deadline = asyncio.get_running_loop().time() + limit

    async def judge(self, check: Promise, run: Running, evidence: Evidence, *, has_place: bool = False) -> Result:
        """Run a check in its turn. `has_place`: it only waits, and takes no place of another."""
        now = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout_at(self._deadline), nullcontext() if has_place else self._places:
                if now() < self._deadline:
                    return await found_by(check, run, evidence)
        except TimeoutError:  # of the run: a check keeps its own
            pass
        reason = f"the run's {self._limit:g} s were over first (--limit)"
        return Result(check, CheckOutcome.CANNOT_JUDGE, reason, evidence.sent, evidence.seen, 0.0, Cause.TIME)


async def found_by(check: Promise, run: Running, evidence: Evidence) -> Result:
    """Run one check and return what it found."""
    began = time.perf_counter()
    outcome, reason, cause = CheckOutcome.PASSED, "", None
    try:
        await run()
    except Broken as broken:
        outcome, reason = CheckOutcome.FAILED, str(broken)
    except CannotJudge as why:
        outcome, reason, cause = CheckOutcome.CANNOT_JUDGE, str(why), why.cause
    except TimeoutError:
        outcome, reason = CheckOutcome.FAILED, f"no whole answer within {evidence.timeout:g} s"
    except OSError as error:
        outcome, reason = CheckOutcome.FAILED, f"the connection failed: {error}"
    except (TypeError, KeyError, IndexError, AttributeError, ValueError, RecursionError) as error:
        # A member of a type that no check expects, from a server that is not trusted: it is the server's fault.
        outcome, reason = CheckOutcome.FAILED, f"the answer has an unexpected shape: {type(error).__name__}: {error}"
    return Result(
        check,
        outcome,
        evidence.hide(reason)[:MAX_REASON],  # without the key first: half of one is a secret, too
        evidence.sent,
        evidence.seen,
        time.perf_counter() - began,
        cause,
    )
