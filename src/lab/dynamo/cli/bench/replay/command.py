"""`dynamo bench replay`: read the command line, replay, report."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from dynamo.cli.bench.connections import Prepared
from dynamo.cli.bench.load import Load
from dynamo.cli.bench.replay.jobs import Replayed, replay_all, trace_of
from dynamo.cli.bench.replay.options import LiveTarget, ReplayOptions, read_options
from dynamo.cli.bench.replay.report import HEAD, PresetReport, as_json, comparison_svg, replay_html, reports_of
from dynamo.cli.bench.samples import Recorder, SampleHistogram
from dynamo.cli.bench.schedule import Shape
from dynamo.cli.bench.targets import ENDPOINT_PATHS, Target
from dynamo.cli.console import Console
from dynamo.cli.usage import UsageError
from dynamo.replay.mooncake import write_mooncake
from dynamo.replay.trace import Trace, prompt_token_ids

# The same trace against a server: its prompts as token ids, at its times.


CONNECTIONS: Final = 4096  # an open loop: as many as it takes


def replay_live(trace: Trace, target: Target, model: str, speedup: float) -> Mapping[str, float]:
    """Send every request of the trace at its time; return the figures under the names of a replay's report.

    The server counts reused tokens as `usage.prompt_tokens_details.cached_tokens`. Turns with a delay are sent at their
    timestamp.
    """
    begin = trace.requests[0].arrival_ms
    times = tuple((request.arrival_ms - begin) / 1000 / speedup for request in trace.requests)

    def source(number: int, index: int) -> Prepared:
        request = trace.requests[number]
        body = {
            "model": model,
            "prompt": prompt_token_ids(request).tolist(),
            "max_tokens": request.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        return Prepared(target.post(ENDPOINT_PATHS["completions"], body), True)

    recorder = Recorder()
    asyncio.run(Load([target], source, Shape(CONNECTIONS, times=times), recorder).run())
    return _figures(recorder)


def _figures(recorder: Recorder) -> Mapping[str, float]:
    figures = {
        "requests": float(recorder.sent),
        "finished": float(recorder.answered),
        "failed": float(recorder.failed),
        "prefix_cache_reused_ratio": recorder.cached_tokens / max(1, recorder.input_tokens),
        "duration_ms": 1000 * recorder.seconds,
        "p99_late_ms": 1000 * recorder.late.quantile(0.99),
    }
    for latency, samples in (
        ("ttft", recorder.first_token),
        ("tpot", recorder.per_token),
        ("itl", recorder.gap),
        ("e2e_latency", recorder.whole),
    ):
        figures.update(_summary(latency, samples))
    return figures


def _summary(latency: str, samples: SampleHistogram) -> Mapping[str, float]:
    quantiles = {"median": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99}
    return {
        f"mean_{latency}_ms": 1000 * samples.mean,
        **{f"{name}_{latency}_ms": 1000 * samples.quantile(q) for name, q in quantiles.items()},
    }


EXIT_MISSED: Final = 1


def main(argv: list[str]) -> int:
    """Replay; the exit status."""
    options = read_options(argv)
    console = Console()
    if options.trace_out is not None:
        trace = trace_of(options, options.presets[0], options.seeds[0])
        _write(options.trace_out.path, write_mooncake(trace, block_tokens=options.trace_out.block_tokens), console)
        return 0
    cpu, started = time.process_time(), time.monotonic()
    replayed = list(replay_all(options, argv))
    seconds, cpu = time.monotonic() - started, time.process_time() - cpu
    reports = reports_of(options.presets, replayed)
    if options.live is not None:
        _add_live(reports[0], options, options.live)
    for report in reports:
        _show(report, options, console)
    requests = sum(len(figures.requests) for each in replayed for figures in each.figures)
    console.say(f"\n{requests:,} requests in {seconds:.1f} s ({requests / seconds:,.0f} per second)")
    _write_files(options, reports, argv, cpu, console)
    missed = any(not bar.holds for report in reports for bar in report.bars())
    return EXIT_MISSED if options.is_strict and missed else 0


def _add_live(report: PresetReport, options: ReplayOptions, live: LiveTarget) -> None:
    """Send the preset's trace to a server, at the same times."""
    setup = report.preset.setup
    if setup.concurrency is not None:
        raise UsageError("--live sends requests at their times; leave --concurrency out")
    trace = trace_of(options, report.preset, options.seeds[0])
    figures = replay_live(trace, live.target, live.model, setup.arrival_speedup_ratio)
    pooled = next(iter(report.rows.values()))["pooled_hit_rate"]
    by_pooled = figures["prefix_cache_reused_ratio"] / pooled if pooled else 0.0
    report.rows["live"] = {**figures, "hit_rate_by_pooled": by_pooled}


def _show(report: PresetReport, options: ReplayOptions, console: Console) -> None:
    seeds = f"{len(options.seeds)} seeds" if len(options.seeds) > 1 else f"seed {options.seeds[0]}"
    pooled = next(iter(report.rows.values()))["pooled_hit_rate"]
    console.say("")
    console.say(f"{report.preset.name}: {report.preset.what}", strong=True)
    console.say(f"{seeds}; the pooled cache reuses {pooled:.3f}; workers compute prompts {report.busy:.0%} of the time")
    console.table(HEAD, report.table())
    for line in (*report.remarks(), *map(str, report.bars())):
        console.say(line)


def _write_files(
    options: ReplayOptions, reports: list[PresetReport], argv: list[str], cpu: float, console: Console
) -> None:
    if options.json_file is not None:
        _write(options.json_file, [json.dumps(as_json(reports, argv, cpu), indent=1), "\n"], console)
    if options.requests_file is not None:
        _write(options.requests_file, _request_lines(reports), console)
    if options.svg_file is not None or options.html_file is not None:
        if options.svg_file is not None:
            _write(options.svg_file, [comparison_svg(reports)], console)
        if options.html_file is not None:
            _write(options.html_file, [replay_html(reports)], console)


def _request_lines(reports: Iterable[PresetReport]) -> Iterable[str]:
    for report in reports:
        for each in report.replayed:
            yield from _lines_of(report.preset.name, each)


def _lines_of(preset: str, replayed: Replayed) -> Iterable[str]:
    for figures in replayed.figures:
        head = {"preset": preset, "seed": replayed.seed, "mode": figures.mode}
        for request in figures.requests:
            yield json.dumps({**head, **msgspec.structs.asdict(request)}) + "\n"


def _write(path: Path, lines: Iterable[str], console: Console) -> None:
    try:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(lines)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    console.say(f"wrote {path}")
