"""`dynamo drain`: take a worker out of service and wait until it may be deleted, as a preStop hook does."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from dynamo.cli.api_client import ApiClient, ServerError
from dynamo.cli.usage import UsageError
from dynamo.runtime.base.addresses import LOOPBACK
from dynamo.runtime.base.settings import SystemSettings
from dynamo.settings.command import CommandParser
from dynamo.settings.flags import add_flags
from dynamo.settings.readers import off_at_zero, placeholder, seconds, switch, text
from dynamo.settings.table import read_settings, setting, settings_of

EXIT_DONE: Final = 0
EXIT_NOT_IN_TIME: Final = 1
EXIT_UNREACHABLE: Final = 2
POLL_SECONDS: Final = 0.25

_WHERE: Final = "a worker takes this at its DYN_ADMIN_PORT, or at DYN_SYSTEM_PORT while that is bound to loopback"
_DESCRIPTION: Final = "Take a worker out of service, and wait until it can be deleted without a loss."
_EPILOG: Final = """\
The worker leaves discovery, serves what still comes for a moment, declines requests from then on, and runs those that it has to
their end. Nothing is cut, and the process goes on: end it afterwards.

exit status:
  0  the worker is safe to delete; with --resume: it serves again
  1  requests were still running after --timeout: the worker stays drained of new ones
  2  the worker cannot be reached or refuses (also: a mistake in the command line)

example:
  dynamo drain --url http://127.0.0.1:9090 --timeout 600 && kill PID
  as a preStop hook, where DYN_ADMIN_PORT is set: command [dynamo, drain, --timeout, "600"]
"""


@dataclass(frozen=True, slots=True)
class DrainFlags:
    """The worker, and how long to wait for it."""

    # fmt: off
    url: str = setting("", None, placeholder("URL", text), "The worker's status server, or its admin port", flag="--url",
        shown="this machine, at `DYN_ADMIN_PORT` or `DYN_SYSTEM_PORT`")
    timeout_seconds: float | None = setting(None, None, off_at_zero(seconds()), "Longest wait for the requests that run; 0: no limit",
        flag="--timeout", dest="timeout_seconds")
    resume: bool = setting(False, None, switch, "Have a drained worker serve again", flag="--resume", negative="")
    # fmt: on


def build_parser(env: Mapping[str, str]) -> CommandParser:
    """Make the parser of this command."""
    parser = CommandParser("dynamo drain", description=_DESCRIPTION, epilog=_EPILOG)
    add_flags(parser, (made for _, made in settings_of(DrainFlags)), env)
    return parser


def main(argv: list[str]) -> int:
    """Drain or resume one worker; return the exit status. Raises UsageError where no worker is named."""
    flags = read_settings(DrainFlags, os.environ, vars(build_parser(os.environ).parse_args(argv)))
    client = ApiClient(flags.url or url_of_this_machine(os.environ), None)
    try:
        if flags.resume:
            client.call("POST", "/engine/resume", {})
            print("the worker serves again")
            return EXIT_DONE
        return _wait(client, client.call("POST", "/engine/drain", {}), flags.timeout_seconds)
    except ServerError as error:
        hint = f"; {_WHERE}" if error.status == HTTPStatus.NOT_FOUND else ""
        print(f"dynamo drain: {error}{hint}", file=sys.stderr)
        return EXIT_UNREACHABLE


def url_of_this_machine(env: Mapping[str, str]) -> str:
    """Return where the environment has the admin routes of a worker. Raises UsageError where it has none."""
    settings = read_settings(SystemSettings, env)
    port = settings.admin_port or settings.port
    if port <= 0:
        raise UsageError("which worker? Name it with --url, or set DYN_ADMIN_PORT or DYN_SYSTEM_PORT as it has them")
    return f"http://{LOOPBACK}:{port}"


def _wait(client: ApiClient, status: Mapping[str, Any], timeout_seconds: float | None) -> int:
    ends_at = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    shown = ""
    while not status["safe_to_delete"]:
        if status["state"] not in ("draining", "drained"):
            raise ServerError(f"the worker is {status['state']}")
        line = _running(status)
        if line != shown:
            print(shown := line, flush=True)
        if ends_at is not None and time.monotonic() >= ends_at:
            print(f"dynamo drain: not safe to delete after {timeout_seconds:g} s: {line}", file=sys.stderr)
            return EXIT_NOT_IN_TIME
        time.sleep(POLL_SECONDS)
        status = client.call("GET", "/engine/status")
    print("the worker is safe to delete")
    return EXIT_DONE


def _running(status: Mapping[str, Any]) -> str:
    count = status["inflight_requests"]
    if not count and status["kv_transfers"] in ("pending", "unknown"):
        return f"no request runs; transfers from its memory: {status['kv_transfers']}"
    return {0: "no request runs", 1: "1 request runs"}.get(count, f"{count} requests run")
