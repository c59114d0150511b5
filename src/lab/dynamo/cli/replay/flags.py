"""The options of `dynamo replay`."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.cli.api_client import ServerFlags
from dynamo.settings.readers import above_zero, integer, placeholder, port, switch, text
from dynamo.settings.table import setting


@dataclass(frozen=True, slots=True)
class ResendFlags(ServerFlags):
    """How recorded requests are sent again, or served."""

    # fmt: off
    serve: bool = setting(False, None, switch, "Answer requests from the recording, without an engine, instead of sending them",
        flag="--serve", negative="")
    speed: float = setting(1.0, None, above_zero(), "How many times as fast as they came", flag="--speed")
    as_fast_as_possible: bool = setting(False, None, switch, "Do not wait for the recorded times",
        flag="--as-fast-as-possible", negative="")
    limit: int | None = setting(None, None, integer(1), "Send so many requests at most", flag="--limit")
    only: str | None = setting(None, None, placeholder("ID", text), "Send one request, by its id or the beginning of it", flag="--only")
    concurrency: int = setting(64, None, integer(1, 4096), "Requests in flight at most; further ones wait, and are late", flag="--concurrency")
    timeout_seconds: float = setting(600.0, None, above_zero(), "How long an answer may take", flag="--timeout")
    json: bool = setting(False, None, switch, "Write the comparison as JSON", flag="--json", negative="")
    http_port: int = setting(8000, "DYN_HTTP_PORT", port, "With `--serve`: the port to listen on", flag="--http-port")
    # fmt: on
