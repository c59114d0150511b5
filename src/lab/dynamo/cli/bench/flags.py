"""The flags of `dynamo bench`: one table, from which come its command line and the settings page."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynamo.cli.bench.prompts import Length
from dynamo.cli.bench.targets import ENDPOINT_PATHS, header_from
from dynamo.settings.readers import (
    SettingReader,
    above_zero,
    each,
    integer,
    new_file,
    one_of,
    path,
    placeholder,
    switch,
    text,
)
from dynamo.settings.table import setting

DEFAULT_CONCURRENCY: Final = 16
DEFAULT_SECONDS: Final = 30.0
MAX_CONNECTIONS: Final = 60_000  # there are no more ports to one address
OPEN_LOOP_CONNECTIONS: Final = 4096


def _json_object(given: str) -> dict[str, Any]:
    try:
        found = json.loads(given)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError('not a JSON object; use one such as {"temperature": 0}')
    return found


_connections: Final = integer(1, MAX_CONNECTIONS)
_length: Final = SettingReader(Length.of, metavar="N|MEAN,STDDEV")
_header: Final = SettingReader(header_from, show=lambda value: str(value[0]), metavar="'NAME: VALUE'")
_body: Final = SettingReader(_json_object, show=json.dumps, metavar="JSON")


@dataclass(frozen=True, slots=True)
class BenchFlags:
    """What to send, and what to write, by the command line."""

    # fmt: off
    concurrency: int | None = setting(None, None, _connections, "Closed loop: how many send at once",
        flag="--concurrency", shown=str(DEFAULT_CONCURRENCY))
    rate: float | None = setting(None, None, above_zero(1e9, metavar="R"),
        "Open loop: requests per second, a Poisson process", flag="--rate")
    constant: bool = setting(False, None, switch, "With `--rate`: the same time between requests", flag="--constant",
        negative="")
    max_connections: int | None = setting(None, None, _connections,
        "With `--rate`: connections at once; more requests wait", flag="--max-connections",
        shown=str(OPEN_LOOP_CONNECTIONS))
    requests: int | None = setting(None, None, integer(1, 10**12), "Stop after so many", flag="--requests")
    duration: float | None = setting(None, None, above_zero(1e9, unit="s", metavar="S"),
        "Send for so long; no limit by default when `--requests` is given", flag="--duration",
        shown=f"{DEFAULT_SECONDS:g}")
    warmup: int = setting(0, None, integer(0, 10**6), "Requests before, not reported", flag="--warmup")
    timeout_seconds: float = setting(600.0, None, above_zero(1e9, unit="s", metavar="S"),
        "Until a request is given up", flag="--timeout")
    model: tuple[str, ...] = setting((), None, each(placeholder("NAME", text)),
        "The model; repeated, they take turns", flag="--model", repeats=True, shown="the first that the server lists")
    endpoint: tuple[str, ...] = setting((), None, each(one_of(*ENDPOINT_PATHS)),
        f"{' or '.join(f'`{name}`' for name in ENDPOINT_PATHS)}; repeated, they take turns", flag="--endpoint",
        repeats=True, shown="chat")
    stream: bool = setting(True, None, switch, "Stream the answers", flag="--stream")
    input_tokens: Length | None = setting(None, None, _length,
        "Length of generated prompts: `N`, or `MEAN,STDDEV`", flag="--input-tokens", shown="128")
    output_tokens: Length = setting(Length(128), None, _length, "`max_tokens` of the requests: `N`, or `MEAN,STDDEV`",
        flag="--output-tokens")
    prompts: Path | None = setting(None, None, path, "A file of prompts, one per line; `.jsonl`: objects",
        flag="--prompts")
    shared_prefix_tokens: int = setting(0, None, integer(0, 4_000_000),
        "Generated prompts of a group begin with the same tokens", flag="--shared-prefix-tokens")
    prefix_groups: int = setting(1, None, integer(1, 100_000), "How many such groups", flag="--prefix-groups")
    body: dict[str, Any] | None = setting(None, None, _body, "A JSON object: more members of every request",
        flag="--body")
    header: tuple[tuple[str, str], ...] = setting((), None, each(_header), "One more header; repeated, all of them",
        flag="--header", repeats=True)
    insecure: bool = setting(False, None, switch, "Take any certificate of an https server", flag="--insecure",
        negative="")
    seed: int = setting(0, None, integer(), "Of arrivals, lengths and prompts", flag="--seed")
    json: Path | None = setting(None, None, new_file, "Write the figures to this file", flag="--json")
    html: Path | None = setting(None, None, new_file,
        "Write a report with plots to this file; it needs no network", flag="--html")
    # fmt: on
