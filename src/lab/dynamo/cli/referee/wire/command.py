"""`dynamo conformance worker ADDRESS`: judge a worker's wires from the shell."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from dynamo.cli.referee import report
from dynamo.cli.referee.checks import Broken, CannotJudge, Cause, CheckOutcome, Result
from dynamo.cli.referee.report import ReportFlags
from dynamo.cli.referee.turns import RunTurns
from dynamo.cli.referee.wire import connection_checks, ending_checks, native_checks, stream_checks
from dynamo.cli.referee.wire.mux_caller import raw_caller
from dynamo.cli.referee.wire.native_line import native_line
from dynamo.cli.referee.wire.run import WIRES, WireCheck, WireProbe, WireRun, wire_checks
from dynamo.cli.usage import UsageError
from dynamo.runtime.base.settings import DISCOVERY_BACKENDS
from dynamo.runtime.calls.request_plane.secret import new_nonce
from dynamo.settings.command import CommandParser
from dynamo.settings.flags import add_flags
from dynamo.settings.readers import above_zero, one_of, path, placeholder, text
from dynamo.settings.table import read_settings, setting, settings_of

if TYPE_CHECKING:
    from dynamo.cli.referee.exchange import Json

FIND_SECONDS: Final = 10.0  # what the store of discovery may take

_EPILOG: Final = """\
ADDRESS is HOST:PORT/PATH, as transport.tcp of a record of discovery has it, or the name of an endpoint, whose first worker
is judged. The worker must be able to reach this process for the answers of the native wire.

Exit status: 0 core holds, 1 a core check failed or could not be judged because of the worker (docs/conformance.md), 2 an
error of use or a worker that cannot be reached.

example:
  dynamo conformance worker 127.0.0.1:41234/1234/dynamo/backend/generate
  dynamo conformance worker dynamo.backend.generate --discovery-backend file --wire mux --json report.json
"""


@dataclass(frozen=True, slots=True)
class WireFlags(ReportFlags):
    """Which worker is judged, and how."""

    # fmt: off
    wire: str | None = setting(None, None, placeholder("NAMES", text), "Which wires, a comma list of `mux` and `native`",
        flag="--wire", shown="those that the worker speaks")
    model_request: Path | None = setting(None, None, path, "A file with the JSON of a request that the worker serves; the "
        "checks set `stop_conditions.max_tokens` where it has `token_ids`", flag="--model-request",
        shown="eight token ids")
    secret_file: Path | None = setting(None, None, path, "A file with the shared secret of `mux`", flag="--secret-file")
    discovery_backend: str | None = setting(None, None, one_of(*DISCOVERY_BACKENDS), "Where the name of an endpoint is "
        "looked up", flag="--discovery-backend", shown="DYN_DISCOVERY_BACKEND, or `auto`")
    limit: float = setting(60.0, None, above_zero(unit="s", metavar="SECONDS"), "What the whole run may take; what was "
        "not judged by then is reported as such", flag="--limit")
    timeout: float = setting(5.0, None, above_zero(unit="s", metavar="SECONDS"), "How long each thing that must come may "
        "take", flag="--timeout")
    # fmt: on


def build_parser() -> CommandParser:
    """Make the parser of this command."""
    parser = CommandParser(
        "dynamo conformance worker",
        description="Hold a worker in any language to its wires (docs/wire.md, docs/native-wire.md).",
        epilog=_EPILOG,
    )
    parser.add_argument("address", metavar="ADDRESS", nargs="?", help="HOST:PORT/PATH, or NAMESPACE.COMPONENT.ENDPOINT")
    add_flags(parser, (made for _, made in settings_of(WireFlags)), {})
    return parser


def main(argv: list[str]) -> int:
    """Judge the worker and return the exit status."""
    given = build_parser().parse_args(argv)
    options = read_settings(WireFlags, {}, vars(given))

    if report.printed(options, all_checks()):
        return 0
    if given.address is None:
        raise UsageError("a worker's address is missing, such as 127.0.0.1:41234/1234/dynamo/backend/generate")
    named = [] if options.wire is None else options.wire.split(",")
    for wire in named:
        if wire not in WIRES:
            raise UsageError(f"--wire: there is no {wire!r}; use {' or '.join(WIRES)}")

    async def run() -> tuple[str, list[Result]]:
        address = given.address
        if "/" not in address and ":" not in address:
            address = await find_address(address, options.discovery_backend)
        shared = made_run(options, address)
        await find_wires(shared, named)
        return address, await judge(shared, named)

    address, results = asyncio.run(run())
    return report.finish(options, results, address, "")


def made_run(options: WireFlags, address: str) -> WireRun:
    """Read what the flags name. Raises UsageError."""
    from dynamo.errors import InvalidArgument
    from dynamo.runtime.calls.request_plane.base import split_tcp
    from dynamo.runtime.calls.request_plane.secret import SECRET_SETTING, SharedSecret

    try:
        host, port, route = split_tcp(address)
    except ValueError as error:
        raise UsageError(
            f"{address!r} is no worker's address; use HOST:PORT/PATH, as transport.tcp of its record has it"
        ) from error
    run = WireRun(host, port, route, timeout=min(options.timeout, options.limit), limit=options.limit)
    if options.model_request is not None:
        run.request = _read_request(options.model_request)
    if options.secret_file is not None:
        try:
            run.secret = SharedSecret(str(options.secret_file))
        except InvalidArgument as error:
            raise UsageError(str(error).replace(SECRET_SETTING, "--secret-file")) from error
    return run


def _read_request(file: Path) -> Json:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--model-request {file} cannot be read as JSON: {error}") from error


async def find_address(name: str, backend: str | None) -> str:
    """Return where the first worker of an endpoint listens. Raises UsageError."""
    from dynamo.errors import DynamoException
    from dynamo.runtime.base.settings import RuntimeSettings
    from dynamo.runtime.calls.instances import decode_instance
    from dynamo.runtime.planes import make_discovery

    parts = name.split(".")
    if len(parts) != 3 or not all(parts):
        raise UsageError(f"{name!r} is neither HOST:PORT/PATH nor NAMESPACE.COMPONENT.ENDPOINT")
    try:
        settings = RuntimeSettings.from_env()
        backend = backend or settings.discovery_backend
        store = make_discovery(backend, settings, asyncio.get_running_loop())
        try:
            async with asyncio.timeout(FIND_SECONDS):
                await store.start()
                records = await store.get_prefix(f"v1/instances/{'/'.join(parts)}/")
        finally:
            await store.close()
    except (DynamoException, ValueError, OSError, TimeoutError) as error:
        raise UsageError(f"{name} cannot be looked up: {error or 'the store gave no answer in time'}") from error
    for key in sorted(records):
        with suppress(msgspec.MsgspecError):  # a record that is not one of an instance
            found = decode_instance(records[key])
            if "tcp" in found.transport:
                return found.transport["tcp"]
    raise UsageError(f"discovery ({backend}) has no worker of {name} with an address over TCP; is it running?")


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
