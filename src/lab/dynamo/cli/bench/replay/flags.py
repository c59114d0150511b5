"""The flags of `dynamo bench replay`: one table, from which come its command line and the settings page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamo.replay.mooncake import TRACE_BLOCK_TOKENS
from dynamo.settings.readers import (
    SettingReader,
    above_zero,
    each,
    integer,
    new_file,
    number,
    path,
    placeholder,
    switch,
    text,
)
from dynamo.settings.table import setting

MAX_JOBS: Final = 256
MAX_SEEDS: Final = 1000


def _seeds(given: str) -> tuple[int, ...]:
    found: list[int] = []
    try:
        for part in given.split(","):
            first, dash, last = part.partition("-")
            found += range(int(first), min(int(last if dash else first), int(first) + MAX_SEEDS) + 1)
    except ValueError:
        found = []
    if not 1 <= len(found) <= MAX_SEEDS:
        raise ValueError(f"{given!r} is not a list of at most {MAX_SEEDS} seeds such as 0-4 or 1,5,9")
    return tuple(found)


_seed_list: Final = SettingReader(_seeds, show=lambda value: ",".join(map(str, value)), metavar="SEEDS")


@dataclass(frozen=True, slots=True)
class ReplayFlags:
    """What to replay, and what to write, by the command line."""

    # fmt: off
    mode: tuple[str, ...] = setting((), None, each(placeholder("MODE", text)),
        "What to compare; repeated, all of them", flag="--mode", repeats=True, shown="those of the preset")
    seeds: tuple[int, ...] = setting((0,), None, _seed_list, "As `0-4` or `1,5,9`: figures are means", flag="--seeds")
    requests: int | None = setting(None, None, integer(1, 10_000_000), "So many", flag="--requests",
        shown="those of the preset, 2,000 mostly")
    jobs: int = setting(1, None, integer(1, MAX_JOBS), "Processes that share the replays", flag="--jobs")
    workers: int | None = setting(None, None, integer(1, 4096), "Simulated workers", flag="--workers",
        shown="presets: 8, mooncake 4")
    gpu_blocks: int | None = setting(None, None, integer(1, 10_000_000), "KV blocks of each worker",
        flag="--gpu-blocks", shown="presets: 24 prompts")
    block_size: int | None = setting(None, None, integer(1, 4096), "Tokens of a KV block", flag="--block-size",
        shown="presets: 16, mooncake 64")
    speedup: float | None = setting(None, None, above_zero(metavar="R"), "The trace, so many times as fast",
        flag="--speedup")
    concurrency: int | None = setting(None, None, integer(1, 100_000),
        "So many requests in flight, whatever the trace's times", flag="--concurrency")
    frontends: int | None = setting(None, None, integer(1, 64), "Each with a router of its own", flag="--frontends")
    replica_sync_ms: float | None = setting(None, None, above_zero(unit="ms", metavar="MS"),
        "Until other frontends know of a booking", flag="--replica-sync-ms", shown="1")
    kv_event_lag_ms: float | None = setting(None, None, number(0, unit="ms", metavar="MS"),
        "Until routers have a worker's KV events", flag="--kv-event-lag-ms", shown="0")
    event_loss: float | None = setting(None, None, number(0, 1, metavar="SHARE"),
        "Share of the KV events that never arrive, such as 0.05", flag="--event-loss")
    trace: Path | None = setting(None, None, path, "Replay a trace in Mooncake's JSONL", flag="--trace")
    trace_block_tokens: int = setting(TRACE_BLOCK_TOKENS, None, integer(1, 1_000_000),
        "Tokens that one of its `hash_ids` stands for", flag="--trace-block-tokens")
    write_trace: Path | None = setting(None, None, new_file,
        "Write the preset's trace as JSONL, and replay nothing", flag="--write-trace")
    live: str | None = setting(None, None, placeholder("URL", text),
        "Send the trace to an OpenAI-compatible server, too; its figures are one more row", flag="--live")
    model: str | None = setting(None, None, placeholder("NAME", text), "With `--live`: what to ask for",
        flag="--model")
    json: Path | None = setting(None, None, new_file, "Every figure of every replay", flag="--json")
    html: Path | None = setting(None, None, new_file, "Tables and plots as one page", flag="--html")
    svg: Path | None = setting(None, None, new_file, "The comparison as a plot", flag="--svg")
    per_request: Path | None = setting(None, None, new_file, "A line of JSON for every request of every replay",
        flag="--per-request")
    no_cpu: bool = setting(False, None, switch, "Do not measure what a routing decision costs", flag="--no-cpu",
        negative="")
    strict: bool = setting(False, None, switch, "Exit status 1 when a bar is missed", flag="--strict", negative="")
    # fmt: on
