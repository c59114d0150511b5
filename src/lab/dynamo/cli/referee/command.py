"""`dynamo conformance http://HOST/v1`: judge a server from the shell."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dynamo.cli.bench.targets import Target
from dynamo.cli.referee import report_files
from dynamo.cli.referee.report_files import ReportFlags
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

    from dynamo.cli.referee import judging
    from dynamo.cli.referee.apis import API_CHECKS
    from dynamo.cli.referee.checks import RefereeRun, Result
    from dynamo.cli.referee.exchange import Server

    if report_files.printed(options, judging.all_checks()):
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
            judging.server_path(apis),
            key,
            options.embedding_model or "",
            options.limit,
            names_apis=options.api != "all",
        )
        shared = replace(shared, model=await judging.find_model(shared))
        return shared.model, await judging.judge(shared, apis)

    model, results = asyncio.run(run())
    return report_files.finish(options, results, target.url, model)


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
