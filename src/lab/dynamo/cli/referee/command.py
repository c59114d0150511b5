"""`dynamo conformance http://HOST/v1`: judge a server from the shell, a few checks at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dynamo.cli.bench.targets import Target
from dynamo.cli.referee import report
from dynamo.cli.referee.apis import API_CHECKS, embeddings, messages, responses
from dynamo.cli.referee.checks import Check, CheckOutcome, Probe, RefereeRun, Result
from dynamo.cli.referee.exchange import Server, member
from dynamo.cli.referee.report import ReportFlags
from dynamo.cli.referee.server_checks import ALONE, server_checks
from dynamo.cli.referee.text_checks import CHAT, COMPLETIONS
from dynamo.cli.referee.turns import RunTurns
from dynamo.cli.usage import UsageError
from dynamo.settings.command import CommandParser
from dynamo.settings.flags import add_flags
from dynamo.settings.readers import above_zero, path, placeholder, text
from dynamo.settings.table import read_settings, setting, settings_of

_EPILOG: Final = """\
Exit status: 0 core holds, 1 a core check failed or could not be judged because of the server (docs/conformance.md), 2 an
error of use or a server that cannot be reached.

example:
  dynamo conformance http://127.0.0.1:8000/v1
  dynamo conformance https://host/v1 --api all --key-file key --json report.json --junit report.xml
"""


@dataclass(frozen=True, slots=True)
class RefereeFlags(ReportFlags):
    """Which server is judged, and what is written of it."""

    # fmt: off
    api: str = setting("chat,completions", None, placeholder("NAMES", text), "Which APIs, a comma list, or `all`: "
        "every one that the server has", flag="--api")
    model: str | None = setting(None, None, placeholder("MODEL", text), "Which model", flag="--model",
        shown="the first of `/v1/models`")
    embedding_model: str | None = setting(None, None, placeholder("MODEL", text), "Which model makes embeddings",
        flag="--embedding-model", shown="that of `--model`")
    key: str | None = setting(None, None, placeholder("KEY", text), "Sent as a bearer token, and shown nowhere",
        flag="--key")
    key_file: Path | None = setting(None, None, path, "A file with the key", flag="--key-file")
    limit: float = setting(60.0, None, above_zero(unit="s", metavar="SECONDS"), "What the whole run may take; what was "
        "not judged by then is reported as such", flag="--limit")
    timeout: float = setting(20.0, None, above_zero(unit="s", metavar="SECONDS"), "What one check's connection may take",
        flag="--timeout")
    # fmt: on


def build_parser() -> CommandParser:
    """Make the parser of this command."""
    parser = CommandParser(
        "dynamo conformance URL",
        description="Hold a server with OpenAI's API to what its clients rely on (docs/conformance.md).",
        epilog=_EPILOG,
    )
    parser.add_argument("url", metavar="URL", nargs="?", help="the server, such as http://127.0.0.1:8000/v1")
    add_flags(parser, (made for _, made in settings_of(RefereeFlags)), {})
    return parser


def main(argv: list[str]) -> int:
    """Judge the server and return the exit status."""
    given = build_parser().parse_args(argv)
    options = read_settings(RefereeFlags, {}, vars(given))

    if report.printed(options, all_checks()):
        return 0
    if given.url is None:
        raise UsageError("a server's URL is missing, such as http://127.0.0.1:8000/v1")
    apis = list(API_CHECKS) if options.api == "all" else options.api.split(",")
    for name in apis:
        if name not in API_CHECKS:
            raise UsageError(f"--api: there is no {name!r}; use all, {', '.join(API_CHECKS)}")
    key = read_key(options)
    target = Target.of(given.url, headers={"Authorization": f"Bearer {key}"} if key else None)

    async def run() -> tuple[str, list[Result]]:
        shared = RefereeRun(
            Server(target, min(options.timeout, options.limit)),
            options.model or "",
            server_path(apis),
            key,
            options.embedding_model or "",
            options.limit,
            names_apis=options.api != "all",
        )
        shared = replace(shared, model=await find_model(shared))
        return shared.model, await judge(shared, apis)

    model, results = asyncio.run(run())
    return report.finish(options, results, target.url, model)


def read_key(options: RefereeFlags) -> str:
    """Return the key. Raises UsageError where it is none."""
    if options.key is not None and options.key_file is not None:
        raise UsageError("--key and --key-file exclude each other")
    key, flag = options.key or "", "--key"
    if options.key_file is not None:
        flag = "--key-file"
        try:
            key = options.key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--key-file {options.key_file} cannot be read: {error}") from error
        if not key:
            raise UsageError(f"--key-file {options.key_file} is empty; write the key into it")
    if not key.isascii() or any(ord(c) < 33 for c in key):
        raise UsageError(f"{flag} has no valid key: it has a space, a control or a character beyond ASCII")
    return key


# Where the checks of the server send a small request: the first of these that is judged, else chat.
_PATHS: Final = {
    "chat": CHAT.path,
    "completions": COMPLETIONS.path,
    "responses": responses.PATH,
    "messages": messages.PATH,
    "embeddings": embeddings.PATH,
}


def server_path(apis: Sequence[str]) -> str:
    """Return the path of the API that the checks of the server use."""
    return next((path for name, path in _PATHS.items() if name in apis), CHAT.path)


def all_checks() -> list[Check]:
    """Return every check, those of the server first."""
    return [*server_checks(), *(check for made in API_CHECKS.values() for check in made())]


async def find_model(shared: RefereeRun) -> str:
    """Return the first model of the list. Raises UsageError where the server cannot be reached or lists none."""
    try:
        answer = await Probe(shared).get("/v1/models")
    except (OSError, TimeoutError) as error:
        raise UsageError(
            f"{shared.server.target.url} cannot be reached: {str(error) or 'no answer in time'}"
        ) from error
    if shared.model:
        return shared.model
    found = member(answer.json(), "data", 0, "id")
    if not isinstance(found, str):
        raise UsageError(f"{shared.server.target.url}/v1/models names no model ({answer.message}); use --model")
    return found


async def judge(shared: RefereeRun, apis: Sequence[str], checks: Sequence[Check] = ()) -> list[Result]:
    """Run checks, without any every one; those of an API that `apis` does not name are skipped."""
    checks = checks or all_checks()
    turns = RunTurns(shared.limit)

    async def one(check: Check) -> Result:
        area = check.id.partition(".")[0]
        if area in API_CHECKS and area not in apis:
            return Result(check, CheckOutcome.SKIPPED, f"--api does not name {area}", "", "", 0.0)
        probe = Probe(shared)
        return await turns.judge(check, lambda: check.run(probe), probe)

    async with asyncio.TaskGroup() as group:
        tasks = {check.id: group.create_task(one(check)) for check in checks if check.id != ALONE}
    results = {name: task.result() for name, task in tasks.items()}
    return [results.get(check.id) or await one(check) for check in checks]
