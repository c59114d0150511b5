"""The figures of a run as rows of text. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from dynamo.cli.bench.results import BUSY_SHARE, LATENCIES, Results


def figure_rows(results: Results) -> list[tuple[str, str]]:
    """Describe the run, one line per fact."""
    tokens = f"{results['output_tokens_per_second']:,.1f}"
    requests = f"{results['answered']:,} answered, {results['failed']:,} failed"
    if results["unfinished"]:
        requests += f", {results['unfinished']:,} cut by the interruption"
    if results["estimated_answers"]:
        tokens += f" (counted as events for {results['estimated_answers']:,} answers without usage)"
    return [
        ("requests", requests),
        ("time", f"{results['seconds']:.2f} s"),
        ("requests/s", f"{results['requests_per_second']:,.2f}"),
        ("output tokens/s", tokens),
        ("tokens per request", f"{results['mean_input_tokens']:,.1f} in, {results['mean_output_tokens']:,.1f} out"),
        ("connections opened", f"{results['connections']:,}"),
        (
            "load generator",
            f"{100 * results['load_generator_cpu_share']:.1f} % of one core"
            + (f", {results['load_generator_us_per_token']:.1f} us per token" if results["output_tokens"] else ""),
        ),
    ]


def latency_rows(results: Results) -> list[tuple[str, ...]]:
    """Return the rows of the latencies that have samples."""
    return [
        (title, *(f"{latency[key]:,.2f}" for key in ("mean", "p50", "p90", "p99", "max")), f"{latency['samples']:,}")
        for name, (_, title) in LATENCIES.items()
        if (latency := results["latency_ms"][name])["samples"]
    ]


def failure_rows(results: Results) -> list[tuple[str, ...]]:
    """Return the failures by kind, the most frequent first."""
    ended = max(results["answered"] + results["failed"], 1)
    return [
        (failure["kind"], f"{failure['count']:,}", f"{100 * failure['count'] / ended:.1f} %", failure["example"])
        for failure in results["failures"]
    ]


def remarks(results: Results) -> Iterator[str]:
    """Yield what a reader must know before believing the figures."""
    if results["was_interrupted"]:
        yield "Interrupted: these are the figures up to then."
    if results["was_load_generator_the_bottleneck"]:
        yield (
            f"The load generator was the bottleneck: it used {100 * results['load_generator_cpu_share']:.0f} % of one core "
            f"(more than {100 * BUSY_SHARE:.0f} %). The server may be faster than this; run several of them, or send less."
        )
    elif results["late_p99_ms"] > 10:
        yield f"Requests were sent late (p99 {results['late_p99_ms']:.0f} ms): connections or CPU were short here."
