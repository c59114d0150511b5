"""`dynamo size`: its searches, profiles and reports, and the errors of its command line."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo.cli.main import main as dynamo
from dynamo.cli.size.options import read_options
from dynamo.cli.size.profile import BUILT_IN, CurveTiming, Profile, profile_text, read_profile
from dynamo.cli.size.search import Bench, SizePlan, fewest
from dynamo.cli.size.trial import Goal, ReplicaLayout, Trial, run_trial
from dynamo.mocker.timing import PolynomialTiming
from support.cases import each_case

LOAD = ["--rate", "40", "--input-tokens", "1000", "--output-tokens", "20", "--requests", "60", "--seeds", "0"]
TARGET = ["--ttft", "p95:150", "--itl", "20"]
FORMULAS = PolynomialTiming()
LENGTHS = (1, 16, 256, 1024, 4096, 8192)


def measured() -> Profile:
    """Return what a perfect measurement of the mocker would write."""
    points = [(count, context) for count in (1, 8, 64) for context in (128, 1024, 4096)]
    capacity = BUILT_IN.kv_blocks * BUILT_IN.block_size
    return msgspec.structs.replace(
        BUILT_IN,
        times="measured",
        prefill=tuple((tokens, FORMULAS.prefill_ms(1, tokens, 0)) for tokens in LENGTHS),
        decode=tuple((n, c, FORMULAS.decode_ms(n * c, c, capacity)) for n, c in points),
    )


# -- the search --------------------------------------------------------------------------------------------------------------


def test_the_fewest_are_found_from_any_guess_and_in_few_steps() -> None:
    for most in (1, 2, 7, 64):
        for needed in range(1, most + 2):
            for guess in (0, 1, 3, most, 3 * most):
                tried: list[int] = []

                def meets(count: int, needed: int = needed, tried: list[int] = tried) -> bool:
                    tried.append(count)
                    return count >= needed

                assert fewest(meets, guess, most) == (needed if needed <= most else None)
                assert len(tried) == len(set(tried)) <= 2 * most.bit_length() + 2, (most, needed, guess)
                assert all(1 <= count <= most for count in tried)


def test_one_replica_less_misses_the_target_and_one_more_holds_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    assert dynamo(["size", *TARGET, *LOAD, "--json", str(file)]) == 0
    shown = capsys.readouterr()
    found = json.loads(file.read_text())
    best = found["recommendation"]
    assert best["workers"] == best["replicas"] > 1
    alike = {
        row["replicas"]: row
        for row in found["rows"]
        if (row["layout"]["mode"], row["layout"]["kv_blocks"]) == ("kv", 16384) and row["layout"].get("workers")
    }
    fewer, exact, more = (alike[best["replicas"] + step] for step in (-1, 0, 1))
    assert (fewer["meets"], exact["meets"], more["meets"]) == (False, True, True)
    assert fewer["holds_to"] < 1 <= exact["holds_to"] < more["holds_to"]
    assert fewer["margin"] < 0 <= exact["margin"] < more["margin"]
    assert exact["is_best"]
    assert f"{best['replicas']} replicas, all alike" in shown.out
    assert f"{best['replicas']} alike, 16384 blocks, kv: TTFT p95" in shown.err
    splits = [row for row in found["rows"] if row["layout"].get("prefill")]
    assert any(row["meets"] for row in splits)
    assert min(row["replicas"] for row in splits if row["meets"]) >= best["replicas"]
    assert found["smallest_kv_blocks"] <= 16384


def test_a_split_is_recommended_where_prompts_would_stop_answers_too_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    load = ["--rate", "8", "--input-tokens", "4000", "--output-tokens", "60", "--requests", "40", "--seeds", "0"]
    assert dynamo(["size", "--itl", "p99:30", *load, "--max-replicas", "3", "--json", str(file)]) == 0
    best = json.loads(file.read_text())["recommendation"]
    assert (best["prefill"], best["decode"]) == (1, 1)
    assert "2 replicas: 1 prefill and 1 decode workers." in capsys.readouterr().out


def test_where_nothing_meets_the_target_the_nearest_is_shown_and_the_status_is_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert dynamo(["size", "--ttft", "1", *LOAD, "--max-replicas", "3", "--no-split"]) == 1
    shown = capsys.readouterr().out
    assert "Nothing up to 3 replicas meets the target." in shown
    assert "No split: splits were left out (--no-split)." in shown
    assert "3 alike" in shown


def test_an_endless_queue_is_no_success_however_short_the_trace() -> None:
    plan = _plan(["--ttft", "p95:60000", *LOAD])
    found = run_trial(Trial(plan.profile, plan.demand, ReplicaLayout("kv", 16384, workers=1), 0, load=8.0))
    assert found.latencies["ttft"]["p95"] < 60_000
    assert found.kept_up < 0.9
    assert not found.meets(plan.goals)


def test_a_burst_is_judged_by_its_times_alone(tmp_path: Path) -> None:
    trace = tmp_path / "burst.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 100, "output_length": 50}\n' * 40)
    plan = _plan(["--ttft", "400", "--itl", "50", "--trace", str(trace)])
    found = run_trial(Trial(plan.profile, plan.demand, ReplicaLayout("kv", 16384, workers=1), 0))
    assert (found.trace_seconds, found.kept_up) == (0, 1)
    assert found.meets(plan.goals)


def test_a_prompt_larger_than_the_cache_is_never_a_success() -> None:
    plan = _plan(["--ttft", "p95:60000", *LOAD])
    found = run_trial(Trial(plan.profile, plan.demand, ReplicaLayout("kv", 8, workers=4), 0))
    assert found.unserved == found.requests
    assert not found.meets(plan.goals)


def test_a_trace_takes_the_place_of_the_sketch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 40 * n, "input_length": 600, "output_length": 8, "hash_ids": [0, n]} for n in range(1, 40)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    file = tmp_path / "figures.json"
    given = ["size", "--ttft", "p95:100", "--trace", str(trace), "--speedup", "2", "--json", str(file)]
    assert dynamo([*given, "--max-replicas", "4", "--seeds", "0"]) == 0
    found = json.loads(file.read_text())
    assert found["requests"] == 39
    assert "2 times as fast" in found["load"]
    assert max(row["found"]["hit_rate"] for row in found["rows"]) > 0.5
    lines[5] |= {"session_id": "s"}
    lines[9] |= {"session_id": "s", "delay": 5}
    turns = tmp_path / "turns.jsonl"
    turns.write_text("\n".join(map(json.dumps, lines)))
    assert dynamo(["size", "--ttft", "p95:100", "--trace", str(turns), "--max-replicas", "4", "--seeds", "0"]) == 0
    assert "No split: request line-10 waits for the answer before it" in capsys.readouterr().out


def _plan(argv: list[str]) -> SizePlan:
    work = read_options(argv).work
    assert isinstance(work, SizePlan)
    return work


# -- the profile -------------------------------------------------------------------------------------------------------------


def test_a_curve_gives_its_points_lines_between_them_and_reports_what_lies_far_out() -> None:
    timing = CurveTiming(
        msgspec.structs.replace(
            BUILT_IN,
            times="measured",
            prefill=((100, 10.0), (1100, 30.0)),
            decode=((1, 100, 5.0), (1, 300, 7.0), (11, 100, 15.0)),
        )
    )
    assert [timing.prefill_ms(1, tokens, 0) for tokens in (1, 100, 600, 1100)] == [10, 10, 20, 30]
    assert timing.prefill_ms(2, 400, 100) == 20
    assert timing.decode_ms(100, 100, 1) == 5
    assert timing.decode_ms(200, 200, 1) == 6
    assert timing.decode_ms(600, 100, 1) == 10
    assert timing.decode_ms(11 * 300, 300, 1) == 15 + 11 * 2  # eleven sequences read eleven times as much more
    assert not timing.is_beyond
    assert timing.prefill_ms(1, 1600, 0) == 40
    assert timing.is_beyond


def test_a_measured_mocker_is_sized_as_the_built_in_one(tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    file.write_text(profile_text(measured()))
    assert read_profile(str(file)) == measured()
    plan = _plan([*TARGET, *LOAD])
    layout = ReplicaLayout("kv", 16384, workers=3)
    built_in, own = (run_trial(Trial(p, plan.demand, layout, 0)) for p in (plan.profile, measured()))
    for latency in ("ttft", "itl"):
        assert own.latencies[latency]["mean"] == pytest.approx(built_in.latencies[latency]["mean"], rel=0.05)


def test_the_overhead_is_added_to_the_first_token_only() -> None:
    plan = _plan([*TARGET, *LOAD])
    slow = msgspec.structs.replace(plan.profile, overhead_ms=7.5)
    without, within = (
        run_trial(Trial(p, plan.demand, ReplicaLayout("kv", 16384, workers=3), 0)) for p in (plan.profile, slow)
    )
    assert within.latencies["ttft"]["p99"] == without.latencies["ttft"]["p99"] + 7.5
    assert within.latencies["itl"] == without.latencies["itl"]


def test_a_margin_is_that_of_the_tightest_bound() -> None:
    plan = _plan([*TARGET, *LOAD])
    found = run_trial(Trial(plan.profile, plan.demand, ReplicaLayout("kv", 16384, workers=3), 0))
    mean = found.latencies["ttft"]["mean"]
    goals = (Goal("ttft", "mean", 2 * mean), Goal("itl", "p99", 1e6))
    assert found.margin(goals) == pytest.approx(0.5)
    assert not found.meets((*goals, Goal("ttft", "mean", mean / 2)))


# -- the command line --------------------------------------------------------------------------------------------------------

_FINE = ["--ttft", "100", "--rate", "1"]
_SIZES = '"kv_blocks": 9, "block_size": 16, "max_batched_tokens": 64, "max_sequences": 4}'


@each_case(
    ("argv", "profile", "said"),
    [
        (["--rate", "1"], "", "no target; give --ttft, --itl"),
        (["--ttft", "p95:100"], "", "no load; give --rate, or --trace"),
        (["--ttft", "p42:100", "--rate", "1"], "", "--ttft"),
        ([*_FINE, "--shared-prefix-tokens", "512"], "", "--shared-prefix-tokens must be less"),
        ([*_FINE, "--prefix-groups", "2"], "", "--prefix-groups needs"),
        ([*_FINE, "--trace", "x.jsonl"], "", "leave --rate out"),
        ([*_FINE, "--speedup", "2"], "", "--speedup belongs to --trace"),
        (["--ttft", "100", "--trace", "missing.jsonl"], "", "--trace: cannot read missing.jsonl"),
        ([*_FINE, "--router-mode", "fastest"], "", "--router-mode: there is no mode 'fastest'"),
        ([*_FINE, "--profile", "missing.json"], "", "--profile: cannot read missing.json"),
        ([*_FINE, "--out", "x.json"], "", "--out and --model belong to --measure"),
        (["--measure", "http://127.0.0.1:1"], "", "--measure needs --out"),
        ([*_FINE, "--measure", "http://127.0.0.1:1", "--out", "x.json"], "", "--measure only measures"),
        (_FINE, "{", "--profile: "),
        (_FINE, '{"name": "e", "times": "measured", ' + _SIZES, "needs both curves"),
        (_FINE, '{"name": "e", "times": "mocker", "kv_block": 1, ' + _SIZES, "unknown field `kv_block`"),
        (
            _FINE,
            '{"name": "e", "times": "measured", "prefill": [[9, 1], [9, 2]], "decode": [[1, 1, 1]], ' + _SIZES,
            "prefill: the rows must rise",
        ),
        (
            _FINE,
            '{"name": "e", "times": "measured", "prefill": [[9, 1]], "decode": [[1, 1, 0]], ' + _SIZES,
            "decode: every value must be above 0",
        ),
    ],
)
def test_an_error_of_use_is_one_line_that_names_the_flag(
    argv: list[str], profile: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if profile:
        file = tmp_path / "engine.json"
        file.write_text(profile)
        argv = [*argv, "--profile", str(file)]
    try:
        status = dynamo(["size", *argv])
    except SystemExit as left:  # argparse's way
        status = int(str(left.code))
    assert status == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_bench_reports_every_layout_once() -> None:
    from concurrent.futures import ThreadPoolExecutor

    lines: list[str] = []
    with ThreadPoolExecutor(1) as executor:
        bench = Bench(_plan([*TARGET, *LOAD]), executor, lines.append)
        assert bench.found(ReplicaLayout("kv", 16384, workers=3)) is bench.found(ReplicaLayout("kv", 16384, workers=3))
    assert bench.trials == len(lines) == 1


# -- measuring -----------------------------------------------------------------------------------------------------------------


class _Server(BaseHTTPRequestHandler):
    """Lists one model and answers completions with as many tokens as they may have; it has the metrics it is given."""

    protocol_version = "HTTP/1.1"
    metrics = ""
    step_seconds = 0.001

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._answer(b'{"data": [{"id": "Own-Model"}]}')
        elif self.metrics:
            self._answer(self.metrics.encode())
        else:
            self._answer(b"no such page", 404)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = asked["max_tokens"]
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": count}
        events = [{"choices": [{"text": "a"}]}] * count + [{"choices": [], "usage": usage}]
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        written = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events] + [b"data: [DONE]\n\n"]
        if not self.step_seconds:
            written = [b"".join(written)]
        for part in written:
            self.wfile.write(part)
            time.sleep(self.step_seconds)  # what a step of this engine takes
        self.close_connection = True

    def _answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent."""


def _measure(tmp_path: Path, metrics: str, *flags: str, step_seconds: float = 0.001) -> tuple[int, Path]:
    handler = type("_Own", (_Server,), {"metrics": metrics, "step_seconds": step_seconds})
    out = tmp_path / "engine.json"
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            return dynamo(["size", "--measure", url, "--out", str(out), *flags]), out
        finally:
            server.shutdown()


def _gauges(workers: int) -> str:
    names = {"total_kv_blocks": 200, "kv_cache_block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 512}
    lines = [f'dynamo_frontend_model_{name}{{model="own-model"}} {value}' for name, value in names.items()]
    lines.append(f'dynamo_frontend_model_workers{{model="own-model",worker_type="agg"}} {workers}')
    return "\n".join(lines) + "\n"


def test_a_measurement_is_a_profile_with_the_sizes_of_the_server_and_two_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = _measure(tmp_path, _gauges(1))
    assert status == 0, capsys.readouterr().err
    profile = read_profile(str(out))
    assert (profile.name, profile.kv_blocks, profile.block_size) == ("Own-Model", 200, 16)
    assert (profile.max_sequences, profile.max_batched_tokens) == (4, 512)
    assert [row[0] for row in profile.prefill] == [32, 256, 512]
    assert {row[:2] for row in profile.decode} == {(1, 152), (1, 1048), (1, 2520), (4, 152), (4, 600)}
    assert "prompt of 512 tokens: " in capsys.readouterr().err


def test_what_a_server_does_not_report_is_named_with_its_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _ = _measure(tmp_path, "", "--block-size", "16")
    assert status == 2
    assert "does not report dynamo_frontend_model_total_kv_blocks; give --kv-blocks" in capsys.readouterr().err


def test_tokens_that_come_in_heaps_are_no_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = _measure(tmp_path, _gauges(1), step_seconds=0.0)
    assert status == 1
    assert "sends its tokens in heaps" in capsys.readouterr().err
    assert not out.exists()


def test_several_workers_are_no_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = _measure(tmp_path, _gauges(3))
    assert status == 1
    assert "has 3 workers of Own-Model; a profile is that of one replica" in capsys.readouterr().err
    assert not out.exists()
