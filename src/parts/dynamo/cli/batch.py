"""`dynamo batch`: run a file of requests as a batch, and manage batches."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynamo.cli.api_client import EXIT_FAILED, ApiClient, ServerError, ServerFlags
from dynamo.cli.usage import UsageError
from dynamo.settings.command import CommandParser
from dynamo.settings.flags import add_flags
from dynamo.settings.readers import switch, text
from dynamo.settings.table import read_settings, setting, settings_of

POLL_SECONDS: Final = 1.0
COPY_BYTES: Final = 256 * 1024
ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})

_DESCRIPTION: Final = (
    "Run many requests as one batch, on a server that was started with `dynamo serve --files-dir DIR`."
)
_EPILOG: Final = """\
Each line of INPUT is {"custom_id": ..., "method": "POST", "url": ENDPOINT, "body": {...}}. The results go to OUTPUT, failed
lines to OUTPUT with .errors behind its name. When `run` is interrupted the batch goes on, and the same command waits for it
again, by OUTPUT with .batch behind its name.

example:
  dynamo batch run questions.jsonl -o answers.jsonl
"""


@dataclass(frozen=True, slots=True)
class BatchRunFlags(ServerFlags):
    """How a file of requests is run."""

    # fmt: off
    endpoint: str | None = setting(None, None, text, "The API of the lines", flag="--endpoint", shown="the url of the first line")
    quiet: bool = setting(False, None, switch, "No progress bar", flag="--quiet", negative="")
    # fmt: on


def build_parser(env: Mapping[str, str]) -> CommandParser:
    """Make the parser of this command."""
    parser = CommandParser("dynamo batch", description=_DESCRIPTION, epilog=_EPILOG)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=CommandParser)
    run = actions.add_parser("run", help="upload a file of requests, wait with a progress bar, and write the results")
    run.add_argument("input", metavar="INPUT", help="the requests, as JSON lines")
    run.add_argument("-o", "--output", required=True, metavar="OUTPUT", help="where the results go")
    listed = actions.add_parser("list", help="show the batches, the newest first")
    listed.add_argument("--limit", type=int, default=20, metavar="N", help="at most so many, up to 100 (default: 20)")
    listed.add_argument("--json", action="store_true", help="write the API's answer")
    shown = actions.add_parser("show", help="show one batch")
    cancelled = actions.add_parser("cancel", help="cancel a batch; what was answered is kept")
    for one in (shown, cancelled):
        one.add_argument("id", metavar="ID", help="the batch")
    for action in (run, listed, shown, cancelled):
        kind = BatchRunFlags if action is run else ServerFlags
        add_flags(action, (made for _, made in settings_of(kind)), env)
    return parser


def main(argv: list[str]) -> int:
    """Run one action; return the exit status."""
    given = build_parser(os.environ).parse_args(argv)
    flags = read_settings(BatchRunFlags if given.action == "run" else ServerFlags, os.environ, vars(given))
    client = ApiClient(flags.url, flags.api_key)
    try:
        match given.action:
            case "run":
                assert isinstance(flags, BatchRunFlags)
                return _run(client, Path(given.input), Path(given.output), flags)
            case "list":
                _list(client, given.limit, as_json=given.json)
            case "show":
                print(json.dumps(client.call("GET", f"/v1/batches/{given.id}"), indent=2))
            case "cancel":
                print(json.dumps(client.call("POST", f"/v1/batches/{given.id}/cancel"), indent=2))
    except ServerError as error:
        print(f"dynamo batch: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


# -- run ---------------------------------------------------------------------------------------------------------------


def _run(client: ApiClient, source: Path, output: Path, flags: BatchRunFlags) -> int:
    note = output.with_name(output.name + ".batch")
    id = _resumed(client, note)
    if id is None:
        endpoint = flags.endpoint or _first_url(source)
        client.call(
            "GET", "/v1/batches?limit=1"
        )  # a server without batches, or a wrong key: reported before the upload
        file_id = _upload(client, source)
        members = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
        id = str(client.call("POST", "/v1/batches", members)["id"])
        note.write_text(id + "\n")
        print(f"batch {id}", file=sys.stderr)
    else:
        print(f"batch {id}, which {note} names, goes on", file=sys.stderr)
    batch = _wait(client, id, is_quiet=flags.quiet)
    for member, target in (("output_file_id", output), ("error_file_id", Path(f"{output}.errors"))):
        if batch[member] is not None:
            _download(client, batch[member], target)
    note.unlink(missing_ok=True)
    return _report(batch, output)


def _resumed(client: ApiClient, note: Path) -> str | None:
    """Return the batch that an interrupted run began; None: there is none that the server knows."""
    try:
        id = note.read_text().strip()
    except FileNotFoundError:
        return None
    try:
        client.call("GET", f"/v1/batches/{id}")
    except ServerError as error:
        if error.status != 404:
            raise
        return None
    return id


def _first_url(source: Path) -> str:
    try:
        with source.open("rb") as file:
            first = json.loads(next(line for line in file if line.strip()))
        return str(first["url"])
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {error.strerror}") from error
    except (StopIteration, ValueError, KeyError, TypeError):
        raise UsageError(f"{source}: the first line is not a request with a url; --endpoint names the API") from None


def _upload(client: ApiClient, source: Path) -> str:
    boundary = uuid.uuid4().hex
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{boundary}\r\n'
        f'Content-Disposition: form-data; name="file"; filename="{uuid.uuid4().hex}.jsonl"\r\n'
        "Content-Type: application/jsonl\r\n\r\n"
    ).encode()
    tail = f"\r\n--{boundary}--\r\n".encode()

    def pieces() -> Iterator[bytes]:
        yield head
        with source.open("rb") as file:
            while data := file.read(COPY_BYTES):
                yield data
        yield tail

    try:
        size = source.stat().st_size + len(head) + len(tail)
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {error.strerror}") from error
    kind = {"Content-Type": f"multipart/form-data; boundary={boundary}", "Content-Length": str(size)}
    with closing(client.connect()) as connection:
        answer = client.request(connection, "POST", "/v1/files", raw=pieces(), headers=kind)
        return str(json.loads(answer.read())["id"])


def _wait(client: ApiClient, id: str, *, is_quiet: bool) -> dict[str, Any]:
    """Return the batch once it has ended."""
    show = _bar() if not is_quiet and sys.stderr.isatty() else contextlib.nullcontext(lambda _batch: None)
    with show as update:
        while True:
            batch: dict[str, Any] = client.call("GET", f"/v1/batches/{id}")
            update(batch)
            if batch["status"] in ENDED:
                return batch
            time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def _bar() -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("validating", total=None)

        def update(batch: dict[str, Any]) -> None:
            counts = batch["request_counts"]
            done = counts["completed"] + counts["failed"]
            text = batch["status"] + (f", {counts['failed']} failed" if counts["failed"] else "")
            text += f", paused: {batch['paused']}" if batch.get("paused") else ""
            progress.update(task, description=text, completed=done, total=counts["total"] or None)

        yield update


def _download(client: ApiClient, file_id: str, target: Path) -> None:
    """Write a file of results; it appears under its name only when it is whole."""
    part = target.with_name(target.name + ".part")
    with closing(client.connect()) as connection:
        answer = client.request(connection, "GET", f"/v1/files/{file_id}/content")
        try:
            with part.open("wb") as file:
                while data := answer.read(COPY_BYTES):
                    file.write(data)
        except (OSError, http.client.HTTPException) as error:
            part.unlink(missing_ok=True)
            raise ServerError(f"the results could not be written to {target}: {error}") from error
    os.replace(part, target)


def _report(batch: dict[str, Any], output: Path) -> int:
    counts = batch["request_counts"]
    for error in (batch["errors"] or {}).get("data", ()):
        line = "" if error["line"] is None else f"line {error['line']}: "
        print(f"{line}{error['message']} ({error['code']})", file=sys.stderr)
    print(f"{batch['status']}: {counts['completed']} answered, {counts['failed']} failed, {counts['total']} in all")
    if batch["error_file_id"] is not None:
        print(f"the failed lines are in {output}.errors", file=sys.stderr)
    return 0 if batch["status"] == "completed" and not counts["failed"] else EXIT_FAILED


def _list(client: ApiClient, limit: int, *, as_json: bool) -> None:
    found = client.call("GET", f"/v1/batches?limit={limit}")
    if as_json:
        print(json.dumps(found))
        return
    for batch in found["data"]:
        counts = batch["request_counts"]
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(batch["created_at"]))
        done = counts["completed"] + counts["failed"]
        print(f"{batch['id']}  {made}  {batch['status']:11}  {done}/{counts['total']}  {counts['failed']} failed")
        if batch.get("paused"):
            print(f"  paused: {batch['paused']}")
