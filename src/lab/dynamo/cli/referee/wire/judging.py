"""A run over a worker: which wires it speaks, which checks run, and what each found."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from dynamo.cli.referee.checks import Broken, CannotJudge, Cause, CheckOutcome, Result
from dynamo.cli.referee.turns import RunTurns
from dynamo.cli.referee.wire import connection_checks, ending_checks, native_checks, stream_checks
from dynamo.cli.referee.wire.mux_caller import raw_caller
from dynamo.cli.referee.wire.native_line import native_line
from dynamo.cli.referee.wire.run import WIRES, WireCheck, WireProbe, WireRun, wire_checks
from dynamo.cli.usage import UsageError
from dynamo.runtime.calls.request_plane.secret import new_nonce

MUX_PAGE, NATIVE_PAGE = "docs/wire.md", "docs/native-wire.md"
ONLY_WAITS: Final = frozenset({"mux.hello.missing"})  # it takes no place of another check

ALONE: Final = frozenset(
    {"mux.hostile.not-read", "native.hostile.not-read"}
)  # they keep this process and the worker busy


def all_checks() -> list[WireCheck]:
    """Return every check, those of `mux` first."""
    rows = (*connection_checks.ROWS, *stream_checks.ROWS, *ending_checks.ROWS)
    return [*wire_checks("mux", MUX_PAGE, rows), *wire_checks("native", NATIVE_PAGE, native_checks.ROWS)]


async def find_wires(shared: WireRun, named: Sequence[str]) -> None:
    """Find out which wires the worker speaks: `named` ones are required. Raises UsageError where it speaks none."""
    address = f"{shared.host}:{shared.port}"
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(shared.host, shared.port), shared.timeout)
        writer.transport.abort()
    except (OSError, TimeoutError) as error:
        raise UsageError(f"{address} cannot be reached: {error or 'no answer in time'}") from error
    missing = dict(zip(WIRES, await asyncio.gather(_mux_is_missing(shared), _native_is_missing(shared)), strict=True))
    wanted = named or WIRES
    if all(missing[wire] for wire in wanted):
        why = "; ".join(f"{wire}: {missing[wire]}" for wire in wanted)
        raise UsageError(f"the worker at {address} speaks no wire that is judged: {why}")
    cause = Cause.ABSENT if named else Cause.NOT_OFFERED
    shared.lacking = {
        wire: CannotJudge(f"the worker does not speak {wire}: {why}", cause)
        for wire, why in missing.items()
        if why and wire in wanted
    }


async def _mux_is_missing(shared: WireRun) -> str:
    """Return why `mux` is not spoken; "" where any frame answers HELLO."""
    try:
        async with raw_caller(WireProbe(shared)) as caller:
            await caller.hello(new_nonce())
            await caller.until(lambda: caller.seen.heads, "an answer to HELLO")
            if caller.seen.error is not None:
                return f"HELLO is answered with ERROR: {caller.seen.error}"
    except (Broken, OSError) as error:
        return str(error)
    return ""


async def _native_is_missing(shared: WireRun) -> str:
    """Return why the native wire is not spoken; "" where a request for a path that nothing serves gets an ACK."""
    try:
        async with native_line(WireProbe(shared)) as line:
            frame, _ = line.request({}, path=f"{shared.path}-unknown")
            await line.send(frame, "request for an unknown path")
            found = await line.ack()
            if found is None:
                return "the connection of a request is closed without an ACK"
            if not found.isprintable():
                return f"a request is answered with what is no ACK: {found!r:.100}"
            return found if "shared secret" in found else ""
    except (Broken, OSError) as error:
        return str(error)


async def judge(shared: WireRun, named: Sequence[str], checks: Sequence[WireCheck] = ()) -> list[Result]:
    """Run checks, without any every one; those of a wire that `named` leaves out are skipped."""
    checks = checks or all_checks()
    turns = RunTurns(shared.limit)

    async def one(check: WireCheck) -> Result:
        wire = check.id.partition(".")[0]
        if named and wire not in named:
            return Result(check, CheckOutcome.SKIPPED, f"--wire does not name {wire}", "", "", 0.0)
        probe = WireProbe(shared)
        return await turns.judge(check, lambda: check.run(probe), probe, has_place=check.id in ONLY_WAITS)

    async with asyncio.TaskGroup() as group:
        tasks = {check.id: group.create_task(one(check)) for check in checks if check.id not in ALONE}
    results = {name: task.result() for name, task in tasks.items()}
    return [results.get(check.id) or await one(check) for check in checks]
